"""Pairs of answers as sequences: which dropout they have."""

from colonnade.config.model import ModelConfig
from colonnade.tasks.preferences import Preferences


def test_every_answer_of_a_run_has_dropout_of_its_own() -> None:
    """Of two micro-batches, no two answers have the number that masks are drawn from."""
    task, model = Preferences(), ModelConfig(head="preferences", seq_length=8)
    batch = task.random_batch(model, 3, 30, separate_documents=False)
    masks = task.inputs(batch, None, 1).masks
    assert masks is not None and masks.samples.tolist() == list(range(6)) and batch.tokens.shape == (8, 6)
