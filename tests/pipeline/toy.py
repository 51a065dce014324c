"""Small models of torch layers to run pipelines with, what backward keeps of them, and an owner that writes down.

`Toy` carries one tensor, as a decoder-only model:

    embedding   nn.Embedding                     [s, b] tokens -> [s, b, h]
    blocks.i    LayerNorm, Linear, tanh, added   [s, b, h] -> [s, b, h]
    head        Linear, cross entropy            [s, b, h] -> []

`Pair` carries three from its middle on: what an encoder made goes along for the decoder, which reads it in every second
unit, and the real lengths of the samples, integers:

    source      nn.Embedding                     [s, b] tokens -> x [s, b, h]
    encode.i    sin, Linear, tanh, added         x -> x
    turn        nn.Embedding                     x -> y [t, b, k], memory = x, lengths [b]
    decode.i    the same; i even: reads memory   y, memory, lengths -> y, memory, lengths
    head        Linear, cross entropy            y, memory (unread), lengths -> []

Everything is autograd's, but the linear layers of blocks, whose weight gradients can be deferred.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from colonnade.architecture.statement import Unit
from colonnade.kernels.products import WeightGradients, linear
from colonnade.mesh.autograd import apply
from colonnade.pipeline.carry import Carry

HIDDEN, VOCAB, LENGTH, SAMPLES = 6, 11, 3, 2
WIDTH, TARGETS = 4, 2
"""Of the decoder's stream."""


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


def units(names: Sequence[str]) -> list[Unit]:
    """As a model's statement has them."""
    return [
        Unit(name, name.split(".")[0], (name,), 1, recomputes="." in name, losses=("loss",) if name == "head" else ())
        for name in names
    ]


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


class Watched(nn.Module, ABC):
    """A model that knows what of it is kept. `calls` are the units it ran, with their micro-batches."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.later = WeightGradients()
        self.calls: list[tuple[str, int]] = []
        self.alive: WeakSet[Token] = WeakSet()
        self.build(num_blocks)
        self.double()

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Its units."""

    @abstractmethod
    def build(self, num_blocks: int) -> None: ...

    @abstractmethod
    def carry_buffers(self, inputs: Given, into: str) -> Carry: ...

    @abstractmethod
    def make(self, unit: str, carry: Carry, inputs: Given) -> Carry: ...

    @abstractmethod
    def plain_loss(self, given: Given) -> Tensor:
        """By torch's own layers."""

    def run(self, unit: str, carry: Carry, inputs: Given) -> Carry:
        self.calls.append((unit, inputs.number))
        out, *others = self.make(unit, carry, inputs)
        if not torch.is_grad_enabled():
            return out, *others
        token = Token(unit, inputs.number)
        self.alive.add(token)
        return apply(_Kept, out, token, self.later), *others

    def plain(self, given: Sequence[Given]) -> tuple[float, dict[str, Tensor]]:
        """Σ loss and every gradient, by one autograd graph over all micro-batches."""
        total = torch.stack([self.plain_loss(each) for each in given]).sum()
        gradients = torch.autograd.grad(total, list(self.parameters()))
        return total.item(), {name: g for (name, _), g in zip(self.named_parameters(), gradients, strict=True)}

    def gradients(self) -> dict[str, Tensor]:
        """Those that have been added up, by name."""
        return {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}

    def kept(self, names: Sequence[str]) -> set[int]:
        """The micro-batches of which something of these units is kept."""
        return {token.microbatch for token in self.alive if token.unit in names}

    def wide(self, layer: nn.Module, x: Tensor) -> Tensor:
        """A linear layer whose weight gradients can be deferred."""
        assert isinstance(layer, nn.Linear)
        return linear(x, layer.weight, layer.bias, weight_gradients=self.later)


