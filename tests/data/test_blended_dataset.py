"""Blended data sets: shares, orders of their own, epochs, ends, and the same global sequence for everybody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colonnade.config.corruption import Lengths
from colonnade.data.bert_dataset import BertCut, PairSamples
from colonnade.data.blended_dataset import BlendBy, BlendedDataset, Mixture, open_blend
from colonnade.data.datasets import Dataset, Datasets, SampleKind, open_datasets
from colonnade.data.example_dataset import ExampleSamples, PairTokens, Reading
from colonnade.data.gpt_dataset import STREAM, TextSamples
from colonnade.data.masking import WordPieces
from colonnade.data.rows import Cut
from colonnade.data.sidecar import Sidecar
from colonnade.data.t5_dataset import Corruption, SpanSamples
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError
from tests.data.batches import load_batch
from tests.data.positions import rank_positions
from tests.data.sidecars import write_sidecar
from tests.tasks.examples import write_examples

Write = Callable[..., str]
VOCAB = 60_000


def opened(
    numbers: dict[str, float],
    *,
    by: BlendBy = "samples",
    temperature: float | None = None,
    earlier: tuple[tuple[int, dict[str, float]], ...] = (),
    cut: Cut = STREAM,
    **settings: object,
) -> Datasets:
    defaults: dict[str, object] = {"split": (1.0, 0.0, 0.0), "seq_length": 4, "vocab_size": VOCAB, "seed": 1}
    mixture = Mixture(numbers, by, temperature, earlier)
    return open_blend(mixture, samples=TextSamples(cut), **(defaults | settings))  # type: ignore[arg-type]


@pytest.fixture
def files(write_tokens: Write) -> tuple[str, str, str]:
    """Of 10, 25 and 50 samples of four tokens; each document's first token tells the file."""
    return write_tokens(41, name="a"), write_tokens(101, name="b"), write_tokens(201, name="c")


def sources(datasets: Datasets, positions: range) -> list[int]:
    assert isinstance(datasets.train, BlendedDataset)
    return datasets.train.blend.locate(np.arange(positions.start, positions.stop)).sets.tolist()


def test_shares_are_exact(files: tuple[str, str, str]) -> None:
    datasets = opened(dict(zip(files, [0.5, 0.3, 0.2], strict=True)))
    assert Counter(sources(datasets, range(1_000))) == {0: 500, 1: 300, 2: 200}
    assert Counter(sources(datasets, range(7, 17))) == {0: 5, 1: 3, 2: 2}


def test_each_file_has_the_order_that_it_has_alone(files: tuple[str, str, str]) -> None:
    datasets = opened({files[0]: 1, files[1]: 1})
    alone = open_datasets(
        samples=TextSamples(), train=files[0], split=(1, 0, 0), seq_length=4, vocab_size=VOCAB, seed=1
    )
    mine = [position for position, source in enumerate(sources(datasets, range(40))) if source == 0]
    assert datasets.train.rows(mine).tokens.tolist() == alone.train.rows(range(20)).tokens.tolist()


def test_files_of_one_size_have_different_orders(write_tokens: Write) -> None:
    """With this seed and the next one."""
    equal = {write_tokens(401, name="a"): 1.0, write_tokens(401, name="b"): 1.0}
    orders = []
    for seed in (1, 2):
        datasets = opened(equal, seed=seed)
        starts = datasets.train.rows(range(200)).tokens[:, 0]
        chosen = np.array(sources(datasets, range(200)))
        orders += [tuple(starts[chosen == source].tolist()) for source in (0, 1)]
    assert len(set(orders)) == 4


def test_a_file_that_is_used_up_begins_again_and_no_epochs_mix(files: tuple[str, str, str]) -> None:
    datasets = opened({files[0]: 2, files[1]: 1})
    mine = [position for position, source in enumerate(sources(datasets, range(60))) if source == 0]
    first = datasets.train.rows(mine).tokens[:, 0] // 4
    for epoch in range(4):
        assert sorted(first[10 * epoch : 10 * epoch + 10]) == list(range(10))


