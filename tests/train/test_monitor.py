"""What a run writes about itself, what it takes back when it is resumed, and what it says when it cannot write."""

import errno
import json
import os
import resource
import socket
import sys
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import pytest

from colonnade.errors import ConfigError, DiskError
from colonnade.train import monitor as monitors
from colonnade.train.lines import append, object_in
from colonnade.train.monitor import Monitor, first_step, last_step, set_aside, write_event
from colonnade.train.trackers import Prometheus, TensorBoard
from tests.disks import room_for
from tests.distributed import run_on_ranks
from tests.runs import events


def monitor(folder: Path, **changes: Any) -> Monitor:
    settings: dict[str, Any] = {"active": True, "steps": 100, "log_every": 10, "tokens_per_step": 64}
    settings |= {"flops_per_token": 1e6, "peak_flops": None}
    return Monitor(folder, **settings | changes)


def numbers(step: int) -> dict[str, float | int]:
    return {"step": step, "loss": 1 / step, "learning_rate": 0.1, "grad_norm": 1.0, "tokens": 64 * step}


def written(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = monitor(tmp_path)
    for step in range(1, 21):
        told.step(numbers(step), 0.5)
    assert [line["step"] for line in written(tmp_path)] == list(range(1, 21))
    assert written(tmp_path)[2] == {**numbers(3), "tokens_per_second": 128.0, "seconds": 0.5}
    assert capsys.readouterr().out.splitlines() == [
        "step   1/100  loss 1.0000  lr 1.00e-01  grad 1.00  128 tokens/s  0:00:50 left",
        "step  10/100  loss 0.1000  lr 1.00e-01  grad 1.00  128 tokens/s  0:00:45 left",
        "step  20/100  loss 0.0500  lr 1.00e-01  grad 1.00  128 tokens/s  0:00:40 left",
    ]


def test_a_step_that_changed_no_weight_is_told_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"step": 1, "loss": 1.0, "learning_rate": 0.1, "tokens": 64, "loss_scale": 2.0**31, "skipped_steps": 1}
    monitor(tmp_path).step(line, 0.5)
    assert capsys.readouterr().out == (
        "step   1/100  loss 1.0000  lr 1.00e-01  overflow, no update (loss scale 2.1e+09)  128 tokens/s  0:00:50 left\n"
    )


def test_a_step_in_which_no_label_counts_is_told_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor(tmp_path).step({name: value for name, value in numbers(1).items() if name != "loss"}, 0.5)
    assert capsys.readouterr().out.startswith("step   1/100  no label counts  lr 1.00e-01  grad 1.00  ")


def test_gradients_of_zero_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor(tmp_path).step({**numbers(1), "grad_norm": 0.0}, 0.5)
    assert "  grad 0.00  " in capsys.readouterr().out


