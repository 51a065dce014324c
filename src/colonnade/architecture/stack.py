"""Embedding, blocks and a head, whatever the family: what `model/stack.py` builds."""

from colonnade.architecture.block import block_multiply_adds, block_weights, norm_weights
from colonnade.architecture.statement import Architecture, Sublayer, Unit, Weight
from colonnade.config.model import ModelConfig

TABLE = "embedding.tokens"


def stacked(
    model: ModelConfig,
    vocab_size: int,
    *,
    token_types: int = 0,
    head: tuple[Weight, ...],
    head_multiply_adds: int,
    losses: tuple[str, ...],
) -> Architecture:
    """A whole model, given what its head has besides a tied token table, and how many types tokens have."""
    layers, stream = range(model.num_layers), (model.sample_length,)
    buckets = {
        TABLE: (table_weight(model, vocab_size),),
        "embedding": _embedding(model, token_types),
        **{f"blocks.{layer}": block_weights(model) for layer in layers},
        "head": head,
    }
    buckets = {name: weights for name, weights in buckets.items() if weights}

    def own(name: str) -> tuple[str, ...]:
        return (name,) if name in buckets else ()

    def block(layer: int) -> Unit:
        name = f"blocks.{layer}"
        return Unit(
            name,
            "block",
            own(name),
            block_multiply_adds(model),
            layer=layer,
            recomputes=True,
            length=model.sample_length,
            takes=stream,
            sublayers=(Sublayer("attention"), Sublayer("mlp")),
        )

    tied = (TABLE,) if model.ties_output else ()
    units = (
        Unit("embedding", "embedding", (TABLE, *own("embedding")), 0, reads_tokens=True, length=model.sample_length),
        *map(block, layers),
        Unit(
            "head",
            "head",
            (*tied, *own("head")),
            head_multiply_adds,
            length=model.sample_length,
            takes=stream,
            losses=losses,
        ),
    )
    return Architecture(units, buckets)


def table_weight(model: ModelConfig, vocab_size: int) -> Weight:
    """A row per token."""
    return Weight("weight", (vocab_size, model.hidden_size), cut=0, std=model.init_std, is_vocabulary=True)


def _embedding(model: ModelConfig, token_types: int) -> tuple[Weight, ...]:
    """What the embedding has besides the token table, in the order of the module tree."""
    h, std = model.hidden_size, model.init_std
    return (
        *((Weight("positions.weight", (model.seq_length, h), std=std),) if model.position == "learned" else ()),
        *((Weight("types.weight", (token_types, h), std=std),) if token_types else ()),
        *(norm_weights("norm", model) if model.embedding_norm else ()),
    )


def output_weights(model: ModelConfig, vocab_size: int) -> tuple[Weight, ...]:
    """What every head has: the final norm of pre-norm models, and an output layer that is not tied."""
    table = table_weight(model, vocab_size)._replace(name="output.weight")
    return (
        *(norm_weights("norm", model) if model.norm_position == "pre" else ()),
        *(() if model.tie_embeddings else (table,)),
    )
