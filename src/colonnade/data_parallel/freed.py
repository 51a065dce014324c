"""Weights and gradients whose memory is freed: torch would read behind it, and end the process without a word."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

_NEED_NO_MEMORY = {
    *(Tensor.__hash__, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.dim, Tensor.stride, Tensor.element_size),
    *(Tensor.is_floating_point, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
}
_SHARE_MEMORY = {"data", "T", "H", "mT", "mH", "real", "imag"}  # attributes that are tensors of their own


class _Freed(Tensor):
    """It tells its shape and its like; what reads it, or writes to it, raises."""

    why: ClassVar[str]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        is_read = func.__name__ == "__get__" and func.__self__.__name__ in _SHARE_MEMORY  # type: ignore[attr-defined]
        is_attribute = type(func).__name__ == "method-wrapper" and not is_read
        if not (is_attribute or func in _NEED_NO_MEMORY):
            raise RuntimeError(cls.why)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class Resharded(_Freed, nn.Parameter):
    """A weight of which this rank has no more than a slice."""

    why = (
        "under ZeRO 3 a rank has a slice of this weight alone, and gathers it while it is used: read it "
        "within `with state.ownership.gathered():`, which every rank enters"
    )


class Reduced(_Freed):
    """A weight's gradient that is in the sum over dp, of which this rank has no more than a slice."""

    why = (
        "under ZeRO 2 and 3 a rank has a slice of the summed gradients alone, each bucket's `reduced`, and a weight's "
        "`.grad` only while backward adds to it. A step sets gradients to zero itself"
    )


def mark_resharded(parameters: Iterable[nn.Parameter], *, resharded: bool) -> None:
    """Of parameters whose memory was freed, or is there again; the same objects, as modules and graphs hold them."""
    for parameter in parameters:
        parameter.__class__ = Resharded if resharded else nn.Parameter


def mark_reduced(grads: Iterable[Tensor], *, reduced: bool) -> None:
    """Likewise, of weights' gradients."""
    for grad in grads:
        grad.__class__ = Reduced if reduced else Tensor
