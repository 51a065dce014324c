"""A teacher: another model, which tells the student of every token what it thinks comes next.

It is cut over the run's tp and pp, whatever layout it was trained on, holds its weights in the run's number format, and
runs forward alone: before each step, for all of its micro-batches. The last stage then has what the teacher's output
layer reads, [s, b, g] a micro-batch; logits are made of it where the loss is computed, a chunk of tokens at a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from colonnade.architecture.adapters import is_adapter
from colonnade.architecture.families import architecture_of
from colonnade.architecture.parts import trained_architecture
from colonnade.checkpoint.manifest import read_manifest
from colonnade.checkpoint.plan import Shard
from colonnade.config.check import check
from colonnade.config.model import ModelConfig
from colonnade.config.parts import LoraConfig, PartsConfig
from colonnade.config.schema import Config, ParallelConfig
from colonnade.data.label_names import compare_labels
from colonnade.errors import CheckpointError, ConfigError
from colonnade.huggingface.folder import is_published, open_published
from colonnade.huggingface.peft import is_peft
from colonnade.kernels.choice import Products
from colonnade.launch.agreement import on_all_ranks
from colonnade.mesh.mesh import Axis, Mesh
from colonnade.model.bert_labels import LabelHead, LabelInputs, SoftLabels
from colonnade.model.inputs import Inputs
from colonnade.model.precision import DTYPES
from colonnade.model.stack import Head, Stack
from colonnade.model.transformer import residual_dtype
from colonnade.pipeline.chunk import Chunk
from colonnade.pipeline.inference import Inference, ResidentWeights
from colonnade.pipeline.partition import chunks
from colonnade.tasks.task import Microbatch
from colonnade.tensor_parallel.distillation import SoftTargets
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.tensor_parallel.placement import named_placements
from colonnade.train.corpus import Corpus
from colonnade.train.hidden_states import Listening, Matching, matching_of
from colonnade.train.init_from import Origin, compared, no_weights, origin_together
from colonnade.train.metadata import config_of
from colonnade.train.newest import checkpoint_at
from colonnade.train.recovery import shard
from colonnade.train.state import build_model

NAMED_BY = "distillation.teacher"


@dataclass(frozen=True)
class Teacher:
    """A model that runs beside the student (`Teaching`)."""

    origin: Origin
    model: Stack
    inference: Inference
    alpha: float
    temperature: float
    listening: Listening
    """The model as it is run."""
    matching: Matching | None
    """Of hidden states; None: they are not compared."""
    mesh: Mesh

    def teach(self, batches: Sequence[Microbatch], inputs: Sequence[Inputs], scale: float) -> list[Inputs]:
        found, states = list[Inputs](), list[dict[str, Tensor]]()
        for each in inputs:
            found.append(self._taught(each))
            states.append(self.listening.taken())
        self.inference.close()
        return found if self.matching is None else self.matching.targets(states, found, scale, self.mesh)

    def _taught(self, inputs: Inputs) -> Inputs:
        carry = self.inference.hidden(replace(inputs, masks=None))
        if carry is None:
            return inputs
        x, head = self.model.residual(carry), self.model.head
        if isinstance(head, LabelHead):
            assert isinstance(inputs, LabelInputs), "student and teacher have the same head"
            return with_soft_labels(inputs, self.alpha, self.temperature, head.predict(x))
        assert isinstance(head, Head), "a gpt or a bert"
        with torch.no_grad():
            read = head.read_by_output(x)
        soft = {"hidden": read, "table": head.output.weight, "bias": head.output_bias}
        return with_soft_targets(inputs, self.alpha, self.temperature, **soft)


def with_soft_targets(inputs: Inputs, alpha: float, temperature: float, **said: torch.Tensor | None) -> Inputs:
    """Inputs whose loss is shared by labels and teacher. `said`: fields of `SoftTargets`."""
    assert inputs.loss_weights is not None, "a step weighs its tokens"
    weights = inputs.loss_weights
    soft = SoftTargets(weights * (alpha * temperature**2), temperature, **said)
    return replace(inputs, loss_weights=weights * (1.0 - alpha), soft=soft)


def with_soft_labels(inputs: LabelInputs, alpha: float, temperature: float, logits: Tensor) -> Inputs:
    """As `with_soft_targets`, of a head with labels; the teacher's logits are [b, labels]."""
    assert inputs.target_weights is not None, "a step weighs its samples"
    weights = inputs.target_weights
    said = SoftLabels(weights * (alpha * temperature**2), temperature, logits)
    return replace(inputs, target_weights=weights * (1.0 - alpha), soft_labels=said)


