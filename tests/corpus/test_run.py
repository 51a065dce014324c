"""Whole runs: the same bytes however they are interrupted and by whomever they are carried out."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from colonnade.atomic import written
from colonnade.corpus import executors
from colonnade.corpus import run as cleaning
from colonnade.corpus.executors import LocalExecutor
from colonnade.corpus.formats import InputSplit
from colonnade.corpus.plan import Plan
from colonnade.corpus.progress import progress_folder
from colonnade.corpus.repair import Repair
from colonnade.corpus.stages import CleaningStage
from colonnade.data.cleaning import clean
from colonnade.errors import DataError, LockError
from colonnade.lock import locked
from tests.commands import here
from tests.corpus.dying import Dies, DiesOnce, dies_at_once
from tests.corpus.recipes import Result, make_recipe, words

Run = Callable[..., Result]
STEPS: dict[str, Any] = {
    "repair": {},
    "language": {"keep": ["en", "unknown"], "threshold": 0.0},
    "deduplicate": {},
    "split": {},
}


@pytest.fixture
def corpus(write_lines: Any) -> Path:
    """A hundred documents, some of them duplicates, some broken."""
    texts = [" ".join(["the", "of", *words(60, seed % 70)]) for seed in range(100)]
    path: Path = write_lines("in.jsonl", [{"text": text, "id": f"d{number}"} for number, text in enumerate(texts)])
    with path.open("ab") as stream:
        stream.write(b'{"text": "broken\n{"text": "\xff"}\n')
    return path


def recipe_file(tmp_path: Path, corpus: Path, folder: str, more: str = "") -> Path:
    path = tmp_path / f"{folder}.toml"
    path.write_text(
        f'[run]\npiece_bytes = 8000\n{more}\n[read]\npaths = ["{corpus}"]\n[repair]\n[language]\n'
        'keep = ["en", "unknown"]\n'
        f'threshold = 0.0\n[deduplicate]\n[split]\n[write]\nfolder = "{tmp_path / folder}"\n'
    )
    return path


def same(first: Result, second: Result) -> None:
    """Equal but for the name of their folder and how many worked."""
    files = [result.files() for result in (first, second)]
    for each, result in zip(files, (first, second), strict=True):
        content = json.loads(each.pop("manifest.json"))
        content["recipe"]["write"].pop("folder")
        content["recipe"].pop("run")
        each["manifest"] = json.dumps(content).replace(str(result.folder), "").encode()
    assert files[0] == files[1]


def test_a_run_that_is_stopped_anywhere_ends_with_the_same_bytes(
    tmp_path: Path, run: Run, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {**STEPS, "run": {"piece_bytes": 8000}}
    whole = run(corpus, folder="whole", **options)
    assert whole.reasons("deduplicate") == {"near-duplicate": 30} and len(whole.manifest["inputs"]) > 6
    for stop_at in (1, 60, 99):
        folder = f"stopped{stop_at}"
        seen = 0

        def stopping(
            self: Any, document: Any, account: Any, *, before: Any = Repair.examine, stop_at: int = stop_at
        ) -> Any:
            nonlocal seen
            seen += 1
            if seen == stop_at:
                raise KeyboardInterrupt
            return before(self, document, account)

        with monkeypatch.context() as patch:
            patch.setattr(Repair, "examine", stopping)
            with pytest.raises(KeyboardInterrupt):
                run(corpus, folder=folder, **options)
            assert not list((tmp_path / folder).rglob("manifest.json"))
        same(whole, run(corpus, folder=folder, **options))


@pytest.mark.parametrize("name", ["train/00000.jsonl", "manifest.json", "dropped/mine.txt", "tokens/train.bin"])
def test_a_folder_with_files_of_others_is_refused(name: str, tmp_path: Path, run: Run, corpus: Path) -> None:
    mine = tmp_path / "foreign" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(DataError, match=f"holds {name.partition('/')[0]}, and no run that these are of"):
        run(corpus, folder="foreign")
    assert [path for path in (tmp_path / "foreign").rglob("*") if path.is_file()] == [mine]
    assert mine.read_text() == "mine"
    mine.unlink()
    run(corpus, folder="foreign")  # an empty folder may be there


@pytest.mark.slow
def test_a_killed_command_goes_on(tmp_path: Path, run: Run, corpus: Path) -> None:
    """SIGKILL to the whole group of processes, twice, wherever they are; two workers."""
    whole = run(corpus, folder="whole", **STEPS, run={"piece_bytes": 8000})
    file = recipe_file(tmp_path, corpus, "killed", "workers = 2")
    command = [sys.executable, "-m", "colonnade", "data", "clean", str(file)]
    state = tmp_path / "killed" / "state" / "logs"
    for stage in ("documents", "finish"):
        process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
        while process.poll() is None and not list(state.glob(f"{stage}/completions/*")):
            time.sleep(0.01)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "100 documents" in done.stdout
    same(whole, Result(tmp_path / "killed", ""))
    again = here("data", "clean", file, "--no-progress")
    assert again.status == 0 and again.out.splitlines()[2:] == done.stdout.splitlines()[1:]


def test_a_run_that_is_done_says_so_and_tells_no_speed(run: Run, corpus: Path) -> None:
    first, second = run(corpus, repair={}).said, run(corpus, repair={})
    begins, _, speed = first.splitlines()[0].partition("; ")
    assert speed.endswith("documents/s")
    assert second.said.splitlines() == [
        f"nothing is left to do: {second.folder / 'manifest.json'} is there.",
        begins,
        *first.splitlines()[1:],
    ]
    shutil.rmtree(second.folder / "state" / "logs" / "account" / "completions")  # as somebody may, beside the manifest
    assert run(corpus, repair={}).said.splitlines()[0].endswith("documents/s")


@pytest.mark.slow
def test_what_a_killed_worker_left_is_done_again(
    tmp_path: Path, run: Run, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(corpus, folder="whole", **STEPS, run={"piece_bytes": 8000})
    monkeypatch.setattr("colonnade.corpus.stages.Read", DiesOnce)
    again = run(corpus, folder="again", **STEPS, run={"piece_bytes": 8000, "workers": 2})
    (tmp_path / "again" / "died").unlink()
    same(whole, again)
    assert "a worker was killed" in (tmp_path / "again/state/logs/documents/killed.jsonl").read_text()
    monkeypatch.setattr("colonnade.corpus.stages.Read", Dies)
    with pytest.raises(DataError, match="1 tasks were killed 2 times"):
        run(corpus, folder="never", run={"piece_bytes": 8000, "workers": 2, "retries": 1})
    assert not (tmp_path / "never" / "manifest.json").exists()


def test_workers_that_are_killed_before_they_begin_are_not_started_for_ever(
    tmp_path: Path, run: Run, write_lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = 0

    def pool(*given: Any, before: Any = ProcessPoolExecutor, **more: Any) -> Any:
        nonlocal started
        started += 1
        assert started < 5, "once is enough"
        return before(*given, **more)

    monkeypatch.setattr(executors, "ProcessPoolExecutor", pool)
    monkeypatch.setattr(executors, "_begin", dies_at_once)
    inputs = [write_lines(f"{name}.jsonl", [f"document {name}"]) for name in "ab"]
    with pytest.raises(DataError, match=r"2 tasks were killed 1 times: 0, 1; "):
        run(*inputs, run={"piece_bytes": 30, "workers": 2, "retries": 0})


def test_a_task_that_is_not_done_is_told_whoever_carries_tasks_out(
    run: Run, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where others than we start the tasks, and lose one without a word."""
    monkeypatch.setattr("colonnade.corpus.run.local_executor", lambda *given, **more: SimpleNamespace(run=lambda: None))
    with pytest.raises(DataError, match=r"1 of 1 tasks of the stage documents are not done, .*: documents/00000\. "):
        run(corpus)


