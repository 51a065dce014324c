"""What of a model is trained, and how: patterns over the names of its weights, written into its statement.

    embedding.tokens.weight   blocks.0.attention.qkv.weight   …   head.norm.weight
    "embedding.*"   "blocks.[0-3].*"   "*.bias"                                      * reaches over points too

Of patterns that match the same weight, the last one that is written counts.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeVar

from colonnade.architecture.adapters import with_adapters
from colonnade.architecture.families import architecture_of
from colonnade.architecture.matching import with_maps
from colonnade.architecture.statement import Architecture, Unit, Weight
from colonnade.config.parts import NOT, PartsConfig
from colonnade.config.schema import Config
from colonnade.errors import ConfigError

T = TypeVar("T")


def trained_architecture(config: Config, vocab_size: int) -> Architecture:
    """The statement of the model that a run trains: with its adapters, with maps to a teacher's hidden states, and
    with what [parts] says.

    ConfigError for patterns that match nothing, and where nothing is left to train.
    """
    adapted = with_adapters(architecture_of(config.model, vocab_size), config.lora)
    return with_parts(with_maps(adapted, config.model, config.distillation), config.parts)


def with_parts(architecture: Architecture, parts: PartsConfig) -> Architecture:
    """`architecture` with what [parts] says of its weights, and what follows for its units."""
    names = list(architecture.weights())
    frozen = [(pattern.removeprefix(NOT), not pattern.startswith(NOT)) for pattern in parts.frozen]
    _check("parts.frozen", (pattern for pattern, _ in frozen), names)
    _check("parts.learning_rate", parts.learning_rate, names)
    _check("parts.weight_decay", parts.weight_decay, names)

    def treated(name: str, weight: Weight) -> Weight:
        return weight._replace(
            is_frozen=_last(frozen, name, weight.is_frozen),
            learning_rate=_last(parts.learning_rate.items(), name, 1.0),
            weight_decay=_last(parts.weight_decay.items(), name, 1.0),
        )

    buckets = _each_weight(architecture, treated)
    if all(weight.is_frozen for weights in buckets.values() for weight in weights):
        raise ConfigError(
            f"parts.frozen = {list(parts.frozen)} freezes all {len(names)} weights of the model: nothing is left to "
            f'train. Leave some out of it, or take some out again with {NOT} in front: "{NOT}head.*".'
        )
    return replace(architecture, buckets=buckets, units=tuple(_flows(architecture.units, buckets)))


def _each_weight(architecture: Architecture, change: Callable[[str, Weight], Weight]) -> dict[str, tuple[Weight, ...]]:
    return {
        bucket: tuple(change(f"{bucket}.{weight.name}", weight) for weight in weights)
        for bucket, weights in architecture.buckets.items()
    }


def _last(patterns: Iterable[tuple[str, T]], name: str, otherwise: T) -> T:
    """What the last pattern that matches says."""
    found = [value for pattern, value in patterns if fnmatchcase(name, pattern)]
    return found[-1] if found else otherwise


def _flows(units: Iterable[Unit], buckets: Mapping[str, tuple[Weight, ...]]) -> Iterator[Unit]:
    """The units, each knowing whether gradients are computed in it and go on to the one before. Where something is
    frozen, units of one kind may take different times: then they are of different kinds.
    """
    before, kinds = False, dict[tuple[object, ...], str]()
    for number, unit in enumerate(units):
        frozen = tuple(weight.is_frozen for bucket in unit.buckets for weight in buckets[bucket])
        is_usual = not any(frozen) and (before or number == 0)
        kind = unit.kind if is_usual else kinds.setdefault((unit.kind, frozen, before), unit.other_kind(len(kinds)))
        has_backward = before or not all(frozen)
        yield unit._replace(kind=kind, has_backward=has_backward, sends_back=before)
        before = has_backward


def _check(key: str, patterns: Iterable[str], names: list[str]) -> None:
    """ConfigError for a pattern that matches no name."""
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f'{key} has "{pattern}", which matches no weight of the model. {nearest(pattern, names)}')


def nearest(pattern: str, names: list[str]) -> str:
    """The names that a pattern without matches may have meant, in a sentence."""
    close = get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:3]
    return f"Nearest to it are {', '.join(close)}; it has to match a whole name, so a * at its end may be missing."
