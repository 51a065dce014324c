"""Buckets: each of the model's (a table, a block, a head) keeps the numbers of its weights in a few flat buffers.

    parameters   compute type    what the layers multiply with; each weight is a view of it
    gradients    fp32 (fp64)     each weight's `.grad` is a view of it: backward adds to it
    master       fp32 (fp64)     what the optimizer updates; the parameters themselves unless they are 16-bit
    reduced      fp32 (fp64)     the gradients that the optimizer reads, summed over dp

Within a bucket, weights are laid out in groups of one kind, so that the optimizer and the gradient norm work on a few
long slices:

    [ decayed, cut over tp | decayed, replicated | not decayed, cut | not decayed, replicated | padding ]

(behind replicated ones, those whose gradients are partial sums over tp; each kind once more for every pair of factors
on learning rate and weight decay)

Frozen weights have buckets of their own, under the same names, which have parameters alone: no gradients, no moments,
no reduction, and no master copy beside 16 bits. Only ZeRO 3 cuts them.

**ZeRO** (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020): every
buffer is cut over dp into equal slices, wherever the cuts fall. The stage says which buffers a rank has in full between
uses, and of which it has only `mine`, its slice:

    stage    parameters    gradients    master, moments
      0      full          full         full
      1      full          full         mine
      2      full          mine         mine
      3      mine          mine         mine

What a rank has only a slice of is gathered while it is needed and freed afterwards; `zero.py` decides when.
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from colonnade.data_parallel.freed import mark_reduced, mark_resharded
from colonnade.data_parallel.lengths import ALIGNMENT, up
from colonnade.mesh.collectives import all_gather_into_, all_reduce_, on_the_wire, reduce_scatter_into_, same_memory
from colonnade.mesh.mesh import Axis
from colonnade.mesh.transport import Pending
from colonnade.tensor_parallel.placement import Placement


@dataclass(frozen=True)
class ParamRange:
    """Where a weight lies in its bucket."""

    placement: Placement
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.placement.parameter.numel()

    def view(self, flat: Tensor) -> Tensor:
        """The weight in a flat buffer that is not cut, in the weight's shape."""
        return flat[self.start : self.stop].view(self.placement.parameter.shape)


@dataclass(frozen=True)
class ParamGroup:
    """A range of a bucket whose weights are treated alike."""

    start: int
    stop: int
    decayed: bool
    """Whether weight decay applies: to matrices, not to biases and norms."""
    cut: bool
    """Whether each tp rank has a shard of its own (else all have the same)."""
    is_partial: bool = False
    """Whether gradients of replicated weights are partial sums over tp."""
    learning_rate: float = 1.0
    """[factor] On the run's."""
    weight_decay: float = 1.0
    """[factor] On the run's, where it applies."""


@dataclass(frozen=True)
class LocalRange:
    """The range of one weight that lies in this rank's slice."""

    name: str
    """The weight's logical name."""
    placement: Placement
    first: int
    """Which element of the flattened weight it begins with."""
    at: slice
    """Where it lies in `master` and `reduced`."""


@dataclass(frozen=True)
class Storage:
    """How flat buffers are kept."""

    dtype: torch.dtype
    """Compute type."""
    device: torch.device
    zero: int = 0
    offload: bool = False
    """Master weights and moments live in CPU memory."""
    reduce_dtype: torch.dtype | None = None
    """Type in which gradients cross ranks; None: as they are summed."""

    @property
    def of_frozen(self) -> "Storage":
        """The same, of weights that never change: nothing to share out but the parameters themselves."""
        return replace(self, zero=3 if self.zero == 3 else 0, offload=False, reduce_dtype=None)

    @property
    def exact(self) -> torch.dtype:
        """Type of master weights, gradients and moments."""
        return torch.promote_types(self.dtype, torch.float32)


