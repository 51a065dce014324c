"""BERT samples: what they are made of, that nothing but (seed, sample, epoch) decides, and the shares of everything."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from hashlib import sha256
from itertools import pairwise, product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.config.load import load
from colonnade.data.bert_dataset import BertCut, BertDataset, PairSamples, pair_samples_of
from colonnade.data.curriculum import Curriculum
from colonnade.data.draws import Draws, SamplePurpose
from colonnade.data.indexed import TokenFile
from colonnade.data.masking import Masking, WordPieces, choose, shown_to_model
from colonnade.data.sampler import AllEpochsOrder, EpochOrder
from colonnade.data.sidecar import Sidecar
from colonnade.data.tokenizer import Tokenizer, train_bpe
from colonnade.data.writer import TokenFileWriter
from colonnade.errors import DataError
from colonnade.tasks.bert import BertBatch, as_bert_batch
from tests.tasks.examples import vocabulary

PAD, UNK, CLS, SEP, MASK = range(5)
FIRST, LAST = 5, 2_000  # ordinary ids; each third goes on with the word before it
PIECES = WordPieces(
    PAD, CLS, SEP, MASK, np.arange(FIRST, LAST), np.array([i >= FIRST and i % 3 == 0 for i in range(LAST)])
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    """Documents of one to nine sentences of one to forty tokens; a token's id tells its place in the file."""
    rng, start = np.random.default_rng(0), 0
    prefix = tmp_path_factory.mktemp("bert") / "sentences"
    with TokenFileWriter(prefix, np.dtype("<u2")) as writer:
        for _ in range(250):
            lengths = rng.integers(1, 40, rng.integers(1, 10)).tolist()
            stop = start + sum(lengths)
            writer.add_document(FIRST + np.arange(start, stop) % (LAST - FIRST), lengths=lengths)
            start = stop
    return TokenFile(prefix)


def opened(file: TokenFile, cut: BertCut | None = None, *, seq_length: int = 64, seed: int = 1) -> BertDataset:
    documents = range(file.num_documents)
    data = BertDataset(file, documents, seq_length, pieces=PIECES, seed=seed, cut=cut or BertCut())
    data.order = EpochOrder(len(data), seed)
    return data


def batch_of(data: BertDataset, positions: Sequence[int]) -> BertBatch:
    return as_bert_batch(data.rows(positions), positions)


def texts(batch: BertBatch, column: int) -> tuple[list[int], list[int]]:
    """The two texts of a sample, as they were."""
    labels = batch.labels[batch.real[:, column], column].tolist()
    assert (labels[0], labels[-1], labels.count(SEP)) == (CLS, SEP, 2)
    middle = labels.index(SEP)
    return labels[1:middle], labels[middle + 1 : -1]


def is_run(tokens: list[int]) -> bool:
    """Whether tokens stand one after the other in the file."""
    return all((b - a) % (LAST - FIRST) == 1 for a, b in pairwise(tokens))


def test_a_sample_is_two_texts_between_control_tokens(file: TokenFile) -> None:
    data = opened(file)
    batch = batch_of(data, range(200))
    assert batch.tokens.shape == (64, 200) and batch.loss_mask.dtype == batch.loss_mask.float().dtype
    for column in range(200):
        first, second = texts(batch, column)
        assert first and is_run(first) and is_run(second)
        assert batch.types[batch.real[:, column], column].tolist() == [0] * (len(first) + 2) + [1] * (len(second) + 1)
        assert not batch.loss_mask[~batch.real[:, column], column].any()
        assert set(batch.tokens[~batch.real[:, column], column].tolist()) <= {PAD}


