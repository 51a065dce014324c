"""The compiled kernels beside float64, at sizes that fit no block, and what happens where they cannot be compiled."""

import ctypes
import os
import shutil
import stat
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from colonnade.kernels import compiled
from colonnade.kernels.attention import attend
from colonnade.kernels.choice import AS_THEY_ARE, Kernel, Kernels, Products
from colonnade.kernels.mask import Mask
from colonnade.kernels.products import (
    Operand,
    add_bias,
    add_product_,
    add_rows_,
    fp32_product_,
    gradient_of,
    linear,
    linears,
)
from colonnade.kernels.timing import is_exact
from colonnade.mesh.mesh import Mesh
from colonnade.planner.live import LiveTensors
from colonnade.planner.stand_in import StandIn
from colonnade.tensor_parallel.cross_entropy import output_loss
from tests.kernels.exactness import assert_as_exact

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, FP16, FP32)
SIZES = [(1, 2, 1), (37, 101, 65), (64, 384, 1000), (300, 97, 513), (65, 1025, 70), (130, 64, 32)]
"""m, k, n: below and above a block and a tile, odd depths, one column."""
PIECES = [(1100, 70, 40), (4200, 600, 20), (10, 40, 1100)]
"""m, k, n: one thread has several pieces already: rows with one block of the other matrix or several, and columns."""
DEEP = (33, 8705, 20)
"""m, k, n: threads share the depth."""


@pytest.fixture
def units(loaded: Path) -> Path:
    """And this processor can multiply by them."""
    multiplies(BF16)
    return loaded


def multiplies(dtype: torch.dtype) -> None:
    """Skips where this processor cannot multiply numbers of this type by them."""
    if not is_exact("compiled", "weight_gradient", dtype):
        pytest.skip(f"this processor has no units for products of {dtype} with an fp32 result")


@pytest.mark.usefixtures("ascii_locale")
def test_their_version_is_told_whatever_the_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    told = compiled.version()
    monkeypatch.undo()
    assert compiled.version() == told


@pytest.mark.usefixtures("loaded")
def test_a_processor_with_avx2_multiplies_every_type_by_them() -> None:
    """16 bits widened while they are packed, where it has no units for them. A wrong product looks as if there were
    none, and the tests below would leave it out.
    """
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this processor has neither AVX2 nor AVX-512")
    assert [dtype for dtype in DTYPES if not is_exact("compiled", "weight_gradient", dtype)] == []


def error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right).norm() / right.norm())


def lying(x: Tensor) -> list[Tensor]:
    """The same matrix by rows, by columns, and as a part of a wider one."""
    wider = torch.full((x.shape[0] + 3, x.shape[1] + 5), torch.nan, dtype=x.dtype)
    wider[2:-1, 3:-2] = x
    return [x.contiguous(), x.t().contiguous().t(), wider[2:-1, 3:-2]]


@pytest.mark.usefixtures("units")
def test_numbers_that_lie_once_for_many_rows_are_multiplied_too() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).to(BF16) for shape in ((70, 36), (36, 40)))
    for left, right in ((a[:1].expand_as(a), b), (a[:, :1].expand_as(a), b), (a, b[:1].expand_as(b))):
        total = torch.empty(70, 40)
        compiled.product_(total, left, right, add=False)
        assert error(total, left.double() @ right.double()) < 1e-6


@pytest.mark.parametrize("sizes", [*SIZES, *PIECES, DEEP], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("loaded")
def test_products_are_summed_in_fp32_however_their_matrices_lie(
    sizes: tuple[int, int, int], threads: int, dtype: torch.dtype
) -> None:
    multiplies(dtype)
    m, k, n = sizes
    generator, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((m, k), (k, n)))
    right = a.double() @ b.double()
    torch.set_num_threads(threads)
    try:
        for left in lying(a):
            for other in lying(b):
                total = torch.full((m, n + 2), 7.0)
                compiled.product_(total[:, 1:-1], left, other, add=False)
                assert error(total[:, 1:-1], right) < 1e-6
                compiled.product_(total[:, 1:-1], left, other, add=True)
                assert error(total[:, 1:-1], 2 * right) < 1e-6
                assert (total[:, [0, -1]] == 7.0).all(), "nothing is written beside the result"
    finally:
        torch.set_num_threads(before)


SHARING = """
#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

namespace {

SECTION
}  // namespace

// Of `count` pieces the first waits for all others, half a minute at most: how many of them another thread had done by
// then, and in which `order`.
extern "C" int64_t done_beside_the_first(int64_t count, int64_t* order) {
  using clock = std::chrono::steady_clock;
  std::atomic<int64_t> done{0};
  int64_t beside = -1;
  share(count, [&](Pieces& pieces) {
    pieces.each([&](int64_t i) {
      if (i > 0) { order[done++] = i; return; }
      const auto end = clock::now() + std::chrono::seconds(30);
      while (done < count - 1 && clock::now() < end) {}
      beside = done;
    });
  });
  return beside;
}
"""


