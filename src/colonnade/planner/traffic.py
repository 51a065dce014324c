"""What one rank sends in one training step, by theory: how often, how many bytes, over which axis, for what. Pure.

Written from the papers and not from the program, so that the ledger can be held against it (`train --audit`):

    tensor parallelism      2 all-reduces forward and 2 backward a layer, of s·b·h numbers (Megatron-LM, section 3);
                            one more for the embedding, one for the head, two numbers a token for the loss
    sequence parallelism    each all-reduce as a reduce-scatter and an all-gather, and one all-gather more before each
                            weight gradient (Korthikanti et al., 2022, section 4.2.2); the gradients of weights that
                            all ranks have alike, summed once a step
    data parallelism        each gradient once a step; under ZeRO 2 and 3 once a micro-batch
    ZeRO 1, 2               each parameter gathered once a step (Rajbhandari et al., 2020, section 7)
    ZeRO 3                  each parameter gathered whenever its layer is about to run and is not there already
    pipeline                the residual stream forward and its gradient back, for each micro-batch and each cut
    full recomputation      everything that a layer sends forward, twice
    frozen parts            no gradients over dp; no backward where nothing at or below is trained; no all-gather for a
                            weight gradient that nobody wants

Bytes are those of the tensor that a rank puts in (or receives), as in the ledger.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from colonnade.architecture.families import architecture_of
from colonnade.architecture.statement import Architecture, Unit, vocab_rows_per_rank
from colonnade.config.model import ModelConfig
from colonnade.config.schema import ParallelConfig, TrainConfig
from colonnade.data_parallel.lengths import buffer_length
from colonnade.mesh.layout import Layout
from colonnade.pipeline.messages import sends
from colonnade.pipeline.partition import chunks, chunks_of_stage
from colonnade.pipeline.recompute import groups
from colonnade.pipeline.schedule import Action, actions
from colonnade.planner.local import Local, local, ranges
from colonnade.tensor_parallel.logits import CHUNK_LOGITS, CUDA_CHUNKS

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
NUMBER = 8  # bytes of one number that all ranks must agree on, float64


@dataclass(frozen=True)
class Flow:
    """One reason to send, summed over a step."""

    axis: str
    operation: str
    what: str
    count: int
    bytes: int
    """In all, not each."""


@dataclass(frozen=True)
class Step:
    """One rank's training step: all that decides about its traffic."""

    model: ModelConfig
    parallel: ParallelConfig
    train: TrainConfig
    optimizer: str
    vocab_size: int
    rank: int
    skipped: bool = False
    """fp16: gradients overflowed, so that no weight was updated."""
    cuda: bool = False
    """Whether it runs on CUDA, where more of the loss is computed at once."""
    stated: Architecture | None = None
    """The model, with what of it is trained; None: all."""

    @property
    def layout(self) -> Layout:
        return Layout(tp=self.parallel.tp, pp=self.parallel.pp, dp=self.parallel.dp)

    @cached_property
    def place(self) -> dict[str, int]:
        """This rank's number on each axis."""
        return self.layout.coordinates(self.rank)

    @cached_property
    def architecture(self) -> Architecture:
        return self.stated or architecture_of(self.model, self.vocab_size)

    @cached_property
    def chunks(self) -> list[list[Unit]]:
        """The units of each chunk of this rank's stage."""
        return chunks_of_stage(self.architecture, self.parallel, self.place["pp"])

    def count(self, which: Callable[[Unit], bool]) -> int:
        """Such units on this stage."""
        return sum(which(unit) for chunk in self.chunks for unit in chunk)

    @cached_property
    def weights(self) -> dict[str, list[Local]]:
        """What this rank has of every trained weight of its stage, by bucket."""
        return self._held(frozen=False)

    @cached_property
    def lengths(self) -> dict[str, int]:
        """The elements of every bucket's flat buffers of trained weights."""
        return self._lengths(self.weights)

    @cached_property
    def frozen_lengths(self) -> dict[str, int]:
        """Those of frozen ones."""
        return self._lengths(self._held(frozen=True))

    def _held(self, *, frozen: bool) -> dict[str, list[Local]]:
        buckets = dict.fromkeys(bucket for chunk in self.chunks for unit in chunk for bucket in unit.buckets)
        every = {bucket: [local(w, self.parallel.tp) for w in self.architecture.buckets[bucket]] for bucket in buckets}
        found = {bucket: [w for w in weights if w.is_frozen == frozen] for bucket, weights in every.items()}
        return {bucket: weights for bucket, weights in found.items() if weights}

    def _lengths(self, held: Mapping[str, Sequence[Local]]) -> dict[str, int]:
        return {
            bucket: buffer_length((weight.size for weight in weights), self.parallel.dp)
            for bucket, weights in held.items()
        }

    def trains(self, unit: Unit, *names: str) -> bool:
        """Whether a weight of a unit is trained whose name in its bucket begins so."""
        weights = (weight for bucket in unit.buckets for weight in self.architecture.buckets[bucket])
        return any(weight.name.startswith(names) and not weight.is_frozen for weight in weights)

    @property
    def shares(self) -> int:
        """Between how many ranks gradients and master weights are cut."""
        return self.parallel.dp if self.parallel.zero else 1

    @property
    def num_losses(self) -> int:
        return len(self.architecture.losses)

    @property
    def num_microbatches(self) -> int:
        return self.train.num_microbatches(self.parallel.dp)

    @cached_property
    def schedules(self) -> list[list[Action]]:
        """Every stage's actions."""
        parallel = self.parallel
        return [
            actions(parallel.schedule, stage, parallel.pp, self.num_microbatches, parallel.virtual_stages)
            for stage in range(parallel.pp)
        ]

    @property
    def first_trained(self) -> int:
        """The first chunk of the model with a backward."""
        every = chunks(self.architecture, self.parallel)
        return next(number for number, units in enumerate(every) if units[-1].has_backward)

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.model.seq_length * self.train.micro_batch_size

    @property
    def width(self) -> int:
        """Bytes of a number of the computation."""
        return BYTES[self.train.precision]

    @property
    def exact(self) -> int:
        """Bytes of a number of master weights, gradients and losses."""
        return max(self.width, 4)

    @property
    def stream(self) -> int:
        """Bytes of a micro-batch's [s, b, h], as layers read and write it."""
        return self.tokens * self.model.hidden_size * self.width

    @property
    def message(self) -> int:
        """Bytes of the residual stream between two stages."""
        cut = self.parallel.tp if self.parallel.sequence_parallel else 1
        width = self.exact if self.model.fp32_residual else self.width
        return self.tokens * self.model.hidden_size * width // cut

    def size(self, axis: str) -> int:
        """The ranks along an axis of the mesh."""
        tp, pp, dp = self.parallel.tp, self.parallel.pp, self.parallel.dp
        ends = 2 if pp > 1 and self.place["pp"] in (0, pp - 1) else 1
        return {"tp": tp, "pp": pp, "dp": dp, "model": pp * tp, "stage": dp * tp, "world": pp * dp * tp, "ends": ends}[
            axis
        ]


