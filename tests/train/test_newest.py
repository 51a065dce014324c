"""Which checkpoint of a run is its newest, and what is said of one whose checkpoints are gone."""

import json
from pathlib import Path

import pytest

from colonnade.config.load import load
from colonnade.errors import CheckpointError
from colonnade.train.newest import begins, checkpoint_at, find
from tests.runs import Finished


def test_a_checkpoint_is_named_by_itself_by_its_run_and_by_the_folder_of_all(
    finished: Finished, tmp_path: Path
) -> None:
    for path in (finished.newest, finished.folder, finished.folder / "checkpoints"):
        assert checkpoint_at(path) == finished.newest
    assert find(finished.folder) == finished.newest and not begins(load(finished.config))
    assert checkpoint_at(tmp_path) is checkpoint_at(tmp_path / "nowhere") is find(tmp_path) is None
    assert begins(load(finished.config, [f"run.folder={tmp_path}"]))


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
