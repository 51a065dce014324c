"""Whole documents beside padding, and labels of answers alone."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.config.schema import DataConfig
from colonnade.data import whole_rows
from colonnade.data.datasets import NoSampleError
from colonnade.data.gpt_dataset import GPTDataset, cut_of
from colonnade.data.indexed import TokenFile, idx_path
from colonnade.data.loader import as_batch
from colonnade.data.packing import DocumentSpan, pack_whole
from colonnade.data.rows import Cut, TooLong
from colonnade.data.sidecar import ANSWERS, ExampleFields, Sidecar, sidecar_path
from colonnade.data.writer import TokenFileWriter
from colonnade.errors import DataError
from tests.data.sidecars import write_sidecar

Talk = list[int]
"""Lengths of a conversation's turns."""
talks_ = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), min_size=1, max_size=12).filter(
    lambda talks: any(map(sum, talks))
)


def written(folder: Path, talks: list[Talk]) -> TokenFile:
    """A file of conversations whose tokens count up from 1 through all of them."""
    first = 1
    with TokenFileWriter(folder / "file", np.dtype("<u2")) as writer:
        for talk in talks:
            writer.add_document(np.arange(first, first + sum(talk)), lengths=talk)
            first += sum(talk)
    return TokenFile(folder / "file")


def dataset(file: TokenFile, seq_length: int, **cut: object) -> GPTDataset:
    how = Cut(separate=True, whole=True, **cut)  # type: ignore[arg-type]
    return GPTDataset(file, range(file.num_documents), seq_length, vocab_size=60_000, cut=how)


@settings(max_examples=100)
@given(talks_, st.data())
def test_answers_are_every_second_turn(
    tmp_path_factory: pytest.TempPathFactory, talks: list[Talk], data: st.DataObject
) -> None:
    file = written(tmp_path_factory.mktemp("file"), talks)
    expected = [turn % 2 == 1 for talk in talks for turn, length in enumerate(talk) for _ in range(length)]
    start = data.draw(st.integers(0, file.num_tokens))
    stop = data.draw(st.integers(start, file.num_tokens))
    assert file.answered(start, stop).tolist() == expected[start:stop]
    assert file.answered(start, start).tolist() == [], "as behind a document of one token"


def test_answers_are_found_without_reading_the_whole_index(tmp_path: Path) -> None:
    documents = 100_000
    with TokenFileWriter(tmp_path / "many", np.dtype("<u2")) as writer:
        lengths, sequences = np.ones(2 * documents, np.int32), np.full(documents, 2)
        writer.add_documents(np.ones(2 * documents, np.uint16), lengths, sequences=sequences)
    file = TokenFile(tmp_path / "many")
    tracemalloc.start()
    found = file.answered(documents, documents + 4).tolist()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [False, True, False, True] and peak < documents


def test_what_is_longer_than_a_row_alone_is_left_out(tmp_path: Path) -> None:
    """Tokens 1 … 8, 9 … 16 and 17 … 25 in rows of 8: the first two fill a row each."""
    found = dataset(written(tmp_path, [[8], [3, 5], [4, 5]]), 8, too_long="drop")
    assert sorted(found.rows(range(2)).tokens.tolist()) == [list(range(1, 9)), list(range(9, 17))] and len(found) == 2


@pytest.mark.parametrize("too_long", ["cut", "truncate", "drop"])
def test_documents_without_a_token_make_no_row(tmp_path: Path, too_long: TooLong) -> None:
    file, cut = written(tmp_path, [[3], [0], [0]]), Cut(separate=True, whole=True, too_long=too_long)
    with pytest.raises(NoSampleError, match=r"documents 1 to 2 hold 0 tokens, .* Give this split more documents"):
        GPTDataset(file, range(1, 3), 8, vocab_size=60_000, cut=cut)


def test_how_many_are_left_out_is_known_and_what_is_truncated_keeps_its_beginning(tmp_path: Path) -> None:
    file = written(tmp_path, [[9], [3], [10], [2]])
    assert dataset(file, 8, too_long="drop").num_dropped == 2
    found = dataset(file, 8, too_long="truncate")
    assert found.num_dropped == 0 and len(found) == 3
    tokens = {tuple(row) for row in found.rows(range(3)).tokens.tolist()}
    assert tokens >= {tuple(range(1, 9)), tuple(range(13, 21))}


