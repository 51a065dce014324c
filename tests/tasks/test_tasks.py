"""What units of every kind of model read of a batch."""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from colonnade.config.model import ModelConfig
from colonnade.tasks.tasks import TASKS


def batch_of(kind: str, head: str) -> Any:
    """Of three samples; a choice has four sequences of each."""
    num_labels = 4 if head in ("classification", "choice") else None
    model = ModelConfig.model_validate({"kind": kind, "head": head, "num_labels": num_labels, "seq_length": 8})
    return TASKS[kind, head].random_batch(model, 3, 30, separate_documents=False)


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
