"""What units of every kind of model read of a batch."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from colonnade.config.model import ModelConfig
from colonnade.config.preferences import PreferencesConfig
from colonnade.data.bert_dataset import PairRows
from colonnade.data.example_dataset import LabelledRows
from colonnade.data.preference_dataset import PreferenceRows
from colonnade.data.span_dataset import SpanRows
from colonnade.tasks.bert import as_bert_batch
from colonnade.tasks.labels import as_label_batch
from colonnade.tasks.preferences import as_preference_batch
from colonnade.tasks.spans import as_span_batch
from colonnade.tasks.tasks import TASKS


def batch_of(kind: str, head: str, size: int = 3) -> Any:
    """A choice has four sequences of each sample."""
    num_labels = 4 if head in ("classification", "choice") else None
    model = ModelConfig.model_validate({"kind": kind, "head": head, "num_labels": num_labels, "seq_length": 8})
    return TASKS[kind, head].random_batch(model, size, 30, separate_documents=False)


@pytest.mark.parametrize(("kind", "head"), TASKS)
def test_a_batch_of_no_text_is_drawn_by_a_generator_of_its_own(kind: str, head: str) -> None:
    before = torch.get_rng_state()
    batch = batch_of(kind, head)
    assert torch.equal(torch.get_rng_state(), before) and len(batch.tokens.unique()) > 5
    again = batch_of(kind, head)
    for each in fields(batch):
        first, second = getattr(batch, each.name), getattr(again, each.name)
        assert first is second is None or torch.equal(first, second), f"another {each.name} each time"


@pytest.mark.parametrize(("kind", "head"), TASKS)
def test_every_sequence_of_a_run_has_dropout_of_its_own(kind: str, head: str) -> None:
    """Where a step has a seed. Of two micro-batches no two have the number that masks are drawn from."""
    task, first = TASKS[kind, head], batch_of(kind, head)
    numbers = []
    for batch in (first, replace(first, samples=first.samples + 3)):
        masks = task.inputs(batch, None, 9).masks
        assert masks is not None and masks.seed == 9 and len(masks.samples) == batch.tokens.shape[1]
        numbers += masks.samples.tolist()
    assert numbers == list(range(2 * first.tokens.shape[1]))
    assert task.inputs(first, None, None).masks is None, "an evaluation drops nothing"


@pytest.mark.parametrize(("kind", "head"), TASKS)
def test_units_read_what_the_batch_has(kind: str, head: str) -> None:
    task, batch = TASKS[kind, head], batch_of(kind, head)
    inputs = task.inputs(batch, None, None)
    names = {each.name for each in fields(inputs)}
    shared = names & {each.name for each in fields(batch)}
    assert "tokens" in shared and all(getattr(inputs, name) is getattr(batch, name) for name in shared)
    assert all(getattr(inputs, name) is None for name in names if name.endswith("_weights")), "nobody asks for a loss"


@pytest.mark.parametrize(("kind", "head"), TASKS)
def test_what_counts_of_a_loss_has_its_weight(kind: str, head: str) -> None:
    task, batch = TASKS[kind, head], batch_of(kind, head)
    weights = torch.tensor([0.5, 0.25], dtype=torch.float64)[: len(task.counts(batch))]
    inputs = task.inputs(batch, weights, None)
    every = [getattr(inputs, each.name) for each in fields(inputs) if each.name.endswith("_weights")]
    found = [each for each in every if each is not None]  # what a loss of another head would have is not there
    assert [float(each.sum()) for each in found] == (weights * task.counts(batch)).tolist()
    for each, weight in zip(found, weights.tolist(), strict=True):
        assert set(each.unique().tolist()) <= {0.0, weight}


@pytest.mark.parametrize(("kind", "head"), TASKS)
def test_of_what_is_not_counted_nothing_else_changes(kind: str, head: str) -> None:
    task, batch = TASKS[kind, head], batch_of(kind, head)
    found = batch.uncounted()
    assert task.counts(batch).min() > 0 and not task.counts(found).any()
    masks = {"loss_mask", "pair_mask", "target_mask", "answer_mask"}
    same = {each.name for each in fields(batch) if getattr(found, each.name) is getattr(batch, each.name)}
    assert {each.name for each in fields(batch)} - same <= masks


@pytest.mark.parametrize(("kind", "head"), TASKS)
def test_on_a_device_a_batch_has_all_but_what_the_program_reads(kind: str, head: str) -> None:
    batch = batch_of(kind, head)
    moved = batch.to(torch.device("meta"))
    assert moved.samples is batch.samples
    for each in fields(batch):
        before, now = getattr(batch, each.name), getattr(moved, each.name)
        assert before is now is None or each.name == "samples" or (now.is_meta and now.shape == before.shape)


@pytest.mark.parametrize(("kind", "head"), TASKS)
def test_a_batch_for_measuring_has_answers_that_there_are(kind: str, head: str) -> None:
    """Labels of the model's, positions of its sequences, and a question before its text."""
    batch = batch_of(kind, head, 5)
    names = {each.name for each in fields(batch)}
    if "targets" in names:
        assert batch.targets.tolist() == ([0, 1, 2, 3, 0] if head in ("classification", "choice") else [0] * 5)
    if "answers" in names:
        assert 0 <= int(batch.answers.min()) <= int(batch.answers.max()) < 8
    if "options" in names:
        assert batch.options.tolist() == [[PreferencesConfig().beta, 0.0, 0.0]] * 5, "DPO's loss"
    if "types" in names:
        first = batch.types[:, 0].tolist()
        assert first == sorted(first) and set(first) == {0, 1} and bool(batch.real.all())


