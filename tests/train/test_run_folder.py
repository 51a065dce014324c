"""Whose folder it is: the same run goes on, another one is told what differs, and nothing is left half-written."""

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from colonnade.atomic import write_whole
from colonnade.config.load import load, to_toml
from colonnade.errors import ConfigError, DiskError
from colonnade.train.change import Change
from colonnade.train.change_requests import Decided, read_decided, write_decided
from colonnade.train.rollback import read as returns
from colonnade.train.run_folder import (
    CHANGES,
    DECIDED,
    ROLLBACKS,
    configuration_of,
    was_asked_to_change,
    was_trained,
)
from colonnade.train.same_run import occupy
from tests.disks import room_for
from tests.distributed import run_on_ranks
from tests.runs import snapshot
from tests.tiny import TinyCorpus, config


def test_a_new_folder(corpus: TinyCorpus, tmp_path: Path) -> None:
    settings = config(corpus, tmp_path, f"run.folder={tmp_path}/a/b/c")
    occupy(settings)
    assert load(tmp_path / "a/b/c/config.toml") == settings
    assert sorted(path.name for path in (tmp_path / "a/b/c").iterdir()) == ["checkpoints", "config.toml"]


def test_the_same_run_goes_on(corpus: TinyCorpus, tmp_path: Path) -> None:
    occupy(config(corpus, tmp_path))
    changed = config(corpus, tmp_path, "train.steps=60", "parallel.tp=2", "train.log_every=1", "checkpoint.keep=9")
    occupy(changed)
    assert load(tmp_path / "run/config.toml") == changed


def test_another_run_is_told_what_differs(corpus: TinyCorpus, tmp_path: Path) -> None:
    occupy(config(corpus, tmp_path))
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n')
    before = snapshot(tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        occupy(config(corpus, tmp_path, "model.dropout=0.2", "train.seed=7", "parallel.tp=2"))
    assert str(caught.value) == (
        f"run.folder = '{tmp_path / 'run'}' belongs to a run with another configuration:\n"
        "  model.dropout: 0.1 -> 0.2\n"
        "  train.seed: 1234 -> 7\n"
        "These change what is computed, so the run cannot go on with them. Set another run.folder, or change them back."
    )
    assert snapshot(tmp_path / "run") == before


def test_what_a_run_may_change_while_it_goes_on_is_to_be_asked_for(corpus: TinyCorpus, tmp_path: Path) -> None:
    occupy(config(corpus, tmp_path))
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ConfigError) as caught:
        occupy(config(corpus, tmp_path, "optim.weight_decay=0.3", "train.seed=7", "train.gradient_clip=2.0"))
    assert str(caught.value).splitlines()[-1] == (
        "These change what is computed, so the run cannot go on with them. Set another run.folder, or change them back."
        " train.gradient_clip, optim.weight_decay may change while the run goes on: change them back, and ask for "
        f"it by `colonnade change {tmp_path / 'run'} KEY=VALUE`."
    )


def test_a_run_that_is_to_stop_does_not_start(corpus: TinyCorpus, tmp_path: Path) -> None:
    """As long as the file lies there."""
    settings = config(corpus, tmp_path)
    occupy(settings)
    stop = tmp_path / "run" / "stop"
    stop.touch()
    with pytest.raises(ConfigError, match=f"^{stop} exists: .* Remove the file to train on"):
        occupy(settings)
    stop.unlink()
    occupy(settings)


@pytest.mark.parametrize("content", [None, "[model"])
def test_a_folder_in_which_nothing_was_trained_belongs_to_nobody(
    corpus: TinyCorpus, tmp_path: Path, content: str | None
) -> None:
    """A model that did not fit into memory is no hindrance for a smaller one."""
    occupy(config(corpus, tmp_path))
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / "run" / name).touch()
    if content is not None:
        (tmp_path / "run/config.toml").write_text(content)
    smaller = config(corpus, tmp_path, "model.num_layers=1")
    occupy(smaller)
    assert load(tmp_path / "run/config.toml") == smaller


def test_what_shows_that_a_run_was_trained(tmp_path: Path) -> None:
    """A step that was reported, or a checkpoint; half of one shows nothing."""
    assert not was_trained(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".step_00000002.partial").mkdir()
    assert not was_trained(tmp_path)
    (tmp_path / "checkpoints" / "step_00000002").mkdir()
    assert was_trained(tmp_path)
    (tmp_path / "checkpoints" / "step_00000002").rmdir()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert was_trained(tmp_path)


def test_a_run_that_is_to_begin_does_not_begin_where_there_are_checkpoints(corpus: TinyCorpus, tmp_path: Path) -> None:
    settings = config(corpus, tmp_path, "checkpoint.resume=false")
    occupy(settings)
    for step in (2, 4):
        (tmp_path / f"run/checkpoints/step_0000000{step}").mkdir()
    with pytest.raises(ConfigError, match=r"already has step_00000004, and checkpoint\.resume = false"):
        occupy(settings)


@pytest.mark.parametrize(("name", "was_asked"), [(CHANGES, True), (DECIDED, True), (ROLLBACKS, False)])
def test_what_was_asked_for_or_decided_may_be_in_force(tmp_path: Path, name: str, was_asked: bool) -> None:
    (tmp_path / name).touch()
    assert was_asked_to_change(tmp_path) == was_asked


