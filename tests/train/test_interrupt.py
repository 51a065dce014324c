"""Ctrl-C and SIGTERM: everything is saved, the user is told how to go on, and the run that goes on is the same run."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from colonnade.launch import launch
from colonnade.launch.supervisor import UNFINISHED
from colonnade.train.interrupt import Interrupt, Request
from tests.commands import environment, forked, here, start
from tests.runs import assert_same, events, metrics, saved_steps
from tests.slow import first_fast
from tests.train.test_recovery import LAYOUTS, num_ranks

LONG = [
    "train.steps=1000000",
    "optim.decay=constant",
    "train.evaluate_every=0",
    "checkpoint.every=0",
    "train.log_every=10000",
]


def await_steps(run: Path, number: int, is_alive: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and is_alive():
        if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_bytes().count(b"\n") >= number:
            return
        time.sleep(0.01)
    raise AssertionError(f"{run} made no {number} steps")


def await_handled(pid: int, number: int) -> None:
    """Until a process that has just been started does not end by this signal any more."""
    status, end = Path(f"/proc/{pid}/status"), time.monotonic() + 60
    while time.monotonic() < end:
        masks = re.findall(r"^Sig(?:Ign|Cgt):\s*(\w+)", status.read_text(), flags=re.MULTILINE)
        if any(int(mask, 16) >> (number - 1) & 1 for mask in masks):
            return
        time.sleep(0.01)
    raise AssertionError(f"signal {number} would still end process {pid}")


def check_that_it_goes_on(config: Path, run: Path, layout: list[str], status: int, out: str) -> None:
    """What was said and saved; and three more steps end like a run that was never stopped."""
    (step,) = saved_steps(run)
    assert out.splitlines()[-1] == (
        f"Stopped after step {step}; everything is saved. Run the same command again to go on from here."
    )
    assert [line["step"] for line in metrics(run)] == list(range(1, step + 1))
    assert [event["event"] for event in events(run)] == ["started", "setup", "saved", "interrupted"]
    more = [*LONG, *layout, f"train.steps={step + 3}", "checkpoint.keep=1"]
    for folder in (run, run.with_name("whole")):
        answer = forked("train", config, f"run.folder={folder}", *more, num_ranks=num_ranks(layout))
        assert answer.status == 0, answer
    assert_same(run, run.with_name("whole"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("serial", signal.SIGTERM),
        ("serial", signal.SIGHUP),
        pytest.param("tp=2", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("dp=2", signal.SIGINT, marks=pytest.mark.slow),
    ],
)
def test_every_rank_gets_the_signal(config: Path, tmp_path: Path, name: str, number: int) -> None:
    layout, run = LAYOUTS[name], tmp_path / "run"
    ranks = start("train", config, *LONG, *layout, num_ranks=num_ranks(layout))
    await_steps(run, 3, lambda: True)
    ranks.signal(number)
    answers = ranks.answers()
    assert {answer.status for answer in answers} == {128 + number}, answers
    assert answers[0].err == "" and all(answer.out == "" for answer in answers[1:])
    check_that_it_goes_on(config, run, layout, answers[0].status, answers[0].out)


@pytest.mark.slow
def test_one_rank_gets_the_signal(config: Path, tmp_path: Path) -> None:
    """All of them stop after the same step, and save."""
    ranks = start("train", config, *LONG, "parallel.dp=2", num_ranks=2)
    await_steps(tmp_path / "run", 3, lambda: True)
    os.kill(ranks.pids[1], signal.SIGTERM)
    answers = ranks.answers()
    assert {answer.status for answer in answers} == {128 + signal.SIGTERM}, answers
    assert answers[0].out.splitlines()[-1].startswith("Stopped after step ")
    assert len(saved_steps(tmp_path / "run")) == 1


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param("serial", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("tp=2", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("dp=2", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("dp=2", signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_in_a_terminal(config: Path, tmp_path: Path, name: str, number: int) -> None:
    """The command itself, in a process group of its own, as a shell makes one; SIGTERM as `kill` sends it."""
    layout, run = LAYOUTS[name], tmp_path / "run"
    command = [sys.executable, "-m", "colonnade", "train", str(config), *LONG, *layout]
    process = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    await_steps(run, 3, lambda: process.poll() is None)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + number, ""), out
    check_that_it_goes_on(config, run, layout, process.returncode, out)


@pytest.mark.parametrize("name", first_fast(["serial", "tp=2"]))
def test_ctrl_c_ends_who_reads_the_output_first(config: Path, tmp_path: Path, name: str) -> None:
    """As in `colonnade train … | tee log`: what is told meanwhile is lost, and all is saved."""
    run, layout = tmp_path / "run", LAYOUTS[name]
    arguments = ["train", str(config), *LONG, "train.log_every=1", *layout]
    command = [sys.executable, "-m", "colonnade", *arguments]
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    await_steps(run, 2, lambda: process.poll() is None)
    assert process.stdout is not None
    process.stdout.close()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert err.startswith("Standard output cannot be written (Broken pipe)") and err.count("\n") == 1, err
    assert saved_steps(run) == [metrics(run)[-1]["step"]]


@pytest.mark.slow
def test_a_signal_in_the_last_step_is_no_interruption(config: Path, tmp_path: Path) -> None:
    def interrupt(rank: int) -> None:
        from colonnade.train import loop

        step = loop.train_step

        def last_step_interrupted(state, *args, **more):  # type: ignore[no-untyped-def]
            if state.step == 5:
                os.kill(os.getpid(), signal.SIGINT)
            return step(state, *args)

        loop.train_step = last_step_interrupted

    answer = forked("train", config, first=interrupt)
    assert answer.status == 0 and "Finished 6 steps" in answer.out, answer


def test_requests_are_remembered() -> None:
    with Interrupt() as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.requested and interrupt.exit_code == 143
        os.kill(os.getpid(), signal.SIGTERM)  # asked for twice is asked for once: a scheduler may repeat itself


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_run_leaves_that_is_to_be_started_again_changes_nothing_of_it(
    number: signal.Signals, tmp_path: Path
) -> None:
    """As a scheduler's SIGTERM while it saves at its time limit. The first Ctrl-C is no second one."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    (tmp_path / "leave").touch()
    with Interrupt(tmp_path) as interrupt:
        assert interrupt.newest() == Request.STOP
        signal.raise_signal(number)
        assert interrupt.newest() == Request.STOP and interrupt.exit_code == UNFINISHED
    signal.raise_signal(signal.SIGTERM)


