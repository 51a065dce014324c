"""Low-rank adapters in a model's statement (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021).

    y = W x + (alpha / rank) · B A x        A [rank, in], B [out, rank]: lora_a and lora_b, behind W in W's own module

W is frozen. Cut over tp, the rank-wide middle is what every rank has whole: where W is cut along its outputs, B is, and
where W is cut along its inputs, A is. A begins as the authors' program begins it, B with zeros.
"""

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from colonnade.architecture.statement import Adapters, Architecture, Unit, Weight
from colonnade.config.check import MASK_ELEMENTS
from colonnade.config.parts import LoraConfig
from colonnade.errors import ConfigError

WEIGHT, LORA_A, LORA_B = ".weight", ".lora_a", ".lora_b"


def is_adapter(name: str) -> bool:
    """Whether this is the logical name of an adapter's weight."""
    return name.endswith((LORA_A, LORA_B))


def with_adapters(architecture: Architecture, lora: LoraConfig) -> Architecture:
    """`architecture` with an adapter beside every weight that [lora] targets, and all else frozen; itself without
    [lora]. ConfigError for targets that match nothing, for a rank that no weight has room for, and for masks of dropout
    that no stream of random numbers has room for.
    """
    if not lora.rank:
        return architecture
    linear = linear_modules(architecture)
    targets = {name for name in linear if any(_matches(name, target) for target in lora.targets)}
    _check_targets(lora, linear)
    _check_rank(lora, {name: weight for name, weight in linear.items() if name in targets})
    _check_masks(lora, architecture, targets)
    buckets = {
        bucket: tuple(_beside(f"{bucket}.", weights, targets, lora.rank))
        for bucket, weights in architecture.buckets.items()
    }
    first = max(1, architecture.units[0].length)

    def longer(unit: Unit) -> Unit:
        added = [weight for bucket in unit.buckets for weight in buckets[bucket] if is_adapter(weight.name)]
        if not added:
            return unit
        kind = unit.other_kind(" ".join(["with", *(weight.name for weight in added)]))
        tokens = sum(weight.size * unit.tokens_of(weight.name) for weight in added)
        return unit._replace(kind=kind, multiply_adds=unit.multiply_adds + tokens // first)

    adapters = Adapters(lora.rank, lora.scale, lora.dropout)
    return replace(architecture, buckets=buckets, units=tuple(map(longer, architecture.units)), adapters=adapters)


def linear_modules(architecture: Architecture) -> dict[str, Weight]:
    """The modules that can have an adapter: linear layers of blocks, with their weights."""
    return {
        f"{bucket}.{weight.name}".removesuffix(WEIGHT): weight
        for unit in architecture.units
        for bucket in unit.buckets
        for weight in architecture.buckets[bucket]
        if len(weight.shape) == 2
        and weight.name.endswith(WEIGHT)
        and weight.name.partition(".")[0] in [sublayer.name for sublayer in unit.sublayers]
    }


def _beside(prefix: str, weights: tuple[Weight, ...], targets: set[str], rank: int) -> Iterator[Weight]:
    """All weights of a bucket, frozen, and behind each that is targeted its adapter: after its bias."""
    for number, weight in enumerate(weights):
        yield weight._replace(is_frozen=True)
        module = weight.name.rpartition(".")[0]
        is_last = number + 1 == len(weights) or weights[number + 1].name.rpartition(".")[0] != module
        if is_last and prefix + module in targets:
            (of,) = (each for each in weights if each.name == module + WEIGHT)
            yield from _adapter(module, of, rank)


def _adapter(module: str, weight: Weight, rank: int) -> Iterator[Weight]:
    out, size = weight.shape
    std = (3.0 * size) ** -0.5  # as wide as the authors' uniform numbers, ±1/√in
    yield Weight(module + LORA_A, (rank, size), cut=1 if weight.cut == 1 else None, std=std)
    yield Weight(module + LORA_B, (out, rank), cut=0 if weight.cut == 0 else None, groups=weight.groups)


def _matches(name: str, target: str) -> bool:
    return fnmatchcase(name, target) or fnmatchcase(name, f"*.{target}")


def _check_targets(lora: LoraConfig, linear: dict[str, Weight]) -> None:
    for target in lora.targets:
        if not any(_matches(name, target) for name in linear):
            first = next(iter(linear), "").rpartition(".")[0].rpartition(".")[0]
            there = [name.removeprefix(f"{first}.") for name in linear if name.startswith(f"{first}.")]
            raise ConfigError(
                f'lora.targets has "{target}", which matches no linear layer of a block. There are {", ".join(there)}, '
                f'each in {first} and the others like it; "*" stands for all of them.'
            )


def _check_rank(lora: LoraConfig, targets: dict[str, Weight]) -> None:
    if not targets:
        raise ConfigError("lora.targets is empty, and lora.rank asks for adapters. Name modules, or set lora.rank = 0.")
    name, weight = min(targets.items(), key=lambda each: min(each[1].shape))
    if lora.rank > min(weight.shape):
        out, size = weight.shape
        raise ConfigError(
            f"lora.rank = {lora.rank} is larger than {name} is: its weight is {out} × {size}, and no product of that "
            f"shape has a rank above {min(weight.shape)}. Use at most that; 4 to 64 are usual."
        )


def _check_masks(lora: LoraConfig, architecture: Architecture, targets: set[str]) -> None:
    read = [
        (unit.tokens_of(weight.name), weight.shape[1], module)
        for unit in architecture.units
        for bucket in unit.buckets
        for weight in architecture.buckets[bucket]
        if (module := f"{bucket}.{weight.name}".removesuffix(WEIGHT)) in targets
    ]
    tokens, features, module = max(read, key=lambda each: each[0] * each[1])
    if lora.dropout and tokens * features > MASK_ELEMENTS:
        raise ConfigError(
            f"lora.dropout = {lora.dropout:g} draws a mask of {tokens:,} positions × {features:,} features for each "
            f"sample, of what the adapter of {module} reads: a stream of random numbers has 2^32 elements. Set "
            f"lora.dropout = 0, leave such modules out of lora.targets, or use sequences of at most "
            f"{MASK_ELEMENTS // features:,} tokens."
        )
