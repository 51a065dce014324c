"""Samples: where they are cut, which documents they come from, in which order, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.data.datasets import check_documents, open_datasets, open_tokens, order_of, split_documents
from colonnade.data.gpt_dataset import GPTDataset, TextSamples
from colonnade.data.indexed import TokenFile
from colonnade.data.rows import Cut
from colonnade.data.sampler import EpochOrder
from colonnade.data.sidecar import ANSWERS, ExampleFields, Sidecar
from colonnade.data.tokenizer import Tokenizer, train_bpe
from colonnade.data.writer import TokenFileWriter
from colonnade.errors import DataError
from tests.data.sidecars import write_sidecar

Write = Callable[..., str]
VOCAB = 60_000


def test_samples_overlap_by_one_token_and_leave_none_out(write_tokens: Write) -> None:
    dataset = GPTDataset(TokenFile(write_tokens(7, 3, 8)), range(3), 4, vocab_size=VOCAB)
    assert (dataset.num_tokens, len(dataset)) == (18, 4)
    assert [dataset.sample(position).tolist() for position in range(4)] == [
        [0, 1, 2, 3, 4],
        [4, 5, 6, 7, 8],
        [8, 9, 10, 11, 12],
        [12, 13, 14, 15, 16],
    ]
    assert dataset.samples([3, 0]).tolist() == [[12, 13, 14, 15, 16], [0, 1, 2, 3, 4]]
    assert dataset.sample(5).tolist() == dataset.sample(1).tolist()
    assert dataset.sample(0).dtype == np.int64


def test_samples_stay_within_their_documents(write_tokens: Write) -> None:
    dataset = GPTDataset(TokenFile(write_tokens(7, 3, 8)), range(1, 2), 2, vocab_size=VOCAB)
    assert [dataset.sample(position).tolist() for position in range(len(dataset))] == [[7, 8, 9]]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=10), st.integers(1, 12), st.data())
def test_every_token_of_a_split_is_a_label_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seq_length: int, data: st.DataObject
) -> None:
    prefix = tmp_path_factory.mktemp("tokens") / "file"
    with TokenFileWriter(prefix, np.dtype("<u2")) as writer:
        for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
            writer.add_document(np.arange(start, start + length))
    first = data.draw(st.integers(0, len(lengths) - 1))
    documents = range(first, data.draw(st.integers(first + 1, len(lengths))))
    begin, end = sum(lengths[: documents.start]), sum(lengths[: documents.stop])
    if end - begin <= seq_length:
        with pytest.raises(DataError, match=r"one sample takes model.seq_length \+ 1"):
            GPTDataset(TokenFile(prefix), documents, seq_length, vocab_size=VOCAB)
        return
    dataset = GPTDataset(TokenFile(prefix), documents, seq_length, vocab_size=VOCAB)
    labels = dataset.samples(range(len(dataset)))[:, 1:].reshape(-1).tolist()
    assert labels == list(range(begin + 1, begin + 1 + len(labels)))
    assert end - (begin + 1 + len(labels)) < seq_length


def test_the_order_is_the_runs(write_tokens: Write) -> None:
    order = EpochOrder(20, seed=9)
    dataset = GPTDataset(TokenFile(write_tokens(101)), range(1), 5, vocab_size=VOCAB, order=order)
    starts = dataset.samples(range(40))[:, 0] // 5
    assert starts.tolist() == order.samples(np.arange(40)).tolist()


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_an_id_beyond_the_vocabulary_is_named(write_tokens: Write, dtype: str) -> None:
    dataset = GPTDataset(TokenFile(write_tokens(7, 3, 8, dtype=dtype)), range(3), 4, vocab_size=15)
    dataset.sample(2)
    with pytest.raises(DataError, match=r"document 2 has token id 15 at its position 5, but the vocabulary has 15 ids"):
        dataset.sample(3)
    with pytest.raises(DataError, match=r"token id 16 at its position 6, but the vocabulary has 16 ids"):
        GPTDataset(TokenFile(write_tokens(7, 3, 8, dtype=dtype)), range(3), 4, vocab_size=16).sample(3)


# Splits


@given(st.integers(1, 10_000), st.tuples(st.integers(1, 1_000), st.integers(0, 1_000), st.integers(0, 1_000)))
def test_splits_are_all_documents_in_the_right_shares(num_documents: int, weights: tuple[int, int, int]) -> None:
    parts = split_documents(num_documents, weights)
    assert [document for part in parts for document in part] == list(range(num_documents))
    for part, weight in zip(parts, weights, strict=True):
        assert abs(len(part) - num_documents * weight / sum(weights)) <= 1
        assert weight or not part


def opened(prefix: str, **settings: object) -> object:
    return open_datasets(
        samples=TextSamples(), **{"train": prefix, "seq_length": 4, "vocab_size": VOCAB, "seed": 1} | settings
    )  # type: ignore[arg-type]


def test_opening_a_run(write_tokens: Write) -> None:
    prefix = write_tokens(*[10] * 30)
    datasets = open_datasets(
        samples=TextSamples(), train=prefix, split=(28, 1, 1), seq_length=4, vocab_size=VOCAB, seed=1
    )
    assert datasets.train.documents == range(28)
    assert datasets.train.num_samples == 69
    assert datasets.train.order == EpochOrder(69, 1)
    assert datasets.validation is not None and datasets.test is not None
    assert (datasets.validation.documents, datasets.test.documents) == (range(28, 29), range(29, 30))
    assert datasets.validation.sample(0).tolist() == [280, 281, 282, 283, 284]
    alone = open_datasets(samples=TextSamples(), train=prefix, split=(1, 0, 0), seq_length=4, vocab_size=VOCAB, seed=1)
    assert alone.validation is None and alone.test is None


def test_every_part_is_cut_alike(write_tokens: Write) -> None:
    """Those of one file's split, and those with a file of their own: loss is only comparable so."""
    prefix, other = write_tokens(*[9] * 20, name="a"), write_tokens(*[9] * 4, name="b")
    cut = Cut(separate=True, best_fit=True, no_loss_on=(2,))
    for own in ({}, {"validation": other, "test": other}):
        found = open_datasets(
            samples=TextSamples(cut), train=prefix, **own, split=(8, 1, 1), seq_length=9, vocab_size=VOCAB, seed=0
        )
        for part in (found.train, found.validation, found.test):
            assert part is not None
            rows = part.rows(range(len(part)))
            assert rows.documents is not None and not rows.counted[rows.labels == 2].any()
            assert not rows.documents.any(), "documents of nine tokens fill samples of nine"


