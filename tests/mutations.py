"""Does the suite notice? Each mutation breaks one line of the source in a copy of the tree and runs the tests on it.

    python -m tests.mutations                      all of them: an hour on two cores
    python -m tests.mutations "g sends nothing"    those whose name contains one of the words given

Prints a table of mutation and failed tests, in Markdown. Exits 1 if a mutation survives, if one no longer matches the
source, or if the tests fail without any.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAPER = "tests/planner/test_paper.py"
ESTIMATE = "tests/planner/test_estimate.py"
PARITY = "tests/parity/test_parity.py"
AUDIT = "tests/parity/test_audit.py"
PRECISION = "tests/parity/test_precision.py"
OVERFLOW = "tests/parity/test_overflow.py"
STEP = "tests/train/test_step.py"
SLOW_RANKS = "tests/train/test_slow_ranks.py"
RESTART_POLICY = "tests/launch/test_restart_policy.py"
GPT = "tests/model/test_gpt.py"
COLLECTIVES = "tests/mesh/test_collectives.py"
LINEAR = "tests/tensor_parallel/test_linear.py"
LOSS = "tests/tensor_parallel/test_cross_entropy.py"
EMBEDDING = "tests/tensor_parallel/test_embedding.py"
DROPOUT = "tests/kernels/test_dropout.py"
ATTENTION = "tests/model/test_attention.py"
ATTEND = "tests/kernels/test_attention.py"
SEQUENCE = "tests/model/test_sequence_parallel.py"
MLP = "tests/model/test_mlp.py"
INITIALIZE = "tests/model/test_initialize.py"
BUCKETS = "tests/data_parallel/test_buckets.py"
PARAM_SLICES = "tests/data_parallel/test_param_slices.py"
CLIP = "tests/data_parallel/test_clip.py"
ZERO = "tests/data_parallel/test_zero.py"
CHUNK = "tests/pipeline/test_chunk.py"
RUNNER = "tests/pipeline/test_runner.py"
MAILBOX = "tests/pipeline/test_mailbox.py"
SCHEDULE = "tests/pipeline/test_schedule.py"
SIMULATE = "tests/pipeline/test_simulate.py"
THEORY = "tests/pipeline/test_theory.py"
INFERENCE = "tests/pipeline/test_inference.py"
SAMPLER = "tests/data/test_sampler.py"
ROWS = "tests/data/test_rows.py"
LOADER = "tests/data/test_loader.py"
BERT = "tests/data/test_bert_dataset.py"
SENTENCES = "tests/data/test_sentences.py"
BLEND = "tests/data/test_blended_dataset.py"
DUPLICATES = "tests/corpus/test_duplicates.py"
BLENDED_RUN = "tests/train/test_blended_run.py"
ELASTIC = "tests/train/test_elastic.py"
PERPLEXITY = "tests/evaluation/test_perplexity.py"
WINDOWS = "tests/evaluation/test_windows.py"
SAMPLE = "tests/generation/test_sample.py"
CHOOSE = "tests/generation/test_choose.py"
PLAN = "tests/checkpoint/test_plan.py"
DATASET = "tests/data/test_gpt_dataset.py"
STREAM = "tests/generation/test_stream.py"
PROFILE = "tests/train/test_profile.py"
DRAWING = "tests/drawing/test_scale.py"
PAGE = "tests/report/test_page.py"
TRACKING = "tests/train/test_tracking.py"
UPLOADS = "tests/train/test_uploads.py"
TIME_LIMIT = 900.0


@dataclass(frozen=True)
class Mutation:
    """One line broken, and the test files that should notice."""

    name: str
    file: str
    """Under src/colonnade."""
    old: str
    """Stands in the file exactly once."""
    new: str
    tests: tuple[str, ...]


MUTATIONS = [
    # --- a collective is missing
    Mutation(
        "f sends nothing backward",
        "mesh/collectives.py",
        "copy_to, reduce_from = conjugate_pair(_identity, _all_reduce)",
        "copy_to = _operator(_identity, _identity)\nreduce_from = _operator(_all_reduce, _identity)",
        (PARITY, AUDIT, COLLECTIVES, LINEAR),
    ),
    Mutation(
        "g sends nothing forward",
        "mesh/collectives.py",
        "copy_to, reduce_from = conjugate_pair(_identity, _all_reduce)",
        "copy_to = _operator(_identity, _all_reduce)\nreduce_from = _operator(_identity, _identity)",
        (PARITY, AUDIT, COLLECTIVES, LINEAR),
    ),
    Mutation(
        "g sums gradients as well",
        "mesh/collectives.py",
        "copy_to, reduce_from = conjugate_pair(_identity, _all_reduce)",
        "copy_to = _operator(_identity, _all_reduce)\nreduce_from = _operator(_all_reduce, _all_reduce)",
        (PARITY, AUDIT, COLLECTIVES, LINEAR),
    ),
    Mutation(
        "one unit is not reduced over dp",
        "data_parallel/buckets.py",
        "self._summing = wire, all_reduce_(wire, self.dp)",
        'self._summing = wire, Pending(None) if self.name == "blocks.1" else all_reduce_(wire, self.dp)',
        (PARITY, AUDIT, ZERO),
    ),
    Mutation(
        "reduced after the first micro-batch, not the last",
        "pipeline/runner.py",
        "last = {(action.kind, action.chunk): action for action in mine}",
        "last = {(action.kind, action.chunk): action for action in reversed(mine)}",
        (PARITY, RUNNER),
    ),
    Mutation(
        "the loss's all-gather is missing",
        "tensor_parallel/cross_entropy.py",
        "every = all_gather(torch.stack([local_lse, local_target])[None], tp)",
        "every = torch.stack([local_lse, local_target])[None]",
        (PARITY, AUDIT, LOSS),
    ),
    Mutation(
        "the head's f is missing",
        "tensor_parallel/cross_entropy.py",
        "whole = Parallel(tp, sequence_parallel).enter(hidden)",
        "whole = Parallel(tp, sequence_parallel).enter(hidden) if sequence_parallel else hidden",
        (PARITY, AUDIT, LOSS),
    ),
    # --- the gradient norm
    Mutation(
        "replicated weights are counted tp times in the norm",
        "data_parallel/clip.py",
        "return group.cut or tp.rank == 0",
        "return True",
        (PARITY, CLIP),
    ),
    Mutation(
        "cut weights are counted on tp rank 0 alone",
        "data_parallel/clip.py",
        "return group.cut or tp.rank == 0",
        "return tp.rank == 0",
        (PARITY, CLIP),
    ),
    Mutation(
        "gradients are not clipped",
        "train/step.py",
        "clip_factor(norm, train.gradient_clip)",
        "clip_factor(norm, 0.0)",
        (PARITY, STEP),
    ),
    # --- dropout
    Mutation(
        "hidden dropout differs between tp ranks",
        "train/step.py",
        "train.seed) for batch in microbatches]",
        "train.seed + mesh.tp.rank) for batch in microbatches]",
        (PARITY, STEP),
    ),
    Mutation(
        "every rank's heads drop with the masks of the first heads",
        "model/attention.py",
        "self.heads = range(tp.rank * mine, (tp.rank + 1) * mine)",
        "self.heads = range(mine)",
        (PARITY, GPT, ATTENTION),
    ),
    Mutation(
        "dropout depends on the place in the micro-batch",
        "kernels/dropout.py",
        "keys = stream_keys(self.seed, purpose, layer, last=self.samples)",
        "keys = stream_keys(self.seed, purpose, layer, last=range(len(self.samples)))",
        (PARITY, DROPOUT, STEP),
    ),
    # --- the loss and its labels
    Mutation(
        "the loss is normalised by the rank's own tokens",
        "train/step.py",
        "for batch in microbatches], -1).sum(-1), mesh.reduce)",
        "for batch in microbatches], -1).sum(-1), mesh.pp)",
        (PARITY, AUDIT),
    ),
    Mutation(
        "both losses of a masked model are divided by the masked tokens",
        "tasks/bert.py",
        "batch.pair_mask.double() * weights[1]",
        "batch.pair_mask.double() * weights[0]",
        ("tests/tasks/test_bert.py",),
    ),
    Mutation(
        "padding counts among the masked tokens",
        "tasks/bert.py",
        "torch.stack([batch.loss_mask.sum().double(),",
        "torch.stack([(~batch.real + batch.loss_mask).sum().double(),",
        ("tests/tasks/test_bert.py",),
    ),
    Mutation(
        "padding is seen",
        "model/bert.py",
        "return Pairs(self.documents, self.real)",
        "return Pairs(self.documents)",
        ("tests/model/test_bert.py",),
    ),
    Mutation(
        "token types are ignored",
        "model/stack.py",
        "x = self.types(x, inputs.types[mine])",
        "x = self.types(x, 0 * inputs.types[mine])",
        ("tests/model/test_bert.py",),
    ),
    Mutation(
        "token types are those of the sequence's beginning on every rank",
        "model/stack.py",
        "x = self.types(x, inputs.types[mine])",
        "x = self.types(x, inputs.types[: len(x)])",
        (PARITY,),
    ),
    Mutation(
        "the order of texts is learned from every rank's first position",
        "model/bert.py",
        "weights = inputs.pair_weights if first_rank else",
        "weights = inputs.pair_weights if len(x) else",
        (PARITY,),
    ),
    Mutation(
        "the loss of the order of texts stays on the first rank",
        "model/bert.py",
        "return masked, reduce_from(order, self.parallel.tp) if self.parallel.sequence_parallel else order",
        "return masked, order",
        (PARITY,),
    ),
    Mutation(
        "the output bias learns from this rank's probabilities as if they were all",
        "tensor_parallel/cross_entropy.py",
        "gradient.addmv_(found.probabilities.t(), found.fraction * found.slope)",
        "gradient.addmv_(found.probabilities.t(), found.slope)",
        (PARITY,),
    ),
    Mutation(
        "the output bias does not learn its labels",
        "tensor_parallel/cross_entropy.py",
        "gradient.index_put_((row,), -(found.slope * mine), accumulate=True)",
        "gradient.index_put_((row,), 0.0 * found.slope, accumulate=True)",
        ("tests/model/test_bert.py",),
    ),
    Mutation(
        "a phase begins again with the first sample of its length",
        "data/phased_dataset.py",
        "asked * self.curriculum.unit // phase.seq_length",
        "(asked - phase.begin) * self.curriculum.unit // phase.seq_length",
        ("tests/tasks/test_bert.py",),
    ),
    Mutation(
        "the last micro-batch is skipped",
        "train/step.py",
        "train.seed) for batch in microbatches]",
        "train.seed) for batch in microbatches[:-1] or microbatches]",
        (PARITY, STEP),
    ),
    Mutation(
        "labels are shifted by real rows, not by rows",
        "tensor_parallel/cross_entropy.py",
        "local = labels - tp.rank * shard",
        "local = labels - tp.rank * rows",
        (PARITY, LOSS),
    ),
    Mutation(
        "padding rows take part in the softmax",
        "tensor_parallel/cross_entropy.py",
        "return max(0, min(weight.shape[0], vocab_size - tp.rank * weight.shape[0]))",
        "return weight.shape[0]",
        (PARITY, LOSS),
    ),
    # --- layers
    Mutation(
        "a linear layer's bias gets no gradient",
        "kernels/products.py",
        "gradient.add_(grad.sum(0, dtype=gradient.dtype))",
        "gradient.add_(0.0)",
        (PARITY, LINEAR, GPT),
    ),
    Mutation(
        "the row-parallel bias is added on every rank",
        "tensor_parallel/linear.py",
        "y = parallel.leave(y)\n",
        "y = parallel.leave(y if self.bias is None else add_bias(y, self.bias))\n        return y\n",
        (PARITY, LINEAR),
    ),
    Mutation(
        "tokens of other ranks are looked up here too",
        "tensor_parallel/embedding.py",
        "return nn.functional.embedding(rows, weight).mul_(mine[..., None])",
        "return nn.functional.embedding(rows, weight)",
        (PARITY, EMBEDDING),
    ),
    Mutation(
        "tokens of other ranks send gradients here too",
        "tensor_parallel/embedding.py",
        "add_rows_(gradient_of(weight), rows, grad, mine)",
        "add_rows_(gradient_of(weight), rows, grad, torch.ones_like(mine))",
        (PARITY, EMBEDDING),
    ),
    Mutation(
        "initial weights are drawn by the rank's own row",
        "model/initialize.py",
        "rows = range(row + first, row + min(first + step, num_rows))",
        "rows = range(first, min(first + step, num_rows))",
        (PARITY, INITIALIZE),
    ),
    Mutation(
        "q and k are exchanged",
        "model/attention.py",
        "            q, k, v = heads_of(",
        "            k, q, v = heads_of(",
        (GPT, ATTENTION),
    ),
    Mutation(
        "gelu is the other gelu",
        "model/mlp.py",
        '{"gelu": "none", "gelu_tanh": "tanh",',
        '{"gelu": "tanh", "gelu_tanh": "none",',
        (GPT, MLP),
    ),
    # --- memory between steps
    Mutation(
        "gradients of the last step are kept",
        "data_parallel/buckets.py",
        "if self.storage.zero < 2:\n            self.gradients.zero_()",
        "if self.storage.zero < 2:\n            self.gradients.mul_(1.0)",
        (PARITY, STEP, BUCKETS),
    ),
    Mutation(
        "norms and biases decay",
        "data_parallel/buckets.py",
        "return is_vector, place.dim is None",
        "return False, place.dim is None",
        (BUCKETS, STEP),
    ),
    Mutation(
        "bf16 parameters are not renewed from their masters",
        "data_parallel/buckets.py",
        "self.shard.copy_(self.master)  # rounds",
        "pass",
        (PRECISION, BUCKETS),
    ),
    # --- pipelines
    Mutation(
        "1F1B with one warm-up too few",
        "pipeline/schedule.py",
        'each("B", num_microbatches), warm_up=num_stages - stage - 1)',
        'each("B", num_microbatches), warm_up=max(0, num_stages - stage - 2))',
        (SCHEDULE, SIMULATE, THEORY),
    ),
    Mutation(
        "a tied embedding's gradients are not summed over both ends",
        "data_parallel/zero.py",
        "mine.copy_(all_reduce(mine, stages))",
        "mine.copy_(mine)",
        (PARITY, AUDIT, ZERO),
    ),
    Mutation(
        "a tied table counts on both ends in the norm",
        "data_parallel/clip.py",
        " and not is_copy(bucket, owned)",
        "",
        (PARITY, CLIP),
    ),
    Mutation(
        "deferred weight gradients are dropped",
        "pipeline/chunk.py",
        "            queue.run()\n",
        "",
        (PARITY, CHUNK, RUNNER),
    ),
    Mutation(
        "the loss stays on the last stage",
        "train/step.py",
        "all_reduce(all_reduce(losses, mesh.reduce), mesh.pp)",
        "all_reduce(losses, mesh.reduce)",
        (PARITY, AUDIT),
    ),
    Mutation(
        "receives are not posted ahead",
        "pipeline/mailbox.py",
        "_AHEAD = 1",
        "_AHEAD = 0",
        (MAILBOX,),
    ),
    # --- sequence parallelism
    Mutation(
        "a LayerNorm's gradient is not summed under sequence parallelism",
        "data_parallel/zero.py",
        "or (self.sequence_parallel and not group.cut)",
        "",
        (PARITY, AUDIT, ZERO),
    ),
    Mutation(
        "every rank's part of the sequence begins at position 0",
        "tensor_parallel/parallel.py",
        "return self.tp.rank * length if self.sequence_parallel else 0",
        "return 0",
        (PARITY, SEQUENCE),
    ),
    # --- ZeRO
    Mutation(
        "stage 2's slices are off by one cache line",
        "data_parallel/buckets.py",
        "first = dp.rank * share if storage.zero else 0",
        "first = dp.rank * (share - ALIGNMENT * (storage.zero == 2)) if storage.zero else 0",
        (PARITY, BUCKETS),
    ),
    Mutation(
        "stages 2 and 3 do not reduce the last micro-batch",
        "data_parallel/zero.py",
        "if not last and self.zero < 2:",
        "if last == (self.zero >= 2):",
        (PARITY, ZERO, PRECISION),
    ),
    Mutation(
        "stage 2 keeps the sums of the last step",
        "data_parallel/buckets.py",
        "self.reduced.zero_()",
        "self.reduced.mul_(1.0)",
        (PARITY, BUCKETS, ZERO),
    ),
    Mutation(
        "a micro-batch adds to gradients that are being summed",
        "data_parallel/buckets.py",
        "        self.finish_reduction()\n        if _is_freed",
        "        if _is_freed",
        (PARITY, ZERO),
    ),
    Mutation(
        "the last sums are not waited for",
        "data_parallel/zero.py",
        "        while self._reducing:\n",
        "        while False:\n",
        (PARITY, ZERO),
    ),
    Mutation(
        "stage 3 drops what is needed next",
        "data_parallel/zero.py",
        "            if bucket not in kept:\n                bucket.reshard()",
        "            bucket.reshard()",
        (ZERO, AUDIT),
    ),
    Mutation(
        "stage 3 forgets that it dropped a unit",
        "data_parallel/buckets.py",
        "            self._is_unsharded = False\n",
        "",
        (PARITY, BUCKETS, ZERO),
    ),
    Mutation(
        "the next unit is not gathered ahead",
        "data_parallel/zero.py",
        "        for bucket in self._next():\n            bucket.fetch()",
        "        self._next()",
        (ZERO,),
    ),
    Mutation(
        "the gather of the next unit is not waited for",
        "data_parallel/buckets.py",
        "            self._arriving.wait()\n",
        "",
        (ZERO, BUCKETS),
    ),
    Mutation(
        "moments of another slice",
        "data_parallel/param_slices.py",
        "state=state_at(state, at),",
        "state=state_at(state, slice(0, at.stop - at.start)),",
        (PARITY, PARAM_SLICES),
    ),
    Mutation(
        "each dp rank has a gradient norm of its own slice",
        "data_parallel/clip.py",
        "mesh.world if owned.zero else mesh.model",
        "mesh.model",
        (PARITY, CLIP),
    ),
    Mutation(
        "LAMB takes the norms of slices",
        "train/step.py",
        "shared = mesh.stage if state.ownership.zero else mesh.tp",
        "shared = mesh.tp",
        (PARITY,),
    ),
    # --- the loss over a cut vocabulary
    Mutation(
        "the loss is normalised over the local vocabulary",
        "tensor_parallel/cross_entropy.py",
        "return torch.logsumexp(every[:, 0], 0), every[:, 1].sum(0)",
        "return local_lse, every[:, 1].sum(0)",
        (PARITY, LOSS),
    ),
    Mutation(
        "ALiBi gives every rank the slopes of the first heads",
        "model/attention.py",
        "alibi_slopes(n)[self.heads.start : self.heads.stop]",
        "alibi_slopes(n)[:mine]",
        (PARITY, ATTENTION),
    ),
    # --- recomputation
    Mutation(
        "selective recomputation draws other masks",
        "kernels/attention.py",
        "(q, k), how.keep()",
        "(q, k), how.keep().flip(0)",
        (PARITY, ATTEND, ATTENTION),
    ),
    Mutation(
        "full recomputation drops nothing",
        "pipeline/chunk.py",
        "self._pass(passed.units, passed.entry, inputs)",
        "self._pass(passed.units, passed.entry, type(inputs)(inputs.tokens, inputs.labels, inputs.loss_weights))",
        (PARITY,),
    ),
    # --- precision
    Mutation(
        "gradients add up in 16 bits",
        "data_parallel/buckets.py",
        "self.gradients = torch.zeros(size, dtype=self.storage.exact,",
        "self.gradients = torch.zeros(size, dtype=self.storage.dtype,",
        (PRECISION, BUCKETS),
    ),
    Mutation(
        "an overflow is not skipped",
        "train/step.py",
        "        if overflow:\n",
        "        if False:\n",
        (OVERFLOW,),
    ),
    Mutation(
        "a skipped step counts in the optimizer's means",
        "train/step.py",
        "step=state.step - state.skipped,",
        "step=state.step,",
        (OVERFLOW,),
    ),
    # --- what tests let pass, found by who had not written the code
    Mutation(
        "a line that fits in part stays torn",
        "train/lines.py",
        "            cut(path, size)",
        "            pass",
        ("tests/train/test_save_retries.py",),
    ),
    Mutation(
        "steps of an earlier start count as measured",
        "planner/comparison.py",
        'line["step"] > self._begun]',
        'line["step"] > 0]',
        ("tests/planner/test_comparison.py",),
    ),
    Mutation(
        "a failed save is tried again when the limit is over",
        "train/save_retries.py",
        "max(self.limit / 4, 0.1)",
        "max(self.limit, 0.1)",
        ("tests/train/test_save_retries.py",),
    ),
    Mutation(
        "near the limit is beyond the limit",
        "kernels/probe.py",
        "self._limit = torch.finfo(dtype).max / 2",
        "self._limit = torch.finfo(dtype).max",
        ("tests/kernels/test_probe.py",),
    ),
    Mutation(
        "a point that diverged once has diverged for good",
        "train/tuning.py",
        'last = kinds[max((at for at, kind in enumerate(kinds) if kind == "setup"), default=0) :]',
        "last = kinds",
        ("tests/train/test_sweep.py",),
    ),
    Mutation(
        "tokens of one answer of two are counted",
        "train/loop.py",
        '"tokens": state.samples * curriculum.unit * config.model.sequences',
        '"tokens": state.samples * curriculum.unit',
        ("tests/train/test_preferences.py",),
    ),
    Mutation(
        "restarts without progress are not waited with",
        "train/restarts.py",
        "time.sleep(decision.wait)",
        "time.sleep(0.0)",
        ("tests/train/test_restarts.py",),
    ),
    Mutation(
        "a number of tokens that was given is not taken at its word",
        "megatron/source.py",
        "if given is None and -(-size",
        "if -(-size",
        ("tests/megatron/test_refused.py",),
    ),
    Mutation(
        "a teacher may not say all of a vocabulary",
        "config/check_distillation.py",
        "chosen.top_k > model.vocab_size",
        "chosen.top_k >= model.vocab_size",
        ("tests/config/test_distillation.py",),
    ),
    Mutation(
        "the setting with the highest loss is best",
        "train/tuning.py",
        "each.median if less_is_better(score) else -each.median",
        "-each.median",
        ("tests/train/test_sweep.py",),
    ),
    Mutation(
        "a failed save waits for the next checkpoint",
        "train/loop.py",
        "again = run.checkpoints.has_failed or (run.mesh.rank == 0 and run.checkpoints.is_due)",
        "again = run.checkpoints.has_failed",
        ("tests/train/test_save_retries.py",),
    ),
    Mutation(
        "windows of questions have one length in all phases",
        "data/span_dataset.py",
        "return PhasedDataset({length: of_length(length) for length in curriculum.lengths}, curriculum)",
        "return of_length(max(curriculum.lengths))",
        ("tests/data/test_span_dataset.py",),
    ),
    Mutation(
        "pairs of texts have one length in all phases",
        "data/bert_dataset.py",
        "return PhasedDataset({length: of_length(length) for length in curriculum.lengths}, curriculum)",
        "return of_length(max(curriculum.lengths))",
        ("tests/data/test_bert_dataset.py",),
    ),
    Mutation(
        "a model's number format is that of its fewest numbers",
        "huggingface/folder.py",
        "return max(sizes, key=lambda dtype",
        "return min(sizes, key=lambda dtype",
        ("tests/huggingface/test_folder.py",),
    ),
    Mutation(
        "checkpoints take a step no time",
        "planner/estimate.py",
        "seconds += reading + (stall / every if every else 0.0)",
        "seconds += reading",
        ("tests/planner/test_estimate.py",),
    ),
    Mutation(
        "a score takes two labels",
        "config/check_head.py",
        "(model.num_labels or 0) < fewest",
        "(model.num_labels or 0) <= fewest",
        ("tests/config/test_check_model.py",),
    ),
    Mutation(
        "copies that differ return to no checkpoint",
        "train/repair.py",
        "if returned and newest == 0:",
        "if returned and newest < 0:",
        ("tests/train/test_copies.py",),
    ),
    Mutation(
        "a decay begins within the warm-up",
        "optim/schedule.py",
        "begin = max(warmup_steps, decay_start)",
        "begin = decay_start or warmup_steps",
        ("tests/optim/test_schedule.py",),
    ),
    Mutation(
        "vectors of texts stand in the order of their lengths",
        "serving/encoder.py",
        "found[chosen] = means",
        "found[begin : begin + len(chosen)] = means",
        ("tests/serving/test_encoder.py",),
    ),
    Mutation(
        "each rank copies the whole checkpoint",
        "planner/estimate.py",
        "return size / config.parallel.num_ranks / hardware",
        "return size / hardware",
        ("tests/planner/test_estimate.py",),
    ),
    Mutation(
        "a text is one token longer than the positions",
        "serving/answers.py",
        "> model.longest + 1:",
        "> model.longest + 2:",
        ("tests/serving/test_answers.py",),
    ),
    Mutation(
        "a damaged base is merged",
        "convert/adapted.py",
        "    verify(found, lambda name: None)\n",
        "",
        ("tests/convert/test_adapters.py",),
    ),
    Mutation(
        "returns that passed a checkpoint do not count against it",
        "train/divergence.py",
        "each.detected is not None and each.detected >= to for each in past",
        "each.detected is not None and each.to >= to for each in past",
        ("tests/train/test_divergence.py",),
    ),
    Mutation(
        "a second lost place lets the first be used",
        "train/restarts.py",
        "self.lost |= {decision.lost}",
        "self.lost = frozenset({decision.lost})",
        ("tests/train/test_restarts.py",),
    ),
    Mutation(
        "a job has no time before its margin",
        "launch/slurm.py",
        "limit < job.margin + LEAST_STEPS",
        "limit < job.margin",
        ("tests/launch/test_slurm.py",),
    ),
    Mutation(
        "a causal kernel computes all that is counted",
        "planner/cost.py",
        "(CAUSAL if operator.is_causal else 1.0)",
        "1.0",
        ("tests/planner/test_estimate.py",),
    ),
    Mutation(
        "a text that loses its last token is not counted",
        "serving/encoder.py",
        "len(ids) > longest - 2 for ids",
        "len(ids) > longest for ids",
        ("tests/serving/test_encoder.py",),
    ),
    Mutation(
        "the first sample that a teacher has not seen is read",
        "train/taught.py",
        "if position >= self.stop:",
        "if position > self.stop:",
        ("tests/train/test_distillation.py",),
    ),
    Mutation(
        "a queued job leaves as the one before",
        "launch/slurm.py",
        'rm -f "$run/ended.json" "$run/leave"',
        'rm -f "$run/ended.json"',
        ("tests/launch/test_slurm.py",),
    ),
    Mutation(
        "one token alone may end a text",
        "convert/to_huggingface.py",
        " or (isinstance(value, list) and all(type(each) is int for each in value))",
        "",
        ("tests/convert/test_round_trip.py",),
    ),
    # --- profiles and pages
    Mutation(
        "what an inner span covers is counted twice",
        "mesh/clock.py",
        "            own[span.parent] -= span.seconds\n",
        "            pass\n",
        (PROFILE,),
    ),
    Mutation(
        "who comes last to a collective waits as well",
        "train/profile_report.py",
        'max(0.0, last[key] - (span.start + rank["epoch"]))',
        "own",
        (PROFILE,),
    ),
    Mutation(
        "thinning loses the highest",
        "drawing/thin.py",
        "np.maximum.reduceat(kept, starts)",
        "mean",
        (DRAWING,),
    ),
    Mutation(
        "what a run's files say is markup",
        "drawing/html.py",
        "else Html(_escaped(value))",
        "else Html(value)",
        (PAGE,),
    ),
    Mutation(
        "a run waits for its trackers",
        "train/tracking.py",
        "self._queue.put_nowait(entry)",
        "self._queue.put(entry)",
        (TRACKING,),
    ),
    # --- sizes that few tests reach
    Mutation(
        "a shard's real rows are counted by v/tp, not by the rounded shard",
        "tensor_parallel/cross_entropy.py",
        "return max(0, min(weight.shape[0], vocab_size - tp.rank * weight.shape[0]))",
        "return max(0, min(-(-vocab_size // tp.size), vocab_size - tp.rank * -(-vocab_size // tp.size)))",
        (PARITY,),
    ),
    Mutation(
        "the embedding's shards begin at multiples of v/tp, not of the rounded shard",
        "tensor_parallel/embedding.py",
        "local = tokens - self.parallel.tp.rank * self.weight.shape[0]",
        "local = tokens - self.parallel.tp.rank * -(-self.vocab_size // self.parallel.tp.size)",
        (PARITY,),
    ),
    Mutation(
        "masks of layers have two numbers",
        "model/transformer.py",
        "self.layer, self.drop, self.pre = layer,",
        "self.layer, self.drop, self.pre = layer % 2,",
        (STEP,),
    ),
    Mutation(
        "ranks with fewer real rows cut the loss in fewer chunks",
        "tensor_parallel/cross_entropy.py",
        "chunks = chunks_of(len(x), weight)\n        fused",
        "chunks = chunks_of(len(x), table)\n        fused",
        (LOSS,),
    ),
    # --- skipped steps
    Mutation(
        "a skipped step does not move the learning rate",
        "train/step.py",
        "rate, scale = state.learning_rate(state.step), state.loss_scale",
        "rate, scale = state.learning_rate(state.step - state.skipped), state.loss_scale",
        (OVERFLOW,),
    ),
    Mutation(
        "skipped steps are forgotten in a checkpoint",
        "train/recovery.py",
        "state.step, state.samples, state.skipped = metadata.step, metadata.samples, metadata.skipped_steps",
        "state.step, state.samples, state.skipped = metadata.step, metadata.samples, 0",
        (ELASTIC,),
    ),
    # --- the order of the data
    Mutation(
        "an epoch's order is the next seed's order of the epoch before",
        "data/sampler.py",
        "key=(self.seed, epoch))",
        "key=(self.seed + epoch, 0))",
        (SAMPLER,),
    ),
    Mutation(
        "labels that do not count are looked for among the tokens",
        "data/rows.py",
        "counted_labels(self._text, begin + 1, both[1:], self._cut)",
        "counted_labels(self._text, begin + 1, both[:-1], self._cut)",
        (ROWS,),
    ),
    Mutation(
        "every epoch masks the same words",
        "data/bert_dataset.py",
        "draws = Draws(self._seed, SamplePurpose.BERT, epoch, sample)",
        "draws = Draws(self._seed, SamplePurpose.BERT, 0, sample)",
        (BERT,),
    ),
    Mutation(
        "every sentence ends its document",
        "data/tokenize.py",
        "            encoded[-1] += ending",
        "            encoded = [tokens + ending for tokens in encoded]",
        (SENTENCES,),
    ),
    Mutation(
        "of equal documents the last is kept",
        "corpus/components.py",
        "np.lexsort((np.arange(len(members)), -lengths, group))",
        "np.lexsort((-np.arange(len(members)), -lengths, group))",
        (DUPLICATES,),
    ),
    Mutation(
        "samples of a batch are numbered from 0",
        "train/corpus.py",
        ".batch(dataset.rows(positions), positions)",
        ".batch(dataset.rows(positions), range(len(positions)))",
        ("tests/tasks/test_bert.py",),
    ),
    Mutation(
        "a blend's samples stand in the order of their files",
        "data/blended_dataset.py",
        "take(np.argsort(np.concatenate(groups)))",
        "take(np.concatenate(groups))",
        (BLEND,),
    ),
    # --- evaluation and generation
    Mutation(
        "what fills uneven shares is scored too",
        "data/loader.py",
        "yield load(range(min(micro_batch_size, num_samples))).uncounted()",
        "yield load(range(min(micro_batch_size, num_samples)))",
        (LOADER, BLENDED_RUN),
    ),
    Mutation(
        "evaluation forgets where documents begin",
        "evaluation/perplexity.py",
        "documents=batch.documents, positions=batch.positions",
        "documents=batch.documents",
        (PERPLEXITY,),
    ),
    Mutation(
        "each rank tells the perplexity of its own share",
        "evaluation/perplexity.py",
        "all_reduce(all_reduce(sums, dp), pp)",
        "all_reduce(sums, pp)",
        (PERPLEXITY,),
    ),
    Mutation(
        "a window scores one token too few",
        "evaluation/windows.py",
        "start + seq_length - stride if index else 0",
        "start + seq_length - stride + 1 if index else 0",
        (WINDOWS,),
    ),
    Mutation(
        "every position draws the same number",
        "generation/choose.py",
        "uniform(keys, position, 1)",
        "uniform(keys, 0, 1)",
        (CHOOSE,),
    ),
    Mutation(
        "the first stage tells the logits",
        "generation/sample.py",
        "source=stages.pp.size - 1",
        "source=0",
        (SAMPLE,),
    ),
    # --- state on disk and in memory
    Mutation(
        "the first moments are saved in place of the second",
        "train/recovery.py",
        '.": flat for name, flat in kept.items()}',
        '.": next(iter(kept.values())) for name in kept}',
        (ELASTIC,),
    ),
    Mutation(
        "layers keep their weights when a checkpoint is read",
        "train/recovery.py",
        "    state.ownership.publish()\n",
        "    state.ownership.begin()\n",
        (ELASTIC,),
    ),
    Mutation(
        "what several ranks hold is cut across its rows",
        "checkpoint/plan.py",
        "dim = next(d for d, n in enumerate(box.sizes) if n >= total)",
        "dim = max(d for d, n in enumerate(box.sizes) if n >= total)",
        (PLAN,),
    ),
    Mutation(
        "what is being sent is not kept",
        "pipeline/transfer.py",
        "return Transfer(tensors, tuple(send(",
        "return Transfer((), tuple(send(",
        (MAILBOX,),
    ),
    Mutation(
        "evaluation holds the head for good",
        "pipeline/inference.py",
        "            self.owner.release(self.loss_unit.name)\n",
        "            pass\n",
        (INFERENCE,),
    ),
    Mutation(
        "a stage runs ahead of the next in evaluation",
        "pipeline/inference.py",
        "while len(self._leaving) > _UNDER_WAY:",
        "while len(self._leaving) > 10 * _UNDER_WAY:",
        (INFERENCE,),
    ),
    Mutation(
        "documents are never kept apart",
        "data/gpt_dataset.py",
        "return GPTDataset(file, documents, seq_length, vocab_size=vocab_size, cut=self.cut)",
        "return GPTDataset(file, documents, seq_length, vocab_size=vocab_size)",
        (DATASET,),
    ),
    Mutation(
        "a text of whole words goes on with the text before it",
        "generation/stream.py",
        "            decoder = tokenizer.stream(skip_special=skip_special)\n        yield",
        "            pass\n        yield",
        (STREAM,),
    ),
    Mutation(
        "rows that are drawn later overwrite the first",
        "model/initialize.py",
        "real[first : first + len(rows)] = values",
        "real[: len(rows)] = values",
        (INITIALIZE,),
    ),
    Mutation(
        "parameters are dropped while they arrive",
        "data_parallel/buckets.py",
        "            self.unshard()  # what is under way must not land in memory that is somebody else's by then\n",
        "",
        (BUCKETS,),
    ),
    Mutation(
        "a window of all keys but one is no window",
        "kernels/mask.py",
        "self.window >= keys)",
        "self.window >= keys - 1)",
        ("tests/kernels/test_mask.py",),
    ),
    Mutation(
        "what sees nothing does not see itself",
        "kernels/mask.py",
        "            if self.padding_sees_itself:\n",
        "            if False:\n",
        ("tests/kernels/test_mask.py",),
    ),
    Mutation(
        "YaRN's ramp ends within the planes",
        "model/rotary.py",
        "min(math.ceil(plane(rotary.beta_slow)), head_dim - 1)",
        "min(math.ceil(plane(rotary.beta_slow)), head_dim // 2 - 1)",
        ("tests/model/test_llama.py",),
    ),
    Mutation(
        "16-bit heads are turned by 16-bit cosines",
        "model/rotary.py",
        "dtype = torch.promote_types(heads[0].dtype, torch.float32)",
        "dtype = heads[0].dtype",
        ("tests/model/test_rotary.py",),
    ),
    Mutation(
        "every sample turns by the first one's positions",
        "model/rotary.py",
        "angles.transpose(0, 1)[:, None]",
        "angles.transpose(0, 1)[:1, None]",
        ("tests/model/test_rotary.py",),
    ),
    Mutation(
        "an RMS norm averages in 16 bits",
        "kernels/norm.py",
        "wide = _exact(x)\n        scale",
        "wide = x\n        scale",
        ("tests/model/test_norm.py",),
    ),
    Mutation(
        "positions begin again at each generated token",
        "model/attention.py",
        "first = 0 if cache is None else cache.length",
        "first = 0",
        ("tests/model/test_llama.py",),
    ),
    Mutation(
        "ranks that share a head of keys take turns",
        "tensor_parallel/linear.py",
        "tp.rank * groups // tp.size",
        "tp.rank % groups",
        ("tests/tensor_parallel/test_linear.py",),
    ),
    Mutation(
        "weight gradients of uncut layers are never deferred",
        "tensor_parallel/linear.py",
        "x, self.weight, self.bias, weight_gradients=parallel.weight_gradients, products",
        "x, self.weight, self.bias, products",
        ("tests/tensor_parallel/test_linear.py",),
    ),
    Mutation(
        "gradients of positions add up in 16 bits",
        "model/position.py",
        "grad.sum(1, dtype=gradient.dtype)",
        "grad.sum(1)",
        ("tests/model/test_position.py",),
    ),
    Mutation(
        "an evaluation forgets the output bias",
        "model/bert.py",
        "labels, self.bias)",
        "labels)",
        ("tests/model/test_bert.py",),
    ),
    Mutation(
        "losses of pairs are computed in 16 bits",
        "model/bert.py",
        "wide = logits.to(torch.promote_types(logits.dtype, torch.float32))",
        "wide = logits",
        ("tests/model/test_bert.py",),
    ),
    Mutation(
        "the order's loss is divided by the masked tokens",
        "tasks/bert.py",
        "order_loss=order / samples",
        "order_loss=order / tokens",
        ("tests/tasks/test_bert.py",),
    ),
    Mutation(
        "a label is likeliest if its rank knows no likelier",
        "tensor_parallel/cross_entropy.py",
        "target >= numbers[:, 2].amax(0)",
        "target >= numbers[tp.rank, 2]",
        ("tests/tensor_parallel/test_cross_entropy.py",),
    ),
    Mutation(
        "a rank without tokens offers logits of 0",
        "tensor_parallel/cross_entropy.py",
        'logits.amax(-1) if logits.shape[-1] else logits.new_full((len(logits),), float("-inf"))',
        "logits.amax(-1) if logits.shape[-1] else logits.new_zeros(len(logits))",
        ("tests/tensor_parallel/test_cross_entropy.py",),
    ),
    Mutation(
        "the loss of 16-bit weights is known to few digits",
        "tensor_parallel/cross_entropy.py",
        "apart=weight.dtype.itemsize == 2",
        "apart=False",
        ("tests/tensor_parallel/test_gradient_digits.py",),
    ),
    Mutation(
        "products stay narrow after a 16-bit layer",
        "kernels/products.py",
        "products.fp32_precision = before",
        "pass",
        ("tests/kernels/test_products.py",),
    ),
    Mutation(
        "what a unit kept lives as long as its group",
        "pipeline/chunk.py",
        "            del passed\n",
        "",
        ("tests/pipeline/test_chunk.py",),
    ),
    Mutation(
        "partial gradients of shared heads are not summed",
        "data_parallel/zero.py",
        "if group.is_partial or (self.sequence_parallel",
        "if (self.sequence_parallel",
        (PARITY,),
    ),
    Mutation(
        "an offloaded optimizer reads the gradients of the step before",
        "data_parallel/buckets.py",
        "            self.optimizer_gradients.copy_(self.reduced)\n",
        "            pass\n",
        ("tests/data_parallel/test_buckets.py",),
    ),
    Mutation(
        "LAMB divides by a direction of length 0",
        "optim/lamb.py",
        "known = (weight > 0) & (direction > 0)",
        "known = weight > 0",
        ("tests/optim/test_lamb.py",),
    ),
    Mutation(
        "copies over stages are not compared",
        "checkpoint/copies.py",
        "            *((stages, partial(self._over_stages, bucket)) for bucket, stages in self.shared.items()),\n",
        "",
        ("tests/train/test_copies.py",),
    ),
    Mutation(
        "16-bit parameters of ZeRO 0 are not compared",
        "checkpoint/copies.py",
        "zero == 3 or (zero == 0 and dtype == bucket.storage.exact)",
        "zero == 3 or zero == 0",
        ("tests/train/test_copies.py",),
    ),
    Mutation(
        "chunks of a tensor may change places",
        "checkpoint/checksum.py",
        "total = total * _FACTOR + _dot",
        "total = total + _dot",
        ("tests/checkpoint/test_checksum.py",),
    ),
    Mutation(
        "a name that is given anew while a file is opened is believed",
        "checkpoint/confined.py",
        "_check_plain(path, os.fstat(descriptor).st_mode)  # of",
        "pass  # of",
        ("tests/checkpoint/test_stranger.py",),
    ),
    Mutation(
        "what a key was before it was saved replaces what was saved",
        "config/compare.py",
        "{**before_it_was_saved(), **saved}",
        "{**saved, **before_it_was_saved()}",
        ("tests/checkpoint/test_bad_checkpoints.py",),
    ),
    Mutation(
        "ranks with other precision of products train together",
        "launch/agreement.py",
        '        "precision of fp32 products": torch.get_float32_matmul_precision(),\n',
        "",
        ("tests/launch/test_agreement.py",),
    ),
    Mutation(
        "ranks' processes of a number given again are killed",
        "launch/guard.py",
        "if not has_ended(process):",
        "if True:",
        ("tests/launch/test_guard.py",),
    ),
    Mutation(
        "a lock of a file that is gone is held",
        "lock.py",
        "        if _is_that_file(path, descriptor):\n            _write",
        "        if True:\n            _write",
        ("tests/test_lock.py",),
    ),
    Mutation(
        "an evaluation says that its tokenizer was checked",
        "train/held_out.py",
        "tokenizer_checked=not corpus.unchecked",
        "tokenizer_checked=True",
        ("tests/train/test_held_out.py",),
    ),
    Mutation(
        "a data file that is new goes unnoticed",
        "train/data_record.py",
        "dict.fromkeys([*saved, *now])",
        "dict.fromkeys(saved)",
        ("tests/train/test_data_record.py",),
    ),
    Mutation(
        "the last sample of a run may be missing",
        "train/corpus.py",
        "wanted = -(-end * curriculum.unit // curriculum.seq_length)",
        "wanted = end * curriculum.unit // curriculum.seq_length",
        ("tests/train/test_corpus.py",),
    ),
    Mutation(
        "passes of a blend are counted from the first of all",
        "data/curriculum_dataset.py",
        "passes.epochs[passes.sets == s].min()",
        "passes.epochs.min()",
        ("tests/data/test_curriculum.py",),
    ),
    Mutation(
        "steps counted from the middle of a phase of the curriculum overshoot the phase's end",
        "data/curriculum.py",
        "min(count, (after.begin - position) // step)",
        "min(count, (after.begin - phase.begin) // step)",
        ("tests/data/test_curriculum.py",),
    ),
    Mutation(
        "a document's first sentence counts to the one before",
        "data/bert_dataset.py",
        'mine, side="right")\n',
        'mine, side="left")\n',
        ("tests/data/test_bert_dataset.py",),
    ),
    Mutation(
        "the grid of stretches is that of the first epoch",
        "data/bert_dataset.py",
        "Draws.key(self._seed, SamplePurpose.BERT_GRID, epoch)",
        "Draws.key(self._seed, SamplePurpose.BERT_GRID, 0)",
        ("tests/data/test_bert_dataset.py",),
    ),
    Mutation(
        "a document that begins behind the row is foretold",
        "data/rows.py",
        "text.documents(begin + 1, begin + length + 1) - begin",
        "text.documents(begin + 1, begin + length) - begin",
        ("tests/data/test_rows.py",),
    ),
    Mutation(
        "the plan forgets what blocks of a micro-batch share",
        "planner/kept.py",
        "shared=with_shared - own",
        "shared=0",
        ("tests/planner/test_kept.py",),
    ),
    Mutation(
        "the plan gives a mask to the kernel that takes none",
        "planner/stand_in.py",
        "elif q.dtype is torch.float32 or attn_mask is not None:",
        "elif q.dtype is torch.float32:",
        ("tests/planner/test_kept.py",),
    ),
    Mutation(
        "the plan counts no products that add to where they are",
        "planner/operators.py",
        "flop_registry.get(_IN_PLACE.get(name, func.overloadpacket))",
        "flop_registry.get(func.overloadpacket)",
        (PAPER,),
    ),
    Mutation(
        "a plan's page draws memory without what is always there",
        "planner/page_memory.py",
        "[always + size for _, size in section.alive]",
        "[size for _, size in section.alive]",
        ("tests/planner/test_page.py",),
    ),
    Mutation(
        "a search forgets what zero-bubble hides",
        "planner/compose.py",
        "work.forward + work.backward - min(work)",
        "work.whole",
        ("tests/planner/test_search.py",),
    ),
    Mutation(
        "parts of a bar all begin at its start",
        "drawing/bars.py",
        "        at += share\n",
        "",
        ("tests/drawing/test_bars.py",),
    ),
    Mutation(
        "what is waited for in a plan takes no time",
        "planner/timeline.py",
        "        self._wait(axis, until)\n",
        "",
        (ESTIMATE,),
    ),
    Mutation(
        "in a plan for GPUs, collectives over one axis do not wait for each other",
        "planner/timeline.py",
        "begin = max(self.device, self.host, self._links[axis])",
        "begin = max(self.device, self.host)",
        ("tests/planner/test_estimate.py",),
    ),
    Mutation(
        "a plan's groups share no adapters between machines",
        "planner/cost.py",
        "min(1.0, together / node)",
        "1.0",
        (ESTIMATE,),
    ),
    Mutation(
        "the plan lets go of gradients that deferred ones need",
        "planner/counting.py",
        "*ctx.later, *gradients",
        "*ctx.later",
        ("tests/planner/test_memory.py",),
    ),
    Mutation(
        "in the plan all micro-batches share one mask",
        "planner/counting.py",
        "self._shared.get((kind, inputs))",
        "self._shared.get((kind, 0))",
        ("tests/planner/test_counting.py",),
    ),
    Mutation(
        "the plan forgets gradients that are brought to CPU memory",
        "planner/memory.py",
        'held.optimizer + (0 if device == "cpu" else held.reduced) if',
        "held.optimizer if",
        ("tests/planner/test_memory.py",),
    ),
    Mutation(
        "the plan's loss is cut in as many chunks as asked for",
        "planner/traffic.py",
        "        chunks = -(-tokens // -(-tokens // chunks))  # equal chunks of tokens: there may be fewer\n",
        "",
        ("tests/planner/test_traffic.py",),
    ),
    Mutation(
        "documents of earlier runs are compared again",
        "corpus/matching.py",
        " or self._index.is_earlier(second)",
        "",
        (DUPLICATES,),
    ),
    Mutation(
        "padding behind .xz files is foreign",
        "corpus/streams.py",
        'padded=compression in (".gz", ".xz")',
        'padded=compression in (".gz",)',
        ("tests/corpus/test_streams.py",),
    ),
    Mutation(
        "a later stream that is damaged is foreign",
        "corpus/streams.py",
        "foreign = num_streams > 0 and not num_given",
        "foreign = num_streams > 0",
        ("tests/corpus/test_streams.py",),
    ),
    Mutation(
        "an over-long line is kept in memory",
        "corpus/streams.py",
        "        if size <= max_bytes:\n            parts",
        "        if True:\n            parts",
        ("tests/corpus/test_streams.py",),
    ),
    Mutation(
        "a task of the index has 65,536 documents",
        "corpus/signatures.py",
        "count * 8, (document & 0xFFFFFFFF) * 8)",
        "count * 8, (document & 0xFFFF) * 8)",
        (DUPLICATES,),
    ),
    Mutation(
        "a save begins though there is no room",
        "checkpoint/save.py",
        ".free < needed",
        ".free < 0",
        ("tests/checkpoint/test_bad_checkpoints.py",),
    ),
    Mutation(
        "a shard may end behind its file",
        "checkpoint/schema.py",
        "                if end > file.size:",
        "                if shard.start > file.size:",
        ("tests/checkpoint/test_stranger.py",),
    ),
    Mutation(
        "ranks write as many parts, not as many bytes",
        "checkpoint/plan.py",
        "load[rank] += sizes[key]",
        "load[rank] += 1",
        (PLAN,),
    ),
    Mutation(
        "a second Ctrl-C waits for the save",
        "checkpoint/saver.py",
        "        if isinstance(error, KeyboardInterrupt):\n            return  # asked",
        "        if False:\n            return  # asked",
        ("tests/checkpoint/test_saver.py",),
    ),
    Mutation(
        "files of a blend may exchange their numbers",
        "config/compare.py",
        "return list(value.values())",
        "return sorted(value.values())",
        ("tests/config/test_compare.py",),
    ),
    Mutation(
        "an index read in part is held against the whole one's hash",
        "data/identity.py",
        "if written is not None and num_bytes == index.stat().st_size and digest != written:",
        "if written is not None and digest != written:",
        ("tests/data/test_identity.py",),
    ),
    Mutation(
        "a part that is one label short makes a sample",
        "data/rows.py",
        "return (self.num_tokens - 1) // self.seq_length",
        "return self.num_tokens // self.seq_length",
        (BLEND,),
    ),
    Mutation(
        "an old index stands beside new tokens",
        "data/writer.py",
        "        idx_path(self.prefix).unlink(missing_ok=True)\n        sidecar",
        "        sidecar",
        ("tests/data/test_writer.py",),
    ),
    Mutation(
        "masked runs jump over control tokens",
        "data/masking.py",
        "if word_begin != end or word_end",
        "if word_end",
        (BERT,),
    ),
    Mutation(
        "a label alone on its rank is hidden by -inf",
        "tensor_parallel/cross_entropy.py",
        "masked_fill_(mine, torch.finfo(logits.dtype).min)",
        "masked_fill_(mine, -torch.inf)",
        ("tests/tensor_parallel/test_gradient_digits.py",),
    ),
    Mutation(
        "a loss that is none is fine",
        "train/divergence.py",
        "if not (math.isfinite(loss) and (math.isfinite(grad_norm) or skipped)):",
        "if not (math.isfinite(grad_norm) or skipped):",
        ("tests/train/test_divergence.py",),
    ),
    Mutation(
        "an evaluation begins again where its part ends",
        "train/held_out.py",
        "min(len(part), samples)",
        "samples",
        ("tests/train/test_held_out.py",),
    ),
    Mutation(
        "batches that were taken are held",
        "train/read_ahead.py",
        "        reading, self._reading = self._reading, None\n",
        "        reading = self._reading\n",
        ("tests/train/test_read_ahead.py",),
    ),
    Mutation(
        "what a rank has started outlives it",
        "launch/guard.py",
        "os.killpg(process.pid",
        "os.kill(process.pid",
        ("tests/launch/test_guard.py",),
    ),
    Mutation(
        "a mistake is told by whoever ended first",
        "launch/supervisor.py",
        "return MISTAKE, self.number",
        "return MISTAKE, self.ended",
        ("tests/launch/test_launch.py",),
    ),
    Mutation(
        "who asks a run to stop twice kills it",
        "launch/supervisor.py",
        "if number == signal.SIGINT and number in self.asked:",
        "if number in self.asked:",
        ("tests/launch/test_launch.py",),
    ),
    Mutation(
        "a process of another machine is killed",
        "mesh/process.py",
        "if process.born and is_here(process) and _state",
        "if process.born and _state",
        ("tests/mesh/test_process.py",),
    ),
    Mutation(
        "a shrunk model has heads for the largest tp alone",
        "verify/shrink.py",
        "math.lcm(1, *(parallel.tp for parallel in layouts))",
        "max(1, *(parallel.tp for parallel in layouts))",
        ("tests/verify/test_shrink.py",),
    ),
    Mutation(
        "verify in fp16 compares gradients with the loss scale in them, so that its bound lets everything pass",
        "verify/trace.py",
        "[flat / loss_scale for flat in flats]",
        "flats",
        ("tests/verify/test_verify.py",),
    ),
    Mutation(
        "a GPU's chunks of logits are as small as a CPU's",
        "tensor_parallel/logits.py",
        "CUDA_CHUNKS = 16",
        "CUDA_CHUNKS = 1",
        (LOSS,),
    ),
    Mutation(
        "a GPU's products leave out padded rows",
        "tensor_parallel/cross_entropy.py",
        "return len(weight) if weight.is_cuda and rows else rows",
        "return rows",
        (LOSS,),
    ),
    Mutation(
        "a GPU's norm widens all that it reads",
        "kernels/norm.py",
        "        if x.is_cuda and x.dtype.itemsize == 2:",
        "        if False:",
        ("tests/model/test_norm.py",),
    ),
    Mutation(
        "all files of signatures stay open",
        "corpus/signatures.py",
        "            if len(self._files) >= _OPEN_FILES:",
        "            if False:",
        ("tests/corpus/test_slurm.py",),
    ),
    Mutation(
        "commands that a script has started do not hear Ctrl-C",
        "cli.py",
        "    launch.hear_ctrl_c()\n",
        "",
        ("tests/test_cli.py",),
    ),
    Mutation(
        "a command waits for threads that save",
        "cli.py",
        "        launch.end_beside_threads(end.code)\n",
        "        pass\n",
        ("tests/test_cli.py",),
    ),
    Mutation(
        "the first unit is taken for the embedding",
        "planner/traffic.py",
        "for unit in chunk if unit.reads_tokens]",
        "for unit in chunk if unit == step.architecture.units[0]]",
        ("tests/planner/test_traffic.py",),
    ),
    Mutation(
        "masked models miss bits per byte too",
        "planner/banner.py",
        "config.model.is_causal and not corpus",
        "not corpus",
        ("tests/tasks/test_bert.py",),
    ),
    Mutation(
        "every kernel is exact",
        "kernels/timing.py",
        "return found <= allowed",
        "return True",
        ("tests/kernels/test_timing.py",),
    ),
    Mutation(
        "the usual kernel is left for a little",
        "kernels/timing.py",
        "<= CLEARLY * slower[best]",
        "<= slower[best]",
        ("tests/kernels/test_timing.py",),
    ),
    Mutation(
        "logits that go through memory are taken where they are no faster",
        "kernels/timing.py",
        "for each in (FRUGAL.get(use), getattr(usual, use)) if each",
        "for each in (getattr(usual, use),) if each",
        ("tests/kernels/test_timing.py",),
    ),
    Mutation(
        "a compiled product forgets all blocks of depth but the last",
        "kernels/compiled.cpp",
        "stride, add || k > 0, true);",
        "stride, add, true);",
        ("tests/kernels/test_compiled.py",),
    ),
    Mutation(
        "compiled attention sees one position ahead",
        "kernels/compiled.cpp",
        "return causal ? query + 1 : keys;",
        "return causal ? std::min(query + 2, keys) : keys;",
        ("tests/kernels/test_compiled.py",),
    ),
    Mutation(
        "compiled attention's scores do not share their gradient",
        "kernels/compiled.cpp",
        "stored<M>(e * (g[j] - mean) * scale_)",
        "stored<M>(e * g[j] * scale_)",
        ("tests/kernels/test_compiled.py",),
    ),
    Mutation(
        "compiled attention's values get the keys' gradient",
        "kernels/compiled.cpp",
        "add_transposed(probabilities_, outputs_, seen, count, sum_v_);",
        "add_transposed(differences_, outputs_, seen, count, sum_v_);",
        ("tests/kernels/test_compiled.py",),
    ),
    Mutation(
        "compiled probabilities are those of this rank alone",
        "tensor_parallel/cross_entropy.py",
        "_apart(lse, target, out, (shift - lse).exp(), weights)",
        "_apart(lse, target, out, (-total.log()).exp(), weights)",
        ("tests/tensor_parallel/test_gradient_digits.py",),
    ),
    Mutation(
        "a last panel is read as if it were as wide as the others",
        "kernels/compiled.cpp",
        "a.distance, std::min(width_, columns_ - p), ldc",
        "a.distance, width_, ldc",
        ("tests/kernels/test_compiled.py",),
    ),
    Mutation(
        "panels by rows forget the last of an odd number",
        "kernels/compiled.cpp",
        "to[2 * c + 1] = next ? next[p + c] : 0;",
        "to[2 * c + 1] = next ? next[c] : 0;",
        ("tests/kernels/test_compiled_units.py",),
    ),
    Mutation(
        "what is widened to be multiplied is cut off at a block's first column",
        "kernels/compiled.cpp",
        "const Number<T>* from = x.at(rows.begin, columns.begin);",
        "const Number<T>* from = x.at(rows.begin, 0);",
        ("tests/kernels/test_compiled.py",),
    ),
    Mutation(
        "16 bits without units are taken for those with",
        "kernels/compiled.cpp",
        "multiplies<T>() ? f(T(), T()) : f(T(), float());",
        "f(T(), T());",
        ("tests/kernels/test_compiled.py",),
    ),
    Mutation(
        "a compiled layer forgets its bias",
        "kernels/products.py",
        "return fp32_product_(y, x, self.used.t(), add=bias is not None)",
        "return fp32_product_(y, x, self.used.t())",
        ("tests/kernels/test_compiled.py",),
    ),
    Mutation(
        "a compiled input gradient is that of the last weight alone",
        "kernels/products.py",
        "fp32_product_(dx, grad, weight, add=i > 0)",
        "fp32_product_(dx, grad, weight)",
        ("tests/kernels/test_compiled.py",),
    ),
    Mutation(
        "stages that wait keep their cores from the others",
        "planner/estimate.py",
        "cost.pace(busy / parallel.pp)",
        "cost.pace(1.0)",
        (ESTIMATE,),
    ),
    Mutation(
        "stages that share cores go on as if the last moment had not passed",
        "pipeline/simulate.py",
        "self.left[stage] = left - (until - self.now) * pace",
        "self.left[stage] = left - (until - self.now)",
        (SIMULATE,),
    ),
    Mutation(
        "stages that share cores do not wait for transfers",
        "pipeline/simulate.py",
        "        if start > self.now:\n            return start\n",
        "",
        (SIMULATE,),
    ),
    Mutation(
        "a rank that shares its core with none is as slow as one that does",
        "planner/cost.py",
        "self._crowding(max(1.0, share * self._ranks_here))",
        "self._crowding(max(self.hardware.cores, share * self._ranks_here))",
        (ESTIMATE,),
    ),
    Mutation(
        "a compiled exponential far above the first logits overflows",
        "kernels/compiled.cpp",
        "while (are_raised());",
        "while (false);",
        ("tests/kernels/test_compiled.py",),
    ),
    Mutation(
        "a compiled loss counts the label among the others",
        "kernels/compiled.cpp",
        "label_[i] = x[own], x[own] = -INFINITY;",
        "label_[i] = x[own];",
        ("tests/kernels/test_compiled.py", "tests/tensor_parallel/test_gradient_digits.py"),
    ),
    Mutation(
        "a compiled loss sums one block of columns alone",
        "kernels/compiled.cpp",
        "sum[i] += sums_[block * rows_ + i];",
        "sum[i] = sums_[block * rows_ + i];",
        ("tests/kernels/test_compiled.py",),
    ),
    Mutation(
        "a CPU reads its batches while it computes",
        "planner/cost.py",
        'return seconds if self.hardware.kind == "cpu" else max(0.0, seconds - step)',
        "return max(0.0, seconds - step)",
        (ESTIMATE,),
    ),
    Mutation(
        "a rank reads the batches of all",
        "planner/cost.py",
        "tokens = config.train.global_batch_size // config.parallel.dp *",
        "tokens = config.train.global_batch_size *",
        (ESTIMATE,),
    ),
    Mutation(
        "compiled kernels are taken though another rank has none",
        "train/products.py",
        'without="compiled" if lacking else ""',
        'without=""',
        ("tests/train/test_products.py",),
    ),
    Mutation(
        "kernels compiled for one processor are loaded on another",
        "kernels/compiled.py",
        "sha256(processor.encode())",
        "sha256(bytes())",
        ("tests/kernels/test_compiled.py",),
    ),
    Mutation(
        "signs of a divergence are held against themselves",
        "train/divergence.py",
        "        if loss <= limit:\n            self.signs = 0\n",
        "        self.losses.append(loss)\n        if loss <= limit:\n            self.signs = 0\n",
        ("tests/train/test_divergence.py",),
    ),
    Mutation(
        "a rollback returns to the newest checkpoint, healthy or not",
        "train/divergence.py",
        "[step for step in saved if step + policy.healthy_for < found.first]",
        "[step for step in saved if step < found.step]",
        ("tests/train/test_divergence.py", "tests/train/test_rollback.py"),
    ),
    Mutation(
        "a rollback takes the same batches again",
        "train/rollbacks.py",
        "state.samples = corpus.curriculum.steps(each.skip, state.samples)",
        "pass",
        ("tests/train/test_rollback.py",),
    ),
    Mutation(
        "later checkpoints stay after a rollback that was killed",
        "train/start.py",
        "            _finish_rollback(folder)\n",
        "",
        ("tests/train/test_rollback.py",),
    ),
    Mutation(
        "a restart forgets the losses that a spike is held against",
        "train/recovery.py",
        "    state.watch = LossWatch(**metadata.watch.model_dump())\n",
        "",
        ("tests/train/test_rollback.py",),
    ),
    Mutation(
        "thermometers read a unit again that is computed again",
        "kernels/probe.py",
        "        again = (unit, id(inputs)) in self._seen\n",
        "        again = False\n",
        ("tests/kernels/test_probe.py",),
    ),
    Mutation(
        "thermometers count gradients on each rank that has a copy",
        "train/thermometers.py",
        "(self.owned.zero > 0 or dp.rank == 0)",
        "(self.owned.zero > 0 or dp.rank >= 0)",
        ("tests/train/test_thermometers.py",),
    ),
    Mutation(
        "a window of a thermometer has its newest reading and not its lowest",
        "train/growth.py",
        "min(kept[-1][1], value)",
        "value",
        ("tests/train/test_growth.py",),
    ),
    Mutation(
        "a learning rate in tokens takes all batches for equal",
        "train/corpus.py",
        "    while curriculum.steps(most) * each < tokens:\n",
        "    return -(-tokens // (config.train.global_batch_size * config.model.seq_length))\n"
        "    while curriculum.steps(most) * each < tokens:\n",
        ("tests/train/test_state.py",),
    ),
    Mutation(
        "logits of pairs that do not see each other are read",
        "kernels/visible.py",
        "    if bool(by_place.all()):\n",
        "    if bool(by_place.any()):\n",
        ("tests/kernels/test_visible.py", "tests/train/test_thermometers.py"),
    ),
    Mutation(
        "a run forgets its rollbacks with its next checkpoint",
        "train/recovery.py",
        '"rollbacks": [each.model_dump() for each in state.rollbacks],',
        '"rollbacks": [],',
        ("tests/train/test_rollback.py",),
    ),
    Mutation(
        "a T5's decoder looks both ways for its distances",
        "model/t5.py",
        "str(stack): RelativePositions(model, parallel, both_sides=stack == 0)",
        "str(stack): RelativePositions(model, parallel, both_sides=True)",
        ("tests/model/test_t5.py",),
    ),
    Mutation(
        "a T5's tied output is not scaled",
        "model/t5.py",
        "self.drop, self.scale = model.dropout, model.hidden_size**-0.5 if model.tie_embeddings else 1.0",
        "self.drop, self.scale = model.dropout, 1.0",
        ("tests/model/test_t5.py",),
    ),
    Mutation(
        "spans are drawn by the position in the run",
        "data/t5_dataset.py",
        "numbers = zip(self.order.samples(asked).tolist(), self.order.epochs(asked).tolist(), strict=True)",
        "numbers = zip(asked.tolist(), self.order.epochs(asked).tolist(), strict=True)",
        ("tests/data/test_t5_dataset.py",),
    ),
    Mutation(
        "a T5's labels are shifted the wrong way",
        "data/t5_dataset.py",
        "decoder_tokens=np.concatenate([[[self._corruption.start]], labels[:, :-1]], axis=1),",
        "decoder_tokens=np.concatenate([[[self._corruption.start]], labels[:, 1:]], axis=1),",
        ("tests/data/test_t5_dataset.py",),
    ),
    Mutation(
        "memory's keys and values change places in the cache",
        "model/t5_block.py",
        "cache.keys, cache.values = k, v",
        "cache.keys, cache.values = v, k",
        ("tests/generation/test_t5.py",),
    ),
    Mutation(
        "a plan counts one tensor a message",
        "planner/traffic.py",
        "tensors, size = sum(len(unit.takes) for unit in taken), sum(map(step.message, taken))",
        "tensors, size = sum(1 for unit in taken), sum(map(step.message, taken))",
        ("tests/planner/test_traffic.py",),
    ),
    Mutation(
        "the first pattern of frozen parts counts",
        "architecture/parts.py",
        "return found[-1] if found",
        "return found[0] if found",
        ("tests/architecture/test_parts.py",),
    ),
    Mutation(
        "factors of parts on rate and decay change places",
        "data_parallel/buckets.py",
        "learning_rate=rate,\n                weight_decay=decay,",
        "learning_rate=decay,\n                weight_decay=rate,",
        ("tests/train/test_parts.py",),
    ),
    Mutation(
        "a frozen table gets a gradient from the output layer",
        "tensor_parallel/cross_entropy.py",
        "return gradient_of(weight)[:rows] if weight.requires_grad else None",
        "return gradient_of(weight)[:rows]",
        ("tests/train/test_parts.py",),
    ),
    Mutation(
        "adapters go on with another base",
        "train/base.py",
        "if wanted.files.get(name) != found.get(name)",
        "if False",
        ("tests/train/test_lora.py",),
    ),
    Mutation(
        "a product of adapters is exported by rows, not by heads",
        "convert/to_peft.py",
        "rows = to_theirs(source._replace(transposed=False), b, it.config.model.head_width)",
        "rows = list(b.chunk(len(source.theirs)))",
        ("tests/convert/test_adapters.py",),
    ),
    Mutation(
        "PEFT's target_modules name modules of all layers though only some layers have adapters",
        "convert/to_peft.py",
        "return sorted(short if meant == wanted else wanted)",
        "return sorted(short)",
        ("tests/convert/test_adapters.py",),
    ),
    Mutation(
        "adapters of grouped keys and values are cut though there are more tp ranks than groups",
        "architecture/adapters.py",
        "cut=0 if weight.cut == 0 else None, groups=weight.groups)",
        "cut=0 if weight.cut == 0 else None)",
        ("tests/architecture/test_adapters.py",),
    ),
    Mutation(
        "a rank's mean of what a teacher says is not weighed by its share",
        "tensor_parallel/distillation.py",
        "((every[:, 3] - lacking).exp() * every[:, 4])",
        "every[:, 4]",
        ("tests/tensor_parallel/test_distillation.py",),
    ),
    Mutation(
        "what a teacher leaves to other tokens is forgotten",
        "tensor_parallel/distillation.py",
        "-torch.expm1(of_said)",
        "torch.zeros_like(of_said)",
        ("tests/tensor_parallel/test_distillation.py",),
    ),
    Mutation(
        "the softened probabilities' gradient is not divided by the temperature",
        "tensor_parallel/distillation.py",
        "mul_((soft / temperature)[:, None])",
        "mul_(soft[:, None])",
        ("tests/tensor_parallel/test_distillation.py",),
    ),
    Mutation(
        "a teacher has the student's dropout",
        "train/teacher.py",
        "carry = self.inference.hidden(replace(inputs, masks=None))",
        "carry = self.inference.hidden(inputs)",
        ("tests/train/test_distillation.py",),
    ),
    Mutation(
        "a hidden state's loss has no gradient in the stream",
        "model/matching.py",
        "return grad, grad.new_ones((), dtype=ctx.dtype)",
        "return grad, grad.new_zeros((), dtype=ctx.dtype)",
        ("tests/train/test_distilled_states.py",),
    ),
    Mutation(
        "hidden states of a teacher stay on its stage",
        "train/hidden_states.py",
        "state = broadcast_(state, mesh.pp, pair.teacher_stage)",
        "state = self._buffer(inputs).zero_() if kept.get(pair.teacher) is None else state",
        ("tests/train/test_distilled_states.py",),
    ),
    Mutation(
        "a teacher's labels are not softened",
        "model/bert_labels.py",
        "(each.to(wide) / said.temperature)",
        "each.to(wide)",
        ("tests/train/test_distilled_states.py",),
    ),
    Mutation(
        "a rank without a batch of questions lets the others wait for its weights",
        "evaluation/questions.py",
        "rounds = -(-len(batches) // mesh.data.size)",
        "rounds = len(mine)",
        ("tests/tasks/test_spans.py",),
    ),
    Mutation(
        "questions are scored with the windows of another stride",
        "train/questions.py",
        "tokenizer, windows, config.model.seq_length)",
        "tokenizer, Windows(), config.model.seq_length)",
        ("tests/tasks/test_spans.py",),
    ),
    Mutation(
        "an ensemble of spans is the sum of its logits",
        "serving/squad.py",
        "choose(prepared, total / number, how.selection",
        "choose(prepared, total, how.selection",
        ("tests/serving/test_squad.py",),
    ),
    Mutation(
        "an adapter of peft is added without its scale",
        "huggingface/peft.py",
        "addmm_(b, a, alpha=self.scale)",
        "addmm_(b, a)",
        ("tests/convert/test_peft.py",),
    ),
    Mutation(
        "a view's offset in a file of torch.save is lost",
        "huggingface/pickled.py",
        "start + int(x.storage_offset()) * x.dtype.itemsize",
        "start",
        ("tests/convert/test_refused.py",),
    ),
    Mutation(
        "a parallel residual's MLP reads what attention has added",
        "model/transformer.py",
        "x if self.side_by_side else y, y, masks",
        "y, y, masks",
        ("tests/model/test_neox.py",),
    ),
    Mutation(
        "rows of q, k and v of an old Megatron-LM are taken for those of a new one",
        "megatron/joined.py",
        "x.view(3, -1, head_dim, *x.shape[1:]).transpose(0, 1)",
        "x.view(-1, 3, head_dim, *x.shape[1:])",
        ("tests/megatron/test_convert.py",),
    ),
    Mutation(
        "rows of a GGUF file's queries stay as llama.cpp has them",
        "gguf/source.py",
        "moved.transpose(1, 2).reshape",
        "moved.reshape",
        ("tests/gguf/test_convert.py",),
    ),
    Mutation(
        "a LLaMA's keys are read as its queries",
        "architecture/huggingface/llama.py",
        "at(_Q, _K, _V)",
        "at(_K, _Q, _V)",
        ("tests/convert/test_logits.py",),
    ),
    Mutation(
        "GPT-2's matrices are not transposed",
        "architecture/huggingface/gpt2.py",
        'attn.c_proj", conv=True)',
        'attn.c_proj")',
        ("tests/convert/test_logits.py",),
    ),
    Mutation(
        "BERT's norms are exchanged",
        "architecture/huggingface/bert.py",
        '"blocks.{i}.attention_norm": at(f"{_BLOCK}.attention.ln")',
        '"blocks.{i}.attention_norm": at(f"{_BLOCK}.ln")',
        ("tests/convert/test_logits.py",),
    ),
    Mutation(
        "a Mistral's window is lost",
        "architecture/huggingface/llama.py",
        '"window": window}',
        '"window": None}',
        ("tests/convert/test_logits.py",),
    ),
    Mutation(
        "fp64 has a choice of kernels",
        "kernels/choice.py",
        "if x.is_cuda or x.dtype not in _NAMES:",
        "if x.is_cuda:",
        ("tests/kernels/test_products.py",),
    ),
    Mutation(
        "weight gradients take the kernel of input gradients",
        "kernels/products.py",
        "kernels.weight_gradient)",
        "kernels.input_gradient)",
        ("tests/kernels/test_products.py",),
    ),
    Mutation(
        "a trained bias beside a frozen weight gets no gradient",
        "kernels/products.py",
        "return self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)",
        "return self.weight.requires_grad",
        ("tests/kernels/test_products.py",),
    ),
    Mutation(
        "the output layer takes the kernel of linear layers",
        "tensor_parallel/cross_entropy.py",
        "of(weight).output",
        "of(weight).forward",
        ("tests/tensor_parallel/test_gradient_digits.py",),
    ),
    Mutation(
        "layers do not hear what was decided",
        "train/loop.py",
        "draw=drawn, products=products)",
        "draw=drawn)",
        ("tests/train/test_products.py",),
    ),
    Mutation(
        "every rank measures",
        "train/products.py",
        "measures=ranks.measures)",
        "measures=True)",
        ("tests/train/test_products.py",),
    ),
    Mutation(
        "a run that goes on measures again",
        "train/products.py",
        "if before.metadata is not None and _same_place(before.metadata, ranks.processors, train.precision):",
        "if False:",
        ("tests/train/test_products.py",),
    ),
    Mutation(
        "ranks of other processors keep what suits rank 0",
        "train/products.py",
        "if alike else WIDENED)",
        "if True else WIDENED)",
        ("tests/train/test_products.py",),
    ),
    Mutation(
        "a run of few checkpoints loses its oldest",
        "checkpoint/folders.py",
        "others[: max(0, len(others) - keep)]",
        "others[: len(others) - keep]",
        ("tests/checkpoint/test_folders.py",),
    ),
    Mutation(
        "what rank 0 lacks is not compared",
        "mesh/agreement.py",
        "dict.fromkeys(name for theirs in gathered for name in theirs)",
        "dict.fromkeys(gathered[0])",
        ("tests/launch/test_agreement.py",),
    ),
    Mutation(
        "a document joins a group by its first member alone",
        "corpus/matching.py",
        "any(self._compare(member, document) for member in members)",
        "self._compare(members[0], document)",
        ("tests/corpus/test_duplicates.py",),
    ),
    Mutation(
        "documents of earlier runs are dropped",
        "corpus/components.py",
        "(self.members != self.stays) & (self.members >> 32 >= OWN)",
        "self.members != self.stays",
        ("tests/corpus/test_duplicates.py",),
    ),
    Mutation(
        "a run of the preset tiny loses the positions that it was given",
        "config/defaults.py",
        'if tiny and _at(written, "model.seq_length") == TINY_SEQ_LENGTH:',
        "if tiny:",
        ("tests/config/test_defaults.py",),
    ),
    Mutation(
        "tokens of another key's text are gone on with",
        "data/tokenize.py",
        "self.tokenizer.sha256, self.key, self.end,",
        "self.tokenizer.sha256, self.end,",
        ("tests/data/test_tokenize.py",),
    ),
    Mutation(
        "every index of many is read whole",
        "data/identity.py",
        "INDICES_IN_ALL // num_files",
        "INDICES_IN_ALL",
        ("tests/data/test_identity.py",),
    ),
    Mutation(
        "signed tokens are taken for a forgery",
        "train/metadata.py",
        r'r"^u?int\d{1,2}$"',
        r'r"^uint\d{1,2}$"',
        ("tests/train/test_metadata.py",),
    ),
    Mutation(
        "ALiBi's slopes are rounded before they are multiplied",
        "kernels/mask.py",
        "torch.tensor(self.slopes, dtype=exact)",
        "torch.tensor(self.slopes, dtype=dtype)",
        ("tests/kernels/test_mask.py",),
    ),
    Mutation(
        "an RMS norm learns from the last micro-batch alone",
        "kernels/norm.py",
        "gradient_of(weight).add_((g * normed).sum(rows))",
        "gradient_of(weight).copy_((g * normed).sum(rows))",
        ("tests/model/test_norm.py",),
    ),
    Mutation(
        "a message overwrites its own beginning",
        "errors.py",
        r'c in "\n\t" or',
        r'c in "\r\n\t" or',
        ("tests/test_errors.py",),
    ),
    Mutation(
        "a rank that fell silent while it waited is taken for one that waits",
        "launch/explanation.py",
        "    return known and not picture.is_gone(rank) and rank not in picture.silent",
        "    return known and not picture.is_gone(rank)",
        ("tests/launch/test_explanation.py",),
    ),
    Mutation(
        "ranks disagree though one has gone on",
        "launch/explanation.py",
        "if (other.waiting.axis, other.waiting.number) == (mine.axis, mine.number)",
        "if other.waiting.axis == mine.axis",
        ("tests/launch/test_explanation.py",),
    ),
    Mutation(
        "layers cut by columns take the usual kernels",
        "tensor_parallel/linear.py",
        "        entrance=parallel.entrance,\n        products=parallel.products,\n",
        "        entrance=parallel.entrance,\n",
        (LINEAR,),
    ),
    Mutation(
        "a run that is to be deterministic is not",
        "train/loop.py",
        "        deterministic=train.deterministic,\n",
        "",
        ("tests/train/test_loop.py",),
    ),
    Mutation(
        "credentials are printed",
        "train/monitor.py",
        "print(without_credentials(text), flush=True)",
        "print(text, flush=True)",
        ("tests/train/test_monitor.py",),
    ),
    Mutation(
        "trackers get nothing any more behind a rollback, as they are opened before they are closed",
        "train/monitor.py",
        "            self.close()\n            self.resume(step)\n",
        "            self.resume(step)\n            self.close()\n",
        (TRACKING,),
    ),
    Mutation(
        "a misspelled section's values are taken for the defaults",
        "config/problems.py",
        'tuple(f"{close[0]}.{key}" for key in values if close))',
        "())",
        ("tests/config/test_load.py",),
    ),
    Mutation(
        "tasks of earlier runs are not gathered",
        "corpus/stages.py",
        "num_gathered(len(comparison.sources()))",
        "num_gathered(num_tasks)",
        (DUPLICATES,),
    ),
    Mutation(
        "a document that joins two groups forgets the first",
        "corpus/matching.py",
        "joined = members + joined",
        "joined = [*members, document]",
        (DUPLICATES,),
    ),
    Mutation(
        "passages of just eight words are not looked for",
        "corpus/testsets.py",
        "if length >= min(LEAST, ngram):",
        "if length > min(LEAST, ngram):",
        ("tests/corpus/test_decontaminate.py",),
    ),
    Mutation(
        "who is refused a lock is told of its last holder",
        "lock.py",
        "if (holder is not None and not holder.is_dead()) or time",
        "if holder is not None or time",
        ("tests/test_lock.py",),
    ),
    Mutation(
        "stage 1 sums 16-bit shares into 32 bits",
        "data_parallel/buckets.py",
        "in_place = self.storage.zero == 1 and wire is self.gradients",
        "in_place = self.storage.zero == 1",
        (BUCKETS,),
    ),
    Mutation(
        "an operation may take as long as torch likes",
        "mesh/mesh.py",
        "own = dist.new_group(list(ranks), timeout=limit, backend",
        "own = dist.new_group(list(ranks), backend",
        ("tests/mesh/test_mesh.py",),
    ),
    Mutation(
        "ranks that share memory wait half an hour for a lost rank, whatever limit the run has",
        "mesh/mesh.py",
        "share_memory(own, ranks.index(rank), len(ranks), timeout)",
        "share_memory(own, ranks.index(rank), len(ranks), TIMEOUT)",
        ("tests/mesh/test_mesh.py",),
    ),
    Mutation(
        "a reduce-scatter between machines is counted by its result",
        "mesh/transport.py",
        '"reduce_scatter", x, site, lambda: _reduce_scatter_single(out, x',
        '"reduce_scatter", out, site, lambda: _reduce_scatter_single(out, x',
        ("tests/mesh/test_ledger.py",),
    ),
    Mutation(
        "what a web server says of one file of two tells versions apart",
        "data/remote.py",
        "    if all(said):",
        "    if any(said):",
        ("tests/data/test_remote.py",),
    ),
    Mutation(
        "gradients are asked of losses that have none",
        "pipeline/carry.py",
        "[loss for loss in out if loss.requires_grad]",
        "[loss for loss in out]",
        ("tests/pipeline/test_carry.py",),
    ),
    Mutation(
        "the least loss scale is not the configured one",
        "train/state.py",
        "minimum=train.min_loss_scale)",
        "minimum=1.0)",
        ("tests/train/test_state.py",),
    ),
    Mutation(
        "cross attention drops what attention before it drops",
        "model/t5_block.py",
        "number=self.first_attention + 1,",
        "number=self.first_attention,",
        ("tests/model/test_dropout.py",),
    ),
    Mutation(
        "ends of shards of a stranger's checkpoint are lengths",
        "checkpoint/schema.py",
        "append((shard.start, end))",
        "append((shard.start, shard.length))",
        ("tests/checkpoint/test_stranger.py",),
    ),
    Mutation(
        "a Mistral without a window is one without a default",
        "architecture/huggingface/llama.py",
        'if keys.has("sliding_window") else 4096',
        'if keys.has("sliding_window") else None',
        ("tests/architecture/test_huggingface.py",),
    ),
    Mutation(
        "metrics tell no norm of gradients",
        "train/loop.py",
        "result.loss, result.grad_norm, skipped=",
        "result.loss, 0.0, skipped=",
        ("tests/train/test_loop.py",),
    ),
    Mutation(
        "only the system's errors of a storage are tried again",
        "storage.py",
        "except Exception:",
        "except OSError:",
        ("tests/data/test_remote.py",),
    ),
    Mutation(
        "an adapter's dropout begins at the first position on every rank",
        "tensor_parallel/adapter.py",
        "parallel.first_position(len(x)))",
        "0)",
        ("tests/parity/test_parity.py",),
    ),
    Mutation(
        "texts of an example are cut as if only one could be long",
        "data/example_dataset.py",
        "long = min(long, max(short, room - short))",
        "long = min(long, room - short)",
        ("tests/data/test_example_dataset.py",),
    ),
    Mutation(
        "ranks drop the same columns of the pooled vector",
        "model/bert_labels.py",
        "columns = range(rank * width, (rank + 1) * width)",
        "columns = range(width)",
        ("tests/tasks/test_labels.py",),
    ),
    Mutation(
        "padding of a head of spans sees itself",
        "model/bert_spans.py",
        ", padding_sees_itself=False",
        "",
        ("tests/convert/test_spans.py",),
    ),
    Mutation(
        "a target's tokens begin one too early",
        "evaluation/continuations.py",
        "first = length - len(target)",
        "first = length - len(target) - 1",
        ("tests/evaluation/test_continuations.py",),
    ),
    Mutation(
        "a continuation is greedy with one miss",
        "evaluation/continuations.py",
        "misses == 0",
        "misses <= 1",
        ("tests/evaluation/test_continuations.py",),
    ),
    Mutation(
        "weight gradients of what is frozen count as work",
        "architecture/statement.py",
        "2 * unit.multiply_adds - self._frozen_multiply_adds(unit)",
        "2 * unit.multiply_adds",
        ("tests/model/test_flops.py",),
    ),
    Mutation(
        "padding counts in the vector of a text",
        "serving/encoder.py",
        "means: Tensor = (x.double() * weights).sum(0) / weights.sum(0)",
        "means: Tensor = x.double().mean(0)",
        ("tests/serving/test_encoder.py",),
    ),
    Mutation(
        "a rank that waits for a slow one counts as slow",
        "train/slow_ranks.py",
        "own = time.perf_counter() - started - (ledger.stood_still() - before)",
        "own = time.perf_counter() - started",
        (SLOW_RANKS,),
    ),
    Mutation(
        "stages are held against each other",
        "train/slow_ranks.py",
        'mesh.layout.groups("dp", "tp")',
        'mesh.layout.groups("pp", "dp", "tp")',
        (SLOW_RANKS,),
    ),
    Mutation(
        "a file system that is lost when a run looks for its stop file ends it",
        "train/interrupt.py",
        "    except OSError:\n        return False",
        "    except FileNotFoundError:\n        return False",
        ("tests/train/test_save_retries.py",),
    ),
    Mutation(
        "a copy in memory that is older than the disk is gone on from",
        "train/memory_machines.py",
        "for step in each if step > after}",
        "for step in each if step >= after}",
        ("tests/train/test_memory_machines.py",),
    ),
    Mutation(
        "a copy in memory of another start is gone on from",
        "train/memory_copies.py",
        "if (folder / START).read_text() == start:",
        "if (folder / START).exists():",
        ("tests/train/test_memory_copies.py",),
    ),
    Mutation(
        "a rollback by hand leaves the copies in memory",
        "train/rollbacks.py",
        "    (run / COPIES).unlink(missing_ok=True)\n",
        "",
        ("tests/train/test_memory_copies.py",),
    ),
    Mutation(
        "a machine keeps its own files alone",
        "train/memory_machines.py",
        "[(k - 1) % len(machines)] if is_share(name)",
        "[k] if is_share(name)",
        ("tests/train/test_memory_machines.py",),
    ),
    Mutation(
        "files that are too short count as there",
        "train/memory_machines.py",
        "if each.files.get(name) == size]",
        "if name in each.files]",
        ("tests/train/test_memory_machines.py",),
    ),
    Mutation(
        "the folder of torchrun's agent stays when it has ended",
        "launch/agent.py",
        "            time.sleep(POLL)\n        shutil.rmtree(folder, ignore_errors=True)",
        "            time.sleep(POLL)",
        ("tests/launch/test_agent.py",),
    ),
    Mutation(
        "the learning rate does not warm up again behind a rollback by hand",
        "train/rollbacks.py",
        "        rewarm_steps=asked.rewarm,\n",
        "",
        ("tests/train/test_rollback.py",),
    ),
    Mutation(
        "thermometers read what is not chosen",
        "kernels/probe.py",
        "if self._unit is None or self._limit is None or site not in self._sites:",
        "if self._unit is None or self._limit is None:",
        ("tests/kernels/test_probe.py",),
    ),
    Mutation(
        "fewer ranks are chosen for the batch that the run began with",
        "train/restarts.py",
        "fitting(config, num_ranks, from_now_on(config, step))",
        "fitting(config, num_ranks)",
        ("tests/train/test_restarts.py",),
    ),
    Mutation(
        "every restart counts as progress",
        "launch/restart_policy.py",
        "if attempt.saved != attempts[-1].saved:",
        "if attempt is not attempts[-1]:",
        (RESTART_POLICY,),
    ),
    Mutation(
        "the same error may come again and again",
        "launch/restart_policy.py",
        "if last.kind in DETERMINED and _same(row):",
        "if last.kind == Kind.DONE and _same(row):",
        (RESTART_POLICY,),
    ),
    Mutation(
        "fewer ranks hold more than they must",
        "config/fitting.py",
        "return growth, -speed(found), far,",
        "return -speed(found), growth, far,",
        ("tests/config/test_fitting.py",),
    ),
    Mutation(
        "the only checkpoint is set aside",
        "train/damaged.py",
        "if aside is None and older:",
        "if aside is None:",
        ("tests/train/test_damaged.py",),
    ),
    Mutation(
        "half of the copies are a majority",
        "checkpoint/copies.py",
        "if 2 * len(most) <= total or",
        "if 2 * len(most) < total or",
        ("tests/train/test_copies.py",),
    ),
    Mutation(
        "a save that failed is not tried again",
        "train/save_retries.py",
        "return self.clock() >= self.next_try",
        "return False",
        ("tests/train/test_save_retries.py",),
    ),
    Mutation(
        "a job without progress is queued again",
        "launch/slurm.py",
        '[ "$(newest)" != "$before" ]; }}; then',
        "true; }}; then",
        ("tests/launch/test_slurm.py",),
    ),
    Mutation(
        "a file of a blend that changes begins again",
        "data/changing_blend.py",
        "inner.indices + self._before[number][inner.sets]",
        "inner.indices",
        ("tests/data/test_changing_blend.py",),
    ),
    Mutation(
        "a checkpoint forgets the changes before it",
        "train/recovery.py",
        "in_force(began, metadata.changes), metadata.changes",
        "in_force(began, metadata.changes), []",
        ("tests/train/test_in_force.py",),
    ),
    Mutation(
        "a return behind a change of optim.weight_decay has the weight decay that the run began with",
        "train/recovery.py",
        "replace(corpus, curriculum=curriculum_of(config)), optimizer_of(config)",
        "replace(corpus, curriculum=curriculum_of(config)), optimizer_of(began)",
        ("tests/train/test_recovery.py",),
    ),
    Mutation(
        "a change is seen by rank 0 alone",
        "train/in_force.py",
        "self._decided = Decided.model_validate_json(gather_texts(text, self._mesh.world)[0])",
        "gather_texts(text, self._mesh.world)",
        ("tests/train/test_in_force.py",),
    ),
    Mutation(
        "a record is put beside a checkpoint that is not uploaded",
        "train/uploads.py",
        "self._refreshes and self._there is not None and self._there.get(newest)",
        "self._refreshes and newest",
        ("tests/train/test_uploads.py",),
    ),
    Mutation(
        "a plan asks a stand-in's CPU memory where it is",
        "planner/stand_in.py",
        'self.device == "cuda" and x.is_meta and not self.is_on_host(x)',
        'self.device == "cuda" and x.is_meta',
        ("tests/planner/test_stand_in.py",),
    ),
    Mutation(
        "a checkpoint that was replaced during its upload is whole there",
        "train/uploads.py",
        "if (folder / MANIFEST).read_bytes() != manifest:",
        "if False:",
        (UPLOADS,),
    ),
    Mutation(
        "half of an upload counts among those that are kept",
        "train/uploads.py",
        "if known and step <= newest]",
        "if step <= newest]",
        (UPLOADS,),
    ),
    Mutation(
        "a manifest is replaced after the files of its checkpoint",
        "checkpoint/stored.py",
        "        self._unseal(step)\n        with",
        "        with",
        ("tests/checkpoint/test_stored.py",),
    ),
    Mutation(
        "what was uploaded before a rollback comes back",
        "train/fetched.py",
        "if step > here and not _is_undone(stored, step, run))",
        "if step > here)",
        ("tests/train/test_fetched.py",),
    ),
    Mutation(
        "a rank without examples counts the first ones again",
        "tasks/labels.py",
        "counted = batch.target_mask > 0",
        "counted = batch.target_mask >= 0",
        ("tests/tasks/test_labels.py",),
    ),
    Mutation(
        "adapters drop in an evaluation behind a step",
        "model/model.py",
        "self.parallel.adapter_masks.now = inputs.masks",
        "self.parallel.adapter_masks.now = inputs.masks or self.parallel.adapter_masks.now",
        ("tests/model/test_dropout.py",),
    ),
    Mutation(
        "parameters that tp cuts count as copies over tp",
        "checkpoint/copies.py",
        "slice(param.start, param.stop), place.dim is not None",
        "slice(param.start, param.stop), bool(place.dim)",
        ("tests/train/test_copies.py",),
    ),
    Mutation(
        "copies that differ are mended from a rank's number, not from its place on the axis",
        "checkpoint/copies.py",
        "broadcast_(x, axis, axis.ranks.index(source))",
        "broadcast_(x, axis, source)",
        ("tests/checkpoint/test_copies.py",),
    ),
    Mutation(
        "the search keeps whole stages where chunks live",
        "planner/compose.py",
        "self.live(config, stage) * (kept.each // parallel.virtual_stages)",
        "self.live(config, stage) * kept.each",
        ("tests/planner/test_search.py",),
    ),
    Mutation(
        "a search counts what a rank puts into ZeRO's gathering of parameters dp times too large",
        "planner/compose.py",
        'cost.move("all_gather", width * length // parallel.dp, group)',
        'cost.move("all_gather", width * length, group)',
        ("tests/planner/test_search.py",),
    ),
    Mutation(
        "a single file that is there is overwritten",
        "data/tokenize.py",
        "if present and not overwrite:",
        "if len(present) == 2 and not overwrite:",
        ("tests/data/test_tokenize.py",),
    ),
    Mutation(
        "a GGUF file of Mistral says what its config cannot",
        "gguf/source.py",
        'if arch == "llama" and not window:',
        'if arch == "llama":',
        ("tests/gguf/test_convert.py",),
    ),
    Mutation(
        "tensors of a GGUF file with another general.alignment are read from the wrong bytes",
        "gguf/header.py",
        "start = -(-file.at // alignment) * alignment",
        "start = -(-file.at // _ALIGNMENT) * _ALIGNMENT",
        ("tests/gguf/test_convert.py",),
    ),
    Mutation(
        "what came before a download broke off is counted again",
        "checkpoint/stored.py",
        "if value > most:",
        "if value != most:",
        ("tests/checkpoint/test_stored.py",),
    ),
    Mutation(
        "a copy's manifest is asked of a machine that has lost it",
        "train/memory_copies.py",
        "machine.machines[whole.manifests[0]][0]",
        "machine.machines[0][0]",
        ("tests/train/test_memory_machines.py",),
    ),
    Mutation(
        "held-out parts of a blend by epochs forget how large files are",
        "data/blended_dataset.py",
        "Fraction(str(n)) * len(part) for part, n in",
        "Fraction(str(n)) for part, n in",
        ("tests/data/test_blended_dataset.py",),
    ),
    Mutation(
        "a tied table is the head's alone",
        "architecture/statement.py",
        "if unit.is_loss for bucket in unit.buckets if bucket not in shared)",
        "if unit.is_loss for bucket in unit.buckets)",
        ("tests/architecture/test_statement.py",),
    ),
    Mutation(
        "a tokenizer puts its own frame around every text",
        "data/tokenizer.py",
        "for text in texts], add_special_tokens=False)\n        return [encoding.ids",
        "for text in texts], add_special_tokens=True)\n        return [encoding.ids",
        ("tests/data/test_tokenizer.py",),
    ),
    Mutation(
        "stored segments have a sentence a document",
        "data/segments.py",
        "header.documents * 4, header.token_bytes",
        "header.num_sequences * 4, header.token_bytes",
        ("tests/data/test_sentences.py",),
    ),
    Mutation(
        "a T5 writes behind token 0",
        "generation/sample.py",
        "Answered(self.model, prompt, max_new_tokens, self.start)",
        "Answered(self.model, prompt, max_new_tokens, 0)",
        ("tests/generation/test_t5.py",),
    ),
    Mutation(
        "planned chunks lie on the wrong stages",
        "planner/estimate.py",
        "times[kinds[number % parallel.pp]], number // parallel.pp",
        "times[kinds[number // parallel.virtual_stages]], number // parallel.pp",
        ("tests/planner/test_estimate.py",),
    ),
    Mutation(
        "charts have no marks of what befell the run",
        "drawing/chart.py",
        "axes[axis], scale, marks) for axis in axes]",
        "axes[axis], scale, ()) for axis in axes]",
        ("tests/report/test_page.py",),
    ),
    Mutation(
        "a run at work is called silent as soon as its events are old, though it writes metrics",
        "report/record.py",
        "time.time() - max(written, default=0.0)",
        "time.time() - min(written, default=0.0)",
        ("tests/report/test_record.py",),
    ),
    Mutation(
        "chunks are shown over what others have not read",
        "mesh/shared_memory.py",
        "self._wait(self._read, before)",
        "self._wait(self._written, before)",
        ("tests/mesh/test_shared_memory.py",),
    ),
    Mutation(
        "a chunk counts as read before it is",
        "mesh/shared_memory.py",
        "            shown.use([slot[: shown.num_bytes].view(shown.dtype) for slot in self._slots_of(shown.number)])\n"
        "            self._waiting.popleft()\n"
        "            self._read[self.rank * _LINE] = shown.number",
        "            self._read[self.rank * _LINE] = shown.number\n"
        "            time.sleep(0.001)\n"
        "            shown.use([slot[: shown.num_bytes].view(shown.dtype) for slot in self._slots_of(shown.number)])\n"
        "            self._waiting.popleft()",
        ("tests/mesh/test_shared_memory.py",),
    ),
    Mutation(
        "a collective in shared memory waits for the others where it starts",
        "mesh/shared_memory.py",
        "return Pending(_Exchange(self.segment, number), self.ledger, entry)",
        "return Pending(self.segment.take(number), self.ledger, entry)",
        ("tests/mesh/test_shared_memory.py",),
    ),
    Mutation(
        "a weight gradient does not wait for the input that comes",
        "kernels/products.py",
        "                arrival.wait()\n",
        "",
        (LINEAR,),
    ),
    Mutation(
        "inputs of deferred weight gradients are gathered at once",
        "kernels/products.py",
        "None if kept is None or ctx.later.is_deferred else start(kept)",
        "None if kept is None else start(kept)",
        (LINEAR,),
    ),
    Mutation(
        "the input of a weight gradient is gathered behind the product",
        "kernels/products.py",
        "None if kept is None or ctx.later.is_deferred else start(kept)",
        "None",
        (LINEAR,),
    ),
    Mutation(
        "old checkpoints are deleted before the new one has its name",
        "checkpoint/folders.py",
        "    if os.path.lexists(final):\n"
        "        _set_aside(final)\n"
        "    partial.rename(final)\n"
        "    sync(final.parent)\n"
        "    _keep_newest(final.parent, keep - 1, spared, but=final)\n",
        "    _keep_newest(final.parent, keep - 1, spared, but=final)\n"
        "    if os.path.lexists(final):\n"
        "        _set_aside(final)\n"
        "    partial.rename(final)\n"
        "    sync(final.parent)\n",
        ("tests/checkpoint/test_folders.py",),
    ),
    Mutation(
        "equal lines of changes are one and the same",
        "train/change_requests.py",
        'f"{sha256(text.encode()).hexdigest()[:24]}.{counts[text]}"',
        "sha256(text.encode()).hexdigest()[:24]",
        ("tests/train/test_change_requests.py",),
    ),
    Mutation(
        "the record of a run lacks what was decided of changes",
        "train/run_record.py",
        '    "changes.jsonl",\n    DECIDED,\n',
        '    "changes.jsonl",\n',
        ("tests/train/test_fetched.py",),
    ),
    Mutation(
        "a tokenizer.json's own truncation stays switched on",
        "data/tokenizer.py",
        "        inner.no_padding()\n        inner.no_truncation()\n",
        "        inner.no_padding()\n",
        ("tests/data/test_tokenizer.py",),
    ),
    Mutation(
        "a block of rows of a large tensor is read from the wrong place",
        "checkpoint/files.py",
        "_read_into(file, start + first * row * dtype.itemsize, block)",
        "_read_into(file, start + first * num_rows * row * dtype.itemsize, block)",
        ("tests/checkpoint/test_files.py",),
    ),
    Mutation(
        "a killed worker is noticed only when all are gone",
        "data/parallel.py",
        "            if codes:\n",
        "            if len(codes) == len(processes):\n",
        ("tests/data/test_parallel.py",),
    ),
    Mutation(
        "a dry run sets damaged checkpoints aside",
        "train/loop.py",
        "            if not dry_run:\n                damaged.look(config, mesh.world, monitor)",
        "            damaged.look(config, mesh.world, monitor)",
        ("tests/train/test_damaged.py",),
    ),
    Mutation(
        "likeliest tokens that sum to more than 1 leave less than nothing",
        "tensor_parallel/distillation.py",
        "-torch.expm1(of_said)).clamp_(min=0.0)",
        "-torch.expm1(of_said))",
        ("tests/tensor_parallel/test_distillation.py",),
    ),
    Mutation(
        "the length filter runs before the quality filters",
        "corpus/filters.py",
        "return self._unwanted(document) or self._unlike_text(document) or self._of_wrong_length(document, account)",
        "return self._unwanted(document) or self._of_wrong_length(document, account) or self._unlike_text(document)",
        ("tests/corpus/test_steps.py",),
    ),
    Mutation(
        "kills for memory are counted when the attempt is over",
        "train/restarts.py",
        "            oom_kills = _oom_kills()\n            ended = self._start(fit, places)",
        "            ended = self._start(fit, places)\n            oom_kills = _oom_kills()",
        ("tests/train/test_restarts.py",),
    ),
    Mutation(
        "log-probabilities of a reference are looked up by the file's document",
        "data/preference_dataset.py",
        "self.reference[sample][None]",
        "self.reference[document][None]",
        ("tests/train/test_preferences.py",),
    ),
    Mutation(
        "a run that is at work is returned to an earlier step",
        "train/start.py",
        '    with locked(run, "colonnade rollback", instead="wait until it has ended"):\n'
        "        return _rolled_back(run, step, asked)",
        "    return _rolled_back(run, step, asked)",
        ("tests/train/test_rollback.py",),
    ),
    Mutation(
        "a request is written behind a line without an end",
        "train/change_requests.py",
        'stream.write(b"\\n" * torn + text.encode() + b"\\n")',
        'stream.write(text.encode() + b"\\n")',
        ("tests/train/test_change_requests.py",),
    ),
    Mutation(
        "a full quota is no mistake of the user's disk",
        "errors.py",
        "errno.ENOSPC, errno.EDQUOT, errno.EFBIG",
        "errno.ENOSPC, errno.EFBIG",
        ("tests/test_errors.py",),
    ),
    Mutation(
        "a changed checkpoint.retry_for does not reach the retries",
        "train/loop.py",
        "            retries.limit = config.checkpoint.retry_for\n",
        "",
        ("tests/train/test_save_retries.py",),
    ),
    Mutation(
        "a run that is asked to stop while its disk is full says that everything is saved, and has saved nothing",
        "train/loop.py",
        "saves=bool(saves), must=last or stop, repair=repair)",
        "saves=bool(saves), must=last, repair=repair)",
        ("tests/train/test_save_retries.py",),
    ),
    Mutation(
        "the best setting of a sweep may be one that diverged",
        "train/tuning.py",
        "if outcome.scores is not None and score in outcome.scores and outcome.state != DIVERGED:",
        "if outcome.scores is not None and score in outcome.scores:",
        ("tests/train/test_sweep.py",),
    ),
    Mutation(
        "points of a sweep share a table within a section, and all have the values of the last one",
        "train/sweep.py",
        "            place[part] = dict(place.get(part, {}))\n            place = place[part]\n",
        "            place = place.setdefault(part, {})\n",
        ("tests/train/test_sweep.py",),
    ),
    Mutation(
        "a recall is never over",
        "train/restarts.py",
        "        self.recalled = False\n        return Attempt(",
        "        return Attempt(",
        ("tests/train/test_restarts.py",),
    ),
    Mutation(
        "a return to a step comes before what the storage has is fetched",
        "cli.py",
        "        start.fetch(config, overrides or [], settings, dry_run=dry_run)\n"
        "        if rollback is not None:\n"
        "            print(start.roll_back(settings, rollback, asked), flush=True)",
        "        if rollback is not None:\n"
        "            print(start.roll_back(settings, rollback, asked), flush=True)\n"
        "        start.fetch(config, overrides or [], settings, dry_run=dry_run)",
        ("tests/train/test_fetched.py",),
    ),
    Mutation(
        "a change of the batch forgets the phases of before",
        "train/change.py",
        "names = [*values, *(PHASES if BATCH in values else ())]",
        "names = [*values]",
        ("tests/train/test_change_requests.py",),
    ),
    Mutation(
        "a blend changes at a position in pieces, taken for samples, behind a curriculum of shorter sequences",
        "train/change.py",
        "samples = _position(change) * _unit(config) // config.model.seq_length",
        "samples = _position(change)",
        ("tests/train/test_change_requests.py",),
    ),
    Mutation(
        "a change behind step 0 is one behind the next step",
        "cli_change.py",
        '**({} if at is None else {"at": at})',
        '**({"at": at} if at else {})',
        ("tests/train/test_in_force.py",),
    ),
    Mutation(
        "a run of a sweep takes the share of one that goes on",
        "train/side_by_side.py",
        "start(item, Share(number, shares))",
        "start(item, Share(len(running), shares))",
        ("tests/train/test_side_by_side.py",),
    ),
    Mutation(
        "the Slurm script takes an interrupted wait for the end of the run",
        "launch/slurm.py",
        'while kill -0 "$pid" 2>/dev/null; do wait "$pid"; status=$?; done  # a signal ends a wait, not the run\n',
        "",
        ("tests/launch/test_slurm.py",),
    ),
    Mutation(
        "the guard is not told of the folder in memory",
        "launch/launch.py",
        "own=() if memory is None else (memory,),",
        "own=(),",
        ("tests/launch/test_launch.py",),
    ),
    Mutation(
        "ranks of a machine on which some are idle count fewer of them the higher their own number",
        "launch/launch.py",
        "num_ranks - (rank - local_rank()))",
        "num_ranks - rank)",
        ("tests/launch/test_environment.py",),
    ),
    Mutation(
        "ranks are not told that the run is dry",
        "cli.py",
        '*(overrides or []), *["--audit"] * audit, *["--dry-run"] * dry_run]',
        '*(overrides or []), *["--audit"] * audit]',
        ("tests/test_cli.py",),
    ),
    Mutation(
        "data tokenize takes no heed of --no-append-end",
        "cli_data.py",
        "append_end=not sentences if append_end is None else append_end",
        "append_end=append_end or not sentences",
        ("tests/data/test_commands.py",),
    ),
    Mutation(
        "predict --best takes the newest checkpoints of the models that --with names",
        "cli_predict.py",
        "others=[chosen(other, best) for other in others or []]",
        "others=list(others or [])",
        ("tests/train/test_best.py",),
    ),
    Mutation(
        "imports leave Python's garbage collector switched off for the rest of the process",
        "garbage.py",
        "        gc.enable()\n        gc.freeze()\n",
        "        gc.freeze()\n",
        ("tests/test_garbage.py",),
    ),
    Mutation(
        "who asks for a save has asked the run to end",
        "launch/supervisor.py",
        "        if number != signal.SIGUSR1:  # which asks nobody to end\n            self.asked.append(number)",
        "        self.asked.append(number)",
        ("tests/launch/test_launch.py",),
    ),
    Mutation(
        "a look at changes that failed is not repeated",
        "train/in_force.py",
        "            self._last_look = None\n            waiting, self._waiting",
        "            waiting, self._waiting",
        ("tests/train/test_in_force.py",),
    ),
    Mutation(
        "a change in mid-run brings back the full learning rate that a rollback has lowered",
        "train/in_force.py",
        "state.learning_rate = lowered(learning_rate_of(config), state.rollbacks)",
        "state.learning_rate = learning_rate_of(config)",
        ("tests/train/test_in_force.py",),
    ),
    Mutation(
        "pieces of one document may fall into different parts",
        "corpus/write.py",
        'part_of(about.get("origin", document.id), self.parts, seed=self.seed)',
        "part_of(document.id, self.parts, seed=self.seed)",
        ("tests/corpus/test_decontaminate.py",),
    ),
    Mutation(
        "joining overlapping shared runs takes the end of the last one instead of the furthest",
        "corpus/decontaminate.py",
        "stop=max(joined[-1].stop, run.stop)",
        "stop=run.stop",
        ("tests/corpus/test_decontaminate.py",),
    ),
    Mutation(
        "each piece of a cut-up document is said to have the tokens of the whole document",
        "corpus/decontaminate.py",
        'about["tokens"] = self._count(piece)',
        'about["tokens"] = self._count(document.text)',
        ("tests/corpus/test_decontaminate.py",),
    ),
    Mutation(
        "a run's own part of the index is among the earlier ones",
        "corpus/plan.py",
        "return tuple(part.name for part in found if part.name != identity[:16])",
        "return tuple(part.name for part in found)",
        ("tests/corpus/test_duplicates.py",),
    ),
    Mutation(
        "a file's hash covers only what happened to be read",
        "corpus/streams.py",
        "        while not self._failed and self.read(_BLOCK):\n            pass\n        return None",
        "        return None",
        ("tests/corpus/test_read.py",),
    ),
    Mutation(
        "a pool that dies before any task has begun counts against no task",
        "corpus/executors.py",
        "if self.logging_dir.isfile(_started(rank))] or missing",
        "if self.logging_dir.isfile(_started(rank))]",
        ("tests/corpus/test_run.py",),
    ),
    Mutation(
        "run.piece_bytes is no part of what decides whether it is the same run",
        "corpus/plan.py",
        'if key in ("piece_bytes", "tokenizer")}',
        'if key == "tokenizer"}',
        ("tests/corpus/test_run.py",),
    ),
    Mutation(
        "a run of cleaning goes on though its list of test titles has changed meanwhile",
        "corpus/plan.py",
        "found += [*recipe.decontaminate.tests.values(), *recipe.decontaminate.titles]",
        "found += [*recipe.decontaminate.tests.values()]",
        ("tests/corpus/test_plan.py",),
    ),
    Mutation(
        "the size of changed documents is counted in characters",
        "corpus/step.py",
        'each.metadata["bytes"] = utf8_length(each.text)',
        'each.metadata["bytes"] = len(each.text)',
        ("tests/corpus/test_steps.py",),
    ),
    Mutation(
        "whether entities are unescaped is decided line by line",
        "corpus/repair.py",
        '        if repair.unescape_html and "<" in line:  # from here on, entities are meant to be there\n'
        "            config = config._replace(unescape_html=False)\n",
        "",
        ("tests/corpus/test_steps.py",),
    ),
    Mutation(
        "samples of what was dropped are limited for all reasons together",
        "corpus/tally.py",
        "if len(samples) < self._samples:",
        "if sum(map(len, self.tally.samples.values())) < self._samples:",
        ("tests/corpus/test_tally.py",),
    ),
    Mutation(
        "with all_epochs, which time a sample comes goes by position",
        "data/sampler.py",
        "return self._places(positions) // self.num_samples",
        "return positions // self.num_samples",
        ("tests/data/test_sampler.py",),
    ),
    Mutation(
        "Megatron's rules for heading marks run shortest first",
        "evaluation/detokenize.py",
        '    ("= = = =", "===="),\n    ("= = =", "==="),\n    ("= =", "=="),\n',
        '    ("= =", "=="),\n    ("= = =", "==="),\n    ("= = = =", "===="),\n',
        ("tests/evaluation/test_detokenize.py",),
    ),
    Mutation(
        "an unclosed quotation mark changes the space at the end of its line of WikiText",
        "evaluation/detokenize.py",
        "closed = number < len(parts) - 1",
        "closed = number < len(parts)",
        ("tests/evaluation/test_detokenize.py",),
    ),
    Mutation(
        "documents without text add an end of document each to what the perplexity of a text scores",
        "evaluation/file.py",
        "return [document for document in documents if isinstance(document, str) and document]",
        "return [document for document in documents if isinstance(document, str)]",
        ("tests/evaluation/test_file.py",),
    ),
    Mutation(
        "the context of a passage ends where its last word first occurs",
        "evaluation/passages.py",
        "text[: text.rfind(word)]",
        "text[: text.find(word)]",
        ("tests/evaluation/test_passages.py",),
    ),
    Mutation(
        "documents longer than a row are left out as the run's too_long says",
        "evaluation/perplexity.py",
        'WholeRows(text, replace(cut, too_long="cut"))',
        "WholeRows(text, cut)",
        ("tests/evaluation/test_perplexity.py",),
    ),
    Mutation(
        "the rest of a short read is read from the beginning once more",
        "checkpoint/files.py",
        "view, start = view[count:], start + count",
        "view = view[count:]",
        ("tests/checkpoint/test_files.py",),
    ),
    Mutation(
        "the free space is compared with rank 0's share of a checkpoint, not with all of it",
        "checkpoint/save.py",
        "needed = self.agreement.total_bytes",
        "needed = self.agreement.num_bytes",
        ("tests/checkpoint/test_save_and_load.py",),
    ),
    Mutation(
        "all adapters of a model drop the same elements",
        "kernels/dropout.py",
        "return stream_keys(self.seed, Purpose.ADAPTER_DROPOUT, name_id(name), last=self.samples)",
        "return stream_keys(self.seed, Purpose.ADAPTER_DROPOUT, last=self.samples)",
        ("tests/kernels/test_dropout.py",),
    ),
    Mutation(
        "a received file has its name before its last bytes are written",
        "mesh/files.py",
        "                self._file.close()\n                self._partial.rename(self._path)",
        "                self._partial.rename(self._path)\n                self._file.close()",
        ("tests/mesh/test_files.py",),
    ),
    Mutation(
        "a file that was cut off within a block is sent as if it were whole",
        "mesh/files.py",
        "file.readinto(block.numpy()) != len(block)",
        "file.readinto(block.numpy()) == 0",
        ("tests/mesh/test_files.py",),
    ),
    Mutation(
        "the time for which a process was suspended counts as waiting",
        "mesh/shared_memory.py",
        "left -= min(now - (before or now), 5.0)  # while this process is suspended, time does not count",
        "left -= now - (before or now)",
        ("tests/mesh/test_shared_memory.py",),
    ),
    Mutation(
        "factors on the learning rate of parts have no effect on matrices under LAMB",
        "optim/lamb.py",
        "rates * params.learning_rate)",
        "rates)",
        ("tests/optim/test_lamb.py",),
    ),
]


def mutated(mutation: Mutation, tree: Path = ROOT) -> str:
    """The file with its line broken. Raises ValueError where the line does not stand exactly once."""
    text = (tree / "src" / "colonnade" / mutation.file).read_text()
    count = text.count(mutation.old)
    if count != 1:
        raise ValueError(f"{mutation.name}: {mutation.old!r} stands {count} times in {mutation.file}")
    return text.replace(mutation.old, mutation.new)


def copy_tree(source: Path, target: Path) -> None:
    """What the tests need of a tree."""
    for folder in ("src", "tests", "examples"):
        shutil.copytree(source / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(source / "pyproject.toml", target)


def failed_tests(tree: Path, tests: tuple[str, ...]) -> Counter[str]:
    """`file::test` -> how many of its cases failed, of these test files in a tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    where = [sys.executable, "-c", "import colonnade; print(colonnade.__file__)"]
    origin = subprocess.run(where, cwd=tree, env=environment, capture_output=True, text=True, check=True).stdout
    assert Path(origin.strip()).is_relative_to(tree), f"the tests would import {origin.strip()}"
    return sum((failed_tests_of_file(tree, file, environment) for file in tests), Counter())


