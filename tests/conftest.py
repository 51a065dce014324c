"""Settings of the whole suite, a tiny corpus to train on, and a run that has ended."""

from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests import corpus as tiny
from tests.commands import forked
from tests.corpus import TinyCorpus
from tests.runs import Finished

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


@pytest.fixture(scope="session")
def finished(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Not to be changed: copy its folder."""
    folder = tmp_path_factory.mktemp("finished")
    path = tiny.write_config(corpus, folder)
    answer = forked("train", path)
    assert answer.status == 0, answer
    return Finished(path, folder / "run")
