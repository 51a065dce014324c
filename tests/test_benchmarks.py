"""Training speed: what is timed trains as every contestant does. Cleaning: what is computed of a large run."""

import sys
import time
from argparse import Namespace
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import pytest
import torch

from benchmarks import (
    compiled_functions,
    curves,
    kernel_pairs,
    packed_weights,
    speed_table,
    start_up,
    step_parts,
    train_speed,
    without_agreements,
)
from benchmarks import hardware as hardware_of_benchmarks
from benchmarks import limits as limits_of_benchmarks
from benchmarks.cleaning_page import Bulk, Cost, Whole, walls, whole
from benchmarks.colonnade_step import build_step
from benchmarks.pace import pace
from benchmarks.paper import measured
from benchmarks.paper.measured import Here, Took, gathered_at_need
from benchmarks.peers.reference import TINY, Task, read_task
from benchmarks.planner_time import VOCAB, case
from colonnade.config.schema import Config
from colonnade.launch import agreement
from colonnade.mesh.mesh import Axis
from colonnade.planner.estimate import estimate
from colonnade.planner.hardware import Hardware, hardware
from tests.distributed import run_on_ranks


def losses(rank: int, num_ranks: int) -> list[float]:
    step = build_step(Task(threads=1, steps=3, **TINY))
    return [step() for _ in range(6)]


def test_the_full_learning_rate_is_there_from_the_first_step() -> None:
    """Without a warm-up, as the others: a run whose loss does not fall is thrown out of the table."""
    (found,) = run_on_ranks(losses, 1)
    run = {"first_loss": found[0], "last_loss": found[-1]}
    assert not speed_table.failure(run), found


def test_another_checkout_is_no_peer() -> None:
    def run(name: str, speed: float) -> dict[str, object]:
        numbers = {"tokens_per_second": speed, "step_ms": 1.0, "cpu_ms": 1.0, "peak_rss_mb": [9], "others": 0.0}
        return {
            "row": "fp32-tp",
            "best_tokens_per_second": speed + 100.0 * (name == "colonnade"),
            "contestant": name,
            "peer": "colonnade 1",
            "first_loss": 6.0,
            "last_loss": 5.0,
            "note": "",
            **numbers,
        }

    table = speed_table.rows([run("colonnade", 300.0), run("before", 200.0)])
    assert "fp32-tp" not in speed_table.verdict(table)
    assert "| fp32-tp | 300 | 200 | **1.500** | 2.000 | 9 | 9 |" in speed_table.progress_made(table)


LIMITS = {
    "gflops_per_core": {"fp32": {"forward": {"blas": 60.0, "onednn": 120.0}, "attention": {"blas": 900.0}}},
    "memory_gb_per_second": 20.0,
    "flops_per_token": 1e8,
}


WEIGHTS = 50_304 * 384 + 256 * 384 + 6 * (12 * 384**2 + 13 * 384) + 2 * 384
"""Of the reference model."""


@pytest.mark.parametrize(
    ("row", "tokens", "cores", "bytes_each"),
    [
        ("fp32-one-1", 1024, 1, 28),
        ("fp32-one-2", 1024, 2, 28),
        ("fp32-tp", 1024, 2, 28),
        ("fp32-pp", 8 * 1024, 2, 28),
        ("fp32-dp", 2048, 2, 2 * 32),
        ("fp32-zero1", 2048, 2, 32),
        ("fp32-zero3", 2048, 2, 32),
    ],
)
def test_a_step_takes_its_products_and_the_bytes_of_its_update_at_least(
    row: str, tokens: int, cores: int, bytes_each: int
) -> None:
    """Both at the rates of the row's cores: 120 GFLOP/s of each, memory 10 or 15 GB/s."""
    limits = {
        **LIMITS,
        "gflops_per_core_together": LIMITS["gflops_per_core"],
        "best_memory_gb_per_second": {"one core": 10.0, "all cores": 15.0},
    }
    flops = 6 * tokens * (384 * 50_304 + 6 * 12 * 384**2 + 6 * 256 * 384)
    seconds = flops / 120e9 / cores + WEIGHTS * bytes_each / (10e9 if cores == 1 else 15e9)
    assert speed_table.least_of(row, limits) == pytest.approx(1e3 * seconds)


