"""Machines from files: what is bundled has sources, and what is wrong is told at once."""

import math
import os
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from colonnade.errors import ConfigError
from colonnade.kernels import compiled
from colonnade.kernels.choice import Kernels, Products
from colonnade.mesh.mesh import Mesh
from colonnade.planner import measure_hardware, measure_operators
from colonnade.planner.hardware import FIGURES, hardware, names, parsed
from colonnade.planner.measure_operators import Roof, Timed, fitted, peak_of, timed
from colonnade.planner.operators import Recorder
from colonnade.planner.paper import walk
from colonnade.planner.stand_in import StandIn
from tests.parity.runs import Case, Way, configured

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


def test_what_is_no_number_is_in_no_range() -> None:
    with pytest.raises(ConfigError, match=r"device\.memory = nan cannot be"):
        parsed(text("h100").replace("memory = 8e+10", "memory = nan"), "mine.toml")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("device = ", "no TOML file"),
        ('[device]\nkind = "tpu"', 'neither "cuda" nor "cpu"'),
        ("x = true", "x is unknown"),
        (text("h100").replace("memory = 8e+10", "memory = true"), "device.memory = True is no number"),
        (text("h100").replace("[device]", "[device]\ncores = true"), "device.cores = True is no number of cores"),
        (text("h100").replace("[device]", "[device]\ncores = -1"), "device.cores = -1 is no number of cores"),
        (text("h100").replace("[device]", "[device]\ncores = 2.5"), r"device\.cores = 2\.5 is no number of cores"),
    ],
)
def test_files_that_describe_no_machine(content: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parsed(content, "mine.toml")


def test_a_file_may_leave_out_its_name_its_kind_and_its_cores() -> None:
    """A device of its own for each rank, named as the file; 0 cores says the same."""
    lines = [line for line in text("h100").splitlines() if not line.startswith(("name =", "kind =", "cores ="))]
    for cores in ("", "\ncores = 0"):
        found = parsed("\n".join(lines).replace("[device]", f"[device]{cores}"), "mine.toml")
        assert (found.name, found.kind, found.cores) == ("mine.toml", "cuda", 0)
        assert found.figures == hardware("h100").figures


def test_a_machine_may_have_many_cores() -> None:
    assert parsed(text("h100").replace("[device]", "[device]\ncores = 1024"), "mine.toml").cores == 1024


def test_a_file_that_cannot_be_read_is_one_message_with_its_whole_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text("h100"))
    assert hardware(str(file)).figures == hardware("h100").figures
    for content, words in ((b"name = '\xff'", "the file cannot be read"), (b"name", "is no TOML file")):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=words) as error:
            hardware(str(file))
        assert str(file) in str(error.value)
    with pytest.raises(ConfigError, match="there is no such file"):
        hardware(str(tmp_path))


def test_a_number_format_that_is_not_told_is_as_fast_as_fp32() -> None:
    found = hardware("h100")
    assert found.peak("bfloat16") == found["device.peak_flops.bfloat16"] != found["device.peak_flops.float32"]
    assert found.peak("int64") == found["device.peak_flops.float32"]


def test_operators_may_have_seconds_an_element() -> None:
    told = parsed(text("h100") + "\n[operators]\ngelu = 1e-9\n", "mine.toml")
    assert told.operators == {"gelu": 1e-9} and told.figures == hardware("h100").figures
    with pytest.raises(ConfigError, match=r"operators\.gelu = 3 cannot be"):
        parsed(text("h100") + "\n[operators]\ngelu = 3\n", "mine.toml")


def test_what_is_measured_stands_under_its_own_key() -> None:
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
    peaks = {short: 1e10 * number for number, short in enumerate(names.values(), 1)}
    figures: dict[str, Any] = {"memory": 1e9, "bandwidth": 2e9, "kernel": 1e-6, "dispatch": 2e-6, "together": 0.5}
    figures |= {"crowded": 0.25, "area": 64.0, "depth": 32.0, "attention": 0.75, "half_head": 16.0, "operators": ""}
    figures |= {"reading": 5e-8}
    figures |= {"beta": 3e9, "alpha": 3e-6, "call": 4e-6, "cores": 4, "name": '"mine"', "system": "s", "torch": "t"}
    told = parsed(measure_hardware._FILE.format(**peaks, **figures), "mine.toml")
    assert told.name == "mine"
    assert {name: told.peak(name) for name in names} == {name: peaks[short] for name, short in names.items()}
    assert [told[f"device.{key}"] for key in ("memory", "memory_bandwidth", "kernel_seconds", "dispatch_seconds")] == [
        1e9, 2e9, 1e-6, 2e-6,
    ]  # fmt: skip
    assert [told[f"device.{key}"] for key in ("together", "crowded")] == [0.5, 0.25]
    products = ("half_area", "half_depth", "attention", "half_head")
    assert [told[f"products.{key}"] for key in products] == [64.0, 32.0, 0.75, 16.0]
    assert told["host.token_seconds"] == 5e-8
    assert [told[f"island.{key}"] for key in ("bandwidth", "latency", "call")] == [3e9, 3e-6, 4e-6]


