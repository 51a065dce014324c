"""Adding to rows of a table: the gradient of a look-up.

Rows that occur several times are added in a fixed order, so that two runs are equal to the bit. On CPUs `index_add_`
does that. On CUDA it adds with atomics, in any order; `index_put_` with `accumulate` sorts the rows first (PyTorch,
ATen/native/cuda/Indexing.cu), and needs no list of the rows that are this rank's own, for which the program would have
to wait.
"""

import torch
from torch import Tensor


def add_rows_(total: Tensor, rows: Tensor, values: Tensor, mine: Tensor | None = None) -> None:
    """total[rows] += values, where `mine` (None: everywhere): total [r, h], rows int64 [...], values [..., h].

    `rows` lie in the table where `mine` is False too.
    """
    rows, values = rows.reshape(-1), values.reshape(-1, values.shape[-1])
    mine = None if mine is None else mine.reshape(-1)
    if total.is_cuda:
        _add_sorted_(total, rows, values.to(total.dtype), mine)
    elif mine is None:
        total.index_add_(0, rows, values.to(total.dtype))
    else:
        total.index_add_(0, rows[mine], values[mine].to(total.dtype))


def _add_sorted_(total: Tensor, rows: Tensor, values: Tensor, mine: Tensor | None) -> None:
    """Zeros, spread over the table, are added for what is not `mine`: one row's additions wait for each other."""
    if mine is not None:
        spread = torch.arange(len(rows), device=rows.device) % len(total)
        rows, values = torch.where(mine, rows, spread), values.masked_fill(~mine[:, None], 0.0)
    total.index_put_((rows,), values, accumulate=True)
