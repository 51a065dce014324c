"""A GPU for every test of this folder: see `tests/gpus.py`."""

import pytest
import torch

from tests import gpus


@pytest.fixture(autouse=True)
def _gpu() -> None:
    if not torch.backends.cuda.is_built() or not gpus.are_there():
        pytest.skip("needs a CUDA device")
