"""Points of a sweep side by side: each once, no more at a time than there are shares, and how they end."""

from __future__ import annotations

import json
import os
import signal
import time
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.config.load import load
from colonnade.errors import ConfigError
from colonnade.launch import launch
from colonnade.train import start
from colonnade.train.side_by_side import Share, is_interrupted, last_line, process_of, run_side_by_side
from colonnade.train.sweep import read_sweep
from tests.commands import colonnade
from tests.runs import metrics
from tests.tasks.examples import write_config, write_examples
from tests.train.noted_run import run


def all_of(folder: Path, told: list[dict[str, float | int | bool]], shares: int) -> tuple[int, dict[str, int]]:
    """The exit status of all, and of each that ended."""
    paths = []
    for number, content in enumerate(told):
        paths.append(folder / f"{number}.json")
        paths[-1].write_text(json.dumps(content))
    found: dict[str, int] = {}
    status = run_side_by_side(
        paths,
        shares,
        start=lambda path, share: process_of(run, path, share, path.with_suffix(".log")),
        ended=lambda path, status, seconds: found.update({path.stem: status}),
    )
    return status, found


def test_no_two_use_a_share_at_once(tmp_path: Path) -> None:
    """What one has said in an earlier start stays in its log."""
    (tmp_path / "3.log").write_text("3 was interrupted\n")
    status, found = all_of(tmp_path, [{"seconds": seconds} for seconds in (0.6, 0.1, 0.1, 0.1)], 2)
    assert status == 0 and found == dict.fromkeys("0123", 0)
    notes = [json.loads((tmp_path / f"{number}.ran").read_text()) for number in range(4)]
    assert {note["of"] for note in notes} == {2} and {note["share"] for note in notes} == {0, 1}
    assert len({note["group"] for note in notes} | {os.getpgid(0)}) == 5, "a signal to one is not one to all"
    for share in (0, 1):
        own = sorted((note["began"], note["ended"]) for note in notes if note["share"] == share)
        assert all(before[1] <= after[0] for before, after in pairwise(own))
    assert notes[1]["began"] < notes[0]["ended"], "else they were not side by side"
    assert (tmp_path / "2.log").read_text() == "2 says hello\n"
    assert (tmp_path / "3.log").read_text() == "3 was interrupted\n3 says hello\n"


def test_the_next_one_gets_the_share_that_is_free() -> None:
    """Whichever that is: GPUs of another would be used twice."""
    processes, shares = get_context("fork"), list[int]()
    third_is_here = processes.Event()
    does = [lambda: None, lambda: third_is_here.wait(60), third_is_here.set]

    def begin(number: int, share: Share) -> BaseProcess:
        shares.append(share.number)
        process = processes.Process(target=does[number])
        process.start()
        return process

    assert run_side_by_side(range(3), 2, start=begin, ended=lambda *_: None) == 0 and shares == [0, 1, 0]


def test_one_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    killed = 128 + signal.SIGKILL
    told: list[dict[str, float | int | bool]] = [
        {},
        {"mistake": True},
        {"seconds": 0, "status": killed},
        {"seconds": 0},
    ]
    assert all_of(tmp_path, told, 2) == (0, {"0": 1, "1": 2, "2": killed, "3": 0})
    assert last_line(tmp_path / "1.log") == "colonnade: train.steps = 0: use more"
    broken = (tmp_path / "0.log").read_text()  # which does not say how long it takes
    assert "Traceback" in broken and last_line(tmp_path / "0.log") == "KeyError: 'seconds'"


def test_after_an_interruption_no_more_begin() -> None:
    processes, found = get_context("fork"), dict[int, int]()
    first_has_ended = processes.Event()
    does = [lambda: os._exit(130), lambda: first_has_ended.wait(60), lambda: None]

    def begin(number: int, share: Share) -> BaseProcess:
        process = processes.Process(target=does[number])
        process.start()
        return process

    def ended(number: int, status: int, seconds: float) -> None:
        found[number] = status
        first_has_ended.set()

    assert run_side_by_side([0, 1, 2], 2, start=begin, ended=ended) == 130
    assert found == {0: 130, 1: 0}, "what runs goes on to its end"


