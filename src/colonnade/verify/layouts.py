"""Which layouts a configuration is held under: read from text, or chosen for its shape. Pure, and without torch.

    "tp=2,pp=2,schedule=zero_bubble"  ─▶  the configuration with just that in [parallel]
    no layout named                   ─▶  its own, one of each kind that its shape admits, and why others do not fit

A layout's text says all of it: keys of [parallel] that it does not name have their defaults, whatever the file says.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from colonnade.config.check import check
from colonnade.config.check_layout import SIXTEEN_BIT
from colonnade.config.check_model import possible_tp
from colonnade.config.describe import as_toml
from colonnade.config.load import build, value_of
from colonnade.config.numbers import divisors
from colonnade.config.problems import meant_by
from colonnade.config.schema import Config, ParallelConfig
from colonnade.errors import ConfigError

MICRO = "micro_batch_size"
KEYS = (*ParallelConfig.model_fields, MICRO)
LEAST_EPSILON = 1e-6
"""A key's bias adds the same to all scores of a query, which the softmax does not see: its gradient is rounding alone.
AdamW divides it by its own size plus epsilon, so a smaller epsilon would make steps of it that mean nothing and differ
between layouts."""
SIZES = ("tp", "pp", "dp")

Chosen = Mapping[str, Any]


@dataclass(frozen=True)
class Variant:
    """The configuration under one layout."""

    layout: str
    """In words: what the user wrote, or would write."""
    chosen: Chosen
    config: Config


@dataclass(frozen=True)
class LeftOut:
    """A layout that was thought of and does not run."""

    layout: str
    reason: str


@dataclass(frozen=True)
class Capacity:
    """Where to compute; how many ranks may be started there unasked, and why no more."""

    device: Literal["cpu", "cuda"]
    num_ranks: int
    reason: str


# --- text -------------------------------------------------------------------------------------------------------------


def parse(text: str) -> dict[str, Any]:
    """ "pp=2,cuts=[3,1]" -> {"pp": 2, "cuts": [3, 1]}. Raises ConfigError where it is no list of a layout's keys."""
    chosen: dict[str, Any] = {}
    for part in re.split(r",(?![^\[]*\])", text):
        key, equals, value = (each.strip() for each in part.partition("="))
        if not (key and equals and value):
            raise ConfigError(
                f"--layout {text!r} is no layout: {part.strip()!r} is not of the form key=value. Write sizes of tp, pp "
                "and dp, and other keys of [parallel], like tp=2 or pp=2,dp=2,zero=1."
            )
        key = key.removeprefix("parallel.").removeprefix("train.")
        if key not in KEYS:
            raise ConfigError(f"--layout {text!r}: {_no_key(key)}")
        if key in chosen:
            raise ConfigError(f"--layout {text!r} gives {key} twice. Give it once.")
        chosen[key] = value_of(value, f"--layout {text!r}: {key}")
    return chosen


def _no_key(key: str) -> str:
    """Why a word is no key of a layout, and what may be meant."""
    names = [name.split(".")[1] for name in meant_by(key, "parallel") if name.startswith("parallel.")]
    guess = next(iter([*names, *get_close_matches(key, KEYS, n=1)]), None)
    if guess is not None:
        return f"{key} is not a key of a layout: did you mean {guess}?"
    return f"{key} is not a key of a layout. Use keys of [parallel] ({', '.join(KEYS[:-1])}) or {MICRO}."


def text_of(chosen: Chosen) -> str:
    """The inverse of `parse`, in the schema's order; "serial" where nothing is chosen."""
    return ",".join(f"{key}={_value_text(chosen[key])}" for key in KEYS if key in chosen) or "serial"


def _value_text(value: object) -> str:
    return value if isinstance(value, str) else as_toml(value).replace(" ", "")


# --- configurations ---------------------------------------------------------------------------------------------------


def under(base: Config, chosen: Chosen, *, precision: str, source: str) -> Config:
    """The configuration with this layout, in this precision, as it is compared: no evaluations, a sound epsilon.

    Raises ConfigError, headed by `source`, for what cannot be.
    """
    return build(_content(base, chosen, precision), [], source=source)


def serial(base: Config, *, precision: str) -> Config:
    """The configuration on one rank, with every key of [parallel] at its default."""
    return under(base, {}, precision=precision, source="the serial run")


def _content(base: Config, chosen: Chosen, precision: str) -> dict[str, Any]:
    content = base.model_dump(exclude_none=True)
    content["parallel"] = {key: value for key, value in chosen.items() if key != MICRO}
    content["train"] |= {"precision": precision, "evaluate_every": 0}
    content["train"] |= {key: value for key, value in chosen.items() if key == MICRO}
    if precision not in SIXTEEN_BIT:
        content["train"]["reduce_precision"] = "fp32"
    content["optim"]["epsilon"] = max(base.optim.epsilon, LEAST_EPSILON)
    return content


