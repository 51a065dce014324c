"""Collectives over one axis, and the conjugate operators that the layers are written with.

This is the one file where an axis of size 1 becomes the identity: nothing above asks how many ranks there are.

                      forward           backward
    copy_to           identity          all-reduce        f of the Megatron-LM paper (section 3)
    reduce_from       all-reduce        identity          g
    gather_sequence   all-gather        reduce-scatter    [s/tp, …] -> [s, …]
    scatter_sequence  reduce-scatter    all-gather        [s, …] -> [s/tp, …]

Two operators are conjugate when one's forward is the other's backward.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Concatenate

import torch
from torch import Tensor

from colonnade.mesh.autograd import apply
from colonnade.mesh.ledger import Site, call_site
from colonnade.mesh.mesh import Axis
from colonnade.mesh.transport import Pending

Operator = Callable[[Tensor, Axis], Tensor]
Move = Callable[[Tensor, Axis, Site], Tensor]


def _over_several(move: Callable[Concatenate[Tensor, Axis, ...], Tensor]) -> Callable[..., Tensor]:
    """`move` where the axis has several ranks, the identity where it has one."""

    def collective(x: Tensor, axis: Axis, *args: Any) -> Tensor:
        return x if axis.transport is None else move(x, axis, *args)

    return collective


@_over_several
def _all_reduce(x: Tensor, axis: Axis, site: Site, op: str = "sum") -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    axis.transport.all_reduce_(out, op, site).wait()  # type: ignore[union-attr]
    return out


def _start_all_gather(x: Tensor, axis: Axis, site: Site) -> tuple[Tensor, Pending]:
    if axis.transport is None:
        return x, Pending(None)
    out = x.new_empty((axis.size * x.shape[0], *x.shape[1:]))
    return out, axis.transport.all_gather_into_(out, x.contiguous(), site)


def _all_gather(x: Tensor, axis: Axis, site: Site) -> Tensor:
    out, arriving = _start_all_gather(x, axis, site)
    arriving.wait()
    return out


@_over_several
def _reduce_scatter(x: Tensor, axis: Axis, site: Site) -> Tensor:
    assert x.shape[0] % axis.size == 0, f"dim 0 of {tuple(x.shape)} cannot be cut into {axis.size} equal parts"
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    axis.transport.reduce_scatter_into_(out, x.contiguous(), site).wait()  # type: ignore[union-attr]
    return out


def _identity(x: Tensor, axis: Axis, site: Site) -> Tensor:
    return x.view_as(x)


# --- plain collectives: no gradient flows through them ----------------------------------------------------------------


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """`op` ("sum", "max" or "min") of every rank's `x`, on every rank. Sends x once."""
    return _all_reduce(x, axis, call_site(), op)


