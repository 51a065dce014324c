"""Uploads that take long, fail in odd ways or are none of this rank's; and what stays in the storage."""

import threading
from typing import Any

import pytest

from colonnade.checkpoint.names import MANIFEST
from colonnade.checkpoint.stored import Stored
from colonnade.config.saving import CheckpointConfig
from colonnade.errors import ConfigError
from colonnade.train.uploads import FAILED, TAKEN, UNFINISHED, Uploads, uploads_of
from tests.storages import FaultyStorage
from tests.told import Told
from tests.train import test_uploads
from tests.train.test_uploads import URL, Run, await_

quick, run = test_uploads.quick, test_uploads.run


class Hurried(threading.Condition):
    """Whoever waits for something does so for a tenth of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[float] = []

    def wait_for(self, predicate: Any, timeout: float | None = None) -> Any:
        assert timeout is not None, "nobody waits for ever"
        self.waited.append(timeout)
        return super().wait_for(predicate, timeout / 10)


def gated() -> threading.Event:
    """The storage takes nothing before this is set."""
    gate = threading.Event()

    def before(operation: str, path: str) -> None:
        if operation == "put":
            gate.wait(20)

    FaultyStorage.before = staticmethod(before)
    return gate


def test_an_upload_that_takes_long_is_waited_for_and_that_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = gated()
    monkeypatch.setattr(run.told, "say", lambda text: (run.told.said.append(text), gate.set()))
    run.save(2)
    going = run.uploads(upload_patience=100.0)
    going._changed = Hurried()
    with going:
        pass
    assert run.told.said == [f"Waiting for the upload to {URL}, 100 s at most."]
    assert run.there() == [2] and not run.told.of(UNFINISHED)


@pytest.mark.parametrize(("patience", "is_said"), [(0.5, False), (1.0, False), (1.5, True)])
def test_an_upload_that_stands_still_is_waited_for_as_long_as_was_asked_for(
    run: Run, patience: float, is_said: bool
) -> None:
    gate, going = gated(), run.uploads(upload_patience=patience)
    run.save(2)
    going._changed = waits = Hurried()
    with going:
        pass
    gate.set()
    assert sum(waits.waited) == pytest.approx(patience)
    assert len(run.told.of(UNFINISHED)) == 1 and len(run.told.said) == 1 + is_said
    assert run.told.said[0].startswith("Waiting for the upload") == is_said


def test_what_the_disk_has_not_any_more_stays_in_the_storage(run: Run) -> None:
    """As many as are kept there, and also for a run that goes on elsewhere with the newest alone."""
    run.save(2, 4)
    with run.uploads(keep_every=2):
        pass
    assert run.there() == [2, 4]
    run.delete(2)
    read: list[str] = []
    FaultyStorage.before = staticmethod(lambda operation, path: read.append(path) if operation == "cat" else None)
    with run.uploads(upload_keep=2):
        pass
    assert run.there() == [2, 4] and len(run.told.of("uploaded")) == 2
    assert [path.split("/")[-2] for path in read if path.endswith(MANIFEST)] == ["step_00000004"]
    run.delete(4)
    run.save(6)
    with run.uploads(upload_keep=1, keep_every=4):
        pass
    assert run.there() == [4, 6], "what stays however old it is does so in the storage too"


def test_a_storage_without_a_place_for_them_is_told_as_a_failure(run: Run) -> None:
    """As of a bucket that there is not: the checkpoint itself is still here."""

    def before(operation: str, path: str) -> None:
        if operation == "put":
            raise FileNotFoundError("The specified bucket does not exist\nand more")

    FaultyStorage.before = staticmethod(before)
    run.save(2)
    going = run.uploads()
    with pytest.raises(FileNotFoundError):
        going._upload(run.stored, going._next(run.stored) or 0)
    going._has_failed(run.stored, FileNotFoundError("The specified bucket does not exist\nand more"))
    (failed,) = run.told.of(FAILED)
    assert failed["reason"] == "FileNotFoundError: The specified bucket does not exist"
    assert not run.told.of("uploaded") and not list(going.in_use())


def test_behind_a_failure_the_storage_is_looked_at_anew(run: Run) -> None:
    """What was there may have gone meanwhile."""
    run.save(2)
    going = run.uploads()
    going._upload(run.stored, going._next(run.stored) or 0)
    assert going._next(run.stored) is None
    run.stored.remove(2)
    going._has_failed(run.stored, OSError("down"))
    assert going._next(run.stored) == 2


def test_a_disk_that_takes_no_events_stops_no_upload(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(kind: str, **details: Any) -> None:
        raise ConfigError("The disk is full")

    monkeypatch.setattr(run.told, "event", full)
    run.save(2)
    with run.uploads():
        await_(lambda: run.there() == [2])
    assert run.told.said == []


def test_one_rank_uploads_and_only_where_a_place_is_named(run: Run) -> None:
    def thread_of(url: str | None, active: bool) -> threading.Thread | None:
        kept = run.config.checkpoint.model_copy(update={"upload_to": url})
        config = run.config.model_copy(update={"checkpoint": kept})
        with uploads_of(config, Told(), active=active) as going:  # type: ignore[arg-type]
            return going._thread

    assert thread_of(URL, active=False) is None and thread_of(None, active=True) is None
    assert thread_of(URL, active=True) is not None


def test_what_is_kept_may_change_while_the_run_goes_on(run: Run) -> None:
    run.save(2)
    with run.uploads(keep=1) as going:
        await_(lambda: run.there() == [2])
        going.follow(CheckpointConfig(upload_keep=2, keep_best=False))
        run.save(4)
        going.wake()
        await_(going._is_done)
        assert run.there() == [2, 4]


def test_another_machine_that_begins_during_an_upload_is_left_the_place(run: Run) -> None:
    """Whatever else there would be to upload."""
    run.save(2, 4)

    def before(operation: str, path: str) -> None:
        if operation == "pipe" and path.endswith(f"step_00000004/.{MANIFEST}.partial"):
            Stored(URL).claim()

    FaultyStorage.before = staticmethod(before)
    with run.uploads(keep_every=2):
        await_(lambda: bool(run.told.of(TAKEN)))
    assert run.there() == [4]


def test_of_a_run_without_a_checkpoint_nothing_is_deleted(run: Run) -> None:
    """Until it has one, what the storage has may be all that there is."""
    run.save(2)
    with run.uploads():
        pass
    run.delete(2)
    with run.uploads():
        pass
    assert run.there() == [2]


def test_behind_its_end_an_upload_says_nothing(run: Run) -> None:
    going: Uploads = run.uploads()
    going._end()
    going._has_failed(run.stored, OSError("down"))
    assert run.told.said == [] == run.told.events


def test_a_checkpoint_of_which_the_manifest_has_gone_already_is_not_uploaded(run: Run) -> None:
    """It is being deleted; the next one takes its turn, and nothing has failed."""
    run.save(2, 4)
    (run.folder / "checkpoints" / "step_00000004" / MANIFEST).unlink()
    with run.uploads(keep_every=2) as going:
        await_(going._is_done)
    assert run.there() == [2] and not run.told.of(FAILED)
