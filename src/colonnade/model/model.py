"""What a model of every family is: units that run one after the other, and the buckets in which their weights are kept.

A pipeline cuts between units, and a rank builds only its own. What crosses is a carry: a tuple of tensors that the
model describes (`pipeline/carry.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from colonnade.architecture.adapters import LORA_A
from colonnade.architecture.families import architecture_of
from colonnade.architecture.statement import Architecture, Unit
from colonnade.config.model import ModelConfig
from colonnade.model.inputs import Inputs
from colonnade.model.transformer import residual_dtype
from colonnade.tensor_parallel.adapter import Adapted
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.tensor_parallel.placement import Placement, named_placements


class Transformer(nn.Module, ABC):
    """Units of a model, or all.

    Under sequence parallelism the gradients of weights whose `Placement.dim` is None are partial sums over tp. `units`:
    None, or the names of those to build, in the order of the model.
    """

    def __init__(
        self, model: ModelConfig, vocab_size: int, parallel: Parallel, *, units: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self.vocab_size, self.parallel = vocab_size, parallel
        self.tied, self.fp32_residual = model.ties_output, model.fp32_residual
        self.hidden_size, self.seq_length = model.hidden_size, model.seq_length
        self.longest = model.seq_length if model.position == "learned" else None
        self.architecture = architecture_of(model, vocab_size)
        self.stated = {unit.name: unit for unit in self.architecture.units}
        self.held = self.architecture.named(self.stated if units is None else units)

    def train_as(self, architecture: Architecture) -> None:
        """Add the adapters that this statement of the model has, and freeze what it says is frozen."""
        self.architecture = architecture
        stated, adapters = architecture.weights(), architecture.adapters
        for bucket, module in self.bucket_modules().items() if adapters else ():
            for name, layer in module.named_modules():
                if isinstance(layer, Adapted) and adapters and f"{bucket}.{name}{LORA_A}" in stated:
                    layer.adapt(f"{bucket}.{name}", adapters)
        for bucket, places in named_placements(self.bucket_modules(), self.parallel.tp).items():
            for place in places:
                place.parameter.requires_grad_(not stated[f"{bucket}.{place.name}"].is_frozen)

    def placements(self) -> dict[str, list[Placement]]:
        """This rank's weights by bucket, with what the architecture says of how they are trained."""
        stated = self.architecture.weights()

        def treated(bucket: str, place: Placement) -> Placement:
            weight = stated[f"{bucket}.{place.name}"]
            return replace(place, learning_rate=weight.learning_rate, weight_decay=weight.weight_decay)

        named = named_placements(self.bucket_modules(), self.parallel.tp)
        return {bucket: [treated(bucket, place) for place in places] for bucket, places in named.items()}

    def units(self) -> dict[str, nn.Module]:
        """This rank's units in the order of a forward pass."""
        return {unit.name: self._module_of(unit) for unit in self.held}

    @abstractmethod
    def _module_of(self, unit: Unit) -> nn.Module:
        """What computes a unit of this rank."""

    def run(self, unit: str, carry: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
        """One unit: what the one before hands on, into what it hands on; the last returns the losses."""
        self.parallel.adapter_masks.now = inputs.masks
        self.parallel.probe.enter(unit, inputs)
        return self._run(unit, carry, inputs)

    @abstractmethod
    def _run(self, unit: str, carry: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
        """As `run`: how a family does it."""

    @abstractmethod
    def carry_buffers(self, inputs: Inputs, into: str) -> tuple[Tensor, ...]:
        """Memory for what a unit takes of a micro-batch."""

    @abstractmethod
    def residual(self, carry: tuple[Tensor, ...]) -> Tensor:
        """The whole residual stream that the last unit takes, on every tp rank, without gradient: [s, b, h]."""

    @abstractmethod
    def bucket_modules(self) -> dict[str, nn.Module]:
        """The modules whose weights make this rank's buckets, by bucket, in the order of a forward pass.

        A weight belongs to the first bucket that has it. Buckets without weights of their own are left out.
        """

    def stream_buffer(self, tokens: Tensor, *, fp32: bool) -> Tensor:
        """Memory for a stream of these tokens [s, b]: [s, b, h], or [s/tp, b, h] under sequence parallelism."""
        s, b = tokens.shape
        rows = s // self.parallel.tp.size if self.parallel.sequence_parallel else s
        weight = next(self.parameters())
        return torch.empty(rows, b, self.hidden_size, dtype=residual_dtype(weight.dtype, fp32), device=weight.device)
