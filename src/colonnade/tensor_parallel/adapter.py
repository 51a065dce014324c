"""Low-rank adapters beside cut linear layers: y = W x + (alpha / rank) · B A x (Hu et al., "LoRA: Low-Rank
Adaptation of Large Language Models", 2021). Dropout is on what A reads.

What crosses the tp ranks is `rank` wide. On both sides of it A and B have the sides of W that are cut:

    columns    x ── drop ── A ──┤ enter ├── B [o/tp, rank] ──▶ + y          A works on the stream, and is on every rank
    rows       x ── drop ── A [rank, i/tp] ──┤ leave ├── B ──▶ + y          B works on the stream, and is on every rank

So under sequence parallelism A of columns and B of rows see a part of the sequence, as every weight on the stream does,
and their gradients are partial sums over tp that whoever reduces gradients adds up; otherwise all ranks have the same.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colonnade.architecture.statement import Adapters
from colonnade.kernels.dropout import scaled_dropout
from colonnade.kernels.products import Input, Operand, linear, linears
from colonnade.tensor_parallel.parallel import Parallel


@dataclass(frozen=True)
class Adapter:
    """Beside one layer. Its weights are the layer's own, `lora_a` and `lora_b`."""

    name: str
    """The layer's logical name: what its masks are drawn by."""
    stated: Adapters
    parallel: Parallel
    lora_a: nn.Parameter
    lora_b: nn.Parameter

    def of_columns(self, x: Tensor, rows: slice) -> Tensor:
        """What is added to a column-parallel layer's output: [s, b, i] -> [s, b, o/tp]. Forward sends nothing; backward
        all-reduces [s, b, rank] over tp.

        Sequence parallel: [s/tp, b, i] -> [s, b, o/tp]. Forward all-gathers [s/tp, b, rank] over tp; backward
        reduce-scatters [s, b, rank], and gathers once more for B's gradient.
        """
        parallel, masks, drop = self.parallel, self.parallel.adapter_masks.now, self.stated.dropout
        if masks is not None and drop:
            keep = masks.adapter_positions(self.name, x.shape, drop, x.device, parallel.first_position(len(x)))
            x = scaled_dropout(x, keep, drop)
        middle = self._product(x, self.lora_a) * self.stated.scale
        (y,) = linears(
            middle,
            [Operand(self.lora_b, None, rows)],
            weight_gradients=parallel.weight_gradients,
            keep=Input(middle.detach(), parallel.start_gather),
            entrance=parallel.entrance,
            products=parallel.products,
        )
        return y

    def of_rows(self, x: Tensor) -> Tensor:
        """What is added to a row-parallel layer's output: [s, b, i/tp] -> [s, b, o]. Forward all-reduces [s, b, rank]
        over tp; backward sends nothing.

        Sequence parallel: [s, b, i/tp] -> [s/tp, b, o]. Forward reduce-scatters [s, b, rank] over tp; backward
        all-gathers [s/tp, b, rank].
        """
        parallel, masks, drop = self.parallel, self.parallel.adapter_masks.now, self.stated.dropout
        if masks is not None and drop:
            first = parallel.tp.rank * x.shape[-1]
            x = scaled_dropout(x, masks.adapter_features(self.name, x.shape, drop, x.device, first), drop)
        middle = parallel.leave(self._product(x, self.lora_a)) * self.stated.scale
        return self._product(middle, self.lora_b)

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, weight_gradients=self.parallel.weight_gradients, products=self.parallel.products)


class Adapted(nn.Module):
    """A layer that may have an adapter beside its weight [o, i]."""

    parallel: Parallel
    weight: nn.Parameter
    full_shapes: dict[str, tuple[int, ...]]
    adapter: Adapter | None = None

    def adapt(self, name: str, adapters: Adapters) -> None:
        """Give it one, with empty weights. A is cut as the weight's inputs are, B as its outputs."""
        sharded, partial = getattr(self, "sharded", {}), getattr(self, "partial", ())
        out, size = self.full_shapes["weight"]
        self.full_shapes = {**self.full_shapes, "lora_a": (adapters.rank, size), "lora_b": (out, adapters.rank)}
        self.sharded = {
            **sharded,
            **{("lora_b", "lora_a")[dim]: dim for key, dim in sharded.items() if key == "weight"},
        }
        self.partial = (*partial, *("lora_b" for key in partial if key == "weight"))
        self.lora_a = nn.Parameter(torch.empty(adapters.rank, self.weight.shape[1]))
        self.lora_b = nn.Parameter(torch.empty(self.weight.shape[0], adapters.rank))
        self.adapter = Adapter(name, adapters, self.parallel, self.lora_a, self.lora_b)
