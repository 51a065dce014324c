"""Whole weights into a rank's shards, and a rank's gradients beside the whole's."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.mesh import Axis
from colonnade.tensor_parallel.placement import Placement, placements


def window(place: Placement, whole: Tensor) -> Tensor:
    """This rank's box of a whole tensor."""
    extents = place.real(place.parameter).shape
    return whole[tuple(slice(at, at + extent) for at, extent in zip(place.offsets, extents, strict=True))]


@torch.no_grad()
def load_shards_(module: nn.Module, tp: Axis, whole: Mapping[str, Tensor], *, padding: float = 0.0) -> None:
    """Fill every weight from the whole one of its name; padding rows with `padding`."""
    for place in placements(module, tp):
        place.parameter.fill_(padding)
        place.real(place.parameter).copy_(window(place, whole[place.name]))


@torch.no_grad()
def sum_replicated_(module: nn.Module, tp: Axis) -> None:
    """Sum the gradients of uncut weights over tp, as is owed where the stream is cut along the sequence."""
    for place in placements(module, tp):
        if place.dim is None:
            assert place.parameter.grad is not None
            place.parameter.grad.copy_(all_reduce(place.parameter.grad, tp))


def assert_gradients(module: nn.Module, tp: Axis, whole: Mapping[str, Tensor], tolerance: float = 1e-12) -> None:
    """Every gradient is this rank's box of the whole one, relative to its largest element; padding has none."""
    for place in placements(module, tp):
        gradient, expected = place.parameter.grad, whole[place.name]
        assert gradient is not None
        box = window(place, expected)
        assert torch.isfinite(gradient).all()
        if box.numel():
            difference = (place.real(gradient) - box).abs().max() / expected.abs().max()
            assert difference <= tolerance, f"{place.name} on rank {tp.rank}: {difference:.1e}"
        if place.dim is not None:
            rest = gradient.narrow(place.dim, place.extent, gradient.shape[place.dim] - place.extent)
            assert not rest.any(), f"{place.name} on rank {tp.rank}: padding has a gradient"


def drawn(*shape: int, seed: int) -> Tensor:
    """Normal float64, the same on every rank."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
