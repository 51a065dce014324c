"""Dropout whose masks are a pure function of (run seed, what it drops, layer, sample, element).

A mask does not depend on the layout, the micro-batch size or whether a layer is computed twice: element (position,
column) of a sample has the same fate everywhere. Inside tensor-parallel regions each rank draws the masks of its own
heads.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade import randomness
from colonnade.gpu_kernels import takes
from colonnade.kernels import compiled, gpu
from colonnade.mesh.autograd import apply
from colonnade.randomness import Purpose, dropped_values, kept_scale, name_id, stream_keys


def keep_mask(keys: np.ndarray, start: int, count: int, drop: float, device: torch.device) -> Tensor:
    """As `randomness.keep_mask`, by one kernel on GPUs, and on CPUs where there are compiled ones."""
    if takes(device):
        return gpu.keep_mask(keys, start, count, dropped_values(drop), device)
    if device.type == "cpu" and compiled.is_loaded():
        return compiled.keep_mask(keys, start, count, drop)
    if device.type == "meta" and torch.empty(0, device=device).is_cuda:  # planned for a GPU: what the kernel writes
        return torch.zeros((len(keys), count), dtype=torch.bool, device=device)
    return randomness.keep_mask(keys, start, count, drop, device)


class CurrentMasks:
    """The masks of the micro-batch that a unit runs for: whoever runs units sets them, and adapters ask."""

    def __init__(self) -> None:
        self.now: Masks | None = None


@dataclass(frozen=True)
class Masks:
    """Draws the dropout masks of one micro-batch. None of these where nothing is dropped (evaluation)."""

    seed: int
    samples: np.ndarray
    """[b]: each sample's position in the whole run's sequence of samples, counted from 0."""

    def hidden(
        self, purpose: Purpose, layer: int, shape: torch.Size, drop: float, device: torch.device, first: int = 0
    ) -> Tensor:
        """Mask for a residual stream, bool [s, b, h], whose positions begin with `first`."""
        s, b, h = shape
        keys = stream_keys(self.seed, purpose, layer, last=self.samples)
        return keep_mask(keys, first * h, s * h, drop, device).view(b, s, h).transpose(0, 1)

    def features(
        self, purpose: Purpose, layer: int, shape: torch.Size, columns: range, drop: float, device: torch.device
    ) -> Tensor:
        """Mask for some columns (numbered in the whole layer) of an inner stream, bool [s, b, columns]: a stream for
        each, so that ranks that have others need not draw them.
        """
        keys = [stream_keys(self.seed, purpose, layer, int(sample), last=columns) for sample in self.samples]
        mask = keep_mask(np.concatenate(keys), 0, shape[0], drop, device)
        return mask.view(len(self.samples), len(columns), shape[0]).permute(2, 0, 1)

    def adapter_positions(
        self, name: str, shape: torch.Size, drop: float, device: torch.device, first: int = 0
    ) -> Tensor:
        """Mask for what the adapter of this name reads of the stream, bool [s, b, i], whose positions begin with
        `first`.
        """
        s, b, i = shape
        return keep_mask(self._of_adapter(name), first * i, s * i, drop, device).view(b, s, i).transpose(0, 1)

    def adapter_features(
        self, name: str, shape: torch.Size, drop: float, device: torch.device, first: int = 0
    ) -> Tensor:
        """Mask for what the adapter of this name reads of features that are cut, bool [s, b, i/tp], which begin with
        `first`.
        """
        s, b, i = shape
        return keep_mask(self._of_adapter(name), first * s, i * s, drop, device).view(b, i, s).permute(2, 0, 1)

    def _of_adapter(self, name: str) -> np.ndarray:
        return stream_keys(self.seed, Purpose.ADAPTER_DROPOUT, name_id(name), last=self.samples)

    def attention(self, layer: int, heads: range, drop: float) -> "ProbabilityDropout":
        """Of the attention probabilities of these heads (numbered in the whole layer)."""
        streams = [
            stream_keys(self.seed, Purpose.ATTENTION_DROPOUT, layer, int(sample), last=heads) for sample in self.samples
        ]
        return ProbabilityDropout(np.stack(streams), drop)


@dataclass(frozen=True)
class ProbabilityDropout:
    """What is dropped of attention probabilities: drawn where it is needed, as often as it is."""

    streams: np.ndarray
    """uint64 [b, n]: keys, of a stream for each head of each sample."""
    drop: float

    @property
    def kept_scale(self) -> float:
        """What is kept is multiplied with this."""
        return kept_scale(self.drop)

    def mask(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """True where a probability is kept: bool [b, n, queries, keys]."""
        mask = keep_mask(self.streams.ravel(), 0, queries * keys, self.drop, device)
        return mask.view(*self.streams.shape, queries, keys)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return _kept(x, keep, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return _kept(grad, keep, ctx.scale), None, None


def _kept(x: Tensor, keep: Tensor, scale: float) -> Tensor:
    if x.device.type == "cpu" and x.ndim == 3 and x.dtype in compiled.NUMBERS and compiled.is_loaded():
        return compiled.kept(x, keep, scale)  # the same bits in a pass
    return x.mul(keep).mul_(scale)


def dropout(x: Tensor, drop: float, masks: Masks | None, purpose: Purpose, layer: int = 0, *, first: int = 0) -> Tensor:
    """[s, b, h] with elements dropped with chance `drop`, the rest scaled up; x itself where `masks` is None or drop
    is 0. `first`: the position in the sequence with which x begins.
    """
    if masks is None or drop == 0.0:
        return x
    return scaled_dropout(x, masks.hidden(purpose, layer, x.shape, drop, x.device, first), drop)


def scaled_dropout(x: Tensor, keep: Tensor, drop: float) -> Tensor:
    """x where `keep`, scaled up by what is dropped on average, else 0."""
    y: Tensor = apply(_Dropout, x, keep, kept_scale(drop))
    return y


def dropout_of_columns(
    x: Tensor, columns: range, drop: float, masks: Masks | None, purpose: Purpose, layer: int
) -> Tensor:
    """The same for the columns of a layer cut over tp: [s, b, columns]."""
    if masks is None or drop == 0.0:
        return x
    return scaled_dropout(x, masks.features(purpose, layer, x.shape, columns, drop, x.device), drop)
