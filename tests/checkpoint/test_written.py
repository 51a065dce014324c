"""What an earlier version has written is read. See written/README.md."""

from pathlib import Path

import pytest
import torch

from colonnade.checkpoint.manifest import verify
from colonnade.mesh.mesh import Mesh
from colonnade.serving import trained
from tests.runs import whole_tensors

WRITTEN = Path(__file__).parent / "written"
LAYOUTS = ("serial", "tp2", "pp2_dp2_zero2")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_whole_and_equal_to_the_serial_run(layout: str) -> None:
    path, serial = (WRITTEN / name / "step_00000003" for name in (layout, "serial"))
    assert verify(path).step == 3
    ours, theirs = whole_tensors(path), whole_tensors(serial)
    assert ours.keys() == theirs.keys() and len(ours) == 48
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_its_model_can_be_used(layout: str) -> None:
    opened = trained.open_trained(WRITTEN / layout / "step_00000003", Mesh(), torch.device("cpu"))
    assert (opened.step, opened.config.model.hidden_size, opened.tokenizer.vocab_size) == (3, 4, 270)
    assert sum(x.numel() for x in opened.stages.model.parameters()) == 270 * 4 + 8 * 4 + 252
