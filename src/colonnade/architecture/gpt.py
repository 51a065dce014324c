"""GPT-2 as in the Megatron-LM paper, and its relatives: what `model/gpt.py` builds.

unit          buckets that it multiplies with
embedding     embedding.tokens, embedding (positions, embedding norm)
blocks.i      blocks.i
head          head (norm, untied output layer); embedding.tokens where tied
"""

from colonnade.architecture.block import block_multiply_adds, block_weights, norm_weights
from colonnade.architecture.statement import Architecture, Unit, Weight
from colonnade.config.schema import ModelConfig

TABLE = "embedding.tokens"


def gpt(model: ModelConfig, vocab_size: int) -> Architecture:
    """A left-to-right language model."""
    return stacked(
        model,
        vocab_size,
        embedding=embedding_weights(model),
        head=(
            *(norm_weights("norm", model) if model.norm_position == "pre" else ()),
            *(() if model.tie_embeddings else (table_weight(model, vocab_size)._replace(name="output.weight"),)),
        ),
        head_multiply_adds=vocab_size * model.hidden_size,
        losses=("language_model",),
    )


def stacked(
    model: ModelConfig,
    vocab_size: int,
    *,
    embedding: tuple[Weight, ...],
    head: tuple[Weight, ...],
    head_multiply_adds: int,
    losses: tuple[str, ...],
) -> Architecture:
    """Embedding, blocks and a head (`model/stack.py`), given what first and last have besides the token table."""
    layers = range(model.num_layers)
    buckets = {
        TABLE: (table_weight(model, vocab_size),),
        "embedding": embedding,
        **{f"blocks.{layer}": block_weights(model) for layer in layers},
        "head": head,
    }
    buckets = {name: weights for name, weights in buckets.items() if weights}

    def own(name: str) -> tuple[str, ...]:
        return (name,) if name in buckets else ()

    block = block_multiply_adds(model)
    tied = (TABLE,) if model.tie_embeddings else ()
    units = (
        Unit("embedding", "embedding", (TABLE, *own("embedding")), 0),
        *(Unit(f"blocks.{layer}", "block", own(f"blocks.{layer}"), block, recomputes=True) for layer in layers),
        Unit("head", "head", (*tied, *own("head")), head_multiply_adds, losses=losses),
    )
    return Architecture(units, buckets)


def table_weight(model: ModelConfig, vocab_size: int) -> Weight:
    """A row per token."""
    return Weight("weight", (vocab_size, model.hidden_size), cut=0, std=model.init_std, is_vocabulary=True)


def embedding_weights(model: ModelConfig) -> tuple[Weight, ...]:
    """What the embedding has besides the token table."""
    h = model.hidden_size
    positions = Weight("positions.weight", (model.seq_length, h), std=model.init_std)
    return (
        *((positions,) if model.position == "learned" else ()),
        *(norm_weights("norm", model) if model.embedding_norm else ()),
    )