def test_a_folder_keeps_one_run(tmp_path: Path, run: Run, corpus: Path) -> None:
    run(corpus, repair={})
    with pytest.raises(DataError, match=r"holds another run: repair\.uncurl_quotes was False and is True"):
        run(corpus, repair={"uncurl_quotes": True})
    run(corpus, repair={}, run={"workers": 2})
    before = corpus.stat().st_mtime_ns
    os.utime(corpus, ns=(1, 1))
    said = (
        rf"inputs have changed: {re.escape(str(corpus))} \(its modification time was 20.* and is 1970-01-01 00:00:00\."
    )
    with pytest.raises(
        DataError, match=said + r"000000001 UTC\)\. Undo that to go on with it, or set write\.folder to a"
    ) as told:
        run(corpus, repair={})
    time_before = re.findall(r"was (\S+ \S+ UTC)", str(told.value))[0]
    subprocess.run(["touch", "-d", time_before, corpus], check=True)  # as the page on cleaning says
    assert corpus.stat().st_mtime_ns == before
    run(corpus, repair={})


def test_a_run_is_not_taken_up_with_its_parts_in_another_order(run: Run, write_lines: Any) -> None:
    """Which document falls into which part goes by that."""
    path = write_lines("in.jsonl", [f"document {number}" for number in range(9)])
    shares = {"train": 3.0, "held-out": 1.0}
    run(path, split={"shares": shares}, deduplicate={})
    with pytest.raises(DataError, match=r"the order of split\.shares was train, held-out and is held-out, train\. "):
        run(path, split={"shares": dict(reversed(shares.items()))}, deduplicate={})
    assert "nothing is left to do" in run(path, split={"shares": shares}, deduplicate={}).said