def traffic(step: Step) -> list[Flow]:
    """Everything that a rank sends in a step, by reason."""
    kinds = (
        _blocks,
        _embedding,
        _head,
        _pairs,
        _replicated,
        _gradients,
        _parameters,
        _tied,
        _pipeline,
        _numbers,
        _lamb,
    )
    return [flow for kind in kinds for flow in kind(step) if flow.count and step.size(flow.axis) > 1]


def totals(flows: Sequence[Flow]) -> dict[tuple[str, str], tuple[int, int]]:
    """(count, bytes) by (operation, axis)."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for flow in flows:
        count, size = found.get((flow.operation, flow.axis), (0, 0))
        found[flow.operation, flow.axis] = count + flow.count, size + flow.bytes
    return found


# --- inside the model: over tp ----------------------------------------------------------------------------------------


def _over_tp(step: Step, operation: str, what: str, count: int) -> Flow:
    """`count` operations on residual streams. Into an all-gather goes this rank's part of one."""
    each = step.stream // step.parallel.tp if operation == "all_gather" else step.stream
    return Flow("tp", operation, what, count, count * each)


def _blocks(step: Step) -> Iterator[Flow]:
    blocks = [unit for chunk in step.chunks for unit in chunk if unit.recomputes]
    full = step.parallel.recompute == "full"
    twice = sum(full and unit.has_backward for unit in blocks)
    again = ", and again in recomputation" if twice else ""
    n, forward = step.num_microbatches, 2 * step.num_microbatches * (len(blocks) + twice)
    back = [_back(step, unit) for unit in blocks]
    into, out, gathered = (n * sum(each[place] for each in back) for place in range(3))
    if not step.parallel.sequence_parallel:
        yield _over_tp(step, "all_reduce", f"2 a layer forward, behind attention and MLP{again}", forward)
        yield _over_tp(step, "all_reduce", "2 a layer backward, before attention and MLP", into)
        return
    yield _over_tp(step, "all_gather", f"2 a layer forward, before attention and MLP{again}", forward)
    yield _over_tp(step, "reduce_scatter", f"2 a layer forward, behind attention and MLP{again}", forward)
    yield _over_tp(step, "all_gather", "2 a layer backward, behind attention and MLP", out)
    yield _over_tp(step, "reduce_scatter", "2 a layer backward, before attention and MLP", into)
    yield _over_tp(step, "all_gather", "2 a layer backward, what its weight gradients are made of", gathered)


