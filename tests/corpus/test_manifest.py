"""What a manifest adds up of several tasks."""

from __future__ import annotations

from typing import Any

from colonnade.corpus.manifest import entries, parts
from colonnade.corpus.tally import Tally


def output(part: str, documents: int, num_bytes: int, tokens: int) -> dict[str, Any]:
    return {"part": part, "documents": documents, "bytes": num_bytes, "tokens": tokens, "size": 99}


def test_a_part_has_all_files_of_its_tasks_together() -> None:
    found = parts([output("train", 2, 30, 7), output("test", 1, 5, 2), output("train", 3, 40, 0)])
    assert found == {
        "test": {"files": 1, "documents": 1, "bytes": 5, "tokens": 2},
        "train": {"files": 2, "documents": 5, "bytes": 70, "tokens": 7},
    }
    assert list(found) == ["test", "train"] and parts([]) == {}


def test_documents_of_a_part_whose_tokens_nobody_has_counted_are_told() -> None:
    """0 tokens would be read as none."""
    entries = [output("train", 2, 30, 7), {**output("train", 3, 40, 5), "uncounted": 1}, output("test", 1, 5, 2)]
    assert parts([*entries, {**output("train", 2, 9, 0), "uncounted": 2}]) == {
        "test": {"files": 1, "documents": 1, "bytes": 5, "tokens": 2},
        "train": {"files": 3, "documents": 7, "bytes": 79, "tokens": 12, "uncounted": 3},
    }


def test_files_are_in_the_order_of_their_tasks_however_many_these_are() -> None:
    by_task = {"00001": "bc", "100000": "f", "99999": "e", "00002": "d", "00000": "a"}
    total = Tally(metadata={task: [{"path": path} for path in paths] for task, paths in by_task.items()})
    assert "".join(entry["path"] for entry in entries(total)) == "abcdef"
