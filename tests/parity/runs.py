"""Five steps of training on a layout, with everything they produced: what the parity tests compare.

A `Case` says what is trained, a `Way` how: layout, schedule, what is cut, freed or computed again. The same case in any
way must give the same numbers. Weights start wide (init_std 0.3), so that no softmax is flat and no gradient is close
to nothing.

One gradient is nothing: a key's bias adds the same to all scores of a query, which the softmax does not see. What is
left is rounding, 1e-16, and Adam divides it by its own size plus epsilon. With epsilon 1e-5 that is no step at all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar
from unittest.mock import patch

import torch
import torch.fx.experimental.symbolic_shapes
from torch import Tensor

from colonnade.config.model import ModelConfig
from colonnade.config.parts import LoraConfig, PartsConfig
from colonnade.config.schema import Config, DataConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from colonnade.config.thermometers import ThermometersConfig
from colonnade.data.loader import Batch
from colonnade.data_parallel.buckets import Bucket, named_ranges
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh
from colonnade.tasks.bert import BertBatch
from colonnade.tasks.labels import LabelBatch
from colonnade.tasks.preferences import PreferenceBatch
from colonnade.tasks.spans import SpanBatch
from colonnade.tasks.t5 import T5Batch
from colonnade.tensor_parallel import cross_entropy
from colonnade.tensor_parallel.placement import Placement
from colonnade.train.state import TrainState, build_state
from colonnade.train.step import StepResult, train_step
from tests.blocks import LLAMA_BLOCK

GLOBAL_BATCH, SEQ_LENGTH, STEPS = 8, 8, 5
CPU = torch.device("cpu")
AnyBatch = Batch | BertBatch | LabelBatch | PreferenceBatch | SpanBatch | T5Batch
AnySequences = TypeVar("AnySequences", Batch, BertBatch)
Samples = TypeVar("Samples", Batch, BertBatch, LabelBatch, PreferenceBatch, SpanBatch, T5Batch)

Mask = Literal["none", "differ", "second_half"]
"""Labels that count: all; a different number in every sample; none in the second half of the batch."""
Buffer = Literal["master", "reduced", "exp_avg", "exp_avg_sq"]
"""What a rank may have a slice of."""
KEPT: tuple[Buffer, ...] = ("master", "exp_avg", "exp_avg_sq")
"""What it keeps from step to step."""

Block = Literal[
    "gpt", "llama", "grouped", "window", "neox", "preferences", "bert", "labels", "scores", "choice", "spans", "t5",
    "t5 relu",
]  # fmt: skip

BLOCKS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA_BLOCK,
    "grouped": {
        **LLAMA_BLOCK,
        "num_key_value_heads": 2,
        "query_key_norm": True,
        "query_key_value_bias": True,
    },  # with tp 4 ranks have copies of the two
    "window": {"window": 3, "num_key_value_heads": 1},  # biases of copied heads too
    "bert": {"kind": "bert", "position": "learned"},
    "labels": {"kind": "bert", "position": "learned", "head": "classification", "num_labels": 3},
    "scores": {"kind": "bert", "position": "learned", "head": "classification", "num_labels": 1},
    "choice": {"kind": "bert", "position": "learned", "head": "choice", "num_labels": 3, "bias": False},
    "spans": {  # a bias that all positions have in common changes no chance: here there is none
        "kind": "bert",
        "position": "learned",
        "head": "spans",
        "norm": "rmsnorm",
        "bias": False,
    },
    "preferences": {"head": "preferences"},
    "t5": {  # what is written is longer than what is read, and the decoder deeper than the encoder may be
        "kind": "t5",
        "position": "relative",
        "norm": "rmsnorm",
        "bias": False,
        "activation": "geglu_tanh",
        "norm_position": "pre",
        "embedding_norm": False,
        "num_decoder_layers": 3,
        "decoder_seq_length": 12,
        "relative_buckets": 8,
        "relative_distance": 7,
        "init_std": 1.5,
    },
    "neox": {"parallel_residual": True, "norm_position": "pre", "position": "rotary", "rotary": {"share": 0.5}},
}
BLOCKS["t5 relu"] = {**BLOCKS["t5"], "activation": "relu", "head_dim": 6, "num_decoder_layers": 1}


PARTS: dict[str, dict[str, Any]] = {
    "all": {},
    "upper": {"frozen": ("embedding*", "*blocks.0.*")},  # no backward below; a tied table is used, and stays
    "lower": {"frozen": ("*blocks.*", "!*blocks.0.attention*", "!*.mlp_norm.*")},
    "table": {"frozen": ("embedding.tokens.*", "*.mlp.down.weight", "*.output.*")},
    "factors": {
        "learning_rate": {"*blocks.*": 0.5, "*norm*": 2.0, "*blocks.0.mlp*": 0.1},
        "weight_decay": {"*": 3.0, "*.attention.*": 0.0},
    },
}
"""What is trained, and how: sections [parts]."""
LORA: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4, "dropout": 0.2, "targets": ("*",)},
    "lora on some": {"rank": 2, "alpha": 5.0, "targets": ("blocks.1.attention.*", "mlp.down")},
}
"""And sections [lora]."""


@dataclass(frozen=True)
class Case:
    """What is trained, up to the layout."""

    drop: float = 0.1
    vocab_size: int = 37
    tied: bool = True
    clipped: bool = True
    mask: Mask = "differ"
    documents: Literal["joined", "separate"] = "joined"
    precision: Literal["fp32", "bf16", "fp16", "fp64"] = "fp64"
    optimizer: Literal["adamw", "lamb"] = "adamw"
    position: Literal["learned", "alibi"] = "learned"
    norm_position: Literal["pre", "post"] = "pre"
    embedding_norm: bool = False
    fp32_residual: bool = False
    loss_scale: float = 1024.0
    """fp16: small enough for the first step not to overflow."""
    num_layers: int = 2
    block: Block = "gpt"
    """What the model is made of: see `BLOCKS`."""
    parts: Literal["all", "upper", "lower", "table", "factors", "lora", "lora on some"] = "all"
    """What of it is trained: see `PARTS` and `LORA`."""
    hidden_size: int = 16
    num_heads: int = 4
    seq_length: int = SEQ_LENGTH
    global_batch_size: int = GLOBAL_BATCH

    @property
    def clip(self) -> float:
        return 0.05 if self.clipped else 1e6

    @property
    def model(self) -> ModelConfig:
        shape = {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_heads": self.num_heads,
            "ffn_hidden_size": 24,
            "seq_length": self.seq_length,
            "dropout": self.drop,
            "attention_dropout": self.drop,
            "tie_embeddings": self.tied,
            "norm_position": self.norm_position,
            "embedding_norm": self.embedding_norm,
            "fp32_residual": self.fp32_residual,
            "init_std": 0.3,
            "position": self.position,
        }
        return ModelConfig(**{**shape, **BLOCKS[self.block]})


@dataclass(frozen=True)
class Way:
    """How it is trained. The default is the serial run: one rank, one micro-batch, nothing computed again."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batch_size: int = GLOBAL_BATCH
    schedule: Literal["naive", "gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    virtual_stages: int = 1
    partition: Literal["layers", "parameters"] = "layers"
    cuts: tuple[int, ...] = ()
    sequence_parallel: bool = False
    zero: Literal[0, 1, 2, 3] = 0
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_every: int = 1
    offload: bool = False
    reduce_precision: Literal["fp32", "16-bit"] = "fp32"
    chunk_logits: int = cross_entropy.CHUNK_LOGITS
    """At most so many logits of a rank are alive at once: fewer make several chunks of a micro-batch's loss."""

    @property
    def layout(self) -> Layout:
        return Layout(tp=self.tp, pp=self.pp, dp=self.dp)

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(
            tp=self.tp,
            pp=self.pp,
            dp=self.dp,
            schedule=self.schedule,
            virtual_stages=self.virtual_stages,
            partition=self.partition,
            cuts=self.cuts,
            sequence_parallel=self.sequence_parallel,
            zero=self.zero,
            recompute=self.recompute,
            recompute_every=self.recompute_every,
            offload=self.offload,
        )

    def __str__(self) -> str:
        """What differs from the serial run."""
        changed = {name: value for name, value in vars(self).items() if value != getattr(SERIAL, name)}
        return " ".join(name if value is True else f"{name}={value}" for name, value in changed.items()) or "serial"


SERIAL = Way()
Job = tuple[Case, Way]


def configured(case: Case, way: Way) -> Config:
    """The configuration that trains this case in this way."""
    running_text = case.model.kind == "gpt" and case.model.head == "pretraining"  # other samples have no documents
    return Config(
        model=case.model,
        parallel=way.parallel,
        data=DataConfig(train="unused", documents=case.documents if running_text else "joined"),
        train=TrainConfig(
            steps=STEPS,
            global_batch_size=case.global_batch_size,
            micro_batch_size=way.micro_batch_size,
            precision=case.precision,
            loss_scale=case.loss_scale,
            gradient_clip=case.clip,
            reduce_precision=way.reduce_precision,
        ),
        optim=OptimConfig(
            name=case.optimizer,
            learning_rate=1e-2,
            min_learning_rate=1e-3,
            warmup_steps=2,
            weight_decay=0.1,
            epsilon=1e-5,
        ),
        parts=PartsConfig(**PARTS.get(case.parts, {})),
        lora=LoraConfig(**LORA.get(case.parts, {})),
        thermometers=ThermometersConfig(every=2),
        run=RunConfig(folder="unused"),
    )


# --- batches ----------------------------------------------------------------------------------------------------------


def global_batch(case: Case, step: int) -> AnyBatch:
    """The samples of a step (from 0), on any layout."""
    of_kind = {"gpt": text, "bert": pairs_of_texts, "t5": texts_with_spans}
    of_head = {"classification": labelled, "choice": labelled, "spans": questions, "preferences": answers}
    return of_head.get(case.model.head, of_kind[case.model.kind])(case, step)


def text(case: Case, step: int) -> Batch:
    """Of a language model."""
    generator, s, b = torch.Generator().manual_seed(step), case.seq_length, case.global_batch_size
    tokens = torch.randint(0, case.vocab_size, (s + 1, b), generator=generator)
    chance = torch.linspace(0.2, 0.9, b)
    mask = torch.ones(s, b)
    if case.mask == "differ":
        mask = (torch.rand(mask.shape, generator=generator) < chance).float()
    elif case.mask == "second_half":
        mask[:, b // 2 :] = 0.0
    samples = torch.arange(step * b, (step + 1) * b)
    batch = Batch(tokens[:-1], tokens[1:], mask, samples)
    return batch if case.documents == "joined" else separated(batch, torch.rand(mask.shape, generator=generator) < 0.3)


def pairs_of_texts(case: Case, step: int) -> BertBatch:
    """Of a masked model: texts of all lengths, padded. In every sample another number of tokens is to be guessed."""
    generator, s, b = torch.Generator().manual_seed(step), case.seq_length, case.global_batch_size
    batch = text(replace(case, documents="joined"), step)
    lengths, second = torch.randint(3, s + 1, (b,), generator=generator), torch.randint(1, 3, (b,), generator=generator)
    place = torch.arange(s)[:, None]
    counts = torch.ones(b)
    if case.mask == "second_half":
        counts[b // 2 :] = 0.0
    labels = torch.randint(0, case.vocab_size, (s, b), generator=generator)
    return BertBatch(
        tokens=batch.tokens,
        types=(place >= second).long(),
        real=place < lengths,
        labels=labels,
        loss_mask=batch.loss_mask * (place < lengths),
        pair_labels=torch.randint(0, 2, (b,), generator=generator),
        pair_mask=counts,
        samples=batch.samples,
    )


def labelled(case: Case, step: int) -> LabelBatch:
    """Of a model that tells labels: the same texts, with a label or a score each; of choices, several a sample."""
    texts, labels = several(pairs_of_texts, case, step, case.model.sequences), case.model.num_labels or 1
    first = pairs_of_texts(case, step)
    drawn = torch.rand(case.global_batch_size, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return LabelBatch(
        tokens=texts.tokens,
        types=texts.types,
        real=texts.real,
        targets=drawn if labels == 1 else (drawn * labels).floor(),
        target_mask=first.pair_mask,
        samples=first.samples,
    )


def several(make: Callable[[Case, int], AnySequences], case: Case, step: int, number: int) -> AnySequences:
    """So many sequences a sample, side by side."""
    return make(replace(case, global_batch_size=case.global_batch_size * number), step)


def questions(case: Case, step: int) -> SpanBatch:
    """Of a model that answers by a run of its text: the same texts, some of which have no answer."""
    texts, b = pairs_of_texts(case, step), case.global_batch_size
    ends = (torch.rand(2, b, generator=torch.Generator().manual_seed(step)) * texts.real.sum(0)).long()
    return SpanBatch(
        tokens=texts.tokens,
        types=texts.types,
        real=texts.real,
        answers=ends.sort(0).values * (torch.arange(b) % 3 > 0),
        answer_mask=texts.pair_mask,
        samples=texts.samples,
    )


def answers(case: Case, step: int) -> PreferenceBatch:
    """Of a model that prefers one of two answers: two texts a sample, and what a reference thinks of them."""
    generator, b = torch.Generator().manual_seed(step), case.global_batch_size
    texts, counted = several(text, replace(case, documents="joined"), step, 2), torch.ones(b)
    if case.mask == "second_half":
        counted[b // 2 :] = 0.0
    return PreferenceBatch(
        tokens=texts.tokens,
        labels=texts.labels,
        loss_mask=several(text, replace(case, documents="joined", mask="differ"), step, 2).loss_mask,
        reference=-20.0 * torch.rand(b, 2, generator=generator, dtype=torch.float64),
        options=torch.tensor([[0.1, 0.2, 0.0], [0.3, 0.0, 1.0]], dtype=torch.float64).repeat(b, 1)[:b],  # DPO and IPO
        pair_mask=counted,
        samples=texts.samples[:b] - texts.samples[0] + step * b,
    )


def texts_with_spans(case: Case, step: int) -> T5Batch:
    """Of an encoder and a decoder: texts of all lengths to be read, padded."""
    generator, s, b = torch.Generator().manual_seed(step), case.seq_length, case.global_batch_size
    lengths = torch.randint(3, s + 1, (b,), generator=generator)
    written = text(replace(case, documents="joined", seq_length=case.model.decoder_length), step)
    return T5Batch(
        tokens=torch.randint(0, case.vocab_size, (s, b), generator=generator),
        real=torch.arange(s)[:, None] < lengths,
        decoder_tokens=written.tokens,
        labels=written.labels,
        loss_mask=written.loss_mask,
        samples=written.samples,
    )


def separated(batch: Batch, begins: Tensor) -> Batch:
    """The batch with new documents where `begins` [s, b] says so."""
    place = torch.arange(len(begins))[:, None].expand_as(begins)
    first = torch.where(begins, place, 0).cummax(0).values
    return replace(batch, documents=begins.long().cumsum(0), positions=place - first)


def part(batch: Samples, samples: slice | list[int]) -> Samples:
    """Some of a batch's samples, which are along the last dim, or along the first of what is [b, …]; there may be
    several columns a sample.
    """
    number = len(batch.samples)

    def of(name: str, each: Tensor) -> Tensor:
        if name in ("reference", "options"):
            return each[samples]
        return each.unflatten(-1, (number, each.shape[-1] // number))[..., samples, :].flatten(-2)

    return replace(batch, **{name: of(name, each) for name, each in vars(batch).items() if each is not None})


def microbatches(case: Case, way: Way, step: int, mesh: Mesh) -> list[Any]:
    """A dp rank's share of a step's samples, cut into micro-batches."""
    share, size = case.global_batch_size // mesh.dp.size, way.micro_batch_size
    starts = range(mesh.dp.rank * share, (mesh.dp.rank + 1) * share, size)
    return [part(global_batch(case, step), slice(start, start + size)) for start in starts]


# --- what a rank has of a tensor --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LocalRange:
    """A range of this rank's shard of a weight, or of a number kept for each of its elements."""

    shape: tuple[int, ...]
    """The shard's, padding and all."""
    real: tuple[slice, ...]
    """Which part of the logical tensor the shard has; the rest of it, at its end, is padding."""
    cut: bool
    """Whether other tp ranks have other parts."""
    first: int
    """Which element of the flattened shard the range begins with."""
    values: Tensor
    """1-D."""

    @classmethod
    def at(cls, place: Placement, first: int, values: Tensor) -> "LocalRange":
        shape = place.parameter.shape
        sizes = place.real(torch.empty(shape, device="meta")).shape
        window = tuple(slice(start, start + size) for start, size in zip(place.offsets, sizes, strict=True))
        return cls(tuple(shape), window, place.dim is not None, first, values)

    def of(self, whole: Tensor) -> Tensor:
        """The same range of another tensor of the weight's logical shape; padding is zero."""
        shard = torch.zeros(self.shape, dtype=whole.dtype)
        window = whole[self.real]
        shard[tuple(slice(size) for size in window.shape)] = window
        return shard.view(-1)[self.first : self.first + len(self.values)]


LocalRanges = dict[str, LocalRange]
"""By logical name: a weight lies in one bucket, so a rank has at most one range of it."""


def local_ranges(state: TrainState, buffer: Buffer) -> LocalRanges:
    """A rank's slice of every weight, gradient or moment, padding and all: copies."""
    return {
        local.name: LocalRange.at(local.placement, local.first, flat[local.at].to(CPU, copy=True))
        for bucket, flat in buffers(state, buffer)
        for local in bucket.local_ranges()
    }


def buffers(state: TrainState, buffer: Buffer) -> list[tuple[Bucket, Tensor]]:
    """This rank's slices, one a bucket that has such a buffer: of frozen weights there are weights alone."""
    if buffer == "master":
        return [(bucket, bucket.master) for bucket in state.buckets]
    if buffer == "reduced":
        return [(bucket, bucket.optimizer_gradients) for bucket in state.trained]
    return [(bucket, kept[buffer]) for bucket, kept in zip(state.buckets, state.optimizer_state, strict=True) if kept]


def parameters(state: TrainState) -> LocalRanges:
    """What the layers multiply with, made whole for it: copies of this rank's shards. All ranks call."""
    for bucket in state.buckets:
        bucket.unshard()
    found = {
        name: LocalRange.at(param.placement, 0, param.view(bucket.parameters).flatten().to(CPU, copy=True))
        for name, bucket, param in named_ranges(state.buckets)
    }
    for bucket in state.buckets:
        bucket.reshard()
    return found


def whole(run_of_one_rank: LocalRanges) -> dict[str, Tensor]:
    """Every tensor in its logical shape, without padding, from a run that had all of each."""
    return {name: held.values.view(held.shape)[held.real] for name, held in run_of_one_rank.items()}


def outside_weights(state: TrainState) -> float:
    """The largest |number| in this rank's buffers that belongs to no weight: rows that are no tokens, alignment."""
    rests = []
    for buffer in (*KEPT, "reduced"):
        for bucket, flat in buffers(state, buffer):
            rest = flat.abs().to(CPU)
            for local in bucket.local_ranges():
                ones = torch.ones(local.placement.shape, dtype=rest.dtype)
                rest[local.at] *= 1.0 - LocalRange.at(local.placement, local.first, rest[local.at]).of(ones)
            rests.append(rest.flatten())
    return torch.cat(rests).max().item()


# --- training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """What one step produced on one rank."""

    result: StepResult
    gradients: LocalRanges
    """What the optimizer read: summed over all ranks."""


@dataclass(frozen=True)
class Run:
    """What five steps produced on one rank."""

    steps: list[Step]
    kept: dict[str, LocalRanges]
    """By buffer: this rank's slices of master weights and moments."""
    parameters: LocalRanges
    """What the layers multiply with."""
    outside: float
    """The largest |number| that belongs to no weight."""


@dataclass(frozen=True)
class Reference:
    """What the serial run produced, each tensor whole."""

    results: list[StepResult]
    gradients: list[dict[str, Tensor]]
    """One a step."""
    kept: dict[str, dict[str, Tensor]]
    """By buffer."""


def train(case: Case, way: Way, mesh: Mesh, device: torch.device = CPU) -> Run:
    """Five optimizer steps from the initial weights; what they produced is on the CPU."""
    config = configured(case, way)
    state = build_state(config, mesh, case.vocab_size, device)
    steps = []
    for number in range(STEPS):
        with patch.object(cross_entropy, "CHUNK_LOGITS", way.chunk_logits):
            batches = [batch.to(device) for batch in microbatches(case, way, number, mesh)]
            result = train_step(state, batches, mesh, config.train)
        steps.append(Step(result, local_ranges(state, "reduced")))
    kept: dict[str, LocalRanges] = {buffer: local_ranges(state, buffer) for buffer in KEPT}
    return Run(steps, kept, parameters(state), outside_weights(state))


def reference(case: Case) -> Reference:
    """One rank, all samples in one micro-batch."""
    run = train(case, replace(SERIAL, micro_batch_size=case.global_batch_size), Mesh())
    return Reference(
        [step.result for step in run.steps],
        [whole(step.gradients) for step in run.steps],
        {buffer: whole(found) for buffer, found in run.kept.items()},
    )


def references_on_a_rank(rank: int, num_ranks: int, cases: Sequence[Case]) -> list[Reference]:
    """For `run_on_ranks` with one rank: what the cases are compared with."""
    return [reference(case) for case in cases]
