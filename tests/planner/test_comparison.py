"""Predicted beside measured."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from colonnade import cli
from colonnade.config.schema import CurriculumConfig, ParallelConfig
from colonnade.errors import ConfigError
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, paper_mesh
from colonnade.planner import comparison
from colonnade.planner.comparison import WALKED, _is_soon_walked, compared, machine_of, prediction, shown
from colonnade.planner.hardware import hardware
from colonnade.planner.memory import Memory
from colonnade.planner.predict import predict
from colonnade.train.rollback import Rollback
from colonnade.train.rollback import write as write_rollbacks
from colonnade.train.run_folder import ROLLBACKS
from tests import tiny
from tests.commands import here
from tests.parity.runs import Case, Way, configured
from tests.runs import course, metrics


def test_both_stand_under_the_same_keys() -> None:
    memory = {"total_bytes": 5, "by_kind": {"parameters": 3}, "rank": 0}
    predicted = {"memory": memory, "bytes_sent": {"tp": 7}, "hardware": "cpu"}
    measured = {"memory": {"total_bytes": 6}, "bytes_sent": {"tp": 7, "dp": 1}}
    assert compared(predicted, measured) == {
        "memory": {
            "total_bytes": {"predicted": 5, "measured": 6},
            "by_kind": {"parameters": {"predicted": 3, "measured": None}},
        },
        "bytes_sent": {"tp": {"predicted": 7, "measured": 7}, "dp": {"predicted": 0, "measured": 1}},
    }


def test_the_ledger_tells_what_a_step_sends() -> None:
    """The least of the steps."""
    ledger = paper_mesh(Layout(tp=2), 0).ledger
    for step, size in ((1, 10), (2, 25), (3, 10)):
        ledger.begin_step(step)
        ledger.bytes["all_reduce", "tp"] += size
        ledger.bytes["receive", "pp"] += 99
    assert ledger.least_of_steps() == {"tp": 10}


@pytest.mark.parametrize("sizes", [(10,), (25, 10)])
def test_the_last_step_of_a_run_counts_too(sizes: tuple[int, ...]) -> None:
    """No other begins behind it."""
    ledger = paper_mesh(Layout(tp=2), 0).ledger
    for step, size in enumerate(sizes, 1):
        ledger.begin_step(step)
        ledger.bytes["all_reduce", "tp"] += size
    assert ledger.least_of_steps() == {"tp": 10}


def test_what_is_sent_before_the_first_step_is_no_steps() -> None:
    """While the state is built, and by an evaluation at the start, which is step 0."""
    ledger = paper_mesh(Layout(tp=2), 0).ledger
    ledger.bytes["broadcast", "tp"] += 3
    for step, size in ((0, 4), (1, 10), (2, 10)):
        ledger.begin_step(step)
        ledger.bytes["all_reduce", "tp"] += size
    assert ledger.least_of_steps() == {"tp": 10}


def test_the_first_step_of_a_start_does_not_count_where_others_follow() -> None:
    """It takes longer: kernels are chosen, memory is taken."""
    steps = [
        {"step": step, "seconds": seconds, "tokens_per_second": 60 / seconds}
        for step, seconds in enumerate((30.0, 2.0, 4.0, 9.0))
    ]
    watcher = comparison.Watcher(cast(Any, None), cast(Any, None), active=True)
    for number, seconds, rate in ((4, 4.0, 15.0), (3, 3.0, 22.5), (2, 2.0, 30.0), (1, 30.0, 2.0)):
        found = watcher._measured(steps[:number], paper_mesh(Layout(), 0).ledger, torch.device("cpu"))
        assert (found["seconds_per_step"], found["tokens_per_second"]) == (seconds, rate)


def test_memory_of_before_the_run_is_no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process had when its state was built: libraries, for the most part."""
    watcher = comparison.Watcher(cast(Any, None), cast(Any, None), _before=400)
    monkeypatch.setattr(comparison, "_most", lambda: 1_000)
    step = {"step": 1, "seconds": 1.0, "tokens_per_second": 1.0}
    found = watcher._measured([step], paper_mesh(Layout(), 0).ledger, torch.device("cpu"))
    assert found["memory"] == {"total_bytes": 600}


