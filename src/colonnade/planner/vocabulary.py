"""The vocabulary's size without opening the data."""

from colonnade.config.model import ModelConfig
from colonnade.config.schema import DataConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError


def vocab_size(model: ModelConfig, data: DataConfig) -> int:
    """[tokens] model.vocab_size, or the tokenizer's. Raises ConfigError where neither is set."""
    if model.vocab_size is not None:
        return model.vocab_size
    if data.tokenizer is None:
        raise ConfigError(
            "The vocabulary's size is unknown: neither model.vocab_size nor data.tokenizer is set, and it decides how "
            "heavy the embedding and the head are. Set model.vocab_size, here for instance model.vocab_size=50257."
        )
    return Tokenizer.load(data.tokenizer).vocab_size
