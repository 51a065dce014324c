"""A small configuration that is in order, and ways to break it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.errors import ConfigError

SMALL = """\
[model]
num_layers = 2
hidden_size = 64
num_heads = 4

[data]
train = "corpus"
tokenizer = "tokenizer.json"

[train]
steps = 100
global_batch_size = 24
micro_batch_size = 4

[optim]
learning_rate = 1e-3

[run]
folder = "runs/small"
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


@pytest.fixture
def loaded(small: Path) -> Callable[..., Config]:
    """The small configuration with overrides."""
    return lambda *overrides: load(small, overrides)


@pytest.fixture
def problems(small: Path) -> Callable[..., list[str]]:
    """The problems of the small configuration with overrides, after the line that counts them."""

    def problems_of(*overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(small, overrides)
        count, *lines = str(caught.value).split("\n")
        assert count == f"{small}: {len(lines)} problem{'s' * (len(lines) > 1)}"
        return [line.removeprefix("  - ") for line in lines]

    return problems_of
