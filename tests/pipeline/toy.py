"""A small model of torch layers to run pipelines with, what backward keeps of it, and an owner that writes down.

    embedding   nn.Embedding                     [s, b] tokens -> [s, b, h]
    blocks.i    LayerNorm, Linear, tanh, added   [s, b, h] -> [s, b, h]
    head        Linear, cross entropy            [s, b, h] -> []

Everything is autograd's, but the linear layers of blocks, whose weight gradients can be put off.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from colonnade.mesh.autograd import apply
from colonnade.tensor_parallel.gemm import WeightGradients, linear

HIDDEN, VOCAB, LENGTH, SAMPLES = 6, 11, 3, 2


@dataclass(frozen=True)
class Given:
    """A micro-batch."""

    number: int
    tokens: Tensor
    labels: Tensor


def microbatches(count: int) -> list[Given]:
    generator = torch.Generator().manual_seed(count)
    tokens = torch.randint(0, VOCAB, (count, LENGTH + 1, SAMPLES), generator=generator)
    return [Given(number, each[:-1], each[1:]) for number, each in enumerate(tokens)]


def unit_names(num_blocks: int) -> list[str]:
    return ["embedding", *(f"blocks.{i}" for i in range(num_blocks)), "head"]


class Token:
    """Alive as long as backward keeps a unit's graph, or its weight gradients wait."""

    def __init__(self, unit: str, microbatch: int) -> None:
        self.unit, self.microbatch = unit, microbatch


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Token, later: WeightGradients) -> Tensor:
        ctx.token, ctx.later = token, later
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.later.add(partial(id, ctx.token))
        return grad, None, None


class Toy(nn.Module):
    """The model. `calls` are the units it ran, with their micro-batches."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.later = WeightGradients()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(num_blocks))
        self.linears = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(num_blocks))
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.double()
        self.calls: list[tuple[str, int]] = []
        self.alive: WeakSet[Token] = WeakSet()

    def run(self, name: str, x: Tensor | None, inputs: Given) -> Tensor:
        self.calls.append((name, inputs.number))
        out = self._run(name, x, inputs)
        if not torch.is_grad_enabled():
            return out
        token = Token(name, inputs.number)
        self.alive.add(token)
        return apply(_Kept, out, token, self.later)

    def _run(self, name: str, x: Tensor | None, inputs: Given) -> Tensor:
        if name == "embedding":
            embedded: Tensor = self.embedding(inputs.tokens)
            return embedded
        assert x is not None
        if name == "head":
            logits = self.head(x).flatten(0, 1)
            return nn.functional.cross_entropy(logits, inputs.labels.flatten(), reduction="sum")
        layer = int(name.removeprefix("blocks."))
        weights = self.linears[layer]
        assert isinstance(weights, nn.Linear)
        return x + torch.tanh(linear(self.norms[layer](x), weights.weight, weights.bias, weight_gradients=self.later))

    def plain(self, given: Sequence[Given]) -> tuple[float, dict[str, Tensor]]:
        """Σ loss and every gradient, by one autograd graph over all micro-batches of torch's own layers."""
        losses = []
        for each in given:
            x = self.embedding(each.tokens)
            for norm, weights in zip(self.norms, self.linears, strict=True):
                x = x + torch.tanh(weights(norm(x)))
            logits = self.head(x).flatten(0, 1)
            losses.append(nn.functional.cross_entropy(logits, each.labels.flatten(), reduction="sum"))
        total = torch.stack(losses).sum()
        gradients = torch.autograd.grad(total, list(self.parameters()))
        return total.item(), {name: g for (name, _), g in zip(self.named_parameters(), gradients, strict=True)}

    def gradients(self) -> dict[str, Tensor]:
        """Those that have been added up, by name."""
        return {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}

    def kept(self, units: Sequence[str]) -> set[int]:
        """The micro-batches of which something of these units is kept."""
        return {token.microbatch for token in self.alive if token.unit in units}


class Owner:
    """Writes down what it is told; `look` is called whenever a unit has run."""

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self.told: list[tuple[str, str]] = []
        self.expected: list[str] = []
        self.look = look

    def expect(self, uses: Sequence[str]) -> None:
        self.expected = list(uses)

    def acquire(self, unit: str, *, gradients: bool) -> None:
        self.told.append(("acquire to add gradients" if gradients else "acquire", unit))

    def release(self, unit: str) -> None:
        self.told.append(("release", unit))
        self.look()

    def open(self, unit: str) -> None:
        self.told.append(("open", unit))

    def left(self, unit: str, *, last: bool) -> None:
        self.told.append(("left for good" if last else "left", unit))
        self.look()

    def acquired(self) -> list[str]:
        """The units that were acquired, in order."""
        return [unit for what, unit in self.told if what.startswith("acquire")]

    def left_units(self) -> Iterator[tuple[str, str]]:
        return ((what, unit) for what, unit in self.told if what.startswith("left"))
