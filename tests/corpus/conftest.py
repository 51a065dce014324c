"""Small corpora and recipes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from colonnade.data.cleaning import clean
from tests.corpus.recipes import Result, make_recipe

Write = Callable[..., Path]


@pytest.fixture
def write_lines(tmp_path: Path) -> Write:
    """Writes documents (texts, or whole rows) as .jsonl."""

    def write(name: str, documents: Iterable[Any]) -> Path:
        path = tmp_path / name
        rows = (row if isinstance(row, dict) else {"text": row} for row in documents)
        content = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return path

    return write


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    """Runs a recipe of sections given as keywords, on inputs, in this process."""

    def go(*inputs: Path | str, folder: str = "clean", **sections: Any) -> Result:
        recipe = make_recipe(*inputs, folder=tmp_path / folder, **sections)
        said = clean(recipe, progress=False)
        return Result(tmp_path / folder, said)

    return go