def test_a_run_is_not_taken_up_with_other_tasks(run: Run, write_lines: Any) -> None:
    """Files as they are, shared out in another way: what the first task has done is not what it would do now."""
    inputs = [write_lines(f"{name}.jsonl", [f"document {name}"]) for name in "abc"]
    assert len(run(*inputs).texts()) == 3
    with pytest.raises(DataError, match=r"holds another run: run\.piece_bytes was \d+ and is 30\. "):
        run(*inputs, run={"piece_bytes": 30})


def test_two_runs_do_not_share_a_folder(tmp_path: Path, run: Run, corpus: Path) -> None:
    """And what the one at work is writing stays."""
    with locked(tmp_path / "clean" / "state", "another"):
        with written(tmp_path / "clean" / "00000.jsonl.gz") as file:
            file.write(b"half of it")
            said = rf"{re.escape(str(tmp_path / 'clean'))} is in use by `another`, .* or set another write\.folder\.$"
            with pytest.raises(LockError, match=f"^{said}"):
                run(corpus)
        assert (tmp_path / "clean" / "00000.jsonl.gz").read_bytes() == b"half of it"


WITH = (
    "import sys; from tests.corpus.dying import {kind}; import colonnade.corpus.stages as s; s.Read = {kind};"
    "from colonnade.cli import main; sys.argv[1:] = ['data', 'clean', sys.argv[1], '--no-progress']; main()"
)


