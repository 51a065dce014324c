"""What an object storage has beside what the disk has: when it is fetched, tried, and left."""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.checkpoint.stored import Stored
from colonnade.config.load import load, to_toml
from colonnade.config.schema import Config
from colonnade.errors import CheckpointError, ConfigError, DamagedError
from colonnade.train import fetched
from tests.storages import FaultyStorage, emptied

URL = "faulty://bucket/run"


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    with emptied(FaultyStorage):
        yield


@pytest.fixture
def settings(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Of a run whose storage has whole checkpoints of steps 2, 4 and 6, and half of step 8."""
    monkeypatch.setattr(Stored, "steps", lambda self: {2: True, 4: True, 6: True, 8: False})
    for check in ("_check_same_run", "_check_may_begin"):
        monkeypatch.setattr(fetched, check, lambda *_: None)
    (tmp_path / "run").mkdir()
    return load(config, [f"checkpoint.upload_to={URL}"])


def here(settings: Config, *steps: int) -> None:
    for step in steps:
        (Path(settings.run.folder) / "checkpoints" / f"step_0000000{step}").mkdir(parents=True)


def as_it_is(settings: Config) -> Any:
    return lambda record: settings


class Fetches:
    """In place of fetching: which steps were asked for, of which some are damaged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *damaged: int) -> None:
        self.steps, self.damaged = list[int](), damaged
        monkeypatch.setattr(fetched, "_fetch_one", self.fetch_one)

    def fetch_one(self, stored: Stored, step: int, config: Config, replace: Any = None) -> None:
        self.steps.append(step)
        if step in self.damaged:
            raise DamagedError(f"{step} is damaged.")


@pytest.mark.parametrize(
    ("on_disk", "asked", "fails"), [((), [6, 4, 2], True), ((4,), [6], False), ((2,), [6, 4], False), ((6,), [], False)]
)
def test_where_nothing_newer_is_sound_a_run_goes_on_from_its_disk_if_that_has_any(
    settings: Config, monkeypatch: pytest.MonkeyPatch, on_disk: tuple[int, ...], asked: list[int], fails: bool
) -> None:
    """Else it would begin anew, beside checkpoints that it would delete then."""
    fetches = Fetches(monkeypatch, 2, 4, 6)
    here(settings, *on_disk)
    if fails:
        with pytest.raises(CheckpointError, match=f"None of the checkpoints under .*'{URL}' is sound"):
            fetched.fetch(settings, as_it_is(settings), probe=False, dry_run=False)
    else:
        fetched.fetch(settings, as_it_is(settings), probe=False, dry_run=False)
    assert fetches.steps == asked


@pytest.mark.parametrize(
    ("keys", "tried"), [([], [6, 4]), (["restarts.limit=0"], [6]), (["restarts.damaged=refuse"], [6])]
)
def test_damage_is_passed_over_where_the_run_may_restart_from_an_older_one(
    settings: Config, config: Path, monkeypatch: pytest.MonkeyPatch, keys: list[str], tried: list[int]
) -> None:
    fetches = Fetches(monkeypatch, 6)
    asked = load(config, [f"checkpoint.upload_to={URL}", *keys])
    if keys:
        with pytest.raises(DamagedError, match="6 is damaged"):
            fetched.fetch(asked, as_it_is(asked), probe=False, dry_run=False)
    else:
        fetched.fetch(asked, as_it_is(asked), probe=False, dry_run=False)
    assert fetches.steps == tried


@pytest.mark.parametrize(("probe", "dry_run", "tried"), [(True, False, 1), (False, False, 0), (True, True, 0)])
def test_whether_a_storage_can_be_written_is_tried_where_the_run_will_write_to_it(
    settings: Config, monkeypatch: pytest.MonkeyPatch, probe: bool, dry_run: bool, tried: int
) -> None:
    probes: list[Stored] = []
    monkeypatch.setattr(Stored, "probe", lambda self: probes.append(self))
    fetches = Fetches(monkeypatch)
    fetched.fetch(settings, as_it_is(settings), probe=probe, dry_run=dry_run)
    assert len(probes) == tried and fetches.steps == ([] if dry_run else [6])


