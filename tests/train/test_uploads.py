"""Uploads beside training: what comes when, what stays, what a failing storage and a run that ends do."""

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade import storage
from colonnade.checkpoint.names import MANIFEST, folder_name
from colonnade.checkpoint.stored import RECORD, Stored
from colonnade.config.saving import CheckpointConfig
from colonnade.config.schema import Config
from colonnade.launch.process import BACKGROUND
from colonnade.train import reference, uploads
from colonnade.train.run_record import FILES, unpack
from colonnade.train.uploads import Uploads
from tests import tiny
from tests.storages import FaultyStorage, MemoryFileSystem, emptied
from tests.tiny import TinyCorpus
from tests.told import Told

URL = "faulty://bucket/run"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(storage, "PAUSE", 0.0)
    monkeypatch.setattr(uploads, "FIRST", 0.02)
    monkeypatch.setattr(uploads, "LAST", 0.02)
    with emptied(MemoryFileSystem, FaultyStorage):
        yield
        for thread in threading.enumerate():
            if thread.name == BACKGROUND:  # with one at work the next command in this process would end it
                thread.join(20)
                assert not thread.is_alive(), "whatever ends a run ends its uploads"


class Run:
    """A run's folder with checkpoints that have just enough for an upload."""

    def __init__(self, corpus: TinyCorpus, folder: Path) -> None:
        self.config: Config = tiny.config(corpus, folder, f"checkpoint.upload_to={URL}", "checkpoint.keep_best=false")
        self.folder, self.told, self.stored = Path(self.config.run.folder), Told(), Stored(URL)

    def save(self, *steps: int, content: str = "first") -> None:
        for step in steps:
            folder = self.folder / "checkpoints" / folder_name(step)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            (folder / "a.distcp").write_text(f"weights of {step}, {content}")
            (folder / MANIFEST).write_text(f"manifest of {step}, {content}")

    def delete(self, *steps: int) -> None:
        for step in steps:
            shutil.rmtree(self.folder / "checkpoints" / folder_name(step))

    def uploads(self, **keys: Any) -> Uploads:
        kept = self.config.checkpoint.model_copy(update={"upload_patience": 20.0, **keys})
        config = self.config.model_copy(update={"checkpoint": kept})
        return Uploads(config, self.told, self.stored)  # type: ignore[arg-type]

    def there(self) -> list[int]:
        """Whole checkpoints in the storage."""
        return [step for step, whole in Stored(URL).steps().items() if whole]

    def record(self, step: int, target: Path) -> str:
        """The metrics that lie beside a checkpoint in the storage."""
        self.stored.get(step, [RECORD], target)
        unpack(target / RECORD, target)
        return (target / "metrics.jsonl").read_text()


@pytest.fixture
def run(corpus: TinyCorpus, tmp_path: Path) -> Run:
    return Run(corpus, tmp_path)


def fail(operation: str, times: int, word: str = "") -> list[int]:
    """The storage refuses so many operations on names with a word; what is left of them."""
    left = [times]

    def before(which: str, path: str) -> None:
        if which == operation and word in path and left[0]:
            left[0] -= 1
            raise OSError("no route to user:K3Y@host")

    FaultyStorage.before = staticmethod(before)
    return left


def await_(there: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not there():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.005)


def test_the_newest_is_uploaded_with_the_record(run: Run, tmp_path: Path) -> None:
    run.save(2, 4)
    (run.folder / "metrics.jsonl").write_text('{"step": 4}\n')
    (run.folder / "lock").write_text("mine")
    with run.uploads() as going:
        await_(lambda: run.there() == [4])
        run.save(6)
        going.wake()
        await_(lambda: run.there() == [4, 6])
        (run.folder / "metrics.jsonl").write_text('{"step": 4}\n{"step": 6}\n')
    (first, second) = run.told.of("uploaded")
    assert (first["step"], second["step"], second["checkpoint"]) == (4, 6, "step_00000006")
    assert first["bytes"] == len("weights of 4, first") + len("manifest of 4, first") and not run.told.said
    assert run.stored.read(6, "a.distcp") == b"weights of 6, first"
    for step, lines in ((4, 1), (6, 2)):
        target = tmp_path / str(step)
        target.mkdir()
        run.stored.get(step, [RECORD], target)
        assert unpack(target / RECORD, target) == ["metrics.jsonl"]
        assert (target / "metrics.jsonl").read_text().count("\n") == lines, "the newest has all to the run's end"
    assert not [path for path in run.folder.iterdir() if "partial" in path.name]
    assert reference.FILE in FILES


