"""What is alive at each moment of a step: tensors counted while operators run, and an owner that looks when it is told.

The same two look at a real step (`verify/memory.py`) and at one whose tensors have no memory (`counting.py`).
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from colonnade.data_parallel.buckets import Bucket
from colonnade.pipeline.chunk import Owner


class LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that operators have made while it is on and that somebody still holds.

    A view counts nothing, its storage once; what is freed no longer counts. Bytes are counted under the label that was
    set when they were made.
    """

    def __init__(self, label: str = "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.label, self.bytes = label, Counter[str]()
        self.most = Counter[str]()
        """The most that was alive at once under each label."""
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        results = (out,) if isinstance(out, Tensor) else tree_iter(out)
        self.note([x for x in results if isinstance(x, Tensor)], tree_iter((args, kwargs)))
        return out

    def note(self, made: Sequence[Tensor], given: Iterable[Any]) -> None:
        """Count what an operator made that is none of what it was given."""
        storages = [x.untyped_storage() for x in made]
        unknown = [storage for storage in storages if storage._cdata not in self._storages]
        if unknown:
            known = {x.untyped_storage()._cdata for x in given if isinstance(x, Tensor)}
            for storage in unknown:
                if storage._cdata not in known:
                    self._count(storage)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size, label = storage._cdata, storage.nbytes(), self.label
        if key in self._storages:
            return

        def gone(_: Any) -> None:
            del self._storages[key]
            self.bytes[label] -= size

        self.bytes[label] += size
        self.most[label] = max(self.most[label], self.bytes[label])
        self._storages[key] = weakref.ref(storage, gone)


class Watch:
    """Stands before a stage's owner: looks at what is alive whenever a chunk asks it for something."""

    def __init__(self, owner: Owner, buckets: Sequence[Bucket], live: LiveTensors) -> None:
        self.owner, self.live = owner, live
        self.activations = self.buffers = 0
        """[bytes] The most at once when a chunk asks: of what a step makes, and of buffers beside those that are always
        there."""
        cut = [bucket for bucket in buckets if bucket.storage.zero >= 2]  # the others keep theirs
        self._come_and_go = [buffer for bucket in cut for buffer in (bucket.parameters, bucket.gradients)]
        self._always = storage_bytes(self._come_and_go)
        self.come_and_go = 0
        """[bytes] Of those buffers, above what is always there, when a chunk last asked."""

    @property
    def operators(self) -> int:
        """[bytes] The most at once of what a step makes, beside `activations`: what is gone before a chunk asks."""
        return max(0, self.live.most["activations"] - self.activations)

    def expect(self, uses: Sequence[str]) -> None:
        with self._look():
            self.owner.expect(uses)

    def acquire(self, unit: str, *, gradients: bool) -> None:
        with self._look():
            self.owner.acquire(unit, gradients=gradients)

    def release(self, unit: str) -> None:
        with self._look():
            self.owner.release(unit)

    def open(self, unit: str) -> None:
        with self._look():
            self.owner.open(unit)

    def gradients_ready(self, unit: str, *, last: bool) -> None:
        with self._look():
            self.owner.gradients_ready(unit, last=last)

    @contextmanager
    def _look(self) -> Iterator[None]:
        self.live.label = "buffers"
        yield
        self.live.label = "activations"
        self.activations = max(self.activations, self.live.bytes["activations"])
        self.come_and_go = storage_bytes(self._come_and_go) - self._always
        self.buffers = max(self.buffers, self.come_and_go + self.live.bytes["buffers"])


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Of the memory behind them, each storage once."""
    storages = [x.untyped_storage() for x in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
