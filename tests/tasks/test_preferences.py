"""Pairs of answers as sequences: which dropout they have, and what an evaluation finds."""

from dataclasses import replace

import pytest
import torch

from colonnade.config.model import ModelConfig
from colonnade.errors import DataError
from colonnade.mesh.mesh import Axis
from colonnade.pipeline.inference import on_one_stage
from colonnade.tasks.preferences import PreferenceBatch, Preferences, Preferred
from colonnade.tasks.task import Hidden
from colonnade.tensor_parallel.parallel import Parallel


def test_every_answer_of_a_run_has_dropout_of_its_own() -> None:
    """Of two micro-batches, no two answers have the number that masks are drawn from."""
    task, model = Preferences(), ModelConfig(head="preferences", seq_length=8)
    batch = task.random_batch(model, 3, 30, separate_documents=False)
    masks = task.inputs(batch, None, 1).masks
    assert masks is not None and masks.samples.tolist() == list(range(6)) and batch.tokens.shape == (8, 6)


def test_each_pair_that_counts_weighs_alike() -> None:
    task, model = Preferences(), ModelConfig(head="preferences", seq_length=8)
    batch = replace(task.random_batch(model, 3, 30, separate_documents=False), pair_mask=torch.tensor([1.0, 0.0, 1.0]))
    assert task.counts(batch).tolist() == [2.0]
    inputs = task.inputs(batch, torch.tensor([0.25], dtype=torch.float64), None)
    assert inputs.pair_weights is not None and inputs.pair_weights.tolist() == [0.25, 0.0, 0.25]
    assert task.inputs(batch, None, None).pair_weights is None and inputs.masks is None
    assert inputs.counted is batch.loss_mask and inputs.reference is batch.reference


def test_answers_that_have_gained_equally_are_not_rightly_preferred() -> None:
    """As before the first step of a run, whose model is its own reference."""
    task, sizes = Preferences(), {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "seq_length": 8}
    model = ModelConfig.model_validate({"head": "preferences", **sizes})
    built = task.build(model, 30, Parallel(Axis("tp")), None).double()
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    hidden = on_one_stage(built, built.architecture.units).hidden
    batch = task.random_batch(model, 4, 30, separate_documents=False)
    said = task.log_probs(built, batch, hidden)
    assert said is not None

    def evaluated(batch: PreferenceBatch, hidden: Hidden = hidden) -> Preferred:
        return task.evaluate(
            built, [batch], dp=Axis("dp"), pp=Axis("pp"), hidden=hidden, byte_lengths=None, tokenizer_checked=True
        )

    found = evaluated(replace(batch, reference=said[0]))
    assert (found.reward_accuracy, found.reward_margin, found.pairs) == (0.0, 0.0, 4)
    gained = torch.tensor([[2.0, 1.0], [1.0, 1.0], [1.0, 3.0], [4.0, 0.0]], dtype=torch.float64)
    found = evaluated(replace(batch, reference=said[0] - gained))
    rewards = [value / batch.options[0, 0].item() for value in (found.chosen_reward, found.rejected_reward)]
    assert found.reward_accuracy == 0.5 and rewards == pytest.approx([2.0, 1.25])
    assert found.reward_margin == pytest.approx(found.chosen_reward - found.rejected_reward)
    two = torch.tensor([1.0, 0.0, 0.0, 1.0])  # the others only fill up the batch
    found = evaluated(replace(batch, reference=said[0] - gained, pair_mask=two))
    rewards = [value / batch.options[0, 0].item() for value in (found.chosen_reward, found.rejected_reward)]
    assert (found.reward_accuracy, found.pairs) == (1.0, 2) and rewards == pytest.approx([3.0, 0.5])
    with pytest.raises(DataError, match="no pair of answers"):  # a stage without the head counts none
        evaluated(batch, hidden=lambda inputs: None)


def test_metrics_tell_each_reward_by_its_name() -> None:
    found = Preferred(0.5, 0.25, 0.3, chosen_reward=0.4, rejected_reward=0.1, pairs=1200)
    rewards = {"reward_accuracy": 0.25, "reward_margin": 0.3, "chosen_reward": 0.4, "rejected_reward": 0.1}
    assert found.numbers() == {"loss": 0.5, **rewards}
    told = "loss 0.5000: the preferred answer has gained more in 25.00% of 1,200 pairs, by 0.3000 on average"
    assert found.summary() == told
