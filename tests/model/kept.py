"""What autograd keeps between forward and backward."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Kept(TorchDispatchMode):
    """Every memory that was made within this, and how much of it is still there."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor):
                place = StorageWeakRef(t.untyped_storage())
                self._made[place.cdata] = place, t.untyped_storage().nbytes()
        return out

    @property
    def bytes(self) -> int:
        """Size of what is alive."""
        return sum(size for place, size in self._made.values() if not place.expired())

    @property
    def largest(self) -> int:
        """Size of the largest piece alive."""
        return max((size for place, size in self._made.values() if not place.expired()), default=0)
