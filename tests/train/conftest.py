"""What the tests of training share: a run that has ended."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import corpus as tiny
from tests.commands import forked
from tests.corpus import TinyCorpus


@dataclass(frozen=True)
class Finished:
    """A run of six steps, saved every two; steps 4 and 6 are kept."""

    config: Path
    folder: Path

    @property
    def newest(self) -> Path:
        return self.folder / "checkpoints" / "step_00000006"


@pytest.fixture(scope="session")
def finished(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Not to be changed: copy its folder."""
    folder = tmp_path_factory.mktemp("finished")
    path = tiny.write_config(corpus, folder)
    answer = forked("train", path)
    assert answer.status == 0, answer
    return Finished(path, folder / "run")
