"""A run that returns by itself: what is told, written and put back, and in which order."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.data.curriculum import Curriculum
from colonnade.errors import DiskError
from colonnade.mesh.mesh import Mesh
from colonnade.train import recovery, rollbacks, undo
from colonnade.train.divergence import Divergence
from colonnade.train.rollback import Rollback
from colonnade.train.run_folder import DECIDED
from tests.runs import saved_steps
from tests.told import Told

KEYS = ["checkpoint.keep=9", "divergence.then=roll_back", "divergence.healthy_for=5", "divergence.tries=3"]


@pytest.fixture
def settings(config: Path, tmp_path: Path) -> Config:
    """Of a run with checkpoints of steps 10 and 20, which are folders alone."""
    for step in (10, 20):
        (tmp_path / "run" / "checkpoints" / f"step_000000{step}").mkdir(parents=True)
    return load(config, KEYS)


def returned(
    settings: Config, told: Told, found: Divergence, *, wait_out: Callable[[Any], None] = lambda state: None
) -> None:
    given: Any = {
        "corpus": SimpleNamespace(curriculum=None),
        "monitor": told,
        "copies": SimpleNamespace(forget=lambda: None),
    }
    saving: Any = SimpleNamespace(wait_out=wait_out)
    undo.roll_back(found, SimpleNamespace(changes=[]), saving, config=settings, mesh=Mesh(), **given)  # type: ignore[arg-type]


def test_what_was_found_and_what_was_done_are_told(
    settings: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches that are passed over are counted where the data are known, and each return has a name of its own."""
    monkeypatch.setattr(undo, "return_to_newest", lambda *_: None)
    monkeypatch.setattr(undo, "_weighed", lambda rollback, *_: ("", {"passed": 4 * rollback.skip}))
    told = Told()
    for step in (18, 19):
        returned(settings, told, Divergence(step=step, first=16, reason="has loss nan"))
    assert told.of("diverged") == [
        {"step": step, "first_sign": 16, "reason": "has loss nan", "then": "roll_back"} for step in (18, 19)
    ]
    known = rollbacks.read(tmp_path / "run")
    assert [each.passed for each in known] == [4 * each.skip for each in known] and all(each.skip for each in known)
    assert len({each.id for each in known} - {""}) == 2
    assert told.of("rolled back") == [each.model_dump() for each in known]
    assert [line.partition(", to ")[0] for line in told.said] == [
        f"Step {step} has loss nan: the run has diverged. It returns to step_00000010" for step in (18, 19)
    ]


def test_a_return_that_is_killed_is_written_down_before_a_checkpoint_goes(
    settings: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next start would take the same batches again."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(undo, "discard_after", killed)
    monkeypatch.setattr(undo, "_weighed", lambda *_: ("", {}))
    with pytest.raises(KeyboardInterrupt):
        returned(settings, Told(), Divergence(step=22, first=22, reason="has loss nan"))
    assert [each.to for each in rollbacks.read(tmp_path / "run")] == [10]
    assert saved_steps(tmp_path / "run") == [10, 20]


def test_a_disk_that_withholds_what_was_decided_is_no_reason_against_a_return(
    settings: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is started again, diverges again, and returns then."""
    honest = Path.read_bytes

    def away(path: Path) -> bytes:
        if path.name == DECIDED:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return honest(path)

    monkeypatch.setattr(Path, "read_bytes", away)
    monkeypatch.setattr(undo, "verify", lambda path: path)
    monkeypatch.setattr(undo, "metadata_of", lambda *_: None)
    monkeypatch.setattr(rollbacks, "measured", lambda rollback, *_: rollback)
    told = Told()
    with pytest.raises(DiskError, match=rf"{DECIDED} cannot be read"):
        returned(settings, told, Divergence(step=22, first=22, reason="has loss nan"))
    assert [name for name, _ in told.events] == ["diverged"]
    assert rollbacks.read(tmp_path / "run") == [] and saved_steps(tmp_path / "run") == [10, 20]


def test_a_checkpoint_that_is_still_being_written_is_waited_for_and_counts(
    settings: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undo, "return_to_newest", lambda *_: None)
    monkeypatch.setattr(undo, "_weighed", lambda *_: ("", {}))
    saved = tmp_path / "run" / "checkpoints" / "step_00000030"
    returned(settings, Told(), Divergence(step=42, first=41, reason="has loss nan"), wait_out=lambda _: saved.mkdir())
    assert [each.to for each in rollbacks.read(tmp_path / "run")] == [30]


def test_nothing_is_left_of_the_steps_that_are_undone(settings: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that are under way are waited for, and the log goes on behind the step that was read."""
    done: list[object] = []
    owned = SimpleNamespace(settle=lambda: done.append("settled"), mesh=Mesh())
    state: Any = SimpleNamespace(step=23, base=None, ownership=owned)

    def restore(state: Any, *_: object, **__: object) -> None:
        done.append("restored")
        state.step = 10

    monkeypatch.setattr(recovery, "restore", restore)
    monitor: Any = SimpleNamespace(go_back=done.append)
    nobody: Any = None
    undo.return_to_newest(state, settings, nobody, monitor)
    assert done == ["settled", "restored", 10]


def test_an_earlier_return_to_the_same_step_counts_for_which_batches_are_passed_over(
    settings: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind it the batches are others, of another size perhaps."""
    metadata: Any = SimpleNamespace(samples=40, step=10, rollbacks=())
    monkeypatch.setattr(undo, "metadata_of", lambda *_: metadata)
    monkeypatch.setattr(undo, "verify", lambda path: path)
    monkeypatch.setattr(rollbacks, "check_left", lambda *_: None)
    corpus: Any = SimpleNamespace(curriculum=Curriculum([0, 48 * 16], [16, 16], [4, 8]))
    asked, earlier = Rollback(to=10, skip=1), Rollback(to=10, skip=2, passed=8)
    assert undo._weighed(asked, [], settings, corpus) == ("", {"passed": 4, "batches": [[1, 4]]})
    assert undo._weighed(asked, [earlier], settings, corpus) == ("", {"passed": 8, "batches": [[1, 8]]})


def test_ranks_look_for_the_newest_checkpoint_when_rank_0_has_taken_later_ones_away(
    settings: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, to what rank 0 has decided: else one reads what is being deleted, or goes elsewhere."""
    done = list[str]()
    monkeypatch.setattr(undo, "_weighed", lambda *_: ("", {}))
    monkeypatch.setattr(undo, "discard_after", lambda *_: done.append("taken away"))
    monkeypatch.setattr(undo, "gather_texts", lambda _, ranks: done.append(ranks.name))
    monkeypatch.setattr(undo, "broadcast_text", lambda _, ranks: {"world": '["its name", 10]'}[ranks.name])
    monkeypatch.setattr(undo, "return_to_newest", lambda *_: done.append("read"))
    returned(settings, Told(), Divergence(step=22, first=22, reason="has loss nan"))
    assert done == ["taken away", "world", "read"]
    assert [(each.to, each.id) for each in rollbacks.read(tmp_path / "run")] == [(10, "its name")]