def test_files_of_their_own(write_tokens: Write) -> None:
    train, other = write_tokens(*[10] * 30, name="train"), write_tokens(9, 9, name="other")
    datasets = open_datasets(
        samples=TextSamples(), train=train, validation=other, split=(29, 1, 0), seq_length=4, vocab_size=VOCAB, seed=1
    )
    assert datasets.train.documents == range(30)
    assert datasets.validation is not None
    assert (datasets.validation.file.prefix, datasets.validation.documents) == (other, range(2))
    datasets = open_datasets(
        samples=TextSamples(), train=train, validation=other, split=(8, 1, 1), seq_length=4, vocab_size=VOCAB, seed=1
    )
    assert datasets.test is not None
    assert (datasets.train.documents, datasets.test.documents) == (range(27), range(27, 30))


def test_a_split_without_documents(write_tokens: Write) -> None:
    prefix = write_tokens(50, 50, 50)
    with pytest.raises(
        DataError, match=r'3 documents, of which data.split = "29:1:0" leaves none for validation.*data.val'
    ):
        opened(prefix, split=(29, 1, 0))
    with pytest.raises(DataError, match="leaves none for train"):
        opened(prefix, split=(1, 99, 0))


def test_one_document_is_enough_where_nothing_is_evaluated(write_tokens: Write) -> None:
    datasets = open_datasets(
        samples=TextSamples(),
        train=write_tokens(50),
        needed=frozenset({"train"}),
        seq_length=4,
        vocab_size=VOCAB,
        seed=1,
    )
    assert datasets.train.documents == range(1)
    assert datasets.validation is None and datasets.test is None