@pytest.mark.usefixtures("loaded")
def test_a_thread_that_is_held_up_leaves_the_other_pieces_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, section = compiled.SOURCE.read_text().split("// --- threads ---")
    source, before = tmp_path / "sharing.cpp", torch.get_num_threads()
    source.write_text(SHARING.replace("SECTION", section.split("\n", 1)[1].split("// --- ")[0]))
    monkeypatch.setattr(compiled, "SOURCE", source)
    compiled._compile(tmp_path / "sharing.so")
    done, order = ctypes.CDLL(str(tmp_path / "sharing.so")).done_beside_the_first, (ctypes.c_int64 * 9)()
    torch.set_num_threads(2)
    try:
        assert done(ctypes.c_int64(9), order) == 8
    finally:
        torch.set_num_threads(before)
    assert order[:8] == [4, 5, 6, 7, 8, 1, 2, 3], "its own part first, in order: threads stay apart in memory"


@pytest.mark.parametrize("sizes", [(200, 1100, 300), *PIECES, DEEP], ids=str)
@pytest.mark.usefixtures("units")
def test_products_do_not_depend_on_the_number_of_threads(sizes: tuple[int, int, int]) -> None:
    m, k, n = sizes
    generator, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    a, b = (torch.randn(*shape, generator=generator).to(BF16) for shape in ((m, k), (k, n)))
    found: list[Tensor] = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(torch.empty(m, n))
            compiled.product_(found[-1], a, b, add=False)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("loaded")
def test_products_do_not_depend_on_the_width_of_panels(dtype: torch.dtype) -> None:
    """It is measured: another process, or the same machine tomorrow, may find another one the fastest."""
    multiplies(dtype)
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((70, 1101), (1101, 600)))
    for left, right in ((a, b), (lying(a)[1], lying(b)[1])):
        found = [torch.empty(70, 600) for _ in range(5)]
        for total, width in zip(found, (0, 16, 32, 64, 512), strict=True):
            torch.ops.colonnade.product_(total, left, right, False, width)
        assert all(torch.equal(found[0], each) for each in found[1:])
        assert error(found[0], a.double() @ b.double()) < 1e-6


def test_what_lies_in_rows_or_columns_is_not_copied() -> None:
    """And what is the same number again and again, or has gaps both ways, is."""
    x = torch.ones(4, 6)
    for each in (x, x.t(), x[:, 1:3], x.t()[:, 1:3], x[:1], x[:, :1]):
        assert compiled._in_one_piece(each) is each
    for each in (x[:1].expand(4, 6), x[:, :1].expand(4, 6), x[::2, ::2]):
        copy = compiled._in_one_piece(each)
        assert torch.equal(copy, each) and copy.is_contiguous() and copy.data_ptr() != each.data_ptr()


@pytest.mark.parametrize("strides", [(5, 7), (0, 0), (1, 3)])
@pytest.mark.usefixtures("units")
def test_a_number_is_a_matrix_whatever_its_strides(strides: tuple[int, int]) -> None:
    """Of a single row and column these mean nothing, and torch leaves them as they are where it makes a copy."""
    one, row = torch.full((1,), 3.0, dtype=BF16).as_strided((1, 1), strides), torch.ones(1, 40, dtype=BF16)
    total = torch.ones(1, 40)
    compiled.product_(total, one, row, add=True)
    assert torch.equal(total, torch.full((1, 40), 4.0))
    compiled.product_(total.t(), row.t(), one, add=False)
    assert torch.equal(total, torch.full((1, 40), 3.0))


@pytest.mark.usefixtures("units")
def test_products_without_rows_columns_or_depth() -> None:
    for m, k, n in ((0, 3, 2), (3, 0, 2), (3, 2, 0)):
        total = torch.ones(m, n)
        compiled.product_(total, torch.ones(m, k, dtype=BF16), torch.ones(k, n, dtype=BF16), add=True)
        assert torch.equal(total, torch.ones(m, n))
        compiled.product_(total, torch.ones(m, k, dtype=BF16), torch.ones(k, n, dtype=BF16), add=False)
        assert torch.equal(total, torch.zeros(m, n))


@pytest.mark.parametrize(
    ("total", "a", "b"),
    [
        (torch.empty(2, 3), torch.empty(2, 4, dtype=BF16), torch.empty(5, 3, dtype=BF16)),
        (torch.empty(3, 3), torch.empty(2, 4, dtype=BF16), torch.empty(4, 3, dtype=BF16)),
        (torch.empty(2, 3, dtype=BF16), torch.empty(2, 4, dtype=BF16), torch.empty(4, 3, dtype=BF16)),
        (torch.empty(2, 3), torch.empty(2, 4).double(), torch.empty(4, 3).double()),
        (torch.empty(2, 3), torch.empty(2, 4, dtype=BF16), torch.empty(4, 3, dtype=torch.float16)),
        (torch.empty(3, 2).t(), torch.empty(2, 4, dtype=BF16), torch.empty(4, 3, dtype=BF16)),
    ],
    ids=["depths", "rows", "a 16-bit result", "fp64", "two types", "a result by columns"],
)
@pytest.mark.usefixtures("loaded")
def test_what_is_no_such_product_is_refused_before_memory_is_touched(total: Tensor, a: Tensor, b: Tensor) -> None:
    with pytest.raises(RuntimeError, match=r"sizes of a product|operands of|in one piece"):
        compiled.product_(total, a, b, add=False)


