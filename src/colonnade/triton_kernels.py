"""Kernels for GPUs, in Triton's dialect of Python: imported by `gpu_kernels.py` alone, where there is Triton."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import triton
import triton.language as tl


@triton.jit
def keep_mask(keep, offsets, gammas, blocks, skipped, count, least, BLOCK: tl.constexpr):
    """One block of a stream: two elements to a word, the lower half first. `randomness` has the arithmetic."""
    stream = tl.program_id(0) // blocks
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    element = at + skipped
    word = tl.load(offsets + stream) + (element >> 1) * tl.load(gammas + stream)
    x = word.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    x = x ^ (x >> 15)
    half = (x >> ((element & 1) << 4).to(tl.uint32)) & 0xFFFF
    place = keep + stream.to(tl.int64) * count + at
    tl.store(place, ((half ^ 0x8000) >= least).to(tl.uint8), mask=at < count)
