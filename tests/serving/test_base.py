"""Adapters whose base has moved, in commands that open them."""

from pathlib import Path
from typing import Any

import pytest

from colonnade.errors import ColonnadeError
from colonnade.serving import options, trained
from tests.commands import here


@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "FOLDER", "--part", "test"),
        ("generate", "FOLDER", "--prompt", "a"),
        ("predict", "FOLDER", "FOLDER/file"),
    ],
    ids=lambda words: words[0],
)
def test_where_a_base_lies_now_reaches_what_is_opened(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("a text")
    asked: list[Any] = []

    def opened(path: Path, **given: Any) -> None:
        asked.append(given["base"])
        raise ColonnadeError("it is opened")

    for module, name in ((options, "chosen"), (trained, "find")):
        monkeypatch.setattr(module, name, lambda path, *_: path)
    monkeypatch.setattr(options, "check_options", lambda *_, **given: None)
    monkeypatch.setattr(trained, "opened", opened)
    answer = here(*(word.replace("FOLDER", str(tmp_path)) for word in words), "--base", tmp_path / "moved")
    assert answer.status == 2 and "it is opened" in answer.err and asked == [tmp_path / "moved"], answer