def teacher_model(path: Path) -> ModelConfig:
    """[model] of what distillation.teacher names. ConfigError for no model, CheckpointError for one that is damaged."""
    found = checkpoint_at(path)
    if found is not None:
        model = config_of(found, read_manifest(found)).model
        return model.model_copy(update={"head": "pretraining"}) if model.head == "preferences" else model
    if is_published(path) and not is_peft(path):
        return open_published(path).model
    raise ConfigError(no_weights(path, NAMED_BY))


def teacher_together(config: Config, corpus: Corpus, mesh: Mesh, *, begins: bool = True) -> tuple[Origin, ModelConfig]:
    """What distillation.teacher names; its weights are not read. ConfigError and CheckpointError, on all ranks, where
    it cannot teach this run. `begins`: whether it has taught nothing yet. Every rank calls this.
    """
    assert config.distillation.teacher is not None, "there is a teacher"
    origin = origin_together(Path(config.distillation.teacher), mesh.world, NAMED_BY)

    def found() -> tuple[Origin, ModelConfig]:
        model = teacher_model(origin.path)
        check_teacher(origin, model, config, corpus)
        return compared(origin, corpus, lambda: check_tokenizer(origin, corpus), begins=begins), model

    return on_all_ranks(found, mesh.world)


def open_teacher(
    config: Config, mesh: Mesh, corpus: Corpus, device: torch.device, products: Products, *, begins: bool = True
) -> Teacher:
    """Read the teacher's part of this rank. Raises what `teacher_together` does; every rank calls this."""
    chosen = config.distillation
    origin, model = teacher_together(config, corpus, mesh, begins=begins)
    architecture = architecture_of(model, corpus.vocab_size)
    every = chunks(architecture, ParallelConfig(pp=mesh.pp.size))
    units = every[mesh.pp.rank]
    dtype, parallel = DTYPES[config.train.precision], Parallel(mesh.tp, products=products)
    built = build_model(model, corpus.vocab_size, parallel, dtype=dtype, units=[unit.name for unit in units])
    assert isinstance(built, Stack), "a gpt or a bert"
    for parameter in built.parameters():
        parameter.data.zero_()  # padding rows stay zero
    origin.fill(list(_shards(built, mesh.tp)))
    built = built.to(device=device, dtype=dtype).requires_grad_(False).eval()
    matching = matching_of(
        chosen,
        student=chunks(trained_architecture(config, corpus.vocab_size), config.parallel),
        teacher=every,
        stages=mesh.pp.size,
        width=model.hidden_size,
        dtype=residual_dtype(dtype, model.fp32_residual),
    )
    listening = Listening(built, frozenset(pair.teacher for pair in matching.pairs) if matching else frozenset())
    inference = Inference([Chunk(units, listening, ResidentWeights())], listening, mesh.pp, ResidentWeights())
    return Teacher(origin, built, inference, chosen.alpha, chosen.temperature, listening, matching, mesh)


def _shards(model: Stack, tp: Axis) -> Iterator[Shard]:
    for bucket, places in named_placements(model.bucket_modules(), tp).items():
        for place in places:
            yield from shard(f"{bucket}.{place.name}", place, place.parameter.data)