@pytest.mark.parametrize("length", [8, 9, 11, 12])
def test_what_is_cut_loses_no_token(tmp_path: Path, length: int) -> None:
    data = dataset(written(tmp_path, [[length], [3]]), 4, too_long="cut")
    rows = data.rows(range(len(data)))
    assert sorted(rows.tokens[rows.tokens > 0].tolist()) == list(range(1, length + 4))
    assert sorted(rows.labels[rows.counted].tolist()) == [*range(2, length + 1), length + 2, length + 3]


def test_the_configuration_says_how_documents_become_samples() -> None:
    assert cut_of(DataConfig(train="x", revision=2)) == Cut() and cut_of(DataConfig(train="x")) == Cut(revision=1)
    best_fit = DataConfig(train="x", revision=2, documents="separate", packing="best_fit", no_loss_on=(3, 5))
    assert cut_of(best_fit) == Cut(separate=True, best_fit=True, no_loss_on=(3, 5))
    whole = DataConfig(train="x", revision=2, documents="separate", packing="whole", too_long="drop", loss_on="answers")
    assert cut_of(whole) == Cut(separate=True, whole=True, too_long="drop", answers=True)


def test_what_lies_behind_those_that_are_packed_together_is_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven documents, three together; those that fill up a row are of one three."""
    monkeypatch.setattr(whole_rows, "TOGETHER", 3)
    data = dataset(written(tmp_path, [[2], [6], [1, 1], [5], [3], [2, 1], [7]]), 8)
    rows = data.rows(range(len(data)))
    assert sorted(rows.tokens[rows.tokens > 0].tolist()) == list(range(1, 29))
    assert sorted(rows.tokens.tolist()[:2]) == [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 0, 0, 0, 0, 0, 0]]


def test_what_was_cut_asks_for_the_token_behind_and_a_whole_document_for_none(tmp_path: Path) -> None:
    """Of 4, 5 and 3 tokens in rows of 4, of which the second is truncated."""
    data = dataset(written(tmp_path, [[4], [5], [3]]), 4, too_long="truncate")
    rows = data.rows(range(len(data)))
    last = {
        tuple(tokens): (labels[-1], bool(counted[-1]))
        for tokens, labels, counted in zip(
            rows.tokens.tolist(), rows.labels.tolist(), rows.counted.tolist(), strict=True
        )
    }
    assert last == {(1, 2, 3, 4): (0, False), (5, 6, 7, 8): (9, True), (10, 11, 12, 0): (0, False)}


@pytest.mark.slow
@settings(max_examples=100)
@given(talks_, st.integers(2, 9), st.sampled_from(["cut", "truncate", "drop"]), st.booleans())
def test_each_document_stands_in_one_row_and_each_of_its_labels_counts_once(
    tmp_path_factory: pytest.TempPathFactory, talks: list[Talk], s: int, too_long: TooLong, answers: bool
) -> None:
    file = written(tmp_path_factory.mktemp("file"), talks)
    documents, asked = [], []
    first = 1
    for talk in talks:
        tokens = list(range(first, first + sum(talk)))
        answered = [turn % 2 == 1 for turn, length in enumerate(talk) for _ in range(length)]
        first += len(tokens)
        if too_long == "drop" and len(tokens) > s:
            continue
        read = tokens[: s + 1] if too_long == "truncate" else tokens
        asked += [token for token, flag in list(zip(read, answered, strict=False))[1:] if flag or not answers]
        kept = tokens[:s] if too_long == "truncate" else tokens
        documents += [kept[at : at + s] for at in range(0, len(kept), s)]
    if not documents:
        with pytest.raises(DataError, match=r"data.too_long = \"drop\" leaves such documents out"):
            dataset(file, s, too_long=too_long)
        return
    data = dataset(file, s, too_long=too_long)
    rows = data.rows(range(len(data)))
    if answers:
        sidecar(file)
        rows = dataset(file, s, too_long=too_long, answers=True).rows(range(len(data)))
    assert rows.documents is not None
    found = [
        rows.tokens[row][rows.documents[row] == number].tolist()
        for row in range(len(data))
        for number in range(int(rows.documents[row].max()) + 1)
    ]
    assert sorted(each for each in found if any(each)) == sorted(documents)
    assert sorted(rows.labels[rows.counted].tolist()) == sorted(asked)
    assert bool((rows.labels[rows.counted] == rows.tokens[rows.counted] + 1).all())
    assert len(data) * s >= sum(map(len, documents)) and len(data) <= len(documents)


def sidecar(file: TokenFile, head: str | None = ANSWERS) -> None:
    examples = None if head is None else ExampleFields("chat", head, ("given", "answered"))
    write_sidecar(
        file.prefix, Sidecar("0" * 64, 60_000, None, file.num_documents, file.num_tokens, 1, (), examples=examples)
    )


def test_a_row_restarts_positions_and_hides_padding(tmp_path: Path) -> None:
    file = written(tmp_path, [[2, 3], [1, 2], [6, 1]])
    sidecar(file)
    batch = as_batch(dataset(file, 9, answers=True, revision=1).rows([0, 1]), [0, 1])
    assert batch.tokens[:, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0]
    assert batch.documents is not None and batch.positions is not None
    assert batch.documents[:, 0].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 2]
    assert batch.positions[:, 0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0]
    assert batch.labels[:, 0].tolist() == [2, 3, 4, 5, 0, 7, 8, 0, 0]
    assert batch.loss_mask[:, 0].tolist() == [0, 1, 1, 1, 0, 1, 1, 0, 0]
    assert batch.loss_mask[:, 1].tolist() == [0, 0, 0, 0, 0, 1, 0, 0, 0]
    assert batch.positions[:, 1].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]


@pytest.mark.parametrize("kept_out", [(), (4, 9, 20)])
@pytest.mark.parametrize("cut", [Cut(answers=True), Cut(separate=True, best_fit=True, answers=True)])
def test_answers_count_in_rows_of_every_kind(cut: Cut, kept_out: tuple[int, ...], tmp_path: Path) -> None:
    """But for labels of theirs that do not count."""
    talks = [[2, 3], [1, 2], [6, 1], [3, 9, 1, 2]]
    file = written(tmp_path, talks)
    sidecar(file)
    cut = replace(cut, no_loss_on=kept_out)
    rows = GPTDataset(file, range(4), 4, vocab_size=60_000, cut=cut).rows(range(7))
    answered = np.setdiff1d(np.flatnonzero(file.answered(0, 29)) + 1, kept_out)
    assert sorted(rows.labels[rows.counted].tolist()) == answered.tolist()


def test_best_fit_puts_the_longest_where_least_room_is_left() -> None:
    spans = [DocumentSpan(begin, length) for begin, length in ((0, 3), (3, 7), (10, 2), (12, 5), (17, 1))]
    assert pack_whole(spans, 8) == [[(0, 3), (12, 5)], [(3, 7), (17, 1)], [(10, 2)]]


@pytest.mark.parametrize("head", [None, "classification"])
def test_a_file_without_answers_is_refused(head: str | None, tmp_path: Path) -> None:
    file = written(tmp_path, [[4, 5], [6]])
    sidecar(file, head)
    with pytest.raises(DataError, match="in which no answers are marked"):
        dataset(file, 8, answers=True)
    sidecar_path(file.prefix).unlink()
    assert dataset(file, 8, answers=True).rows([0, 1]).counted.sum() == 5, "another program's file is believed"
    with pytest.raises(DataError, match="holds text, in which no answers are marked"):
        dataset(written(tmp_path, [[9], [6]]), 8, answers=True)


def test_a_damaged_index_is_said(tmp_path: Path) -> None:
    file = written(tmp_path, [[2, 3], [1, 2], [6, 1]])
    content = bytearray(idx_path(file.prefix).read_bytes())
    place = 34 + 4 * 6 + 8 * 2
    content[place : place + 8] = (10**6).to_bytes(8, "little")
    idx_path(file.prefix).write_bytes(content)
    with pytest.raises(DataError, match="is damaged"):
        TokenFile(file.prefix).answered(0, 15)


def test_the_first_rows_are_of_documents_of_all_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 documents as long as a row, and 40 rows of seven behind them, in each of two groups: of 40 such rows at
    random fewer than 8 or more than 32 are of one document with a chance of 10⁻⁷.
    """
    monkeypatch.setattr(whole_rows, "TOGETHER", 320)
    file = written(tmp_path, ([[7]] * 40 + [[1]] * 280) * 2)
    before, now = (dataset(file, 7, revision=each).rows(range(160)) for each in (1, 2))
    assert before.documents is not None and now.documents is not None
    assert sorted(before.tokens[:80].tolist()) == sorted(now.tokens[:80].tolist())
    alone = [(each == 0).all(axis=1).tolist() for each in (before.documents, now.documents)]
    assert alone[0] == ([True] * 40 + [False] * 40) * 2, "as runs have them that began so"
    assert all(8 <= sum(alone[1][begin : begin + 40]) <= 32 for begin in range(0, 160, 40))
