"""Initial weights as a pure function of (run seed, weight name, row, column): equal on every layout.

N(0, init_std); weights before a residual × 1/√(2·layers) (Megatron-LM paper, section 4); norms one, biases zero.
"""

import torch
from torch import Tensor, nn

from colonnade.mesh.mesh import Axis
from colonnade.mesh.randomness import Purpose, name_id, normal, stream_keys
from colonnade.model.gpt import GPT
from colonnade.tensor_parallel.placement import Placement, named_placements

_ELEMENTS_AT_ONCE = 1 << 16


@torch.no_grad()
def initialize_(model: GPT, tp: Axis, seed: int) -> None:
    """Fill every weight of this rank (on the CPU, in fp32 or fp64; draw first, move and round afterwards)."""
    stds = _standard_deviations(model)
    for part, places in named_placements(model.parts(), tp).items():
        for place in places:
            name = f"{part}.{place.name}"
            if place.parameter.ndim == 1:
                place.parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
                continue
            place.parameter.zero_()  # padding stays zero
            _fill_rows_(place, name, stds[id(place.parameter)], seed)


def _standard_deviations(module: nn.Module) -> dict[int, float]:
    return {
        id(parameter): float(getattr(part, "init_std"))  # noqa: B009  (nn.Module types attributes as Tensor | Module)
        for part in module.modules()
        for parameter in part.parameters(recurse=False)
        if parameter.ndim == 2
    }


def _fill_rows_(place: Placement, name: str, std: float, seed: int) -> None:
    """Draw this rank's box of the logical weight, some rows at a time.

    Each row is a stream, each column an element of it.
    """
    real = place.real(place.parameter)
    (row, column), (num_rows, num_columns) = place.offsets, real.shape
    step = max(1, _ELEMENTS_AT_ONCE // max(1, num_columns))
    for first in range(0, num_rows, step):
        rows = range(row + first, row + min(first + step, num_rows))
        keys = stream_keys(seed, Purpose.INITIAL_WEIGHT, name_id(name), last=rows)
        values: Tensor = normal(keys, column, num_columns) * std
        real[first : first + len(rows)] = values
