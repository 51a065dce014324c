"""Which combinations are run: a set in which every valid pair of values occurs, and the list of all of them. Pure.

A combination is a value for each factor. Only some factors decide whether a combination can be: the *core*. Whatever
the others are, `colonnade.config.check` says the same (a test makes sure), so that valid pairs can be counted:

    core      tp · pp · dp · schedule · micro-batch size      every valid one is listed
    free      all other factors                               any values go with any core

The covering set is made greedily: a pair that has not occurred is put down first, and the core and the free values that
bring the most other new pairs are put around it. A handful of its combinations already has every value.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, product
from types import MappingProxyType
from typing import Any

from colonnade.config.check import check
from tests.parity.runs import Case, Job, Way, configured

MOST_RANKS = 8
CORE: Mapping[str, Sequence[Any]] = MappingProxyType(
    {
        "tp": (1, 2, 4),
        "pp": (1, 2, 4),
        "dp": (1, 2, 4),
        "schedule": ("naive", "gpipe", "1f1b", "interleaved", "zero_bubble"),
        "micro_batch_size": (1, 2),
    }
)
FREE: Mapping[str, Sequence[Any]] = MappingProxyType(
    {
        "sequence_parallel": (False, True),
        "zero": (0, 1, 2, 3),
        "recompute": ("none", "selective", "full", "full, every 2"),
        "partition": ("layers", "parameters", "cuts"),
        "optimizer": ("adamw", "lamb"),
        "tied": (True, False),
        "drop": (0.0, 0.1),
        "position": ("learned", "alibi"),
        "norm_position": ("pre", "post"),
        "embedding_norm": (False, True),
        "vocab_size": (37, 3, 40),  # no tp divides 37; of 3 tokens, the last of four tp ranks has none
        "clipped": (True, False),
        "mask": ("differ", "second_half", "none"),
        "block": ("gpt", "llama", "grouped", "window", "bert", "t5", "neox"),
        "documents": ("joined", "separate"),
        "parts": ("all", "upper", "lower", "table", "factors", "lora"),
    }
)
FACTORS: Mapping[str, Sequence[Any]] = MappingProxyType({**CORE, **FREE})
Combination = dict[str, Any]
Values = frozenset[tuple[str, Any]]
"""Some factors with a value each: one of them, or a pair."""


def job(combination: Mapping[str, Any]) -> Job:
    """The case and the way that a combination stands for.

    interleaved has two virtual stages. There are as many layers as the pipeline needs, and two at least.
    """
    given = dict(combination)
    recompute, _, every = given.pop("recompute").partition(", every ")
    virtual_stages = 2 if given["schedule"] == "interleaved" else 1
    num_chunks = given["pp"] * virtual_stages
    num_layers = max(2, num_chunks - 2)
    how = {name: given.pop(name) for name in [*given] if name in Way.__dataclass_fields__}
    case = Case(**given, num_layers=num_layers)
    if how.pop("partition") == "cuts":
        how["cuts"] = uneven_cuts(case.model.num_units, num_chunks)
    how |= {"virtual_stages": virtual_stages, "recompute": recompute, "recompute_every": int(every or 1)}
    return case, Way(**how)


def uneven_cuts(num_units: int, num_chunks: int) -> tuple[int, ...]:
    """One unit in every chunk but the first, which has the rest."""
    return (num_units - num_chunks + 1, *[1] * (num_chunks - 1))


def is_valid(combination: Mapping[str, Any]) -> bool:
    """Whether there are enough ranks, and the configuration is one that runs."""
    case, way = job(combination)
    return way.layout.num_ranks <= MOST_RANKS and not check(configured(case, way))


@cache
def cores() -> tuple[Combination, ...]:
    """Every valid combination of the core's values."""
    first = {name: values[0] for name, values in FREE.items()}
    every = (dict(zip(CORE, values, strict=True)) for values in product(*CORE.values()))
    return tuple(core for core in every if is_valid({**first, **core}))


def valid_values(strength: int, names: Sequence[str] = tuple(FACTORS)) -> set[Values]:
    """Every choice of `strength` of the factors `names`, and their values, that some valid combination has."""
    found = set()
    for chosen in combinations(names, strength):
        within = {frozenset((name, core[name]) for name in chosen if name in CORE) for core in cores()}
        free = [[(name, value) for value in FREE[name]] for name in chosen if name in FREE]
        found |= {values | set(rest) for values in within for rest in product(*free)}
    return found


def subsets(combination: Mapping[str, Any], strength: int) -> Iterator[Values]:
    """Every `strength` of a combination's values."""
    return (frozenset(chosen) for chosen in combinations(combination.items(), strength))


@cache
def handful() -> tuple[Combination, ...]:
    """A few combinations of the covering set in which every value of every factor occurs."""
    missing, chosen = valid_values(1), []
    while missing:
        best = max(covering(), key=lambda combination: len(missing & {*subsets(combination, 1)}))
        missing -= {*subsets(best, 1)}
        chosen.append(best)
    return tuple(chosen)


@cache
def covering(strength: int = 2, names: tuple[str, ...] = tuple(FACTORS)) -> tuple[Combination, ...]:
    """Combinations in which every valid choice of `strength` values of the factors `names` occurs: 2 for pairs.

    `names` has the whole core. Factors that are not among them change from combination to combination.
    """
    missing = dict.fromkeys(sorted(valid_values(strength, names), key=_in_order))  # a set that keeps its order
    chosen: list[Combination] = []
    while missing:
        best = _best(next(iter(missing)), missing, strength, names)
        for values in subsets(best, strength):
            missing.pop(values, None)
        chosen.append({name: {**cycled(len(chosen)), **best}[name] for name in FACTORS})
    return tuple(chosen)


def cycled(number: int) -> Combination:
    """Values of the free factors that change with `number`, the later ones more slowly."""
    return {name: values[number // (place + 1) % len(values)] for place, (name, values) in enumerate(FREE.items())}


def _in_order(values: Values) -> list[tuple[int, int]]:
    """By the places of the factors and of their values."""
    names = list(FACTORS)
    return sorted((names.index(name), FACTORS[name].index(value)) for name, value in values)


def _best(seed: Values, missing: Mapping[Values, None], strength: int, names: Sequence[str]) -> Combination:
    """Around `seed`, the values that bring the most of what is missing; the fewest ranks of equals."""
    start = dict(seed)
    free = [name for name in names if name in FREE]
    candidates = [
        _filled({**core, **start}, free, missing, strength)
        for core in cores()
        if all(start.get(name, value) == value for name, value in core.items())
    ]

    def merit(candidate: Combination) -> tuple[int, int]:
        new = sum(values in missing for values in subsets(candidate, strength))
        return new, -candidate["tp"] * candidate["pp"] * candidate["dp"]

    return max(candidates, key=merit)


def _filled(
    combination: Combination, free: Sequence[str], missing: Mapping[Values, None], strength: int
) -> Combination:
    """One factor after the other gets the value that brings the most missing values."""
    filled = dict(combination)
    for name in free:
        if name not in filled:
            filled[name] = max(FREE[name], key=lambda value: _gain(filled, (name, value), missing, strength))
    return filled


def _gain(combination: Combination, new: tuple[str, Any], missing: Mapping[Values, None], strength: int) -> int:
    """How many missing values come in with `new`."""
    return sum(frozenset((*chosen, new)) in missing for chosen in combinations(combination.items(), strength - 1))
