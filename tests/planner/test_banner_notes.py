"""What a run tells of what could not be checked and of what is left out, note by note."""

from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.config.load import loads
from colonnade.config.schema import Config
from colonnade.data.gpt_dataset import GPTDataset
from colonnade.planner import banner as banners
from tests.runs import course

TEXT = """
model = { num_layers = 1, hidden_size = 16, num_heads = 2, seq_length = 8, vocab_size = 64 }
data.train = "tokens"
train = { steps = 6, global_batch_size = 4, micro_batch_size = 2 }
optim = { learning_rate = 1.0, warmup_steps = 3 }
checkpoint.keep_best = false
run.folder = "r"
"""


def config(*more: str, model: dict[str, Any] | None = None) -> Config:
    found = loads("\n".join([TEXT, *more]))
    return found.model_copy(update={"model": found.model.model_copy(update=model or {})})


def dataset(*dropped: int) -> Any:
    """A part of a corpus: of each file seven documents are there, and so many more are left out."""
    parts: list[Any] = []
    for count in dropped:
        part = object.__new__(GPTDataset)
        part.num_dropped, part.documents = count, range(7)
        parts.append(part)
    return SimpleNamespace(parts=parts)


def corpus(*, is_byte_level: bool = True, dropped: tuple[int, ...] = (0,), **more: Any) -> Any:
    usual = {
        "tokenizer": SimpleNamespace(is_byte_level=is_byte_level),
        "datasets": SimpleNamespace(train=dataset(*dropped), validation=dataset(0)),
        "unchecked": [],
        "other_labels": [],
        "files": {},
    }
    return SimpleNamespace(**{**usual, **more})


def notes(found: Any, settings: Config | None = None, whole: Config | None = None) -> list[str]:
    return list(banners._notes(course(settings or config(), whole), found))


def test_where_all_is_as_usual_there_is_no_note() -> None:
    assert notes(corpus()) == []


def test_bits_per_byte_are_missed_where_there_could_be_some() -> None:
    """Not of a model that fills in masks, which has none in any case."""
    assert notes(corpus(is_byte_level=False)) == ["the tokenizer is not byte-level: no bits per byte"]
    assert notes(corpus(is_byte_level=False), config(model={"kind": "bert"})) == []


def test_labels_of_other_names_are_told_one_by_one() -> None:
    assert notes(corpus(other_labels=["one", "two"])) == ["one", "two"]


@pytest.mark.parametrize(
    ("dropped", "said"),
    [((0, 0), []), ((0, 1), ["1 document of 14 to train on"]), ((2, 1_000), ["1,002 documents of 14 to train on"])],
)
def test_documents_that_are_left_out_are_counted_over_all_files(dropped: tuple[int, ...], said: list[str]) -> None:
    assert [note.split(" longer than")[0] for note in notes(corpus(dropped=dropped))] == said


def test_a_run_is_the_beginning_of_a_longer_one_by_its_length_in_all() -> None:
    """Not by how long it would be as it is now."""
    short = long = config()
    short = short.model_copy(update={"train": short.train.model_copy(update={"steps": 2})})
    assert [note.split(" = ")[0] for note in notes(corpus(), long, whole=short)] == [
        "the run ends after 2 of optim.warmup_steps"
    ]
    assert notes(corpus(), short, whole=long) == []


@pytest.mark.parametrize(
    ("prefixes", "is_told"), [(["here"], True), (["here", "s3://bucket/there"], False), (["s3://bucket/there"], False)]
)
def test_a_cache_has_an_effect_where_some_file_is_named_by_a_url(prefixes: list[str], is_told: bool) -> None:
    files = {name: SimpleNamespace(prefix=name) for name in prefixes}
    found = notes(corpus(files=files), config('data.cache = "copies"'))
    assert [note.split(" no effect")[0] for note in found] == ['data.cache = "copies" has'] * is_told


def test_files_without_a_validation_sample_are_missed_where_there_is_a_validation_part() -> None:
    blend = TEXT.replace('data.train = "tokens"', "data.blend = { a = 1.0, b = 1.0, c = 1.0 }")
    split, whole = (loads(f"{blend}\ndata.split = {shares}") for shares in ('"9:1"', '"1:0"'))
    whole = whole.model_copy(update={"train": whole.train.model_copy(update={"evaluate_every": 0})})
    assert [note.split(" have ")[0] for note in notes(corpus(), split)] == ["2 of 3 files of data.blend"]
    none = corpus(datasets=SimpleNamespace(train=dataset(0), validation=None))
    assert notes(none, whole) == []


def test_a_growing_run_tells_the_size_of_its_last_steps_and_no_length_of_its_epochs() -> None:
    data: Any = SimpleNamespace(datasets=SimpleNamespace(train=range(20)))
    grows = loads(f"{TEXT}\ncurriculum = {{ tokens = [0, 40], seq_length = [8, 8], global_batch_size = [2, 4] }}")
    assert banners._steps(course(config()), data) == "6 of 4 × 8 tokens, 192 tokens in all: 1.2 epochs of 5.0 steps"
    three_of_each = 3 * 2 * 8 + 3 * 4 * 8
    assert (
        banners._steps(course(grows), data)
        == f"6 of 4 × 8 tokens at the end, {three_of_each} tokens in all: 0.9 epochs"
    )
