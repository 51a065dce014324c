"""Saves that fail or have to be good, and what a run that goes on says and is held against."""

import errno
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from colonnade.checkpoint.agree import agree
from colonnade.checkpoint.failure import alone_is_fine
from colonnade.checkpoint.names import checkpoints_in
from colonnade.checkpoint.plan import Shard
from colonnade.checkpoint.save import Payload, write
from colonnade.config.load import load
from colonnade.errors import CheckpointError, ColonnadeError
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.train import recovery
from colonnade.train.change import Change
from colonnade.train.recovery import Checkpoints, check_metadata, resume
from colonnade.train.save_retries import SaveRetries
from tests import tiny
from tests.distributed import run_on_ranks
from tests.tiny import TinyCorpus
from tests.told import Told
from tests.train.test_recovery import checkpoints_of

STATE: Any = SimpleNamespace(step=7)


class Disk:
    """A saver to a disk that is full for a while: so many waits for what was saved fail."""

    is_busy = False

    def __init__(self, failures: int) -> None:
        self.left, self.done = failures, list[object]()

    def save(self, *_: object) -> None:
        self.done.append("save")

    def wait(self) -> None:
        self.done.append("wait")
        self.left -= 1
        if self.left >= 0:
            raise CheckpointError("The disk is full.")


def saving_to(disk: Disk, told: Told, limit: float, monkeypatch: pytest.MonkeyPatch) -> Checkpoints:
    monkeypatch.setattr(Checkpoints, "payload", lambda self, state: None)
    monkeypatch.setattr(time, "sleep", disk.done.append)
    return checkpoints_of(Mesh(), told, SaveRetries(limit), save=disk.save, wait=disk.wait, is_busy=False)


def test_a_save_that_has_to_be_good_is_waited_for_and_made_until_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one is left to itself."""
    disk, told = Disk(2), Told()
    saving = saving_to(disk, told, 900.0, monkeypatch)
    saving.save(STATE)
    assert disk.done == ["save"]
    saving.save(STATE, must=True)
    assert disk.done[1:] == ["save", "wait", 2.0, "save", "wait", 2.0, "save", "wait"]
    assert [each["tries"] for each in told.of("save failed")] == [1]


@pytest.mark.parametrize("limit", [900.0, 0.0])
def test_a_save_that_fails_before_the_run_returns_is_told_and_not_made_again(
    limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be of a state that is given up. Where the first failure ends the run, this one does."""
    disk, told = Disk(1), Told()
    saving = saving_to(disk, told, limit, monkeypatch)
    if not limit:
        with pytest.raises(CheckpointError, match="The disk is full"):
            saving.wait_out(STATE)
        return
    saving.wait_out(STATE)
    saving.wait_out(STATE)
    assert disk.done == ["wait", "wait"] and [each["step"] for each in told.of("save failed")] == [7]


