"""`colonnade plan` as a user meets it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade import cli, cli_plan
from colonnade.config.load import load
from colonnade.errors import LayoutError
from colonnade.planner import measure, measure_hardware, measure_operators
from colonnade.planner.hardware import Hardware, hardware
from colonnade.planner.measure_operators import SIZES
from colonnade.planner.search import Search
from colonnade.train.products import LARGEST

CONFIG = """\
model = { num_layers = 6, hidden_size = 64, num_heads = 4, seq_length = 64, vocab_size = 256 }
parallel = { pp = 4 }
data = { train = "none" }
train = { steps = 10, global_batch_size = 16, micro_batch_size = 2 }
optim = { learning_rate = 1e-3 }
run = { folder = "none" }
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(CONFIG)
    return str(path)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, command: str = "plan") -> int:
    """The exit status of `colonnade command arguments`, in this process."""
    monkeypatch.setattr(sys, "argv", ["colonnade", command, *arguments])
    with pytest.raises(SystemExit) as status:
        cli.main()
    assert isinstance(status.value.code, int)
    return status.value.code


def test_it_prints_the_partition_and_the_picture(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "pictures" / "schedule.svg"
    assert run(monkeypatch, config, "--draw", "--output", str(output)) == 0
    printed = capsys.readouterr().out
    assert printed.split("\n", 1)[1].startswith("1f1b: 4 stages, 8 micro-batches a step\n")
    assert "blocks 5, head" in printed and "stage 3 │" in printed
    assert " parameters on 4 ranks (pp4 dp1 tp1)\n" in printed and "traffic of a rank in a step" in printed
    assert output.read_text().startswith("<svg")


def test_without_draw_there_is_no_picture(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, config) == 0
    assert "│" not in capsys.readouterr().out


def test_json_is_one_object_and_nothing_else(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["parallel.schedule=interleaved", "parallel.virtual_stages=2"]
    assert run(monkeypatch, config, *overrides, "--draw", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schedule"], found["virtual_stages"], found["num_microbatches"]) == ("interleaved", 2, 8)
    assert found["precision"] == "bf16"
    assert [len(stage["chunks"]) for stage in found["stages"]] == [2, 2, 2, 2]
    assert found["num_ranks"] == sum(kind["num_ranks"] for kind in found["ranks"]) == 4
    assert all(kind["memory"]["total"] > kind["memory"]["parameters"] > 0 for kind in found["ranks"])
    assert all({flow["axis"] for flow in kind["traffic"]} >= {"pp"} for kind in found["ranks"])


def test_copies_make_up_the_ranks_that_are_asked_for_whatever_the_file_has(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(config).write_text(CONFIG.replace("pp = 4", "pp = 2, dp = 2"))
    for replaced in ([], ["parallel.tp=2"], ["parallel.pp=4"]):
        assert run(monkeypatch, config, *replaced, "--ranks", "8", "--json") == 0
        assert json.loads(capsys.readouterr().out)["num_ranks"] == 8


def test_of_a_machine_of_cpus_a_run_on_cpus_is_planned(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In fp32, and with a CPU's memory, as if train.device said so: as it does of what the search writes."""

    def planned(*keys: str) -> dict[str, Any]:
        assert run(monkeypatch, config, *keys, "--hardware", "cpu", "--json") == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    assert planned() == planned("train.device=cpu") != planned("train.precision=bf16")
    best = tmp_path / "best.toml"
    few = ("parallel.pp=2", "train.global_batch_size=2", "train.micro_batch_size=1")  # layouts to choose from
    assert run(monkeypatch, config, *few, "--search", "--hardware", "cpu", "--output", str(best)) == 0
    assert (load(best).train.device, load(best).train.precision) == ("cpu", "fp32")
    printed = capsys.readouterr().out
    assert printed.startswith("precision: fp32, as on CPUs (train.precision is not set)\n")
    tried = re.search(r"^(\d+) layouts on .*: (\d+) fit into", printed, flags=re.M)
    assert tried is not None and int(tried[2]) > 1
    assert run(monkeypatch, config, "train.device=cpu", "--hardware", "a100-80gb") == 2
    assert 'train.device = "cpu", and --hardware a100-80gb computes on "cuda"' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "bf16, as on GPUs (train.precision is not set; with train.device=cpu: fp32)"),
        (("train.device=cpu",), "fp32, as on CPUs (train.precision is not set)"),
        (("train.precision=fp16",), "fp16"),
        (("--hardware", "cpu"), "fp32, as on CPUs (train.precision is not set)"),
        (("--hardware", "a100-80gb"), "bf16, as on GPUs (train.precision is not set)"),
    ],
)
def test_the_number_format_is_said_with_what_has_settled_it(
    overrides: tuple[str, ...],
    said: str,
    config: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On the page too; a run on this machine may have another."""
    page, small = tmp_path / "plan.html", ("parallel.pp=1", "model.num_layers=1", "train.global_batch_size=2")
    assert run(monkeypatch, config, *small, *overrides, "--html", str(page)) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"precision: {said}"
    assert f" · {said}" in page.read_text()


def test_a_run_that_is_there_settles_the_number_format(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text("train = { precision = 'fp32' }\n")
    (folder / "metrics.jsonl").write_text("{}\n")
    assert run(monkeypatch, config, f"run.folder={folder}", "parallel.pp=1", "model.num_layers=1") == 0
    said = f"precision: fp32, as the run in {folder} has it (train.precision is not set)"
    assert capsys.readouterr().out.splitlines()[0] == said


def test_a_configuration_may_come_through_a_pipe(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is read once, however often the configuration is completed."""
    reader, writer = os.pipe()
    os.write(writer, Path(config).read_bytes())
    os.close(writer)
    try:
        assert run(monkeypatch, f"/dev/fd/{reader}", "--hardware", "cpu", "--ranks", "4") == 0
    finally:
        os.close(reader)
    assert "10 steps, 10,240 tokens" in capsys.readouterr().out


def test_tokens_of_a_run_are_those_of_its_curriculum(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 10 steps 8 of 2 × 32 tokens, then 2 of 16 × 64; as long as so many tokens take at the end."""
    grows = ["curriculum.tokens=[0, 500]", "curriculum.seq_length=[32, 64]", "curriculum.global_batch_size=[2, 16]"]
    days = []
    for keys, tokens in (([], "10,240 tokens"), (grows, "2,560 tokens")):
        assert run(monkeypatch, config, *keys, "--hardware", "a100-80gb") == 0
        assert f"10 steps, {tokens}: " in capsys.readouterr().out
        assert run(monkeypatch, config, *keys, "--hardware", "a100-80gb", "--json") == 0
        days.append(json.loads(capsys.readouterr().out)["estimate"]["days"])
    assert days[1] == pytest.approx(days[0] / 4, rel=1e-12)


def test_the_vocabulary_has_to_be_known(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(config).write_text(CONFIG.replace(", vocab_size = 256", ""))
    assert run(monkeypatch, config) == cli.USER_MISTAKE
    answer = capsys.readouterr()
    assert answer.out == ""
    assert "neither model.vocab_size nor data.tokenizer is set" in answer.err


def test_the_memory_of_a_device_is_in_gb(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[float] = []

    def search(_: object, __: object, machine: Hardware, *___: object, **____: object) -> None:
        asked.append(machine["device.memory"])
        raise LayoutError("no layout")

    monkeypatch.setattr("colonnade.planner.search.search", search)
    for memory in ([], ["--memory", "141"]):
        assert run(monkeypatch, config, "--search", "--hardware", "h100", *memory) == cli.USER_MISTAKE
        assert "no layout" in capsys.readouterr().err
    assert asked == [hardware("h100")["device.memory"], 141_000_000_000]


@pytest.mark.parametrize("options", [[], ["--search", "--ranks", "1"]], ids=["a plan", "a search"])
def test_what_is_given_stands_for_the_memory_of_a_device(
    config: str, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["parallel.pp=1", "model.num_layers=1", "train.global_batch_size=2", "--hardware", "h100", *options]
    assert run(monkeypatch, config, *small, "--memory", "141") == 0
    assert " of 141 GB of a device, " in capsys.readouterr().out
    assert run(monkeypatch, config, *small, "--memory", "141", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    found = (told["best"] if options else told)["estimate"]
    assert found["fits"] and found["room_bytes"] + found["memory_bytes"] == 141_000_000_000


def test_one_layout_is_held_against_the_memory_that_is_given(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, config, "--hardware", "h100", "--memory", "0.0001") == 0
    assert " more than the 100 kB of a device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("quiet", "lines"),
    [
        (
            False,
            [
                "8 layouts so far, 0 fit",
                "13 layouts so far, 0 fit",
                "0 of the fastest planned on the real program so far",
                "2 of the fastest planned on the real program so far",
            ],
        ),
        (True, []),
    ],
)
def test_a_long_search_says_now_and_then_how_far_it_is(
    quiet: bool, lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every ten seconds, of layouts that take two each, and of finalists that take six."""
    now = 0.0
    monkeypatch.setattr(cli_plan, "time", SimpleNamespace(monotonic=lambda: now))
    told = cli_plan._Progress(quiet)
    for tried in range(4, 17):
        now += 2.0
        told.tried(Search(1.0, tried=tried))
    for looked_at in range(3):
        now += 6.0
        told.planned(looked_at)
    answer = capsys.readouterr()
    assert (answer.out, answer.err.splitlines()) == ("", lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["parallel.pp=9"], "8 units"),
        (["--ranks", "3"], "--ranks 3 is no multiple of parallel.tp × parallel.pp = 1 × 4. Use 4, or other sizes"),
        (["parallel.dp=2", "--ranks", "9"], "= 1 × 4. Use 8 or 12, or other sizes"),
        (["--output", "schedule.png"], "what is written is .svg. Use a name that ends so"),
        (["parallel.cuts=[4,4]", "parallel.pp=2", "parallel.cuts=[4,3]"], "sums to 7"),
        (["--memory", "80"], "--memory stands for a device's memory. Name the device too: --hardware a100-80gb"),
        (["--keep", "parallel.tp"], "--keep holds a search to keys of the configuration. Give --search too"),
        (
            ["--hardware", "h100", "--search", "--keep", "tp"],
            "--keep tp is no key that a search can leave as it is set. Use one of parallel.tp, ",
        ),
        (["--hardware", "h100", "--search", "--memory", "-1"], "--memory -1 is no size"),
        (["--hardware", "h100", "--search", "--memory", "nan"], "--memory nan is no size"),
        (["--hardware", "h100", "--search", "--memory", "inf"], "--memory inf is no size"),
        (["--hardware", "h100", "--search", "--draw"], "--draw draws the pipeline of one configuration"),
        (["--hardware", "h100", "--search", "--measure"], "--measure weighs the cuts of one configuration"),
        (["--check", "run"], "--check takes all from the run"),
        (["--check", "run", "--html", "plan.html"], "The page of a run is made by `colonnade report run`"),
    ],
)
def test_mistakes_are_one_message(
    config: str,
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(monkeypatch, config, *arguments) == cli.USER_MISTAKE
    assert words in capsys.readouterr().err


def test_epochs_of_data_that_are_not_here_are_planned_where_no_steps_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor are steps written that nobody knows."""
    config, best = tmp_path / "mine.toml", tmp_path / "best.toml"
    config.write_text(CONFIG.replace("steps = 10", "epochs = 2").replace("pp = 4", "pp = 1"))
    assert run(monkeypatch, str(config)) == 0
    capsys.readouterr()
    for options in ([], ["--search", "--output", str(best)]):
        assert run(monkeypatch, str(config), "--hardware", "cpu", *options) == cli.USER_MISTAKE
        said = capsys.readouterr().err
        assert "1 problem\n" in said and "no none.bin" in said and "set train.steps" in said and not best.exists()
    assert run(monkeypatch, str(config), "train.steps=7", "--hardware", "cpu") == 0
    assert "  run      7 steps" in capsys.readouterr().out


def test_cuts_are_weighed_by_times_of_what_is_trained(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Units that are frozen take a third of what others do."""

    def measured(*_: Any, architecture: Any) -> dict[str, float]:
        return {unit.name: 3.0 if unit.has_backward else 1.0 for unit in architecture.units}

    monkeypatch.setattr(measure, "measured", measured)
    keys = ["model.num_layers=7", "parallel.pp=2", 'parts.frozen=["embedding*", "blocks.[0-4].*"]']
    assert run(monkeypatch, config, "--measure", "--json", *keys) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["cuts_by_work"] == [6, 3]
    assert [stage["work_of_mean"] for stage in told["stages"]] == pytest.approx([4 / 7.5, 11 / 7.5])


@pytest.mark.parametrize(
    "option",
    [
        "--draw",
        "--measure",
        "--search",
        "--output=a.svg",
        "--hardware=h100",
        "--ranks=2",
        "--memory=80",
        "--keep=parallel.tp",
    ],
)
def test_a_check_of_a_run_takes_nothing_of_a_plan(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--check", "run", option) == cli.USER_MISTAKE
    assert "--check takes all from the run. Of the other options only --json goes with it" in capsys.readouterr().err


def test_what_is_written_replaces_neither_the_configuration_nor_the_machine(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = tmp_path / "machine.toml"
    machine.write_text("mine")
    for output in (config, str(machine)):
        assert run(monkeypatch, config, "--search", "--hardware", str(machine), "--output", output) == cli.USER_MISTAKE
        assert f"{output} is among what this command is given" in capsys.readouterr().err
    assert (machine.read_text(), Path(config).read_text()) == ("mine", CONFIG)


def test_what_is_frozen_is_less_work_of_its_stage(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shares = []
    for keys in ([], ['parts.frozen=["embedding*", "blocks.0.*"]']):
        assert run(monkeypatch, config, *keys, "--json") == 0
        shares.append([stage["work_of_mean"] for stage in json.loads(capsys.readouterr().out)["stages"]])
    whole, partly = shares
    assert partly[0] < 0.7 * whole[0] and all(one > other for one, other in zip(partly[1:], whole[1:], strict=True))


@pytest.mark.parametrize("options", [[], ["--search", "--ranks", "1"]], ids=["a plan", "a search"])
def test_json_is_one_object_where_there_is_a_page_too(
    config: str,
    tmp_path: Path,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "plan.html"
    small = ["parallel.pp=1", "model.num_layers=1", "train.global_batch_size=2", "--hardware", "cpu"]
    assert run(monkeypatch, config, *small, *options, "--html", str(page), "--json") == 0
    assert isinstance(json.loads(capsys.readouterr().out), dict) and page.read_text().startswith("<!doctype html>")


def test_the_drawing_needs_no_torch(config: str) -> None:
    program = f"""
import sys
sys.modules["torch"] = None  # importing it fails
from colonnade import cli
from colonnade.config.load import load
from colonnade.planner.hardware import hardware
sys.argv = ["colonnade", "plan", {config!r}, "--draw"]
cli.main()
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "stage 3 │" in answer.stdout, answer.stderr
    assert "torch" in answer.stderr.splitlines()[-1] and "memory of a rank" not in answer.stdout


@pytest.mark.slow
def test_this_machine_is_measured_and_planned_with(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every part of the measurement runs, on less: fewer and smaller products, on two cores at most."""
    file = tmp_path / "machine.toml"
    monkeypatch.setattr(measure_operators, "OUTSIDE", 1 << 20)
    monkeypatch.setattr(measure_operators, "TIMES", 3)
    monkeypatch.setattr(measure_operators, "LARGEST", LARGEST._replace(inputs=256, outputs=256, rows=512))
    less = {"SIZES": SIZES[:4], "LARGE": SIZES[2:4], "LONG": 1 << 22, "MOST_CORES": 2, "LAUNCHES": 1}
    for name, value in less.items():
        monkeypatch.setattr(measure_hardware, name, value)
    assert run(monkeypatch, "--output", str(file), command="hardware") == 0
    found = hardware(str(file))
    assert 0.05 <= found["device.crowded"] <= 1 and 0.05 <= found["device.together"] <= 1
    assert found["device.peak_flops.float32"] > found["device.peak_flops.float64"] > 1e8
    assert found.operators["gelu"] > 0 and found["island.bandwidth"] > 1e6 and found["device.dispatch_seconds"] < 1e-3
    assert run(monkeypatch, config, "--hardware", str(file)) == 0
    assert "tokens/s" in capfd.readouterr().out
