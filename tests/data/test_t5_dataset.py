"""T5 samples: nothing is lost, spans are where they should be, and only (seed, sample, epoch) decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config.corruption import Lengths
from colonnade.config.load import load
from colonnade.data.curriculum import Curriculum
from colonnade.data.datasets import NoSampleError, open_datasets
from colonnade.data.draws import Draws, SamplePurpose
from colonnade.data.gpt_dataset import TextSamples
from colonnade.data.indexed import TokenFile
from colonnade.data.sampler import AllEpochsOrder, EpochOrder
from colonnade.data.t5_dataset import Corruption, SpanSamples, T5Dataset, span_samples_of, spans, text_with_gaps
from colonnade.data.tokenizer import Tokenizer, train_bpe
from colonnade.data.train_tokenizer import train_tokenizer
from colonnade.errors import DataError

Write = Callable[..., str]
END, START = 1, 0
CORRUPTION = Corruption(sentinels=tuple(range(50_099, 49_999, -1)), end=END, start=START)


def dataset(prefix: str, length: int, seed: int = 1, decoder_length: int = 40) -> T5Dataset:
    """Whose encoder sequences have `length` tokens."""
    found = open_datasets(
        samples=SpanSamples(CORRUPTION, decoder_length, seed),
        train=prefix,
        split=(1, 0, 0),
        seq_length=length,
        vocab_size=60_000,
        seed=seed,
    ).train
    assert isinstance(found, T5Dataset)
    return found


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


@pytest.mark.parametrize("decoder_length", [40, 10])
def test_texts_can_be_put_together_again(write_tokens: Write, decoder_length: int) -> None:
    """Where the decoder has little room, texts are shorter, and the encoder's sequence is padded."""
    length = Lengths().text(64, decoder_length)
    prefix = write_tokens(length * 40 + 1)
    data = dataset(prefix, 64, decoder_length=decoder_length)
    assert data.text_length == length and data.num_tokens == length * 40 + 1 and len(data) == 40
    texts = open_datasets(
        samples=TextSamples(), train=prefix, split=(1, 0, 0), seq_length=length, vocab_size=60_000, seed=1
    ).train
    rows = data.rows(range(30))
    assert rows.tokens.shape == (30, 64) and rows.labels.shape == rows.decoder_tokens.shape == (30, decoder_length)
    read, written = Lengths().widths(length)
    assert rows.num_tokens.tolist() == [read] * 30 and rows.num_labels.tolist() == [written] * 30
    assert read <= 64 and written <= decoder_length and (read == 64 or written == decoder_length)
    for row in range(30):
        encoder, labels = rows.tokens[row, :read].tolist(), rows.labels[row, :written].tolist()
        assert encoder[-1] == labels[-1] == END
        assert rebuilt(encoder, labels) == texts.rows([row]).tokens[0].tolist()
        assert rows.decoder_tokens[row].tolist() == [START, *rows.labels[row, :-1].tolist()]
        assert set(rows.tokens[row, read:].tolist()) | set(rows.labels[row, written:].tolist()) <= {START}


@given(st.integers(2, 2_000))
def test_lengths_add_up(text: int) -> None:
    cut, count = Lengths().cut(text)
    kept, removed = spans(text, Lengths(), Draws(1, SamplePurpose.T5, 0, text))
    assert (len(kept), len(removed), int(removed.sum()), int(kept.sum())) == (count, count, cut, text - cut)
    assert int(kept.min()) >= 1 and int(removed.min()) >= 1
    assert abs(cut - 0.15 * text) <= 1


def test_something_stays_however_much_is_cut() -> None:
    assert [Lengths(share=0.9).cut(text)[0] for text in (2, 3, 4)] == [1, 2, 3]
    assert Lengths(0.8, 1.0).cut(10) == (8, 2), "a token stands before each span"
    kept, removed = spans(10, Lengths(0.8, 1.0), Draws(1, SamplePurpose.T5, 0, 1))
    assert kept.tolist() == [1, 1] and removed.sum() == 8


def test_every_way_to_cut_is_alike_likely() -> None:
    seen = Counter(tuple(spans(12, Lengths(0.5, 2), Draws(1, SamplePurpose.T5, 0, i))[1].tolist()) for i in range(800))
    assert len(seen) == 10  # ways to write six as three positive integers
    assert max(seen.values()) - min(seen.values()) < 70


