"""Kernels for GPUs, in Triton's dialect of Python: imported by `gpu_kernels.py` alone, where there is Triton."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import triton
import triton.language as tl


@triton.jit
def keep_mask(keep, offsets, gammas, blocks, skipped, count, least, BLOCK: tl.constexpr):
    """One block of a stream: two elements to a word, the lower half first. `randomness` has the arithmetic."""
    stream = tl.program_id(0) // blocks
    at = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # of up to 2³² elements
    element = at + skipped
    word = tl.load(offsets + stream) + (element >> 1).to(tl.int32) * tl.load(gammas + stream)
    x = word.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    x = x ^ (x >> 15)
    half = (x >> ((element & 1) << 4).to(tl.uint32)) & 0xFFFF
    place = keep + stream.to(tl.int64) * count + at
    tl.store(place, ((half ^ 0x8000) >= least).to(tl.uint8), mask=at < count)


@triton.jit
def norm_backward(
    dx, sums, grad, x, weight, mean, scale, rows, h, CENTRED: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):
    """Every PROGRAMS-th row, one by one: dx, and what these rows add to the gradients of weight and bias."""
    at = tl.arange(0, BLOCK)
    there = at < h
    width = tl.full([], h, tl.int64)  # so that elements are counted in 64 bits
    w = tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    of_weight, of_bias = tl.zeros([BLOCK], dtype=tl.float32), tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(tl.program_id(0), rows, PROGRAMS):
        first = row * width
        g = tl.load(grad + first + at, mask=there, other=0.0).to(tl.float32)
        normed = tl.load(x + first + at, mask=there, other=0.0).to(tl.float32)
        row_scale = tl.load(scale + row)
        if CENTRED:
            normed = tl.where(there, normed - tl.load(mean + row), 0.0)
        normed *= row_scale
        of_weight += g * normed
        of_bias += g
        g *= w
        d = g - normed * (tl.sum(g * normed, 0) / h)
        if CENTRED:
            d -= tl.sum(g, 0) / h
        tl.store(dx + first + at, (d * row_scale).to(dx.dtype.element_ty), mask=there)
    place = sums + tl.program_id(0) * 2 * h + at
    tl.store(place, of_weight, mask=there)
    tl.store(place + h, of_bias, mask=there)
