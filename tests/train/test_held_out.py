"""What an evaluation of a held-out part is handed."""

from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, paper_mesh
from colonnade.train import held_out


@pytest.mark.parametrize(("unchecked", "checked"), [([], True), (["data/stories"], False)])
def test_it_is_told_what_is_known_of_the_text_and_no_more_samples_than_asked_for(
    monkeypatch: pytest.MonkeyPatch, unchecked: list[str], checked: bool
) -> None:
    told: dict[str, Any] = {}

    class Task:
        def evaluate(self, model: object, batches: Any, **given: Any) -> str:
            told.update(given, batches=list(batches))
            return "found"

    monkeypatch.setattr(held_out, "TASKS", {"some": Task()})
    corpus: Any = SimpleNamespace(
        kind="some", byte_lengths=None, unchecked=unchecked, load=lambda part, positions: list(positions)
    )
    part: Any = range(7)
    stub: Any = None
    found: Any = held_out.evaluate_part(
        stub, part, corpus, Mesh(), hidden=lambda inputs: None, samples=5, micro_batch_size=2
    )
    assert (
        (found.found, found.each) == ("found", {})
        and told["tokenizer_checked"] is checked
        and told["byte_lengths"] is None
    )
    assert told["batches"] == [[0, 1], [2, 3], [4]]
    held_out.evaluate_part(stub, part, corpus, Mesh(), hidden=lambda inputs: None, samples=100, micro_batch_size=4)
    assert told["batches"] == [[0, 1, 2, 3], [4, 5, 6]], "each sample once, where there are fewer"


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_samples_are_shared_by_the_dp_ranks(monkeypatch: pytest.MonkeyPatch, dp: int) -> None:
    """Each sample once; ranks that have fewer batches take part with one in which nothing counts."""
    seen: list[list[list[int]]] = []

    class Task:
        def evaluate(self, model: object, batches: Any, **given: Any) -> None:
            seen.append([each for each in batches if each != "uncounted"])

    class Positions(list[int]):
        def uncounted(self) -> str:
            return "uncounted"

    monkeypatch.setattr(held_out, "TASKS", {"some": Task()})
    corpus: Any = SimpleNamespace(
        kind="some", byte_lengths=None, unchecked=[], load=lambda part, positions: Positions(positions)
    )
    part: Any = range(7)
    stub: Any = None
    for rank in range(dp):
        held_out.evaluate_part(
            stub,
            part,
            corpus,
            paper_mesh(Layout(dp=dp), rank),
            hidden=lambda inputs: None,
            samples=7,
            micro_batch_size=2,
        )
    assert len(seen) == dp and sorted(n for batches in seen for each in batches for n in each) == list(range(7))