def test_without_a_place_to_upload_to_nothing_is_fetched(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetches, settings = Fetches(monkeypatch), load(config)
    fetched.fetch(settings, as_it_is(settings), probe=True, dry_run=False)
    assert fetched.fetch_for_damaged(Path(settings.run.folder), settings) is None and fetches.steps == []


@pytest.mark.parametrize(
    ("on_disk", "asked"), [((4, 6), [6]), ((6,), [6, 4, 2]), ((2, 4), [4]), ((3,), [2]), ((8,), [6, 4, 2])]
)
def test_in_place_of_a_damaged_one_nothing_newer_is_fetched_and_nothing_that_the_disk_has(
    settings: Config, monkeypatch: pytest.MonkeyPatch, on_disk: tuple[int, ...], asked: list[int]
) -> None:
    """Newest first, of those that are whole."""
    fetches = Fetches(monkeypatch, 2, 4, 6)
    here(settings, *on_disk)
    path = Path(settings.run.folder) / "checkpoints" / f"step_0000000{on_disk[-1]}"
    assert fetched.fetch_for_damaged(path, settings) is None and fetches.steps == asked


def test_what_was_fetched_already_in_place_of_a_damaged_one_is_not_fetched_again(
    settings: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is damaged then."""
    fetches = Fetches(monkeypatch)
    here(settings, 4, 6)
    path = Path(settings.run.folder) / "checkpoints" / "step_00000006"
    fetched.damaged_name(path).mkdir()
    assert fetched.fetch_for_damaged(path, settings) is None and fetches.steps == []


def test_a_storage_that_cannot_be_read_by_then_leaves_the_disk(
    settings: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(self: Stored) -> dict[int, bool]:
        raise OSError("no route to host")

    monkeypatch.setattr(Stored, "steps", lost)
    here(settings, 6)
    path = Path(settings.run.folder) / "checkpoints" / "step_00000006"
    assert fetched.fetch_for_damaged(path, settings) is None
    told = capsys.readouterr().out
    assert told.startswith(f"Nothing can be fetched in place of {path}: ") and "no route to host" in told
    with pytest.raises(CheckpointError, match=r"cannot be read: .*no route to host"):
        fetched.fetch(settings, as_it_is(settings), probe=False, dry_run=False)


@pytest.mark.parametrize(("past", "started", "is_same"), [(0.1, 0.3, True), (0.3, 0.1, True), (0.3, 0.2, False)])
def test_a_run_is_the_storages_by_its_newest_checkpoint_or_by_how_it_was_started(
    past: float, started: float, is_same: bool, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a folder: what was asked for since the checkpoint has computed nothing."""

    def decays(by: float) -> Config:
        return load(config, [f"optim.weight_decay={by}"])

    def record(stored: object, step: int, folder: Path) -> bool:
        (folder / "config.toml").write_text(to_toml(decays(started)))
        return True

    monkeypatch.setattr(fetched, "_has_record", record)
    stored: Any = SimpleNamespace(url="file:///store", read=lambda step, name: to_toml(decays(past)).encode())
    with nullcontext() if is_same else pytest.raises(ConfigError, match=r"weight_decay: 0\.3 -> 0\.1"):
        fetched._check_same_run(stored, [6], decays(0.1), lambda folder: decays(0.1))


def test_a_fetch_that_is_interrupted_leaves_nothing_half(settings: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(stored: Stored, step: int, folder: Path) -> int:
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr(fetched, "_fetch_checked", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetched.fetch(settings, as_it_is(settings), probe=False, dry_run=False)
    assert not list((Path(settings.run.folder) / "checkpoints").iterdir())
