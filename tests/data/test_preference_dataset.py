"""Pairs of answers as samples: what is refused when their file is opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from colonnade.config.load import load
from colonnade.data.indexed import TokenFile
from colonnade.data.preference_dataset import PreferenceDataset, preference_samples_of
from colonnade.data.sampler import EpochOrder
from colonnade.data.sidecar import PREFERENCES, ExampleFields, Sidecar
from colonnade.data.writer import TokenFileWriter
from colonnade.errors import DataError

FIELDS = ExampleFields("preferences", PREFERENCES, ("prompt", "chosen", "prompt", "rejected"))
SOUND, CUT, LONG = (2, 3, 4, 1), (2, 3, 4), (2, 3, 5, 1)
"""Tokens of each sequence of a document; behind a prompt of four a sample has room for one, behind five for none."""


def opened(folder: Path, *documents: Sequence[int], first: int = 0) -> PreferenceDataset:
    with TokenFileWriter(folder / "pairs", np.dtype("<u2")) as writer:
        for lengths in documents:
            writer.add_document([7] * sum(lengths), lengths=lengths)
        tokens = sum(map(sum, documents))
        writer.close(Sidecar("0" * 64, 100, None, len(documents), tokens, 0, (), examples=FIELDS))
    file, options = TokenFile(folder / "pairs"), (0.1, 0.0, 0.0)
    return PreferenceDataset(file, range(first, len(documents)), 4, vocab_size=100, options=options)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_document_that_is_no_pair_is_refused_wherever_it_stands(tmp_path: Path, at: int) -> None:
    assert len(opened(tmp_path, SOUND, SOUND, SOUND)) == 3
    for wrong, said in ((CUT, rf"document {at} has another number"), (LONG, rf"1 prompt of 3 .* in document {at}\.")):
        with pytest.raises(DataError, match=said):
            opened(tmp_path, *(wrong if number == at else SOUND for number in range(3)))
    for wrong, said in ((CUT, "document 4 has another number"), (LONG, r"1 prompt of 3 .* in document 4\.")):
        with pytest.raises(DataError, match=said):
            opened(tmp_path, *(wrong if number == 4 else SOUND for number in range(5)), first=2)


def pairs_of(folder: Path, *documents: Sequence[Sequence[int]], first: int = 0) -> PreferenceDataset:
    """Of sequences of four tokens."""
    with TokenFileWriter(folder / "pairs", np.dtype("<u2")) as writer:
        for parts in documents:
            writer.add_document([token for part in parts for token in part], lengths=[len(part) for part in parts])
        writer.close(Sidecar("0" * 64, 100, None, len(documents), writer.num_tokens, 0, (), examples=FIELDS))
    file, options = TokenFile(folder / "pairs"), (0.1, 0.2, 1.0)
    return PreferenceDataset(file, range(first, len(documents)), 4, vocab_size=100, options=options)


def test_only_answers_count_and_what_does_not_fit_is_left_out_at_the_end(tmp_path: Path) -> None:
    rows = pairs_of(
        tmp_path,
        ([1, 2], [3, 4, 5], [6, 7, 8, 9], [10]),
        ([1], [2], [1], [3, 4]),
        ([1, 2], [3, 4, 5, 6, 7], [], [8, 9]),
    ).rows([0, 1, 2])
    assert rows.tokens.tolist() == [
        [[1, 2, 3, 4], [6, 7, 8, 9]],
        [[1, 2, 0, 0], [1, 3, 4, 0]],
        [[1, 2, 3, 4], [8, 9, 0, 0]],
    ]
    assert rows.labels.tolist() == [
        [[2, 3, 4, 5], [7, 8, 9, 10]],
        [[2, 0, 0, 0], [3, 4, 0, 0]],
        [[2, 3, 4, 5], [9, 0, 0, 0]],
    ]
    assert rows.counted.astype(int).tolist() == [
        [[0, 1, 1, 1], [0, 0, 0, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0]],
        [[0, 1, 1, 1], [1, 0, 0, 0]],
    ]
    assert rows.reference.tolist() == [[0, 0]] * 3 and rows.options.tolist() == [[0.1, 0.2, 1.0]] * 3


def test_a_part_of_a_file_has_its_own_pairs(tmp_path: Path) -> None:
    data = pairs_of(tmp_path, ([1], [2], [3], [4]), ([5], [6], [7], [8]), ([9], [10], [11], [99]), first=1)
    assert data.rows([0, 1]).tokens[:, :, 0].tolist() == [[5, 7], [9, 11]]
    data = pairs_of(tmp_path, ([1], [2], [3], [4]), ([5], [6], [7], [100]), first=1)
    with pytest.raises(DataError, match="document 1 has token id 100 at its position 3,"):
        data.rows([0])


def test_no_id_is_below_zero(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "pairs", np.dtype("<i4")) as writer:
        writer.add_document([1, 2, 3, -4], lengths=[1] * 4)
        writer.close(Sidecar("0" * 64, 100, None, 1, 4, 0, (), examples=FIELDS))
    data = PreferenceDataset(TokenFile(tmp_path / "pairs"), range(1), 4, vocab_size=100, options=(0.1, 0.0, 0.0))
    with pytest.raises(DataError, match="document 0 has token id -4 at its position 3,"):
        data.rows([0])


def test_the_loss_is_that_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        '[model]\nhead = "preferences"\nnum_layers = 2\nhidden_size = 32\nnum_heads = 4\nseq_length = 48\n'
        f'vocab_size = 100\n[data]\ntrain = "{tmp_path}/pairs"\n[train]\ninit_from = "{tmp_path}/base"\nsteps = 4\n'
        "global_batch_size = 4\nmicro_batch_size = 2\n[optim]\nlearning_rate = 1e-2\n"
        f'[run]\nfolder = "{tmp_path}/run"\n'
    )
    for overrides, options in (
        (["preferences.beta=0.3", "preferences.label_smoothing=0.2"], (0.3, 0.2, 0.0)),
        (["preferences.loss=ipo"], (0.1, 0.0, 1.0)),
    ):
        config = load(tmp_path / "config.toml", overrides)
        assert preference_samples_of(config, None).options == options


@pytest.mark.parametrize(
    ("examples", "holds"),
    [
        (None, "text"),
        (ExampleFields("squad", "spans", ("question", "passage")), "examples of squad"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, examples: ExampleFields | None, holds: str) -> None:
    with TokenFileWriter(tmp_path / "others", np.dtype("<u2")) as writer:
        writer.add_document([7] * 10, lengths=SOUND)
        writer.close(Sidecar("0" * 64, 100, None, 1, 10, 0, (), examples=examples))
    with pytest.raises(DataError, match=rf"others holds {holds}, .* Make it with `colonnade data examples preferences"):
        PreferenceDataset(TokenFile(tmp_path / "others"), range(1), 8, vocab_size=100, options=(0.1, 0.0, 0.0))


def test_a_file_that_says_nothing_of_itself_is_refused(tmp_path: Path) -> None:
    with TokenFileWriter(tmp_path / "bare", np.dtype("<u2")) as writer:
        writer.add_document([7] * 10, lengths=SOUND)
    with pytest.raises(DataError, match="bare holds text, "):
        PreferenceDataset(TokenFile(tmp_path / "bare"), range(1), 8, vocab_size=100, options=(0.1, 0.0, 0.0))


def test_what_a_reference_thinks_goes_with_its_pair(tmp_path: Path) -> None:
    """By its number in the part of the file, wherever it stands in the run."""
    data = opened(tmp_path, SOUND, SOUND, SOUND, SOUND, first=1)
    assert data.rows([0]).reference.tolist() == [[0.0, 0.0]], "it is not known yet"
    data.reference = np.array([[-1.0, -2.0], [-3.0, -4.0], [-5.0, -6.0]])
    data.order = EpochOrder(3, 1)
    samples = data.order.samples(np.arange(6))
    assert data.rows(range(6)).reference.tolist() == data.reference[samples].tolist()
    assert len(set(samples.tolist())) == 3
