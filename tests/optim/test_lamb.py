"""LAMB against the paper's algorithm written out on whole tensors, whole and in slices cut anywhere."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from colonnade.optim.lamb import Lamb
from colonnade.optim.param_slice import ParamSlice, State, state_at

BETA1, BETA2, EPSILON, DECAY = 0.8, 0.95, 1e-6, 0.1
RATES = [1e-2, 3e-2, 2e-2, 1e-2, 5e-3, 0.0]
SHAPES = [(7, 5), (3, 4), (6,), (5, 9), (4,)]
RULE = Lamb(BETA1, BETA2, EPSILON, DECAY)


def starts(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in SHAPES]


def gradients(step: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    sizes = [1.0, 1e-6, 10.0, 1e3, 1e-3]
    drawn = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in SHAPES]
    return [(g * size).to(dtype) for g, size in zip(drawn, sizes, strict=True)]


def paper_step(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, rate: float, *, matrix: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2 of arXiv 1904.00962, line by line, on one whole weight."""
    m = BETA1 * m + (1 - BETA1) * g
    v = BETA2 * v + (1 - BETA2) * g**2
    m_hat, v_hat = m / (1 - BETA1**t), v / (1 - BETA2**t)
    r = m_hat / (v_hat.sqrt() + EPSILON)
    if not matrix:
        return w - rate * r, m, v
    u = r + DECAY * w
    ratio = w.norm() / u.norm() if w.norm() > 0 and u.norm() > 0 else 1.0
    return w - rate * ratio * u, m, v


def paper(factor: float = 1.0) -> list[Tensor]:
    weights = starts()
    state = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights]
    for t, rate in enumerate(RATES, start=1):
        for i, g in enumerate(gradients(t)):
            w, m, v = paper_step(weights[i], g * factor, *state[i], t, rate, matrix=g.ndim > 1)
            weights[i], state[i] = w, (m, v)
    return weights


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


BOUNDS = [0, *torch.tensor([w.numel() for w in starts()]).cumsum(0).tolist()]
TOTAL = BOUNDS[-1]


def slices(w: Tensor, g: Tensor, state: State, first: int, stop: int, counted: bool = True) -> list[ParamSlice]:
    """What of the buffers lies in first … stop: matrices 0 and 1 are one slice, so are 3 alone and the biases."""
    found = []
    for numbers in ([0, 1], [2], [3], [4]):
        start, end = max(first, BOUNDS[numbers[0]]), min(stop, BOUNDS[numbers[-1] + 1])
        if start >= end:
            continue
        here = slice(start, end)
        cut = [(n, max(start, BOUNDS[n]) - start, min(end, BOUNDS[n + 1]) - start) for n in numbers]
        ranges = [(n, slice(a, b)) for n, a, b in cut if a < b]
        found.append(ParamSlice(w[here], g[here], state_at(state, here), len(SHAPES[numbers[0]]) > 1, counted, ranges))
    return found


