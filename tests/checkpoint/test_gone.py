"""A checkpoint that its run deletes while something else reads it: told as that, wherever the reader is."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path

import pytest
import torch

from colonnade.checkpoint import confined
from colonnade.checkpoint.folders import take_away
from colonnade.checkpoint.manifest import verify
from colonnade.convert.to_huggingface import to_huggingface
from colonnade.errors import GoneError
from colonnade.mesh.mesh import Mesh
from colonnade.serving.trained import find, open_trained
from tests.runs import Finished


def opened(path: Path) -> None:
    open_trained(path, Mesh(), torch.device("cpu"))


def converted(path: Path) -> None:
    to_huggingface(path, path.with_name("theirs"), dtype=None, most_bytes=1 << 30, dry_run=False)


def on_opening(number: int, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """`act` before the number-th look at a file of a checkpoint."""
    opening, in_its_folder = count(), confined._in_its_folder

    def patched(path: Path) -> AbstractContextManager[None]:
        if next(opening) == number:
            act()
        return in_its_folder(path)

    monkeypatch.setattr(confined, "_in_its_folder", patched)


@pytest.mark.parametrize("read", [opened, converted, verify])
def test_a_checkpoint_that_is_deleted_meanwhile_is_told_as_that(
    read: Callable[[Path], object], finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any file that is looked at: no traceback, and no word of damage."""
    for number in count():
        run = tmp_path / str(number)
        shutil.copytree(finished.folder, run)
        path = find(run)
        with monkeypatch.context() as patch:
            on_opening(number, lambda path=path: take_away(path) if path.exists() else None, patch)  # type: ignore[misc]
            try:
                read(path)
            except GoneError as error:
                told = str(error)
            else:
                break
        assert told.startswith(f"{path} does not exist, or not any more: a run that goes on deletes all but"), told
        assert "damaged" not in told and "checkpoint.keep_every" in told
        assert not run.joinpath("theirs").exists()
    assert number > 2, "it has looked at several"
