"""How near to float64 a compiled kernel has to be: as near as torch's, or as roundings explain."""

from collections.abc import Sequence

import torch
from torch import Tensor


def assert_as_exact(
    found: Sequence[Tensor], theirs: Sequence[Tensor], exact: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """Of each result: the compiled one, torch's, and the float64 one."""
    for ours, other, right in zip(found, theirs, exact, strict=True):
        assert ours.dtype is dtype and ours.shape == right.shape
        rounding = 0.004 if dtype is torch.bfloat16 else 1e-6
        limit = max(1.5 * float((other.double() - right).norm()), rounding * float(right.norm()))
        assert float((ours.double() - right).norm()) <= limit + 1e-6