def test_memory_of_the_process_is_read_in_bytes() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    assert comparison._status("VmRSS") == pytest.approx(pages * os.sysconf("SC_PAGE_SIZE"), rel=0.1)
    assert comparison._status("VmHWM") >= 0.9 * comparison._status("VmRSS")


def test_what_the_system_tells_in_kib_is_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: "Name:\tpython\nVmHWM:\t  300 kB\nVmRSS:\t  200 kB\n")
    assert (comparison._status("VmRSS"), comparison._most()) == (200 * 1024, 300 * 1024)


def test_memory_that_the_system_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it an error that the most of before cannot be forgotten, as in some containers."""
    assert comparison._resident(torch.device("cuda")) == 0 < comparison._resident(torch.device("cpu"))
    assert comparison._status("VmNone") is None
    status = comparison._status

    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "write_text", refused)
    assert comparison._resident(torch.device("cpu")) == pytest.approx(status("VmRSS"), rel=0.2)
    monkeypatch.setattr(Path, "read_text", refused)
    assert comparison._resident(torch.device("cpu")) is None and comparison._most() is None


@pytest.mark.parametrize("told", ["", "VmRSS:\t  300 kB\n", "VmHWM:\t  300 kB\n"])
def test_memory_that_cannot_be_told_is_null_and_a_dash(
    told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without /proc, and where it tells what is used now alone, or the most alone."""
    config = of_eight_tokens(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_text", lambda _: told)
        watcher = comparison.Watcher(
            cast(Any, None), cast(Any, None), _before=comparison._resident(torch.device("cpu"))
        )
        measured = watcher._measured([], paper_mesh(Layout(), 0).ledger, torch.device("cpu"))
    predicted = {"memory": {"total_bytes": 3_570_000}, "bytes_sent": {}, "tokens_per_second": 8, "seconds_per_step": 2}
    comparison._write(config, comparison.PREDICTION, predicted)
    comparison._write(config, comparison.COMPARISON, compared(predicted, measured))
    assert json.loads(shown(tmp_path, as_json=True))["memory"]["total_bytes"] == {
        "predicted": 3_570_000,
        "measured": None,
    }
    assert re.search(r"memory of rank 0 +3\.57 MB +– +–$", shown(tmp_path, as_json=False), re.MULTILINE)


def test_of_the_steps_of_a_run_those_behind_where_it_began_are_this_starts(tmp_path: Path) -> None:
    config = cast(Any, SimpleNamespace(run=SimpleNamespace(folder=tmp_path)))
    watcher = comparison.Watcher(cast(Any, None), cast(Any, None), _begun=2)
    assert watcher._steps(config) == [], "there is no file yet"
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3, 4)))
    assert watcher._steps(config) == [{"step": 3}, {"step": 4}]


def test_steps_of_other_batches_and_those_that_were_skipped_are_not_what_was_predicted(tmp_path: Path) -> None:
    """Of a curriculum, here, from steps of 8 tokens to steps of 16, of which fp16 skips one; nothing of them is told
    where there are no others.
    """
    config = of_eight_tokens(tmp_path)
    watcher = comparison.Watcher(cast(Any, None), cast(Any, None), _tokens=16)
    ends = (8, 16, 32, 48, 64)
    lines = [{"step": step, "tokens": tokens, "grad_norm": 1.0} for step, tokens in enumerate(ends, 1)]
    del lines[3]["grad_norm"]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line["step"] for line in watcher._as_predicted(config, lines)] == [3, 5]
    assert watcher._as_predicted(config, lines[:2]) == []
    ledger = paper_mesh(Layout(), 0).ledger
    assert watcher._measured([], ledger, torch.device("cpu")).keys() == {"memory"}


