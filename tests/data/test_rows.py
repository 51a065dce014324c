"""Rows: where documents begin, what counts in the loss, and that separate documents are as if each were alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.data import rows as rows_module
from colonnade.data.gpt_dataset import GPTDataset
from colonnade.data.indexed import TokenFile
from colonnade.data.loader import as_batch
from colonnade.data.rows import WINDOW, Cut, Rows, positions_within
from colonnade.data.writer import TokenFileWriter
from tests.data.batches import load_batch

Write = Callable[..., str]
SEPARATE, PACKED = Cut(separate=True), Cut(separate=True, best_fit=True)
lengths_ = st.lists(st.integers(0, 12), min_size=1, max_size=20).filter(sum)


def written(folder: Path, lengths: list[int]) -> TokenFile:
    """A file of documents whose tokens count up through all of them."""
    with TokenFileWriter(folder / "file", np.dtype("<u2")) as writer:
        for stop, length in zip(np.cumsum(lengths), lengths, strict=True):
            writer.add_document(np.arange(stop - length, stop))
    return TokenFile(folder / "file")


def dataset(file: TokenFile, seq_length: int, cut: Cut) -> GPTDataset:
    return GPTDataset(file, range(file.num_documents), seq_length, vocab_size=60_000, cut=cut)


# Where documents begin


@given(lengths_, st.integers(0, 200), st.integers(0, 200))
def test_document_starts(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], a: int, b: int) -> None:
    file = written(tmp_path_factory.mktemp("file"), lengths)
    low, high = sorted((min(a, file.num_tokens), min(b, file.num_tokens)))
    expected = sorted({start for start in np.cumsum([0, *lengths[:-1]]).tolist() if low <= start < high})
    assert file.document_starts(low, high).tolist() == expected


def test_document_starts_of_many_short_documents(tmp_path: Path) -> None:
    file = written(tmp_path, [1] * 1_000)
    assert file.document_starts(3, 900).tolist() == list(range(3, 900))


# Stream


def test_joined_rows_are_of_one_piece(write_tokens: Write) -> None:
    batch = load_batch(dataset(TokenFile(write_tokens(7, 3, 8)), 4, Cut()), range(4))
    assert batch.documents is None and batch.positions is None
    assert bool((batch.loss_mask == 1).all())


def test_separate_documents(write_tokens: Write) -> None:
    batch = load_batch(dataset(TokenFile(write_tokens(7, 3, 8)), 8, SEPARATE), range(2))
    assert batch.documents is not None and batch.positions is not None
    assert batch.tokens[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert batch.documents[:, 0].tolist() == [0, 0, 0, 0, 0, 0, 0, 1]
    assert batch.positions[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]
    assert batch.loss_mask[:, 0].tolist() == [1, 1, 1, 1, 1, 1, 0, 1]  # 6 is not asked for 7, another document's
    assert batch.documents[:, 1].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]
    assert batch.loss_mask[:, 1].tolist() == [1, 0, 1, 1, 1, 1, 1, 1]
    assert batch.documents.is_contiguous() and batch.to(torch.device("cpu")).documents is not None


def test_a_document_that_begins_with_a_sample(write_tokens: Write) -> None:
    rows = dataset(TokenFile(write_tokens(8, 9)), 8, SEPARATE).rows([0, 1])
    assert rows.documents is not None
    assert rows.documents.tolist() == [[0] * 8, [0] * 8]
    assert rows.counted[0].tolist() == [True] * 7 + [False]


def test_tokens_that_do_not_count(write_tokens: Write) -> None:
    rows = dataset(TokenFile(write_tokens(18)), 8, Cut(no_loss_on=(3, 9))).rows([0, 1])
    assert [rows.labels[~rows.counted].tolist(), int(rows.counted.sum())] == [[3, 9], 14]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_positions_restart_with_each_document(steps: list[int]) -> None:
    documents = np.cumsum(steps)[None]
    expected, last = [], -1
    for document in documents[0].tolist():
        expected.append(expected[-1] + 1 if document == last else 0)
        last = document
    assert positions_within(documents).tolist() == [expected]


# Packed


@settings(max_examples=50)
@given(lengths_, st.integers(1, 9))
def test_packed_rows_have_the_streams_tokens_and_each_label_of_a_document_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int
) -> None:
    file = written(tmp_path_factory.mktemp("file"), lengths)
    if file.num_tokens <= seq_length:
        return
    stream, packed = dataset(file, seq_length, SEPARATE), dataset(file, seq_length, PACKED)
    assert len(stream) == len(packed)
    in_stream, in_packed = stream.rows(range(len(stream))), packed.rows(range(len(packed)))
    assert sorted(in_packed.tokens.reshape(-1)) == in_stream.tokens.reshape(-1).tolist()
    assert bool((in_packed.labels == in_packed.tokens + 1).all())
    assert sorted(in_packed.labels[in_packed.counted]) == sorted(in_stream.labels[in_stream.counted])


@pytest.mark.parametrize("kept", [1, 16])
def test_windows_are_packed_apart(kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not all of them are remembered."""
    monkeypatch.setattr(rows_module, "_KEPT_WINDOWS", kept)
    lengths = np.random.default_rng(1).integers(1, 40, 900).tolist()
    file = written(tmp_path, lengths)
    data = dataset(file, 32, PACKED)
    assert len(data) > 3 * WINDOW
    rows = data.rows(np.random.default_rng(2).permutation(len(data)))
    assert sorted(rows.tokens.reshape(-1)) == list(range(len(data) * 32))
    first = data.rows(range(WINDOW)).tokens
    assert sorted(first.reshape(-1)) == list(range(WINDOW * 32))


