"""A save that fails is said and tried again; the run ends only when saves have failed for too long."""

import errno
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade import atomic
from colonnade.checkpoint import files
from colonnade.errors import CheckpointError, ConfigError
from colonnade.mesh.mesh import Mesh
from colonnade.train import lines, loop, recovery, save_retries
from colonnade.train.corpus import open_corpus
from colonnade.train.interrupt import Interrupt, Request
from colonnade.train.lines import Lines
from colonnade.train.monitor import write_event
from colonnade.train.recovery import Checkpoints, saving
from colonnade.train.run_folder import CHANGES
from colonnade.train.save_retries import LONGEST, SaveRetries
from colonnade.train.state import TrainState, build_state
from tests.commands import forked, start
from tests.disks import room_for
from tests.runs import Finished, assert_same_end, events, saved_steps
from tests.tiny import TinyCorpus
from tests.tiny import config as tiny_config
from tests.told import Told
from tests.train.test_monitor import monitor, numbers
from tests.train.test_recovery import checkpoints_of

SAVES = ("saved", "save failed")


def test_tries_come_later_and_later_until_it_is_too_long() -> None:
    now = [0.0]
    retries = SaveRetries(4000.0, clock=lambda: now[0])
    assert not retries.is_due and not retries.is_over
    waits = list[float]()
    for _ in range(8):
        waits.append(retries.failed())
        assert not retries.is_due
        now[0] += waits[-1]
    assert waits == [10.0, 20.0, 40.0, 80.0, 160.0, 320.0, LONGEST, LONGEST]
    assert retries.is_due and not retries.is_over
    retries.saved()
    assert retries.failures == 0 and not retries.is_due and retries.age == 0.0
    now[0] = 9000.0
    assert not retries.is_over, "however long ago the last good one is, the first failure is tried again"
    retries.failed()
    now[0] = 13000.0
    assert not retries.is_over
    retries.failed()
    now[0] = 13000.5
    assert retries.is_over
    assert SaveRetries(0.0, clock=lambda: 0.0).is_over, "0: the first failure ends the run"


def test_saves_that_fail_soon_behind_each_other_put_off_no_try() -> None:
    """A run of quick steps saves often, and was told when the next one comes."""
    now = [0.0]
    retries = SaveRetries(4000.0, clock=lambda: now[0])
    for _ in range(8):
        now[0] += 0.125
        retries.failed()
    assert retries.failed() == 9.125 and retries.failures == 9
    now[0] = 10.125
    assert retries.is_due and retries.failed() == 20.0