def variant(base: Config, text: str, chosen: Chosen, *, precision: str) -> Variant:
    """The configuration under a layout. Raises ConfigError for one that cannot be."""
    return Variant(
        text, chosen, under(base, chosen, precision=precision, source=f"--layout {text} at --precision {precision}")
    )


def named(base: Config, texts: Sequence[str], *, precision: str) -> list[Variant]:
    """The layouts that a user names, each once. Raises ConfigError with everything that is wrong with any of them."""
    variants, mistakes = [], []
    for text in dict.fromkeys(texts):
        try:
            variants.append(variant(base, text, parse(text), precision=precision))
        except ConfigError as mistake:
            mistakes.append(str(mistake))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return variants


# --- the default set --------------------------------------------------------------------------------------------------


def default_set(base: Config, *, precision: str, capacity: Capacity) -> tuple[list[Variant], list[LeftOut]]:
    """The configuration's own layout and one of each kind, those that fit; the others with the reason."""
    variants, left_out = [], []
    for chosen in _each_once([*_own(base, precision, capacity), *_one_of_each_kind(base)]):
        reason = _reason_against(base, chosen, precision, capacity)
        if reason is None:
            variants.append(variant(base, text_of(chosen), chosen, precision=precision))
        else:
            left_out.append(LeftOut(text_of(chosen), reason))
    return variants, left_out


def _each_once(layouts: Sequence[Chosen]) -> list[Chosen]:
    return list({text_of(chosen): chosen for chosen in layouts}.values())


def _reason_against(base: Config, chosen: Chosen, precision: str, capacity: Capacity) -> str | None:
    """Why this layout is not run; None where it is."""
    config = Config.model_validate(_content(base, chosen, precision))
    problems = check(config)
    if problems:
        return problems[0].message
    if config.parallel.num_ranks > capacity.num_ranks:
        return f"{config.parallel.num_ranks} ranks: {capacity.reason}"
    return None


def _own(base: Config, precision: str, capacity: Capacity) -> Iterator[dict[str, Any]]:
    """The layout in the file, unless it is the serial one; one of more ranks than there is room for also in small."""
    defaults = ParallelConfig()
    own = {key: value for key, value in base.parallel if value != getattr(defaults, key)}
    if precision not in SIXTEEN_BIT:
        own.pop("offload", None)  # of master weights, which only 16-bit training has
    if not own:
        return
    yield own
    if base.parallel.num_ranks > capacity.num_ranks:
        small = {key: min(value, 2) if key in SIZES else value for key, value in own.items() if key != "cuts"}
        dp, pp = small.get("dp", 1), small.get("pp", 1)
        yield small | _micro(base, dp=dp, pp=pp)


def _one_of_each_kind(base: Config) -> Iterator[dict[str, Any]]:
    tp, dp = _smallest_cut(possible_tp(base)), _smallest_cut(divisors(base.train.global_batch_size))
    stages = {"pp": 2, **_micro(base, pp=2)}
    copies = {"dp": dp, **_micro(base, dp=dp)}
    yield {"tp": tp}
    yield {"tp": tp, "sequence_parallel": True}
    yield stages
    yield stages | {"schedule": "interleaved", "virtual_stages": 2}
    yield stages | {"schedule": "zero_bubble"}
    yield copies
    yield from (copies | {"zero": zero} for zero in (1, 2, 3))
    yield {"tp": tp, "pp": 2, "dp": dp, "zero": 1, "sequence_parallel": True, **_micro(base, pp=2, dp=dp)}
    yield {"recompute": "full"}


def _smallest_cut(possible: Sequence[int]) -> int:
    """The smallest size above 1 that is possible; 2, to be refused with a reason, where there is none."""
    return next((size for size in possible if size > 1), 2)


def _micro(base: Config, *, pp: int = 1, dp: int = 1) -> dict[str, int]:
    """The micro-batch size that fills pp stages of dp copies, where the configured one does not; else nothing.

    The largest up to the configured one that gives each rank a multiple of pp micro-batches, twice pp if it can be.
    """
    share, rest = divmod(base.train.global_batch_size, dp)
    configured = base.train.micro_batch_size
    sizes = [size for size in reversed(divisors(share)) if size <= configured] if rest == 0 else []
    whole = [size for size in sizes if (share // size) % pp == 0]
    full = [size for size in whole if share // size >= 2 * pp or pp == 1]
    best = next(iter([*full, *whole, *sizes]), configured)
    return {} if best == configured else {MICRO: best}