def test_reading_is_timed_by_the_tokens_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1e-11 < measure_hardware._reading() < 1e-5, "of this machine"
    batches = []

    def three_seconds(read: Callable[[], Any]) -> float:
        batches.append(read())
        return 3.0

    monkeypatch.setattr(measure_hardware, "fastest", three_seconds)
    assert measure_hardware._reading() == 3.0 / batches[0].tokens.numel()
    monkeypatch.setattr(measure_hardware, "LONG", 1000)
    assert measure_hardware._bandwidth() == 3 * 4000 / 3.0, "two vectors are read, and one is written"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not let a process choose its cores")
def test_ranks_are_crowded_on_the_cores_that_they_are_given() -> None:
    before = os.sched_getaffinity(0)
    with measure_hardware._on_cores(1):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before


def test_ranks_at_work_are_compared_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores that slow down by 1 % with each step, to less than half of their pace, change little."""
    now, pace = 0.0, 1.0

    def call(seconds: float) -> None:
        nonlocal now, pace
        now, pace = now + seconds * pace, 1.01 * pace

    monkeypatch.setattr(measure_hardware, "time", SimpleNamespace(perf_counter=lambda: now))
    found = measure_hardware._times_as_long(Mesh(), lambda: call(1.0), lambda: call(3.0), few=True)
    assert pace > 2 and found == pytest.approx(3.0, rel=0.1)


def test_collectives_are_timed_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of which a rank waits for the other: here a second for each number."""
    now = 0.0

    def wait(x: torch.Tensor, axis: Any) -> None:
        nonlocal now
        now += x.numel()

    for name in ("all_gather", "all_reduce"):
        monkeypatch.setattr(measure_hardware, name, wait)
    monkeypatch.setattr(measure_hardware, "time", SimpleNamespace(perf_counter=lambda: now))
    short, long = measure_hardware.SHORT, measure_hardware.LONG // 8
    assert measure_hardware._collectives(Mesh()) == [short / 2, short, long]


def test_the_roof_that_was_planted_is_found() -> None:
    planted = Roof(1e11, 2000.0, 16.0)
    sizes = [(m, n, k) for m in (64, 256, 1024) for n in (64, 512) for k in (16, 64, 1024)]
    exact = [Timed("forward", size, 0.0) for size in sizes]
    every = [each._replace(seconds=planted.seconds(each)) for each in exact]
    # the fastest of them is not at the peak: the fit is of a grid, by steps of a few per cent
    found = fitted(every)
    assert (found.half_area, found.half_depth) == (2000.0, 16.0)
    assert found.peak == pytest.approx(1e11, rel=0.05) and found.error(every) < 0.05 * len(every)
    assert peak_of([each._replace(seconds=each.seconds / 3) for each in every], planted) == pytest.approx(3e11)


def test_products_are_timed_by_what_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes as [m, k] times [k, n] of the three products of a layer with 8 tokens, 4 inputs and 16 outputs."""
    monkeypatch.setattr(measure_operators, "OUTSIDE", 0)
    found = timed(torch.float64, Products(), [(8, 4, 16)])
    assert [(each.use, each.size) for each in found] == [
        ("forward", (8, 16, 4)),
        ("input_gradient", (8, 4, 16)),
        ("weight_gradient", (16, 4, 8)),
    ]
    assert all(each.seconds > 0 for each in found)


def test_fp64_is_timed_as_it_is_multiplied_whatever_fp32_is_multiplied_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled kernels know no fp64."""
    monkeypatch.setattr(measure_operators, "OUTSIDE", 0)
    ours = Kernels(*["compiled"] * 4)
    assert len(timed(torch.float64, Products(ours, ours, ours), [(8, 4, 16)])) == 3
    monkeypatch.setattr(compiled, "product_", lambda *args, **kwargs: pytest.fail("by the compiled kernels"))
    with pytest.raises(pytest.fail.Exception, match="by the compiled kernels"):
        timed(torch.float32, Products(ours, ours, ours), [(8, 4, 16)])