def test_a_save_that_a_run_waits_for_is_tried_every_two_seconds_and_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though saves have failed for long: nothing else is left to do, and somebody may kill the run soon."""
    now, tries, told = [0.0], list[float](), Told()
    retries = SaveRetries(4000.0, clock=lambda: now[0])

    def save(*_: Any) -> None:
        tries.append(now[0])
        if now[0] < 655.0:
            raise CheckpointError("The disk is full.")

    monkeypatch.setattr(Checkpoints, "payload", lambda self, state: None)
    monkeypatch.setattr(recovery.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    found = checkpoints_of(Mesh(), told, retries, is_busy=False, save=save, wait=lambda: None)
    for now[0] in (0.0, 10.0, 300.0, 650.0):
        found.save(SimpleNamespace(step=7), must=now[0] == 650.0)  # type: ignore[arg-type]
    assert tries == [0.0, 10.0, 300.0, 650.0, 652.0, 654.0, 656.0]
    assert [each["tries"] for each in told.of("save failed")] == [1, 2, 3, 4]
    assert told.said[-1] == (
        "Saving at step 7 has failed: The disk is full.\nThe run waits for it, and tries again every 2 s. It ends if a "
        "save fails more than checkpoint.retry_for = 4000 seconds after the first that did. What was saved last, or "
        "the start, is 650 seconds old."
    )


def test_saves_that_fail_every_two_seconds_are_told_when_they_were_said_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, told, tries = [0.0], Told(), list[float]()
    retries = SaveRetries(4000.0, clock=lambda: now[0])

    def save(*_: Any) -> None:
        tries.append(now[0])
        raise CheckpointError("The disk is full.")

    monkeypatch.setattr(Checkpoints, "payload", lambda self, state: None)
    found = checkpoints_of(Mesh(), told, retries, is_busy=False, save=save, wait=lambda: None)
    for step in range(40):
        now[0] = 2.0 * step
        found.save(SimpleNamespace(step=step))  # type: ignore[arg-type]
    assert len(tries) == 40, "the disk may have room at any of them"
    assert [(each["step"], each["tries"]) for each in told.of("save failed")] == [(0, 1), (5, 6), (15, 16), (35, 36)]
    waits = ("10", "20", "40", "80")
    assert [f"saves again in {wait} s." in said for wait, said in zip(waits, told.said, strict=True)] == [True] * 4


def test_a_short_limit_has_room_for_several_tries() -> None:
    assert SaveRetries(20.0).failed() == 5.0 and SaveRetries(0.2).failed() == 0.1


def refused(times: int, number: int = errno.ENOSPC, only: str = "") -> Callable[[int], None]:
    """From the second save on, rank 0 cannot write for a while. `only`: part of the names of files that are meant."""

    def first(rank: int) -> None:
        from colonnade.checkpoint import files

        save_retries.FIRST = 0.2
        write, left = files._HashingStream.write, [times]

        def refuse(stream: Any, data: Any) -> int:
            if rank == 0 and left[0] and "step_00000002" not in stream.file.name and only in stream.file.name:
                left[0] -= 1
                raise OSError(number, os.strerror(number))
            return write(stream, data)

        files._HashingStream.write = refuse  # type: ignore[method-assign]

    return first


def test_an_end_behind_which_more_is_to_come_is_saved_at_once(config: Path, tmp_path: Path) -> None:
    """What is to come may be refused, and then that was the end."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CHANGES).write_text('{"change": {"train.steps": 7}, "at": 6}\n')
    answer = forked("train", config, first=refused(1, only="step_00000006"))
    assert answer.status == 0 and "Finished 7 steps" in answer.out, answer
    saves = [(each["event"], each["step"]) for each in events(tmp_path / "run") if each["event"] in SAVES]
    assert saves == [("saved", 2), ("saved", 4), ("save failed", 6), ("saved", 6), ("saved", 7)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("times", "number", "keys"),
    [
        (1, errno.ENOSPC, []),
        (2, errno.EIO, ["checkpoint.asynchronous=true"]),
        (3, errno.EROFS, ["parallel.dp=2", "checkpoint.asynchronous=true"]),
    ],
)
def test_the_run_ends_as_if_nothing_had_been(
    finished: Finished, config: Path, tmp_path: Path, times: int, number: int, keys: list[str]
) -> None:
    run, ranks = tmp_path / "other", 2 if "parallel.dp=2" in keys else 1
    arguments = ["train", config, f"run.folder={run}", "checkpoint.retry_for=900", *keys]
    answers = start(*arguments, num_ranks=ranks, first=refused(times, number)).answers()
    assert [answer.status for answer in answers] == [0] * ranks, answers
    assert "Saving at step" in answers[0].out
    told = [event for event in events(run) if event["event"] == "save failed"]
    assert told and all(event["reason"] and event["tries"] for event in told) and saved_steps(run)[-1] == 6
    if ranks == 1:
        assert_same_end(run, finished.folder)


def test_a_run_that_is_asked_to_stop_tries_until_it_is_saved(config: Path, tmp_path: Path) -> None:
    """Its stop file is there when step 4 is saved, which fails once."""
    run, refuses = tmp_path / "run", refused(1)

    def first(rank: int) -> None:
        refuses(rank)
        before = loop.train_step

        def train_step(state: Any, *arguments: Any, **more: Any) -> Any:
            if state.step == 3:
                (run / "stop").touch()
            return before(state, *arguments, **more)

        loop.train_step = train_step  # type: ignore[assignment]

    answer = forked("train", config, "checkpoint.retry_for=900", "checkpoint.asynchronous=false", first=first)
    assert answer.status == 99 and "Stopped after step 4" in answer.out, answer
    assert saved_steps(run)[-1] == 4
    assert [each["event"] for each in events(run) if each["event"] in SAVES] == ["saved", "save failed", "saved"]