@pytest.mark.parametrize(("steps", "left"), [(10**12, "578703 days, 16:53:20"), (2**63 - 1, "999999999 days, 0:00:00")])
def test_a_run_may_take_longer_than_time_can_be_told(
    steps: int, left: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor(tmp_path, steps=steps).step(numbers(1), 0.05)
    assert capsys.readouterr().out.endswith(f"  {left} left\n")


def test_the_last_step_is_told_whatever_its_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = monitor(tmp_path, steps=13)
    for step in range(1, 14):
        told.step(numbers(step), 0.5)
    assert [line.split("/")[0] for line in capsys.readouterr().out.splitlines()] == ["step  1", "step 10", "step 13"]


def test_steps_of_a_curriculum_have_other_numbers_of_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = monitor(tmp_path, log_every=1)
    for step, tokens in ((1, 16), (2, 32), (3, 32)):
        told.step(numbers(step), 0.5, tokens=tokens)
    assert [line["tokens_per_second"] for line in written(tmp_path)] == [32.0, 64.0, 64.0]
    assert "64 tokens/s" in capsys.readouterr().out.splitlines()[-1]


def test_a_run_is_told_by_the_length_and_the_pace_that_are_in_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The time left is by the last fifty steps: the first ones, which compile, are forgotten."""
    told = monitor(tmp_path, log_every=1000)
    for step in range(1, 51):
        told.step(numbers(step), 60.0)
    told.follow(steps=200, log_every=100, patient=False)
    for step in range(51, 101):
        told.step(numbers(step), 1.0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  loss")[0] for line in lines] == ["step   1/100", "step 100/200"]
    assert lines[1].endswith("  64 tokens/s  0:01:40 left")


def test_mfu_where_the_peak_is_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor(tmp_path, peak_flops=1e9).step(numbers(1), 0.5)  # 64 tokens/0.5 s × 1e6 / 1e9
    assert written(tmp_path)[0]["mfu"] == 0.128
    assert "  MFU 12.8%  " in capsys.readouterr().out


def test_other_ranks_are_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = monitor(tmp_path, active=False, trackers=[Prometheus(str(tmp_path / "x.prom"), "r")])
    told.resume(0)
    told.step(numbers(1), 0.5)
    told.event("saved", step=1)
    told.say("hello")
    told.beat(1, 10.0)
    told.thermometers({"step": 1}, {})
    told.sync()
    told.close()
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


def test_credentials_of_urls_are_neither_said_nor_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told, url = monitor(tmp_path), "s3://me:s3cr3t@bucket/corpus"
    told.say(f"Read {url}.")
    told.event("read", path=url, several=[url])
    shown = capsys.readouterr().out + (tmp_path / "events.jsonl").read_text(encoding="utf-8")
    assert shown.count("bucket/corpus") == 3 and "s3cr3t" not in shown


def test_steps_after_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    told = monitor(tmp_path)
    for step in range(1, 8):
        told.step(numbers(step), 0.5)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    monitor(tmp_path).resume(7)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    (tmp_path / "thermometers.jsonl").write_bytes(before)
    monitor(tmp_path).resume(4)
    for name in ("metrics.jsonl", "thermometers.jsonl"):
        assert (tmp_path / name).read_bytes() == b"".join(before.splitlines(keepends=True)[:4]), name
    (tmp_path / "metrics.jsonl.7-0123abcd.partial").touch()  # of one that was killed
    monitor(tmp_path).resume(0)
    assert written(tmp_path) == [] and not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("last", [0, 1, 3, 5, 9])
@pytest.mark.parametrize(
    "steps", [[1, 2, 3, 4, 5, 6], [4, 5, 6], [1, 2, 2, 3], [1, 2, 5, 6, 3], [3, 2, 1], [1, 2, 0, 3], [6], []]
)
@pytest.mark.parametrize("torn", ["", '{"step": 3, "lo', '{"step": 3}'])
def test_what_is_forgotten_is_the_same_from_the_end_as_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: list[int], last: int, torn: str
) -> None:
    """Whether all of it is one block, or each line several."""
    content = "".join(f'{{"step": {step}, "line": {line}}}\n' for line, step in enumerate(steps)) + torn
    lines = [json.loads(line) for line in content.splitlines() if line.endswith("}")]
    by_step = {line["step"]: line for line in lines}
    for block in (8, 65_536):
        monkeypatch.setattr("colonnade.train.monitor.BLOCK", block)
        (tmp_path / "metrics.jsonl").write_text(content)
        monitor(tmp_path).resume(last)
        if block > len(content) or (sorted(steps) == steps and len(set(steps)) == len(steps)):
            assert written(tmp_path) == [by_step[step] for step in sorted(by_step) if 1 <= step <= last]


def test_of_a_long_run_the_end_alone_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a restart of a run of months parses hundreds of megabytes, and all ranks wait."""
    for name in ("metrics.jsonl", "thermometers.jsonl"):
        (tmp_path / name).write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(1, 50_001)))
    parsed = list[bytes | str]()

    def looks(line: bytes | str) -> dict[str, Any] | None:
        parsed.append(line)
        return object_in(line)

    monkeypatch.setattr("colonnade.train.monitor.object_in", looks)
    monitor(tmp_path).resume(49_900)
    assert last_step(tmp_path / "metrics.jsonl") == 49_900
    set_aside(tmp_path, 49_000)
    assert last_step(tmp_path / "metrics.jsonl") == 49_000 and len(parsed) < 20_000
    assert [line["step"] for line in written(tmp_path)] == [*range(1, 49_001)]
    undone = [json.loads(line)["step"] for line in (tmp_path / "undone.jsonl").read_text().splitlines()]
    assert undone == [*range(49_001, 49_901)]
    assert last_step(tmp_path / "thermometers.jsonl") == 49_900


@pytest.mark.parametrize(("last", "said"), [(0, "has no step"), (2, "ends with step 2"), (3, "ends with step 3")])
def test_numbers_that_are_lost_are_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], last: int, said: str
) -> None:
    """Else the best checkpoint may go, and train.patience begin anew, without a word."""
    for step in range(1, last + 1):
        monitor(tmp_path).step(numbers(step), 0.5)
    told = monitor(tmp_path)
    told.resume(4)
    told.tell_lost()
    assert f"metrics.jsonl {said}, and the run goes on from step 4: " in capsys.readouterr().out
    told.step(numbers(5), 0.5)
    told = monitor(tmp_path)
    told.resume(5)
    told.tell_lost()
    assert [(line["event"], line["step"], line["first"], line["last"]) for line in events(tmp_path)] == [
        ("numbers lost", 4, 1 if last else 5, last)
    ]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("torn", [b"", b'oss": 1.5}\n'])
