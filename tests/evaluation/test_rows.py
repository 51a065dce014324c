"""Rows of a text that is scored: each label once, as training would have cut and counted them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.data.rows import Cut
from colonnade.errors import DataError
from colonnade.evaluation.rows import PackedText, ScoredRows, TokenText, WindowRows, batches_of

LENGTHS = st.integers(1, 9).flatmap(lambda seq_length: st.tuples(st.just(seq_length), st.integers(1, seq_length)))
STARTS = st.sets(st.integers(1, 38), max_size=9).map(lambda found: [0, *sorted(found)])
SEPARATE, PACKED = Cut(separate=True), Cut(separate=True, best_fit=True)


def text_of(num_tokens: int, seq_length: int, starts: list[int]) -> TokenText:
    """Tokens that count up from 100."""
    tokens = np.arange(100, 100 + num_tokens, dtype=np.uint16)
    return TokenText(tokens, np.array([start for start in starts if start < num_tokens]), 200, seq_length)


def scored(rows: ScoredRows) -> list[int]:
    found = [rows.row(number) for number in range(len(rows))]
    return sorted(label for row in found for label in row.labels[row.counted].tolist())


@given(st.integers(2, 40), LENGTHS, st.integers(1, 5))
def test_joined_windows_score_every_label_once(num_tokens: int, lengths: tuple[int, int], batch_size: int) -> None:
    seq_length, stride = lengths
    rows = WindowRows(text_of(num_tokens, seq_length, []), stride, Cut())
    numbers = [range(first, min(first + batch_size, len(rows))) for first in range(0, len(rows), batch_size)]
    labels = []
    for batch in batches_of(rows, numbers):
        for column in range(batch.tokens.shape[1]):
            counts = batch.loss_mask[:, column].bool()
            labels += batch.labels[:, column][counts].tolist()
            assert (batch.labels[:, column][counts] == batch.tokens[:, column][counts] + 1).all()
        assert batch.documents is None and batch.positions is None
    assert labels == list(range(101, 100 + num_tokens))


@pytest.mark.slow
@given(st.integers(2, 40), LENGTHS, STARTS)
def test_separate_documents_do_not_predict_one_another(
    num_tokens: int, lengths: tuple[int, int], starts: list[int]
) -> None:
    seq_length, stride = lengths
    text = text_of(num_tokens, seq_length, starts)
    expected = [label for label in range(101, 100 + num_tokens) if label - 100 not in starts]
    for rows in (WindowRows(text, stride, SEPARATE), PackedText(text, PACKED)):
        assert scored(rows) == expected
        for number in range(len(rows)):
            row = rows.row(number)
            assert row.documents is not None and row.tokens.shape == row.documents.shape == (1, seq_length)
            for token, next_token, one, other in zip(
                row.tokens[0], row.tokens[0][1:], row.documents[0], row.documents[0][1:], strict=False
            ):
                begins = next_token - 100 in starts or next_token != token + 1  # another document, or a piece of one
                assert next_token == 0 or (other != one) == begins


@given(st.integers(2, 40), LENGTHS)
def test_labels_that_do_not_count(num_tokens: int, lengths: tuple[int, int]) -> None:
    text = text_of(num_tokens, lengths[0], [])
    expected = [label for label in range(101, 100 + num_tokens) if label not in (103, 107)]
    assert scored(WindowRows(text, lengths[1], Cut(no_loss_on=(103, 107)))) == expected


@pytest.mark.parametrize("stride", [2, 4, None], ids=["windows", "windows beside each other", "packed"])
def test_tokens_of_answers_alone_are_scored(stride: int | None) -> None:
    """In every row by marks of its own place."""
    answers = np.array([False, True, True, False, False, False, True, False, False, True, True])
    text = replace(text_of(11, 4, [0, 5]), answers=answers)
    cut = Cut(separate=True, best_fit=stride is None, answers=True)
    rows = PackedText(text, cut) if stride is None else WindowRows(text, stride, cut)
    assert scored(rows) == [101, 102, 106, 109, 110]


@pytest.mark.parametrize("stride", [2, 4, None], ids=["windows", "windows beside each other", "packed"])
def test_where_answers_are_not_marked_every_token_is_scored(stride: int | None) -> None:
    """A run that counts answers alone is asked about a text that does not tell them."""
    text, cut = text_of(11, 4, [0, 5]), Cut(separate=True, best_fit=stride is None, answers=True)
    rows = PackedText(text, cut) if stride is None else WindowRows(text, stride, cut)
    assert scored(rows) == [label for label in range(101, 111) if label != 105]


def test_rows_that_a_text_fills_have_none_behind_them() -> None:
    texts = [PackedText(text_of(num_tokens, 4, [0, 5]), PACKED) for num_tokens in (8, 9, 10)]
    assert [len(text) for text in texts] == [2, 2, 3]
    labels = [101, 102, 103, 104, 106, 107]
    assert [scored(text) for text in texts] == [labels, [*labels, 108], [*labels, 108, 109]]
    assert {text.row(number).tokens.shape for text in texts for number in range(len(text))} == {(1, 4)}


def test_what_fills_a_row_up_belongs_to_its_last_document() -> None:
    """Numbers of documents rise; what is behind the end counts for nothing."""
    text = text_of(10, 6, [0, 3, 8])
    for rows in (WindowRows(text, 6, SEPARATE), PackedText(text, PACKED)):
        row = rows.row(1)
        assert row.documents is not None and row.documents.tolist() == [[0, 0, 1, 1, 1, 1]]
        assert row.tokens.tolist() == [[106, 107, 108, 0, 0, 0]]
        assert row.counted.tolist() == [[True, False, True, False, False, False]]


def test_a_token_of_another_vocabulary_is_named() -> None:
    text = TokenText(np.array([1, 2, 9, 3]), np.array([0]), 9, 4)
    with pytest.raises(DataError, match=r"token id 9 near token 0, but the model's vocabulary has 9 ids .0 to 8.:"):
        WindowRows(text, 4, Cut()).row(0)
    for token, said in ((-1, "token id -1 near token 2, but"), (1 << 33, "token id 8,589,934,592 near token 2")):
        text = TokenText(np.array([1, 2, 8, token, 3]), np.array([0]), 9, 2)
        WindowRows(text, 2, Cut()).row(0)
        with pytest.raises(DataError, match=said):
            WindowRows(text, 2, Cut()).row(1)
