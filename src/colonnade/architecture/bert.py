"""BERT as in the Megatron-LM paper: what `model/bert.py` builds.

unit          buckets that it multiplies with
embedding     embedding.tokens, embedding (positions, token types, embedding norm)
blocks.i      blocks.i
head          head (final norm, masked-LM transform and bias, pooler, sentence order); embedding.tokens where tied
"""

from collections.abc import Iterator

from colonnade.architecture.block import norm_weights
from colonnade.architecture.gpt import embedding_weights, stacked, table_weight
from colonnade.architecture.statement import Architecture, Weight
from colonnade.config.schema import ModelConfig

LOSSES = ("masked", "sentence_order")


def bert(model: ModelConfig, vocab_size: int) -> Architecture:
    """A model that guesses masked words, and which of two texts came first."""
    h = model.hidden_size
    once = h * h // model.seq_length  # the pooler reads one position
    return stacked(
        model,
        vocab_size,
        embedding=_embedding(model),
        head=tuple(_head(model, vocab_size)),
        head_multiply_adds=(vocab_size + h) * h + once,
        losses=LOSSES,
    )


def _embedding(model: ModelConfig) -> tuple[Weight, ...]:
    types = Weight("types.weight", (model.token_types, model.hidden_size), std=model.init_std)
    positions = [weight for weight in embedding_weights(model) if weight.name.startswith("positions")]
    return (*positions, types, *(norm_weights("norm", model) if model.embedding_norm else ()))


def _head(model: ModelConfig, vocab_size: int) -> Iterator[Weight]:
    """In the order of the module tree."""
    h, std = model.hidden_size, model.init_std
    yield Weight("bias", (vocab_size,), cut=0, is_vocabulary=True)
    if model.norm_position == "pre":
        yield from norm_weights("norm", model)
    yield from _linear("dense", model, Weight("weight", (h, h), std=std))
    yield from norm_weights("dense_norm", model)
    if not model.tie_embeddings:
        yield table_weight(model, vocab_size)._replace(name="output.weight")
    yield from _linear("pooler", model, Weight("weight", (h, h), cut=0, std=std))
    yield from _linear("order", model, Weight("weight", (2, h), cut=1, std=std))


def _linear(name: str, model: ModelConfig, weight: Weight) -> Iterator[Weight]:
    yield weight._replace(name=f"{name}.weight")
    if model.bias:
        yield Weight(f"{name}.bias", weight.shape[:1], cut=0 if weight.cut == 0 else None)