def all_reduce_(x: Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Start the all-reduce of contiguous `x` in place; wait on what is returned before touching x."""
    if axis.transport is None:
        return Pending(None)
    return axis.transport.all_reduce_(x, op, call_site())


def all_gather(x: Tensor, axis: Axis) -> Tensor:
    """Every rank's `x`, laid end to end along dim 0: [n, …] -> [n·size, …]."""
    return _all_gather(x, axis, call_site())


def start_all_gather(x: Tensor, axis: Axis) -> tuple[Tensor, Pending]:
    """As `all_gather`: (where it will be, when). Leave x alone until then."""
    return _start_all_gather(x, axis, call_site())


def reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    """This rank's part along dim 0 of the sum of every rank's `x`: [n, …] -> [n/size, …]."""
    return _reduce_scatter(x, axis, call_site())


def all_gather_into_(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Start laying every rank's `x` end to end in `out`: [n] -> [size·n], both contiguous.

    x may be this rank's own part of out. Wait on what is returned before touching either.
    """
    assert out.numel() == axis.size * x.numel(), f"{x.numel()} numbers of {axis.size} ranks do not make {out.numel()}"
    if axis.transport is None:
        return _copied(out, x)
    return axis.transport.all_gather_into_(out, x, call_site())


def reduce_scatter_into_(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Start writing this rank's part of the sum of every rank's `x` to `out`: [size·n] -> [n], both contiguous.

    out may be this rank's own part of x; the rest of x is left alone, or overwritten. Wait on what is returned before
    touching either.
    """
    assert x.numel() == axis.size * out.numel(), f"{x.numel()} numbers are not {axis.size} parts of {out.numel()}"
    if axis.transport is None:
        return _copied(out, x)
    return axis.transport.reduce_scatter_into_(out, x, call_site())


def on_the_wire(x: Tensor, axis: Axis, dtype: torch.dtype | None) -> Tensor:
    """What is sent of `x` over the axis: a copy in `dtype`; x itself where that is None, or where nothing is sent."""
    return x if dtype is None or axis.transport is None else x.to(dtype)


def broadcast_(x: Tensor, axis: Axis, source: int = 0) -> Tensor:
    """Overwrite contiguous `x` with that of the axis' rank `source`."""
    if axis.transport is not None:
        axis.transport.broadcast_(x, source, call_site())
    return x


def where_unequal(make: Callable[[], Tensor], axis: Axis) -> Tensor | None:
    """Where the ranks' integers `make()` [n] are not all equal: bool [n], the same on all ranks.

    None where a rank is alone: nothing is made then. Sends them twice.
    """
    if axis.transport is None:
        return None
    mine = make()
    largest = torch.stack([mine, ~mine])  # the complement reverses the order: its maximum is the minimum's
    largest = _all_reduce(largest, axis, call_site(), "max")
    return largest[0] != ~largest[1]


def same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors begin at the same place of one storage. Addresses would not do: on the meta device all are
    0.
    """
    places = [(x.untyped_storage()._cdata, x.storage_offset()) for x in (one, other)]
    return places[0] == places[1]


def _copied(out: Tensor, x: Tensor) -> Pending:
    if not same_memory(out, x):
        out.copy_(x)
    return Pending(None)


# --- the two halves of a conjugate operator, for who has work to do while the second is under way ---------------------


@dataclass(frozen=True)
class Entrance:
    """`copy_to`, or with `cut` `gather_sequence`, taken apart: forward now, backward started and waited for later."""

    axis: Axis
    cut: bool
    back: Site | None = None
    """Who asked forward; None before."""

    def enter(self, x: Tensor) -> tuple[Tensor, "Entrance"]:
        """What forward gives, and the way back for its gradient."""
        if self.axis.transport is None:
            return x, self
        site = call_site()
        back = replace(self, back=site.in_backward(self.axis.transport.ledger.unit))
        return (_all_gather(x, self.axis, site) if self.cut else x), back

    def start_back(self, grad: Tensor) -> tuple[Tensor, Pending]:
        """Start the backward move of contiguous `grad`, which nobody else has: (where its result will be, when)."""
        if self.axis.transport is None:
            return grad, Pending(None)
        assert self.back is not None, "what has not entered has no way back"
        if not self.cut:
            return grad, self.axis.transport.all_reduce_(grad, "sum", self.back)
        out = grad.new_empty((len(grad) // self.axis.size, *grad.shape[1:]))
        return out, self.axis.transport.reduce_scatter_into_(out, grad, self.back)


# --- conjugate operators: gradients flow -----------------------------------------------------------------------------


def conjugate_pair(one: Move, other: Move) -> tuple[Operator, Operator]:
    """Two differentiable operators: `one` forward with `other` backward, and `other` forward with `one` backward."""
    return _operator(one, other), _operator(other, one)


def _operator(forward_move: Move, backward_move: Move) -> Operator:
    class Conjugate(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
            site = call_site()
            ctx.axis, ctx.site = axis, site.in_backward(axis.transport.ledger.unit)  # type: ignore[union-attr]
            return forward_move(x, axis, site)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return backward_move(grad, ctx.axis, ctx.site), None

    def operator(x: Tensor, axis: Axis) -> Tensor:
        return x if axis.transport is None else apply(Conjugate, x, axis)

    return operator


copy_to, reduce_from = conjugate_pair(_identity, _all_reduce)
gather_sequence, scatter_sequence = conjugate_pair(_all_gather, _reduce_scatter)