def test_only_seed_sample_and_epoch_decide(write_tokens: Write) -> None:
    prefix = write_tokens(3_001)
    data, again = dataset(prefix, 91), dataset(prefix, 91)
    together = data.rows([5, 21, 24])
    for row, position in enumerate([5, 21, 24]):
        assert again.rows([position]).tokens[0].tolist() == together.tokens[row].tolist()
    assert dataset(prefix, 91, seed=2).rows([5]).tokens[0].tolist() != together.tokens[0].tolist()


def test_a_sample_is_cut_alike_wherever_it_stands_and_otherwise_in_each_epoch(write_tokens: Write) -> None:
    """Its number decides, and how often it has come: not its place in the run, which a blend or a phase moves."""
    data = dataset(write_tokens(3_001), 91)
    plain = {int(sample): data.rows([place]) for place, sample in enumerate(data.order.samples(np.arange(len(data))))}
    data.order = AllEpochsOrder(len(data), 2, seed=9)
    places = np.arange(2 * len(data))
    for place, sample, epoch in zip(places, data.order.samples(places), data.order.epochs(places), strict=True):
        same = np.array_equal(data.rows([int(place)]).tokens, plain[int(sample)].tokens)
        assert same == (epoch == 0)


def test_spans_are_those_of_the_samples_own_numbers(write_tokens: Write) -> None:
    """Which never change, or a run that goes on would see other samples than it began with."""
    data = dataset(write_tokens(3_001), 91, seed=5)
    data.order = AllEpochsOrder(len(data), 3, seed=9)
    places = np.arange(2 * len(data))
    rows = data.rows(places)
    for row, sample, epoch in zip(
        range(len(places)), data.order.samples(places), data.order.epochs(places), strict=True
    ):
        kept, _ = spans(data.text_length, Lengths(), Draws(5, SamplePurpose.T5, int(epoch), int(sample)))
        marks = np.flatnonzero(np.isin(rows.tokens[row], CORRUPTION.sentinels))
        assert np.diff([-1, *marks.tolist()]).tolist() == (kept + 1).tolist()


def test_the_vocabularys_own_ids_stand_before_what_is_written_and_behind_what_is_shorter(write_tokens: Write) -> None:
    corruption = Corruption(sentinels=tuple(range(50_000, 50_100)), end=40_001, start=40_007)
    file, given = TokenFile(write_tokens(3_001)), {"vocab_size": 60_000, "corruption": corruption, "seed": 1}
    for decoder_length in (10, 40):  # the encoder's sequence is padded, the decoder's is
        data = T5Dataset(file, range(1), 64, decoder_length=decoder_length, **given)  # type: ignore[arg-type]
        row = data.rows([0])
        read, written = int(row.num_tokens[0]), int(row.num_labels[0])
        assert read < 64 or written < decoder_length
        assert row.tokens[0, read - 1 :].tolist() == [40_001] + [40_007] * (64 - read)
        assert row.labels[0, written - 1 :].tolist() == [40_001] + [40_007] * (decoder_length - written)
        assert row.decoder_tokens[0, 0] == 40_007


def test_the_pass_of_a_sample_is_that_of_its_order(write_tokens: Write) -> None:
    """Epochs that are shuffled as one are one pass, as a language model's are."""
    file, length = TokenFile(write_tokens(3_001)), Lengths().text(91, 40)
    given: Any = {"decoder_length": 40, "vocab_size": 60_000, "corruption": CORRUPTION, "seed": 1}
    number = 3_000 // length
    for order, epochs in ((EpochOrder(number, 7), [0, 0, 1, 2]), (AllEpochsOrder(number, 3, 7), [0] * 4)):
        data = T5Dataset(file, range(1), 91, order=order, **given)
        assert data.passes([0, number - 1, number, 3 * number - 1]).epochs.tolist() == epochs
        text = int(order.samples(np.arange(1))[0]) * length
        assert data.rows([0]).tokens[0, 0] == text, "a text begins with what stays"


def test_a_token_that_the_vocabulary_does_not_have_is_told_when_it_is_read(write_tokens: Write) -> None:
    given: Any = {"decoder_length": 40, "vocab_size": 500, "corruption": CORRUPTION, "seed": 1}
    data = T5Dataset(TokenFile(write_tokens(1_001)), range(1), 91, **given)
    assert len(data.rows([0]).tokens) == 1
    with pytest.raises(DataError, match="document 0 has token id 500 at its position 500"):
        data.rows(range(len(data)))


