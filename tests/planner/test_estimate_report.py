"""An estimate in words and for JSON: each number in its place, with its unit."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.mesh.layout import Layout
from colonnade.pipeline.schedule import Action
from colonnade.planner.estimate import Estimate, Failures
from colonnade.planner.estimate_report import as_json, as_text, duration, in_words
from colonnade.planner.hardware import hardware

UNUSED: Any = None


def walked(rank: int, size: int, action: Action | None, launches: int, flops: int) -> Any:
    peak = SimpleNamespace(bytes=size, action=action)
    return SimpleNamespace(
        rank=rank, peak=peak, launches=launches, flops=flops, flops_by_operator=lambda: {"mm": flops - 1}
    )


FIGURES: dict[str, Any] = {
    "seconds_per_step": 2.0,
    "tokens_per_step": 1000,
    "flops_per_token": 1e12,
    "peak": 312.5e12,
    "steps": 44,
    "tokens": 40_000,
    "failures": Failures(between=7200.0, interval=600.0, best=300, lost=0.2),
}
"""500 tokens/s, of 40,000 in all."""


def made(walks: Mapping[int, Any]) -> Estimate:
    """Of eight ranks: 500 tokens/s, of 40,000 in all; a third of the time is lost to failures."""
    return Estimate(
        hardware=hardware("a100-80gb").having(device__memory=8e10, cost__device_hour=3600),
        layout=Layout(tp=2, pp=2, dp=2),
        **FIGURES,
        spent={"products": 1.5, "ep": 0.5},
        stall=0.3,
        ranks=None,
        walks=walks,
        played=UNUSED,
        simulation=UNUSED,
    )


WALKS = {0: walked(1, 3 * 10**9, Action("B", 2), 70, 900), 1: walked(4, 5 * 10**9, None, 80, 1000)}


def test_each_line_has_the_numbers_that_it_names() -> None:
    first, _, memory, step, times, run, failures, whole, _, *shares = as_text(made(WALKS)).splitlines()
    assert first == "on A100 80GB SXM, 8 ranks:"
    assert memory.split("fits: ")[1].startswith("5.00 GB of 80.0 GB of a device, 75.0 GB are left")
    assert step.split("step     ")[1] == "2.0 s, 500 tokens/s, MFU 20.0% of 312.5 TFLOP/s"
    assert times == "  times    worked out from the figures of its file, published or assumed ([sources]), not measured"
    assert run.split("run      ")[1] == "44 steps, 40,000 tokens: 80.0 s"
    assert failures.split("failures ")[1] == (
        "one every 2.0 hours, 20.0% of the time is lost; a checkpoint every 10.0 minutes is best: "
        "checkpoint.every = 300"
    )
    assert whole.split("in all   ")[1] == "100.0 s, $800 at $3600 a device and hour"
    assert [line.strip() for line in shares] == ["75.0%  matrix products", "25.0%  collectives over ep"]


def test_of_a_cpu_whose_figures_are_measured_nothing_is_said_of_where_times_are_from() -> None:
    of_cpu, of_gpu = (as_text(replace(made(WALKS), hardware=hardware(name))) for name in ("cpu", "h100"))
    assert "  times  " in of_gpu and "  times  " not in of_cpu


def test_json_has_each_number_by_its_name_and_each_walk() -> None:
    told = as_json(made(WALKS))
    expected = {"num_ranks": 8, "fits": True, "memory_bytes": 5 * 10**9, "room_bytes": 75 * 10**9, "steps": 44}
    expected |= {"hardware": "A100 80GB SXM", "bound_by": "products", "spent": {"products": 1.5, "ep": 0.5}}
    assert {name: told[name] for name in expected} == expected
    expected = {"seconds_per_step": 2.0, "tokens_per_second": 500.0, "flops_per_token": 1e12, "mfu": 0.2}
    assert {name: told[name] for name in expected} == pytest.approx(expected)
    assert (told["days"], told["days_with_failures"]) == pytest.approx((80 / 86400, 100 / 86400))
    assert told["dollars"] == pytest.approx(800)
    assert told["failures"] == {
        "seconds_between": 7200.0, "checkpoint_interval": 600.0, "best_checkpoint_every": 300, "lost": 0.2,
    }  # fmt: skip
    assert told["walks"] == [
        {
            "stage": stage,
            "rank": rank,
            "peak_bytes": size,
            "peak_at": place,
            "launches": launches,
            "flops": flops,
            "flops_by_operator": {"mm": flops - 1},
        }
        for stage, rank, size, place, launches, flops in (
            (0, 1, 3 * 10**9, "B2", 70, 900),
            (1, 4, 5 * 10**9, "behind the schedule", 80, 1000),
        )
    ]


def test_a_run_that_never_ends_is_told_as_one() -> None:
    never = replace(made(WALKS), failures=Failures(between=7200.0, interval=600.0, best=300, lost=1.0))
    assert "in all   for ever, $inf" in as_text(never)


@pytest.mark.parametrize(
    ("seconds", "words"), [(119.9, "119.9 s"), (120, "2.0 minutes"), (7199, "120.0 minutes"), (172_800, "2.0 days")]
)
def test_a_unit_is_used_from_two_of_it_on(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_whatever_time_goes_to_is_told_in_words_of_its_own() -> None:
    """But for axes, along which there are collectives."""
    spent = ("products", "memory", "launches", "optimizer", "pipeline", "checkpoints", "data")
    words = {what: in_words(what) for what in spent}
    assert len(set(words.values())) == len(spent) and not any("collectives" in each for each in words.values())
    assert all(in_words(axis).startswith(f"collectives over {axis}") for axis in ("tp", "dp", "pp", "ends", "world"))
