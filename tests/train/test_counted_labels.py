"""A run is not begun on samples in which no label counts."""

from pathlib import Path

import numpy as np
import pytest

from colonnade.data.sampler import InOrder
from colonnade.data.writer import TokenFileWriter
from colonnade.train import counted_labels
from tests import tiny
from tests.commands import here
from tests.tiny import TinyCorpus, write_config

ALL = f"data.no_loss_on={list(range(tiny.VOCAB_SIZE))}"


def token_file(path: Path, tokens: list[int]) -> str:
    with TokenFileWriter(path, np.dtype("<u2")) as writer:
        writer.add_document(tokens)
    return str(path)


@pytest.mark.parametrize("evaluate", ["train.evaluate_every=0", "train.evaluate_every=2"])
def test_a_run_does_not_begin_that_would_learn_nothing(evaluate: str, corpus: TinyCorpus, tmp_path: Path) -> None:
    """Whether or not it evaluates: the way out of evaluations of nothing does not lead there."""
    for dry_run in ([], ["--dry-run"]):
        answer = here("train", write_config(corpus, tmp_path), ALL, evaluate, *dry_run)
        assert answer.status == 2 and "would be nothing to measure" not in answer.err, answer
        assert " training samples: nothing would be learned. Raise model.seq_length" in answer.err, answer
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("looked_at", "status"), [(2, 2), (3, 0)])
def test_so_many_samples_of_each_file_are_read(
    looked_at: int, status: int, corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three in their order the last has a label that counts; a second file has none."""
    monkeypatch.setattr(counted_labels, "LOOKED_AT", looked_at)
    files = [token_file(tmp_path / "late", [1] * 33 + [2] * 16), token_file(tmp_path / "none", [1] * 17)]
    config = write_config(corpus, tmp_path)
    blend = f'blend = {{"{files[1]}" = 0.5, "{files[0]}" = 0.5}}'
    config.write_text(config.read_text().replace(f'train = "{corpus.prefix}"', blend).replace('"5:1"', '"1:0"'))
    monkeypatch.setattr("colonnade.data.blended_dataset.order_of", lambda num_samples, **_: InOrder(num_samples))
    answer = here("train", config, "data.no_loss_on=[1]", "train.evaluate_every=0", "--dry-run")
    said = "no label counts in the first 3 of 4 training samples: " if status else ""
    assert answer.status == status and said in answer.err, answer


@pytest.mark.parametrize(
    ("overrides", "is_refused"),
    [
        (("train.evaluate_samples=2",), True),
        (("train.evaluate_every=0", "train.evaluate_at_start=true", "train.evaluate_samples=2"), True),
        (("train.evaluate_every=0", "train.evaluate_samples=2"), False),
        (("train.evaluate_samples=3",), False),
    ],
)
def test_a_run_does_not_begin_whose_evaluations_would_have_no_label_that_counts(
    overrides: tuple[str, ...], is_refused: bool, corpus: TinyCorpus, tmp_path: Path
) -> None:
    """Two samples in which none does, and one behind them."""
    with TokenFileWriter(tmp_path / "held", np.dtype("<u2")) as writer:
        writer.add_document([1] * 33 + [2] * 16)
    held = ("data.no_loss_on=[1]", f"data.validation={tmp_path / 'held'}")
    answer = here("train", write_config(corpus, tmp_path), *held, *overrides, "--dry-run")
    said = (
        "colonnade: no label counts in the first 2 of 3 validation samples, which an evaluation reads: there would be "
        "nothing to measure. Set train.evaluate_samples higher, or give validation other text (data.validation, "
        "data.split), or leave evaluations out: train.evaluate_every = 0 and evaluate_at_start = false.\n"
    )
    assert (answer.status, answer.err) == ((2, said) if is_refused else (0, "")), answer