def test_steps_of_shorter_sequences_are_not_what_was_predicted_though_they_have_as_many_tokens(tmp_path: Path) -> None:
    """Of a curriculum, here, from 8 sequences of 2 tokens to 4 of 4, behind the second step."""
    config = of_eight_tokens(tmp_path)
    config.curriculum = CurriculumConfig(tokens=(0, 32), seq_length=(2, 4), global_batch_size=(8, 4))
    watcher = comparison.Watcher(cast(Any, None), cast(Any, None), _tokens=16)
    lines = [{"step": step, "tokens": step * 16, "grad_norm": 1.0} for step in (1, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line["step"] for line in watcher._as_predicted(config, lines)] == [3, 4]
    write_rollbacks(tmp_path, [Rollback(to=1, skip=1, passed=8)])
    assert [line["step"] for line in watcher._as_predicted(config, lines)] == [2, 3, 4], "a rollback leads there sooner"
    (tmp_path / ROLLBACKS).write_text("[")
    assert [line["step"] for line in watcher._as_predicted(config, lines)] == [3, 4], (
        "nothing ends a run that has ended"
    )


@pytest.mark.parametrize(
    ("rollbacks", "alike"),
    [
        ([], [5, 6]),
        ([Rollback(to=1, skip=4, passed=32)], [2, 3, 4, 5, 6]),  # where it is gone on from, not where it returns from
        ([Rollback(to=2, skip=4, passed=32), Rollback(to=1)], [5, 6]),  # the first one's batches come, in their turn
    ],
)
@pytest.mark.parametrize("sequences", [1, 2])
def test_a_step_is_of_the_phase_that_it_begins_in(
    tmp_path: Path, sequences: int, rollbacks: list[Rollback], alike: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of samples of several sequences the tokens of one count."""
    config, tokens = of_eight_tokens(tmp_path), 16 * sequences
    config.model.sequences = sequences
    config.curriculum = CurriculumConfig(tokens=(0, 64), seq_length=(2, 4), global_batch_size=(8, 4))
    watcher = comparison.Watcher(cast(Any, None), cast(Any, None), _tokens=tokens)
    lines = [{"step": step, "tokens": step * tokens, "grad_norm": 1.0} for step in range(1, 7)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_rollbacks(tmp_path, rollbacks)
    read, returns_of = list[Path](), comparison.returns_of
    monkeypatch.setattr(comparison, "returns_of", lambda run: (read.append(run), returns_of(run))[1])
    assert [line["step"] for line in watcher._as_predicted(config, lines)] == alike
    assert read == [tmp_path], "once, however many steps there are"


def test_rank_0_alone_writes_a_prediction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "predict", lambda *_, **__: Memory(1, 0, 0, 0, 0, 0))
    monkeypatch.setattr(comparison, "prediction", lambda *_: WHOLE)
    corpus, decision = cast(Any, SimpleNamespace(vocab_size=5)), cast(Any, SimpleNamespace(products=None))
    wrote = []
    for rank in range(4):
        (tmp_path / str(rank)).mkdir()
        config = of_eight_tokens(tmp_path / str(rank))
        mesh, cpu = paper_mesh(Layout(tp=2, dp=2), rank), torch.device("cpu")
        watcher = comparison.Watcher(cast(Any, lambda *_: None), cast(Any, None))
        watcher.banner(course(config), mesh, cpu, corpus, decision)
        wrote += [rank] * (tmp_path / str(rank) / comparison.PREDICTION).exists()
    assert wrote == [0]


@pytest.mark.parametrize(
    ("name", "machine"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("Tesla V100-SXM3-32GB", "v100-dgx2h"),
        ("NVIDIA L4", None),
    ],
)
def test_a_gpu_is_timed_by_the_machine_that_is_bundled_for_it(
    monkeypatch: pytest.MonkeyPatch, name: str, machine: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert machine_of(torch.device("cuda")) == (None if machine is None else hardware(machine))
    assert machine_of(torch.device("cpu")) == hardware("cpu")


def test_what_is_received_is_not_predicted_to_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """By axis, of all that a step sends; and memory has what is offloaded in it."""
    flows = [("send", "pp", 7), ("receive", "pp", 5), ("all_reduce", "dp", 3), ("all_gather", "dp", 4)]
    entries = [SimpleNamespace(operation=operation, axis=axis, bytes=size) for operation, axis, size in flows]
    entries.append(SimpleNamespace(operation="all_reduce", axis="tp", bytes=0))
    monkeypatch.setattr(comparison, "machine_of", lambda device: None)
    asked: list[object] = []

    def walk(*_: object, products: object) -> object:
        asked.append(products)
        return SimpleNamespace(entries=entries)

    monkeypatch.setattr(comparison, "walk", walk)
    config, decision = configured(Case(), Way(micro_batch_size=2)), cast(Any, SimpleNamespace(products="chosen"))
    found = prediction(config, 37, torch.device("cuda"), decision, Memory(10, 20, 0, 0, 30, 0, host=400))
    assert found["bytes_sent"] == {"pp": 7, "dp": 7}
    assert found["memory"] == {
        "total_bytes": 460, "by_kind": {"parameters": 10, "gradients": 20, "activations": 30, "host": 400}, "rank": 0
    }  # fmt: skip
    assert found["hardware"] is found["seconds_per_step"] is found["tokens_per_second"] is None
    assert asked == ["chosen"], "by the kernels that the run has chosen"


def test_time_is_predicted_of_the_kernels_that_the_run_has_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def estimate(*_: object, products: object, every_rank: bool) -> object:
        asked.append((products, every_rank))
        return SimpleNamespace(walks=[SimpleNamespace(entries=[])], tokens_per_second=5.0, seconds_per_step=2.0)

    monkeypatch.setattr(comparison, "estimate", estimate)
    config, decision = configured(Case(), Way(micro_batch_size=2)), cast(Any, SimpleNamespace(products="chosen"))
    found = prediction(config, 37, torch.device("cpu"), decision, Memory(1, 0, 0, 0, 0, 0))
    assert asked == [("chosen", False)] and (found["seconds_per_step"], found["tokens_per_second"]) == (2.0, 5.0)
    assert (found["hardware"], found["bytes_sent"]) == (hardware("cpu").name, {})


def test_a_start_has_time_for_some_micro_batches_of_gpipe() -> None:
    def is_walked(schedule: str, count: int) -> bool:
        train = SimpleNamespace(num_microbatches=lambda dp: count // dp)
        return _is_soon_walked(
            cast(Any, SimpleNamespace(parallel=ParallelConfig(schedule=schedule, dp=2), train=train))
        )

    assert [is_walked("gpipe", 2 * count) for count in (1, WALKED, WALKED + 1)] == [True, True, False]
    assert is_walked("1f1b", 2 * (WALKED + 1)), "of others a few are walked, however many there are"


def test_a_table_has_both_numbers_and_how_many_times_too_much_was_predicted(tmp_path: Path) -> None:
    predicted = {**WHOLE, "tokens_per_second": 3000.0, "bytes_sent": {"tp": 0, "dp": 2000, "pp": 7}}
    predicted["seconds_per_step"] = 0.25
    measured = {"memory": {"total_bytes": 4}, "tokens_per_second": 1500.0, "bytes_sent": {"tp": 5, "dp": 2000}}
    measured["bytes_sent"]["pp"] = 0
    (tmp_path / comparison.PREDICTION).write_text(json.dumps(predicted))
    (tmp_path / comparison.COMPARISON).write_text(json.dumps(compared(predicted, measured)))
    lines = shown(tmp_path, as_json=False).splitlines()
    assert [line.rsplit("  ", 1)[1].strip() for line in lines if "  " in line][1:] == [
        "1.250", "2.000", "–", "1.000", "–", "0.000"
    ]  # fmt: skip
    assert [line.split("  ")[0] for line in lines if line.startswith("sent")] == [
        "sent over dp, a step", "sent over pp, a step", "sent over tp, a step"
    ]  # fmt: skip
    assert lines[-1] == "Times are those of cpu."


def test_where_no_traffic_was_predicted_the_table_has_none(tmp_path: Path) -> None:
    predicted = {**WHOLE, "bytes_sent": None}
    (tmp_path / comparison.PREDICTION).write_text(json.dumps(predicted))
    measured = {"memory": {"total_bytes": 4}, "tokens_per_second": 1500.0, "bytes_sent": {"pp": 7}}
    for ended in ({}, measured, {**measured, "bytes_sent": {}}):
        table = shown(tmp_path, as_json=False)
        assert "seconds a step" in table and "sent over" not in table
        assert ("1,500" in table) == bool((tmp_path / comparison.COMPARISON).exists())
        (tmp_path / comparison.COMPARISON).write_text(json.dumps(compared(predicted, ended or measured)))


def test_one_rank_of_each_stage_predicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others of the stage would find too, on the same cores."""
    asked, told = [], []

    def predicted(*_: Any, stage: int, **__: Any) -> Memory:
        asked.append(stage)
        return Memory(1 + stage, 0, 0, 0, 0, 0)

    def describe(course: Any, mesh: Mesh, device: Any, corpus: Any, decision: Any, own: Memory) -> Any:
        told.append((mesh.rank, own.parameters))

    monkeypatch.setattr(comparison, "predict", predicted)
    corpus, decision = cast(Any, SimpleNamespace(vocab_size=5)), cast(Any, SimpleNamespace(products=None))
    layout = Layout(tp=2, pp=2, dp=2)
    for rank in range(layout.num_ranks):
        watcher = comparison.Watcher(describe, cast(Any, None), active=False)
        watcher.banner(course(cast(Any, None)), paper_mesh(layout, rank), torch.device("cpu"), corpus, decision)
    first = {layout.rank_at(pp=stage, dp=0, tp=0): 1 + stage for stage in range(2)}
    assert asked == [0, 1] and told == [(rank, first.get(rank, 0)) for rank in range(layout.num_ranks)]


@pytest.mark.slow
def test_a_run_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny.write_config(tiny.make(tmp_path), tmp_path)
    monkeypatch.setattr("sys.argv", ["colonnade", "train", str(path)])
    with pytest.raises(SystemExit):
        cli.main()
    run = tmp_path / "run"
    predicted, found = (json.loads((run / f"{name}.json").read_text()) for name in ("prediction", "comparison"))
    assert set(predicted) >= {"memory", "tokens_per_second", "seconds_per_step", "bytes_sent"}
    assert set(predicted["memory"]) == {"total_bytes", "by_kind", "rank"}
    assert found["seconds_per_step"]["measured"] > 0 and found["memory"]["total_bytes"]["predicted"] > 0
    assert json.loads((run / "events.jsonl").read_text().splitlines()[-1])["event"] == "finished"
    monkeypatch.setattr("sys.argv", ["colonnade", "plan", "--check", str(run)])
    capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main()
    assert "predicted ÷ measured" in capsys.readouterr().out


@pytest.mark.slow
def test_steps_of_an_earlier_start_do_not_count(tmp_path: Path) -> None:
    """Neither those that a checkpoint has, nor those behind it, which are made anew."""
    path, run = tiny.write_config(tiny.make(tmp_path), tmp_path), tmp_path / "run"
    assert here("train", path, "train.steps=4").status == 0
    slow = [{**line, "seconds": 1e6, "tokens_per_second": 1e-6} for line in metrics(run)]
    behind = [{**slow[-1], "step": step} for step in (5, 6)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*slow, *behind]))
    (run / "comparison.json").unlink()
    assert here("train", path, "train.steps=6").status == 0
    found = json.loads((run / "comparison.json").read_text())
    assert found["seconds_per_step"]["measured"] < 1e3 and found["tokens_per_second"]["measured"] > 1e-3


