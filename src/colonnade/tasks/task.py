"""What a task has to say; a training step, an evaluation and the planner ask it, and know nothing of its samples.

samples ──batch──▶ Microbatch ──counts──▶ one denominator per loss, summed over the global batch
                              ──inputs──▶ what the model's units read
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from colonnade.config.model import ModelConfig
from colonnade.data.rows import Samples
from colonnade.mesh.mesh import Axis
from colonnade.model.inputs import Inputs
from colonnade.model.model import Transformer
from colonnade.pipeline.carry import Carry
from colonnade.tensor_parallel.parallel import Parallel

Hidden = Callable[[Inputs], Carry | None]
"""Computes what goes into the losses; None on pipeline stages that do not have it."""


class Microbatch(Protocol):
    """The samples of one micro-batch, as tensors."""

    @property
    def samples(self) -> Tensor:
        """int64 [b], on the CPU: each sample's position in the run."""
        ...

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        ...

    def uncounted(self) -> Self:
        """The same, with nothing in it that counts in a loss."""
        ...


class Found(Protocol):
    """What an evaluation found, the same on every rank."""

    @property
    def loss(self) -> float:
        """The sum of the losses, each a mean."""
        ...

    def numbers(self) -> dict[str, float]:
        """For metrics, by name; the loss is among them."""
        ...

    def summary(self) -> str:
        """One line for people."""
        ...


class Teaching(Protocol):
    """A teacher, as a training step asks it."""

    def teach(self, batches: Sequence[Any], inputs: Sequence[Inputs], scale: float) -> list[Inputs]:
        """The inputs of a step's micro-batches with what the teacher says of them; every rank calls this. `scale`:
        what losses are multiplied with.
        """
        ...


def own_generator() -> torch.Generator:
    """For a `random_batch`: torch's global one belongs to whoever calls it."""
    return torch.Generator().manual_seed(0)


class Task(Protocol):
    """What is trained on what, with which losses. The losses are those that the architecture's last unit names."""

    def build(
        self, model: ModelConfig, vocab_size: int, parallel: Parallel, units: Sequence[str] | None
    ) -> Transformer:
        """Some units of the model, or all, with empty weights."""
        ...

    def batch(self, samples: Samples, positions: Sequence[int]) -> Any:
        """Samples [b], which stand at these positions of the run, as a `Microbatch`."""
        ...

    def random_batch(self, model: ModelConfig, size: int, vocab_size: int, *, separate_documents: bool) -> Any:
        """A full `Microbatch` of no text, for measuring. `separate_documents`: it tells documents apart, if it can."""
        ...

    def counts(self, batch: Any) -> Tensor:
        """float64 [losses]: how much of a micro-batch counts in each loss. Their sums are the denominators."""
        ...

    def inputs(self, batch: Any, weights: Tensor | None, seed: int | None) -> Inputs:
        """What units read. `weights` [losses]: what one count of each loss weighs in the result; None: no loss is
        asked for. `seed`: dropout's; None: nothing is dropped.
        """
        ...

    def evaluate(
        self,
        model: Any,
        batches: Iterable[Any],
        *,
        dp: Axis,
        pp: Axis,
        hidden: Hidden,
        byte_lengths: Tensor | None,
        tokenizer_checked: bool,
    ) -> Found:
        """Losses and what goes with them, over the batches of all dp ranks, without dropout.

        `hidden`: how the model's stages compute what goes into the losses. `byte_lengths` [tokenizer's vocabulary]:
        bytes of text that each token stands for, where they are known. `tokenizer_checked`: whether the text is
        known to be of that tokenizer.
        """
        ...