@pytest.mark.parametrize(
    ("operator", "shapes", "part"),
    [
        ("colonnade::product_", [[48, 16], [48, 32], [32, 16]], limits_of_benchmarks.LINEAR),
        ("colonnade::output_exponentials_", [[32, 16], [100, 16]], limits_of_benchmarks.OUTPUT),
        ("aten::exp_", [[32, 100]], limits_of_benchmarks.OUTPUT),
        ("aten::gelu_backward", [[8, 4, 48], [8, 4, 48]], step_parts.ACTIVATION),
        ("colonnade::norm_backward", [[16], [8, 4, 16]], step_parts.NORMS),
        ("aten::native_layer_norm", [[8, 4, 16], [16]], step_parts.NORMS),
        ("aten::fill_", [[1600]], step_parts.GRADIENTS),
        ("aten::linalg_vector_norm", [[25, 64]], step_parts.GRADIENTS),
        ("aten::add", [[8, 4, 16], [8, 4, 16]], step_parts.REST),
        ("aten::index", [[100, 16]], step_parts.REST),
    ],
)
def test_operators_are_sorted_into_the_parts_of_a_step(operator: str, shapes: step_parts.Shapes, part: str) -> None:
    assert step_parts.part_of(operator, shapes, vocab_size=100) == part


def test_what_lies_between_products_goes_through_memory_once() -> None:
    task = Task(
        dtype="bf16", num_layers=3, hidden_size=16, num_heads=4, micro_batch_size=4, seq_length=8, vocab_size=64
    )
    found = step_parts.bytes_of_the_rest(task)
    assert found[step_parts.ACTIVATION] == 3 * 5 * (32 * 64 * 2), (
        "read and written forward, twice read and once backward"
    )
    assert found[step_parts.NORMS] == 7 * 5 * (32 * 16 * 2), "two of a layer, and the last"
    assert found[step_parts.GRADIENTS] == 2 * 4 * (64 * 16 + 8 * 16 + 3 * (12 * 16 * 16 + 13 * 16) + 2 * 16)
    limit = {"gflops_per_core": {"bf16": {"forward": {"a": 1.0}}}, "best_memory_gb_per_second": {"one core": 2.0}}
    least = step_parts.least_ms(replace(task, threads=1), limit)
    assert step_parts.REST not in least
    assert least[step_parts.NORMS] == pytest.approx(found[step_parts.NORMS] / 2e6)
    assert least[limits_of_benchmarks.LINEAR] == pytest.approx(6 * 32 * 3 * 12 * 16 * 16 / 1e6)


def test_rates_of_cores_together_are_their_mean() -> None:
    """Of kernels that were not hopeless on some core."""
    one = {"forward": {"blas": 10.0, "onednn": 20.0}, "output": {"blas": 5.0}}
    other = {"forward": {"blas": 30.0}, "output": {"blas": 6.0}}
    assert limits_of_benchmarks._mean([one, other]) == {"forward": {"blas": 20.0}, "output": {"blas": 5.5}}


def test_results_that_are_older_than_the_roofline_have_none() -> None:
    assert speed_table.least_of("fp32-tp", LIMITS) is None and speed_table.least_of("fp32-tp", None) is None


def test_the_table_says_what_share_of_the_processor_each_has() -> None:
    """Two cores at 120 GFLOP/s are 2,400 tokens/s of 10⁸ operations each."""
    assert speed_table.limit_of("fp32-tp", LIMITS) == speed_table.limit_of("fp32-one-2", LIMITS) == 2400.0
    assert speed_table.limit_of("fp32-one-1", LIMITS) == 1200.0 and speed_table.limit_of("fp32-tp", None) is None
    line = {
        "name": "x",
        "low": 1.0,
        "high": 2.0,
        "fastest": 1900.0,
        "step_ms": 1.0,
        "cpu_ms": 1.0,
        "peak_mb": 9,
        "loss": "",
        "others": 0.0,
        "pace": 1.0,
    }
    contestants = {"x": {**line, "tokens_per_second": 1800.0, "note": ""}}
    each = {"fp32": {"forward": {"blas": 60.0, "onednn": 90.0}}}
    slower = {**LIMITS, "gflops_per_core_together": each}
    assert speed_table.limit_of("fp32-tp", slower) == 1800.0 and speed_table.limit_of("fp32-one-1", slower) == 1200.0
    assert "120 GFLOP/s of a core in fp32 (90 of each while all multiply)" in speed_table.can_do(slower)
    assert "| x | 1800 | 1 – 2 | 1900 | 75% | – | 1 |" in speed_table.lines(contestants, 2400.0)
    assert "| x | 1800 | 1 – 2 | 1900 | – | 86% | 1 |" in speed_table.lines(contestants, least=0.86)
    each = {"fp32": {"forward": {"blas": 60.0, "onednn": 90.0}}}
    slower = {**LIMITS, "gflops_per_core_together": each}
    assert speed_table.limit_of("fp32-tp", slower) == 1800.0 and speed_table.limit_of("fp32-one-1", slower) == 1200.0
    assert "120 GFLOP/s of a core in fp32 (90 of each while all multiply)" in speed_table.can_do(slower)
    assert "| x | 1800 | 1 – 2 | 1900 | – | – | 1 |" in speed_table.lines(contestants)
    assert "up to 120 GFLOP/s of a core in fp32 (120 of" in speed_table.can_do(LIMITS)
    assert "not measured" in speed_table.can_do(None), "results that are older"