def test_a_step_has_operators_by_the_names_that_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are torch's: one that is misspelt would be planned by its bytes alone."""
    monkeypatch.setattr(measure_operators, "ROWS", (4, 8))
    monkeypatch.setattr(measure_operators, "TIMES", 1)
    found = measure_operators.seconds_an_element()
    assert all(hasattr(torch.ops.aten, name.removesuffix("_tanh")) for name in found)
    config = configured(Case(drop=0.0), Way())
    config = config.model_copy(update={"model": config.model.model_copy(update={"activation": "gelu_tanh"})})
    names = {each.name for section in walk(config, 37, 0, device="cpu").sections for each in section.operators}
    assert {"gelu_tanh", "gelu_backward_tanh", "native_layer_norm_backward"} <= names & found.keys()


def test_what_is_timed_under_a_name_is_the_operator_that_a_step_has_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its variant: a backward of GELU's approximation is not that of GELU."""
    ran = []

    def run(call: Callable[[], Any], repeat: int) -> float:
        with Recorder(StandIn("cpu")) as recorder:
            call()
        ran.append([each.name for each in recorder.sections[0].operators])
        return 1.0

    monkeypatch.setattr(measure_operators, "fastest", run)
    names = measure_operators.seconds_an_element()
    assert set(names.values()) == {1.0 / math.prod(measure_operators.ROWS)}, "a second for all elements"
    assert len(ran) == len(names) and all(name in those for name, those in zip(names, ran, strict=True)), ran


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean a100-80gb"):
        hardware("a100")
    with pytest.raises(ConfigError, match="Did you mean v100-dgx2h"):
        hardware("v")
    with pytest.raises(ConfigError, match="Did you mean h100"):
        hardware("h10O")


def test_attention_is_measured_as_a_share_of_what_products_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that says a second for each call: the rate is what causal attention computes, forward and backward."""
    seconds = iter(range(1000))
    monkeypatch.setattr(measure_operators, "fastest", lambda call, repeat: (call(), float(next(seconds) + 1))[1])
    one, shape = 2 * 2 * 4 * 128 * 128 * 64, (*measure_operators.ATTENTION, 64)
    counted = sdpa_flop_count(*[shape] * 3) + sdpa_backward_flop_count(*[shape] * 4)
    assert measure_operators.attention_rate(64) == counted / 2 == 3.5 * one


@pytest.mark.parametrize(("rate", "half"), [(1e11, 0.0), (1e11, 24.0), (3e10, 500.0)])
def test_what_narrow_heads_reach_is_found(rate: float, half: float) -> None:
    rates = [rate * width / (width + half) for width in measure_operators.HEAD_DIMS]
    found = measure_operators.attention_of(*rates, 2e11)
    assert found == pytest.approx((rate, half), rel=1e-9, abs=1e-9)


def test_narrow_heads_that_seem_faster_are_as_fast() -> None:
    assert measure_operators.attention_of(2e10, 1e10, 1e11) == (1e10, 0.0)


@pytest.mark.parametrize("narrow", [4.5e10 / 3.5, 1e9])
def test_attention_is_no_faster_than_products(narrow: float) -> None:
    """Whatever narrow heads take; 1e9 is more than four times as slow, which no dimension explains."""
    rate, half = measure_operators.attention_of(narrow, 4.5e10, 1e11)
    assert rate == pytest.approx(1e11) and rate * 64 / (64 + half) == pytest.approx(4.5e10)


def test_attention_that_is_faster_than_products_is_as_fast() -> None:
    assert measure_operators.attention_of(1e10, 2e11, 1e11) == (2e11, 0.0)


def test_one_core_is_timed_by_the_time_it_has_worked() -> None:
    slept = measure_operators.fastest(lambda: time.sleep(0.02))
    assert slept < 0.01 <= measure_operators.fastest(lambda: time.sleep(0.02), clock=time.perf_counter)
