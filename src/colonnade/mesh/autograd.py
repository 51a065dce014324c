"""Typed calling of differentiable operators: torch's own `Function.apply` has no types."""

from typing import Any

from torch import Tensor
from torch.autograd import Function


def apply(operator: type[Function], *arguments: Any) -> Tensor:
    """`operator` on its arguments: `forward` now, `backward` when gradients flow."""
    result: Tensor = operator.apply(*arguments)  # type: ignore[no-untyped-call]
    return result