def test_after_one_that_cannot_be_started_no_more_begin_and_what_runs_is_waited_for() -> None:
    context, started, found = get_context("fork"), list[str](), list[tuple[str, int]]()

    def start(item: str, share: Share) -> BaseProcess:
        started.append(item)
        if item == "b":
            raise ConfigError("its weights are gone")
        process = context.Process(target=time.sleep, args=(0.05,))
        process.start()
        return process

    with pytest.raises(ConfigError, match="its weights are gone"):
        run_side_by_side("abc", 2, start=start, ended=lambda item, status, seconds: found.append((item, status)))
    assert (started, found) == (["a", "b"], [("a", 0)])


def test_a_signal_reaches_all(tmp_path: Path) -> None:
    paths = [tmp_path / "0.json", tmp_path / "1.json", tmp_path / "2.json"]
    for path in paths:
        path.write_text(json.dumps({"seconds": 60}))
    began = time.monotonic()

    def begin(path: Path, share: Share) -> object:
        process = process_of(run, path, share, path.with_suffix(".log"))
        if path == paths[1]:
            while not all(
                each.with_suffix(".log").exists() and last_line(each.with_suffix(".log")) for each in paths[:2]
            ):
                time.sleep(0.02)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        return process

    def to_self(number: int, frame: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGALRM, to_self)
    found: dict[str, int] = {}
    try:
        status = run_side_by_side(
            paths,
            2,
            start=begin,
            ended=lambda path, status, seconds: found.update({path.stem: status}),  # type: ignore[arg-type]
        )
    finally:
        signal.signal(signal.SIGALRM, before)
    assert status == 128 + signal.SIGTERM and found == {"0": 143, "1": 143} and time.monotonic() - began < 30


@pytest.mark.parametrize(("ends", "found"), [(None, 143), (1, 143), (2, 2), (0, 0)])
def test_a_signal_reaches_one_that_is_being_started(ends: int | None, found: int) -> None:
    """None: it ends by the signal. 1: as Python does that still imports when it is interrupted."""
    processes, told = get_context("fork"), dict[int, int]()
    is_ready = processes.Event()

    def work() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if ends is None else lambda *_: os._exit(ends))
        is_ready.set()
        time.sleep(60)

    def begin(number: int, share: Share) -> BaseProcess:
        process = processes.Process(target=work)
        process.start()
        assert is_ready.wait(60)
        signal.raise_signal(signal.SIGTERM)
        return process

    status = run_side_by_side([0, 1], 2, start=begin, ended=lambda number, status, _: told.update({number: status}))
    assert (status, told) == (143, {0: found})


def test_who_asks_twice_is_heard_twice() -> None:
    """A point saves at the first Ctrl-C, and ends at once at the second."""
    processes, told = get_context("fork"), dict[int, int]()
    is_ready, once = processes.Event(), processes.Event()

    def work() -> None:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7) if once.is_set() else once.set())
        is_ready.set()
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(0.02)

    def ask_again() -> None:
        once.wait(60)
        os.kill(os.getppid(), signal.SIGTERM)

    def begin(number: int, share: Share) -> BaseProcess:
        process = processes.Process(target=work)
        process.start()
        assert is_ready.wait(60)
        processes.Process(target=ask_again, daemon=True).start()
        signal.raise_signal(signal.SIGTERM)
        return process

    status = run_side_by_side([0], 1, start=begin, ended=lambda number, status, _: told.update({number: status}))
    assert (status, told) == (0, {0: 7})


def test_one_whose_log_cannot_be_written_goes_on(tmp_path: Path) -> None:
    (path := tmp_path / "0.json").write_text(json.dumps({"seconds": 0, "status": 3}))
    process = process_of(run, path, Share(0, 1), Path("/dev/full"))
    process.join()
    assert process.exitcode == 3


