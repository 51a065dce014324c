"""Flat buffers to test with: of a real model, and of buckets whose weights are given by their shapes alone."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from colonnade.config.model import ModelConfig
from colonnade.data_parallel.buckets import Bucket, Storage, flatten
from colonnade.mesh.mesh import Axis, Mesh
from colonnade.model.gpt import GPT
from colonnade.model.initialize import initialize_
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.tensor_parallel.placement import Placement, named_placements

CPU = torch.device("cpu")
VOCAB = 37
MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=4, seq_length=6)


def storage(dtype: torch.dtype = torch.float64, zero: int = 0, reduce_dtype: torch.dtype | None = None) -> Storage:
    return Storage(dtype=dtype, device=CPU, zero=zero, reduce_dtype=reduce_dtype)


def flat_model(
    kept: Storage | None = None,
    *,
    tp: Axis | None = None,
    dp: Axis | None = None,
    tied: bool = True,
    units: Sequence[str] | None = None,
) -> tuple[GPT, list[Bucket]]:
    """A small GPT with initial weights, and its flat buffers (float64, all whole, unless told otherwise)."""
    kept = kept or storage()
    tp = tp or Mesh().tp
    gpt = GPT(MODEL.model_copy(update={"tie_embeddings": tied}), VOCAB, Parallel(tp), units=units).to(kept.exact)
    initialize_(gpt, tp, 1)
    return gpt, flatten(named_placements(gpt.bucket_modules(), tp), dp or Mesh().dp, kept)


def weights(shapes: Mapping[str, tuple[int, ...]]) -> list[Placement]:
    """Replicated weights of these shapes that count 0, 1, 2, …: no element is like another."""
    places, first = [], 0
    for name, shape in shapes.items():
        numbers = torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float64).view(shape)
        places.append(Placement(name, nn.Parameter(numbers), shape, None, 0, shape[0]))
        first += numbers.numel()
    return places


def toy_buckets(lengths: Mapping[str, int], dp: Axis, kept: Storage) -> list[Bucket]:
    """Buckets of one vector each: told apart by their sizes alone."""
    return flatten({bucket: weights({"weight": (length,)}) for bucket, length in lengths.items()}, dp, kept)


def allocated(buckets: Sequence[Bucket], buffer: str) -> set[str]:
    """The buckets whose whole buffer has memory."""
    return {bucket.name for bucket in buckets if getattr(bucket, buffer).untyped_storage().size() > 0}
