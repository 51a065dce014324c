"""The kernels of `gpu.py`, in Triton's dialect of Python."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import triton
import triton.language as tl


@triton.jit
def keep_mask(keep, offsets, gammas, skipped, count, least, BLOCK: tl.constexpr):
    """One block of a stream: two elements to a word, the lower half first. `randomness` has the arithmetic."""
    stream = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    element = at + skipped
    word = tl.load(offsets + stream) + (element >> 1) * tl.load(gammas + stream)
    x = word.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    x = x ^ (x >> 15)
    half = (x >> ((element & 1) << 4).to(tl.uint32)) & 0xFFFF
    place = keep + stream.to(tl.int64) * count + at
    tl.store(place, ((half ^ 0x8000) >= least).to(tl.uint8), mask=at < count)


@triton.jit
def norm_gradients(
    sums, grad, x, mean, deviation, rows, width, COLUMNS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """Some columns, over some rows."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < width
    of_weight = tl.zeros([COLUMNS], tl.float32)
    of_bias = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, ROWS, TILE):
        row = tl.program_id(1) * ROWS + start + tl.arange(0, TILE)
        there = row < rows
        at = row.to(tl.int64)[:, None] * width + columns[None, :]
        mask = there[:, None] & inside[None, :]
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        centre = tl.load(mean + row, mask=there, other=0.0)[:, None]
        scale = tl.load(deviation + row, mask=there, other=0.0)[:, None]
        of_weight += tl.sum(g * ((value - centre) * scale), 0)
        of_bias += tl.sum(g, 0)
    place = sums + tl.program_id(1) * 2 * width + columns
    tl.store(place, of_weight, mask=inside)
    tl.store(place + width, of_bias, mask=inside)
