"""Hidden states on their way from a teacher's blocks to the student's, which may be on another stage of the pipeline.

teacher's stage ── after its forward passes, a broadcast over pp for each pair of layers and micro-batch ──▶ student's
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from colonnade.architecture.statement import Unit
from colonnade.config.distillation import DistillationConfig
from colonnade.mesh.collectives import all_reduce, broadcast_
from colonnade.mesh.mesh import Mesh
from colonnade.model.bert import BertInputs
from colonnade.model.inputs import Inputs
from colonnade.model.matching import HiddenTargets
from colonnade.model.stack import Stack
from colonnade.pipeline.carry import Carry


@dataclass
class Listening:
    """A teacher's stage, of which what some units hand on is kept (`pipeline.chunk.Model`)."""

    model: Stack
    wanted: frozenset[str]
    kept: dict[str, Tensor] = field(default_factory=dict)
    """[s, b, g] by unit, of the last micro-batch."""

    def run(self, unit: str, carry: Carry, inputs: Inputs) -> Carry:
        out = self.model.run(unit, carry, inputs)
        if unit in self.wanted:
            self.kept[unit] = self.model.residual(out)
        return out

    def carry_buffers(self, inputs: Inputs, into: str) -> Carry:
        return self.model.carry_buffers(inputs, into)

    def taken(self) -> dict[str, Tensor]:
        """What was kept, which is forgotten."""
        kept, self.kept = self.kept, {}
        return kept


@dataclass(frozen=True)
class Pair:
    """Two blocks that are compared."""

    student: str
    teacher: str
    """Units."""
    student_stage: int
    teacher_stage: int


@dataclass(frozen=True)
class Matching:
    """Which blocks are compared, and what that counts in the loss."""

    pairs: tuple[Pair, ...]
    weight: float
    width: int
    """[features] Of the teacher."""
    dtype: torch.dtype
    """Of its hidden states."""

    def targets(
        self, states: Sequence[Mapping[str, Tensor]], inputs: Sequence[Inputs], scale: float, mesh: Mesh
    ) -> list[Inputs]:
        """The inputs of a step's micro-batches with the states that this rank's blocks are compared with. All-reduces
        a number over dp; sends [s, b, g] over pp for each pair whose blocks are on two stages.
        """
        real = [_real(each) for each in inputs]
        count = all_reduce(torch.stack([each.sum() for each in real]).sum(), mesh.reduce)
        factor = self.weight * scale / (count.clamp(min=1.0) * len(self.pairs))
        return [
            replace(each, hidden=HiddenTargets(self._mine(kept, each, mesh), mask * factor))
            for each, kept, mask in zip(inputs, states, real, strict=True)
        ]

    def _mine(self, kept: Mapping[str, Tensor], inputs: Inputs, mesh: Mesh) -> dict[str, Tensor]:
        found = {}
        for pair in self.pairs:
            state = kept.get(pair.teacher)
            if pair.teacher_stage != pair.student_stage:
                state = self._buffer(inputs) if state is None else state.contiguous()
                state = broadcast_(state, mesh.pp, pair.teacher_stage)
            if pair.student_stage == mesh.pp.rank:
                assert state is not None, "it is here, or was sent"
                found[pair.student] = state
        return found

    def _buffer(self, inputs: Inputs) -> Tensor:
        assert inputs.tokens is not None, "every stage is told the tokens"
        return torch.empty(*inputs.tokens.shape, self.width, dtype=self.dtype, device=inputs.tokens.device)


def matching_of(
    chosen: DistillationConfig,
    *,
    student: Sequence[Sequence[Unit]],
    teacher: Sequence[Sequence[Unit]],
    stages: int,
    width: int,
    dtype: torch.dtype,
) -> Matching | None:
    """What [distillation] compares, given the units of every chunk of both; None where it is nothing."""
    if not chosen.student_layers:
        return None
    mine, theirs = _places(student, stages), _places(teacher, stages)
    layers = zip(chosen.student_layers, chosen.teacher_layers, strict=True)
    pairs = tuple(Pair(mine[a][0], theirs[b][0], mine[a][1], theirs[b][1]) for a, b in layers)
    return Matching(pairs, chosen.hidden_weight, width, dtype)


def _places(chunks: Sequence[Sequence[Unit]], stages: int) -> dict[int, tuple[str, int]]:
    """The name of each layer's unit, and the stage that has it."""
    return {
        unit.layer: (unit.name, number % stages)
        for number, units in enumerate(chunks)
        for unit in units
        if unit.layer is not None
    }


def _real(inputs: Inputs) -> Tensor:
    """float64 [s, b]: 1 on tokens that are no padding."""
    assert isinstance(inputs, BertInputs) and inputs.real is not None, "the config check asks for a bert"
    return inputs.real.double()