def test_a_run_is_repeated_while_cores_are_slow_and_marked_where_they_stay_so(monkeypatch: pytest.MonkeyPatch) -> None:
    paces = iter([*[1.0] * 5, 1.0, 1.0, 0.5, 1.0, 1.0, 0.6, 1.2, 1.2, 0.6, 1.2, 1.2, 0.3, 0.9, 0.9])
    numbers = iter(range(9))
    monkeypatch.setattr(train_speed, "pace", lambda: next(paces))
    monkeypatch.setattr(train_speed, "run", lambda *_: {"tokens_per_second": 7.0, "peak_rss_mb": [next(numbers)]})
    line = Namespace(rows=["fp32-tp"], rounds=3, repeat=2, wait_for_quiet=0.0)
    found = list(train_speed.compare([train_speed.CONTESTANTS[0]], line))
    assert [(each["peak_rss_mb"], each["pace"]) for each in found] == [([0], 1.0), ([3], 1.0), ([6], 0.75)]
    losses = {"first_loss": 6.0, "last_loss": 5.0, "others": 0.0}
    marked = [speed_table.progress({**each, **losses}) for each in found]
    assert ["pace" in each for each in marked] == [False, False, True]


def test_a_comparison_with_dropout_is_of_those_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_speed.Contestant, "is_installed", lambda _: True)
    names = [contestant.name for contestant in train_speed.CONTESTANTS]
    line = Namespace(peer_python=[], contestants=names, before=None, dropout=0.1, steps=1, warmup=1, tiny=False)
    present, absent = train_speed.choose(line)
    assert {each.name for each in present} == {"colonnade", "plain", "compile", "plain-onednn", "compile-onednn"}
    assert "megatron: has no dropout here" in absent and len(present) + len(absent) == len(names)
    asked: list[list[str]] = []
    monkeypatch.setattr(train_speed, "_finish", lambda command, *_: (asked.append(command) or "", 1))  # type: ignore[func-returns-value]
    train_speed.run(present[0], train_speed.Row("bf16", "one", 1), line)
    monkeypatch.setattr(sys, "argv", ["step", *asked[0][3:]])
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    assert read_task()[0].dropout == 0.1
    present, _ = train_speed.choose(Namespace(**{**vars(line), "dropout": 0.0}))
    assert len(present) == len(names)


def test_the_pace_is_that_of_the_slowest_core() -> None:
    assert 0.0 < pace(0.02) < 1e9


def test_rows_in_which_a_peer_is_faster_are_marked() -> None:
    def told(ours: float) -> str:
        speeds = {"colonnade": ours, "plain": 100.0}
        lines = {
            name: {"name": name, "tokens_per_second": speed, "fastest": 3 * speed, "peak_mb": 9}
            for name, speed in speeds.items()
        }
        return speed_table.verdict({"r": lines})

    assert "| **0.90 slower** | 270 / 300 = 0.90 |" in told(90.0) and "| **1.10** | 330 / 300 = 1.10 |" in told(110.0)