# --- output layer -----------------------------------------------------------------------------------------------------


def drawn_output(c: int, h: int, v: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    """x [c, h], table [v, h], labels [c], of which some are none of these rows."""
    generator = torch.Generator().manual_seed(0)
    x, table = torch.randn(c, h, generator=generator), torch.randn(v, h, generator=generator) / h**0.5
    labels = torch.randint(0, v, (c,), generator=generator)
    labels[1::3] = -1
    return x.to(dtype), table.to(dtype), labels


class Blocks:
    """A place for exponentials: blocks as `compiled.output_blocks` makes them, and their product, none of it numbers
    yet; or blocks of `width` columns.
    """

    def __init__(self, x: Tensor, table: Tensor, width: int = 0) -> None:
        usual = [block.shape[1] for block in compiled.output_blocks(len(x), table)]
        widths = [min(width, len(table) - i) for i in range(0, len(table), width)] if width else usual
        self._around = [torch.full((len(x) + 2, width), 7.0, dtype=x.dtype) for width in widths]
        self.blocks = [each[1:-1].fill_(torch.nan) for each in self._around]
        self.product = torch.full(x.shape, torch.nan)

    @property
    def whole(self) -> Tensor:
        return torch.cat(self.blocks, 1)

    def fill(self, x: Tensor, table: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = compiled.output_exponentials_(self.blocks, self.product, x, table, labels)
        assert all((each[[0, -1]] == 7.0).all() for each in self._around), "nothing is written beside the result"
        return found


def assert_exponentials(x: Tensor, table: Tensor, labels: Tensor, width: int = 0) -> tuple[Tensor, Tensor]:
    """Of x tableᵀ, beside float64; returns (shift, out)."""
    place = Blocks(x, table, width)
    shift, total, label = place.fill(x, table, labels)
    out = place.whole
    logits, own = x.double() @ table.double().t(), (labels >= 0).nonzero()[:, 0]
    size = 1e-6 * logits.abs().max()
    expected = torch.zeros(len(x), dtype=torch.float64)
    expected[own] = logits[own, labels[own]]
    logits[own, labels[own]] = -torch.inf
    assert (label.double() - expected).abs().max() <= size
    right = (logits - shift.double()[:, None]).exp()
    rounding, least = torch.finfo(x.dtype).eps / 2, torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps / 2
    limit = (rounding + 4 * size) * right + max(least, 1e-37)
    assert ((out.double() - right).abs() <= limit).all(), "rounded once, to the nearest"
    assert x.dtype is FP32 or (out == right.to(x.dtype)).double().mean() > 0.95
    assert (total - right.sum(-1)).abs().max() <= (1e-6 + 2 * size) * right.sum(-1).max()
    assert (out[own, labels[own]] == 0).all(), "a label has no probability"
    expected = out.double() @ table.double()
    assert (place.product.double() - expected).norm() <= 1e-6 * (out.double().abs() @ table.double().abs()).norm()
    return shift, out


@pytest.mark.parametrize("sizes", [*SIZES, (70, 48, 3000), (5, 4200, 200)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("loaded")
def test_exponentials_of_logits_are_rounded_once(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    multiplies(dtype)
    x, table, labels = drawn_output(*sizes, dtype)
    for left in lying(x):
        for right in lying(table):
            assert_exponentials(left, right, labels)


@pytest.mark.parametrize("width", [1, 7, 64, 130, 699, 700, 900])
@pytest.mark.usefixtures("units")
def test_exponentials_lie_in_blocks_of_any_width(width: int) -> None:
    assert_exponentials(*drawn_output(70, 33, 700), width=width)


@pytest.mark.parametrize(
    ("h", "dtype", "width"),
    [(384, BF16, 320), (384, FP32, 128), (1024, FP16, 128), (16, FP32, 512), (100_000, BF16, 64)],
)
def test_blocks_are_as_wide_as_a_cache_has_room_for(h: int, dtype: torch.dtype, width: int) -> None:
    for rows in (1, width, width + 1, 2 * width + 5):
        table = torch.empty(1, 1, dtype=dtype).expand(rows, h)
        blocks = compiled.output_blocks(3, table)
        *full, last = [block.shape[1] for block in blocks]
        assert all(each == width for each in full) and 0 < last <= width and sum(full) + last == rows
        assert all(block.shape[0] == 3 and block.dtype is dtype and block.is_contiguous() for block in blocks)
    assert [block.shape for block in compiled.output_blocks(3, torch.empty(2_000, 384, device="meta"))] == [(3, 2_000)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("loaded")
def test_products_of_blocks_are_those_of_the_whole(dtype: torch.dtype) -> None:
    """Blocks that no piece divides, of which threads take pieces; deep and wide ones, and single ones."""
    multiplies(dtype)
    generator = torch.Generator().manual_seed(0)
    for c, h, v, width in ((70, 48, 3000, 130), (5, 600, 200, 64), (1100, 33, 500, 77), (3, 5, 7, 7), (9000, 8, 20, 6)):
        whole, x = torch.rand(c, v, generator=generator).to(dtype), torch.randn(c, h, generator=generator).to(dtype)
        blocks = [block.contiguous() for block in whole.split(width, 1)]
        right = whole.double().t() @ x.double()
        for left in (blocks, [block.t().contiguous().t() for block in blocks]):
            total = torch.ones(v, h)
            compiled.products_(total, left, x, add=True)
            assert error(total - 1, right) < 1e-5
            compiled.products_(total, left, x, add=False)
            assert error(total, right) < 1e-6


@pytest.mark.parametrize(("widths", "rows"), [((3, 4), 7), ((4, 3, 4), 11), ((4, 5), 9), ((4, 4), 9), ((), 0)], ids=str)
@pytest.mark.usefixtures("loaded")
def test_blocks_of_other_widths_are_refused(widths: tuple[int, ...], rows: int) -> None:
    blocks = [torch.empty(2, width, dtype=BF16) for width in widths]
    with pytest.raises(RuntimeError, match="sizes of a product"):
        compiled.products_(torch.empty(rows, 3), blocks, torch.empty(2, 3, dtype=BF16), add=False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("loaded")
def test_a_logit_far_above_the_first_ones_does_not_overflow(dtype: torch.dtype) -> None:
    """A token's shift is its largest logit among the first; where another is too far above, the largest of all."""
    multiplies(dtype)
    x, table, labels = drawn_output(70, 32, 3000, dtype)
    usual, _ = assert_exponentials(x, table, labels)
    table[-1] = 20 * x[3]  # far above for token 3, and for some others; for others far below
    largest = (x.float() @ table.float().t()).scatter(1, labels.clamp(min=0)[:, None], -torch.inf).amax(-1)
    shift, out = assert_exponentials(x, table, labels)
    moved = largest - usual > (11 if dtype is FP16 else 60)
    assert moved[3] and not moved.all()
    torch.testing.assert_close(shift[moved], largest[moved])
    assert torch.equal(shift[~moved], usual[~moved]) and out.isfinite().all()
    labels[3] = 2999
    shift, _ = assert_exponentials(x, table, labels)
    assert shift[3] == usual[3], "a label is in no shift"


@pytest.mark.usefixtures("units")
def test_exponentials_do_not_depend_on_the_number_of_threads() -> None:
    (x, table, labels), before = drawn_output(70, 96, 5000), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 20):  # the last: more than there are parts of the columns
            torch.set_num_threads(threads)
            place = Blocks(x, table)
            numbers = place.fill(x, table, labels)
            found.append((place.whole, place.product, *numbers))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.usefixtures("units")
def test_logits_that_are_no_numbers_are_seen_in_the_sum() -> None:
    x, table, labels = drawn_output(4, 8, 700)
    table[600, 2] = torch.nan
    _, total, label = Blocks(x, table).fill(x, table, labels)
    assert total.isnan().all() and label.isfinite().all()
    table[600, 2] = torch.inf
    _, total, _ = Blocks(x, table).fill(x, table, labels)
    assert not total.isfinite().any() or (x[:, 2] < 0).any()
    assert total[x[:, 2] > 0].isnan().all() and total[x[:, 2] < 0].isfinite().all()
    one = torch.ones(1, 8, dtype=BF16)  # of the label alone nothing is left
    place = Blocks(x, one)
    found = place.fill(x, one, torch.zeros(4, dtype=torch.int64))
    assert [each.tolist() for each in (place.whole[:, 0], *found[:2])] == [[0.0] * 4] * 3
    assert not place.product.any()


def narrow(*sizes: int) -> Tensor:
    return torch.empty(*sizes, dtype=BF16)


@pytest.mark.parametrize(
    ("out", "product", "x", "table", "labels"),
    [
        ([narrow(2, 3)], torch.empty(2, 4), narrow(2, 4), narrow(3, 5), torch.zeros(2)),
        ([narrow(2, 4)], torch.empty(2, 4), narrow(2, 4), narrow(3, 4), torch.zeros(2)),
        ([narrow(2, 2)], torch.empty(2, 4), narrow(2, 4), narrow(3, 4), torch.zeros(2)),
        ([narrow(2, 1), narrow(2, 2)], torch.empty(2, 4), narrow(2, 4), narrow(3, 4), torch.zeros(2)),
        ([narrow(2, 2), narrow(2, 1), narrow(2, 1)], torch.empty(2, 4), narrow(2, 4), narrow(3, 4), torch.zeros(2)),
        ([narrow(2, 2), narrow(3, 1)], torch.empty(2, 4), narrow(2, 4), narrow(3, 4), torch.zeros(2)),
        ([narrow(2, 3)], torch.empty(2, 5), narrow(2, 4), narrow(3, 4), torch.zeros(2)),
        ([narrow(2, 3)], narrow(2, 4), narrow(2, 4), narrow(3, 4), torch.zeros(2)),
        ([narrow(2, 3)], torch.empty(4, 2).t(), narrow(2, 4), narrow(3, 4), torch.zeros(2)),
        ([narrow(2, 3)], torch.empty(2, 4), narrow(2, 4), narrow(3, 4), torch.zeros(3)),
        ([torch.empty(2, 3)], torch.empty(2, 4), narrow(2, 4), narrow(3, 4), torch.zeros(2)),
        ([narrow(2, 3)], torch.empty(2, 4), narrow(2, 4), torch.empty(3, 4), torch.zeros(2)),
        *[([x[:2, :3]], torch.empty(2, 4), x[:2], x[:3], torch.zeros(2)) for x in [torch.empty(3, 4).double()]],
        ([narrow(3, 2).t()], torch.empty(2, 4), narrow(2, 4), narrow(3, 4), torch.zeros(2)),
        ([narrow(0, 3)], torch.empty(0, 4), narrow(0, 4), narrow(3, 4), torch.zeros(0)),
        ([], torch.empty(2, 4), narrow(2, 4), narrow(3, 4), torch.zeros(2)),
    ],
    ids=[
        "depths",
        "more columns than rows of the table",
        "fewer columns",
        "a later block is wider",
        "a block behind the last",
        "tokens of a block",
        "sizes of the product",
        "a product in 16 bits",
        "a product by columns",
        "labels",
        "an fp32 result",
        "a table of another type",
        "fp64",
        "a result by columns",
        "no token",
        "no block",
    ],
)
@pytest.mark.usefixtures("loaded")
def test_what_is_no_such_output_layer_is_refused(
    out: list[Tensor], product: Tensor, x: Tensor, table: Tensor, labels: Tensor
) -> None:
    with pytest.raises(RuntimeError, match=r"sizes of the|operands of|in one piece|a label a token|some logits"):
        compiled.output_exponentials_(out, product, x, table, labels.long())
    with pytest.raises(RuntimeError):
        compiled.output_exponentials_(out, product, x, table, labels)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("loaded")
def test_a_planned_loss_has_the_memory_of_the_real_one(dtype: torch.dtype) -> None:
    """On the meta device nothing is called, and as much is alive: a chunk's exponentials, no logits."""
    multiplies(dtype)
    tokens, h, v = 12_000, 16, 5_000

    def most(device: str) -> int:
        weight = torch.nn.Parameter(torch.full((v, h), 0.1, dtype=dtype, device=device))
        gradient_of(weight)
        hidden = torch.ones(tokens, 1, h, dtype=dtype, device=device)
        labels, weights = torch.zeros(tokens, 1, dtype=torch.int64, device=device), hidden[..., 0].float()
        kernels = Products(*3 * (Kernels(output="compiled"),))
        with StandIn("cpu") if device == "meta" else nullcontext(), LiveTensors() as live:
            output_loss(hidden, weight, labels, weights, tp=Mesh().tp, vocab_size=v, products=kernels)
        return live.most[""]

    assert most("meta") == most("cpu")
    assert 1.0 < most("cpu") / (dtype.itemsize * 6_000 * v) < 1.1


# --- linear layers ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("units")
def test_a_layers_weight_gradient_is_the_widened_products() -> None:
    """Two weights of one input, the second cut; the input's gradient is not touched by the choice."""
    generator = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(*s, generator=generator).to(BF16) for s in ((9, 4, 40), (24, 40), (33, 40)))
    grads = [torch.randn(9, 4, n, generator=generator).to(BF16) for n in (24, 20)]

    def gradients(kernels: Kernels) -> list[Tensor]:
        own = [torch.nn.Parameter(weight.clone()) for weight in weights]
        given = x.clone().requires_grad_()
        operands = [Operand(own[0]), Operand(own[1], rows=slice(5, 25))]
        torch.autograd.backward(linears(given, operands, products=Products(bf16=kernels)), grads)
        found = [given.grad, *(weight.grad for weight in own)]
        return [grad for grad in found if grad is not None]

    right = gradients(Kernels())
    for kernels in (Kernels(weight_gradient="compiled"), Kernels("native", "native", "compiled", "blas", "native")):
        found = gradients(kernels)
        assert [each.dtype for each in found] == [BF16, torch.float32, torch.float32]
        assert error(found[0], right[0].double()) < 0.004
        for ours, theirs in zip(found[1:], right[1:], strict=True):
            assert error(ours, theirs.double()) < 1e-6
        assert not found[2][:5].any() and not found[2][25:].any()


def test_on_the_meta_device_nothing_is_called() -> None:
    a, b = torch.empty(3, 4, dtype=BF16, device="meta"), torch.empty(4, 5, dtype=BF16, device="meta")
    total = torch.empty(3, 5, device="meta")
    assert fp32_product_(total, a, b) is total and fp32_product_(total, a, b, add=True) is total
    add_product_(torch.empty(4, 5, device="meta"), a, torch.empty(3, 5, dtype=BF16, device="meta"), "compiled")


@pytest.mark.usefixtures("loaded")
def test_a_layer_of_fp32_is_multiplied_by_them_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two weights of one input, the first with a bias, the second cut; on the meta device as much is computed."""
    multiplies(FP32)
    generator = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(*s, generator=generator) for s in ((9, 4, 40), (24, 40), (33, 40)))
    bias = torch.randn(24, generator=generator)
    grads = [torch.randn(9, 4, n, generator=generator) for n in (24, 20)]

    def found(dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
        given = x.to(device, dtype).detach().requires_grad_()
        own = [torch.nn.Parameter(weight.to(device, dtype)) for weight in (*weights, bias)]
        operands = [Operand(own[0], own[2]), Operand(own[1], rows=slice(5, 25))]
        kernels = Products(fp32=Kernels("compiled", "compiled", "compiled"))
        y = linears(given, operands, products=kernels)
        torch.autograd.backward(y, [grad.to(device, dtype) for grad in grads])
        made = [given.grad, *(weight.grad for weight in own)]
        return [*(each.detach() for each in y), *(grad for grad in made if grad is not None)]

    products: list[Tensor] = []
    multiply = compiled.product_

    def noted(total: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
        products.append(total)
        multiply(total, a, b, add=add)

    monkeypatch.setattr(compiled, "product_", noted)
    ours = found(FP32)
    assert len(products) == 6, "two forward, two of the input's gradient, two of the weights'"
    assert len(ours) == 6 and not ours[4][:5].any() and not ours[4][25:].any()
    for mine, right in zip(ours, found(torch.float64), strict=True):
        assert mine.dtype is FP32 and error(mine, right) < 1e-6
    assert [each.shape for each in found(FP32, "meta")] == [each.shape for each in ours]


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["blas", "compiled"])
def test_rows_are_added_up_on_top_of_what_is_there(dtype: torch.dtype, kernel: Kernel) -> None:
    """Of as many rows and columns as there are: whole numbers, whose sums fp32 has and 16 bits do not."""
    for count, columns in ((0, 70), (1, 70), (7, 70), (1030, 70), (1030, 1100), (3, 4200)):
        row = torch.arange(float(columns)) % 70
        total = torch.full((columns,), 3.0)
        add_rows_(total, row.repeat(count, 1).to(dtype), kernel)
        assert torch.equal(total, 3.0 + count * row)


@pytest.mark.usefixtures("units")
def test_gradients_of_biases_are_products_where_numbers_have_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In both kinds of layer, of two micro-batches: whole numbers."""
    sums: list[torch.Size] = []
    multiply = compiled.product_

    def noted(total: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
        sums.extend([b.shape] * (len(total) == 1))
        multiply(total, a, b, add=add)

    monkeypatch.setattr(compiled, "product_", noted)
    for dtype, expected in ((BF16, [(300, 6)] * 4), (FP32, [])):
        sums.clear()
        products = Products(fp32=Kernels(weight_gradient="compiled"), bf16=Kernels("native", "native", "compiled"))
        weight, bias, added = (torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((6, 4), (6,), (6,)))
        for _ in range(2):
            x = torch.ones(100, 3, 4, dtype=dtype)
            y = add_bias(linear(x, weight, bias, products=products), added, products=products)
            y.backward(torch.ones_like(y))
        assert sums == expected
        assert gradient_of(bias).tolist() == gradient_of(added).tolist() == [600.0] * 6


def test_others_kernels_do_not_need_them() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 4, dtype=BF16))
    linear(torch.ones(2, 4, dtype=BF16), weight, products=Products(bf16=Kernels())).sum().backward()
    assert weight.grad is not None and (weight.grad == 2.0).all()


# --- attention --------------------------------------------------------------------------------------------------------

OURS = Kernels(attention="compiled")
COMPILED = Products(fp32=OURS, bf16=OURS)


def heads(b: int, n: int, s: int, d: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as a layer's projection lies in memory, [s, b, n, 3 d]: [b, n, s, d] each."""
    drawn = torch.randn(s, b, n, 3 * d, generator=torch.Generator().manual_seed(seed)).to(BF16)
    q, k, v = drawn.permute(1, 2, 0, 3).split(d, -1)
    return q, k, v


def attended(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Mask, products: Products) -> list[Tensor]:
    """The result, and the gradients of q, k and v."""
    given = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in (q, k, v)]
    y = attend(given[0], given[1], given[2], mask, products=products)
    return [y.detach(), *torch.autograd.grad(y, given, grad)]


ATTENTION = [
    (1, 1, 700, 128),
    (2, 3, 7, 6),
    (1, 2, 65, 64),
    (2, 1, 64, 16),
    (2, 2, 129, 80),
    (1, 1, 1, 2),
    (1, 2, 200, 32),
]


@pytest.mark.parametrize("dtype", compiled.ATTENTION, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", ATTENTION, ids=str)
@pytest.mark.usefixtures("units")
def test_attention_is_as_exact_as_torchs_fused_kernel(
    size: tuple[int, int, int, int], causal: bool, dtype: torch.dtype
) -> None:
    q, k, v = (x.to(dtype) for x in heads(*size, seed=0))
    grad, mask = heads(*size, seed=1)[0].to(dtype), Mask(causal=causal)
    exact = attended(*(x.double() for x in (q, k, v, grad)), mask, Products())
    found = attended(q, k, v, grad, mask, COMPILED)
    torchs = attended(q, k, v, grad, mask, Products(bf16=AS_THEY_ARE))
    assert_as_exact(found, torchs, exact, dtype)


@pytest.mark.usefixtures("units")
def test_attention_does_not_depend_on_the_number_of_threads() -> None:
    (q, k, v), grad, before = heads(2, 3, 70, 8, 0), heads(2, 3, 70, 8, 1)[0], torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(attended(q, k, v, grad, Mask(), COMPILED))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.usefixtures("units")
def test_a_query_does_not_depend_on_what_is_to_come() -> None:
    q, k, v = heads(1, 2, 150, 16, 0)
    whole = attend(q, k, v, products=COMPILED)
    for length in (1, 63, 64, 65, 127):
        part = attend(q[:, :, :length], k[:, :, :length], v[:, :, :length], products=COMPILED)
        assert torch.equal(part, whole[:, :, :length])


@pytest.mark.usefixtures("units")
def test_large_scores_do_not_overflow() -> None:
    q, k, v = (200.0 * x for x in heads(1, 1, 66, 8, 0))
    found = attended(q, k, v, torch.ones_like(q), Mask(), COMPILED)
    assert all(x.isfinite().all() for x in found)
    exact = attended(q.double(), k.double(), v.double(), torch.ones_like(q).double(), Mask(), Products())
    assert error(found[0], exact[0]) < 0.01


@pytest.mark.parametrize("case", ["window", "documents", "alibi", "odd features", "fp16"])
@pytest.mark.usefixtures("loaded")
def test_what_there_is_no_compiled_attention_for_is_torchs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(compiled, "attend", never)
    size = (2, 2, 12, 7 if case == "odd features" else 8)
    q, k, v = (x.half() if case == "fp16" else x for x in heads(*size, 0))
    documents = (torch.arange(12)[:, None] // 5 == torch.arange(12) // 5).expand(2, 1, 12, 12)
    masks = {
        "window": Mask(window=4),
        "documents": Mask(pairs=documents),
        "alibi": Mask(slopes=(0.5, 0.25)),
    }
    mask, kernels = masks.get(case, Mask()), Kernels(attention="compiled")
    found = attend(q, k, v, mask, products=Products(bf16=kernels, fp16=kernels))
    exact = attend(q.double(), k.double(), v.double(), mask)
    assert found.dtype is q.dtype and error(found, exact) < 0.01


@pytest.mark.usefixtures("loaded")
def test_heads_that_do_not_fit_together_are_refused() -> None:
    q, k, v = heads(1, 2, 6, 4, 0)
    for wrong in (k[:, :, :5], k[:, :1], k.float(), k[..., :2]):
        with pytest.raises(RuntimeError, match=r"all of one (size|type)"):
            compiled.attend(q, wrong, v, 0.5, causal=True)
        with pytest.raises(RuntimeError, match=r"all of one (size|type)"):
            compiled.attend(q, k, wrong, 0.5, causal=True)


# --- compiling --------------------------------------------------------------------------------------------------------


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A process that has no kernels yet, and what it would load."""
    would_load: list[Path] = []
    monkeypatch.setattr(compiled, "is_loaded", lambda: False)
    monkeypatch.setattr(torch.ops, "load_library", would_load.append)
    return would_load


def fake_compiler(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(exist_ok=True)
    program = folder / "c++"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(shutil, "which", lambda name: str(program) if name == "c++" else None)
    monkeypatch.setattr(compiled.sys, "platform", "linux")
    monkeypatch.setattr(compiled.platform, "machine", lambda: "x86_64")


COMPILES = 'while [ "$1" != -o ]; do shift; done; echo "made for $*" > "$2"; echo x >> "$(dirname "$0")/count"'


def test_they_are_compiled_once_for_a_processor_and_a_torch(
    unloaded: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path / "bin", COMPILES, monkeypatch)
    cache = tmp_path / "cache"
    assert [compiled.prepare(cache, name) for name in ("one", "one", "another")] == ["", "", ""]
    assert unloaded[0] == unloaded[1] != unloaded[2] and {file.parent for file in unloaded} == {cache}
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert compiled.prepare(cache, "one") == "" and unloaded[3] not in unloaded[:3]
    monkeypatch.setattr(compiled, "FLAGS", (*compiled.FLAGS, "-g"))
    assert compiled.prepare(cache, "one") == "" and unloaded[4] not in unloaded[:4], "nor with other flags"
    assert len((tmp_path / "bin/count").read_text().split()) == 4
    assert sorted(cache.iterdir()) == sorted(set(unloaded)), "nothing else is left"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ('echo "a.cpp:3: error: no such thing" >&2; exit 1', "failed: a.cpp:3: error: no such thing"),
        ("printf '\\377: error: no such thing' >&2; exit 1", "failed: \ufffd: error: no such thing"),
        ("exit 3", "failed: no message"),
        ("sleep 20", "did not end within 1 seconds"),
    ],
)
def test_a_compiler_that_fails_leaves_nothing_and_says_why(
    unloaded: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, why: str
) -> None:
    fake_compiler(tmp_path / "bin", script, monkeypatch)
    monkeypatch.setattr(compiled, "TIME_LIMIT", 1.0)
    said = compiled.prepare(tmp_path / "cache", "one")
    assert why in said and "\n" not in said
    assert unloaded == [] and list((tmp_path / "cache").iterdir()) == []


def test_what_is_missing_is_said(unloaded: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_compiler(tmp_path / "bin", COMPILES, monkeypatch)
    elsewhere = "; set XDG_CACHE_HOME to a folder that can be written"
    assert compiled.prepare(None, "one").endswith(f"the environment names no home{elsewhere}")
    (tmp_path / "file").write_text("")
    said = compiled.prepare(tmp_path / "file", "one")
    assert ("Not a directory" in said or "exists" in said) and said.endswith(f"'{elsewhere}")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert compiled.prepare(tmp_path, "one") == "there is no C++ compiler (none of c++, g++, clang++)"
    monkeypatch.setattr(compiled.platform, "machine", lambda: "aarch64")
    assert "linux aarch64" in compiled.prepare(tmp_path, "one")
    assert unloaded == []


def test_a_damaged_library_is_compiled_again(
    unloaded: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path / "bin", COMPILES, monkeypatch)

    def load(file: Path) -> None:
        if "made for" not in file.read_text():
            raise OSError(f"Could not load this library: {file}")
        unloaded.append(file)

    monkeypatch.setattr(torch.ops, "load_library", load)
    assert compiled.prepare(tmp_path, "one") == ""
    unloaded[0].write_text("rubbish")
    assert compiled.prepare(tmp_path, "one") == "" and unloaded[0] == unloaded[1]
    fake_compiler(tmp_path / "bin", COMPILES.replace("made for", "rubbish"), monkeypatch)
    assert "Could not load this library" in compiled.prepare(tmp_path, "another") and len(unloaded) == 2


def test_a_folder_from_which_no_code_may_be_loaded_is_told_as_such(
    unloaded: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are kernels compiled again at each start, though they could be written."""
    fake_compiler(tmp_path / "bin", COMPILES, monkeypatch)

    def load(file: Path) -> None:
        raise OSError(f"Could not load this library: {file}")

    monkeypatch.setattr(torch.ops, "load_library", load)
    monkeypatch.setattr(compiled.os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NODEV))
    cache = tmp_path / "cache"
    elsewhere = "set XDG_CACHE_HOME to a folder on another file system"
    said = f"{cache} is mounted noexec, and no code is loaded from there; {elsewhere}"
    assert [compiled.prepare(cache, "one") for _ in range(2)] == [said] * 2
    assert len((tmp_path / "bin/count").read_text().split()) == 1


def test_a_damaged_library_does_not_end_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: Path
) -> None:
    fake_compiler(tmp_path / "bin", 'while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"', monkeypatch)
    monkeypatch.setattr(compiled, "is_loaded", lambda: False)
    assert "Could not load this library" in compiled.prepare(tmp_path / "cache", "one")


@pytest.mark.usefixtures("units")
@pytest.mark.parametrize("causal", [True, False])
def test_heads_that_lie_once_for_many_queries_have_gradients_of_their_own(causal: bool) -> None:
    q, k, v = heads(2, 4, 40, 8, 0)
    grad = heads(2, 4, 40, 8, 1)[0]
    once = [x[:, :1].expand(2, 4, 40, 8) for x in (k, v)]
    apart = [x.contiguous() for x in once]
    results = []
    for keys, values in (once, apart):
        for given in (grad, grad[:, :, :1].expand(2, 4, 40, 8)):
            out, lse = compiled.attend(q, keys, values, 0.35, causal=causal)
            results.append((out, *compiled.attend_backward(given, q, keys, values, out, lse, 0.35, causal=causal)))
    for found, expected in zip(results[:2], results[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