def _back(step: Step, unit: Unit) -> tuple[int, int, int]:
    """Of a layer's two halves: whose input has a gradient, whose output has one, which trains the weights that read its
    input. All of them, where nothing is frozen.
    """
    pre, flows = step.model.norm_position == "pre", unit.sends_back
    found = []
    for half, row, columns in (
        ("attention", "attention.output.weight", ("attention.qkv.", "attention.query.", "attention.key_value.")),
        ("mlp", "mlp.down.weight", ("mlp.up.", "mlp.gate.")),
    ):
        into = flows or (pre and step.trains(unit, f"{half}_norm."))
        inner = step.trains(unit, *columns, "attention.query_norm.", "attention.key_norm.", row)
        reads = step.trains(unit, *(f"{column}weight" for column in columns))
        found.append((into, into or inner, reads))
        flows = into or step.trains(unit, f"{half}.", f"{half}_norm.")
    into, out, reads = (sum(each) for each in zip(*found, strict=True))
    return into, out, reads


def _embedding(step: Step) -> Iterator[Flow]:
    units = [unit for chunk in step.chunks for unit in chunk if unit.reads_tokens]
    n, trained = step.num_microbatches * len(units), [unit for unit in units if _trains_table(step, unit)]
    if not step.parallel.sequence_parallel:
        yield _over_tp(step, "all_reduce", "embedding forward", n)
        return
    yield _over_tp(step, "reduce_scatter", "embedding forward", n)
    yield _over_tp(step, "all_gather", "embedding backward", step.num_microbatches * len(trained))


def _trains_table(step: Step, unit: Unit) -> bool:
    """Whether the first of the buckets that a unit reads, its token table, is trained."""
    return not all(weight.is_frozen for weight in step.architecture.buckets[unit.buckets[0]])


