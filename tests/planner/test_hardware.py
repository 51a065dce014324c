"""Machines from files: what is bundled has sources, and what is wrong is told at once."""

import time
from importlib import resources

import pytest
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from colonnade.errors import ConfigError
from colonnade.planner import measure_hardware
from colonnade.planner.hardware import FIGURES, hardware, names, parsed

GPUS = [name for name in names() if name != "cpu"]


def text(name: str) -> str:
    return (resources.files("colonnade.planner") / "machines" / f"{name}.toml").read_text()


def test_what_is_bundled() -> None:
    assert names() == ["a100-80gb", "cpu", "h100", "v100-dgx2h"]


@pytest.mark.parametrize("name", GPUS)
def test_every_figure_has_its_source(name: str) -> None:
    found = hardware(name)
    assert set(found.figures) == set(FIGURES) == set(found.sources)


def test_everything_that_is_wrong_is_told_at_once() -> None:
    bad = text("h100").replace("memory = 8e+10", "memory = -3").replace("half_depth = 64", 'half_dept = "x"')
    with pytest.raises(ConfigError) as error:
        parsed(bad, "mine.toml")
    message = str(error.value)
    assert "device.memory = -3 cannot be" in message
    assert "products.half_depth is missing" in message
    assert "products.half_dept is unknown: did you mean products.half_depth?" in message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("device = ", "no TOML file"),
        ('[device]\nkind = "tpu"', 'neither "cuda" nor "cpu"'),
        ("x = true", "x is unknown"),
    ],
)
def test_files_that_describe_no_machine(content: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parsed(content, "mine.toml")


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean a100-80gb"):
        hardware("a100")


def test_attention_is_measured_as_a_share_of_what_products_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that says a second for each call: the rate is what causal attention computes, forward and backward."""
    seconds = iter(range(1000))
    monkeypatch.setattr(measure_hardware, "_fastest", lambda call, repeat: (call(), float(next(seconds) + 1))[1])
    one = 2 * 2 * 4 * 128 * 128 * 64
    counted = sdpa_flop_count(*[measure_hardware.ATTENTION] * 3) + sdpa_backward_flop_count(
        *[measure_hardware.ATTENTION] * 4
    )
    assert measure_hardware._attention_rate() == counted / 2 == 3.5 * one


def test_one_core_is_timed_by_the_time_it_has_worked() -> None:
    slept = measure_hardware._fastest(lambda: time.sleep(0.02))
    assert slept < 0.01 <= measure_hardware._fastest(lambda: time.sleep(0.02), clock=time.perf_counter)