TOKENS = np.arange(24).reshape(2, 3, 4)
"""Of two samples, three sequences of four tokens."""
FLAGS = TOKENS % 3 == 0


def test_sequences_of_a_sample_stand_side_by_side() -> None:
    rows = LabelledRows(TOKENS, TOKENS % 2, FLAGS, np.array([2.0, np.nan]))
    batch = as_label_batch(rows, [5, 9])
    columns = TOKENS.reshape(6, 4)
    for found, given in ((batch.tokens, columns), (batch.types, columns % 2), (batch.real, columns % 3 == 0)):
        assert found.t().tolist() == given.tolist()
    assert batch.targets[0] == 2.0 and batch.targets[1].isnan() and batch.target_mask.tolist() == [1.0, 1.0]
    assert batch.samples.tolist() == [5, 9] and batch.columns.tolist() == [15, 16, 17, 27, 28, 29]


def test_pairs_of_answers_stand_side_by_side_the_preferred_one_first() -> None:
    """What counts is the answer alone."""
    pairs, flags = TOKENS[:, :2], FLAGS[:, :2]
    rows = PreferenceRows(pairs, pairs + 1, flags, np.array([[-1.0, -2.0], [-3.0, -4.0]]), np.ones((2, 3)))
    batch = as_preference_batch(rows, [5, 9])
    assert batch.tokens.t().tolist() == pairs.reshape(4, 4).tolist()
    assert batch.labels.t().tolist() == (pairs + 1).reshape(4, 4).tolist()
    assert batch.loss_mask.t().tolist() == flags.reshape(4, 4).astype(float).tolist()
    assert batch.reference.tolist() == [[-1.0, -2.0], [-3.0, -4.0]] and batch.options.tolist() == [[1.0] * 3] * 2
    assert (batch.pair_mask.tolist(), batch.columns.tolist()) == ([1.0, 1.0], [10, 11, 18, 19])


def test_windows_have_their_answers_and_say_what_is_padding() -> None:
    rows = SpanRows(TOKENS[:, 0], TOKENS[:, 0] % 2, FLAGS[:, 0], np.array([[1, 3], [0, 0]]))
    batch = as_span_batch(rows, [5, 9])
    assert batch.tokens.t().tolist() == TOKENS[:, 0].tolist() and batch.types.t().tolist() == [[0, 1, 0, 1]] * 2
    assert batch.real.t().tolist() == FLAGS[:, 0].tolist() and batch.answers.tolist() == [[1, 0], [3, 0]]
    assert (batch.answer_mask.tolist(), batch.samples.tolist()) == ([1.0, 1.0], [5, 9])


def test_masked_texts_have_their_tokens_as_they_were_and_those_to_guess() -> None:
    labels, chosen = TOKENS[:, 1], TOKENS[:, 0] % 5 == 1
    rows = PairRows(TOKENS[:, 0], TOKENS[:, 0] % 2, FLAGS[:, 0], labels, chosen, np.array([0, 1]))
    batch = as_bert_batch(rows, [5, 9])
    assert batch.tokens.t().tolist() == TOKENS[:, 0].tolist() and batch.labels.t().tolist() == labels.tolist()
    assert batch.types.t().tolist() == [[0, 1, 0, 1]] * 2 and batch.real.t().tolist() == FLAGS[:, 0].tolist()
    assert batch.loss_mask.t().tolist() == chosen.astype(float).tolist() and batch.loss_mask.dtype == torch.float32
    assert (batch.pair_labels.tolist(), batch.pair_mask.tolist()) == ([0, 1], [1.0, 1.0])
    assert batch.samples.tolist() == [5, 9]


@pytest.mark.parametrize(("kind", "head"), TASKS)
def test_what_counts_is_summed_in_float64(kind: str, head: str) -> None:
    """Weights of fp32 too: the sum does not depend on how samples are cut into micro-batches."""
    task, batch = TASKS[kind, head], batch_of(kind, head, size=31)
    counted, uncounted = vars(batch), vars(batch.uncounted())
    torch.manual_seed(0)
    masks = {name: torch.rand(mask.shape) for name, mask in counted.items() if mask is not uncounted[name]}
    expected = [float(mask.double().sum()) for mask in masks.values()]
    assert task.counts(replace(batch, **masks)).tolist() == pytest.approx(expected, rel=1e-14)
