"""A stage starts when all tasks of the one before are done, and says which are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from colonnade.corpus.needs import Needs, log_folder, missing_tasks, require
from colonnade.corpus.step import Setting
from colonnade.errors import DataError


def done(folder: Path, *tasks: int) -> None:
    place = log_folder(folder, "sign") / "completions"
    place.mkdir(parents=True, exist_ok=True)
    for task in tasks:
        (place / f"{task:05d}").touch()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert missing_tasks(tmp_path, "sign", 2) == [0, 1], "nothing was begun"
    done(tmp_path, 0, 2)
    with pytest.raises(DataError) as caught:
        require(tmp_path, "sign", 4)
    said = str(caught.value)
    assert said.startswith("2 of 4 tasks of the stage sign are not done") and ": sign/00001, sign/00003. " in said
    assert f"{tmp_path}/state/logs/sign/logs has a log of each" in said
    with pytest.raises(DataError, match=r"^18 of 20 .*: sign/00001, sign/00003, .*sign/00011, …\. "):
        require(tmp_path, "sign", 20)
    for tasks, end in ((12, "sign/00011"), (13, "sign/00011, …")):
        with pytest.raises(DataError, match=rf", {end}\. "):  # ten are named
            require(tmp_path, "sign", tasks)


def test_the_first_that_finds_all_done_saves_the_others_the_look(tmp_path: Path) -> None:
    done(tmp_path, 0, 1, 2)
    needs = Needs("sign", 3, Setting(tmp_path, 5))
    assert needs.run("data") == "data"
    for path in (log_folder(tmp_path, "sign") / "completions").iterdir():
        path.unlink()
    assert needs.run("data") == "data"
    with pytest.raises(DataError, match="3 of 3 tasks of the stage other"):
        require(tmp_path, "other", 3)