def test_a_file_that_was_cut_at_its_front_is_told_once_for_each_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, torn: bytes
) -> None:
    """As by somebody who has kept the last lines, or by a rotation of logs."""
    file = tmp_path / "metrics.jsonl"
    append(tmp_path / "events.jsonl", {"event": "another", "first": 9})
    for step in range(1, 7):
        monitor(tmp_path).step(numbers(step), 0.5)
    lines = file.read_bytes().splitlines(keepends=True)
    for kept, said in (
        (lines, ""),
        (lines[1:], f"{file} begins with step 2, and the run goes on from step 6: the steps that it lacks are missing"),
        (lines[1:], ""),
        (lines[3:5], f"{file} begins with step 4 and ends with step 5, and the run goes on from step 6: "),
        (lines[2:], ""),
    ):
        file.write_bytes(torn * (kept is not lines) + b"".join(kept))
        capsys.readouterr()
        told = monitor(tmp_path)
        told.resume(6)
        told.tell_lost()
        out = capsys.readouterr().out
        assert out.startswith(said) and bool(out) == bool(said)
    append(tmp_path / "events.jsonl", {"event": "numbers lost", "first": None})
    assert first_step(file) == 3 and first_step(tmp_path / "none") == 0
    told = [(line["step"], line["first"], line["last"]) for line in events(tmp_path)[1:-1]]
    assert told == [(6, 2, 6), (6, 4, 5)]
    monitor(tmp_path).tell_lost()
    read = iter([b"torn", b'{"step": 3}\n', b'{"step": 4}\n'])
    monkeypatch.setattr(monitors, "each_line", lambda path: read)
    assert first_step(file) == 3 and [*read] == [b'{"step": 4}\n'], "no more than its front is read"
    monkeypatch.setattr(monitors, "first_step", lambda file: pytest.fail("one rank reads it"))
    monitor(tmp_path, active=False).tell_lost()


@pytest.mark.parametrize("first", [1, 2, 5])
def test_what_was_told_of_a_front_is_looked_for_only_where_one_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """A run of months has as many events, and goes on often. Of a file without a step the end is missing alone."""
    for step in range(first, 5):
        monitor(tmp_path).step(numbers(step), 0.5)
    looked, told = list[Path](), monitor(tmp_path)
    told.resume(4)
    monkeypatch.setattr(monitors, "objects_in", lambda path: looked.append(path) or [])
    told.tell_lost()
    assert looked == [tmp_path / "events.jsonl"] * (first == 2)


@pytest.mark.parametrize(
    "torn", [b'{"step": 3, "lo', b"\xff\xfe\x00", b"[3]", b"3", b'{"step": "3"}', b'{"loss": 1}', b"\n\n"]
)
def test_torn_and_foreign_lines_are_cut_off(tmp_path: Path, torn: bytes) -> None:
    told = monitor(tmp_path)
    for step in (1, 2):
        told.step(numbers(step), 0.5)
    told.event("started")
    for name in ("metrics.jsonl", "events.jsonl"):
        with (tmp_path / name).open("ab") as file:
            file.write(torn)
    told = monitor(tmp_path)
    told.resume(2)
    told.step(numbers(3), 0.5)
    told.event("resumed")
    assert [line["step"] for line in written(tmp_path)] == [1, 2, 3]
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [lines[0]["event"], lines[-1]["event"]] == ["started", "resumed"]


