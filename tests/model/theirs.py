"""Hugging Face's weights in our order."""

import torch
from torch import Tensor


def joined(parts: list[Tensor], head_dim: int) -> Tensor:
    """Rows by head: [head, part, d], of weights and of biases."""
    if len(parts) == 1:
        return parts[0]
    return torch.stack([part.view(-1, head_dim, *part.shape[1:]) for part in parts], 1).flatten(0, 2)