def test_what_is_there_is_not_uploaded_again_and_what_is_half_is(run: Run) -> None:
    run.save(2, 4)
    with run.uploads():
        await_(lambda: run.there() == [4])
    with run.uploads():
        pass
    assert len(run.told.of("uploaded")) == 1
    FaultyStorage("faulty").rm_file(f"/bucket/run/step_00000004/{MANIFEST}")
    run.stored.put(2, [run.folder / "checkpoints" / "step_00000002" / "a.distcp"])
    with run.uploads():
        pass
    assert run.stored.steps() == {4: True}, "half of another is deleted"
    run.save(4, content="second")
    with run.uploads():
        pass
    assert run.stored.read(4, "a.distcp") == b"weights of 4, second"


def test_a_disk_that_refuses_the_record_is_told_as_the_reason(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path, target: Path) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(uploads, "pack", refuse)
    run.save(2)
    with run.uploads(upload_patience=0.05):
        await_(lambda: bool(run.told.of("upload failed")))
    assert run.told.of("upload failed")[0]["reason"] == "OSError: No space left on device" and run.there() == []


def test_which_are_kept(run: Run) -> None:
    with run.uploads(keep=3) as going:
        for step in (2, 4, 6, 8):
            run.save(step)
            going.wake()
            await_(lambda s=step: s in run.there())  # type: ignore[misc]
    assert run.there() == [4, 6, 8]
    with run.uploads(keep=3, upload_keep=1, keep_every=4):
        pass
    assert run.there() == [4, 8]
    with run.uploads(upload_keep=4, keep_every=2):
        pass
    assert run.there() == [2, 4, 6, 8], "those that stay for ever are made up for"


def test_older_ones_stay_until_the_newer_is_whole(run: Run) -> None:
    run.save(2)
    with run.uploads(keep=1):
        pass
    run.save(4)
    left = fail("pipe", 10_000, "step_00000004/.manifest")
    with run.uploads(keep=1) as going:
        await_(lambda: left[0] < 9_990)
        assert run.there() == [2]
        left[0] = 0
        going.wake()
    assert run.there() == [4]


def test_a_newer_one_takes_the_place_of_one_that_waits(run: Run) -> None:
    gate, entered = threading.Event(), threading.Event()

    def before(operation: str, path: str) -> None:
        if operation == "put" and "step_00000002" in path:
            entered.set()
            assert gate.wait(20)

    FaultyStorage.before = staticmethod(before)
    run.save(2)
    with run.uploads() as going:
        assert entered.wait(20) and list(going.in_use()) == [2]
        for step in (4, 6, 8):
            started = time.monotonic()
            run.save(step)
            going.wake()
            assert time.monotonic() - started < 5, "a save waits for no upload"
        gate.set()
    assert [told["step"] for told in run.told.of("uploaded")] == [2, 8] and not list(going.in_use())


def test_a_rollback_takes_away_what_it_has_undone(run: Run) -> None:
    run.save(2, 4, 6)
    with run.uploads(upload_keep=3, keep_every=2) as going:
        await_(lambda: run.there() == [2, 4, 6])
        run.delete(4, 6)
        going.wake(refresh=True)
        await_(lambda: run.there() == [2])
        run.save(4, content="second")
        going.wake()
        await_(lambda: run.there() == [2, 4])
    assert run.stored.read(4, "a.distcp") == b"weights of 4, second"