@pytest.mark.parametrize("pairs", ["order", "next"])
def test_a_part_of_a_file_gives_the_samples_of_a_file_of_that_part_alone(tmp_path: Path, pairs: str) -> None:
    """As a part for validation does, which begins in the midst of the file."""
    rng, documents = np.random.default_rng(4), []
    for _ in range(60):
        lengths = rng.integers(1, 40, rng.integers(1, 10)).tolist()
        documents.append((rng.integers(FIRST, LAST, sum(lengths)), lengths))
    for name, chosen in (("whole", documents), ("part", documents[25:])):
        with TokenFileWriter(tmp_path / name, np.dtype("<u2")) as writer:
            for tokens, lengths in chosen:
                writer.add_document(tokens, lengths=lengths)
    cut = BertCut(pairs="next" if pairs == "next" else "order")
    within, alone = (
        BertDataset(TokenFile(tmp_path / name), range(first, stop), 64, pieces=PIECES, seed=1, cut=cut)
        for name, first, stop in (("whole", 25, 60), ("part", 0, 35))
    )
    assert len(within) == len(alone) > 40
    for data in (within, alone):
        data.order = EpochOrder(len(data), 1)
    positions = range(len(alone))
    ours, theirs = batch_of(within, positions), batch_of(alone, positions)
    for name in ("tokens", "labels", "types", "loss_mask", "pair_labels"):
        assert getattr(ours, name).equal(getattr(theirs, name)), name


def test_half_of_the_pairs_are_exchanged(file: TokenFile) -> None:
    batch = batch_of(opened(file), range(250))
    for column in range(250):
        first, second = texts(batch, column)
        if batch.pair_labels[column] and second:
            first, second = second, first
        gap = (second[0] - first[-1]) % (LAST - FIRST) if second else 1
        assert 1 <= gap < 64, "the second goes on where the first ends, but for what was trimmed"
    assert 95 < int(batch.pair_labels.sum()) < 155


def test_the_next_sentence_is_half_of_the_time_from_elsewhere(file: TokenFile) -> None:
    batch = batch_of(opened(file, BertCut(pairs="next")), range(250))
    near: Counter[tuple[int, bool]] = Counter()
    for column in range(250):
        first, second = texts(batch, column)
        if second:
            near[int(batch.pair_labels[column]), (second[0] - first[-1]) % (LAST - FIRST) < 64] += 1
    assert near[0, False] == 0
    assert near[1, True] < 0.15 * near[1, False]
    assert 95 < int(batch.pair_labels.sum()) < 155


def test_some_samples_are_short(file: TokenFile) -> None:
    lengths = batch_of(opened(file, BertCut(short=0.0)), range(150)).real.sum(0)
    with_short = batch_of(opened(file, BertCut(short=0.5)), range(150)).real.sum(0)
    assert float((lengths < 24).float().mean()) + 0.05 < float((with_short < 24).float().mean())
    assert bool((batch_of(opened(file, BertCut(short=1.0)), range(60)).real.sum(0) >= 5 - 1).all())


def test_only_seed_sample_and_epoch_decide(file: TokenFile) -> None:
    data, again = opened(file), opened(file)
    positions = [3, 700, 12, 5_000]
    together = batch_of(data, positions)
    for column, position in enumerate(positions):
        alone = batch_of(again, [position])
        for name in ("tokens", "types", "real", "labels", "loss_mask"):
            assert getattr(alone, name)[:, 0].tolist() == getattr(together, name)[:, column].tolist()
    other = batch_of(opened(file, seed=2), positions)
    assert other.tokens.tolist() != together.tokens.tolist()


