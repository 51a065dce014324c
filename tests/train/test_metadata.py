"""What a checkpoint says of its run, checked."""

from pathlib import Path

import pytest

from colonnade.checkpoint.manifest import Manifest
from colonnade.errors import CheckpointError
from colonnade.train.metadata import metadata_of


@pytest.mark.parametrize("step", [9, 10, 11])
def test_a_run_goes_on_from_one_step(step: int) -> None:
    """The folder and the manifest may say another than the run did."""
    manifest = Manifest(10, {"step": step, "samples": 80, "model": {"vocab_size": 50}}, {}, {})
    if step == 10:
        assert metadata_of(Path("step_00000010"), manifest).samples == 80
        return
    with pytest.raises(CheckpointError, match=f"its manifest says step 10, its metadata says {step}"):
        metadata_of(Path("step_00000010"), manifest)
