"""The numbers that are read of activations: each counted once, however they are cut, and strange ones apart."""

import math

import pytest
import torch
from torch import Tensor

from colonnade.kernels.probe import Probe, nothing, summary, together

LIMIT = 100.0


def told(row: Tensor) -> list[float]:
    """Minimum, maximum, squares, zeros, non-finite, near the limit, count."""
    low, *rest = row.tolist()
    return [-low, *rest]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_ordinary_numbers(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, -2.0, 3.0], [0.0, 0.5, -0.25]], dtype=dtype)
    assert told(summary(x, LIMIT)) == pytest.approx([-2.0, 3.0, 13.3125, 2.0, 0.0, 0.0, 6.0], rel=1e-6)


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_counted_and_enters_nothing_else(strange: float) -> None:
    x = torch.tensor([strange, 0.0, -1.0, 2.0, strange])
    assert told(summary(x, LIMIT)) == pytest.approx([-1.0, 2.0, 5.0, 1.0, 2.0, 0.0, 5.0])


def test_values_near_the_largest_that_there_is() -> None:
    x = torch.tensor([-100.0, 99.0, 0.0, 200.0, math.inf])
    squares = 100.0**2 + 99.0**2 + 200.0**2
    assert told(summary(x, LIMIT)) == pytest.approx([-100.0, 200.0, squares, 1.0, 1.0, 2.0, 5.0])


def test_near_the_limit_is_within_a_factor_of_two_of_the_formats_largest_number() -> None:
    probe = Probe()
    probe.begin(torch.float16, {"stream"})
    probe.enter("blocks.0", object())
    probe.see("stream", torch.tensor([30_000.0, -40_000.0, 50_000.0]))
    *_, near, count = told(probe.rows["blocks.0", "stream"])
    assert (near, count) == (2.0, 3.0), "fp16 ends at 65,504"


@pytest.mark.parametrize("size", [1e16, 1e18, 1e19, 1e30])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_squares_that_fp32_does_not_hold(size: float, sign: float) -> None:
    row = told(summary(torch.tensor([3.0, 4.0] * 99) * sign * size, torch.finfo(torch.float32).max / 2))
    assert math.sqrt(row[2] / 99) == pytest.approx(5.0 * size)


def test_all_that_is_not_finite_and_nothing_at_all() -> None:
    row = told(summary(torch.tensor([math.nan, math.inf]), LIMIT))
    assert row[:2] == [math.inf, -math.inf] and row[2:] == [0.0, 0.0, 2.0, 0.0, 2.0]
    assert torch.equal(summary(torch.empty(0), LIMIT), nothing(torch.device("cpu")))


def test_parts_put_together_are_the_whole() -> None:
    x = torch.randn(7, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).relu()
    x[2, 5] = math.nan
    parts = nothing(x.device)
    for part in (x[:, :100], x[:3, 100:], x[3:, 100:]):
        parts = together(parts, summary(part, LIMIT))
    torch.testing.assert_close(parts, summary(x, LIMIT), rtol=1e-13, atol=0)


def test_a_unit_that_is_computed_again_is_read_once() -> None:
    probe, first, second = Probe(), object(), object()
    probe.begin(torch.float32, {"site"})
    for unit, inputs in (("a", first), ("a", second), ("b", first), ("a", first)):
        probe.enter(unit, inputs)
        probe.see("site", torch.ones(4))
    assert {key: row[-1].item() for key, row in probe.rows.items()} == {("a", "site"): 8.0, ("b", "site"): 4.0}


def test_nothing_is_read_before_or_after_a_measured_step() -> None:
    probe = Probe()
    probe.enter("a", object())
    assert not probe.reads("site")
    probe.see("site", torch.ones(4))
    probe.begin(torch.float32, {"site"})
    probe.enter("a", object())
    assert probe.reads("site")
    probe.end()
    probe.see("site", torch.ones(4))
    probe.enter("a", object())
    assert probe.rows == {} and not probe.reads("site")


def test_each_measured_step_is_read_anew() -> None:
    """Whatever is at the place in memory of what an earlier one was given."""
    probe, inputs = Probe(), object()
    for step in (1, 2):
        probe.begin(torch.float32, {"site"})
        assert probe.rows == {}
        probe.enter("a", inputs)
        probe.see("site", torch.full((3,), float(step)))
        assert told(probe.rows["a", "site"])[:2] == [step, step]
        probe.end()
        probe.enter("b", inputs)
        assert not probe.reads("site")


def test_only_chosen_sites_are_read() -> None:
    probe = Probe()
    probe.begin(torch.float32, {"site"})
    probe.enter("a", object())
    for site in ("site", "other"):
        probe.see(site, torch.ones(4))
    assert list(probe.rows) == [("a", "site")] and probe.reads("site") and not probe.reads("other")
