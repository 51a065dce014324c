"""What is read of a published folder."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from colonnade.huggingface.folder import Published, ids_in, labels_of


@pytest.mark.parametrize(
    ("named", "labels"),
    [
        ({"0": "no", "1": "yes"}, ("no", "yes")),
        ({"1": "yes", "0": "no"}, ("no", "yes")),
        ({"0": "no"}, ()),
        ({"0": "no", "1": None}, ()),
        (["no", "yes"], ()),
        (None, ()),
    ],
)
def test_labels_have_names_where_each_has_one(named: object, labels: tuple[str, ...]) -> None:
    """In the order of their ids."""
    model: Any = SimpleNamespace(head="classification", num_labels=2)
    assert labels_of({"id2label": named}, model) == labels
    assert labels_of({"id2label": named}, cast(Any, SimpleNamespace(head="choice", num_labels=2))) == ()


@pytest.mark.parametrize(
    ("said", "ids"), [(3, [3]), ([3, 5], [3, 5]), (None, []), ("3", []), ([3, "5"], []), (True, [])]
)
def test_one_token_may_end_a_text_or_several(said: object, ids: list[int]) -> None:
    assert ids_in(said) == ids


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
