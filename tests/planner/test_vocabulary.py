"""The vocabulary's size: what the configuration says, or its tokenizer."""

from pathlib import Path

import pytest

from colonnade.config.model import ModelConfig
from colonnade.config.schema import DataConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError
from colonnade.planner.vocabulary import vocab_size


def test_the_size_that_is_set_counts_before_the_tokenizers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "tokenizer.json")
    data = DataConfig(tokenizer=str(tmp_path / "tokenizer.json"))
    assert vocab_size(ModelConfig(vocab_size=1_000), data) == 1_000 != tokenizer.vocab_size
    assert vocab_size(ModelConfig(), data) == tokenizer.vocab_size
    with pytest.raises(ConfigError, match=r"neither model\.vocab_size nor data\.tokenizer is set"):
        vocab_size(ModelConfig(), DataConfig())