class Toy(Watched):
    """One tensor is carried."""

    def build(self, num_blocks: int) -> None:
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(num_blocks))
        self.linears = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(num_blocks))
        self.head = nn.Linear(HIDDEN, VOCAB)

    @property
    def names(self) -> list[str]:
        return unit_names(len(self.norms))

    def carry_buffers(self, inputs: Given, into: str) -> Carry:
        return () if into == "embedding" else (torch.empty(LENGTH, SAMPLES, HIDDEN, dtype=torch.float64),)

    def make(self, unit: str, carry: Carry, inputs: Given) -> Carry:
        if unit == "embedding":
            return (self.embedding(inputs.tokens),)
        (x,) = carry
        if unit == "head":
            logits = self.head(x).flatten(0, 1)
            return (nn.functional.cross_entropy(logits, inputs.labels.flatten(), reduction="sum"),)
        layer = int(unit.removeprefix("blocks."))
        return (x + torch.tanh(self.wide(self.linears[layer], self.norms[layer](x))),)

    def plain_loss(self, given: Given) -> Tensor:
        x = self.embedding(given.tokens)
        for norm, weights in zip(self.norms, self.linears, strict=True):
            x = x + torch.tanh(weights(norm(x)))
        logits = self.head(x).flatten(0, 1)
        return nn.functional.cross_entropy(logits, given.labels.flatten(), reduction="sum")


class Pair(Watched):
    """Three tensors are carried behind the turn: one is handed on as it is, one is of integers."""

    def build(self, num_blocks: int) -> None:
        first = num_blocks // 2
        self.source, self.target = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(VOCAB, WIDTH)
        self.encoders = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(first))
        self.decoders = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks - 1 - first))
        self.readers = nn.ModuleList(nn.Linear(HIDDEN, WIDTH) for _ in self.decoders[::2])
        self.head = nn.Linear(WIDTH, VOCAB)

    @property
    def names(self) -> list[str]:
        encode, decode = (
            [f"{kind}.{i}" for i in range(len(layers))]
            for kind, layers in (("encode", self.encoders), ("decode", self.decoders))
        )
        return ["source", *encode, "turn", *decode, "head"]

    def carry_buffers(self, inputs: Given, into: str) -> Carry:
        if into == "source":
            return ()
        x = torch.empty(LENGTH, SAMPLES, HIDDEN, dtype=torch.float64)
        if into == "turn" or into.startswith("encode"):
            return (x,)
        return (
            torch.empty(TARGETS, SAMPLES, WIDTH, dtype=torch.float64),
            x,
            torch.empty(SAMPLES, dtype=torch.int64),
        )

    def make(self, unit: str, carry: Carry, inputs: Given) -> Carry:
        kind, _, number = unit.partition(".")
        if unit == "source":
            return (self.source(inputs.tokens),)
        x, *others = carry
        if kind == "encode":
            return (x + torch.tanh(self.wide(self.encoders[int(number)], x.sin())),)
        if unit == "turn":
            lengths = 1 + inputs.tokens[0] % LENGTH
            return self.target(inputs.tokens[:TARGETS]), x, lengths
        if unit == "head":
            return (self._loss(x, inputs),)
        memory, lengths = others
        layer = int(number)
        if layer % 2 == 0:
            x = x + self.wide(self.readers[layer // 2], self._read(memory, lengths))
        return x + torch.tanh(self.wide(self.decoders[layer], x.sin())), memory, lengths

    def plain_loss(self, given: Given) -> Tensor:
        x = self.source(given.tokens)
        for encoder in self.encoders:
            x = x + torch.tanh(encoder(x.sin()))
        y, lengths = self.target(given.tokens[:TARGETS]), 1 + given.tokens[0] % LENGTH
        for layer, decoder in enumerate(self.decoders):
            if layer % 2 == 0:
                y = y + self.readers[layer // 2](self._read(x, lengths))
            y = y + torch.tanh(decoder(y.sin()))
        return self._loss(y, given)

    @staticmethod
    def _read(memory: Tensor, lengths: Tensor) -> Tensor:
        """The mean over the real positions: [s, b, h] -> [b, h]."""
        real = torch.arange(LENGTH)[:, None] < lengths
        return (memory * real[..., None]).sum(0) / lengths[:, None]

    def _loss(self, y: Tensor, given: Given) -> Tensor:
        logits = self.head(y).flatten(0, 1)
        return nn.functional.cross_entropy(logits, given.labels[:TARGETS].flatten(), reduction="sum")


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

    def gradients_ready(self, unit: str, *, last: bool) -> None:
        self.told.append(("last ready" if last else "ready", unit))
        self.look()

    def acquired(self) -> list[str]:
        """The units that were acquired, in order."""
        return [unit for what, unit in self.told if what.startswith("acquire")]

    def ready(self) -> Iterator[tuple[str, str]]:
        return ((what, unit) for what, unit in self.told if what.endswith("ready"))