def test_of_many_windows_the_last_few_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run goes through millions."""

    class Packed(list[Any]):
        """A list that can be asked whether it is still there."""

    packed, pack = list[weakref.ref[Packed]](), rows_module.pack

    def packing(*arguments: Any) -> Packed:
        made = Packed(pack(*arguments))
        packed.append(weakref.ref(made))
        return made

    monkeypatch.setattr(rows_module, "WINDOW", 2)
    monkeypatch.setattr(rows_module, "pack", packing)
    monkeypatch.setattr(rows_module, "in_any_order", lambda bins, window: bins)
    data = dataset(written(tmp_path, [5] * 100), 4, PACKED)
    data.rows(range(len(data)))
    assert len(packed) == 62 and sum(each() is not None for each in packed) == rows_module._KEPT_WINDOWS


def test_any_part_of_a_window_is_like_the_window(tmp_path: Path) -> None:
    """64 documents as long as a row, and 64 rows of four each: packing begins the long ones first in each window. Of a
    random half of the rows 32 are of one document, and fewer than 16 or more than 48 with a chance of 10⁻⁷.
    """
    file = written(tmp_path, ([8] * 64 + [2] * 256) * 2 + [9])
    before, now = (dataset(file, 8, replace(PACKED, revision=each)).rows(range(2 * WINDOW)) for each in (1, 2))
    for window in (slice(0, WINDOW), slice(WINDOW, 2 * WINDOW)):
        assert sorted(before.tokens[window].tolist()) == sorted(now.tokens[window].tolist())
    alone = [[not row.any() for row in each.documents] for each in (before, now) if each.documents is not None]
    assert alone[0] == ([True] * 64 + [False] * 64) * 2, "as runs have them that began so"
    halves = [sum(alone[1][begin : begin + 64]) for begin in range(0, 256, 64)]
    assert all(16 <= half <= 48 for half in halves), halves
    assert alone[1][:WINDOW] != alone[1][WINDOW:], "each window has its own order"


def test_labels_that_do_not_count_in_packed_rows(write_tokens: Write) -> None:
    """The label alone decides, not the token that it follows."""
    file = TokenFile(write_tokens(7, 3, 8))
    rows = dataset(file, 8, Cut(separate=True, best_fit=True, no_loss_on=(3, 9, 12))).rows([0, 1])
    ends = {7, 10}  # the first tokens of the second and the third document are no labels at all
    assert sorted(rows.labels[rows.counted].tolist()) == sorted({*range(1, 17)} - {3, 9, 12} - ends)


# Rows as such


def test_pieces_of_rows(write_tokens: Write) -> None:
    rows = dataset(TokenFile(write_tokens(7, 3, 8)), 8, SEPARATE).rows([0, 1])
    cut = rows.narrow(np.array([4, 0]), 4)
    assert cut.tokens.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert cut.labels.tolist() == [[5, 6, 7, 8], [9, 10, 11, 12]]
    batch = as_batch(cut, [8, 9])
    assert batch.positions is not None
    assert batch.positions.T.tolist() == [[0, 1, 2, 0], [0, 1, 0, 1]]


def test_separate_documents_are_as_if_alone(write_tokens: Write) -> None:
    """A causal attention that keeps to `documents` and `positions` gives each document's own outputs."""
    batch = load_batch(dataset(TokenFile(write_tokens(5, 3, 9, vocab_size=50)), 16, PACKED), [0])
    assert batch.documents is not None and batch.positions is not None
    documents = batch.documents[:, 0]
    together = attention(batch.tokens[:, 0], batch.positions[:, 0], documents[:, None] == documents)
    for document in documents.unique():
        mine = documents == document
        tokens = batch.tokens[mine, 0]
        alone = attention(tokens, torch.arange(len(tokens)), torch.ones(len(tokens), len(tokens), dtype=torch.bool))
        assert float((together[mine] - alone).abs().max()) < 1e-12


def attention(tokens: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """One attention over embedded tokens and positions in float64: [s] -> [s, h]."""
    tables = torch.randn(2, 64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = tables[0][tokens] + tables[1][positions]
    scores = (x @ x.T).masked_fill(~(visible & torch.ones_like(visible).tril()), float("-inf"))
    return scores.softmax(-1) @ x


def test_rows_of_one_kind_only() -> None:
    one = Rows(np.zeros((1, 2), int), np.zeros((1, 2), int), np.ones((1, 2), bool), None)
    other = Rows(one.tokens, one.labels, one.counted, one.tokens)
    with pytest.raises(AssertionError, match="all samples have a field, or none"):
        Rows.stack([one, other])


def test_packed_rows_tell_documents_apart_where_one_ends(tmp_path: Path) -> None:
    """Each token's value is its place in the file, which tells its document."""
    lengths = [5, 3, 6, 2, 4, 4, 1, 7, 2, 6, 8, 9]
    data = dataset(written(tmp_path, lengths), 8, PACKED)
    of_token = np.repeat(np.arange(len(lengths)), lengths)
    rows = data.rows(list(range(len(data))))
    assert rows.documents is not None and len(data) == 7
    assert ((np.diff(rows.documents, axis=1) != 0) == (np.diff(of_token[rows.tokens], axis=1) != 0)).all()
