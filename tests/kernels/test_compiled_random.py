"""Random numbers of the compiled kernels: the bits of `randomness`, in masks, initial weights, and attention."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from colonnade import randomness
from colonnade.config.model import ModelConfig
from colonnade.kernels import compiled
from colonnade.kernels.attention import attend, attend_with_dropout
from colonnade.kernels.choice import Kernels, Products
from colonnade.kernels.dropout import Masks, ProbabilityDropout, dropout
from colonnade.kernels.mask import Mask
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, paper_mesh
from colonnade.model.gpt import GPT
from colonnade.model.initialize import initialize_
from colonnade.randomness import Purpose, stream_keys
from colonnade.tensor_parallel.parallel import Parallel
from tests.kernels.exactness import assert_as_exact
from tests.model.kept import Kept

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
CPU = torch.device("cpu")
COMPILED = Products(*3 * [Kernels(attention="compiled")])
SPELLED_OUT = Products(*3 * [Kernels(attention="native")])
DROP = 0.1
"""No fraction of 2¹⁶: what is dropped, and what the rest is scaled by, is the next one."""


def keys_of(count: int) -> np.ndarray:
    return stream_keys(3, Purpose.SAMPLING, last=range(count))


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("drop", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 2, 63, 1023, 1024, 1025, 40_000])
def test_a_mask_is_that_of_torchs_operators(count: int, drop: float) -> None:
    """From any element on, in the middle of a word too."""
    for start in (0, 1, 7, 1 << 20, (1 << 32) + 1):
        expected = randomness.keep_mask(keys_of(5), start, count, drop)
        found = compiled.keep_mask(keys_of(5), start, count, drop)
        assert found.dtype is torch.bool and torch.equal(found, expected)


@pytest.mark.usefixtures("loaded")
def test_no_streams_have_no_mask() -> None:
    assert compiled.keep_mask(keys_of(0), 0, 7, DROP).shape == (0, 7)
    assert compiled.keep_mask(keys_of(3), 0, 0, DROP).shape == (3, 0)


@pytest.mark.usefixtures("loaded")
def test_masks_are_drawn_by_them(monkeypatch: pytest.MonkeyPatch) -> None:
    masks, shape = Masks(1, np.array([4, 9])), torch.Size((33, 2, 48))
    asked: list[int] = []
    original = compiled.keep_mask
    monkeypatch.setattr(compiled, "keep_mask", lambda *given: asked.append(given[2]) or original(*given))  # type: ignore[func-returns-value]
    found = masks.hidden(Purpose.RESIDUAL_DROPOUT, 1, shape, 0.1, CPU)
    assert asked == [33 * 48]
    monkeypatch.setattr(compiled, "is_loaded", lambda: False)
    assert torch.equal(masks.hidden(Purpose.RESIDUAL_DROPOUT, 1, shape, 0.1, CPU), found)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("dtype", compiled.NUMBERS, ids=str)
@pytest.mark.parametrize("size", [(1, 1, 1), (5, 3, 7), (70, 4, 384), (3, 2, 0)], ids=str)
def test_what_is_kept_has_the_bits_of_torchs_operators(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    """However numbers and masks lie, and gradients too."""
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(*size, generator=generator)).to(dtype)
    mask = torch.rand(*size, generator=generator) >= 0.3
    beside, turned = (x.movedim(source, 2).contiguous().movedim(2, source) for source in (0, 1))
    for given in (x, beside, turned, x[:1, :1].expand(size)):
        for keep in (
            mask,
            mask.transpose(0, 1).contiguous().transpose(0, 1),
            mask.permute(2, 1, 0).contiguous().permute(2, 1, 0),
        ):
            assert torch.equal(compiled.kept(given, keep, 1.0 / 0.7), given.mul(keep).mul_(1.0 / 0.7))
    for extreme in (torch.finfo(dtype).max, torch.finfo(dtype).tiny, torch.inf, torch.nan):
        filled, all_of_it = torch.full_like(x, extreme), torch.zeros_like(mask).fill_(True)
        for keep in (mask, all_of_it):
            expected = filled.mul(keep).mul_(1.5)
            torch.testing.assert_close(compiled.kept(filled, keep, 1.5), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(("dtype", "compiles"), [(BF16, True), (FP32, True), (FP64, False)], ids=str)
def test_dropout_takes_them_forward_and_backward(
    dtype: torch.dtype, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks, calls, results = Masks(1, np.array([4, 9])), list[float](), []
    original = compiled.kept
    monkeypatch.setattr(compiled, "kept", lambda *given: calls.append(given[2]) or original(*given))  # type: ignore[func-returns-value]
    for loaded in (True, False):
        monkeypatch.setattr(compiled, "is_loaded", lambda: loaded)  # noqa: B023
        x = torch.ones(33, 2, 48, dtype=dtype, requires_grad=True)
        y = dropout(x, 0.1, masks, Purpose.RESIDUAL_DROPOUT, 1)
        y.backward(torch.full_like(y, 3.0))  # type: ignore[no-untyped-call]
        assert x.grad is not None
        results.append((y.detach(), x.grad))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    assert len(calls) == 2 * compiles


@pytest.mark.usefixtures("loaded")
def test_masks_that_are_not_for_these_numbers_are_refused() -> None:
    x = torch.ones(3, 2, 4)
    for wrong in (torch.ones(3, 2, 5, dtype=torch.bool), torch.ones(3, 2, 4), torch.ones(6, 4, dtype=torch.bool)):
        with pytest.raises(RuntimeError, match="a mask for x"):
            compiled.kept(x, wrong, 1.0)


def test_elements_past_the_end_of_a_stream_are_refused() -> None:
    with pytest.raises(AssertionError, match="a stream has"):
        compiled.keep_mask(keys_of(1), (1 << 33) - 2, 4, DROP)
    with pytest.raises(AssertionError, match="a stream has"):
        compiled.normal_(torch.empty(1, 4), keys_of(1), (1 << 31) - 2, 1.0)
    q = torch.ones(1, 1, 1, 2).expand(1, 1, (1 << 16) + 1, 2)
    with pytest.raises(AssertionError, match="int32 counts"):
        compiled.attend(q, q, q, 1.0, causal=True, streams=keys_of(1), drop=DROP)


# --- normal numbers ---------------------------------------------------------------------------------------------------


def unmixed(word: int) -> int:
    """What `randomness` makes this word of."""
    mask = (1 << 32) - 1
    x = word ^ (word >> 15) ^ (word >> 30)
    x = x * pow(0x735A2D97, -1, 1 << 32) & mask
    x = x ^ (x >> 15) ^ (x >> 30)
    x = x * pow(0x21F0AAAD, -1, 1 << 32) & mask
    return x ^ (x >> 16)


def keys_beginning(first: int, seconds: range) -> np.ndarray:
    """Of streams whose words begin with `first` and one of `seconds`, of those that a stream can have."""
    keys = []
    for second in seconds:
        offset = unmixed(first)
        gamma = (unmixed(second) - offset) & ((1 << 32) - 1)
        if gamma & 1 and (gamma ^ (gamma >> 1)).bit_count() >= 12:
            keys.append(gamma << 32 | offset)
    return np.array(keys, dtype=np.uint64)


def both(keys: np.ndarray, start: int, count: int, std: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """By the kernel, and by torch's operators."""
    found = torch.full((len(keys), count), torch.nan, dtype=dtype)
    compiled.normal_(found, keys, start, std)
    return found, (randomness.normal(keys, start, count) * std).to(dtype)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