def test_what_a_rollback_has_undone_goes_also_where_the_run_has_come_as_far_again(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the storage was away. It is asked once, of what the disk has not, or has otherwise."""
    asked: list[int] = []
    monkeypatch.setattr(uploads, "is_undone", lambda stored, step, folder: asked.append(step) or step in (4, 6))
    run.save(2, 4, 6)
    with run.uploads(keep_every=2):
        pass
    assert run.there() == [2, 4, 6] and not asked, "the run has not returned to anything"
    (run.folder / "rollbacks.json").write_text("[]")
    run.delete(2, 4)
    run.save(6, 8, content="second")
    with run.uploads(upload_keep=4) as going:
        await_(lambda: run.there() == [2, 8])
        run.save(10)
        going.wake()
    assert run.there() == [2, 8, 10] and asked == [2, 4, 6]


def test_the_best_of_the_disk_is_not_uploaded_where_the_storage_has_a_better_one(run: Run) -> None:
    """A run that goes on from the storage on another machine has its newest there alone. Each save tidies."""
    losses = {10: 1.0, 20: 3.0, 30: 2.0, 40: 2.5, 50: 2.6}
    lines = [json.dumps({"step": step, "validation_loss": loss}) + "\n" for step, loss in losses.items()]
    run.save(10, 20)
    (run.folder / "metrics.jsonl").write_text("".join(lines))
    with run.uploads(keep_best=True, keep=1):
        pass
    run.delete(10)
    run.save(30)
    for newest in (40, 50):
        run.save(newest)
        with run.uploads(keep_best=True, keep=1):
            pass
    assert [each["step"] for each in run.told.of("uploaded")] == [20, 10, 40, 50] and run.there() == [10, 50]


def test_a_checkpoint_that_is_replaced_or_deleted_meanwhile_is_never_whole_there(run: Run) -> None:
    sealed: list[bytes] = []
    changes = {"step_00000004": lambda: run.save(4, content="second"), "step_00000006": lambda: run.delete(6)}

    def before(operation: str, path: str) -> None:
        name = path.split("/")[-2]
        if operation == "put" and path.endswith(f".{RECORD}.partial") and name in changes:
            changes.pop(name)()
        if operation == "pipe" and path.endswith(f".{MANIFEST}.partial"):
            sealed.append(FaultyStorage("faulty").store[f"/bucket/run/{name}/a.distcp"].getvalue())

    FaultyStorage.before = staticmethod(before)
    run.save(4)
    with run.uploads() as going:
        await_(lambda: run.there() == [4])
        assert run.stored.read(4, "a.distcp") == b"weights of 4, second"
        assert run.stored.read(4, MANIFEST) == b"manifest of 4, second"
        run.save(6)
        going.wake()
    assert run.stored.steps() == {4: True} and not run.told.of("upload failed")
    assert sealed == [b"weights of 4, second"]


def test_the_record_is_put_beside_no_checkpoint_that_is_not_there(run: Run) -> None:
    """A save behind the look at what is to be uploaded: should it be deleted before its turn, nobody would tidy it."""
    going = run.uploads()
    run.save(4, 6)
    going._there, going._refreshes = {4: str(going._digest(4))}, True
    going._refresh(run.stored)
    assert run.stored.steps() == {}
    going._there[6] = str(going._digest(6))
    going._refresh(run.stored)
    assert run.stored.steps() == {6: False}


def test_of_what_is_kept_for_good_no_manifest_is_read_at_each_save(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be thousands, of megabytes each. One that another has taken the place of is read."""
    going, read, read_bytes = run.uploads(keep_every=1), list[str](), Path.read_bytes

    def noted(path: Path) -> bytes:
        if path.name == MANIFEST:
            read.append(path.parent.name)
        return read_bytes(path)

    run.save(1, 2, 3, 4)
    going._there = {step: str(going._digest(step)) for step in (1, 2, 3, 4)}
    run.save(5)
    monkeypatch.setattr(Path, "read_bytes", noted)
    assert going._next(run.stored) == 5 and read == [folder_name(5)]
    going._there[5] = str(going._digest(5))
    going._tidy(run.stored)
    assert going._next(run.stored) is None and read == [folder_name(5)]
    run.save(3, content="second")
    assert going._next(run.stored) == 3 and read == [folder_name(5), folder_name(3)]


def test_what_was_undone_stays_until_what_the_run_has_returned_to_is_there(run: Run) -> None:
    """It may be all that there is: a checkpoint that came while a later one was being uploaded never was."""
    run.save(2, 4)
    with run.uploads(upload_keep=1) as going:
        await_(lambda: run.there() == [4])
    run.delete(4)
    going._tidy(run.stored)
    assert run.there() == [4]
    with run.uploads(upload_keep=1):
        await_(lambda: run.there() == [2])


def test_the_record_beside_the_newest_follows_though_an_older_one_is_uploaded_meanwhile(
    run: Run, tmp_path: Path
) -> None:
    run.save(2, 4)
    with run.uploads():
        await_(lambda: run.there() == [4])
    lines, going = '{"step": 4}\n', run.uploads(keep_every=2)

    def before(operation: str, path: str) -> None:
        if operation == "put" and path.endswith("step_00000002/a.distcp"):
            (run.folder / "metrics.jsonl").write_text(lines)
            going.wake(refresh=True)

    FaultyStorage.before = staticmethod(before)
    with going:
        await_(going._is_done)
        assert run.there() == [2, 4] and run.record(4, tmp_path) == lines


def test_what_is_saved_while_a_pass_ends_is_uploaded_before_the_run_ends(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(2)
    going, tidies = run.uploads(), threading.Event()
    tidy, is_wanted = going._tidy, going._is_wanted

    def until_the_run_leaves(stored: Stored) -> None:
        tidy(stored)
        tidies.set()
        await_(lambda: going._leaving)

    def late() -> bool:
        time.sleep(0.1)  # in which a run for which all is done would end
        return is_wanted()

    monkeypatch.setattr(going, "_tidy", until_the_run_leaves)
    monkeypatch.setattr(going, "_is_wanted", late)
    with going:
        assert tidies.wait(20)
        run.save(4)
    assert run.there()[-1] == 4


def test_the_record_beside_the_newest_is_put_once_for_all_that_was_told_of_it(run: Run) -> None:
    """It has every line of metrics: at each look at the disk it would go over the network again."""
    put = list[str]()

    def before(operation: str, path: str) -> None:
        if operation == "put" and RECORD in path:
            put.append(path)

    FaultyStorage.before = staticmethod(before)
    run.save(2)
    with run.uploads() as going:
        for refresh, times in ((False, 1), (False, 1), (True, 2), (False, 2)):
            going.wake(refresh=refresh)
            await_(going._is_done)
            assert len(put) == times
    assert len(put) == 3, "the end of the run is told"


def test_a_record_that_could_not_be_replaced_is_put_again(run: Run, tmp_path: Path) -> None:
    """As often as it takes: until then nothing works again."""
    run.save(2)
    with run.uploads() as going:
        await_(going._is_done)
        (run.folder / "metrics.jsonl").write_text('{"step": 2}\n')
        left = fail("put", 2 * storage.ATTEMPTS, RECORD)
    assert left == [0] and len(run.told.of("upload failed")) == len(run.told.of("upload works again")) == 1
    assert run.record(2, tmp_path) == '{"step": 2}\n'


def test_a_run_that_goes_on_brings_the_record_up_to_date_at_once(run: Run, tmp_path: Path) -> None:
    """What was killed had no time for it, and the next end may come as suddenly."""
    run.save(2)
    with run.uploads():
        await_(lambda: run.there() == [2])
    (run.folder / "metrics.jsonl").write_text('{"step": 2}\n')
    going = run.uploads()
    with going:
        await_(going._is_done)
        assert run.record(2, tmp_path) == '{"step": 2}\n' and len(run.told.of("uploaded")) == 1


def test_the_record_is_put_again_where_that_is_asked_for_alone(run: Run) -> None:
    """Each save brings its own."""
    put: list[str] = []

    def before(operation: str, path: str) -> None:
        if operation == "put" and RECORD in path:
            put.append(path.split("/")[-2])

    FaultyStorage.before = staticmethod(before)
    run.save(2)
    with run.uploads() as going:
        await_(going._is_done)
        for wake, times in ((going.wake, 1), (partial(going.wake, refresh=True), 2), (going.wake, 2)):
            wake()
            await_(going._is_done)
            assert put == ["step_00000002"] * times
        run.save(4)
        going.wake()
        await_(going._is_done)
        assert put[2:] == ["step_00000004"]


def test_a_run_ends_as_soon_as_its_upload_has(run: Run) -> None:
    """Its patience is for those that take longer. The quickest of some, on a machine that does other work too."""
    seconds = []
    for _ in range(3):
        run.save(2)
        started = time.monotonic()
        with run.uploads(upload_patience=20.0):
            pass
        seconds.append(time.monotonic() - started)
    assert min(seconds) < 0.9 and run.there() == [2]


def test_a_failure_is_said_once_and_so_is_its_end(run: Run) -> None:
    run.save(2)
    left = fail("put", 40)
    with run.uploads(upload_patience=20.0) as going:
        await_(lambda: left[0] < 30)
        run.save(4)
        going.wake()
    (failed,), (again,) = run.told.of("upload failed"), run.told.of("upload works again")
    assert "OSError: no route to" in failed["reason"] and again["tries"] > 2
    assert run.there() == [4] and [told["step"] for told in run.told.of("uploaded")] == [4]
    assert [line.partition(" to ")[0] for line in run.told.said if "Waiting" not in line] == ["Uploading", "Uploading"]


def test_tries_come_later_and_later(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    going, pauses = run.uploads(), []
    monkeypatch.setattr(uploads, "FIRST", 10.0)
    for _ in range(9):
        going._has_failed(run.stored, OSError("down"))
        pauses.append(going._pause)
    assert pauses[:3] == [10.0, 20.0, 40.0] and pauses[-1] == uploads.LONGEST
    assert len(run.told.events) == 1


def test_a_storage_that_has_failed_is_left_alone_until_the_next_try(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "FIRST", 60.0)
    run.save(2)
    fail("put", storage.ATTEMPTS)
    with run.uploads():
        await_(lambda: bool(run.told.of("upload failed")))
        time.sleep(0.1)
        assert run.there() == [], "a minute later it would be there"
    assert run.there() == [2], "the end of the run waits for no pause"


def test_while_the_run_waits_for_its_last_upload_tries_are_no_further_apart_than_is_said(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, now, waits = run.uploads(), [0.0], list[float]()

    def wait(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(uploads, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(uploads, "LAST", 2.0)
    monkeypatch.setattr(going._changed, "wait", wait)
    going._failures, going._pause, going._leaving = 1, 10.0, True
    assert going._is_wanted() and waits == [2.0]


def test_the_end_of_a_run_waits_no_longer_than_can_be_counted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of who writes 1e10 for ever."""
    run.save(2)
    with run.uploads(upload_patience=1e10) as going:
        waits, wait_for = list[float](), going._changed.wait_for

        def wait(is_done: Callable[[], bool], timeout: float) -> bool:
            waits.append(timeout)
            return len(waits) > 1 and wait_for(is_done, timeout)

        monkeypatch.setattr(going._changed, "wait_for", wait)
    assert len(waits) == 2 and waits[1] <= threading.TIMEOUT_MAX and run.there() == [2]


def test_the_end_of_a_run_waits_for_a_while(run: Run) -> None:
    run.save(2)
    fail("put", 10_000)
    started = time.monotonic()
    with run.uploads(upload_patience=0.3):
        pass
    assert 0.25 < time.monotonic() - started < 10
    (told,) = run.told.of("upload unfinished")
    assert told["checkpoint"] == "step_00000002"
    assert "has not ended within checkpoint.upload_patience = 0.3 s" in run.told.said[-1] and run.there() == []
    events = len(run.told.events)
    time.sleep(0.1)
    assert len(run.told.events) == events, "nothing is told after the end"


def test_a_second_ctrl_c_waits_for_nothing(run: Run) -> None:
    run.save(2)
    fail("put", 10_000)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), run.uploads():
        raise KeyboardInterrupt
    assert time.monotonic() - started < 5


STUCK = """
import time
from colonnade import cli
from colonnade.errors import ConfigError
from colonnade.train import loop
from tests.storages import FaultyStorage
def stand_still(operation, path):
    if path.endswith(".distcp"):
        time.sleep(600)
def fail():
    raise ERROR("in the middle of it")
def until_step_3(state, *given, **more):
    return fail() if state.step == 2 and ERROR else step(state, *given, **more)
FaultyStorage.before = staticmethod(stand_still)
step = loop.train_step
loop.__dict__["train_step"] = until_step_3
cli.main()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (None, 0, ""),
        ("ConfigError", 2, "colonnade: in the middle of it"),
        ("ZeroDivisionError", 1, "ZeroDivisionError: in the middle of it"),
    ],
)
def test_a_storage_that_stands_still_keeps_no_process(
    corpus: TinyCorpus, tmp_path: Path, error: str | None, status: int, said: str
) -> None:
    """Threads of the pool that uploads are waited for while the interpreter ends, unless the process is ended first."""
    config = tiny.write_config(corpus, tmp_path)
    words = ["train", str(config), "checkpoint.every=1", f"checkpoint.upload_to={URL}", "checkpoint.upload_patience=1"]
    program = STUCK.replace("ERROR", str(error))
    answer = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, timeout=100)
    assert answer.returncode == status, answer
    assert "has not ended within checkpoint.upload_patience = 1 s" in answer.stdout
    assert said in answer.stderr and answer.stderr.count("Traceback") == (status == 1)


def test_an_upload_is_waited_for_where_the_run_ends_with_an_error(run: Run) -> None:
    run.save(2)
    with pytest.raises(SystemExit), run.uploads():
        raise SystemExit(143)
    assert run.there() == [2]


def test_who_is_followed_by_another_machine_uploads_no_more(run: Run) -> None:
    run.save(2, 4)
    with run.uploads() as going:
        await_(lambda: run.there() == [4])
        Stored(URL).claim()
        run.save(6)
        going.wake()
        await_(lambda: bool(run.told.of("upload lost to another")))
        started = time.monotonic()
    assert time.monotonic() - started < 5 and run.there() == [4]
    assert "end one of them" in run.told.said[-1]


def test_nothing_happens_where_there_is_nowhere_to_upload_to(run: Run) -> None:
    threads = threading.active_count()
    with Uploads(run.config, run.told, None) as going:  # type: ignore[arg-type]
        going.follow(CheckpointConfig())
        going.wake()
        assert threading.active_count() == threads and list(going.in_use()) == []