def test_too_few_sentinels(write_tokens: Write) -> None:
    with pytest.raises(DataError, match=r"texts of 2,10\d tokens have 105 spans cut out, but the vocabulary has 100"):
        dataset(write_tokens(3_001), 1_896, decoder_length=600)


def test_as_many_sentinels_as_there_are_spans_are_enough(write_tokens: Write) -> None:
    """To 105 spans."""
    prefix, length = write_tokens(3_001), Lengths().text(1_896, 600)
    for number, enough in ((105, True), (104, False)):
        corruption = Corruption(tuple(range(50_000, 50_000 + number)), END, START)
        given: Any = {"decoder_length": 600, "vocab_size": 60_000, "corruption": corruption, "seed": 1}
        with nullcontext() if enough else pytest.raises(DataError, match=f"the vocabulary has {number} sentinels"):
            assert T5Dataset(TokenFile(prefix), range(1), 1_896, **given).text_length == length


def test_sequences_too_short(write_tokens: Write) -> None:
    with pytest.raises(DataError, match=r"hold no text: each takes a token, a sentinel and an end. .* of 3 or more"):
        dataset(write_tokens(100), 2)
    assert dataset(write_tokens(100), 3, decoder_length=3).text_length == 2


def test_too_little_text_is_told_by_its_own_length(write_tokens: Write) -> None:
    """Which is not model.seq_length: spans are cut out of it."""
    with pytest.raises(NoSampleError, match=r"no text of 40 tokens, which a T5 sample of 36 to read and 9 to write"):
        dataset(write_tokens(20), 36, decoder_length=9)


def test_phases_have_their_own_length_and_the_decoders_stays(write_tokens: Write) -> None:
    prefix = write_tokens(3_001)
    phases = Curriculum([0, 64], [16, 32], [2, 2])
    rows = SpanSamples(CORRUPTION, 40, 1).training(lambda length: dataset(prefix, length), phases).rows([0])
    assert rows.tokens.shape == (1, 16) and rows.labels.shape == (1, 40)


# --- which ids mark spans ---------------------------------------------------------------------------------------------


def with_tokens(folder: Path, *names: str) -> Tokenizer:
    tokenizer = train_bpe(["some text " * 20], 270)
    tokenizer._inner.add_special_tokens(list(names))
    tokenizer.save(folder / "tokenizer.json")
    return Tokenizer.load(folder / "tokenizer.json")


def test_a_trained_vocabulary_has_the_sentinels_that_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text " * 200)
    made = train_tokenizer([tmp_path / "text.txt"], tmp_path / "tokenizer.json", 280, sentinels=12, progress=False)
    found = Corruption.of(Tokenizer.load(tmp_path / "tokenizer.json"), Lengths())
    assert len(found.sentinels) == 12 and made.tokenizer.vocab_size <= 280
    assert set(found.sentinels) <= made.tokenizer.special_ids
    with pytest.raises(DataError, match=r"the 256 bytes, 30 sentinels and <.endoftext.> take 287. Ask for 287 or more"):
        train_tokenizer([tmp_path / "text.txt"], tmp_path / "x.json", 280, sentinels=30, progress=False)
    with pytest.raises(DataError, match="--sentinels 3 with --kind wordpiece: a BPE can have sentinels"):
        train_tokenizer([tmp_path / "text.txt"], tmp_path / "x.json", 280, kind="wordpiece", sentinels=3)


def test_marks_are_the_vocabularys(tmp_path: Path) -> None:
    own = with_tokens(tmp_path, "<extra_id_0>", "<extra_id_1>")
    found = Corruption.of(own, Lengths())
    assert found.sentinels == (own.id_of("<extra_id_0>"), own.id_of("<extra_id_1>"))
    assert found.end == found.start == own.end_of_document is not None
    t5 = with_tokens(tmp_path, "<pad>", "</s>", "<extra_id_1>", "<extra_id_0>")
    found = Corruption.of(t5, Lengths())
    assert found.sentinels == (t5.id_of("<extra_id_0>"), t5.id_of("<extra_id_1>"))
    assert (found.end, found.start) == (t5.id_of("</s>"), t5.id_of("<pad>"))


def with_words(*names: str) -> Tokenizer:
    """Of these words alone, whose ids are their places."""
    words = {name: number for number, name in enumerate(names)}
    return Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel(words, names[-1])))


