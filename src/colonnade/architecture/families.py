"""Every kind of model by what `model.kind` and `model.head` say."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from colonnade.architecture.bert import bert, bert_with_labels, bert_with_spans
from colonnade.architecture.gpt import gpt
from colonnade.architecture.statement import Architecture
from colonnade.architecture.t5 import t5
from colonnade.config.model import ModelConfig

FAMILIES: Mapping[tuple[str, str], Callable[[ModelConfig, int], Architecture]] = MappingProxyType(
    {
        ("gpt", "pretraining"): gpt,
        ("gpt", "preferences"): gpt,
        ("bert", "pretraining"): bert,
        ("bert", "classification"): bert_with_labels,
        ("bert", "choice"): bert_with_labels,
        ("bert", "spans"): bert_with_spans,
        ("bert", "none"): bert_with_labels,
        ("t5", "pretraining"): t5,
    }
)
"""What states a model, given [model] and the vocabulary's size."""


def architecture_of(model: ModelConfig, vocab_size: int) -> Architecture:
    """The statement of the model that [model] describes."""
    return FAMILIES[model.kind_and_head](model, vocab_size)
