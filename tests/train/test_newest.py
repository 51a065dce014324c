"""Which checkpoint of a run is its newest, and what is said of one whose checkpoints are gone."""

import json
import shutil
from pathlib import Path

import pytest

from colonnade.checkpoint.manifest import read_manifest
from colonnade.config.load import load
from colonnade.errors import CheckpointError, ConfigError
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.train import newest as train_newest
from colonnade.train.newest import as_rank_0, begins, checkpoint_at, find, is_saved
from tests.commands import start
from tests.distributed import run_on_ranks
from tests.runs import Finished


def test_a_checkpoint_is_named_by_itself_by_its_run_and_by_the_folder_of_all(
    finished: Finished, tmp_path: Path
) -> None:
    for path in (finished.newest, finished.folder, finished.folder / "checkpoints"):
        assert checkpoint_at(path) == finished.newest
    assert find(finished.folder) == finished.newest and not begins(load(finished.config), Mesh().world)
    assert checkpoint_at(tmp_path) is checkpoint_at(tmp_path / "nowhere") is find(tmp_path) is None
    assert begins(load(finished.config, [f"run.folder={tmp_path}"]), Mesh().world)


def test_whether_a_step_is_saved_is_told_by_rank_0s_folder(finished: Finished, tmp_path: Path) -> None:
    config = load(finished.config)
    elsewhere = load(finished.config, [f"run.folder={tmp_path}"])

    def told(rank: int, num_ranks: int) -> list[bool]:
        world = build_mesh(Layout(dp=2), rank).world
        return [is_saved(elsewhere if rank else config, step, world) for step in (6, 7)]

    assert run_on_ranks(told, 2) == [[True, False]] * 2


def test_a_run_begins_on_all_ranks_or_on_none(finished: Finished, tmp_path: Path) -> None:
    """Else what they compute before its first step has others than those that wait for it. One that sees no checkpoint
    is told when all of them look for the newest. What rank 0 sees of a damaged one is told on all, unless it has been
    looked at before.
    """
    config = load(finished.config)
    elsewhere, damaged = (load(finished.config, [f"run.folder={tmp_path / name}"]) for name in ("none", "damaged"))
    (tmp_path / "damaged" / "checkpoints" / "step_00000002").mkdir(parents=True)
    known = read_manifest(finished.newest)

    def told(rank: int, num_ranks: int) -> tuple[list[bool], str]:
        world = build_mesh(Layout(dp=2), rank).world
        found = [begins(elsewhere if rank in blind else config, world) for blind in ((), (1,), (0, 1))]
        found.append(begins(damaged, world, known if rank == 0 else None))
        with pytest.raises(ConfigError) as raised:
            begins(damaged, world)
        return found, str(raised.value)

    (found, said), other = run_on_ranks(told, 2, time_limit=20.0)
    assert found == [False, True, True, False] and (found, said) == other
    assert said.startswith("rank 0: ") and "step_00000002 has no manifest.json" in said


def test_a_rank_that_does_not_see_what_rank_0_has_found_keeps_what_it_has_found(
    finished: Finished, tmp_path: Path
) -> None:
    """What is compared of them behind it tells that they disagree."""
    older = tmp_path / "step_00000004"
    cases = [(finished.newest, None), (None, finished.newest), (finished.newest, older)]

    def told(rank: int, num_ranks: int) -> list[Path | None]:
        world = build_mesh(Layout(dp=2), rank).world
        return [as_rank_0(seen[rank], world) for seen in cases]

    assert run_on_ranks(told, 2) == [[seen[rank] for seen in cases] for rank in range(2)]


@pytest.mark.slow
def test_ranks_of_which_one_sees_no_checkpoint_all_say_so(config: Path, finished: Finished, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished.folder, tmp_path / "copy"))

    def blind(rank: int) -> None:
        if rank == 1:
            train_newest.__dict__.update(newest_in=lambda folder: None, _last_saved=lambda path: None)

    ranks = start("train", config, f"run.folder={run}", "parallel.dp=2", num_ranks=2, first=blind)
    for answer in ranks.answers():
        assert answer.status == 2 and "The ranks see different checkpoints:" in answer.err, answer


def test_checkpoints_that_are_gone_are_told_by_the_last_that_was_saved(tmp_path: Path) -> None:
    """Not by one that was only begun, or that other events name. A line that was cut off says nothing."""
    lines = [
        *({"event": "saved", "checkpoint": f"step_0000000{step}"} for step in (2, 4)),
        {"event": "save failed", "checkpoint": "step_00000006"},
        {"event": "best", "checkpoint": "step_00000002"},
        {"event": "saved"},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"event": "saved", "checkpoint": "step_000'
    (tmp_path / "events.jsonl").write_text(text)
    with pytest.raises(
        CheckpointError, match=r"has no checkpoint, but this run has saved step_00000004 there: "
    ) as told:
        find(tmp_path)
    assert f"delete {tmp_path} to start again from step 0" in str(told.value)
    (tmp_path / "events.jsonl").write_text('{"event": "saved", "check\n' + text)  # of a start that was killed
    with pytest.raises(CheckpointError, match="has saved step_00000004 there"):
        find(tmp_path)
    (tmp_path / "events.jsonl").write_text('{"event": "started"}\n{"event": "save failed", "checkpoint": "x"}\n')
    assert find(tmp_path) is None
