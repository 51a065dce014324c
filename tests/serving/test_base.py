"""Adapters whose base has moved, in commands that open them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.errors import ColonnadeError
from colonnade.mesh.mesh import Mesh
from colonnade.serving import options, trained
from colonnade.train.base import BaseMetadata
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


def test_where_a_base_lies_now_holds_for_all_models_of_an_ensemble_that_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its content, wherever it lay. Models beside another base, or without one, are opened as they are."""
    bases = [
        BaseMetadata(path=f"/was/{where}", files={"config.json": digit * 64}, weights=())
        for where, digit in (("here", "0"), ("there", "0"), ("elsewhere", "1"))
    ]
    beside: Any = SimpleNamespace(
        base=bases[0], base_at=tmp_path, model=torch.nn.Linear(1, 1), precision="fp32"
    )  # fmt: skip
    monkeypatch.setattr(trained, "find", lambda path: path)
    monkeypatch.setattr(trained, "_check_layout", lambda *_: None)
    monkeypatch.setattr(trained, "open_trained", lambda *_, base, seen: base)
    found = []
    for base in (*bases, None):
        said = (None, SimpleNamespace(model=None), SimpleNamespace(base=base))
        monkeypatch.setattr(trained, "described", lambda *_, said=said, **__: said)
        found.append(trained.open_another(tmp_path, Mesh(), beside))
    assert found == [tmp_path, tmp_path, None, None]