def check_teacher(origin: Origin, model: ModelConfig, config: Config, corpus: Corpus) -> None:
    """ConfigError where a teacher speaks of more or fewer tokens, reads less, has adapters, or cannot be cut as the run
    is.
    """
    student, where = config.model, f"distillation.teacher = {str(origin.path)!r}"
    if (model.kind, model.head) != (student.kind, student.head):
        raise ConfigError(
            f'{where} is a {model.kind} with head "{model.head}", and the student a {student.kind} with head '
            f'"{student.head}": it is taught by one of its own kind.'
        )
    if any(map(is_adapter, origin.shapes)):
        raise ConfigError(
            f"{where} has adapters beside its weights, and teaches without them. `colonnade merge {origin.path} "
            "TARGET` makes one model of both: name that."
        )
    _check_labels(where, origin, model, config, corpus)
    _check_layers(where, model, config)
    size, top_k = origin.model["vocab_size"], config.distillation.top_k
    if size != corpus.vocab_size:
        raise ConfigError(
            f"{where} tells {size:,} tokens apart, and the run's vocabulary has {corpus.vocab_size:,}: what it says of "
            "a token has to be of the same token. Use a teacher with the run's tokenizer, or the "
            f"teacher's for the run ({origin.path})."
        )
    if top_k is not None and top_k > corpus.vocab_size:
        raise ConfigError(
            f"distillation.top_k = {top_k} is more than the vocabulary's {corpus.vocab_size:,} tokens. Use fewer; 16 "
            "to 128 are usual."
        )
    if model.position == "learned" and model.seq_length < student.seq_length:
        raise ConfigError(
            f"{where} has {model.seq_length:,} positions, and the student's samples are {student.seq_length:,} tokens "
            f"long. Use a model.seq_length of at most {model.seq_length:,}."
        )
    _check_cut(where, model, config)


def check_tokenizer(origin: Origin, corpus: Corpus) -> None:
    """ConfigError where a teacher speaks of other tokens, CheckpointError where its own cannot be read."""
    ours = corpus.tokenizer
    theirs = None if ours is None else origin.tokenizer()
    if theirs is not None and ours is not None and not ours.is_of(theirs):
        raise ConfigError(
            f"distillation.teacher = {str(origin.path)!r} was trained with another tokenizer than data.tokenizer: the "
            f"same id would mean different text. Set data.tokenizer = {str(origin.path)!r}, and make the token "
            "files with it."
        )


def _check_labels(where: str, origin: Origin, model: ModelConfig, config: Config, corpus: Corpus) -> None:
    """ConfigError where a head's labels are others."""
    theirs, mine = list(origin.labels), corpus.labels
    if model.num_labels != config.model.num_labels or compare_labels(theirs, mine) != "same":
        raise ConfigError(
            f"{where} tells {_labels(model.num_labels, theirs)} apart, and the student "
            f"{_labels(config.model.num_labels, mine)}: a label's number has to mean the same to both. Use a teacher "
            "that was fine-tuned on the student's task."
        )


def _labels(number: int | None, names: Sequence[str]) -> str:
    return f"{number} labels ({', '.join(names)})" if names else f"{number} labels"


def _check_layers(where: str, model: ModelConfig, config: Config) -> None:
    """ConfigError where hidden states cannot be compared."""
    chosen = config.distillation
    if not chosen.student_layers:
        return
    if max(chosen.teacher_layers) >= model.num_layers:
        raise ConfigError(
            f"distillation.teacher_layers = {list(chosen.teacher_layers)}, and {where} has the layers 0 … "
            f"{model.num_layers - 1}. Use these."
        )
    if model.hidden_size != (chosen.teacher_hidden_size or config.model.hidden_size):
        set_to = "unset" if chosen.teacher_hidden_size is None else str(chosen.teacher_hidden_size)
        raise ConfigError(
            f"{where} has hidden states of {model.hidden_size} features, and distillation.teacher_hidden_size is "
            f"{set_to}, where model.hidden_size = {config.model.hidden_size}. Set "
            f"distillation.teacher_hidden_size = {model.hidden_size}."
        )


def _check_cut(where: str, model: ModelConfig, config: Config) -> None:
    wrong = cut_problems(model, config)
    if wrong:
        lines = "\n".join(f"  {message}" for message in wrong)
        raise CheckpointError(f"{where} cannot be cut as the run is:\n{lines}")


def cut_problems(model: ModelConfig, config: Config) -> list[str]:
    """Why a teacher cannot be cut over the run's tp and pp: nothing where it can."""
    layout = config.parallel
    plain = ParallelConfig(tp=layout.tp, pp=layout.pp, dp=layout.dp)
    alone = config.model_copy(update={"model": model, "parallel": plain, "parts": PartsConfig(), "lora": LoraConfig()})
    asked = {"parallel.tp", "parallel.pp"}
    return [each.message for each in check(alone) if asked & set(each.keys)]