@pytest.mark.parametrize("count", [1, 7, 8, 9, 384, 1023, 1024, 1025, 3000])
def test_normal_numbers_have_the_bits_of_torchs_operators(count: int, dtype: torch.dtype) -> None:
    for start in (0, 5, 1 << 20, (1 << 31) - count):
        found, expected = both(keys_of(40), start, count, 0.02, dtype)
        assert torch.equal(found, expected)


@pytest.mark.usefixtures("loaded")
def test_millions_of_them_do_too() -> None:
    """Whatever a compiler makes of an addition behind a multiplication, one in a thousand would show."""
    found, expected = both(keys_of(2000), 3, 1500, 1.0, FP64)
    assert torch.equal(found, expected) and 5.0 < float(found.abs().max()) < 5.7


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(("first", "sign"), [(0x80000000, -1), (0x7FFFFFFF, 1)])
def test_the_rarest_of_them_do_too(first: int, sign: int) -> None:
    """Beyond √(−log p) = 5, where another ratio holds: one number in 7 · 10¹⁰ lies there."""
    least = 0x80000000 if sign < 0 else 0x7FFFFFFF
    keys = keys_beginning(first, range(least, least - sign * (40 << 12), -sign * 997))
    found, expected = both(keys, 0, 2, 1.0, FP64)
    assert len(keys) > 50 and torch.equal(found, expected)
    assert float((sign * found[:, 0]).min()) > 6.0 and 7.0 < float((sign * found[:, 0]).max()) < 8.3


