"""Where a model's thermometers are: sites of units, and parts with gradients. Pure; in the order of the model.

    unit                    sites
    embedding               embedding
    block                   attention_logits, attention_output, (cross_attention_… of a decoder,) mlp_hidden,
                            residual_stream
    embedding of a decoder  embedding; final_norm: the encoder's
    head                    final_norm, where there is one and it sees every token

Every rank lists all of them, those of other stages too, so that one exchange puts a whole model together.
"""

from collections.abc import Iterator

from colonnade.architecture.statement import Architecture, Unit
from colonnade.config.model import ModelConfig

EMBEDDING, STREAM, FINAL_NORM, MLP_HIDDEN = "embedding", "residual_stream", "final_norm", "mlp_hidden"
LOGITS, OUTPUT = "attention_logits", "attention_output"
CROSS = "cross_"
"""What the names of sites begin with that are of a decoder's attention to the memory."""

Site = tuple[str, str]
"""A unit's name, and a site's."""


def sites(model: ModelConfig, architecture: Architecture) -> tuple[Site, ...]:
    """Every site of the model."""
    return tuple((unit.name, site) for unit in architecture.units for site in _of(model, architecture, unit))


def parts(architecture: Architecture) -> tuple[str, ...]:
    """The buckets in which something is trained."""
    return tuple(
        name for name, weights in architecture.buckets.items() if not all(weight.is_frozen for weight in weights)
    )


def _of(model: ModelConfig, architecture: Architecture, unit: Unit) -> Iterator[str]:
    if unit.reads_tokens:
        yield EMBEDDING
        if not unit.is_first:
            yield FINAL_NORM
    for sublayer in unit.sublayers:
        if sublayer.name == "mlp":
            yield MLP_HIDDEN
            continue
        of_memory = CROSS if sublayer.memory else ""
        yield of_memory + LOGITS
        yield of_memory + OUTPUT
    if unit.sublayers:
        yield STREAM
    one_position = model.head in ("classification", "choice")
    if unit.is_loss and model.norm_position == "pre" and not one_position:
        yield FINAL_NORM