def test_lines_that_are_no_steps_are_passed_over(tmp_path: Path) -> None:
    config = tiny.config(tiny.make(tmp_path), tmp_path)
    folder = Path(config.run.folder)
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(b'{"step": 1}\n[2]\n{"loss": 3.0}\n{"step": "4"}\n\xff\n{"step": 5')
    assert comparison._metrics(config) == [{"step": 1}]


@pytest.mark.slow
def test_a_start_does_not_walk_many_micro_batches_of_gpipe(tmp_path: Path) -> None:
    """Memory is told; time and traffic are left to the planner's command."""
    corpus = tiny.make(tmp_path)
    found = {}
    for count in (WALKED, WALKED + 1):
        keys = ["parallel.pp=2", "parallel.schedule=gpipe", f"train.global_batch_size={count}"]
        config = tiny.config(corpus, tmp_path, *keys, "train.micro_batch_size=1")
        decision: Any = SimpleNamespace(products=None)
        memory = predict(config, 275, stage=0, device=torch.device("cpu"))
        found[count] = prediction(config, 275, torch.device("cpu"), decision, memory)
    walked, told = found[WALKED], found[WALKED + 1]
    assert walked["bytes_sent"]["pp"] > 0 and walked["seconds_per_step"] > 0
    assert told["bytes_sent"] is told["seconds_per_step"] is None and told["memory"]["total_bytes"] > 0
    (tmp_path / "prediction.json").write_text(json.dumps(told))
    assert "seconds a step" in shown(tmp_path, as_json=False) and "sent over" not in shown(tmp_path, as_json=False)


