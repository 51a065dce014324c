"""A micro-batch of no text, of the sizes of a run's: what units read when they are counted or timed."""

import torch

from colonnade.config.schema import ModelConfig, TrainConfig
from colonnade.model.dropout import Masks
from colonnade.model.gpt import Inputs


def example_inputs(
    model: ModelConfig, train: TrainConfig, vocab_size: int, device: torch.device, *, separate_documents: bool = False
) -> Inputs:
    """Random tokens, all of which count in the loss. `separate_documents`: tokens do not see other documents."""
    shape = model.seq_length, train.micro_batch_size
    tokens = torch.randint(0, vocab_size, shape).to(device)
    weights = torch.full(shape, 1.0 / tokens.numel(), dtype=torch.float64).to(device)
    masks = Masks(train.seed, torch.arange(train.micro_batch_size).numpy())
    documents = torch.zeros_like(tokens) if separate_documents else None
    return Inputs(tokens, tokens, weights, masks, documents=documents, positions=documents)