def test_nohup_stays_in_force() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupt.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_connection_that_is_closed_ends_a_run_as_ctrl_c_does() -> None:
    signal.signal(signal.SIGHUP, lambda *_: None)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGHUP)
        assert interrupt.newest() == Request.STOP and interrupt.exit_code == 129


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_stops_as_asked_though_whoever_started_it_ignores_that(number: signal.Signals) -> None:
    """As a shell ignores Ctrl-C for what it starts in the background, and everything after `trap '' TERM`."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            os.kill(os.getpid(), number)
            assert interrupt.requested and interrupt.exit_code == 128 + number
    finally:
        signal.signal(number, before)


def test_a_second_ctrl_c_ends_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.exit_code == 130
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("end", [None, SystemExit(UNFINISHED)], ids=["finished", "to go on"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_behind_the_end_of_a_run_changes_nothing_of_it(number: signal.Signals, end: SystemExit | None) -> None:
    """A rank takes its time to leave: who has started it would take a run that has finished for one that has not."""
    signal.signal(number, lambda *_: pytest.fail("it is asked"))
    with suppress(SystemExit), Interrupt():
        if end is not None:
            raise end
    signal.raise_signal(number)
    with pytest.raises(KeyboardInterrupt) if number == signal.SIGINT else nullcontext():
        signal.raise_signal(number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_has_failed_hears_signals_as_before(number: signal.Signals) -> None:
    signal.signal(number, before := lambda *_: None)
    with pytest.raises(ValueError, match="of ours"), Interrupt():
        raise ValueError("of ours")
    assert signal.getsignal(number) is before


# --- files, clocks, and a save in between -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", first_fast(["dp=2", "serial"]))
def test_a_stop_file_ends_a_run_and_keeps_it_from_starting(config: Path, tmp_path: Path, name: str) -> None:
    layout, run = LAYOUTS[name], tmp_path / "run"
    ranks = start("train", config, *LONG, *layout, num_ranks=num_ranks(layout))
    await_steps(run, 3, lambda: True)
    (run / "stop").touch()
    answers = ranks.answers()
    assert {answer.status for answer in answers} == {UNFINISHED}, answers
    (step,) = saved_steps(run)
    assert answers[0].out.splitlines()[-1] == (
        f"Stopped after step {step} (there is a file {run / 'stop'}: remove it to train on); everything is saved. Run "
        "the same command again to go on from here."
    )
    refused = forked("train", config, *LONG)
    assert refused.status == 2 and f"{run / 'stop'} exists" in refused.err and "Remove the file" in refused.err
    (run / "stop").unlink()
    answer = forked("train", config, *LONG, f"train.steps={step + 2}")
    assert answer.status == 0 and f"(step {step}, " in answer.out, answer


@pytest.mark.slow
def test_a_time_limit_ends_a_run_that_is_started_again_and_again(config: Path, tmp_path: Path) -> None:
    """As a batch system would, after every step; the last time it has finished."""
    for step in range(1, 6):
        answer = forked("train", config, "run.time_limit=1e-9")
        assert answer.status == UNFINISHED and f"Stopped after step {step} (run.time_limit)" in answer.out, answer
    assert forked("train", config, "run.time_limit=1e-9").status == 0
    assert forked("train", config, f"run.folder={tmp_path / 'whole'}").status == 0
    ours, theirs = metrics(tmp_path / "run"), metrics(tmp_path / "whole")
    assert ours == theirs


def test_a_time_limit_counts_from_the_start_of_the_command(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the first step, nor anew in ranks that were started again."""
    monkeypatch.setattr(launch, "began", lambda: time.monotonic() - 1000.0)
    answer = here("train", config, "run.time_limit=900", "train.steps=2")
    assert answer.status == UNFINISHED and "Stopped after step 1 (run.time_limit)" in answer.out, answer