@pytest.mark.usefixtures("loaded")
def test_rows_may_lie_apart() -> None:
    whole = torch.zeros(6, 20, dtype=FP64)
    compiled.normal_(whole[1:4, 5:12], keys_of(3), 2, 0.5)
    assert torch.equal(whole[1:4, 5:12], randomness.normal(keys_of(3), 2, 7) * 0.5)
    assert int((whole != 0).sum()) == 21
    with pytest.raises(RuntimeError, match="rows in one piece"):
        compiled.normal_(whole.t()[:3], keys_of(3), 0, 1.0)
    with pytest.raises(RuntimeError, match="a stream a row"):
        compiled.normal_(whole, keys_of(3), 0, 1.0)
    with pytest.raises(RuntimeError, match="fp32 or fp64"):
        compiled.normal_(whole[:3].half(), keys_of(3), 0, 1.0)


def initial(tp: Axis, dtype: torch.dtype) -> dict[str, Tensor]:
    model = ModelConfig(num_layers=2, hidden_size=64, num_heads=8, seq_length=32, tie_embeddings=False)
    gpt = GPT(model, 509, Parallel(tp)).to(dtype)  # a prime: the last rank's rows end in padding
    for parameter in gpt.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    initialize_(gpt, tp, 1)
    return {name: weight.detach() for name, weight in gpt.named_parameters()}


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
@pytest.mark.parametrize("tp", [1, 4])
def test_initial_weights_are_drawn_by_them(tp: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = compiled.normal_, list[int]()

    def noted(to: Tensor, keys: np.ndarray, start: int, std: float) -> None:
        calls.append(start)
        original(to, keys, start, std)

    for rank in range(tp):
        axis = paper_mesh(Layout(tp=tp), rank).tp
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "normal_", noted)
            found = initial(axis, dtype)
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "is_loaded", lambda: False)
            expected = initial(axis, dtype)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert len(calls) == tp * 11, "two tables, the positions, and four matrices of each layer"


# --- attention --------------------------------------------------------------------------------------------------------