def has_ended(pid: int) -> bool:
    """Gone, or waiting for somebody to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.slow
def test_the_workers_end_with_a_command_that_is_killed(tmp_path: Path, run: Run, corpus: Path) -> None:
    """SIGKILL to the main process alone, while two workers compute: none of them goes on beside the next run."""
    file, folder = recipe_file(tmp_path, corpus, "killed", "workers = 2"), tmp_path / "killed"
    process = subprocess.Popen([sys.executable, "-c", WITH.format(kind="Waits"), str(file)], stderr=subprocess.DEVNULL)
    while process.poll() is None and len(list(folder.glob("works[01]"))) < 2:
        time.sleep(0.02)
    workers = [int((folder / f"works{rank}").read_text()) for rank in (0, 1)]
    (folder / "state" / "tallies" / "read").mkdir(parents=True, exist_ok=True)
    left = [
        folder / "state" / "tallies" / "read" / "00000.json.1-0123abcd.partial",
        folder / "00000.7-0123abcd.partial",
    ]
    for path in left:
        path.write_text("left by a killed run")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    result = run(corpus, folder="killed", **STEPS, run={"piece_bytes": 8000})  # waits for their last breath
    assert all(has_ended(pid) for pid in workers)
    for rank in (0, 1):
        (folder / f"works{rank}").unlink()
    assert not any(path.exists() for path in left)
    same(run(corpus, folder="whole", **STEPS, run={"piece_bytes": 8000}), result)


@pytest.mark.slow
def test_a_full_disk_is_one_message_and_the_run_goes_on_later(
    tmp_path: Path, run: Run, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = recipe_file(tmp_path, corpus, "full", "workers = 1")
    from colonnade.corpus import spool

    def full(raw: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(spool, "packed", full)
        answer = here("data", "clean", file, "--no-progress")
    assert answer.status == 2 and "No space left on device" in answer.err and "Traceback" not in answer.err
    assert not list((tmp_path / "full").rglob("*.partial"))
    assert here("data", "clean", file, "--no-progress").status == 0


@pytest.mark.slow
def test_ctrl_c_ends_the_workers_too(tmp_path: Path, corpus: Path) -> None:
    """Whatever a task is doing: here one sleeps."""
    file = recipe_file(tmp_path, corpus, "stopped", "workers = 2")
    code = (
        "import signal, sys, time; from tests.corpus.dying import Sleeps; import colonnade.corpus.stages as s;"
        "s.Read = Sleeps; from colonnade.cli import main; sys.argv[1:] = ['data', 'clean', sys.argv[1]]; main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(file)], stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (tmp_path / "stopped" / "asleep").exists():
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode not in (0, None) and "Traceback" not in said
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "stopped" / "asleep").read_text()), 0)


@pytest.mark.parametrize("all_hear", [True, False])
def test_ctrl_c_while_workers_start_is_one_line(tmp_path: Path, corpus: Path, all_hear: bool) -> None:
    """A terminal sends it to all processes of a command, a script to one. What the workers import takes seconds."""
    file = recipe_file(tmp_path, corpus, "stopped", "workers = 2")
    command = [sys.executable, "-m", "colonnade", "data", "clean", str(file), "--no-progress"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while process.poll() is None and not (tmp_path / "stopped" / "state" / "run.json").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    (os.killpg if all_hear else os.kill)(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert said == "colonnade: interrupted. The same command goes on: tasks that are done are kept.\n"


def test_nothing_to_clean(tmp_path: Path, run: Run) -> None:
    for name in ("empty.jsonl", "also.txt"):
        (tmp_path / name).touch()
    result = run(tmp_path / "empty.jsonl", tmp_path / "also.txt", **STEPS)
    assert result.manifest["parts"] == {} and result.reasons("read") == {"empty": 1}


def test_a_run_that_keeps_nothing_says_so_and_what_dropped_most(tmp_path: Path, run: Run, corpus: Path) -> None:
    how = {"index": str(tmp_path / "index")}
    assert "no document was kept" not in run(corpus, deduplicate=how).said
    said = run(corpus, folder="again", deduplicate=how, repair={}).said.splitlines()
    assert said[0].startswith("100 documents") and "-> 0 documents" in said[0]
    assert said[1] == (
        "no document was kept: most were dropped by the step deduplicate (100 of 102), mostly as "
        '"near-duplicate of what an earlier run kept".'
    )
    (tmp_path / "empty.jsonl").touch()
    assert "\nno document was kept: the inputs hold none." in run(tmp_path / "empty.jsonl", folder="none").said


def test_mistakes_are_one_message(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text('[read]\npaths = ["nowhere"]\n[dedup]\n')
    answer = here("data", "clean", tmp_path / "r.toml")
    assert answer.status == 2 and "3 problems" in answer.err and "Did you mean [deduplicate]?" in answer.err


def test_a_bar_is_shown(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = clean(make_recipe(corpus, folder=tmp_path / "out", repair={}), progress=True)
    assert said.startswith("100 documents") and "read                    1  not JSON" in said


@pytest.mark.slow
def test_ray_gives_the_same_bytes(tmp_path: Path, run: Run, corpus: Path) -> None:
    pytest.importorskip("ray")
    whole = run(corpus, folder="whole", **STEPS, run={"piece_bytes": 8000})
    file = recipe_file(tmp_path, corpus, "ray", 'executor = "ray"\nmemory_gb = 1')
    command = [sys.executable, "-m", "colonnade", "data", "clean", str(file), "--no-progress"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    same(whole, Result(tmp_path / "ray", ""))


def test_what_carries_out_tasks_elsewhere_is_given_all_of_each_stage(
    run: Run, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, int]] = []

    def on_ray(how: Any, steps: list[Any], *, tasks: int, log: Path) -> LocalExecutor:
        given.append((log.name, tasks))
        return LocalExecutor(steps, tasks=tasks, workers=1, logging_dir=str(log), retries=0, lock=cast(Any, None))

    monkeypatch.setattr("colonnade.corpus.run.ray_executor", on_ray)
    ray = run(corpus, deduplicate={}, run={"piece_bytes": 20_000, "executor": "ray"})
    many = len(ray.manifest["inputs"])
    assert given == [("documents", many), ("match", many), ("group", 1), ("finish", many), ("account", 1)]
    assert many > 1 and len(ray.ids()) == 70


class Display:
    """Stands for what draws bars."""

    def __init__(self, *columns: Any, **how: Any) -> None:
        self.total: int | None = -1
        self.told: list[dict[str, Any]] = []

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def add_task(self, name: str, *, total: int | None, speed: str) -> int:
        self.total = total
        return 0

    def update(self, task: int, **now: Any) -> None:
        self.told.append(now)


@pytest.mark.parametrize(("name", "total"), [("documents", 60 + 7), ("finish", None)])
def test_a_bar_tells_what_is_done_of_all_and_how_fast_it_has_been_since_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, total: int | None
) -> None:
    """What a run before it has done is done, and tells nothing of this one's speed."""
    pieces = (InputSplit("a", "a", 100, 0, stop=60), InputSplit("b", "b", 7, 0))
    plan, display = Plan(tuple((piece,) for piece in pieces), (), ""), Display()
    monkeypatch.setattr(cleaning, "Progress", lambda *columns, **how: display)
    monkeypatch.setattr(cleaning, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(cleaning.time, "perf_counter", itertools.chain([10.0], itertools.repeat(14.0)).__next__)
    (folder := progress_folder(tmp_path, name)).mkdir(parents=True)
    (folder / "00000").write_text("[1000, 60]")
    with cleaning.bar(CleaningStage(name, [], 2), plan, tmp_path, shown=True):
        while not display.told:
            time.sleep(0.001)
        (folder / "00001").write_text("[2000, 5]")
        while display.told[-1]["completed"] == 60:
            time.sleep(0.001)
    assert display.total == total and display.told[0] == {"completed": 60, "speed": "1,000 documents · 0/s"}
    assert display.told[-1] == {"completed": 65, "speed": "3,000 documents · 500/s"}
