"""T5 samples: nothing is lost, spans are where they should be, and only (seed, sample, epoch) decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.data.datasets import open_datasets
from colonnade.data.draws import Draws, SamplePurpose
from colonnade.data.gpt_dataset import TextSamples
from colonnade.data.t5_dataset import Corruption, T5Dataset, spans, text_length
from colonnade.errors import DataError

Write = Callable[..., str]
END, START = 1, 0
CORRUPTION = Corruption(sentinels=tuple(range(50_099, 49_999, -1)), end=END, start=START)


def dataset(prefix: str, length: int, seed: int = 1) -> T5Dataset:
    texts = open_datasets(
        samples=TextSamples(), train=prefix, split=(1, 0, 0), seq_length=length, vocab_size=60_000, seed=seed
    ).train
    return T5Dataset(texts, corruption=CORRUPTION, seed=seed)  # type: ignore[arg-type]


def rebuilt(encoder: list[int], labels: list[int]) -> list[int]:
    """The text, with each sentinel of the encoder's sequence replaced by what the decoder writes behind it."""
    behind: dict[int, list[int]] = {}
    for token in labels[:-1]:
        if token in CORRUPTION.sentinels:
            behind[token] = []
        else:
            behind[list(behind)[-1]].append(token)
    assert list(behind) == list(CORRUPTION.sentinels[: len(behind)])
    return [token for each in encoder[:-1] for token in behind.get(each, [each])]


def test_texts_can_be_put_together_again(write_tokens: Write) -> None:
    length = text_length(64, CORRUPTION)
    prefix = write_tokens(length * 40 + 1)
    data = dataset(prefix, length)
    texts = open_datasets(
        samples=TextSamples(), train=prefix, split=(1, 0, 0), seq_length=length, vocab_size=60_000, seed=1
    ).train
    batch = data.batch(range(30))
    assert batch.tokens.shape == (64, 30)
    assert (len(batch.tokens), len(batch.labels)) == CORRUPTION.widths(length)
    for column in range(30):
        encoder, labels = batch.tokens[:, column].tolist(), batch.labels[:, column].tolist()
        assert encoder[-1] == labels[-1] == END
        assert rebuilt(encoder, labels) == texts.rows([column]).tokens[0].tolist()
        assert batch.decoder_tokens[:, column].tolist() == [START, *labels[:-1]]


@given(st.integers(2, 2_000))
def test_lengths_add_up(text: int) -> None:
    cut, count = CORRUPTION.lengths(text)
    kept, removed = spans(text, CORRUPTION, Draws(1, SamplePurpose.T5, 0, text))
    assert (len(kept), len(removed), int(removed.sum()), int(kept.sum())) == (count, count, cut, text - cut)
    assert int(kept.min()) >= 1 and int(removed.min()) >= 1
    assert abs(cut - 0.15 * text) <= 1


def test_something_stays_however_much_is_cut() -> None:
    assert [Corruption((9,), END, START, share=0.9).lengths(text)[0] for text in (2, 3, 4)] == [1, 2, 3]


@pytest.mark.parametrize(("seq_length", "expected"), [(512, 568), (128, 141)])
def test_the_text_that_fills_a_sequence(seq_length: int, expected: int) -> None:
    length = text_length(seq_length, CORRUPTION)
    assert length == expected or CORRUPTION.widths(length)[0] <= seq_length < CORRUPTION.widths(length + 1)[0]


def test_every_way_to_cut_is_alike_likely() -> None:
    seen = Counter(
        tuple(spans(12, Corruption((9, 8, 7), 1, 0, 0.5, 2.0), Draws(1, SamplePurpose.T5, 0, i))[1].tolist())
        for i in range(800)
    )
    assert len(seen) == 10  # ways to write six as three positive integers
    assert max(seen.values()) - min(seen.values()) < 70


def test_only_seed_and_position_decide(write_tokens: Write) -> None:
    prefix = write_tokens(3_001)
    data, again = dataset(prefix, 100), dataset(prefix, 100)
    together = data.batch([5, 31, 64])
    for column, position in enumerate([5, 31, 64]):
        assert again.batch([position]).tokens[:, 0].tolist() == together.tokens[:, column].tolist()
    assert dataset(prefix, 100, seed=2).batch([5]).tokens[:, 0].tolist() != together.tokens[:, 0].tolist()


def test_too_few_sentinels(write_tokens: Write) -> None:
    with pytest.raises(DataError, match=r"texts of 2,100 tokens have 105 spans cut out, but the vocabulary has 100"):
        dataset(write_tokens(3_001), 2_100)


def test_a_sequence_too_short() -> None:
    with pytest.raises(DataError, match="too short for T5 samples"):
        text_length(2, CORRUPTION)
    assert text_length(3, CORRUPTION) == 2