def test_the_pass_of_a_position_is_that_over_its_own_file(files: tuple[str, str, str]) -> None:
    """Files of 10 and 25 samples, one from each by turns: which begin again at different places."""
    datasets = opened({files[0]: 1, files[1]: 1})
    passes, places = datasets.train.passes(range(60)), sources(datasets, range(60))
    assert passes.sets.tolist() == places
    for source, length in ((0, 10), (1, 25)):
        assert passes.epochs[passes.sets == source].tolist() == [number // length for number in range(30)]
    assert [int(each[0]) for each in datasets.train.passes([59])] == [places[59], passes.epochs[59]]


def test_up_to_where_a_blend_was_changed_it_is_what_it_was(files: tuple[str, str, str]) -> None:
    """Three of one file for one of the other, as many of both from position 8 on, one for three from 20 on."""
    a, b, _ = files
    datasets = opened({a: 1, b: 3}, earlier=((8, {a: 3, b: 1}), (20, {a: 1, b: 1})))
    found = [Counter(sources(datasets, places)) for places in (range(8), range(8, 20), range(20, 40))]
    assert found == [{0: 6, 1: 2}, {0: 6, 1: 6}, {0: 5, 1: 15}]
    begun = [sources(datasets, range(begin, begin + 4)) for begin in (0, 8, 20)]
    assert begun == [sources(opened({a: n, b: m}), range(4)) for n, m in ((3, 1), (1, 1), (1, 3))]


def test_epochs_of_each(files: tuple[str, str, str]) -> None:
    datasets = opened(dict(zip(files, [3, 1, 0.5], strict=True)), by="epochs")
    train = datasets.train
    assert len(train) == 30 + 25 + 25
    assert Counter(sources(datasets, range(80))) == {0: 30, 1: 25, 2: 25}
    seen = Counter(train.rows(range(80)).tokens[:, 0].tolist())
    assert sum(seen.values()) == 80
    with pytest.raises(DataError, match=r"asks for 81 samples, but the epochs of data.blend .* have 80 in all"):
        train.rows([3, 80])


def test_of_each_file_one_sample_at_least_and_one_pass_at_most_is_among_the_first(files: tuple[str, str, str]) -> None:
    train = opened(dict(zip(files, [100, 1, 1], strict=True))).train
    assert isinstance(train, BlendedDataset) and train.num_tokens == 41 + 101 + 201
    assert train.first_of_each(5) == [5, 1, 1] and train.first_of_each(204) == [10, 2, 2]


def test_a_file_of_a_small_part_of_an_epoch_gives_one_sample(files: tuple[str, str, str]) -> None:
    datasets = opened({files[0]: 0.01, files[1]: 1}, by="epochs")
    assert Counter(sources(datasets, range(26))) == {0: 1, 1: 25}


@pytest.mark.parametrize(("samples", "epochs", "taken"), [(10, 0.27, 3), (10, 0.32, 3), (45, 0.7, 32)])
def test_a_part_of_an_epoch_is_the_nearest_number_of_samples(
    write_tokens: Write, samples: int, epochs: float, taken: int
) -> None:
    """As the number is written: 0.7 of 45 are 31.5, though not in binary."""
    assert len(opened({write_tokens(4 * samples + 1): epochs}, by="epochs").train) == taken


def test_every_file_is_held_against_the_vocabulary_when_it_is_opened(write_tokens: Write) -> None:
    first, second = write_tokens(41, name="a"), write_tokens(81, name="b")
    opened({first: 1}, vocab_size=41)
    with pytest.raises(DataError, match=r"b: document 0 has token id 41 at its position 41, but the vocabulary has 41"):
        opened({first: 1, second: 1}, vocab_size=41)


def test_files_of_a_blend_at_urls_are_copied_to_the_cache(write_tokens: Write, tmp_path: Path) -> None:
    prefix = write_tokens(41)
    datasets = opened({f"file://{prefix}": 1}, cache=str(tmp_path / "cache"))
    assert datasets.train.rows([0]).tokens.tolist() == opened({prefix: 1}).train.rows([0]).tokens.tolist()
    assert list((tmp_path / "cache").rglob("blocks/*"))


def test_every_file_is_held_against_the_tokenizer(write_tokens: Write, tokenizer: Tokenizer) -> None:
    first, second = write_tokens(41, name="a"), write_tokens(41, name="b")
    write_sidecar(first, Sidecar(tokenizer.sha256, 600, None, 1, 41, 0, ()))
    write_sidecar(second, Sidecar("0" * 64, 600, None, 1, 41, 0, ()))
    opened({first: 1}, tokenizer=tokenizer)
    with pytest.raises(DataError, match=r"b was made with another tokenizer than data\.tokenizer"):
        opened({first: 1, second: 1}, tokenizer=tokenizer)


def test_held_out_parts_have_the_proportions_of_the_epochs(write_tokens: Write) -> None:
    """Of 10 and 30 samples to evaluate, one and two epochs: of seven samples one is of the first file."""
    files = (write_tokens(*[41] * 4, name="a"), write_tokens(*[121] * 4, name="b"))
    datasets = opened(dict(zip(files, [1, 2], strict=True)), by="epochs", split=(2.0, 1.0, 1.0))
    for part in (datasets.validation, datasets.test):
        assert isinstance(part, BlendedDataset) and [len(each) for each in part.parts] == [10, 30]
        assert Counter(part.blend.locate(np.arange(700)).sets.tolist()) == {0: 100, 1: 600}


def test_all_epochs_shuffled_as_one_only_when_asked(files: tuple[str, str, str]) -> None:
    datasets = opened({files[2]: 4}, by="epochs", order="all_epochs")
    starts = datasets.train.rows(range(200)).tokens[:, 0].tolist()
    assert set(Counter(starts).values()) == {4}
    assert len(set(starts[:50])) < 45
    with pytest.raises(DataError, match=r"data\.epochs is None"):  # shares are no epochs
        opened(dict.fromkeys(files, 2.0), order="all_epochs")


def test_temperature(files: tuple[str, str, str]) -> None:
    numbers: dict[str, float] = dict.fromkeys(files, 1.0)
    by_size = Counter(sources(opened(numbers, by="temperature", temperature=1.0), range(850)))
    assert by_size == {0: 100, 1: 250, 2: 500}, "as many as there are"
    softer = Counter(sources(opened(numbers, by="temperature", temperature=2.0), range(10_000)))
    roots = np.sqrt([40, 100, 200])
    for source, root in enumerate(roots):
        assert abs(softer[source] - 10_000 * root / roots.sum()) < 1


def test_a_factor_stands_outside_of_the_temperature(files: tuple[str, str, str]) -> None:
    """factor × tokens^(1/T): the file of 40 tokens in samples with the factor 8, beside that of 200."""
    datasets = opened({files[0]: 8.0, files[2]: 1.0}, by="temperature", temperature=2.0)
    drawn = Counter(sources(datasets, range(10_000)))
    parts = np.array([8.0 * np.sqrt(40), np.sqrt(200)])
    assert np.abs(np.array([drawn[0], drawn[1]]) - 10_000 * parts / parts.sum()).max() < 1


WHOLE = Cut(separate=True, whole=True, too_long="drop")


def padded(datasets: Datasets, num_samples: int) -> list[int]:
    """Of two files in rows of 8 with padding: tokens of each among the first samples."""
    tokens, places = datasets.train.rows(range(num_samples)).tokens, np.array(sources(datasets, range(num_samples)))
    return [int((tokens[places == source] > 0).sum()) for source in (0, 1)]


@pytest.fixture
def unequal(write_tokens: Write) -> dict[str, float]:
    """Rows of 6 tokens and of 5, with documents that are longer than a row and left out."""
    return {write_tokens(*[3] * 40, name="a"): 1.0, write_tokens(*[5, 9] * 30, name="b"): 1.0}


def test_tokens_are_counted_without_padding(unequal: dict[str, float]) -> None:
    """Five samples of 6 tokens for six of 5, where shares are equal."""
    of_tokens = opened(unequal, by="tokens", seq_length=8, cut=WHOLE)
    assert Counter(sources(of_tokens, range(1_100))) == {0: 500, 1: 600}
    assert Counter(sources(opened(unequal, seq_length=8, cut=WHOLE), range(1_100))) == {0: 550, 1: 550}
    found = padded(of_tokens, 110)
    assert max(found) - min(found) <= 2, "the token 0 is one of the first document, beside padding"


def test_a_temperature_is_on_tokens_without_padding(unequal: dict[str, float]) -> None:
    """20 samples of 6 tokens and 30 of 5: all of them at 1, and roots of 120 and 150 tokens at 2."""
    by_size = opened(unequal, by="temperature", temperature=1.0, seq_length=8, cut=WHOLE)
    assert Counter(sources(by_size, range(500))) == {0: 200, 1: 300}
    drawn = Counter(sources(opened(unequal, by="temperature", temperature=2.0, seq_length=8, cut=WHOLE), range(10_000)))
    parts = np.sqrt([120, 150]) / [6, 5]
    assert np.abs(np.array([drawn[0], drawn[1]]) - 10_000 * parts / parts.sum()).max() < 1


@pytest.mark.parametrize(("by", "temperature"), [("tokens", None), ("temperature", 1.0)])
def test_a_run_that_began_with_samples_for_tokens_goes_on_so(
    unequal: dict[str, float], by: BlendBy, temperature: float | None
) -> None:
    mixture = Mixture(unequal, by, temperature, revision=1)
    samples = TextSamples(WHOLE)
    datasets = open_blend(mixture, samples=samples, split=(1.0, 0.0, 0.0), seq_length=8, vocab_size=VOCAB, seed=1)
    drawn = Counter(sources(datasets, range(540)))
    assert drawn == ({0: 270, 1: 270} if by == "tokens" else {0: 120, 1: 420})


@pytest.mark.parametrize(("temperature", "factor"), [(1e-3, 1.0), (1e-320, 1.0), (1.0, 1e308)])
def test_a_temperature_whose_weights_no_number_holds_is_refused(
    files: tuple[str, str, str], temperature: float, factor: float
) -> None:
    with pytest.raises(DataError, match=r"data\.temperature = .* Set data\.temperature to 1 or more"):
        opened(dict.fromkeys(files, factor), by="temperature", temperature=temperature)


@pytest.mark.parametrize("number", [1e13, 1e300])
def test_more_epochs_than_an_order_is_computed_of_are_refused(files: tuple[str, str, str], number: float) -> None:
    with pytest.raises(DataError, match=r"have 2,199,023,255,552 samples or more .* Lower the numbers"):
        opened({files[0]: number, files[1]: 1}, by="epochs")
    with pytest.raises(DataError, match="Lower the numbers"):
        opened({files[0]: number}, by="epochs")


def test_parts_of_a_split_are_blended_alike(write_tokens: Write) -> None:
    names = {write_tokens(*[9] * 20, name="a"): 3.0, write_tokens(*[9] * 10, name="b"): 1.0}
    datasets = opened(names, split=(8.0, 1.0, 1.0))
    for part, lengths in ((datasets.validation, [4, 2]), (datasets.test, [4, 2])):
        assert isinstance(part, BlendedDataset)
        assert part.blend.weights == (3, 1)
        assert len(part) == min(lengths[0] * 4 // 3, lengths[1] * 4)
    train = datasets.train
    assert isinstance(train, BlendedDataset)
    assert [part.documents for part in train.parts] == [range(16), range(8)]


def test_every_part_of_a_blend_is_cut_alike(write_tokens: Write) -> None:
    names = {write_tokens(*[9] * 20, name="a"): 3.0, write_tokens(*[9] * 10, name="b"): 1.0}
    datasets = opened(names, split=(8.0, 1.0, 1.0), cut=Cut(separate=True))
    for part in (datasets.train, datasets.validation, datasets.test):
        assert part is not None and part.rows([0, 1]).documents is not None


def test_a_file_too_small_for_a_part_is_left_out_of_that_part(write_tokens: Write) -> None:
    names = {write_tokens(*[9] * 20, name="a"): 1.0, write_tokens(30, name="b"): 1.0}
    datasets = opened(names, split=(8.0, 1.0, 1.0))
    assert isinstance(datasets.validation, BlendedDataset)
    assert len(datasets.validation.parts) == 1
    assert opened({write_tokens(30, name="c"): 1.0}, split=(8.0, 1.0, 1.0)).validation is None
    a_label_short = opened({write_tokens(*[4] * 10, name="d"): 1.0}, split=(8.0, 1.0, 1.0))
    assert a_label_short.validation is None and a_label_short.test is None


def held_out(samples: SampleKind, prefix: str, *, seq_length: int, vocab_size: int = VOCAB) -> Dataset | None:
    """The validation part, of a document in ten."""
    return open_blend(
        Mixture({prefix: 1.0}), samples=samples, split=(9, 1, 0), seq_length=seq_length, vocab_size=vocab_size, seed=1
    ).validation


def test_a_part_is_left_out_where_its_kind_of_samples_makes_none_of_it(tmp_path: Path, write_tokens: Write) -> None:
    """However many tokens a sample takes of its text: as many as it has, more, fewer, or all of a document."""
    corruption, pieces = Corruption(tuple(range(99)), 1, 0), WordPieces(0, 1, 2, 3, np.arange(9), np.zeros(VOCAB, bool))
    spans, pairs = SpanSamples(corruption, 64, 1), PairSamples(pieces, 1, BertCut())
    wholes = TextSamples(Cut(separate=True, whole=True))
    longest = Lengths().text(64, 64)
    assert longest > 64
    for samples, tokens in ((TextSamples(), 65), (spans, longest + 1), (pairs, 61), (wholes, 1)):
        name = type(samples).__name__
        enough = held_out(samples, write_tokens(*[60] * 9, tokens, name=f"{name}{tokens}"), seq_length=64)
        assert enough is not None and len(enough) == 1, name
        if tokens > 1:
            less = write_tokens(*[60] * 9, tokens - 1, name=f"{name}{tokens - 1}")
            assert held_out(samples, less, seq_length=64) is None, name
    tokenizer = Tokenizer.load(write_examples(tmp_path, ["mnli"]) / "tokenizer.json")
    labelled = ExampleSamples(Reading(PairTokens.of(tokenizer), "classification", 3))
    examples = held_out(labelled, f"{tmp_path}/mnli", seq_length=64, vocab_size=tokenizer.vocab_size)
    assert examples is not None and len(examples) == 1


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.lists(st.sampled_from([0.1, 0.25, 1, 3, 17]), min_size=3, max_size=3),
    st.integers(0, 10**6),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
)
def test_the_same_global_sequence_for_every_layout_and_batch(
    files: tuple[str, str, str], numbers: list[float], start: int, dp_size: int, micro: int
) -> None:
    datasets = opened(dict(zip(files, numbers, strict=True)), cut=Cut(separate=True))
    sweep = load_batch(datasets.train, range(start, start + 24)).tokens.T.tolist()
    seen = []
    for step in range(24 // (dp_size * micro)):
        for rank in range(dp_size):
            for chunk in rank_positions(
                start + step * dp_size * micro,
                global_batch_size=dp_size * micro,
                micro_batch_size=micro,
                dp_rank=rank,
                dp_size=dp_size,
            ):
                seen += load_batch(datasets.train, chunk).tokens.T.tolist()
    assert seen == sweep


def test_a_file_that_leaves_nothing_to_train_on(write_tokens: Write) -> None:
    with pytest.raises(DataError, match="leaves none for train"):
        opened({write_tokens(50, 50): 1.0}, split=(1.0, 99.0, 0.0))
    with pytest.raises(DataError, match="one sample takes"):
        opened({write_tokens(4, name="short"): 1.0})