def _head(step: Step) -> Iterator[Flow]:
    n = step.num_microbatches * step.count(lambda unit: unit.is_loss)
    rows = vocab_rows_per_rank(step.vocab_size, step.parallel.tp)
    limit = CHUNK_LOGITS * CUDA_CHUNKS if step.cuda else CHUNK_LOGITS
    chunks = max(1, -(-step.tokens * rows // limit))
    chunks = -(-step.tokens // -(-step.tokens // chunks))  # equal chunks of tokens: there may be fewer
    yield Flow("tp", "all_gather", "loss, 2 numbers a token", n * chunks, n * 2 * step.tokens * step.exact)
    units = [unit for chunk in step.chunks for unit in chunk if unit.is_loss]
    back = step.num_microbatches * sum(unit.sends_back or step.trains(unit, "norm.", "dense") for unit in units)
    if not step.parallel.sequence_parallel:
        yield _over_tp(step, "all_reduce", "head backward", back)
        return
    yield _over_tp(step, "all_gather", "head forward", n)
    yield _over_tp(step, "reduce_scatter", "head backward", back)


def _pairs(step: Step) -> Iterator[Flow]:
    """A second loss, of each sample's first position: a column-parallel layer, and a row-parallel one of 2 outputs."""
    if step.num_losses < 2:
        return
    n, tp = step.num_microbatches * step.count(lambda unit: unit.is_loss), step.parallel.tp
    row = step.train.micro_batch_size * step.model.hidden_size * step.width
    logits = step.train.micro_batch_size * 2 * step.width
    if not step.parallel.sequence_parallel:
        yield Flow("tp", "all_reduce", "logits of pairs forward", n, n * logits)
        yield Flow("tp", "all_reduce", "first positions backward", n, n * row)
        return
    yield Flow("tp", "all_gather", "first positions forward", n, n * row)
    yield Flow("tp", "reduce_scatter", "logits of pairs forward", n, n * logits * tp)
    yield Flow("tp", "all_gather", "logits of pairs backward", n, n * logits)
    yield Flow("tp", "reduce_scatter", "first positions backward", n, n * row * tp)
    yield Flow("tp", "all_gather", "first positions backward, what a weight gradient is made of", n, n * row)
    yield Flow("tp", "all_reduce", "loss of pairs, from the first rank", n, n * step.exact)


def _replicated(step: Step) -> Iterator[Flow]:
    """Gradients of weights that all tp ranks have alike, of this rank's slice: under sequence parallelism all of them,
    else those of which each rank uses a shard.
    """
    every = step.parallel.sequence_parallel
    numbers = sum(
        _in_slice(step, bucket, start, stop)
        for bucket, weights in step.weights.items()
        for kind, start, stop in ranges(weights)
        if kind.is_partial or (every and kind.is_replicated)
    )
    yield Flow("tp", "all_reduce", "gradients of replicated weights", int(numbers > 0), numbers * step.exact)


def _in_slice(step: Step, bucket: str, start: int, stop: int) -> int:
    """How many elements of a range of a bucket lie in this rank's slice."""
    share = step.lengths[bucket] // step.shares
    first = share * (step.place["dp"] if step.parallel.zero else 0)
    return max(0, min(stop, first + share) - max(start, first))


# --- ownership: over dp, and between the ends of the pipeline ---------------------------------------------------------


def _gradients(step: Step) -> Iterator[Flow]:
    zero, n = step.parallel.zero, step.num_microbatches
    width = step.width if step.train.reduce_precision == "16-bit" else step.exact
    times, often = (n, "micro-batch") if zero >= 2 else (1, "step")
    operation = "reduce_scatter" if zero else "all_reduce"
    count, size = times * len(step.lengths), times * sum(step.lengths.values()) * width
    yield Flow("dp", operation, f"gradients of each bucket once a {often}", count, size)


def _parameters(step: Step) -> Iterator[Flow]:
    zero = step.parallel.zero
    if zero < 3:
        times = dict.fromkeys(step.lengths, int(zero in (1, 2) and not step.skipped))
        yield _gathered(step, "updated parameters of each bucket", times, step.lengths)
        return
    yield _gathered(step, "parameters of each bucket for each use", _gathers(step), step.lengths)
    yield _gathered(step, "frozen parameters of each bucket for each use", _gathers(step), step.frozen_lengths)


def _gathered(step: Step, what: str, times: Mapping[str, int], lengths: Mapping[str, int]) -> Flow:
    size = sum(times[bucket] * length // step.parallel.dp * step.width for bucket, length in lengths.items())
    return Flow("dp", "all_gather", what, sum(times[bucket] for bucket in lengths), size)


def _gathers(step: Step) -> dict[str, int]:
    """ZeRO 3: how often each bucket is gathered, if what is used twice in a row is kept."""
    wanted = [set(unit.buckets) for unit in _uses(step)]
    counts, here = dict.fromkeys([*step.lengths, *step.frozen_lengths], 0), set[str]()
    for buckets in wanted:
        for bucket in buckets - here:
            counts[bucket] += 1
        here = buckets
    return counts


def _uses(step: Step) -> Iterator[Unit]:
    """The units that this rank runs in a step, forward and backward, in their order."""
    every = step.parallel.recompute_every if step.parallel.recompute == "full" else 0
    for action in step.schedules[step.place["pp"]]:
        if action.kind == "F":
            yield from step.chunks[action.chunk]
        elif action.kind == "B":
            for group, again in reversed(groups(step.chunks[action.chunk], every)):
                yield from (unit for unit in [*(group if again else []), *reversed(group)] if unit.has_backward)


def _tied(step: Step) -> Iterator[Flow]:
    for bucket in step.architecture.shared_buckets():
        size = step.lengths.get(bucket, 0) // step.shares * step.exact
        yield Flow("ends", "all_reduce", "gradients of the token table of first and last stage", int(size > 0), size)


# --- the pipeline, and what all ranks agree on ------------------------------------------------------------------------


def _pipeline(step: Step) -> Iterator[Flow]:
    stage = step.place["pp"]
    sent = sends(step.schedules, step.parallel.pp * step.parallel.virtual_stages, step.first_trained)
    out = [each for each in sent[stage] if each.to != stage]
    come = [each for other, all_ in enumerate(sent) if other != stage for each in all_ if each.to == stage]
    for operation, messages in (("send", out), ("receive", come)):
        for kind, what in (("F", "residual stream"), ("B", "its gradient")):
            count = sum(each.message.kind == kind for each in messages)
            yield Flow("pp", operation, f"{what}, each micro-batch", count, count * step.message)


def _numbers(step: Step) -> Iterator[Flow]:
    k = step.num_losses
    yield Flow("dp", "all_reduce", "what counts in each loss, losses", 2, 2 * k * NUMBER)
    yield Flow("pp", "all_reduce", "losses, from the last stage", 1, k * NUMBER)
    yield Flow("world" if step.parallel.zero else "model", "all_reduce", "gradient norm", 1, NUMBER)


def _lamb(step: Step) -> Iterator[Flow]:
    if step.optimizer == "lamb" and not step.skipped:
        size = 2 * NUMBER * sum(map(len, step.weights.values()))
        yield Flow("stage" if step.parallel.zero else "tp", "all_reduce", "LAMB's norms, 2 a weight", 1, size)
