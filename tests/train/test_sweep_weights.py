"""The weights that points of a sweep begin from, and learn from: the same for all."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from colonnade.errors import ConfigError
from colonnade.train.side_by_side import Run, Share
from colonnade.train.sweep import Sweep, read_sweep
from colonnade.train.tuning import run_points
from tests.runs import Finished, at_step_4

INIT_FROM, TEACHER = "train.init_from", "distillation.teacher"


def sweep_of(folder: Path, seeds: list[int], key: str, weights: Path) -> Sweep:
    path = folder / "config.toml"
    path.write_text(f'[run]\nfolder = "{folder / "runs"}"\n[sweep]\ntrain.seed = {seeds}\n')
    found = read_sweep(path, [f"{key}={weights}"])
    assert found is not None
    return found


def running(meanwhile: Callable[[], object] = lambda: None, status: int = 0) -> Run:
    """A run that ends well, or is interrupted once it has saved. `meanwhile`: what happens beside it."""

    def run(config: Path, share: Share) -> int:
        folder = Path(tomllib.loads(config.read_text())["run"]["folder"])
        (folder / "checkpoints" / "step_00000002").mkdir(parents=True, exist_ok=True)
        (folder / "events.jsonl").write_text(json.dumps({"event": "interrupted" if status else "finished"}) + "\n")
        meanwhile()
        return status

    return run


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "pytorch.gguf").symlink_to("nowhere")
    return folder


@pytest.mark.parametrize("key", [INIT_FROM, TEACHER])
@pytest.mark.parametrize("status", [0, 130])
def test_points_are_not_mixed_with_those_of_a_folder_that_was_overwritten(
    key: str, status: int, published: Path, tmp_path: Path
) -> None:
    """Whether they have ended or go on; a folder that is copied once more is the same."""
    weights = published / "model.safetensors"
    assert run_points(sweep_of(tmp_path, [1], key, published), running(status=status)) == status
    weights.write_bytes(b"WEIGHTS")
    with pytest.raises(ConfigError) as told:
        run_points(sweep_of(tmp_path, [1, 2], key, published), running())
    assert f"\n  {key} ({published}): other content\n    in the point seed-1\n" in str(told.value)
    weights.write_bytes(b"weights")
    assert run_points(sweep_of(tmp_path, [1, 2], key, published), running()) == 0
    shutil.rmtree(published)
    assert run_points(sweep_of(tmp_path, [1, 2], key, published), running()) == 0, "what is gone is no other"


@pytest.mark.parametrize("content", [b"later", b"WEIGHTS"])
def test_a_folder_that_is_overwritten_while_a_sweep_runs_is_told_at_its_end(
    content: bytes, published: Path, tmp_path: Path
) -> None:
    """By as many bytes too. With the points that had begun before: run anew, they stand beside the others."""
    weights = published / "model.safetensors"
    os.utime(weights, (0, 0))  # within a tick of its clock a file system gives two writes the same time
    with pytest.raises(ConfigError, match="other content\n    in seed-1\n"):
        run_points(sweep_of(tmp_path, [1, 2], INIT_FROM, published), running(lambda: weights.write_bytes(content)))
    shutil.rmtree(tmp_path / "runs" / "seed-1")
    assert run_points(sweep_of(tmp_path, [1, 2], INIT_FROM, published), running()) == 0


def test_points_that_go_on_are_held_against_what_they_began_with(published: Path, tmp_path: Path) -> None:
    """Not against what lay there when they went on."""
    for seed in (1, 2):
        assert run_points(sweep_of(tmp_path, [seed], INIT_FROM, published), running(status=130)) == 130
    weights = published / "model.safetensors"
    with pytest.raises(ConfigError, match="other content\n    in all points\n"):
        run_points(sweep_of(tmp_path, [1, 2], INIT_FROM, published), running(lambda: weights.write_bytes(b"later")))


@pytest.mark.parametrize("record", ["", '{"WHAT": "x"}', '{"WHAT": {"model', "[]"])
def test_of_a_point_without_a_record_of_its_weights_nothing_is_compared_and_nothing_read(
    record: str, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of those of earlier versions."""
    assert run_points(sweep_of(tmp_path, [1], INIT_FROM, published), running()) == 0
    (tmp_path / "runs" / "seed-1.weights.json").write_text(record.replace("WHAT", f"{INIT_FROM} ({published})"))

    def read(path: Path) -> dict[str, str]:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr("colonnade.train.sweep_weights.content_of", read)
    assert run_points(sweep_of(tmp_path, [1], INIT_FROM, published), running()) == 0


@pytest.fixture
def teacher(finished: Finished, tmp_path: Path) -> Path:
    return at_step_4(finished, tmp_path / "teacher")


@pytest.mark.parametrize("status", [0, 130])
def test_all_points_are_taught_by_the_checkpoint_that_was_the_newest(
    status: int, teacher: Path, tmp_path: Path
) -> None:
    """Of a run that goes on beside them."""
    saved, newer = teacher / "checkpoints" / "step_00000004", teacher / "checkpoints" / "step_00000006"

    def later() -> None:
        if not newer.exists():
            (tmp_path / "step_00000006").rename(newer)

    assert run_points(sweep_of(tmp_path, [1, 2], TEACHER, teacher), running(later, status)) == status
    points = sorted((tmp_path / "runs").glob("seed-*.toml"))
    taught = [tomllib.loads(point.read_text())["distillation"]["teacher"] for point in points]
    assert taught == [str(saved)] * 2
    with pytest.raises(ConfigError) as told:
        run_points(sweep_of(tmp_path, [1, 2], TEACHER, teacher), running())
    assert f'\n  distillation.teacher: "{saved}" -> "{newer}"\n' in str(told.value)
    assert run_points(sweep_of(tmp_path, [1, 2, 3], TEACHER, saved), running()) == 0


def test_a_sweep_ends_where_its_teacher_is_gone(teacher: Path, tmp_path: Path) -> None:
    """A point that goes on asks it too."""
    newest = teacher / "checkpoints" / "step_00000004"
    assert run_points(sweep_of(tmp_path, [1], TEACHER, newest), running(status=130)) == 130
    newest.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError) as told:
        run_points(sweep_of(tmp_path, [1], TEACHER, newest), running())
    assert str(told.value).startswith(
        f"distillation.teacher = '{newest}' is gone: point seed-1 cannot learn from the teacher of the others. Put it"
    )