def test_what_a_run_has_said_last_is_its_last_line_with_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_line(log) == ""
    for content, last in ((b"", ""), (b"\n \n", ""), (b"first\n  second \n\n \n", "second"), (b"a\nb\xff", "b\ufffd")):
        log.write_bytes(content)
        assert last_line(log) == last


def test_who_was_killed_has_failed_and_who_was_asked_goes_on_later() -> None:
    asked = {status for status in range(256) if is_interrupted(status)}
    assert asked == {99, 129, 130, 143}, "not 137, of a rank for which memory did not suffice, nor 139"


@pytest.mark.parametrize(("items", "status"), [(1, 0), (2, 128 + signal.SIGINT)])
def test_a_signal_behind_the_last_one_interrupts_nothing(items: int, status: int) -> None:
    """There is none left that could go on later."""

    def begin(number: int, share: Share) -> BaseProcess:
        process = get_context("fork").Process(target=int)
        process.start()
        return process

    def ended(number: int, status: int, seconds: float) -> None:
        signal.raise_signal(signal.SIGINT)

    assert run_side_by_side(range(items), 1, start=begin, ended=ended) == status


def test_shares_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = SimpleNamespace(train=SimpleNamespace(device="auto"), parallel=SimpleNamespace(num_ranks=2))
    monkeypatch.setattr(start, "num_cores_to_run_on", lambda: 4)
    monkeypatch.setattr(start, "count_gpus", lambda: 0)
    start.check_shares(config, 4)
    with pytest.raises(ConfigError, match=r"sweep\.at_once = 5 runs would share 4 cores"):
        start.check_shares(config, 5)
    monkeypatch.setattr(start, "count_gpus", lambda: 8)
    start.check_shares(config, 4)
    with pytest.raises(ConfigError, match=r"5 runs of 2 ranks need 10 GPUs, and this machine has 8\. Use 4 or less"):
        start.check_shares(config, 5)


@pytest.mark.parametrize(("told", "threads"), [(None, 2), ("3", 3)])
def test_a_share_has_its_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str | None, threads: int
) -> None:
    """4 cores for two runs of one rank."""
    path = write_config(tmp_path, "qqp", tmp_path)
    path.write_text(path.read_text().replace("threads = 1\n", ""))
    monkeypatch.setattr(launch, "num_cores", lambda: 4)
    monkeypatch.delenv(launch.OPENMP, raising=False)
    if told is not None:
        monkeypatch.setenv(launch.OPENMP, told)
    monkeypatch.setattr(start, "load_for_run", load)
    given: list[str] = []
    monkeypatch.setattr(start, "supervise", lambda settings, file, arguments, *more, last: given.extend(arguments) or 0)
    assert start.run_point(path, Share(0, 2)) == 0 and given == ["train", str(path), f"train.threads={threads}"]


def test_each_share_sees_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    launch.hide_other_gpus(range(2, 4))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    launch.hide_other_gpus(range(1, 2))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3", "of those that are seen"


@pytest.mark.slow
def test_a_sweep_side_by_side_is_the_sweep_one_by_one(tmp_path: Path) -> None:
    examples = write_examples(tmp_path / "examples", ("qqp",))
    found = {}
    for at_once in (1, 2):
        folder = tmp_path / str(at_once)
        folder.mkdir()
        path = write_config(examples, "qqp", folder)
        path.write_text(path.read_text() + f"[sweep]\ntrain.seed = [1, 2]\nat_once = {at_once}\n")
        answer = colonnade("finetune", path)
        assert answer.status == 0 and "2 points: 2 finished" in answer.out, answer
        found[at_once] = [[line["loss"] for line in metrics(folder / "run" / f"seed-{seed}")] for seed in (1, 2)]
    assert found[1] == found[2] and found[1][0] != found[1][1]
    assert "step" in (tmp_path / "2" / "run" / "seed-2.log").read_text()


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "true", '"two"'])
def test_no_number_of_points(value: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'[run]\nfolder = "r"\n[sweep]\ntrain.seed = [1]\nat_once = {value}\n')
    with pytest.raises(ConfigError, match=r"sweep\.at_once = .* is no number of points"):
        read_sweep(path, [])
