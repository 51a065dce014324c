"""What of a checkpoint's metadata a run that goes on takes over."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from colonnade.mesh.mesh import Mesh
from colonnade.train import recovery, rollbacks
from colonnade.train.base import Base


@dataclass
class Read:
    """Stands for what is read."""

    curriculum: object = None
    vocab_size: int = 9
    tokenizer: str = "t"


@pytest.mark.parametrize("kept", [None, ("a", "b")])
def test_what_lies_in_the_base_is_what_lay_there_when_the_run_began(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: tuple[str, ...] | None
) -> None:
    """Whichever weights a run that begins today would leave there."""
    base = None if kept is None else SimpleNamespace(weights=kept)
    said = {"step": 3, "samples": 12, "skipped_steps": 1, "published": "p", "loss_scale": None, "changes": ["c"]}
    watch = SimpleNamespace(model_dump=dict)
    metadata = SimpleNamespace(base=base, rollbacks=["r"], watch=watch, **said)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(recovery, "load_found", lambda *_, **given: asked.update(given) or (tmp_path, None))
    monkeypatch.setattr(recovery, "metadata_of", lambda *_: metadata)
    monkeypatch.setattr(recovery, "end_behind", lambda path, manifest, tokenizer: tokenizer)
    for name in ("shards_of", "model_metadata", "curriculum_of", "optimizer_of", "as_it_began", "in_force"):
        monkeypatch.setattr(recovery, name, lambda *_, **__: None)
    applied: list[object] = []
    monkeypatch.setattr(rollbacks, "read_together", lambda *_: ["r", "s"])
    monkeypatch.setattr(rollbacks, "apply", lambda *given: applied.extend(given[3:]))
    owned = SimpleNamespace(publish=lambda: None, mesh=Mesh())
    began: Any = SimpleNamespace(
        base=Base(tmp_path, {}, frozenset("z"), {}, lambda shards: None),
        changes=[],
        ownership=owned,
        optimizer_state=[],
    )
    settings: Any = SimpleNamespace(run=SimpleNamespace(folder=str(tmp_path)), model=None)
    corpus: Any = Read()
    holders, known = {"a": [1]}, cast(Any, "a manifest")
    assert recovery.restore(began, settings, corpus, tmp_path, holders, known) == (tmp_path, metadata)
    assert asked["holders"] is holders and asked["known"] is known
    assert began.base.weights == frozenset(kept or "z")
    assert (began.step, began.samples, began.skipped, began.published) == (3, 12, 1, "p")
    assert began.end_of_document == "t"
    assert began.changes == ["c"] and applied == [["r", "s"], ["r"]]
