"""What a rank of a whole configuration will take."""

import torch

from colonnade.architecture.parts import trained_architecture
from colonnade.config.schema import Config
from colonnade.kernels.choice import Products
from colonnade.planner.memory import Memory, rank_memory
from colonnade.planner.stand_in import device_of
from colonnade.planner.teacher import with_teacher


def predict(
    config: Config, vocab_size: int, *, stage: int, device: torch.device, products: Products | None = None
) -> Memory:
    """What the planner says of a rank of this stage on this kind of device. `products`: the kernels (None: the usual
    ones).
    """
    alone = rank_memory(
        config.model,
        config.parallel,
        config.train,
        vocab_size=vocab_size,
        stage=stage,
        device=device_of(device.type),
        separate_documents=config.data.documents == "separate",
        products=products,
        architecture=trained_architecture(config, vocab_size),
    )
    return with_teacher(alone, config, vocab_size, stage=stage, device=device_of(device.type))