@pytest.mark.slow
def test_weights_that_are_gathered_at_need_are_waited_for() -> None:
    """On GPUs, that is: CPU ranks copy them themselves, as soon as they are asked for."""
    config = case(2, 64, 32, parallel={"dp": 2, "zero": 3})

    def seconds(name: str, device: str) -> float:
        train = config.train.model_copy(update={"device": device})
        slow = hardware(name).having(island__bandwidth=1e8)
        return estimate(config.model_copy(update={"train": train}), VOCAB, slow).seconds_per_step

    ahead = seconds("cpu", "cpu"), seconds("a100-80gb", "cuda")
    with gathered_at_need():
        late = seconds("cpu", "cpu"), seconds("a100-80gb", "cuda")
    assert late[0] == pytest.approx(ahead[0]) and late[1] > 1.02 * ahead[1]
    assert seconds("a100-80gb", "cuda") == ahead[1], "nothing is left behind"


class Alike(Here):
    """A machine of two cores on which every step is planned to take a second and takes 1.25."""

    @cached_property
    def machine(self) -> Hardware:
        return replace(hardware("cpu"), cores=2)

    def seconds(self, config: Config) -> Took:
        return Took(1.0, 1.25)


def test_small_runs_stand_beside_what_was_planned_of_them() -> None:
    """Where all steps take as long."""
    strong = list(measured.strong_scaling(Alike()))
    assert strong[-4:] == ["| 1 | 1.00 | 1.00 | +0 % |", "| 2 | 1.00 | 1.00 | +0 % |", "| 4 | 1.00 | 1.00 | +0 % |", ""]
    weak = list(measured.weak_scaling(Alike()))
    assert "| 4, 256 | 1 × 2 | 100 % | 100 % | +0 |" in weak, "two copies, of twice the batch, on two cores"
    assert measured.cells(Took(0.7, 0.9), Took(1.0, 1.0)) == ("70 %", "90 %", "-20")
    assert any("| 12, 768 | +0 % | +0 % |" in row for row in measured.prefetch(Alike()))
    cut = list(measured.bloom(Alike()))
    assert cut[-5:-3] == ["| 1 × 1 × 1 | 100 % | 100 % | +0 |", "| 1 × 2 × 1 | 50 % | 50 % | +0 |"]
    assert cut[-2:] == ["| 2 × 2 × 2 | 100 % | 100 % | +0 |", ""], "two copies of the batch on two cores"


@pytest.mark.parametrize(
    ("flags", "name"),
    [("sse avx2", "amd-epyc-2cores-avx2"), ("avx2 avx512f avx512_bf16", "amd-epyc-2cores-avx512-bf16")],
)
def test_results_of_processors_of_one_name_stand_side_by_side(
    flags: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware_of_benchmarks, "_cpuinfo", {"flags": flags, "model name": "AMD EPYC"}.get)
    monkeypatch.setattr(hardware_of_benchmarks, "describe", lambda: {"cores": 2})
    assert hardware_of_benchmarks.machine_name() == name