def ours(
    cuts: Sequence[int] = (), *, dtype: torch.dtype = torch.float64, factor: float = 1.0, copies: int = 1
) -> Tensor:
    """The same steps, each slice between two cuts on its own rank, and on `copies` of them, of which one counts."""
    w = flat(starts(dtype))
    ranges = list(pairwise([0, *sorted(cuts), TOTAL]))
    state = RULE.init(w)
    for step, rate in enumerate(RATES, start=1):
        g = flat(gradients(step, dtype))
        seen: list[Tensor] = []

        def update(
            mine: list[ParamSlice], total: Callable[[Tensor], Tensor], step: int = step, rate: float = rate
        ) -> None:
            RULE.update_(
                mine,
                step=step,
                learning_rate=rate,
                factor=torch.tensor(factor, dtype=torch.float64),
                num_weights=len(SHAPES),
                total=total,
            )

        def listen(mine: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(mine.clone())
            return mine

        for first, stop in ranges:  # once to hear what every rank adds to the total
            for copy in range(copies):
                throwaway = {name: kept.clone() for name, kept in state.items()}
                update(slices(w.clone(), g.clone(), throwaway, first, stop, counted=copy == 0), listen)
        for first, stop in ranges:
            update(slices(w, g, state, first, stop), lambda mine, seen=seen: torch.stack(seen).sum(0))
    return w


def test_the_change_of_every_weight_is_watched() -> None:
    """Of biases and norms too, which Adam's rule changes."""
    w, g = flat(starts()), flat(gradients(1))
    mine, before, seen = slices(w, g, RULE.init(w), 0, TOTAL), w.clone(), torch.zeros(TOTAL)

    @contextmanager
    def watch(params: ParamSlice) -> Iterator[None]:
        first = params.weights.storage_offset()
        at = slice(first, first + len(params.weights))
        assert torch.equal(params.weights, before[at]), "entered before the change"
        yield
        seen[at] += (params.weights != before[at]).float()

    factor = torch.tensor(1.0, dtype=torch.float64)
    RULE.update_(
        mine, step=1, learning_rate=0.1, factor=factor, num_weights=len(SHAPES), total=lambda own: own, watch=watch
    )
    assert seen.tolist() == [1.0] * TOTAL


def test_whole_weights_are_updated_as_in_the_paper() -> None:
    torch.testing.assert_close(ours(), flat(paper()), rtol=1e-13, atol=1e-15)


def test_float32_follows_to_its_rounding() -> None:
    torch.testing.assert_close(ours(dtype=torch.float32).double(), flat(paper()), rtol=3e-6, atol=1e-6)


def test_the_factor_multiplies_gradients() -> None:
    torch.testing.assert_close(ours(factor=0.037), flat(paper(factor=0.037)), rtol=1e-13, atol=1e-15)
    assert not torch.allclose(ours(factor=0.037), ours())


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, TOTAL), max_size=6))
def test_slices_cut_anywhere_are_updated_as_the_whole(cuts: list[int]) -> None:
    torch.testing.assert_close(ours(cuts), ours(), rtol=1e-12, atol=1e-14)


def test_several_ranks_may_hold_the_same_slice() -> None:
    torch.testing.assert_close(ours([40, 80], copies=3), ours(), rtol=1e-12, atol=1e-14)


def test_what_is_not_counted_adds_nothing_to_the_total() -> None:
    def total(squares: Tensor) -> Tensor:
        assert not squares.any()
        return squares + 1.0

    w = flat(starts())
    mine = slices(w, flat(gradients(1)), RULE.init(w), 0, TOTAL, counted=False)
    RULE.update_(mine, step=1, learning_rate=0.1, factor=torch.ones(()), num_weights=len(SHAPES), total=total)


def test_what_another_rank_counts_is_updated_as_there() -> None:
    """Or what ranks have alike would be alike no longer."""
    found = []
    for counted in (True, False):
        w = flat(starts())
        state = RULE.init(w)
        for step in (1, 2):
            mine = slices(w, flat(gradients(step)), state, 0, TOTAL, counted=counted)
            RULE.update_(
                mine, step=step, learning_rate=0.1, factor=torch.full((), 0.5), num_weights=len(SHAPES),
                total=lambda own: torch.full_like(own, 3.0),
            )  # fmt: skip
        found.append([w, *state.values()])
    assert all(torch.equal(mine, theirs) and mine.all() for mine, theirs in zip(*found, strict=True))


def step_once(
    w: Tensor,
    g: Tensor,
    *,
    decayed: bool = True,
    rule: Lamb = RULE,
    rate: float = 0.1,
    factors: tuple[float, float] = (1.0, 1.0),
) -> Tensor:
    """The weight after step 1; `factors`: its own on the learning rate and on weight decay."""
    w, (of_rate, of_decay), ranges = w.clone(), factors, [(0, slice(0, len(w)))]
    params = ParamSlice(w, g.clone(), RULE.init(w), decayed, True, ranges, of_rate, of_decay)
    rule.update_(
        [params], step=1, learning_rate=rate, factor=torch.ones(()), num_weights=1, total=lambda squares: squares
    )
    return w


def test_a_step_is_as_long_as_the_rate_times_the_weight() -> None:
    for size in (1e-3, 1.0, 1e4):
        w = torch.randn(50, dtype=torch.float64) * size
        step = step_once(w, torch.randn(50, dtype=torch.float64)) - w
        torch.testing.assert_close(step.norm(), 0.1 * w.norm(), rtol=1e-12, atol=0)


def test_the_ratio_is_one_where_a_norm_is_zero() -> None:
    ones, zeros = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    torch.testing.assert_close(step_once(zeros, ones), -0.1 * ones / (1 + EPSILON))
    assert torch.equal(step_once(zeros, zeros), zeros)
    plain = Lamb(BETA1, BETA2, EPSILON, 0.0)
    assert torch.equal(step_once(100 * ones, zeros, rule=plain), 100 * ones)


