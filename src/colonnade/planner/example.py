"""A micro-batch of no text, of the sizes of a run's: what units read when they are counted or timed."""

import torch

from colonnade.config.model import ModelConfig
from colonnade.config.schema import TrainConfig
from colonnade.model.inputs import Inputs
from colonnade.tasks.tasks import TASKS


def example_inputs(
    model: ModelConfig, train: TrainConfig, vocab_size: int, device: torch.device, *, separate_documents: bool = False
) -> Inputs:
    """Of random tokens. `separate_documents`: tokens do not see other documents."""
    task = TASKS[model.kind_and_head]
    batch = task.random_batch(model, train.micro_batch_size, vocab_size, separate_documents=separate_documents).to(
        device
    )
    return task.inputs(batch, 1.0 / task.counts(batch), train.seed)