@pytest.mark.slow
def test_a_time_limit_far_away_is_none(config: Path) -> None:
    assert forked("train", config, "run.time_limit=1e6").status == 0


@pytest.mark.parametrize("name", first_fast(["tp=2", "serial"]))
def test_a_signal_has_a_run_save_and_go_on(config: Path, tmp_path: Path, name: str) -> None:
    """Sent to one rank; all save after the same step."""
    layout, run = LAYOUTS[name], tmp_path / "run"
    ranks = start("train", config, *LONG, *layout, num_ranks=num_ranks(layout))
    await_steps(run, 3, lambda: True)
    os.kill(ranks.pids[-1], signal.SIGUSR1)
    end = time.monotonic() + 60
    while not saved_steps(run) and time.monotonic() < end:
        time.sleep(0.01)
    (step,) = saved_steps(run)
    await_steps(run, step + 3, lambda: True)
    ranks.signal(signal.SIGTERM)
    assert {answer.status for answer in ranks.answers()} == {128 + signal.SIGTERM}
    assert len(saved_steps(run)) == 2 and [event["event"] for event in events(run)].count("saved") == 2


@pytest.mark.slow
def test_a_launcher_passes_the_signal_on_and_gives_the_status_back(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "colonnade", "train", str(config), *LONG, "parallel.dp=2"]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    await_handled(process.pid, signal.SIGUSR1)
    process.send_signal(signal.SIGUSR1)  # while it starts, which must not end it
    await_steps(run, 3, lambda: process.poll() is None)
    process.send_signal(signal.SIGUSR1)
    end = time.monotonic() + 60
    while not saved_steps(run) and time.monotonic() < end:
        time.sleep(0.01)
    assert saved_steps(run)
    (run / "stop").touch()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (UNFINISHED, ""), out


def test_a_save_is_asked_for_once_and_a_stop_counts_more() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert [interrupt.newest(), interrupt.newest()] == [Request.SAVE, Request.NOTHING]
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert [interrupt.newest(), interrupt.newest()] == [Request.STOP, Request.STOP]
    assert signal.getsignal(signal.SIGUSR1) == before


def test_what_a_run_was_stopped_by_first_is_its_end(tmp_path: Path) -> None:
    """A file that comes later is for the run that goes on. The clock is rank 0's alone."""
    with Interrupt(tmp_path, time_limit=0.0) as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        (tmp_path / "leave").touch()
        assert interrupt.newest() == Request.STOP
        assert (interrupt.exit_code, interrupt.reason) == (128 + signal.SIGTERM, "") and (tmp_path / "leave").exists()
    assert Interrupt(None, time_limit=0.0).newest() == Request.NOTHING
    found = Interrupt(tmp_path / "elsewhere", time_limit=0.0)
    assert found.newest() == Request.STOP and (found.exit_code, found.reason) == (UNFINISHED, " (run.time_limit)")


def test_a_file_that_asks_to_leave_goes_though_the_disk_refuses_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the run has saved: what is left of it would end the next start. One that is made meanwhile is for that."""
    leave, unlink, refused = tmp_path / "leave", Path.unlink, [OSError(errno.ESTALE, "Stale file handle")]

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if refused:
            raise refused.pop()
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    for stays in (False, True):
        leave.touch()
        with Interrupt(tmp_path) as interrupt:
            assert interrupt.newest() == Request.STOP and leave.exists() is not stays
            leave.touch()
        assert leave.exists() is stays


def test_a_run_that_is_to_stop_leaves_word_why(tmp_path: Path) -> None:
    """The file that asks it to leave goes, the one that keeps it from starting stays; the other ranks look for none."""
    for name, reason, stays in (
        ("leave", f" (there was a file {tmp_path / 'leave'})", False),
        ("stop", f" (there is a file {tmp_path / 'stop'}: remove it to train on)", True),
    ):
        (tmp_path / name).touch()
        assert Interrupt().newest() == Request.NOTHING
        found = Interrupt(tmp_path)
        assert found.newest() == Request.STOP and (found.reason, found.exit_code) == (reason, UNFINISHED)
        assert (tmp_path / name).exists() is stays