def test_a_part_without_a_sample_is_left_out_where_nothing_is_evaluated(write_tokens: Write) -> None:
    prefix = write_tokens(50, 50, 3)
    settings: dict[str, Any] = {"samples": TextSamples(), "train": prefix, "split": (2, 1, 0), "seq_length": 4}
    datasets = open_datasets(**settings, needed=frozenset({"train"}), vocab_size=VOCAB, seed=1)
    assert (len(datasets.train), datasets.validation) == (24, None)
    with pytest.raises(DataError, match=r"documents 2 to 2 hold 3 tokens, and one sample takes"):
        open_datasets(**settings, vocab_size=VOCAB, seed=1)


def test_a_corpus_shorter_than_a_sample(write_tokens: Write) -> None:
    with pytest.raises(DataError, match=r"hold 4 tokens, and one sample takes model.seq_length \+ 1 = 5.*to 3 or less"):
        opened(write_tokens(4), split=(1, 0, 0))


def test_orders(write_tokens: Write) -> None:
    prefix = write_tokens(101)
    mixed = open_datasets(
        samples=TextSamples(),
        train=prefix,
        split=(1, 0, 0),
        seq_length=5,
        vocab_size=VOCAB,
        seed=1,
        order="all_epochs",
        epochs=3,
    ).train
    starts = (mixed.samples(range(60))[:, 0] // 5).tolist()
    assert sorted(starts) == sorted([*range(20)] * 3)
    with pytest.raises(DataError, match=r"data.epochs = 3 of 20 samples end at 60"):
        mixed.sample(60)
    with pytest.raises(DataError, match=r"data\.epochs is None"):
        opened(prefix, split=(1, 0, 0), order="all_epochs")


def test_data_of_another_tokenizer(write_tokens: Write, tokenizer: Tokenizer) -> None:
    prefix = write_tokens(20, vocab_size=600)
    opened(prefix, split=(1, 0, 0), tokenizer=tokenizer)  # nothing is known of the file's tokenizer
    write_sidecar(prefix, Sidecar(tokenizer.sha256, 600, 599, 1, 20, 60, ()))
    opened(prefix, split=(1, 0, 0), tokenizer=tokenizer)
    write_sidecar(prefix, Sidecar("0" * 64, 600, 599, 1, 20, 60, ()))
    advice = r"another tokenizer than data.tokenizer.*Set data.tokenizer to the one .*tokenizer.json in its checkpoints"
    with pytest.raises(DataError, match=advice):
        opened(prefix, split=(1, 0, 0), tokenizer=tokenizer)


def test_data_of_a_larger_vocabulary(write_tokens: Write) -> None:
    prefix = write_tokens(20, 20, vocab_size=40)
    with pytest.raises(DataError, match="document 1 has token id 30 at its position 10"):
        opened(prefix, split=(1, 0, 0), vocab_size=30)
    write_sidecar(prefix, Sidecar("0" * 64, 600, 599, 2, 40, 60, ()))
    with pytest.raises(DataError, match=r"a vocabulary of 600 ids, but model.vocab_size = 512"):
        opened(prefix, split=(1, 0, 0), vocab_size=512)


def test_a_vocabulary_may_be_larger_than_the_files_and_no_smaller(write_tokens: Write) -> None:
    prefix = write_tokens(50)
    write_sidecar(prefix, Sidecar("0" * 64, 101, None, 1, 50, 0, ()))
    assert open_tokens(prefix, vocab_size=101).num_tokens == 50
    with pytest.raises(DataError, match=r"vocabulary of 101 ids, but model.vocab_size = 100\. Set .* to 101"):
        open_tokens(prefix, vocab_size=100)


def test_files_that_earlier_versions_made_with_the_same_tokenizer_are_read(write_tokens: Write) -> None:
    """Its fingerprint left open how unusual added tokens are found."""
    tokenizer, prefix = train_bpe(["some text"], 300), write_tokens(50)
    tokenizer._inner.add_tokens(["<keep>"])
    earlier = tokenizer._fingerprint(unusual=False)
    assert earlier != tokenizer.sha256
    write_sidecar(prefix, Sidecar(earlier, tokenizer.vocab_size, None, 1, 50, 0, ()))
    assert open_tokens(prefix, vocab_size=300, tokenizer=tokenizer).num_tokens == 50


def test_files_of_their_own_are_held_against_the_tokenizer_and_may_be_at_urls(
    write_tokens: Write, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    train, other = write_tokens(50, name="a"), write_tokens(30, name="b")
    write_sidecar(train, Sidecar(tokenizer.sha256, 600, None, 1, 50, 0, ()))
    settings: dict[str, Any] = {"prefix": train, "split": (1, 0, 0), "tokenizer": tokenizer}
    write_sidecar(other, Sidecar("0" * 64, 600, None, 1, 30, 0, ()))
    with pytest.raises(DataError, match=r"b was made with another tokenizer than data\.tokenizer"):
        opened(validation=other, **settings)
    write_sidecar(other, Sidecar(tokenizer.sha256, 600, None, 1, 30, 0, ()))
    found: Any = opened(validation=f"file://{other}", cache=str(tmp_path / "cache"), **settings)
    assert found.validation.num_tokens == 30


def test_conversations_may_be_trained_on_as_text(write_tokens: Write) -> None:
    """All of their tokens are text."""
    prefix = write_tokens(50)
    fields = ExampleFields("chat", ANSWERS, ("given", "answered"))
    write_sidecar(prefix, Sidecar("0" * 64, 600, None, 1, 50, 0, (), examples=fields))
    assert len(TextSamples().dataset(TokenFile(prefix), range(1), 7, vocab_size=600)) == 7


def test_no_id_is_below_zero(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "a", np.dtype("<i4")) as writer:
        writer.add_document([1, 2, 3, 4, -5, 6, 7])
    data = GPTDataset(TokenFile(tmp_path / "a"), range(1), 2, vocab_size=10)
    assert data.sample(0).tolist() == [1, 2, 3]
    with pytest.raises(DataError, match="document 0 has token id -5 at its position 4,"):
        data.sample(1)
    with pytest.raises(DataError, match="document 0 has token id -5 at its position 4,"):
        open_tokens(str(tmp_path / "a"), vocab_size=10)


def test_an_id_that_the_vocabulary_has_not_got_is_told_when_a_file_is_opened(write_tokens: Write) -> None:
    """The first one is as many as there are."""
    prefix = write_tokens(50, vocab_size=41)
    assert open_tokens(prefix, vocab_size=41).num_tokens == 50
    with pytest.raises(DataError, match=r"document 0 has token id 40 at its position 40, .* has 40 ids"):
        open_tokens(prefix, vocab_size=40)


def test_all_epochs_are_one_or_more() -> None:
    for epochs in (0, None):
        with pytest.raises(DataError, match=f"data.epochs is {epochs}. Set data.epochs to 1 or more"):
            order_of(10, order="all_epochs", epochs=epochs, seed=1)


@pytest.mark.parametrize("name", ["validation", "test"])
def test_a_file_is_advised_for_a_part_of_a_split_without_documents(write_tokens: Write, name: str) -> None:
    split = (29, 1, 0) if name == "validation" else (29, 0, 1)
    with pytest.raises(DataError, match=rf"leaves none for {name}: .*, or name a file in data\.{name}\.$"):
        check_documents(TokenFile(write_tokens(50)), name, range(0), split)


def test_megatrons_own_files_open(megatron: Path) -> None:
    datasets = open_datasets(
        samples=TextSamples(),
        train=str(megatron / "meg-gpt2-openwebtext_text_document"),
        split=(29, 1, 0),
        seq_length=1_024,
        vocab_size=5_000,
        seed=1,
        tokenizer=Tokenizer.load(megatron / "gpt2-tiny"),
    )
    assert datasets.validation is not None
    assert (len(datasets.train.documents), len(datasets.validation.documents)) == (967, 33)
    assert datasets.train.sample(10**9).shape == (1_025,)
