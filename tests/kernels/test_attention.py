"""The core of attention against torch's own and the plain expression: dropped, biased, from a cache, computed again."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from colonnade.kernels.attention import attend, attend_to_cache, attend_unscaled, attend_with_dropout
from colonnade.kernels.choice import Kernel, Kernels, Products
from colonnade.kernels.mask import Mask
from colonnade.kernels.relative import Ranges, RelativeBias
from colonnade.model.attention import KeyValueCache
from tests.emulated import emulated_cuda
from tests.kernels.by_mask import by_mask
from tests.model.kept import Kept
from tests.tensor_parallel.shards import drawn

B, N, S, D = 3, 4, 6, 8
SLOPES = [0.5, 0.25, 0.125, 0.75]


def heads(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [b, n, s, d], not contiguous, as attention gets them."""
    q, k, v = (drawn(S, B, N, D, seed=i).to(dtype).permute(1, 2, 0, 3).requires_grad_() for i in range(3))
    return q, k, v


def expression(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | float = 1.0, drop: float = 0.0, slopes: list[float] | None = None
) -> Tensor:
    """What attention with dropped probabilities and lowered scores is."""
    scores = q @ k.transpose(-1, -2) / D**0.5
    if slopes is not None:
        distance = torch.arange(S)[:, None] - torch.arange(S)[None, :]
        scores = scores - torch.tensor(slopes, dtype=q.dtype)[:, None, None] * distance
    scores = scores.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -torch.inf)
    y: Tensor = (scores.softmax(-1) * keep / (1 - drop)) @ v
    return y


@pytest.mark.parametrize("drop", [0.125, 0.5])  # fractions of 2^16, which the mask realises exactly
def test_dropped_probabilities_are_the_plain_expression(drop: float) -> None:
    keep = torch.rand(B, N, S, S, generator=torch.Generator().manual_seed(0)) >= drop
    grad = drawn(B, N, S, D, seed=9)
    ours, theirs = heads(), heads()
    y, expected = attend_with_dropout(*ours, by_mask(keep, drop)), expression(*theirs, keep, drop)
    torch.testing.assert_close(y, expected, rtol=1e-13, atol=1e-13)
    for mine, reference in zip(
        torch.autograd.grad(y, ours, grad), torch.autograd.grad(expected, theirs, grad), strict=True
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)


