"""What a rank of a whole configuration will take."""

import torch

from colonnade.config.schema import Config
from colonnade.planner.machine import machine_of
from colonnade.planner.memory import Memory, rank_memory


def predict(config: Config, vocab_size: int, *, stage: int, device: torch.device) -> Memory:
    """What the planner says of a rank of this stage on this kind of device."""
    return rank_memory(
        config.model,
        config.parallel,
        config.train,
        vocab_size=vocab_size,
        stage=stage,
        machine=machine_of(device.type, config.train.precision),
        separate_documents=config.data.documents == "separate",
    )