def test_kernels_are_not_compared_with_a_folder_that_is_no_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python would find the installed package for both."""
    monkeypatch.setattr(sys, "argv", ["kernel_pairs", "--before", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        kernel_pairs.main()
    assert f"{tmp_path} has no src/colonnade" in capsys.readouterr().err


def test_storage_is_waited_for_by_nodes_for_bytes_and_by_tasks_for_metadata() -> None:
    many = Whole("match", 37_253, 2_048 * 10, read=192e3, written=64e3, operations=2_048 * 5e3, memory="")
    assert walls(many, storage=2.0, latency=0.5) == (10.0, 2.0, 2.5)
    assert walls(replace(many, tasks=37), storage=2.0, latency=0.5) == (
        pytest.approx(2_048 * 10 / 37),
        pytest.approx(128 / 37),
        pytest.approx(2_048 * 2.5 / 37),
    )


def test_what_bands_take_to_gather_is_that_of_large_sorts_and_files_what_they_took() -> None:
    """Runs of 10 ms for a file and 2 ms for a MB of text, of which 0.1 MB are bands, and 3 s for 100 MB of bands."""
    costs = [
        Cost("gather", size, 320, files, 0.01 * files + 0.002 * size, 0.1 * size, 0.2 * size, 70 * files, 9, 9, 9)
        for size, files in ((5.0, 5), (20.0, 2), (20.0, 5))
    ]
    found = whole("gather", costs, [], {"gather": Bulk(100.0, 3.0, 400.0)})
    assert (found.tasks, found.memory) == (583, "0.4 GB")
    assert found.seconds == pytest.approx(583 * 0.01 + 1e6 * 0.03)
    assert (found.read, found.written, found.operations) == pytest.approx((1e6, 2e6, 583 * 70))


def test_files_of_pairs_are_as_many_as_tasks_however_many_pairs_there_are() -> None:
    costs = [
        Cost("group", size, tasks, 1, 0.1, 0.004 * size, 0.0, 2 * tasks + 20, 9, 9, 9)
        for size, tasks in ((5.0, 300), (20.0, 330))
    ]
    found = whole("group", costs, [], {"group": Bulk(1.0, 0.5, 900.0)})
    assert found.operations == pytest.approx(2 * 37_253 + 20)
    assert (found.read, found.seconds) == pytest.approx((40_000, 20_000), rel=1e-3)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_weights_multiply_as_the_kernels_do(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((48, 64), (96, 64)))
    right = x.double() @ weight.double().t()
    found = {name: call() for name, call in packed_weights.ways(x, weight).items()}
    assert {"blas", "compiled", packed_weights.ONEDNN} <= found.keys()
    for name, y in found.items():
        assert y.dtype is dtype, name
        assert float((y.double() - right).norm() / right.norm()) < (1e-6 if dtype is torch.float32 else 3e-3), name


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [name for name in compiled_functions.FUNCTIONS if name != "AdamW"])
def test_functions_of_training_are_what_they_stand_beside(
    name: str, dtype: Literal["fp32", "bf16"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled by torch is what is plain."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    found = compiled_functions.FUNCTIONS[name](compiled_functions.Drawn(Task(dtype=dtype, **TINY)))
    y, dx, *_ = found.plain()
    for ours, plain in zip(found.ours(), (y, dx), strict=False):
        error = (ours.double() - plain.double()).norm() / plain.double().norm()
        assert float(error) < (1e-5 if dtype == "fp32" else 1e-2)


@pytest.mark.usefixtures("loaded")
def test_the_rule_of_adamw_that_torch_compiles_is_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function: function)
    monkeypatch.setattr(compiled_functions, "RATE", 1e-2)
    steps = []
    for way in ("plain", "by_torch", "ours"):
        torch.manual_seed(0)
        found = compiled_functions.update(compiled_functions.Drawn(Task(dtype="bf16", **TINY)))
        (weights,) = getattr(found, way)()
        steps.append(weights.clone())
    torch.manual_seed(0)
    begin = torch.randn_like(steps[0])
    for step in steps:
        assert float((step - steps[0]).norm() / (steps[0] - begin).norm()) < 1e-5 and not torch.equal(step, begin)


def test_runs_are_compared_step_by_step() -> None:
    def run(*losses: float) -> curves.Lines:
        lines: curves.Lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
        lines[-1]["validation_loss"] = losses[-1] + 1
        return lines

    runs = {"a": run(3.0, 2.0, 1.0), "b": run(3.0, 2.5, 0.75)}
    assert curves.differences(runs["b"], runs["a"], "loss") == [0.0, 0.5, -0.25]
    assert curves.table(runs, "loss", "a")[2:] == [
        "| a | – | – | – | 2.0000 |",
        "| b | 0.2500 | 0.5000 | 2 | 1.7500 |",
        "",
        "A step of a differs from the next by 1.000.",
    ]
    assert curves.numbers(runs, "loss")["b"] == {"loss": [3.0, 2.5, 0.75], "validation_loss": [1.75]}
    with pytest.raises(SystemExit, match="same steps"):
        curves.differences(runs["a"], run(1.0), "loss")


def test_only_lines_that_arrive_are_told(tmp_path: Path) -> None:
    """A run that goes on writes behind those that it has written."""
    file = tmp_path / "metrics.jsonl"
    file.write_text("{}\n" * 3)
    with start_up.Arrivals(file) as at, file.open("a") as stream:
        for number in (1, 2):
            stream.write("{}\n")
            stream.flush()
            end = time.monotonic() + 30
            while len(at) < number and time.monotonic() < end:
                time.sleep(0.001)
    assert len(at) == 2 and at[0] < at[1]


def test_ranks_that_trust_each_other_agree_on_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, other in without_agreements.LEFT_OUT:
        monkeypatch.setattr(module, name, getattr(module, name))
        assert callable(other) and getattr(module, name) is not other
    without_agreements.leave_out()
    assert all(getattr(module, name) is other for module, name, other in without_agreements.LEFT_OUT)
    assert agreement.on_all_ranks(lambda: 3, Axis("world", 2)) == 3