def test_dropping_nothing_is_torchs_fused_attention() -> None:
    keep, grad = torch.ones(B, N, S, S, dtype=torch.bool), drawn(B, N, S, D, seed=9)
    ours, theirs = heads(), heads()
    y = attend_with_dropout(*ours, by_mask(keep, 0.0))
    expected = nn.functional.scaled_dot_product_attention(*theirs, is_causal=True)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for mine, reference in zip(
        torch.autograd.grad(y, ours, grad), torch.autograd.grad(expected, theirs, grad), strict=True
    ):
        torch.testing.assert_close(mine, reference, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    keep = torch.rand(1, 2, 4, 4, generator=torch.Generator().manual_seed(0)) >= 0.25
    qkv = [drawn(1, 2, 4, 3, seed=i).requires_grad_() for i in range(3)]
    assert torch.autograd.gradcheck(lambda q, k, v: attend_with_dropout(q, k, v, by_mask(keep, 0.25)), qkv)


def test_bf16_is_the_exact_result_rounded() -> None:
    keep = torch.rand(B, N, S, S, generator=torch.Generator().manual_seed(0)) >= 0.125
    q, k, v = (t.detach() for t in heads(dtype=torch.bfloat16))
    y = attend_with_dropout(q, k, v, by_mask(keep, 0.125))
    assert y.dtype is torch.bfloat16
    exact = expression(q.double(), k.double(), v.double(), keep, 0.125)
    # roundings of scores, probabilities and result, 2⁻⁹ each; a score of size 4 rounded shifts its probability by 2⁻⁷
    assert (y - exact).abs().max() <= 2.0**-6 * exact.abs().max()


def test_attention_to_a_cache_is_the_rest_of_the_whole() -> None:
    q, k, v = (t.detach() for t in heads())
    whole = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    for past in range(S):
        torch.testing.assert_close(attend_to_cache(q[:, :, past:], k, v), whole[:, :, past:], rtol=1e-12, atol=1e-12)


def test_a_cache_gives_back_what_it_was_given() -> None:
    _, k, v = (t.detach() for t in heads())
    empty = torch.full((B, N, S + 2, D), torch.nan).double()
    cache = KeyValueCache(empty, empty.clone())
    for start, stop in ((0, 2), (2, 3), (3, S)):
        keys, values = cache.extend(k[:, :, start:stop], v[:, :, start:stop])
        assert cache.length == stop
        assert torch.equal(keys, k[:, :, :stop]) and torch.equal(values, v[:, :, :stop])


# --- ALiBi -----------------------------------------------------------------------------------------------------------


def assert_same(ours: Callable[..., Tensor], theirs: Callable[..., Tensor]) -> None:
    """Results and all gradients, in float64."""
    mine, twins, grad = heads(), heads(), drawn(B, N, S, D, seed=9)
    y, expected = ours(*mine), theirs(*twins)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for got, reference in zip(
        torch.autograd.grad(y, mine, grad), torch.autograd.grad(expected, twins, grad), strict=True
    ):
        torch.testing.assert_close(got, reference, rtol=1e-11, atol=1e-12)


def some_mask(drop: float) -> Tensor:
    return torch.rand(B, N, S, S, generator=torch.Generator().manual_seed(0)) >= drop


def test_slopes_lower_scores() -> None:
    assert_same(lambda *qkv: attend(*qkv, Mask(slopes=SLOPES)), lambda *qkv: expression(*qkv, slopes=SLOPES))


@pytest.mark.parametrize("recompute", [False, True])
def test_slopes_lower_scores_with_dropout(recompute: bool) -> None:
    keep = some_mask(0.125)
    assert_same(
        lambda *qkv: attend_with_dropout(*qkv, by_mask(keep, 0.125), mask=Mask(slopes=SLOPES), recompute=recompute),
        lambda *qkv: expression(*qkv, keep, 0.125, SLOPES),
    )


def test_slopes_lower_scores_of_a_cache() -> None:
    q, k, v = (t.detach() for t in heads())
    whole = attend(q, k, v, Mask(slopes=SLOPES))
    for past in range(S):
        rest = attend_to_cache(q[:, :, past:], k, v, Mask(slopes=SLOPES))
        torch.testing.assert_close(rest, whole[:, :, past:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slopes", [None, SLOPES])
def test_16_bits_are_the_exact_result_rounded(dtype: torch.dtype, slopes: list[float] | None) -> None:
    q, k, v = (t.detach() for t in heads(dtype=dtype))
    mask = Mask(slopes=slopes)
    y, cached = attend(q, k, v, mask), attend_to_cache(q, k, v, mask)
    exact = expression(q.double(), k.double(), v.double(), slopes=slopes)
    assert y.dtype is cached.dtype is dtype
    assert (y - exact).abs().max() <= 2.0**-6 * exact.abs().max()
    assert (cached - exact).abs().max() <= 2.0**-6 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_beyond_fp16_are_finite_on_cuda(dtype: torch.dtype) -> None:
    q, k, v = (t.detach().clone() for t in heads(dtype=dtype))
    q[..., 0] = k[..., 0] = 256  # adds 65,536 to all scores, which changes no probability
    keep = some_mask(0.125)
    with emulated_cuda():
        y = attend_with_dropout(q, k, v, by_mask(keep, 0.125))
    exact = expression(q.double(), k.double(), v.double(), keep, 0.125)
    assert (y - exact).abs().max() <= 2.0**-6 * exact.abs().max()


# --- T5's ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("drop", [0.0, 0.125])
@pytest.mark.parametrize("causal", [True, False])
def test_unscaled_attention_is_the_plain_expression(causal: bool, drop: float, recompute: bool) -> None:
    """Of the last queries to all keys. The gradient of the table is added to what is there."""
    t, ranges, grad = S + 3, Ranges(8, 5, both_sides=not causal), drawn(B, N, S, D, seed=9)
    mine, twins = ([drawn(B, N, n, D, seed=n + i).requires_grad_() for i, n in enumerate((S, t, t))] for _ in range(2))
    table, twin = nn.Parameter(drawn(8, N, seed=5)), drawn(8, N, seed=5).requires_grad_()
    table.grad = torch.ones_like(table)
    keep = torch.rand(B, N, S, t, generator=torch.Generator().manual_seed(0)) >= drop
    y = attend_unscaled(
        *mine,
        Mask(causal=causal),
        RelativeBias(table, ranges),
        dropout=by_mask(keep, drop) if drop else None,
        recompute=recompute,
    )
    distance = torch.arange(t) - torch.arange(t - S, t)[:, None]
    scores = twins[0] @ twins[1].transpose(-1, -2) + twin[ranges.of(distance)].permute(2, 0, 1)
    scores = scores.masked_fill(distance > 0, -torch.inf) if causal else scores
    expected = (scores.softmax(-1) * keep / (1 - drop)) @ twins[2]
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    y.backward(grad)  # type: ignore[no-untyped-call]
    expected.backward(grad)
    for got, reference in zip((*mine, table), (*twins, twin), strict=True):
        assert got.grad is not None and reference.grad is not None
        added = 1.0 if got is table else 0.0
        torch.testing.assert_close(got.grad, reference.grad + added, rtol=1e-11, atol=1e-12)


# --- what is kept for backward ---------------------------------------------------------------------------------------

LONG = 64
HALVES = Mask(slopes=[0.5, 0.25])


def long_heads() -> list[Tensor]:
    """q, k, v [1, 2, 64, 2]: everything but a matrix of queries × keys is small."""
    return [drawn(1, 2, LONG, 2, seed=i).requires_grad_() for i in range(3)]


def test_no_matrix_is_kept_of_what_can_be_computed_again() -> None:
    matrix = LONG * LONG
    keep = torch.ones(1, 2, LONG, LONG, dtype=torch.bool)
    cores: dict[str, Callable[..., Tensor]] = {
        "fused": attend,
        "slopes": lambda *qkv: attend(*qkv, HALVES),
        "dropout": lambda *qkv: attend_with_dropout(*qkv, by_mask(keep, 0.125), recompute=True),
        "both": lambda *qkv: attend_with_dropout(*qkv, by_mask(keep, 0.125), mask=HALVES, recompute=True),
    }
    for name, core in cores.items():
        with Kept() as kept:
            y = core(*long_heads())
        assert kept.largest < matrix, name
        assert y.grad_fn is not None


def test_what_is_not_computed_again_is_kept() -> None:
    keep = torch.ones(1, 2, LONG, LONG, dtype=torch.bool)
    with Kept() as kept:
        y = attend_with_dropout(*long_heads(), by_mask(keep, 0.125))
    assert kept.bytes >= 2 * LONG * LONG * (8 + 1), "probabilities and mask"
    assert y.grad_fn is not None


@pytest.mark.parametrize("slopes", [None, SLOPES])
@pytest.mark.parametrize(
    ("dtype", "kernel"), [(torch.float64, "blas"), (torch.bfloat16, "blas"), (torch.bfloat16, "native")], ids=str
)
def test_computed_again_is_the_same_to_the_bit(dtype: torch.dtype, kernel: Kernel, slopes: list[float] | None) -> None:
    dropout, grad = by_mask(some_mask(0.125), 0.125), drawn(B, N, S, D, seed=9).to(dtype)
    products = Products(bf16=Kernels(attention=kernel))
    results = []
    for recompute in (False, True):
        qkv = heads(dtype)
        y = attend_with_dropout(*qkv, dropout, mask=Mask(slopes=slopes), recompute=recompute, products=products)
        results.append((y, *torch.autograd.grad(y, qkv, grad)))
    assert dropout.asked == 3 * [(S, S)], "once, and then once forward and once backward"
    assert all(torch.equal(kept, again) for kept, again in zip(*results, strict=True))


def test_backward_may_run_twice_over_recomputed_biases() -> None:
    qkv, grad = heads(), drawn(B, N, S, D, seed=9)
    y = attend(*qkv, Mask(slopes=SLOPES))
    once = torch.autograd.grad(y, qkv, grad, retain_graph=True)
    again = torch.autograd.grad(y, qkv, grad)
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


def test_overflow_stays_visible() -> None:
    """A dropped infinity is NaN, not zero."""
    keep = torch.zeros(B, N, S, S, dtype=torch.bool)
    qkv = heads(torch.float16)
    y = attend_with_dropout(*qkv, by_mask(keep, 0.125))
    grads = torch.autograd.grad(y, qkv, torch.full((B, N, S, D), torch.inf, dtype=torch.float16))
    assert not any(gradient.isfinite().all() for gradient in grads)


@pytest.mark.parametrize(("kernel", "expected"), [("native", torch.bfloat16), ("blas", torch.float32)])
def test_16_bits_are_attended_to_as_they_are_or_widened(kernel: Kernel, expected: torch.dtype) -> None:
    """With dropout too, whose probabilities are kept in that type."""
    chosen = Products(bf16=Kernels(attention=kernel))
    qkv = [drawn(1, 2, 8, 4, seed=seed).bfloat16().requires_grad_() for seed in range(3)]
    kept: list[torch.dtype] = []
    keep = torch.ones(1, 2, 8, 8, dtype=torch.bool)
    with saved_tensors_hooks(lambda t: kept.append(t.dtype) or t, lambda t: t):  # type: ignore[func-returns-value]
        y = attend(*qkv, products=chosen)
        fused = set(kept) - {torch.float32} if kernel == "native" else set(kept)
        assert y.dtype is torch.bfloat16 and fused == {expected}
        kept.clear()
        assert attend_with_dropout(*qkv, by_mask(keep, 0.125), products=chosen).dtype is torch.bfloat16
        assert set(kept) == {expected, torch.bool}


@pytest.mark.parametrize("kernel", ["blas", "native"])
def test_scores_of_16_bits_are_not_rounded_before_the_softmax(kernel: Kernel) -> None:
    """Scores of 30 rounded to bf16 are off by 0.06, and probabilities by 6 %."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 24, 16, generator=generator).bfloat16() for _ in range(3))
    q = 8.0 * q
    products = Products(bf16=Kernels(attention=kernel))
    keep = torch.ones(1, 2, 24, 24, dtype=torch.bool)
    found = attend_with_dropout(q, k, v, by_mask(keep, 0.0), products=products)
    exact = attend(q.double(), k.double(), v.double())
    assert float((found.double() - exact).norm() / exact.norm()) < 0.004
