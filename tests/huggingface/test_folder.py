"""What is read of a published folder."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from colonnade.huggingface.folder import Published


def test_a_models_number_format_is_that_of_most_of_its_numbers() -> None:
    kinds = {
        "norm": (torch.float32, 8),
        "up": (torch.bfloat16, 64),
        "down": (torch.bfloat16, 64),
        "scale": (torch.float64, 1),
    }
    sources: Any = {
        name: SimpleNamespace(weight=SimpleNamespace(size=n), theirs=(name,)) for name, (_, n) in kinds.items()
    }
    stored: Any = {name: SimpleNamespace(dtype=dtype) for name, (dtype, _) in kinds.items()}
    nothing: Any = None
    published = Published(Path("folder"), nothing, nothing, 10, sources, stored)
    assert published.dtype == torch.bfloat16 and published.dtype_of("norm") == torch.float32
