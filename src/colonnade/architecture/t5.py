"""T5, an encoder and a decoder: what `model/t5.py` builds.

unit                buckets that it multiplies with
embedding           embedding.tokens
encoder.blocks.i    encoder.positions, encoder.blocks.i
decoder.embedding   embedding.tokens, encoder.norm
decoder.blocks.i    decoder.positions, decoder.blocks.i
head                head (norm, untied output layer); embedding.tokens where tied

Initial weights are those of the published code, of standard deviations that let attention do without a factor 1/√d:
a row of queries d^-½ narrower than one of keys. What the untied output layer begins with is that of T5X,
hidden_size^-½, as its input is not scaled.

Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020.
"""

from collections.abc import Iterator
from math import prod

from colonnade.architecture.block import norm_weights
from colonnade.architecture.stack import TABLE, table_weight
from colonnade.architecture.statement import Architecture, Sublayer, Unit, Weight
from colonnade.config.model import ModelConfig

LOSSES = ("language_model",)
POSITIONS = ("encoder.positions", "decoder.positions")
MEMORY_NORM = "encoder.norm"


def t5(model: ModelConfig, vocab_size: int) -> Architecture:
    """A model that reads a text and writes another."""
    encoder = [f"encoder.blocks.{layer}" for layer in range(model.num_layers)]
    decoder = [f"decoder.blocks.{layer}" for layer in range(model.decoder_layers)]
    first, second = POSITIONS
    buckets = {
        TABLE: (table_weight(model, vocab_size),),
        first: _positions(model),
        **{name: _block(model, decodes=False) for name in encoder},
        MEMORY_NORM: _norm(model),
        second: _positions(model),
        **{name: _block(model, decodes=True) for name in decoder},
        "head": (*norm_weights("norm", model), *_output(model, vocab_size)),
    }
    return Architecture(tuple(_units(model, vocab_size, encoder, decoder)), buckets)


def _units(model: ModelConfig, vocab_size: int, encoder: list[str], decoder: list[str]) -> Iterator[Unit]:
    s, t, h = model.seq_length, model.decoder_length, model.hidden_size
    first, second = POSITIONS
    yield Unit("embedding", "embedding", (TABLE,), 0, reads_tokens=True, length=s)
    for layer, name in enumerate(encoder):
        yield Unit(
            name,
            "encoder block",
            (first, name),
            _encoder_multiply_adds(model),
            layer=layer,
            recomputes=True,
            length=s,
            takes=(s,),
            sublayers=(Sublayer("attention"), Sublayer("mlp")),
        )
    yield Unit(
        "decoder.embedding",
        "decoder embedding",
        (TABLE, MEMORY_NORM),
        0,
        reads_tokens=True,
        stack=1,
        length=t,
        takes=(s,),
    )
    for layer, name in enumerate(decoder, model.num_layers):
        yield Unit(
            name,
            "decoder block",
            (second, name),
            _decoder_multiply_adds(model),
            layer=layer,
            stack=1,
            recomputes=True,
            length=t,
            takes=(t, s),
            sublayers=(Sublayer("attention"), Sublayer("cross", memory=s), Sublayer("mlp")),
        )
    tied = (TABLE,) if model.tie_embeddings else ()
    head = vocab_size * h * t // s
    yield Unit("head", "head", (*tied, "head"), head, stack=1, length=t, takes=(t, s), losses=LOSSES)


def _block(model: ModelConfig, *, decodes: bool) -> tuple[Weight, ...]:
    """In the order of the module tree."""
    return (
        *norm_weights("attention_norm", model),
        *_attention(model, "attention"),
        *((*norm_weights("cross_norm", model), *_attention(model, "cross")) if decodes else ()),
        *norm_weights("mlp_norm", model),
        *_mlp(model),
    )


def _attention(model: ModelConfig, name: str) -> Iterator[Weight]:
    """Queries have a weight of their own: they begin narrower, and keys and values may be of the memory."""
    h, d, std = model.hidden_size, model.head_width, model.init_std
    inner = model.num_heads * d
    yield Weight(f"{name}.query.weight", (inner, h), cut=0, std=std * (h * d) ** -0.5)
    yield Weight(f"{name}.key_value.weight", (2 * inner, h), cut=0, std=std * h**-0.5)
    yield Weight(f"{name}.output.weight", (h, inner), cut=1, std=std * inner**-0.5)


def _mlp(model: ModelConfig) -> Iterator[Weight]:
    h, f, std = model.hidden_size, model.ffn, model.init_std
    for name in ("mlp.gate", "mlp.up") if model.is_gated else ("mlp.up",):
        yield Weight(f"{name}.weight", (f, h), cut=0, std=std * h**-0.5)
    yield Weight("mlp.down.weight", (h, f), cut=1, std=std * f**-0.5)


def _positions(model: ModelConfig) -> tuple[Weight, ...]:
    """A number for each range of distances and each head: what all blocks of a stack add to scores."""
    shape, std = (model.relative_buckets, model.num_heads), model.init_std * model.hidden_size**-0.5
    return (Weight("weight", shape, cut=1, std=std),)


def _norm(model: ModelConfig) -> tuple[Weight, ...]:
    return (Weight("weight", (model.hidden_size,), fill=1.0),)


def _output(model: ModelConfig, vocab_size: int) -> tuple[Weight, ...]:
    if model.tie_embeddings:
        return ()
    table = table_weight(model, vocab_size)
    return (table._replace(name="output.weight", std=model.init_std * model.hidden_size**-0.5),)


def _linear(model: ModelConfig, *, decodes: bool) -> dict[str, int]:
    """Elements of a block's matrices, which is multiply-adds for each token: those of the memory, and the others."""
    found = {"memory": 0, "own": 0}
    for weight in _block(model, decodes=decodes):
        if len(weight.shape) == 2:
            found["memory" if weight.name == "cross.key_value.weight" else "own"] += prod(weight.shape)
    return found


def _encoder_multiply_adds(model: ModelConfig) -> int:
    """For each token that the encoder reads: linear layers, and both products of attention."""
    return _linear(model, decodes=False)["own"] + 2 * model.num_heads * model.head_width * model.seq_length


def _decoder_multiply_adds(model: ModelConfig) -> int:
    """The same, with the decoder's tokens spread over those that the encoder reads: attention to itself is half of a
    square, that to the memory a rectangle.
    """
    s, t, inner = model.seq_length, model.decoder_length, model.num_heads * model.head_width
    linear = _linear(model, decodes=True)
    a_token = linear["own"] + 2 * inner * t // 2 + 2 * inner * s
    return (a_token * t + linear["memory"] * s) // s