class Bucket:
    """The flat buffers of some weights, all trained or all frozen, and where each lies in them. Takes the weights over:
    they become views.
    """

    def __init__(self, name: str, places: Sequence[Placement], dp: Axis, storage: Storage) -> None:
        self.is_frozen = all(place.is_frozen for place in places)
        assert self.is_frozen or not any(place.is_frozen for place in places), f"{name}: some weights are frozen"
        self.name, self.dp, self.storage = name, dp, storage.of_frozen if self.is_frozen else storage
        storage = self.storage
        self.ranges, self.groups, used = _lay_out(places)
        self.size = up(used, ALIGNMENT * dp.size)
        share = self.size // dp.size if storage.zero else self.size
        first = dp.rank * share if storage.zero else 0
        self.mine = slice(first, first + share)
        self._make_weights(self._initial())
        self._make_gradients()
        self._take_over()
        self._arriving: Pending | None = None
        self._summing: tuple[Tensor, Pending] | None = None
        self._is_unsharded = storage.zero < 3
        if storage.zero == 3:
            self._free_parameters()
        if storage.zero >= 2:
            self._free_gradients()

    def _take_over(self) -> None:
        """Make weights, and their gradients, views of the buffers."""
        self._weights = [param.placement.parameter for param in self.ranges]
        for param, parameter in zip(self.ranges, self._weights, strict=True):
            parameter.data = param.view(self.parameters)
            if not self.is_frozen:
                parameter.grad_dtype = self.gradients.dtype
        self._grads = [] if self.is_frozen else [param.view(self.gradients) for param in self.ranges]
        self._attach_gradients()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Bucket":
        """One whose weights are views of it: torch's copies of parameters have memory of their own."""
        copied = memo[id(self)] = object.__new__(type(self))
        vars(copied).update({name: deepcopy(each, memo) for name, each in vars(self).items() if name != "_grads"})
        copied._take_over()
        if _is_freed(self.gradients):
            copied._free_gradients()  # torch's copy of them has memory, and whatever stood in it
        return copied

    def _initial(self) -> Tensor:
        dtype = self.storage.dtype if self.is_frozen else self.storage.exact
        flat = torch.zeros(self.size, dtype=dtype, device=self.storage.device)
        for param in self.ranges:
            param.view(flat).copy_(param.placement.parameter.detach())
        return flat

    def _make_weights(self, flat: Tensor) -> None:
        """`parameters`, `master` and `shard` (this rank's slice of the parameters), sharing memory where they can."""
        same = self.is_frozen or self.storage.dtype == flat.dtype
        self.parameters = flat.to(self.storage.dtype)
        self.shard = self.parameters[self.mine]
        if self.storage.zero == 3:
            self.shard = self.shard.clone()
        self.master = self.shard if same else flat[self.mine].clone()
        if self.storage.offload:
            self.master = _on_the_host(self.master)

    def _make_gradients(self) -> None:
        size, mine = (0, slice(0)) if self.is_frozen else (self.size, self.mine)
        self.gradients = torch.zeros(size, dtype=self.storage.exact, device=self.storage.device)
        self.reduced = self.gradients[mine]
        if self.storage.zero >= 2:
            self.reduced = self.reduced.clone()
        # what the optimizer reads: a copy where it works on the CPU
        self.optimizer_gradients = _on_the_host(self.reduced) if self.storage.offload else self.reduced

    # --- parameters ---------------------------------------------------------------------------------------------------

    @property
    def copied_to(self) -> Tensor | None:
        """Where new master weights have to be copied, which rounds them: `shard`, unless both are the same memory."""
        return None if same_memory(self.shard, self.master) else self.shard

    def publish(self, *, copied: bool = False) -> None:
        """Hand new master weights to the layers. ZeRO 1 and 2: start gathering them; ZeRO 3: they stay a slice.
        `copied`: they are in `copied_to` already.
        """
        if self.copied_to is not None and not copied:
            self.shard.copy_(self.master)
        if self.storage.zero in (1, 2):
            self._arriving = all_gather_into_(self.parameters, self.shard, self.dp)

    def fetch(self) -> None:
        """Start gathering the parameters, where a rank has only its slice."""
        if self._is_unsharded:
            return
        _allocate(self.parameters)
        mark_resharded(self._weights, resharded=False)
        self._arriving = all_gather_into_(self.parameters, self.shard, self.dp)
        self._is_unsharded = True

    def unshard(self) -> None:
        """Return when all parameters are there."""
        self.fetch()
        self.settle()

    def settle(self) -> None:
        """Return when no gather is under way."""
        if self._arriving is not None:
            self._arriving.wait()
            self._arriving = None

    def reshard(self) -> None:
        """ZeRO 3: forget all but this rank's slice of the parameters."""
        if self.storage.zero == 3 and self._is_unsharded:
            self.check_weights()
            self.unshard()  # what is under way must not land in memory that is somebody else's by then
            self._free_parameters()
            self._is_unsharded = False

    def _free_parameters(self) -> None:
        _free(self.parameters)
        mark_resharded(self._weights, resharded=True)

    def check_weights(self) -> None:
        """RuntimeError where layers have other tensors than views of `parameters`: nobody would train them."""
        begin, size, is_there = self.parameters.data_ptr(), self.parameters.element_size(), self._is_unsharded
        for param, parameter in zip(self.ranges, self._weights, strict=True):
            place = param.placement
            moved = is_there and parameter.data_ptr() != begin + param.start * size and parameter.numel() > 0
            if moved or place.held_in.get(place.key, parameter) is not parameter:
                raise RuntimeError(
                    f"{self.name}.{place.name} does not lie in the memory that a step trains any more: "
                    "`model.to(dtype)`, `load_state_dict(assign=True)`, or whatever else gives a layer another tensor, "
                    "has put one in its place. Set the number format by train.precision before `build_state`; other "
                    "numbers are written into each bucket's `master`, and handed on by `state.ownership.publish()`"
                )

    # --- gradients ----------------------------------------------------------------------------------------------------

    def zero_gradients(self) -> None:
        """Before the first micro-batch of a step, whatever one that was broken off has left."""
        self.finish_reduction()
        if self.storage.zero < 2:
            self._attach_gradients()
            self.gradients.zero_()
        else:
            self._free_gradients()
            self.reduced.zero_()

    def open_gradients(self) -> None:
        """Return when there is memory to add gradients to, and nobody is reading it."""
        self.finish_reduction()
        if _is_freed(self.gradients):
            _allocate(self.gradients)
            mark_reduced(self._grads, reduced=False)
            self._attach_gradients()
            self.gradients.zero_()

    @property
    def sum_holds_memory(self) -> bool:
        """Whether there is memory that only a sum under way needs: the full gradients of ZeRO 2 and 3, a copy in 16
        bits.
        """
        return self.storage.zero >= 2 or self.storage.reduce_dtype is not None

    def start_reduction(self) -> None:
        """Start the sum over dp of what `gradients` holds.

        Sends the buffer once: all-reduced under ZeRO 0, else reduce-scattered.
        """
        assert self._summing is None, f"{self.name} is being summed already"
        wire = on_the_wire(self.gradients, self.dp, self.storage.reduce_dtype)
        if self.storage.zero == 0:
            self._summing = wire, all_reduce_(wire, self.dp)
            return
        in_place = self.storage.zero == 1 and wire is self.gradients
        out = self.reduced if in_place else wire.new_empty(len(self.reduced))
        self._summing = out, reduce_scatter_into_(out, wire, self.dp)

    def finish_reduction(self) -> None:
        """Have the sum that was started in `reduced`; under ZeRO 2 and 3 on top of what earlier micro-batches left."""
        if self._summing is None:
            return
        out, pending = self._summing
        pending.wait()
        self._summing = None
        if self.storage.zero >= 2:
            self.reduced.add_(out)
            self._free_gradients()
        elif not same_memory(out, self.reduced):
            self.reduced.copy_(out)

    def _attach_gradients(self) -> None:
        """Have each weight's `.grad` in `gradients`, whatever `zero_grad`, or who else sets it, has put there."""
        for parameter, grad in zip(self._weights, self._grads, strict=False):  # frozen ones have none
            if parameter.grad is not grad:
                parameter.grad = grad

    def _free_gradients(self) -> None:
        _free(self.gradients)
        mark_reduced(self._grads, reduced=True)

    def copy_to_optimizer(self) -> None:
        """Have `reduced` in `optimizer_gradients`, where the master weights are."""
        if not same_memory(self.optimizer_gradients, self.reduced):
            self.optimizer_gradients.copy_(self.reduced)

    # --- what lies in this rank's slice -------------------------------------------------------------------------------

    def local_groups(self) -> Iterator[tuple[ParamGroup, slice]]:
        """Every group that reaches into this rank's slice, and where it lies in `master` and `reduced`."""
        for group in self.groups:
            at = self._mine_of(group.start, group.stop)
            if at.start < at.stop:
                yield group, at

    def local_ranges(self) -> Iterator[LocalRange]:
        """Every weight that reaches into this rank's slice."""
        for param in self.ranges:
            at = self._mine_of(param.start, param.stop)
            if at.start < at.stop:
                first = at.start + self.mine.start - param.start
                yield LocalRange(f"{self.name}.{param.placement.name}", param.placement, first, at)

    def _mine_of(self, start: int, stop: int) -> slice:
        """A range of the buffer, seen from the start of this rank's slice; empty where it lies outside."""
        first, last = max(start, self.mine.start), min(stop, self.mine.stop)
        return slice(first - self.mine.start, max(first, last) - self.mine.start)


