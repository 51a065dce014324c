"""Every combination of what masks say, beside the sentence that says it."""

import weakref
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from colonnade.kernels.attention import attend, attend_to_cache, attend_with_dropout
from colonnade.kernels.mask import Mask, Pairs
from colonnade.model.position import alibi_slopes
from tests.kernels.by_mask import by_mask
from tests.tensor_parallel.shards import drawn

LENGTH, SAMPLES = 6, 2
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 2], [3, 3, 4, 4, 4, 4]]).t()
REAL = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]], dtype=torch.bool).t()
SLOPES = [0.5, 0.125]


def sees(mask: Mask, documents: Tensor | None, real: Tensor | None, sample: int, query: int, key: int) -> bool:
    if mask.causal and key > query:
        return False
    if mask.window is not None and key <= query - mask.window:
        return False
    if documents is not None and documents[query, sample] != documents[key, sample]:
        return False
    return real is None or bool(real[key, sample]) or key == query


def expression(q: Tensor, k: Tensor, v: Tensor, mask: Mask, documents: Tensor | None, real: Tensor | None) -> Tensor:
    """One query after the other."""
    y = torch.zeros_like(q)
    for sample, query in product(range(SAMPLES), range(LENGTH)):
        keys = [key for key in range(LENGTH) if sees(mask, documents, real, sample, query, key)]
        scores = (k[sample, :, keys] @ q[sample, :, query, :, None])[..., 0] / q.shape[-1] ** 0.5
        if mask.slopes is not None:
            scores = scores - torch.tensor(mask.slopes)[:, None] * (query - torch.tensor(keys))
        y[sample, :, query] = (scores.softmax(-1)[:, None] @ v[sample, :, keys])[:, 0]
    return y


COMBINATIONS = [
    (causal, window, slopes, documents, real)
    for causal, window, slopes, documents, real in product(
        (True, False), (None, 1, 3, LENGTH - 1, 9), (None, SLOPES), (None, DOCUMENTS), (None, REAL)
    )
    if causal or (window is None and slopes is None)
]


@pytest.mark.parametrize("dropped", [False, True])
def test_every_combination(dropped: bool) -> None:
    for causal, window, slopes, documents, real in COMBINATIONS:
        mask = Mask(causal, window, slopes, Pairs(documents, real).tensor())
        mine, theirs = ([drawn(SAMPLES, 2, LENGTH, 4, seed=i).requires_grad_() for i in range(3)] for _ in range(2))
        keep = torch.ones(SAMPLES, 2, LENGTH, LENGTH, dtype=torch.bool)
        y = attend_with_dropout(*mine, by_mask(keep, 0.0), mask=mask) if dropped else attend(*mine, mask)
        expected = expression(*theirs, Mask(causal, window, slopes), documents, real)
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        grad = drawn(SAMPLES, 2, LENGTH, 4, seed=9)
        for got, reference in zip(
            torch.autograd.grad(y, mine, grad), torch.autograd.grad(expected, theirs, grad), strict=True
        ):
            torch.testing.assert_close(got, reference, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("window", [None, 1, 3, LENGTH - 1, 9])
@pytest.mark.parametrize("slopes", [None, SLOPES])
def test_a_cache_sees_what_the_text_at_once_sees(window: int | None, slopes: list[float] | None) -> None:
    mask = Mask(True, window, slopes)
    q, k, v = (drawn(SAMPLES, 2, LENGTH, 4, seed=i) for i in range(3))
    whole = attend(q, k, v, mask)
    for past in range(LENGTH):
        rest = attend_to_cache(q[:, :, past:], k, v, mask)
        torch.testing.assert_close(rest, whole[:, :, past:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_what_distance_costs_is_rounded_once(dtype: torch.dtype) -> None:
    """Slopes of twelve heads are no numbers of 16 bits, and far distances neither."""
    slopes, far = alibi_slopes(12), 3000
    bias = Mask(slopes=slopes).bias(1, far, dtype, torch.device("cpu"))
    exact = torch.tensor(slopes, dtype=torch.float64)[:, None, None] * torch.arange(1 - far, 1)
    assert bias.dtype is dtype and torch.equal(bias[0], exact.float().to(dtype))


def test_pairs_are_made_once_for_all_layers_and_again_when_none_has_them() -> None:
    """Recomputed layers ask in backward, long after the first have let go."""
    pairs = Pairs(DOCUMENTS, REAL)
    for _ in range(3):
        made = pairs.tensor()
        assert made is not None and pairs.tensor() is made
        alive = weakref.ref(made)
        del made
        assert alive() is None, "nothing holds a byte for every pair of every micro-batch"
    assert Pairs().tensor() is None and Pairs(real=REAL).tensor() is not None


@given(st.lists(st.lists(st.integers(0, 3), min_size=6, max_size=6), min_size=1, max_size=3))
def test_pairs_of_documents(rows: list[list[int]]) -> None:
    pairs = Pairs(torch.tensor(rows).t()).tensor()
    assert pairs is not None and pairs.shape == (len(rows), 1, 6, 6)
    for row, seen in zip(rows, pairs, strict=True):
        assert seen[0].tolist() == [[row[key] == row[query] for key in range(6)] for query in range(6)]


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_padding_that_does_not_see_itself_is_seen_by_nobody(documents: Tensor | None) -> None:
    seen, itself = Pairs(documents, REAL, padding_sees_itself=False).tensor(), Pairs(documents, REAL).tensor()
    assert seen is not None and itself is not None
    assert torch.equal(itself, seen | (torch.eye(LENGTH, dtype=torch.bool) & ~REAL.t()[:, None, :, None]))
    for sample, query, key in product(range(SAMPLES), range(LENGTH), range(LENGTH)):
        together = documents is None or bool(documents[query, sample] == documents[key, sample])
        assert bool(seen[sample, 0, query, key]) == (together and bool(REAL[key, sample]))


def test_slopes_have_the_digits_of_the_scores() -> None:
    """In fp32 a tenth is another number than in fp64."""
    bias = Mask(slopes=[0.1]).bias(1, 3, torch.float64, torch.device("cpu"))
    assert bias.flatten().tolist() == [0.1 * -2, 0.1 * -1, 0.0]