def test_old_checkpoints_that_cannot_be_deleted_fail_no_save(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are said once, with their whole path, and tried again. So is half of one of the same step."""
    told: Any = Told()
    told.sync = lambda: None
    target = recovery._target(load(config, ["checkpoint.keep=1"]), told, Mock(in_use=lambda: ()))
    shards = [Shard("x", (2,), (0,), torch.ones(2))]
    with alone_is_fine():
        agreement = agree(shards)
    rmdir = os.rmdir
    (target.folder / ".step_00000004.partial").mkdir(parents=True)

    def refuse(path: str, *, dir_fd: int | None = None) -> None:
        if ".step_0000000" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        rmdir(path, dir_fd=dir_fd)

    def save(*steps: int) -> None:
        with alone_is_fine():
            for step in steps:
                write(target, Payload(step, {}), agreement, agreement.tensors(shards))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refuse)
        save(2, 4, 6)
    names = [".step_00000002.deleted", ".step_00000004.deleted", ".step_00000004.partial"]
    names.append(".step_00000004.partial.deleted")
    events = sorted(told.of("not removed"), key=lambda event: str(event["checkpoint"]))
    assert events == [{"checkpoint": str(target.folder / name), "reason": "Permission denied"} for name in names]
    assert sorted(path.name for path in target.folder.iterdir() if path.suffix) == [*names[:2], names[3]]
    assert list(checkpoints_in(target.folder)) == [6] and len(told.said) == len(names)
    save(8)
    assert [path.name for path in target.folder.iterdir()] == ["step_00000008"]


def test_memory_that_one_rank_is_refused_for_its_copies_ends_the_run_on_all(config: Path) -> None:
    """The others would wait for it in the next step."""
    settings = load(config)
    state: Any = SimpleNamespace(buckets=[], optimizer_state=[], base=None)
    corpus, monitor, uploads = Mock(tokenizer=None), Mock(), Mock()

    def told(rank: int, num_ranks: int) -> str:
        def refused(*_: object, **__: object) -> AbstractContextManager[None]:
            if rank == 1:
                raise CheckpointError("CUDA refuses it.")
            return nullcontext()

        recovery.__dict__["Saver"] = refused
        mesh = build_mesh(Layout(dp=num_ranks), rank)
        saving = recovery.saving(state, settings, mesh, corpus, monitor, uploads=uploads)
        with pytest.raises(ColonnadeError) as raised, saving:
            pass
        return str(raised.value)

    assert run_on_ranks(told, 2) == ["rank 1: CUDA refuses it."] * 2


@pytest.mark.parametrize("others", [[], ["data.train is another"]])
def test_a_run_that_goes_on_is_held_against_what_is_in_force(
    others: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind its changes; what is said of other data is an event too."""
    told, seen = Told(), list[object]()
    run, in_force = SimpleNamespace(folder=str(tmp_path)), list[Any]()
    monkeypatch.setattr(
        recovery,
        "behind",
        lambda config, changes: in_force.append((changes, SimpleNamespace(run=run))) or in_force[0][1],
    )
    monkeypatch.setattr(recovery, "changes", lambda path, config: seen.append(config) or ["train.steps: 6 -> 9"])
    monkeypatch.setattr(recovery, "what_changed", lambda path, config, step, _: seen.append(config) or ["Longer."])
    monkeypatch.setattr(recovery, "what_to_say", lambda *_: ("Other data." if others else "", others))
    model = SimpleNamespace(architecture=SimpleNamespace(weights=dict))
    state: Any = SimpleNamespace(step=4, samples=1600, changes=["a change"], rollbacks=[], model=model)
    config: Any = SimpleNamespace(run=run)
    metadata: Any = SimpleNamespace(frozen=[])
    monitor: Any = told
    monkeypatch.setattr(told, "resume", seen.append, raising=False)
    monkeypatch.setattr(told, "tell_lost", lambda: None, raising=False)
    path, nobody = tmp_path / "checkpoints" / "step_00000004", SimpleNamespace()
    corpus: Any = nobody
    resume(state, config, corpus, monitor, lambda *_: (path, metadata))
    ((changes, behind),) = in_force
    assert changes == ["a change"] and seen == [4, behind, behind]
    resumed = {"step": 4, "checkpoint": path.name, "origin": "disk", "changed": ["train.steps: 6 -> 9"]}
    assert told.of("resumed") == [resumed]
    assert told.of("other data") == [{"step": 4, "differences": others}] * bool(others)
    assert told.said == [f"Resumed from {path} (step 4, sample 1,600).", "Longer.", *["Other data."] * bool(others)]


@pytest.mark.parametrize(
    ("optimizer", "batch", "position", "said"),
    [
        ("adamw", 8, 8, ""),
        ("adamw", 4, 8, "train.global_batch_size = 4, and the run is to go on with 8: its steps counted other"),
        ("adamw", 4, None, ""),
        ("adamw", None, None, ""),
        ("adamw", 8, None, "train.global_batch_size = 8, and the run is to go on with 4"),
        ("lamb", 4, None, "optim.name = 'lamb', and the run is to go on with 'adamw': its moments are those of"),
    ],
)
def test_a_checkpoint_is_held_against_the_batch_and_the_rule_that_are_in_force_at_its_step(
    optimizer: str,
    batch: int | None,
    position: int | None,
    said: str,
    corpus: TinyCorpus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`position`: where in the data a change from 4 to 8 samples a step has come into force."""
    values, was = {"train.global_batch_size": 8}, {"train.global_batch_size": 4}
    changed = [] if position is None else [Change(at=2, values=values, was=was, line="1", position=position)]
    metadata = SimpleNamespace(tokenizer_sha256=None, optimizer=optimizer, global_batch_size=batch, changes=changed)
    monkeypatch.setattr(recovery, "metadata_of", lambda path, manifest: metadata)
    monkeypatch.setattr(recovery, "check_data", lambda *_: None)
    nobody: Any = SimpleNamespace(tokenizer=None)
    given: Any = (tiny.config(corpus, tmp_path), nobody, tmp_path, None)
    if not said:
        check_metadata(*given)
        return
    with pytest.raises(CheckpointError) as told:
        check_metadata(*given)
    assert f"was written with {said}" in str(told.value)