@pytest.mark.slow
def test_epochs_differ_and_use_most_of_the_text(file: TokenFile) -> None:
    data = opened(file)
    n = len(data)
    epochs = [batch_of(data, range(e * n, e * n + n // 2)) for e in range(2)]
    assert epochs[0].labels.tolist() != epochs[1].labels.tolist()
    used = sum(int((batch.labels[batch.real] >= FIRST).sum()) for batch in epochs)
    assert used > 0.5 * file.num_tokens


def test_the_same_text_is_cut_and_masked_anew_in_each_epoch(tmp_path: Path) -> None:
    """A file of one sample: all that an epoch can change are its cut, its exchange and its masks."""
    with TokenFileWriter(tmp_path / "one", np.dtype("<u2")) as writer:
        writer.add_document(FIRST + np.arange(61), lengths=[61])
    data = opened(TokenFile(tmp_path / "one"), BertCut(short=0.0))
    batch = batch_of(data, range(20))
    assert len(data) == 1
    pairs = [texts(batch, column) for column in range(20)]
    assert all(sorted(first + second) == [*range(FIRST, FIRST + 61)] for first, second in pairs)
    assert len({tuple(batch.loss_mask[:, column].tolist()) for column in range(20)}) == 20
    assert len({len(first) for first, _ in pairs}) > 10
    assert set(batch.pair_labels.tolist()) == {0, 1}


def test_phases_build_pairs_at_their_own_length(file: TokenFile) -> None:
    data = PairSamples(PIECES, 1, BertCut(short=0.0)).training(
        lambda length: opened(file, seq_length=length), Curriculum([0, 64], [16, 32], [2, 2])
    )
    assert data.rows([0]).tokens.shape == (1, 16) and data.rows([4]).tokens.shape == (1, 32)


def test_passes_are_those_of_the_order(file: TokenFile) -> None:
    """Epochs that are shuffled as one are one pass, as a language model's are."""
    data = opened(file)
    n = len(data)
    assert data.passes([0, n - 1, n, 3 * n - 1]).epochs.tolist() == [0, 0, 1, 2]
    data.order = AllEpochsOrder(n, 3, 1)
    assert data.passes([0, n - 1, n, 3 * n - 1]).epochs.tolist() == [0] * 4


def test_too_little_text(file: TokenFile) -> None:
    with pytest.raises(DataError, match=r"a sample of 61,000 takes 60,997 beside its control tokens\. .* curriculum"):
        opened(file, seq_length=61_000 + 0)
    with pytest.raises(DataError, match=r"\(5 or more\)"):
        opened(file, seq_length=4)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=6), st.integers(0, 99))
def test_any_documents_make_samples(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], seed: int
) -> None:
    prefix = tmp_path_factory.mktemp("any") / "file"
    with TokenFileWriter(prefix, np.dtype("<u2")) as writer:
        for lengths in documents:
            writer.add_document(np.arange(FIRST, FIRST + sum(lengths)), lengths=lengths)
    file = TokenFile(prefix)
    if file.num_tokens < 9:
        return
    batch = batch_of(opened(file, seq_length=12, seed=seed), range(30))
    for column in range(30):
        first, second = texts(batch, column)
        assert first or second
        assert bool(batch.loss_mask[:, column].any())


def test_another_epoch_begins_its_samples_elsewhere(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "file", np.dtype("<u2")) as writer:
        writer.add_document(np.arange(FIRST, FIRST + 900), lengths=[1] * 900)
    data = opened(TokenFile(tmp_path / "file"), seq_length=23)
    begins = []
    for epoch in range(4):
        first, second, _ = data._pair(3, epoch, Draws(1, SamplePurpose.BERT, epoch, 3))
        begins.append(min([*first, *second]) - FIRST)
    assert len(set(begins)) > 1 and all(60 <= begin < 80 for begin in begins), begins