def test_a_checkpoint_knows_its_own_configuration(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Not the one that the run was started with since."""
    now = config(corpus, tmp_path, "train.steps=9")
    occupy(now)
    folder = tmp_path / "run" / "checkpoints" / "step_00000002"
    folder.mkdir()
    assert configuration_of(folder) is None
    then = config(corpus, tmp_path, "train.steps=6")
    (folder / "config.toml").write_text(to_toml(then))
    assert configuration_of(folder) == then != now


def test_the_newest_checkpoint_tells_what_was_computed(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Lengthened from 6 steps to 9, and once more before it was stopped: its curve is that of 9 steps."""
    occupy(config(corpus, tmp_path, "train.steps=12"))
    for step, steps in ((6, 6), (8, 9)):
        folder = tmp_path / "run" / "checkpoints" / f"step_{step:08}"
        folder.mkdir()
        (folder / "config.toml").write_text(to_toml(config(corpus, tmp_path, f"train.steps={steps}")))
    with pytest.raises(ConfigError, match=r"optim\.decay_steps: 9 -> 6"):
        occupy(config(corpus, tmp_path, "train.steps=12", "optim.decay_steps=6"))
    occupy(config(corpus, tmp_path, "train.steps=12", "optim.decay_steps=9"))


def test_what_was_changed_in_mid_run_makes_no_other_run_of_it(corpus: TinyCorpus, tmp_path: Path) -> None:
    """A checkpoint has it in force, and so has the config.toml that is copied from one, as a message says."""
    settings = config(corpus, tmp_path)
    occupy(settings)
    run, rate = tmp_path / "run", settings.optim.learning_rate
    saved = run / "checkpoints" / "step_00000008"
    saved.mkdir()
    changed = config(corpus, tmp_path, f"optim.learning_rate={rate / 3}")
    (saved / "config.toml").write_text(to_toml(changed))
    change = Change(at=4, values={"optim.learning_rate": rate / 3}, was={"optim.learning_rate": rate}, line="x")
    write_decided(run, Decided(changes=(change,)))
    with pytest.raises(ConfigError, match=r"configuration:\n  train\.seed: 1234 -> 7\nThese change"):
        occupy(config(corpus, tmp_path, "train.seed=7"))
    (run / "config.toml").write_text((saved / "config.toml").read_text())
    occupy(settings)
    assert load(run / "config.toml") == settings


@pytest.mark.parametrize("content", ["", "[model", "[model]\nnew_key = 3\n"])
def test_a_damaged_config(corpus: TinyCorpus, tmp_path: Path, content: str) -> None:
    settings = config(corpus, tmp_path)
    occupy(settings)
    (tmp_path / "run/config.toml").write_text(content)
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n')
    before = snapshot(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"cannot be read.*Remove it.*or set another run.folder"):
        occupy(settings)
    for step in (2, 4):
        (tmp_path / f"run/checkpoints/step_0000000{step}").mkdir()
    with pytest.raises(ConfigError, match=r"Copy .*/checkpoints/step_00000004/config.toml over it"):
        occupy(settings)
    for step in (2, 4):
        (tmp_path / f"run/checkpoints/step_0000000{step}").rmdir()
    assert snapshot(tmp_path / "run") == before


def test_a_file_in_the_way(corpus: TinyCorpus, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in ("file", "file/x"):
        with pytest.raises(ConfigError, match=r"run.folder = .* cannot be written: Not a directory .* Choose another"):
            occupy(config(corpus, tmp_path, f"run.folder={tmp_path}/{folder}"))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_forbidden_folder(corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(corpus, tmp_path)

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match=r"cannot be written: Permission denied"):
        occupy(settings)


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"

    def fill(rank: int, num_ranks: int) -> None:
        write_whole(path, b"old")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="File too large"):
            write_whole(path, bytes(2000))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    run_on_ranks(fill, 1)
    assert snapshot(tmp_path) == {"config.toml": b"old"}


def test_a_run_that_goes_on_as_it_was_asks_nothing_of_a_full_disk(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Its ranks may die while it is."""
    settings = config(corpus, tmp_path)
    longer = config(corpus, tmp_path, "train.steps=60")
    occupy(settings)
    before = snapshot(tmp_path / "run")
    with room_for(0):
        occupy(settings)
        with pytest.raises(DiskError, match=r"run\.folder = .* cannot be written: File too large"):
            occupy(longer)
    assert snapshot(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ESTALE, DiskError), (errno.EACCES, ConfigError)], ids=["away", "forbidden"]
)
@pytest.mark.parametrize("read", ["config.toml", ROLLBACKS, DECIDED])
def test_what_a_disk_does_not_give_back_for_a_while_is_told_from_what_it_refuses(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str, number: int, kind: type[ConfigError]
) -> None:
    """A run that is started again waits for the former."""

    def away(path: Path, *words: Any, **more: Any) -> Any:
        raise OSError(number, os.strerror(number), str(path))

    settings = config(corpus, tmp_path)
    occupy(settings)
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n')
    begin = {"config.toml": lambda: occupy(settings), ROLLBACKS: lambda: returns(tmp_path / "run")}
    for what in ("read_bytes", "read_text"):
        monkeypatch.setattr(Path, what, away)
    with pytest.raises(ConfigError, match=rf"{read} .*cannot be read") as told:
        begin.get(read, lambda: read_decided(tmp_path / "run"))()
    assert type(told.value) is kind
