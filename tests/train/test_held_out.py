"""What an evaluation of a held-out part is handed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from colonnade.data.blended_dataset import BlendedDataset
from colonnade.errors import DataError
from colonnade.evaluation.perplexity import NothingScored
from colonnade.evaluation.squad import SquadScores
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, paper_mesh
from colonnade.tasks.t5 import Written
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


@pytest.mark.parametrize("asked", [5, 100])
def test_data_sets_of_a_blend_are_measured_on_the_samples_that_they_have_in_it(
    monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    """Asked for more than it has, on all that they have."""
    seen: list[list[int]] = []

    class Task:
        def evaluate(self, model: object, batches: Any, **given: Any) -> int:
            seen.append([n for batch in batches for n in batch])
            return len(seen)

    class Part:
        def __init__(self, name: str) -> None:
            self.file = SimpleNamespace(prefix=name)

    class Two(BlendedDataset):
        def __init__(self) -> None:
            self.parts = (Part("books"), Part("a/code"))  # type: ignore[assignment]

        def __len__(self) -> int:
            return 9

        def first_of_each(self, num_samples: int) -> list[int]:
            return {5: [4, 1], 9: [7, 2]}[num_samples]

    monkeypatch.setattr(held_out, "TASKS", {"some": Task()})
    corpus: Any = SimpleNamespace(
        kind="some",
        byte_lengths=None,
        unchecked=[],
        load=lambda part, positions: list(positions),
        set_names={"books": "books", "a/code": "code"},
    )
    stub: Any = None
    found: Any = held_out.evaluate_part(
        stub, Two(), corpus, Mesh(), hidden=lambda inputs: None, samples=asked, micro_batch_size=8
    )
    assert [len(each) for each in seen] == ([5, 4, 1] if asked == 5 else [9, 7, 2])
    assert all(each == list(range(len(each))) for each in seen)
    assert (found.found, found.each) == (1, {"books": 2, "code": 3})


def test_of_a_data_set_whose_few_samples_have_no_label_that_counts_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The blend as a whole is measured all the same; where none of its samples has one, that is an error."""

    class Two(BlendedDataset):
        def __init__(self) -> None:
            self.parts = tuple(SimpleNamespace(file=SimpleNamespace(prefix=name)) for name in ("books", "rare"))  # type: ignore[assignment]

        def __len__(self) -> int:
            return 9

        def first_of_each(self, num_samples: int) -> list[int]:
            return [8, 1]

    def measure(_: object, part: Any, count: int, **__: object) -> int:
        if count in missing:
            raise NothingScored("no label counts")
        return count

    stub: Any = None
    corpus: Any = SimpleNamespace(set_names={"books": "books", "rare": "rare"})
    missing = {1}
    monkeypatch.setattr(held_out, "_measure", measure)
    found: Any = held_out.evaluate_part(stub, Two(), corpus, Mesh(), hidden=None, samples=9, micro_batch_size=8)
    assert (found.found, found.each) == (9, {"books": 8})
    missing.add(9)
    with pytest.raises(DataError, match="no label counts"):
        held_out.evaluate_part(stub, Two(), corpus, Mesh(), hidden=None, samples=9, micro_batch_size=8)


@pytest.mark.parametrize(
    ("names", "each"), [({}, {}), ({"a/books": "a/books", "b/books": "b/books"}, {"b/books": "found"})]
)
def test_a_part_with_samples_of_one_data_set_is_read_once_and_told_by_its_name_where_the_blend_has_several(
    monkeypatch: pytest.MonkeyPatch, names: dict[str, str], each: dict[str, str]
) -> None:
    class One(BlendedDataset):
        def __init__(self) -> None:
            self.parts = (SimpleNamespace(file=SimpleNamespace(prefix="b/books")),)  # type: ignore[assignment]

        def __len__(self) -> int:
            return 3

        def first_of_each(self, num_samples: int) -> list[int]:
            return [num_samples]

    seen: list[object] = []

    def measure(model: object, part: object, count: int, **_: object) -> str:
        seen.append((part, count))
        return "found"

    monkeypatch.setattr(held_out, "_measure", measure)
    stub: Any = None
    corpus: Any = SimpleNamespace(set_names=names)
    one = One()
    found: Any = held_out.evaluate_part(stub, one, corpus, Mesh(), hidden=None, samples=5, micro_batch_size=8)
    assert (found.found, found.each) == ("found", each) and seen == [(one, 3)]


def test_bytes_of_tokens_are_handed_on_and_who_names_no_stages_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    task = SimpleNamespace(evaluate=lambda model, batches, **given: told.update(given))
    monkeypatch.setattr(held_out, "TASKS", {"some": task})
    monkeypatch.setattr(held_out, "on_one_stage", lambda model, units: SimpleNamespace(hidden=(model, units)))
    corpus: Any = SimpleNamespace(
        kind="some", byte_lengths=np.array([1, 4, 2]), unchecked=[], load=lambda part, positions: positions
    )
    model: Any = SimpleNamespace(architecture=SimpleNamespace(units=("embedding", "head")))
    part: Any = range(0)
    held_out.evaluate_part(model, part, corpus, Mesh(), hidden=None, samples=5, micro_batch_size=8)
    assert told["byte_lengths"].tolist() == [1, 4, 2] and told["hidden"] == (model, ("embedding", "head"))


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


def test_what_was_found_is_told_for_each_data_set_and_for_questions() -> None:
    found = held_out.Evaluation(
        Written(1.5, 0.25, 8), {"books": Written(2.5, 0.5, 8)}, questions=SquadScores(61.0, 72.5, 1234)
    )
    numbers = found.numbers()
    assert (numbers["loss"], numbers["loss/books"]) == (1.5, 2.5)
    assert (numbers["exact_match"], numbers["f1"]) == (61.0, 72.5)
    books, questions = found.of_each()
    assert books == f"books: {Written(2.5, 0.5, 8).summary()}"
    assert questions == "1,234 questions: exact match 61.00, F1 72.50"


def test_of_many_data_sets_the_first_are_told_line_by_line() -> None:
    found = held_out.Evaluation(Written(1.5, 0.25, 8), {f"set_{n}": Written(float(n), 0.5, 8) for n in range(1203)})
    assert [line.partition(":")[0] for line in found.of_each(2)] == ["set_0", "set_1"]
    assert len(found.of_each()) == len(found.of_each(2000)) == 1203
    assert {f"loss/set_{n}" for n in range(1203)} < found.numbers().keys(), "metrics.jsonl has them"