def flatten(named: Mapping[str, Sequence[Placement]], dp: Axis, storage: Storage) -> list[Bucket]:
    """A bucket for each name's trained weights, and one for its frozen ones, in their order."""
    parts = (
        (name, [place for place in places if place.is_frozen == frozen])
        for name, places in named.items()
        for frozen in (False, True)
    )
    return [Bucket(name, places, dp, storage) for name, places in parts if places]


def named_ranges(buckets: Sequence[Bucket]) -> Iterator[tuple[str, Bucket, ParamRange]]:
    """(logical weight name, bucket, range) of every weight."""
    for bucket in buckets:
        for param in bucket.ranges:
            yield f"{bucket.name}.{param.placement.name}", bucket, param


def _lay_out(places: Sequence[Placement]) -> tuple[list[ParamRange], list[ParamGroup], int]:
    def kind(place: Placement) -> tuple[bool, bool, bool, float, float]:
        is_vector = place.parameter.ndim < 2
        return is_vector, place.dim is None, place.is_partial, place.learning_rate, place.weight_decay

    ranges, groups, at = [], [], 0
    for (plain, replicated, is_partial, rate, decay), members in groupby(sorted(places, key=kind), key=kind):
        first = at
        for place in members:
            ranges.append(ParamRange(place, at))
            at += up(place.parameter.numel(), ALIGNMENT)
        groups.append(
            ParamGroup(
                first,
                at,
                decayed=not plain,
                cut=not replicated,
                is_partial=is_partial,
                learning_rate=rate,
                weight_decay=decay,
            )
        )
    return ranges, groups, at


def _on_the_host(x: Tensor) -> Tensor:
    """x in CPU memory, pinned where it comes from CUDA: copies to and from a device are several times faster so."""
    return x.cpu().pin_memory() if x.is_cuda else x


def _free(buffer: Tensor) -> None:
    """Give a buffer's memory back; its views stay, and are of use again once it is allocated."""
    buffer.untyped_storage().resize_(0)


def _allocate(buffer: Tensor) -> None:
    buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())


def _is_freed(buffer: Tensor) -> bool:
    return buffer.untyped_storage().size() == 0 and buffer.numel() > 0