WHOLE = {
    "memory": {"total_bytes": 5, "by_kind": {"parameters": 3}, "rank": 0},
    "tokens_per_second": 7.0,
    "seconds_per_step": None,
    "bytes_sent": {"tp": 7},
    "hardware": "cpu",
}


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        "nonsense",
        "3",
        *(json.dumps({**WHOLE, key: None}) for key in ("memory",)),
        *(
            json.dumps({**WHOLE, key: value})
            for key, value in (
                ("memory", 3),
                ("tokens_per_second", "x"),
                ("bytes_sent", ["tp"]),
                ("bytes_sent", {"tp": "x"}),
                ("seconds_per_step", 10**400),
                ("seconds_per_step", True),
            )
        ),
    ],
)
@pytest.mark.parametrize("name", [comparison.PREDICTION, comparison.COMPARISON])
def test_a_damaged_file_is_one_message(tmp_path: Path, name: str, content: str) -> None:
    for file, whole in ((comparison.PREDICTION, WHOLE), (comparison.COMPARISON, compared(WHOLE, {}))):
        (tmp_path / file).write_text(json.dumps(whole))
    assert "–" in shown(tmp_path, as_json=False) and json.loads(shown(tmp_path, as_json=True)) == compared(WHOLE, {})
    if name == comparison.PREDICTION:
        (tmp_path / comparison.COMPARISON).unlink()
    (tmp_path / name).write_text(content)
    for options in ((), ("--json",)):
        answer = here("plan", "--check", tmp_path, *options)
        assert (answer.status, answer.out) == (2, ""), answer
        assert f"--check {tmp_path}: its {name} cannot be read: " in answer.err
    for file in ("config.toml", "metrics.jsonl"):
        (tmp_path / file).touch()
    assert here("report", tmp_path).status == 0