def heads(b: int, n: int, s: int, d: int, seed: int, dtype: torch.dtype = FP32) -> list[Tensor]:
    """q, k, v and a gradient, [b, n, s, d]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, b, n, d, generator=generator).to(dtype).permute(1, 2, 0, 3) for _ in range(4)]


def dropout_of(b: int, n: int, drop: float = DROP) -> ProbabilityDropout:
    return Masks(7, np.arange(b) + 5).attention(1, range(3, 3 + n), drop)


def attended(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, drops: ProbabilityDropout, products: Products, **more: Any
) -> list[Tensor]:
    """The result, and the gradients of q, k and v."""
    given = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in (q, k, v)]
    y = attend_with_dropout(*given, drops, products=products, **more)
    return [y.detach(), *torch.autograd.grad(y, given, grad)]


ATTENTION = [(2, 3, 7, 6), (1, 2, 65, 64), (2, 1, 64, 16), (2, 2, 129, 80), (1, 2, 17, 2), (1, 4, 400, 8)]
"""b, n, s, d. Of so many elements as the last has, some are the least that is kept, as 16 bits."""


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("dtype", compiled.ATTENTION, ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", ATTENTION, ids=str)
def test_attention_drops_what_the_mask_drops(size: tuple[int, int, int, int], causal: bool, dtype: torch.dtype) -> None:
    """Lengths are odd too, where every other query begins in the middle of a word."""
    given, drops, mask = heads(*size, 0, dtype), dropout_of(*size[:2]), Mask(causal=causal)
    exact = attended(*(x.double() for x in given), drops, SPELLED_OUT, mask=mask)
    found = attended(*given, drops, COMPILED, mask=mask)
    theirs = attended(*given, drops, SPELLED_OUT, mask=mask)
    assert_as_exact(found, theirs, exact, dtype)


@pytest.mark.usefixtures("loaded")
def test_dropping_nothing_is_attention_without_dropout() -> None:
    given = heads(2, 3, 70, 8, 0)
    found = attended(*given, dropout_of(2, 3, 0.0), COMPILED)
    leaves = [x.detach().clone().requires_grad_() for x in given[:3]]
    y = attend(*leaves, products=COMPILED)
    expected = [y.detach(), *torch.autograd.grad(y, leaves, given[3])]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("loaded")
def test_attention_with_dropout_does_not_depend_on_the_number_of_threads() -> None:
    given, before, found = heads(2, 3, 71, 8, 0), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(attended(*given, dropout_of(2, 3), COMPILED))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@pytest.mark.usefixtures("loaded")
def test_some_heads_drop_as_all_of_them() -> None:
    """Two ranks of tp with half of the heads each."""
    given, drops = heads(2, 4, 33, 8, 0), dropout_of(2, 4)
    whole = attended(*given, drops, COMPILED)
    for first in (0, 2):
        part = [x[:, first : first + 2] for x in given]
        own = Masks(7, np.arange(2) + 5).attention(1, range(3 + first, 5 + first), DROP)
        found = attended(*part, own, COMPILED)
        assert all(torch.equal(a, b[:, first : first + 2]) for a, b in zip(found, whole, strict=True))


@pytest.mark.usefixtures("loaded")
def test_no_matrix_of_queries_and_keys_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a mask drawn. A plan, on the meta device, expects as much as without dropout."""
    q, k, v, _ = heads(1, 2, 64, 2, 0)
    monkeypatch.setattr(ProbabilityDropout, "mask", lambda *_: pytest.fail("a mask"))
    kept = {}
    for device in ("cpu", "meta"):
        leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
        for drop in (0.0, DROP):
            with Kept() as each:
                if drop:
                    y = attend_with_dropout(*leaves, dropout_of(1, 2), products=COMPILED)
                else:
                    y = attend(*leaves, products=COMPILED)
            assert y.grad_fn is not None and y.shape == q.shape
            kept[device, drop] = each.bytes
    assert kept["cpu", DROP] == kept["cpu", 0.0] < 64 * 64 * 2
    assert kept["meta", DROP] == kept["meta", 0.0]


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize(
    ("kernels", "compiles"),
    [
        (Kernels(attention="compiled"), True),
        (Kernels(weight_gradient="compiled", attention="native"), True),
        (Kernels(output="compiled", attention="blas"), False),
    ],
    ids=["attention", "weight gradients", "output"],
)
def test_who_takes_the_compiled_kernel(kernels: Kernels, compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is one for anything in a step's blocks: it is faster than attention that is spelled out."""
    q, k, v, _ = heads(1, 2, 9, 4, 0)
    calls: list[object] = []
    original = compiled.attend
    monkeypatch.setattr(compiled, "attend", lambda *given, **more: calls.append(more) or original(*given, **more))  # type: ignore[func-returns-value]
    drops = dropout_of(1, 2)
    attend_with_dropout(q, k, v, drops, products=Products(fp32=kernels))
    assert len(calls) == compiles
    for mask in (Mask(window=4), Mask(slopes=(0.5, 0.25))):
        attend_with_dropout(q, k, v, drops, mask=mask, products=Products(fp32=kernels))
    attend_with_dropout(q.double(), k.double(), v.double(), drops, products=Products(fp32=kernels))
    assert len(calls) == compiles, "there is none for other masks, nor for fp64"


@pytest.mark.usefixtures("loaded")
def test_streams_that_are_not_one_a_head_are_refused() -> None:
    q, k, v, _ = heads(1, 2, 6, 4, 0)
    with pytest.raises(RuntimeError, match="a stream for each head"):
        attend_with_dropout(q, k, v, dropout_of(1, 3), products=COMPILED)


@pytest.mark.usefixtures("loaded")
def test_overflow_stays_visible() -> None:
    """A dropped infinity is NaN, not zero: every gradient of a key has one, whatever is dropped."""
    q, k, v, grad = heads(1, 1, 8, 4, 0)
    found = attended(q, k, v, torch.full_like(grad, torch.inf), dropout_of(1, 1, 0.999), COMPILED)
    assert not any(gradient.isfinite().all() for gradient in found[1:])