@pytest.mark.slow
def test_it_ends_when_saves_have_failed_for_too_long(config: Path, tmp_path: Path) -> None:
    answer = forked("train", config, "checkpoint.retry_for=1", first=refused(10**6))
    assert answer.status == 2 and answer.err.startswith("colonnade: The disk is full: "), answer
    assert saved_steps(tmp_path / "run") == [2] and "Traceback" not in answer.err


def test_it_may_get_more_time_while_it_goes_on(config: Path, tmp_path: Path) -> None:
    """Or no run would live through a disk that is full for longer than somebody has thought of before."""
    run = tmp_path / "run"
    run.mkdir()
    (run / CHANGES).write_text(json.dumps({"change": {"checkpoint.retry_for": 900}, "at": 2}) + "\n")
    answer = forked("train", config, "checkpoint.retry_for=0", first=refused(1))
    assert answer.status == 0 and saved_steps(run)[-1] == 6, answer
    assert [each["step"] for each in events(run) if each["event"] == "save failed"] == [4]


@pytest.mark.slow
def test_the_next_try_does_not_wait_for_the_next_checkpoint(config: Path, tmp_path: Path) -> None:
    def at_once(rank: int) -> None:
        refused(1)(rank)
        save_retries.FIRST = 0.0

    answer = forked("train", config, "checkpoint.every=3", "checkpoint.retry_for=900", first=at_once)
    assert answer.status == 0, answer
    told = [(each["event"], each["step"]) for each in events(tmp_path / "run") if each["event"] in SAVES]
    assert told == [("save failed", 3), ("saved", 4), ("saved", 6)]


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_ends_when_it_has_saved(config: Path, tmp_path: Path) -> None:
    """Though it has to try again: no later step would."""

    def first(rank: int) -> None:
        refused(1)(rank)
        save_retries.FIRST = 0.0
        step = loop.train_step

        def asked_in_step_3(state: Any, *args: Any, **more: Any) -> Any:
            if state.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(state, *args, **more)

        loop.train_step = asked_in_step_3  # type: ignore[assignment]

    answer = forked("train", config, "checkpoint.retry_for=900", first=first)
    assert answer.status == 128 + signal.SIGTERM and "Stopped after step 3; everything is saved" in answer.out, answer
    assert "Saving at step 3 has failed" in answer.out and saved_steps(tmp_path / "run") == [2, 3]


def test_a_run_is_started_again_on_a_full_disk(finished: Finished, config: Path, tmp_path: Path) -> None:
    """Nothing new is to be written before its first step, behind which all is waited for as in a run at work."""

    def first(rank: int) -> None:
        written, append, step = atomic.written, lines.append, loop.train_step

        def refuse(path: Path, **_: Any) -> Any:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        def again(*arguments: Any, **more: Any) -> Any:
            atomic.written, lines.append = written, append
            return step(*arguments, **more)

        atomic.written, lines.append, loop.train_step = refuse, full, again  # type: ignore[assignment]

    run = tmp_path / "run"
    assert forked("train", config).status == 0
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    answer = forked("train", config, first=first)
    assert answer.status == 0 and "Resumed from" in answer.out and "wait in memory" in answer.out, answer
    assert_same_end(run, finished.folder)