def test_the_first_id_of_a_vocabulary_can_be_a_mark() -> None:
    """As T5's <pad> is."""
    padded = Corruption.of(with_words("<pad>", "</s>", "<extra_id_0>"), Lengths(0.3, 2.0))
    assert padded == Corruption((2,), end=1, start=0, lengths=Lengths(0.3, 2.0))
    assert Corruption.of(with_words("</s>", "<pad>", "<extra_id_0>"), Lengths()) == Corruption((2,), end=0, start=1)


def test_a_vocabulary_without_an_end_of_texts_is_refused() -> None:
    with pytest.raises(DataError, match=r"neither </s> nor another token that ends a document.*--sentinels 100"):
        Corruption.of(with_words("<pad>", "<extra_id_0>"), Lengths())


def test_samples_are_made_as_the_configuration_says(tmp_path: Path) -> None:
    made = with_tokens(tmp_path, "<pad>", "</s>", "<extra_id_0>")
    (tmp_path / "config.toml").write_text(
        '[model]\nkind = "t5"\nnum_layers = 2\nhidden_size = 32\nnum_heads = 4\nseq_length = 32\n'
        f'decoder_seq_length = 12\nvocab_size = {made.vocab_size}\n[data]\ntrain = "{tmp_path}/text"\n'
        "[data.corruption]\nshare = 0.3\nmean_length = 5\n[train]\nsteps = 4\nglobal_batch_size = 4\n"
        f'micro_batch_size = 2\nseed = 7\n[optim]\nlearning_rate = 1e-2\n[run]\nfolder = "{tmp_path}/run"\n'
    )
    config = load(tmp_path / "config.toml")
    assert span_samples_of(config, made) == SpanSamples(Corruption.of(made, Lengths(0.3, 5)), 12, 7)
    with pytest.raises(DataError, match=r"data\.tokenizer is not set: which ids these are is not known"):
        span_samples_of(config, None)


def test_a_vocabulary_without_sentinels_is_refused_with_what_to_do(tmp_path: Path) -> None:
    plain = with_tokens(tmp_path)
    with pytest.raises(DataError) as caught:
        Corruption.of(plain, Lengths())
    assert str(caught.value).startswith(f"the tokenizer's {plain.vocab_size} ids have no <extra_id_0>: T5 samples mark")
    assert "train-tokenizer --sentinels 100`, and tokenize the text with it." in str(caught.value)


def test_sentinels_in_a_text_are_these_and_nothing_else_is_a_control_token() -> None:
    """As the library reads them, where it is told to; and the end of documents is letters."""
    text = "It was a dark<extra_id_0> and <extra_id_1> night.<extra_id_0>"
    tokenizer = train_bpe([text], 300, sentinels=12)
    ids = text_with_gaps(tokenizer, text)
    assert ids == tokenizer.encode_marked([(text, ())])[0][0]
    first, second = tokenizer.id_of("<extra_id_0>"), tokenizer.id_of("<extra_id_1>")
    assert [each for each in ids if each in (first, second)] == [first, second, first] and ids[-1] == first
    assert text_with_gaps(tokenizer, "no gap") == tokenizer.encode("no gap")
    assert text_with_gaps(tokenizer, "<extra_id_11>") == [tokenizer.id_of("<extra_id_11>")]
    assert text_with_gaps(tokenizer, "a<|endoftext|>") == tokenizer.encode("a<|endoftext|>")
    assert tokenizer.end_of_document not in text_with_gaps(tokenizer, "a<|endoftext|>")
    with pytest.raises(DataError, match="the vocabulary has no <extra_id_12>, which the text names"):
        text_with_gaps(tokenizer, "a <extra_id_12>")
    first_of_all = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"<extra_id_0>": 0, "a": 1}, "a")))
    assert text_with_gaps(first_of_all, "a<extra_id_0>a") == [1, 0, 1]


def test_control_tokens_are_read_before_and_behind_a_gap_where_that_is_asked_for() -> None:
    text = "dark<|endoftext|><extra_id_0>night<|endoftext|>"
    tokenizer = train_bpe([text], 300, sentinels=12)
    dark, night = tokenizer.encode("dark"), tokenizer.encode("night")
    end, gap = tokenizer.end_of_document, tokenizer.id_of("<extra_id_0>")
    assert text_with_gaps(tokenizer, text, control=True) == [*dark, end, gap, *night, end]
