"""Five steps of training on a layout, with everything they produced: what the parity tests compare.

A `Case` says what is trained, a layout where. Both are seeds and sizes; the same case on another layout must give the
same numbers. Weights start wide (init_std 0.3), so that no softmax is flat and no gradient is close to nothing.

One gradient is nothing: a key's bias adds the same to all scores of a query, which the softmax does not see. What is
left is rounding, 1e-17, and Adam divides it by its own size plus epsilon. With epsilon 1e-6 that is no step at all.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf, isnan
from typing import Any, Literal

import torch
from torch import Tensor

from colonnade.config.schema import Config, ModelConfig, OptimConfig, ParallelConfig, RunConfig, TrainConfig
from colonnade.data.loader import Batch
from colonnade.data_parallel.buckets import named_slots
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.train.state import TrainState, build_state
from colonnade.train.step import train_step

GLOBAL_BATCH, SEQ_LENGTH, STEPS = 8, 8, 5
CPU = torch.device("cpu")

Mask = Literal["none", "differ", "second_half"]
"""Labels that count: all; a different number in every sample; none in the second half of the batch."""
Boxes = dict[str, tuple[tuple[int, ...], Tensor]]
"""Logical name -> (offsets, this rank's real part)."""


@dataclass(frozen=True)
class Case:
    """What is trained, up to the layout."""

    micro_batch_size: int = GLOBAL_BATCH
    drop: float = 0.1
    vocab_size: int = 37
    tied: bool = True
    clipped: bool = True
    mask: Mask = "differ"
    precision: Literal["fp32", "bf16", "fp64"] = "fp64"

    @property
    def clip(self) -> float:
        return 0.05 if self.clipped else 1e6

    def config(self, layout: Layout) -> Config:
        return Config(
            model=ModelConfig(
                num_layers=2,
                hidden_size=16,
                num_heads=4,
                ffn_hidden_size=24,
                seq_length=SEQ_LENGTH,
                dropout=self.drop,
                attention_dropout=self.drop,
                tie_embeddings=self.tied,
                init_std=0.3,
            ),
            parallel=ParallelConfig(tp=layout.tp, pp=layout.pp, dp=layout.dp),
            train=TrainConfig(
                steps=STEPS,
                global_batch_size=GLOBAL_BATCH,
                micro_batch_size=self.micro_batch_size,
                precision=self.precision,
                gradient_clip=self.clip,
            ),
            optim=OptimConfig(
                learning_rate=1e-2, min_learning_rate=1e-3, warmup_steps=2, weight_decay=0.1, epsilon=1e-6
            ),
            run=RunConfig(folder="unused"),
        )

    def serial(self) -> "Case":
        """The same training in one micro-batch."""
        return replace(self, micro_batch_size=GLOBAL_BATCH)


@dataclass(frozen=True)
class Step:
    """What one step produced on one rank."""

    loss: float
    grad_norm: float
    gradients: Boxes


@dataclass(frozen=True)
class Run:
    """What five steps produced on one rank."""

    steps: list[Step]
    weights: Boxes
    replicated: set[str]
    """Weights that every tp rank has whole."""
    parameters: dict[str, Tensor]
    """What the layers multiply with, padding and all."""
    padding: float
    """The largest |weight|, |gradient| or |moment| in rows that are no tokens."""


def global_batch(case: Case, step: int) -> Batch:
    """The samples of a step (from 0), on any layout."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, case.vocab_size, (SEQ_LENGTH + 1, GLOBAL_BATCH), generator=generator)
    chance = torch.linspace(0.2, 0.9, GLOBAL_BATCH)
    mask = torch.ones(SEQ_LENGTH, GLOBAL_BATCH)
    if case.mask == "differ":
        mask = (torch.rand(mask.shape, generator=generator) < chance).float()
    elif case.mask == "second_half":
        mask[:, GLOBAL_BATCH // 2 :] = 0.0
    samples = torch.arange(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH)
    return Batch(tokens[:-1], tokens[1:], mask, samples)


def part(batch: Batch, samples: slice | list[int]) -> Batch:
    """Some of a batch's samples."""
    return Batch(
        batch.tokens[:, samples], batch.labels[:, samples], batch.loss_mask[:, samples], batch.samples[samples]
    )


def microbatches(case: Case, step: int, mesh: Mesh) -> list[Batch]:
    """A dp rank's share of a step's samples, cut into micro-batches."""
    share = GLOBAL_BATCH // mesh.dp.size
    starts = range(mesh.dp.rank * share, (mesh.dp.rank + 1) * share, case.micro_batch_size)
    return [part(global_batch(case, step), slice(start, start + case.micro_batch_size)) for start in starts]


def boxes(state: TrainState, buffer: Literal["master", "gradients"]) -> Boxes:
    """A rank's real part of every weight or gradient."""
    return {
        name: (slot.placement.offsets, slot.placement.real(slot.view(getattr(unit, buffer))).clone())
        for name, unit, slot in named_slots(state.units)
    }


def train(case: Case, mesh: Mesh) -> Run:
    """Five optimizer steps from the initial weights."""
    config = case.config(mesh.layout)
    state = build_state(config, mesh, case.vocab_size, CPU)
    steps = []
    for step in range(STEPS):
        result = train_step(state, microbatches(case, step, mesh), mesh, config.train)
        steps.append(Step(result.loss, result.grad_norm, boxes(state, "gradients")))
    return Run(
        steps,
        weights=boxes(state, "master"),
        replicated={name for name, _, slot in named_slots(state.units) if slot.placement.dim is None},
        parameters={name: slot.placement.parameter.detach().clone() for name, _, slot in named_slots(state.units)},
        padding=largest_padding(state),
    )


def largest_padding(state: TrainState) -> float:
    """The largest number in padding rows, over weights, gradients and moments."""
    largest = 0.0
    flat = {unit.name: moments for unit, moments in zip(state.units, state.moments, strict=True)}
    for _, unit, slot in named_slots(state.units):
        place, moments = slot.placement, flat[unit.name]
        for buffer in (unit.master, unit.gradients, moments.exp_avg, moments.exp_avg_sq):
            if place.dim is not None:
                shard = slot.view(buffer)
                rest = shard.narrow(place.dim, place.extent, shard.shape[place.dim] - place.extent)
                largest = max([largest, *rest.abs().flatten().tolist()])
    return largest


def train_on_ranks(rank: int, num_ranks: int, layout: Layout, cases: Iterable[Case]) -> list[Run]:
    """For `run_on_ranks`: every case on one layout."""
    mesh = build_mesh(layout, rank)
    return [train(case, mesh) for case in cases]


def differences(what: str, actual: Boxes, whole: Boxes) -> Iterator[tuple[float, str]]:
    """(largest difference relative to the whole tensor's largest element, where) of every box of one rank."""
    assert actual.keys() == whole.keys()
    for name, (offsets, box) in actual.items():
        reference = whole[name][1]
        window = reference[tuple(slice(at, at + size) for at, size in zip(offsets, box.shape, strict=True))]
        if box.numel():
            scale = reference.abs().max().item()
            yield relative((box - window).abs().max().item(), scale), f"{what} {name} at {offsets}"


def relative(difference: float, scale: float) -> float:
    """difference / scale; infinite where it is no number, 0 for 0 / 0."""
    if isnan(difference) or isnan(scale):
        return inf
    return difference / scale if scale else (inf if difference else 0.0)


def worst(found: Iterable[tuple[float, str]]) -> tuple[float, str]:
    """The largest difference and where it is."""
    everything: list[Any] = list(found)
    assert everything, "nothing was compared"
    difference, where = max(everything)
    return difference, where
