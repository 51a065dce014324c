"""Every kind of model by the name that `model.kind` gives it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from colonnade.architecture.bert import bert
from colonnade.architecture.gpt import gpt
from colonnade.architecture.statement import Architecture
from colonnade.architecture.t5 import t5
from colonnade.config.model import ModelConfig

FAMILIES: Mapping[str, Callable[[ModelConfig, int], Architecture]] = MappingProxyType(
    {"gpt": gpt, "bert": bert, "t5": t5}
)
"""What states a model, given [model] and the vocabulary's size."""


def architecture_of(model: ModelConfig, vocab_size: int) -> Architecture:
    """The statement of the model that [model] describes."""
    return FAMILIES[model.kind](model, vocab_size)
