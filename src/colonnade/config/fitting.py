"""The best layout of a run for a number of ranks: for those that are left when some are lost. Pure.

A run's result does not depend on its layout, so any that the checks admit will do. Of these the best is

    1. one whose ranks hold no more of the model's state than they did before, or as little more as can be
    2. of those the fastest: ranks × the share of a step in which a pipeline's stages are at work × how even they are
    3. of those the nearest to the layout of the configuration

tp only shrinks, to divisors of what it was: it was chosen for the links inside a machine. The global batch stays what
it is by now; the micro-batch may shrink where it no longer divides a rank's share.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from colonnade.config.check import check
from colonnade.config.describe import as_toml
from colonnade.config.numbers import counted, divisors
from colonnade.config.schema import Config

OPTIMIZER = 2  # of a weight's state, in units of the weight: the two moments
KEYS = ("tp", "pp", "dp", "schedule", "virtual_stages", "cuts")


@dataclass(frozen=True)
class Fit:
    """A configuration that runs on so many ranks, and why it is this one."""

    config: Config
    reason: str

    @property
    def num_ranks(self) -> int:
        return self.config.parallel.num_ranks

    def overrides(self, before: Config) -> list[str]:
        """What turns `before` into it, on a command line."""
        now, then = self.config.parallel, before.parallel
        different = [key for key in KEYS if getattr(now, key) != getattr(then, key)]
        changed = [f"parallel.{key}={as_toml(getattr(now, key))}" for key in different]
        micro = self.config.train.micro_batch_size
        return changed + [f"train.micro_batch_size={micro}"] * (micro != before.train.micro_batch_size)


def fitting(config: Config, num_ranks: int, from_now_on: Sequence[Config] = ()) -> Fit:
    """The best layout for at most `num_ranks` ranks, at least 1, of a configuration that is sound.

    `from_now_on`: where the run changes while it goes on, its configuration now, and behind each change to come. The
    layout is one that all of them admit, and that is the best now.
    """
    wanted = config.parallel
    if num_ranks >= wanted.num_ranks:
        return Fit(config, f"the layout of the configuration, {in_words(config)}")
    now = from_now_on[0] if from_now_on else config
    candidates = _candidates(now, range(1, num_ranks + 1), [config, *from_now_on])
    found = min(candidates, key=lambda each: _order(each, now))
    return Fit(_on_the_layout_of(found, config), _reason(found, now, num_ranks))


def exactly(config: Config, num_ranks: int, *, per_node: int) -> Fit | None:
    """The best layout in which all of `num_ranks` ranks have a place, `per_node` of them on a machine, with no tp
    across two of these; None where there is none.
    """
    candidates = _candidates(config, range(num_ranks, num_ranks + 1), [config])
    within = [each for each in candidates if per_node % each.parallel.tp == 0]
    found = min(within, key=lambda each: _order(each, config), default=None)
    return None if found is None else Fit(found, _reason(found, config, num_ranks))


def in_words(config: Config) -> str:
    """tp 2 × pp 1 × dp 2"""
    return f"tp {config.parallel.tp} × pp {config.parallel.pp} × dp {config.parallel.dp}"


def state_share(config: Config) -> Fraction:
    """The share of weights, gradients and moments that a rank holds, where one rank alone holds 1."""
    parallel = config.parallel
    held = [Fraction(1, parallel.dp) if parallel.zero >= stage else Fraction(1) for stage in (1, 2, 3)]
    optimizer, gradients, parameters = held
    return (OPTIMIZER * optimizer + gradients + parameters) / (OPTIMIZER + 2) / (parallel.tp * parallel.pp)


def speed(config: Config) -> Fraction:
    """How many ranks' worth of work is done at a time, as far as the layout alone tells."""
    parallel, units = config.parallel, config.model.num_units
    microbatches = config.train.num_microbatches(parallel.dp)
    filling = Fraction(parallel.pp - 1, parallel.virtual_stages)
    busy = microbatches / (microbatches + filling)
    even = Fraction(units, parallel.pp * -(-units // parallel.pp))
    return parallel.num_ranks * busy * even


def _on_the_layout_of(found: Config, config: Config) -> Config:
    train = config.train.model_copy(update={"micro_batch_size": found.train.micro_batch_size})
    return config.model_copy(update={"parallel": found.parallel, "train": train})


def _candidates(config: Config, num_ranks: range, every: Sequence[Config]) -> Iterator[Config]:
    wanted = config.parallel
    for tp in divisors(wanted.tp):
        for pp in range(1, min(num_ranks[-1] // tp, config.model.num_units) + 1):
            for dp in divisors(config.train.global_batch_size):
                if tp * pp * dp in num_ranks:
                    found = next(_admitted(config, tp, pp, dp, every), None)
                    if found is not None:
                        yield found


def _admitted(config: Config, tp: int, pp: int, dp: int, every: Sequence[Config]) -> Iterator[Config]:
    """Configurations of this layout that pass all checks, the nearest to the given one first; as `every` does on it."""
    wanted, train = config.parallel, config.train
    sizes: dict[str, Any] = {"tp": tp, "pp": pp, "dp": dp}
    ways: list[dict[str, Any]] = [sizes if pp == wanted.pp else {**sizes, "cuts": ()}]
    if wanted.virtual_stages > 1:
        ways.append({**ways[0], "cuts": (), "schedule": "1f1b", "virtual_stages": 1})
    whole = divisors(train.global_batch_size // dp)
    micro_batches = [size for size in reversed(whole) if size <= train.micro_batch_size]
    for way in ways:
        for micro in micro_batches:
            changed = {
                "parallel": wanted.model_copy(update=way),
                "train": train.model_copy(update={"micro_batch_size": micro}),
            }
            found = config.model_copy(update=changed)
            if not any(check(_on_the_layout_of(found, each)) for each in every):
                yield found


def _order(found: Config, config: Config) -> tuple[Any, ...]:
    now, then = found.parallel, config.parallel
    growth = max(Fraction(1), state_share(found) / state_share(config))
    far = (now.tp != then.tp) + (now.pp != then.pp)
    return growth, -speed(found), far, -found.train.micro_batch_size, -now.tp, now.pp


def _reason(found: Config, config: Config, num_ranks: int) -> str:
    used, growth = found.parallel.num_ranks, state_share(found) / state_share(config)
    unused = f", {num_ranks - used} of them idle" if used < num_ranks else ""
    held = f"{float(growth):.3g} times as much state as before" if growth > 1 else "no more state than before"
    batch = f"global batch {config.train.global_batch_size} as before, micro-batches of {found.train.micro_batch_size}"
    return (
        f"{in_words(found)} instead of {in_words(config)} for {counted(num_ranks, 'rank')}{unused}: "
        f"a rank holds {held}; {batch}"
    )
