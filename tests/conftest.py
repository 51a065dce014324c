"""Settings of the whole suite, and a tiny corpus to train on."""

from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import corpus as tiny
from tests.corpus import TinyCorpus

# A machine that is busy with something else is not a failure, so examples have no time limit of their own.
settings.register_profile("colonnade", deadline=None)
settings.load_profile("colonnade")

# One thread: tensors here are tiny, and threads that wait for a core of a busy machine cost more than they bring.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return tiny.make(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def config(corpus: TinyCorpus, tmp_path: Path) -> Path:
    """A configuration file of a run in tmp_path / "run"."""
    return tiny.write_config(corpus, tmp_path)