@pytest.fixture
def checkpoints(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[tuple[Checkpoints, TrainState]]:
    """Of a run that saves as the parameter says, on a disk that refuses one file behind step 2."""
    monkeypatch.setattr(files._HashingStream, "write", files._HashingStream.write)
    monkeypatch.setattr(save_retries, "FIRST", save_retries.FIRST)
    refused(1)(0)
    settings = tiny_config(corpus, tmp_path, "checkpoint.retry_for=900", f"checkpoint.asynchronous={request.param}")
    (tmp_path / "run").mkdir()
    opened = open_corpus(settings)
    state = build_state(settings, Mesh(), opened.vocab_size, torch.device("cpu"))
    state.step = 4
    with saving(state, settings, Mesh(), opened, monitor(tmp_path / "run")) as found:
        yield found, state


def test_uploads_learn_of_each_save_and_what_they_read_stays(corpus: TinyCorpus, tmp_path: Path) -> None:
    settings, woken = tiny_config(corpus, tmp_path, "checkpoint.keep=1"), list[bool]()
    (tmp_path / "run").mkdir()
    opened = open_corpus(settings)
    state = build_state(settings, Mesh(), opened.vocab_size, torch.device("cpu"))
    uploads: Any = SimpleNamespace(in_use=lambda: (1,), wake=lambda *, refresh=False: woken.append(refresh))
    with saving(state, settings, Mesh(), opened, monitor(tmp_path / "run"), uploads=uploads) as found:
        for state.step in (1, 2, 3):
            found.save(state, must=True)
    assert woken == [False] * 3 and saved_steps(tmp_path / "run") == [1, 3]


@pytest.mark.parametrize("checkpoints", ["true"], indirect=True)
def test_what_fails_in_the_background_at_the_end_is_saved_all_the_same(
    checkpoints: tuple[Checkpoints, TrainState], tmp_path: Path
) -> None:
    """At a run's end no later step tries again."""
    found, state = checkpoints
    found.save(state)
    found.settle(state)
    assert [each["event"] for each in events(tmp_path / "run")] == ["saved"] and saved_steps(tmp_path / "run") == [4]
    found.settle(state)
    assert len(events(tmp_path / "run")) == 1, "what is saved is not saved again"


@pytest.mark.parametrize("checkpoints", ["false"], indirect=True)
def test_a_step_does_not_wait_for_the_next_try(
    checkpoints: tuple[Checkpoints, TrainState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only who must have it saved does."""
    found, state = checkpoints
    waits = list[float]()
    monkeypatch.setattr(recovery.time, "sleep", waits.append)
    found.save(state)
    assert [each["event"] for each in events(tmp_path / "run")] == ["save failed"] and waits == []
    refused(1)(0)
    found.save(state, must=True)
    assert [each["event"] for each in events(tmp_path / "run")] == ["save failed", "save failed", "saved"]
    assert len(waits) == 1 and saved_steps(tmp_path / "run") == [4]


def full(path: Path, line: Any) -> None:
    """`lines.append` on a full disk."""
    raise lines.unwritable(path, OSError(errno.ENOSPC, "No space")) from OSError(errno.ENOSPC, "No space")


def test_lines_wait_while_a_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, append = tmp_path / "metrics.jsonl", lines.append
    patient = Lines(patient=True)
    assert patient.write(path, {"step": 1}) == ""
    monkeypatch.setattr(lines, "append", full)
    assert "the run goes on" in patient.write(path, {"step": 2})
    assert patient.write(path, {"step": 3}) == "", "said once"
    with pytest.raises(CheckpointError, match="cannot be written"):
        patient.check()
    with pytest.raises(ConfigError, match="cannot be written"):
        Lines().write(path, {"step": 1})
    monkeypatch.setattr(lines, "append", append)
    patient.check()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_lines_wait_as_the_patience_in_force_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of it while the run goes on holds for them too."""
    told = monitor(tmp_path)
    monkeypatch.setattr(lines, "append", full)
    told.follow(steps=100, log_every=10, patient=True)
    told.step(numbers(1), 0.5)
    told.follow(steps=100, log_every=10, patient=False)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be written"):
        told.step(numbers(2), 0.5)


def test_lines_that_wait_are_undone_with_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a run returns to before their steps as soon as there is room again."""
    told = monitor(tmp_path, patient=True)
    for step in (1, 2, 3):
        with monkeypatch.context() as patched:
            if step == 3:
                patched.setattr(lines, "append", full)
            told.step(numbers(step), 0.5)
    told.go_back(1)
    told.step(numbers(2), 0.5)
    files = ((tmp_path / name).read_text().splitlines() for name in ("metrics.jsonl", "undone.jsonl"))
    assert [[json.loads(line)["step"] for line in file] for file in files] == [[1, 2], [2, 3]]


def test_a_disk_that_is_full_again_is_told_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patient, told = Lines(patient=True), []
    for step, is_full in enumerate([True, False, True, True, False]):
        with monkeypatch.context() as patched:
            if is_full:
                patched.setattr(lines, "append", full)
            told.append(bool(patient.write(tmp_path / "metrics.jsonl", {"step": step})))
    assert told == [True, False, True, False, False]


def test_threads_write_each_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save beside training tells its end from a thread of its own, while a step writes its metrics."""
    path, together, append = tmp_path / "events.jsonl", Lines(patient=True), lines.append

    def slowly(path: Path, line: Any) -> None:
        append(path, line)
        time.sleep(0.001)  # another thread's turn, between writing and forgetting

    monkeypatch.setattr(lines, "append", slowly)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: together.write(path, {"step": number}), range(40)))
    assert sorted(json.loads(line)["step"] for line in path.read_text().splitlines()) == list(range(40))


def test_a_checkpoint_does_not_outlive_the_numbers_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both files all is on the disk before it; lines that wait keep it back."""
    told, seen = monitor(tmp_path, patient=True), list[str]()
    names = {"metrics.jsonl", "thermometers.jsonl"}

    def fsync(number: int) -> None:
        seen.extend(name for name in names if os.path.samestat(os.fstat(number), (tmp_path / name).stat()))

    told.step(numbers(1), 0.5)
    told.thermometers({"step": 1}, {})
    monkeypatch.setattr(os, "fsync", fsync)
    told.sync()
    assert sorted(seen) == sorted(names)
    monkeypatch.setattr(lines, "append", full)
    told.step(numbers(2), 0.5)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl cannot be written"):
        told.sync()


def test_of_a_torn_line_nothing_stays(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"whole\ntor")
    lines.cut(path, 6, b"torn\n")
    assert path.read_bytes() == b"whole\n"


@pytest.mark.parametrize("before", [1, 0])
def test_a_line_that_fits_in_part_leaves_nothing(tmp_path: Path, before: int) -> None:
    """Also where it is the first of its file."""
    path, patient = tmp_path / "metrics.jsonl", Lines(patient=True)
    if before:
        assert patient.write(path, {"step": 1}) == ""
    whole = path.read_bytes() if before else b""
    with room_for(len(whole) + 4):
        told = patient.write(path, {"step": 2})
    assert "the run goes on" in told and path.read_bytes() == whole
    patient.check()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2][-before - 1 :]


def test_so_does_an_event_that_fits_in_part_while_no_rank_runs(tmp_path: Path) -> None:
    write_event(tmp_path, "fault", step=3)
    before = (tmp_path / "events.jsonl").read_bytes()
    with room_for(len(before) + 4):
        write_event(tmp_path, "restart", saved=2)
    assert (tmp_path / "events.jsonl").read_bytes() == before


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOTCONN])
def test_a_file_system_that_is_lost_is_looked_at_again(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*args: Any, **more: Any) -> Any:
        raise OSError(number, os.strerror(number))

    told, interrupt = Lines(patient=True), Interrupt(tmp_path)
    (tmp_path / "leave").touch()
    told.write(tmp_path / "lines.jsonl", {"n": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", lost)
        patch.setattr(Path, "open", lost)
        assert interrupt.newest() == Request.NOTHING
        assert "wait in memory" in told.write(tmp_path / "lines.jsonl", {"n": 2})
    assert interrupt.newest() == Request.STOP and not (tmp_path / "leave").exists()
    told.write(tmp_path / "lines.jsonl", {"n": 3})
    assert [json.loads(line)["n"] for line in (tmp_path / "lines.jsonl").read_text().splitlines()] == [1, 2, 3]
