"""Where a model's thermometers are: sites of units, and parts with gradients. Pure; in the order of the model.

    unit                    sites
    embedding               embedding
    block                   attention_logits, attention_output, (cross_attention_… of a decoder,) mlp_hidden,
                            residual_stream
    embedding of a decoder  embedding; final_norm: the encoder's
    head                    final_norm, where there is one and it sees every token

Every rank lists all of them, those of other stages too, so that one exchange puts a whole model together.
"""

from collections.abc import Collection, Iterator

from colonnade.architecture.statement import Architecture, Unit
from colonnade.config.model import ModelConfig
from colonnade.config.thermometers import ALL_SITES
from colonnade.errors import ConfigError

EMBEDDING, LOGITS, OUTPUT, MLP_HIDDEN, STREAM, FINAL_NORM, GRADIENTS, UPDATES = ALL_SITES
CROSS = "cross_"
"""What the names of sites begin with that are of a decoder's attention to the memory."""

Site = tuple[str, str]
"""A unit's name, and a site's."""


def sites(model: ModelConfig, architecture: Architecture, chosen: Collection[str] = ALL_SITES) -> tuple[Site, ...]:
    """The model's sites, of those that are chosen (`thermometers.sites`)."""
    every = ((unit.name, site) for unit in architecture.units for site in _of(model, unit))
    return tuple((unit, site) for unit, site in every if site.removeprefix(CROSS) in chosen)


def check_sites(model: ModelConfig, architecture: Architecture, chosen: Collection[str]) -> None:
    """ConfigError where a model has none of what is chosen; all names stand for all that it has."""
    there = [*dict.fromkeys(site.removeprefix(CROSS) for _, site in sites(model, architecture)), GRADIENTS, UPDATES]
    lacking = [name for name in chosen if name not in there]
    if lacking and set(chosen) != set(ALL_SITES):
        raise ConfigError(
            f"thermometers.sites has {lacking[0]}, and this model has no such site. Leave it out; there are "
            f"{', '.join(there)}."
        )


def parts(architecture: Architecture, chosen: Collection[str] = ALL_SITES) -> tuple[str, ...]:
    """The buckets in which something is trained; none where neither their gradients nor their updates are chosen."""
    if GRADIENTS not in chosen and UPDATES not in chosen:
        return ()
    return tuple(
        name for name, weights in architecture.buckets.items() if not all(weight.is_frozen for weight in weights)
    )


def _of(model: ModelConfig, unit: Unit) -> Iterator[str]:
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
