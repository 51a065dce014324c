"""A copy in memory of what a rank writes: training goes on with the original, a thread writes the copy.

The memory is taken once a run, touched (so that the first copy is as quick as the others), and pinned where the
original lies on a GPU. A rank copies what it writes, not what it holds. Copying can go on beside training until the
original changes (Mohan et al., "CheckFreq: Frequent, Fine-Grained DNN Checkpointing", FAST 2021, section 4.2): on a GPU
it has a stream of its own, on the CPU one core.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem

from colonnade.checkpoint.agree import Key, data_of, key, num_bytes
from colonnade.errors import CheckpointError

ALIGNMENT = 64  # bytes
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes of a number → what numpy knows it as


class Snapshot:
    """Memory for the numbers of `items`. `take` fills it; `tensors` has it as `save.write` wants it."""

    def __init__(self, items: Sequence[WriteItem], *, pinned: bool) -> None:
        sizes = [-(-num_bytes(item) // ALIGNMENT) * ALIGNMENT for item in items]
        self._pinned = pinned and bool(items)
        self._memory = _memory(sum(sizes), self._pinned)
        starts = itertools.accumulate(sizes, initial=0)
        self.tensors = {key(item): self._place(item, start) for item, start in zip(items, starts, strict=False)}
        self._stream = torch.cuda.Stream() if self._pinned else None  # type: ignore[no-untyped-call]

    def _place(self, item: WriteItem, start: int) -> Tensor:
        """A tensor whose storage is its part of the memory alone, so that nobody copies it once more."""
        chunk, dtype = data_of(item).chunk, data_of(item).properties.dtype
        flat = torch.frombuffer(self._memory.numpy(), dtype=dtype, count=chunk.sizes.numel(), offset=start)
        return flat.view(chunk.sizes)

    def wait_for_originals(self) -> None:
        """In the main thread: what it has asked the GPU for so far comes before `take`."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def take(self, tensors: Mapping[Key, Tensor]) -> None:
        """In any thread: copy `tensors` (`Agreement.tensors`); returns when they may be changed."""
        if self._stream is None:
            for name, tensor in tensors.items():
                _copy(tensor, self.tensors[name])
            return
        torch.cuda.set_device(self._stream.device)  # a thread begins on GPU 0, and would take memory there
        with torch.cuda.stream(self._stream):
            for name, tensor in tensors.items():
                self.tensors[name].copy_(tensor, non_blocking=True)
        self._stream.synchronize()

    def close(self) -> None:
        """Let go of pinned memory. Harmless the second time."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]
            self._pinned = False


def _copy(source: Tensor, target: Tensor) -> None:
    """By one thread: torch would start as many as training has, and both would wait for each other's."""
    bits = _BITS[source.element_size()]
    np.copyto(target.view(bits).numpy(), source.view(bits).numpy())


def _memory(size: int, pinned: bool) -> Tensor:
    """`size` bytes. `torch`'s own pinned memory comes in powers of two: up to twice as much."""
    memory = torch.empty(size, dtype=torch.uint8).zero_()
    if not pinned:
        return memory
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)  # type: ignore[no-untyped-call]
    if int(status) != 0:
        raise CheckpointError(
            f"checkpoint.asynchronous = true needs {size / 1e9:,.1f} GB of pinned memory on this rank, for the copy "
            f"that is written, and CUDA refuses it ({status}). Set checkpoint.asynchronous = false, or let the "
            f"machine's processes lock more memory."
        )
    return memory
