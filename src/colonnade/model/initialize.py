"""Initial weights as a pure function of (run seed, weight name, row, column): equal on every layout.

How wide each weight begins is the architecture's statement (Megatron-LM paper, section 4: N(0, init_std); weights
before a residual × 1/√(2·layers)); norms begin with one, biases with zero.
"""

import torch
from torch import Tensor

from colonnade.kernels import compiled
from colonnade.mesh.mesh import Axis
from colonnade.model.model import Transformer
from colonnade.randomness import Purpose, name_id, normal, stream_keys
from colonnade.tensor_parallel.placement import Placement, named_placements

_ELEMENTS_AT_ONCE = 1 << 16
_ON_A_GPU = 1 << 22
"""A few hundred megabytes of float64 in all, so that an operator takes longer than its start."""


@torch.no_grad()
def initialize_(model: Transformer, tp: Axis, seed: int, device: torch.device | str = "cpu") -> None:
    """Fill every weight of this rank, which is on the CPU in fp32 or fp64 (round to 16 bits afterwards). `device`
    draws the numbers, with the same bits everywhere.
    """
    stated = model.architecture.weights()
    for bucket, places in named_placements(model.bucket_modules(), tp).items():
        for place in places:
            name = f"{bucket}.{place.name}"
            std = stated[name].std
            if std is None:
                place.parameter.fill_(stated[name].fill)
                continue
            place.parameter.zero_()  # padding stays zero
            _fill_rows_(place, name, std, seed, torch.device(device))


def _fill_rows_(place: Placement, name: str, std: float, seed: int, device: torch.device) -> None:
    """Draw this rank's box of the logical weight, some rows at a time.

    Each row is a stream, each column an element of it.
    """
    real = place.real(place.parameter)
    (row, column), (num_rows, num_columns) = place.offsets, real.shape
    in_a_pass = compiled.is_loaded() and device.type == "cpu" and real.dtype in compiled.NORMAL
    elements = real.numel() if in_a_pass else _ON_A_GPU if device.type == "cuda" else _ELEMENTS_AT_ONCE
    step = max(1, elements // max(1, num_columns))
    for first in range(0, num_rows, step):
        rows = range(row + first, row + min(first + step, num_rows))
        keys = stream_keys(seed, Purpose.INITIAL_WEIGHT, name_id(name), last=rows)
        if in_a_pass:
            compiled.normal_(real[first : first + len(rows)], keys, column, std)
            continue
        values: Tensor = normal(keys, column, num_columns, device) * std
        real[first : first + len(rows)] = values.to(real.dtype)  # before it crosses from a GPU
