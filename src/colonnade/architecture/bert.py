"""BERT as in the Megatron-LM paper: what `model/bert.py` builds.

unit          buckets that it multiplies with
embedding     embedding.tokens, embedding (positions, token types, embedding norm)
blocks.i      blocks.i
head          head (final norm, masked-LM transform and bias, pooler, sentence order); embedding.tokens where tied

With another `model.head` than that of pre-training, the last unit is a final norm, the pooler and a classifier; with
head spans, a final norm and a linear layer on every position; with head none, a final norm and the pooler.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from colonnade.architecture.block import norm_weights
from colonnade.architecture.stack import output_weights, stacked
from colonnade.architecture.statement import Architecture, Weight
from colonnade.config.model import ModelConfig

LOSSES = ("masked", "sentence_order")
COMMON = ("head.norm.", "head.pooler.")
"""Of the last unit: what every head has."""
LABEL_LOSSES = ("label",)
SPAN_LOSSES = ("span",)


def bert(model: ModelConfig, vocab_size: int) -> Architecture:
    """A model that guesses masked words, and which of two texts came first."""
    h = model.hidden_size
    once = h * h // model.seq_length  # the pooler reads one position
    return stacked(
        model,
        vocab_size,
        token_types=model.token_types,
        head=tuple(_head(model, vocab_size)),
        head_multiply_adds=(vocab_size + h) * h + once,
        losses=LOSSES,
    )


def bert_with_labels(model: ModelConfig, vocab_size: int) -> Architecture:
    """A model that tells which label a text has, or which of several texts is the answer."""
    h, outputs = model.hidden_size, label_outputs(model)
    return stacked(
        model,
        vocab_size,
        token_types=model.token_types,
        head=tuple(_label_head(model, outputs)),
        head_multiply_adds=(h + outputs) * h // model.seq_length,  # it reads one position of each sequence
        losses=LABEL_LOSSES,
    )


def bert_with_spans(model: ModelConfig, vocab_size: int) -> Architecture:
    """A model that tells which run of a text answers a question."""
    return stacked(
        model,
        vocab_size,
        token_types=model.token_types,
        head=tuple(_span_head(model)),
        head_multiply_adds=2 * model.hidden_size,
        losses=SPAN_LOSSES,
    )


def label_outputs(model: ModelConfig) -> int:
    """Logits of a sequence; 0 without a classifier."""
    if model.head == "none":
        return 0
    assert model.num_labels is not None, "the config check asks for it"
    return 1 if model.head == "choice" else model.num_labels


def taken_by_another_head(weights: Iterable[str]) -> set[str]:
    """Of the names of a BERT's weights, those that mean the same whichever `model.head` it has: not its answers."""
    return {name for name in weights if not name.startswith("head.") or name.startswith(COMMON)}


def answers_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two models, each as `config.compare.model_metadata` says it, have a last unit that means the same."""
    if one["head"] != other["head"]:
        return False
    return bool(one["head"] != "classification" or one["num_labels"] == other["num_labels"])


def has_output_layer(model: Mapping[str, Any]) -> bool:
    """Whether a model, as `config.compare.model_metadata` says it, tells tokens."""
    return bool(model["head"] == "pretraining")


def _label_head(model: ModelConfig, outputs: int) -> Iterator[Weight]:
    h, std = model.hidden_size, model.init_std
    if model.norm_position == "pre":
        yield from norm_weights("norm", model)
    yield from _linear("pooler", model, Weight("weight", (h, h), cut=0, std=std))
    if outputs:
        yield from _linear("classifier", model, Weight("weight", (outputs, h), cut=1, std=std))


def _span_head(model: ModelConfig) -> Iterator[Weight]:
    if model.norm_position == "pre":
        yield from norm_weights("norm", model)
    yield from _linear("spans", model, Weight("weight", (2, model.hidden_size), std=model.init_std))


def _head(model: ModelConfig, vocab_size: int) -> Iterator[Weight]:
    """In the order of the module tree."""
    h, std = model.hidden_size, model.init_std
    yield Weight("bias", (vocab_size,), cut=0, is_vocabulary=True)
    yield from output_weights(model, vocab_size)
    yield from _linear("dense", model, Weight("weight", (h, h), std=std))
    yield from norm_weights("dense_norm", model)
    yield from _linear("pooler", model, Weight("weight", (h, h), cut=0, std=std))
    yield from _linear("order", model, Weight("weight", (2, h), cut=1, std=std))


def _linear(name: str, model: ModelConfig, weight: Weight) -> Iterator[Weight]:
    yield weight._replace(name=f"{name}.weight")
    if model.bias:
        yield Weight(f"{name}.bias", weight.shape[:1], cut=0 if weight.cut == 0 else None)