def test_a_document_begins_with_its_first_sentence(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "file", np.dtype("<u2")) as writer:
        for begin in range(FIRST, FIRST + 900, 30):
            writer.add_document(np.arange(begin, begin + 30), lengths=[1] * 30)
    data = opened(TokenFile(tmp_path / "file"), seq_length=23)
    for sample in range(len(data)):
        first, second, _ = data._pair(sample, 0, Draws(1, SamplePurpose.BERT, 0, sample))
        assert len({(token - FIRST) // 30 for token in [*first, *second]}) == 1, (first, second)


def test_any_length_and_any_cut_of_a_short_sample_comes(tmp_path: Path) -> None:
    """Of sentences of a token, which need no trimming: two texts that follow each other, of 2 tokens to all."""
    with TokenFileWriter(tmp_path / "file", np.dtype("<u2")) as writer:
        writer.add_document(np.arange(FIRST, FIRST + 900), lengths=[1] * 900)
    data, found = opened(TokenFile(tmp_path / "file"), BertCut(short=1.0), seq_length=9), set()
    for sample in range(450):
        first, second, label = data._pair(sample % len(data), 0, draws(sample))
        before, behind = (second, first) if label else (first, second)
        assert is_run([*before.tolist(), *behind.tolist()])
        found.add((len(before), len(behind)))
    assert found == {(first, length - first) for length in range(2, 7) for first in range(1, length)}


def test_texts_that_are_too_long_lose_tokens_at_both_ends_until_they_are_alike(tmp_path: Path) -> None:
    """Documents of two sentences of 20 tokens, of which each keeps 15 of 30."""
    with TokenFileWriter(tmp_path / "file", np.dtype("<u2")) as writer:
        for begin in range(FIRST, FIRST + 1_800, 40):
            writer.add_document(np.arange(begin, begin + 40), lengths=[20, 20])
    data, places = opened(TokenFile(tmp_path / "file"), BertCut(short=0.0), seq_length=33), list[tuple[int, int]]()
    for sample in range(len(data)):
        first, second, label = data._pair(sample, 0, draws(sample))
        before, behind = (second, first) if label else (first, second)
        if (before[-1] - FIRST) // 20 < (behind[0] - FIRST) // 20:  # two sentences, and not one that was cut
            assert len(before) == len(behind) == 15 and is_run(before.tolist()) and is_run(behind.tolist())
            places.append(((before[0] - FIRST) % 20, (behind[0] - FIRST) % 20))
    assert len(places) > 10
    for begins in zip(*places, strict=True):
        assert max(begins) <= 5 and 1.5 < np.mean(begins) < 3.5


class Labelled(Draws):
    """A sample's numbers, with a label that is chosen."""

    def __init__(self, label: int, sample: int) -> None:
        super().__init__(7, SamplePurpose.BERT, 0, sample)
        self._label = label

    def chance(self, probability: float) -> bool:
        return probability == 0.5 and bool(self._label)


@pytest.mark.parametrize("room", [12, 13])
def test_lengths_of_exchanged_texts_tell_nothing(file: TokenFile, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all pairs of sentences of 1 to 20 tokens: as many of any two lengths have either label."""
    data, found = opened(file, BertCut(short=0.0), seq_length=room + 3), (Counter(), Counter())
    for number, (one, other) in enumerate(product(range(1, 21), repeat=2)):
        sentences = [np.arange(one), 100 + np.arange(other)]
        monkeypatch.setattr(data, "_sentences", lambda *_, sentences=sentences: sentences)
        for label in (0, 1):
            first, second, told = data._pair(0, 0, Labelled(label, number))
            assert told == label and [first[0] >= 100, second[0] >= 100] == [label == 1, label == 0]
            found[label][len(first), len(second)] += 1
    assert found[0] == found[1]


def test_exchanged_texts_are_as_long_as_others_where_sentences_can_be(tmp_path: Path) -> None:
    """Of sentences of one token the first text has as many, whichever it is."""
    data = opened(placed(tmp_path, [[1] * 900]), BertCut(short=0.0), seq_length=23)
    for sample in range(len(data)):
        pairs = [data._pair(sample, 0, Labelled(label, sample)) for label in (0, 1)]
        (one, behind, _), (other, before, _) = pairs
        assert (len(one), len(behind)) == (len(other), len(before)) and len(one) + len(behind) == 20


def placed(folder: Path, documents: list[list[int]]) -> TokenFile:
    """Documents of sentences of these lengths; a token tells its place in its sentence."""
    with TokenFileWriter(folder / "placed", np.dtype("<u2")) as writer:
        for lengths in documents:
            writer.add_document(np.concatenate([FIRST + np.arange(length) for length in lengths]), lengths=lengths)
    return TokenFile(folder / "placed")


@pytest.mark.parametrize("seq_length", [30, 31])
@pytest.mark.parametrize("documents", [[[10] * 300], [[95]] * 40], ids=["sentences", "a sentence a document"])
def test_a_text_from_elsewhere_is_as_long_as_the_one_that_it_replaces(
    documents: list[list[int]], seq_length: int, tmp_path: Path
) -> None:
    """Where sentences can be as long."""
    data = opened(placed(tmp_path, documents), BertCut("next", short=0.0), seq_length=seq_length)
    for sample in range(len(data)):
        lengths = []
        for label in (0, 1):
            first, second, told = data._pair(sample, 0, Labelled(label, sample))
            assert told == label
            lengths.append((len(first), len(second)))
        assert lengths[0] == lengths[1]


@pytest.mark.parametrize(("within", "lengths"), [(False, [3, 15, 9, 16]), (True, [3, 2, 7, 5])])
def test_a_text_from_elsewhere_is_the_nearest_of_those_that_are_tried(
    file: TokenFile, within: bool, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none is as long. What begins within a sentence lacks its first token at least."""
    data, tried = opened(file, BertCut("next", short=0.0), seq_length=32), list[int]()

    def sentences(*_: object) -> list[Any]:
        tried.append(lengths[len(tried)])
        return [np.arange(tried[-1])]

    monkeypatch.setattr(data, "_sentences", sentences)
    found = data._elsewhere(0, 8, 0, 20, Labelled(1, 0), within=within)
    assert tried == lengths and found.tolist() == (list(range(1, 7)) if within else list(range(9)))


def test_a_text_from_elsewhere_is_not_empty_where_other_samples_are_of_one_token(tmp_path: Path) -> None:
    """As of documents of a word. Where the first sample begins within its sentence, no other has a longer one."""
    data = opened(placed(tmp_path, [[26], *[[1]] * 13]), BertCut("next", short=0.0), seq_length=16)
    lengths = set[int]()
    for epoch in range(40):
        first, second, told = data._pair(0, epoch, Labelled(1, epoch))
        assert told == 1 and len(first) and len(second), epoch
        lengths.add(len(second))
    assert 1 in lengths


def test_a_text_from_elsewhere_has_tokens_where_all_sentences_there_are_far_too_long(tmp_path: Path) -> None:
    data = opened(placed(tmp_path, [[10, 10], [100]] * 100), BertCut("next", short=0.0), seq_length=123)
    for sample in range(len(data)):
        first, second, _ = data._pair(sample, 0, Labelled(1, sample))
        assert len(first) and len(second)


def test_neither_cuts_nor_lengths_tell_a_text_from_elsewhere(tmp_path: Path) -> None:
    """Shares of 1,500 samples of each label are 0.17 apart with a chance of 10⁻⁹ at most (Hoeffding)."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 40, rng.integers(1, 30)).tolist() for _ in range(150)]
    data = opened(placed(tmp_path, documents), BertCut("next"), seq_length=64)
    signs: dict[int, list[tuple[bool, ...]]] = {0: [], 1: []}
    for sample in range(1_500):
        for label in (0, 1):
            first, second, _ = data._pair(sample % len(data), sample // len(data), Labelled(label, sample))
            full = len(first) + len(second) == 61
            cut = bool(first[0] > FIRST), len(second) > 0 and bool(second[0] > FIRST)
            signs[label].append((*cut, full, len(first) < len(second), abs(len(first) - len(second)) == 1))
    shares = [np.mean(signs[label], axis=0) for label in (0, 1)]
    assert np.abs(shares[0] - shares[1]).max() < 0.17, shares


def test_a_text_from_elsewhere_is_another_samples(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "file", np.dtype("<u2")) as writer:
        writer.add_document(np.arange(FIRST, FIRST + 1_980), lengths=[10] * 198)
    data = opened(TokenFile(tmp_path / "file"), BertCut("next", short=0.0), seq_length=30)
    far = list[bool]()
    for sample in range(200):
        first, second, _ = data._pair(sample % len(data), 0, Labelled(1, sample))
        assert is_run(first.tolist()) and is_run(second.tolist()) and not {*first.tolist()} & {*second.tolist()}
        far.append(abs(int(second[0]) - int(first[0])) > 60)
    assert np.mean(far) > 0.85


@pytest.mark.parametrize(("pairs", "digest"), [("order", "090f76da1428a280"), ("next", "ea3c4af375746f80")])
def test_a_run_that_an_earlier_version_began_has_the_same_samples(
    file: TokenFile, pairs: Literal["order", "next"], digest: str
) -> None:
    rows = opened(file, BertCut(pairs, revision=1)).rows(range(200))
    found = sha256(rows.labels.tobytes() + rows.pair_labels.tobytes() + rows.tokens.tobytes())
    assert found.hexdigest()[:16] == digest


def test_both_texts_have_a_token_where_one_sentence_is_longer_than_the_room(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "file", np.dtype("<u2")) as writer:
        for begin in range(FIRST, FIRST + 1_500, 150):
            writer.add_document(np.arange(begin, begin + 150))
    data = opened(TokenFile(tmp_path / "file"), BertCut("next"), seq_length=16)
    for sample in range(len(data)):
        first, second, _ = data._pair(sample, 0, draws(sample))
        assert len(first) and len(second) and len(first) + len(second) <= 13


def test_a_document_is_chosen_the_more_often_the_more_tokens_it_has(tmp_path: Path) -> None:
    """Of those that a sample's range touches: here 5 tokens and 15 by turns."""
    with TokenFileWriter(tmp_path / "file", np.dtype("<u2")) as writer:
        for begin in range(FIRST, FIRST + 1_980, 20):
            writer.add_document(np.arange(begin, begin + 5), lengths=[1] * 5)
            writer.add_document(np.arange(begin + 5, begin + 20), lengths=[1] * 15)
    data, shares = opened(TokenFile(tmp_path / "file"), BertCut(short=0.0), seq_length=23), list[float]()
    for epoch in range(4):
        pairs = [data._pair(sample, epoch, draws(100 * epoch + sample)) for sample in range(len(data))]
        shares.append(np.mean([(min([*first, *second]) - FIRST) % 20 >= 5 for first, second, _ in pairs]))
    assert len(data) == 99 and all(0.6 < share < 0.9 for share in shares), shares


# Masking


def draws(sample: int) -> Draws:
    return Draws(7, SamplePurpose.BERT, 0, sample)


def test_fifteen_percent_in_whole_words() -> None:
    rng = np.random.default_rng(3)
    total = chosen_total = 0
    for sample in range(100):
        tokens = np.concatenate([[CLS], rng.integers(FIRST, LAST, 300), [SEP]])
        chosen = choose(tokens, PIECES, Masking(), draws(sample))
        assert not chosen[0] and not chosen[-1]
        goes_on = PIECES.continues[tokens]
        goes_on[1] = False
        assert not (chosen[1:] & ~chosen[:-1] & goes_on[1:]).any(), "a word is chosen from its beginning"
        assert not (~chosen[1:] & chosen[:-1] & goes_on[1:]).any(), "… to its end"
        total, chosen_total = total + 300, chosen_total + int(chosen.sum())
        assert int(chosen.sum()) <= 45
    assert 0.145 < chosen_total / total <= 0.15


@pytest.mark.parametrize(("words", "chosen"), [(2, 1), (9, 1), (11, 2), (17, 3), (23, 3), (24, 4)])
def test_the_share_of_a_short_text_is_the_nearest_number_of_tokens(words: int, chosen: int) -> None:
    """One at least: 0.15 of 17 is 2.55, of 23 is 3.45."""
    tokens = np.array([CLS, *[FIRST + 2] * words, SEP])  # words of one token, which fit any budget
    assert {int(choose(tokens, PIECES, Masking(), draws(sample)).sum()) for sample in range(5)} == {chosen}


def test_runs_of_words_are_as_one_to_a_half_to_a_third() -> None:
    counts = Counter(Masking().lengths(np.linspace(0.0005, 0.9995, 1_100)).tolist())
    assert counts == {1: 600, 2: 300, 3: 200}
    rare = np.full(2_000, FIRST + 2)
    chosen = choose(rare, PIECES, Masking(share=0.02), draws(1))
    edges = np.flatnonzero(np.diff(np.concatenate([[0], chosen.astype(int), [0]])))
    assert set((edges[1::2] - edges[::2]).tolist()) >= {1, 2, 3}


def test_runs_of_words_end_where_a_text_does() -> None:
    tokens = np.array([CLS, *[FIRST, SEP] * 60])
    chosen = choose(tokens, PIECES, Masking(share=0.5), draws(1))
    assert chosen.sum() == 30 and set(tokens[chosen].tolist()) == {FIRST}


def test_words_that_are_chosen_already_cost_nothing_again() -> None:
    tokens = np.full(1_000, FIRST + 2)  # words of one token, which fit any budget
    for sample in range(5):
        assert choose(tokens, PIECES, Masking(share=0.8), draws(sample)).sum() == 800


def test_eighty_ten_ten() -> None:
    tokens = np.full(20_000, FIRST)
    chosen = np.arange(20_000) % 2 == 0
    shown = shown_to_model(tokens, chosen, PIECES, draws(2))
    assert (shown[~chosen] == FIRST).all()
    shares = {"mask": (shown[chosen] == MASK).mean(), "same": (shown[chosen] == FIRST).mean()}
    assert abs(shares["mask"] - 0.8) < 0.015 and abs(shares["same"] - 0.1) < 0.012
    others = shown[chosen][(shown[chosen] != MASK) & (shown[chosen] != FIRST)]
    assert others.min() >= FIRST and len(np.unique(others)) > 500


def test_a_word_longer_than_the_budget_is_guessed_where_there_is_no_other() -> None:
    tokens = np.array([CLS, 7, 6, 9, 12, SEP])  # one word of four pieces
    assert choose(tokens, PIECES, Masking(), draws(0)).tolist() == [False, True, True, True, True, False]
    none = choose(np.array([CLS, SEP, SEP]), PIECES, Masking(), draws(0))
    assert none.dtype == bool and not none.any()


def test_of_words_that_are_all_too_long_any_may_be_guessed() -> None:
    tokens = np.array([CLS, 7, 6, 9, 7, 6, 9, 7, 6, 9, SEP])  # three words of three pieces, and 0.15 of them are one
    chosen = [np.flatnonzero(choose(tokens, PIECES, Masking(), draws(number))).tolist() for number in range(30)]
    assert {tuple(each) for each in chosen} == {(1, 2, 3), (4, 5, 6), (7, 8, 9)}


def test_no_more_words_are_taken_in_a_row_than_are_asked_for() -> None:
    """Of single words two of 300 stand side by side by chance alone."""
    tokens = np.full(300, FIRST + 2)
    masking = Masking(share=2 / 300, longest=1)
    places = [np.flatnonzero(choose(tokens, PIECES, masking, draws(number))) for number in range(40)]
    assert {len(each) for each in places} == {2} and sum(int(np.diff(each)[0]) == 1 for each in places) < 4


def test_a_word_that_is_unknown_may_be_guessed() -> None:
    assert choose(np.array([CLS, UNK, SEP]), PIECES, Masking(), draws(0)).tolist() == [False, True, False]


def test_a_text_that_begins_within_a_word_is_guessed_and_control_tokens_are_not() -> None:
    chosen = [choose(np.array([CLS, 6, MASK, SEP, PAD]), PIECES, Masking(), draws(number)) for number in range(40)]
    assert np.unique(chosen, axis=0).tolist() == [[False, True, False, False, False]], "6 goes on with a word"


def test_only_two_number_signs_go_on_with_a_word(tmp_path: Path) -> None:
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "#", "#a", "##a", "##"]
    (tmp_path / "vocab.txt").write_text("\n".join(names))
    found = WordPieces.of(Tokenizer.load(tmp_path / "vocab.txt"))
    assert [names[token] for token in np.flatnonzero(found.continues)] == ["##a", "##"]


@pytest.mark.parametrize("sentences", [True, False, None])
def test_whether_a_file_keeps_sentences_apart_is_told_by_what_it_says_or_by_its_lengths(
    tmp_path: Path, sentences: bool | None
) -> None:
    """Documents of a single sequence, longer than a sample and shorter."""
    for length, alone in ((100, False), (20, True)):
        with TokenFileWriter(tmp_path / "x", np.dtype("<u2")) as writer:
            for _ in range(3):
                writer.add_document([7] * length)
            writer.close(Sidecar("0" * 64, LAST, None, 3, 3 * length, 0, (), sentences=sentences))
        file, samples = TokenFile(tmp_path / "x"), PairSamples(PIECES, 1, BertCut())
        sound = alone if sentences is None else sentences
        with nullcontext() if sound else pytest.raises(DataError, match="single sequence in each of its 3 documents"):
            assert len(samples.dataset(file, range(3), 32, vocab_size=LAST)) > 0


def test_samples_are_made_as_the_configuration_says(tmp_path: Path) -> None:
    made = vocabulary(tmp_path)
    (tmp_path / "config.toml").write_text(
        '[model]\nkind = "bert"\nnum_layers = 2\nhidden_size = 32\nnum_heads = 4\nseq_length = 32\n'
        f'vocab_size = {made.vocab_size}\n[data]\ntrain = "{tmp_path}/text"\n[data.masking]\npairs = "next"\n'
        "short = 0.3\nshare = 0.25\nlongest = 2\n[train]\nsteps = 4\nglobal_batch_size = 4\nmicro_batch_size = 2\n"
        f'seed = 7\n[optim]\nlearning_rate = 1e-2\n[run]\nfolder = "{tmp_path}/run"\n'
    )
    found = pair_samples_of(load(tmp_path / "config.toml"), made)
    assert (found.seed, found.cut) == (7, BertCut("next", 0.3, Masking(0.25, 2), revision=1))
    now = pair_samples_of(load(tmp_path / "config.toml", ["data.revision=2"]), made)
    assert now.cut == BertCut("next", 0.3, Masking(0.25, 2))


def test_the_vocabulary_tells_what_masking_needs(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nwalk\n##ing\n")
    pieces = WordPieces.of(Tokenizer.load(tmp_path))
    assert (pieces.pad, pieces.classify, pieces.separate, pieces.mask) == (0, 2, 3, 4)
    assert pieces.ordinary.tolist() == [5, 6] and pieces.continues.tolist() == [False] * 6 + [True]
    content = json.loads(Tokenizer.load(tmp_path).to_json())
    content["model"]["vocab"]["##ing"] = 8
    with_gap = WordPieces.of(Tokenizer.from_json(json.dumps(content)))
    assert with_gap.ordinary.tolist() == [5, 8], "an id that is no token stands for none"
    with pytest.raises(DataError, match=r"has no \[PAD\], .*\[MASK\]: masked samples"):
        WordPieces.of(train_bpe(["some text"], 260))