def failed_tests_of_file(tree: Path, file: str, environment: dict[str, str]) -> Counter[str]:
    """As `failed_tests`, its slow tests too (but for parity's covering set, which takes minutes). A file whose run
    crashes, or does not end, has failed as a whole.
    """
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", file]
    command += ["-m", "slow or not slow", *(["-k", "not covering"] if file == PARITY else [])]
    output, name = subprocess.PIPE, file.removeprefix("tests/").removesuffix(".py")
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdout=output, stderr=output, text=True, start_new_session=True
    ) as process:
        try:
            printed, errors = process.communicate(timeout=TIME_LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
            return Counter({f"{name}::(does not end)": 1})
    if process.returncode < 0:
        return Counter({f"{name}::(crashes)": 1})
    if process.returncode not in (0, 1):
        raise RuntimeError(f"pytest could not run:\n{printed}\n{errors}")
    named = re.findall(r"^(?:FAILED|ERROR) tests/(\S+?)\.py::(\w+)", printed, flags=re.MULTILINE)
    return Counter(f"{found}::{test}" for found, test in named)


def row(name: str, failed: Counter[str]) -> str:
    """A line of the table: tests of one file together."""
    by_file: dict[str, list[str]] = {}
    for test, count in failed.items():
        file, _, function = test.partition("::")
        by_file.setdefault(file, []).append(function + (f" ×{count}" if count > 1 else ""))
    caught = "<br>".join(f"`{file}`: {', '.join(functions)}" for file, functions in by_file.items())
    return f"| {name} | {caught or '**nothing: it survives**'} |"


def main(words: list[str]) -> int:
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    if not chosen:
        print(f"no mutation is named {words}", file=sys.stderr)
        return 1
    for mutation in chosen:
        mutated(mutation)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder).resolve() / "whole"
        copy_tree(ROOT, whole)
        broken = failed_tests(whole, tuple(sorted({test for mutation in chosen for test in mutation.tests})))
        if broken:
            print(f"the tests fail without any mutation: {dict(broken)}", file=sys.stderr)
            return 1
        print("| mutation | tests that failed |\n|---|---|", flush=True)
        survivors = 0
        for number, mutation in enumerate(chosen):
            tree = whole.with_name(f"mutant{number}")
            copy_tree(whole, tree)
            (tree / "src" / "colonnade" / mutation.file).write_text(mutated(mutation, tree))
            failed = failed_tests(tree, mutation.tests)
            survivors += not failed
            print(row(mutation.name, failed), flush=True)
            shutil.rmtree(tree)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