def test_a_start_that_trains_is_not_shown_beside_what_came_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it ends; one that has nothing to do leaves the comparison as it was."""
    run, written = tmp_path / "run", tmp_path / "run" / comparison.COMPARISON
    for steps in (0, 1):
        with started(tmp_path, monkeypatch, steps):
            assert not written.exists() and "has not come to its end yet" in shown(run, as_json=False)
        found = json.loads(written.read_text())
        assert found["tokens_per_second"] == {"predicted": 7.0, "measured": (9.0, 4.0)[steps]}


def test_a_start_that_broke_off_has_no_comparison_unless_it_made_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "run" / comparison.COMPARISON
    for steps in (0, 1):
        with pytest.raises(RuntimeError, match="broken off"), started(tmp_path, monkeypatch, steps):
            raise RuntimeError("broken off")
        assert written.exists() == (steps == 0)


def of_eight_tokens(run: Path) -> Any:
    """What is asked of the configuration of a run in this folder, with so many in a step."""
    return SimpleNamespace(
        run=SimpleNamespace(folder=run),
        train=SimpleNamespace(global_batch_size=2),
        model=SimpleNamespace(seq_length=4, sequences=1, sample_length=4),
        curriculum=CurriculumConfig(),
    )


@contextmanager
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> Iterator[None]:
    """A start of a run of which there is a comparison; it has made so many steps."""
    run, cpu = tmp_path / "run", torch.device("cpu")
    config = of_eight_tokens(run)
    run.mkdir(exist_ok=True)
    monkeypatch.setattr(comparison, "predict", lambda *_, **__: Memory(1, 0, 0, 0, 0, 0))
    monkeypatch.setattr(comparison, "prediction", lambda *_: WHOLE)
    corpus, decision = cast(Any, SimpleNamespace(vocab_size=5)), cast(Any, SimpleNamespace(products=None))
    (run / comparison.COMPARISON).write_text(json.dumps(compared(WHOLE, {"tokens_per_second": 9.0})))
    (run / "metrics.jsonl").unlink(missing_ok=True)
    watcher = comparison.Watcher(cast(Any, lambda *_: None), cast(Any, lambda *_: nullcontext()))
    with watcher.within(config, 5, Mesh(), cpu):
        watcher.banner(course(config), Mesh(), cpu, corpus, decision)
        line = {"step": 1, "tokens": 8, "grad_norm": 1.0, "seconds": 2.0, "tokens_per_second": 4.0}
        (run / "metrics.jsonl").write_text((json.dumps(line) + "\n") * steps)
        yield


def test_a_folder_without_a_prediction(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Name the folder of a run"):
        shown(tmp_path, as_json=False)