def test_undecayed_weights_follow_adam() -> None:
    w, g = torch.randn(2, 30, dtype=torch.float64)
    torch.testing.assert_close(step_once(w, g, decayed=False), w - 0.1 * g / (g.abs() + EPSILON), rtol=1e-12, atol=0)


@pytest.mark.parametrize("decayed", [True, False])
def test_a_weight_may_have_factors_on_the_rate_and_on_its_decay(decayed: bool) -> None:
    """A matrix, whose step has a trust ratio, as well as a bias."""
    w, g = torch.randn(2, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    step, longer = (step_once(w, g, decayed=decayed, factors=(factor, 1.0)) - w for factor in (1.0, 3.0))
    torch.testing.assert_close(longer, 3.0 * step, rtol=1e-12, atol=1e-14)
    expected = step_once(w, g, decayed=decayed, rule=Lamb(BETA1, BETA2, EPSILON, 2.0 * DECAY))
    found = step_once(w, g, decayed=decayed, factors=(1.0, 2.0))
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


def test_padding_stays_zero() -> None:
    w, g = torch.zeros(16, dtype=torch.float64), torch.zeros(16, dtype=torch.float64)
    w[:5], g[:5] = 1.0, 2.0
    params = ParamSlice(w, g, RULE.init(w), True, ranges=[(0, slice(0, 5))])
    RULE.update_([params], step=1, learning_rate=0.1, factor=torch.ones(()), num_weights=1, total=lambda x: x)
    assert torch.equal(w[5:], torch.zeros(11, dtype=torch.float64)) and (w[:5] < 1).all()


def test_every_rank_calls_the_total_once_whatever_it_holds() -> None:
    """Or the others would wait for it."""
    calls: list[tuple[int, ...]] = []

    def total(squares: Tensor) -> Tensor:
        calls.append(tuple(squares.shape))
        return squares

    RULE.update_([], step=1, learning_rate=0.1, factor=torch.ones(()), num_weights=3, total=total)
    assert calls == [(3, 2)]


@pytest.mark.slow
def test_norms_of_fp32_weights_do_not_depend_on_their_length() -> None:
    """The step is the rate times the weight to fp32's rounding, for a weight of a size at which fp32 sums stray."""
    w = torch.full((20_000_000,), 0.02)
    step = step_once(w, torch.ones(len(w))) - w
    torch.testing.assert_close(step, torch.full_like(w, -0.1 * 0.02), rtol=3e-6, atol=0)


def test_as_an_implementation_of_others() -> None:
    timm = pytest.importorskip("timm.optim", reason="timm is not installed")
    weights = [torch.nn.Parameter(w) for w in starts()]
    matrices = [w for w in weights if w.ndim > 1]
    rest = [w for w in weights if w.ndim == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": rest, "weight_decay": 0.0}]
    theirs = timm.Lamb(groups, lr=1.0, betas=(BETA1, BETA2), eps=EPSILON, max_grad_norm=None)
    for t, rate in enumerate(RATES, start=1):
        for group in theirs.param_groups:
            group["lr"] = rate
        for w, g in zip(weights, gradients(t), strict=True):
            w.grad = g
        theirs.step()
    torch.testing.assert_close(ours(), flat([w.detach() for w in weights]), rtol=1e-12, atol=1e-14)


def test_new_weights_are_rounded_where_layers_read_them() -> None:
    """Of matrices and of vectors."""
    weights, gradient = flat(starts(torch.float32)), flat(gradients(1, torch.float32))
    state, rounded = RULE.init(weights), torch.zeros(len(weights), dtype=torch.bfloat16)
    slices = [
        ParamSlice(
            weights[at], gradient[at], state_at(state, at), decayed, ranges=[(number, slice(0, at.stop - at.start))],
            copied_to=rounded[at],
        )
        for number, (at, decayed) in enumerate(((slice(0, 35), True), (slice(35, len(weights)), False)))
    ]  # fmt: skip
    RULE.update_(slices, step=1, learning_rate=1e-2, factor=torch.ones(()), num_weights=2, total=lambda sums: sums)
    assert torch.equal(rounded, weights.bfloat16()) and not torch.equal(weights, flat(starts(torch.float32)))