def test_what_another_thread_tells_while_a_run_returns_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads go on beside it."""
    told, threads = monitor(tmp_path), list[Thread]()
    told.event("started")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"cut off')

    def looks(line: bytes | str) -> dict[str, Any] | None:
        if not threads and b"started" in bytes(line):
            threads.append(Thread(target=told.event, args=("uploaded",)))
            threads[-1].start()
            threads[-1].join(0.05)
        return object_in(line)

    monkeypatch.setattr("colonnade.train.monitor.object_in", looks)
    told.go_back(0)
    for thread in threads:
        thread.join()
    assert [line["event"] for line in events(tmp_path)] == ["started", "uploaded"]


def test_a_run_goes_on_before_what_was_written_while_the_disk_is_full(tmp_path: Path) -> None:
    told = monitor(tmp_path)
    for step in (1, 2, 3):
        told.step(numbers(step), 0.5)
    told.event("started")
    with room_for(0):
        monitor(tmp_path).resume(2)
    assert [line["step"] for line in written(tmp_path)] == [1, 2] and [*map(str, tmp_path.glob("*.partial"))] == []
    monitor(tmp_path).step(numbers(2), 0.75)
    with room_for(0), pytest.raises(DiskError, match=r"metrics\.jsonl cannot be written: File too large"):
        monitor(tmp_path).resume(2)


def test_a_full_disk_is_a_clear_message(tmp_path: Path) -> None:
    """A limit on the size of files stands for it; nothing stays of the line."""

    def fill(rank: int, num_ranks: int) -> str:
        told = monitor(tmp_path)
        told.step(numbers(1), 0.5)
        size = (tmp_path / "metrics.jsonl").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
        with pytest.raises(ConfigError) as caught:
            told.step(numbers(2), 0.5)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert (tmp_path / "metrics.jsonl").stat().st_size == size
        told.resume(1)
        return str(caught.value)

    (said,) = run_on_ranks(fill, 1)
    assert said == (
        f"{tmp_path / 'metrics.jsonl'} cannot be written: File too large. Fix that (free some space, or change its "
        "permissions), and run the same command again: it goes on from the last checkpoint."
    )
    assert [line["step"] for line in written(tmp_path)] == [1]


def test_what_happens_while_no_rank_runs_is_recorded_where_it_can_be(tmp_path: Path) -> None:
    """No folder is made for it, and one that refuses ends nothing."""
    write_event(tmp_path / "nowhere", "fetched", step=3)
    assert not (tmp_path / "nowhere").exists()
    write_event(tmp_path, "fetched", step=3, url="s3://me:s3cr3t@bucket/run")
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    event = json.loads(line)
    assert (event["event"], event["step"]) == ("fetched", 3) and event["time"] > 1e9
    assert "bucket/run" in line and "s3cr3t" not in line
    (tmp_path / "events.jsonl").unlink()
    (tmp_path / "events.jsonl").mkdir()
    write_event(tmp_path, "fetched", step=3)


def test_a_folder_that_is_lost_for_a_moment_ends_no_one_who_tells_an_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(path: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as away:
        away.setattr(Path, "is_dir", lost)
        write_event(tmp_path, "fault", step=3)
    write_event(tmp_path, "restart", saved=2)
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(line)["event"] == "restart"


class Board:
    """Stands for tensorboard's writer."""

    made: list["Board"] = []

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step, self.closed = folder, purge_step, False
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, int | None]] = []
        self.made.append(self)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def add_text(self, name: str, words: str, step: int | None = None) -> None:
        self.texts.append((name, step))

    def close(self) -> None:
        self.closed = True


def test_tensorboard_gets_the_same_numbers_and_events_at_their_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Board  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(Board, "made", [])
    told = monitor(tmp_path, trackers=[TensorBoard(tmp_path)])
    assert Board.made == [] and not list(tmp_path.iterdir()), "nothing is written before `resume`"
    told.resume(4)
    told.event("resumed")
    told.step(numbers(5), 0.5)
    told.event("saved")
    told.close()
    (board,) = Board.made
    assert (board.folder, board.purge_step, board.closed) == (str(tmp_path / "tensorboard"), 5, True)
    assert ("loss", 0.2, 5) in board.scalars and len(board.scalars) == len(written(tmp_path)[0])
    assert board.texts == [("event/resumed", 4), ("event/saved", 5)]


def test_tensorboard_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"run.tensorboard = true needs the package tensorboard.*pip install"):
        TensorBoard(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_real_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    told = monitor(tmp_path, trackers=[TensorBoard(tmp_path)])
    told.resume(0)
    told.step(numbers(1), 0.5)
    told.close()
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_a_heartbeat_is_as_old_as_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often somebody sets the clock meanwhile."""
    told, now = monitor(tmp_path), [1000.0]
    monkeypatch.setattr("colonnade.train.monitor.time.monotonic", lambda: now[0])
    monkeypatch.setattr("colonnade.train.monitor.time.time", lambda: 1e9 - 1e6 * now[0])
    file = tmp_path / "heartbeat.json"
    told.beat(1, 0.0)
    assert not file.exists()
    steps = []
    for step, seconds in ((1, 0.0), (2, 4.0), (3, 11.0), (4, 20.0), (5, 22.0)):
        now[0] = 1000.0 + seconds
        told.beat(step, 10.0)
        steps.append(json.loads(file.read_text())["step"])
    assert steps == [1, 1, 3, 3, 5]
    assert json.loads(file.read_text()) == {
        "time": 1e9 - 1e6 * 1022.0, "step": 5, "host": socket.gethostname(), "process": os.getpid()
    }  # fmt: skip
