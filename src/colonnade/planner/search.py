"""The best layout of a model on so many ranks: thousands of candidates, composed from what units cost.

    candidates   tp · pp · schedule and virtual stages · cuts · dp · ZeRO · micro-batch · recomputation · sequence
                 parallelism · offload, of those that `config.check` admits
    cuts         by layers, by parameters, by FLOPs, and by the times that units take; each way of cutting once
    composed     time and memory, put together from what units cost (`compose.py`)
    finalists    the fastest that fit are planned on the real program (`estimate.py`), and, where none of them fits
                 there, those of the front, by halves; then, as long as one is composed to be faster than all of these
                 are, the fastest of each other tp · pp · dp · schedule; the fastest wins

A composed time knows no order of collectives within a step, a composed memory no single moment: both are for ranking.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Any

from colonnade.config.check import check
from colonnade.config.check_model import possible_tp
from colonnade.config.numbers import amount, divisors
from colonnade.config.schema import Config
from colonnade.errors import LayoutError
from colonnade.planner.compose import Composer
from colonnade.planner.cost import Cost
from colonnade.planner.estimate import Estimate, estimate
from colonnade.planner.hardware import Hardware

KEYS = (
    "tp", "pp", "dp", "schedule", "virtual_stages", "partition", "cuts", "zero", "recompute", "recompute_every",
    "sequence_parallel", "offload",
)  # fmt: skip
KEPT = (*(f"parallel.{key}" for key in KEYS if key not in ("partition", "cuts")), "train.micro_batch_size")
"""Keys that a search can leave as they are set."""
MOST_MICRO_BATCH, MOST_VIRTUAL = 16, 4
MOST_TOKENS = 1 << 18
"""Of a micro-batch of several samples: products of so many have long been as fast as they get."""
FINALISTS, MOST_FINALISTS = 3, 12
"""Layouts that are planned on the real program: so many, and at most, where it has them slower than composed."""


@dataclass(frozen=True)
class Candidate:
    """A layout with what it is expected to take."""

    config: Config
    seconds: float
    memory: int
    spent: Mapping[str, float]
    """[s of a step] By what for."""

    @property
    def chosen(self) -> dict[str, Any]:
        """What was tried, by key."""
        found = {key: getattr(self.config.parallel, key) for key in KEYS}
        return {**found, "micro_batch_size": self.config.train.micro_batch_size}

    @property
    def way(self) -> tuple[int, int, int, str]:
        """The sizes of its axes and its schedule: layouts with the same are alike in what their composed times leave
        out.
        """
        parallel = self.config.parallel
        return parallel.tp, parallel.pp, parallel.dp, parallel.schedule

    @property
    def bound(self) -> str:
        return max(self.spent, key=lambda what: self.spent[what])


@dataclass
class Search:
    """What was found."""

    limit: float
    """[bytes] That a rank may take: the memory of a device."""
    fitting: list[Candidate] = field(default_factory=list)
    """The fastest first."""
    least: Candidate | None = None
    """That with the least memory, whether it fits or not."""
    tried: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """How many candidates each reason has refused."""

    @property
    def num_refused(self) -> int:
        """How many cannot be, for all reasons."""
        return sum(self.refused.values())

    @property
    def num_too_large(self) -> int:
        """How many could be, and take more memory than the limit."""
        return self.tried - self.num_refused - len(self.fitting)

    @property
    def front(self) -> list[Candidate]:
        """Those that no other beats in both time and memory: the fastest first."""
        found: list[Candidate] = []
        for each in self.fitting:
            if not found or each.memory < found[-1].memory:
                found.append(each)
        return found


@dataclass(frozen=True)
class Confirmed:
    """The best layout, as the real program has it on paper."""

    candidate: Candidate
    estimate: Estimate
    looked_at: int
    """Layouts that were planned so."""

    @property
    def seconds(self) -> float:
        """[s] Of a step, as composed times have it: without checkpoints."""
        return self.estimate.seconds_per_step - self.estimate.spent.get("checkpoints", 0.0)


def confirmed(
    found: Search, vocab_size: int, hardware: Hardware, *, told: Callable[[int], object] = lambda _: None
) -> Confirmed:
    """The fastest of the finalists that fits. Where none does, the fastest of the front that fits, which is looked for
    by halves. `told`: how many have been planned, before each. Raises LayoutError where none of these fits.
    """
    sizes: list[tuple[int, Candidate]] = []
    best: list[Confirmed] = []  # that with the least time so far, of those that fit

    def fits(each: Candidate) -> bool:
        told(len(sizes))
        planned = estimate(each.config, vocab_size, hardware)
        sizes.append((planned.memory, each))
        if planned.memory > found.limit:
            return False
        fitting = [*best, Confirmed(each, planned, len(sizes))]
        best[:] = [min(fitting, key=lambda one: one.estimate.seconds_per_step)]
        return True

    first, others = found.fitting[:FINALISTS], found.fitting[FINALISTS:]
    for each in first:
        fits(each)
    if not best:
        bisect_left(replace(found, fitting=others).front, True, key=fits)
    if not best:
        memory, least = min(sizes, key=lambda size: size[0])
        raise LayoutError(
            f"Of {len(found.fitting):,} layouts that seemed to fit into {amount(int(found.limit))} none of the "
            f"{len(sizes)} that were planned on the real program does. {too_much(least, memory, found.limit)}"
        )
    for each in others:
        if len(sizes) >= MOST_FINALISTS or each.seconds >= best[0].seconds:
            break
        if each.seconds >= best[0].candidate.seconds and each.way not in {other.way for _, other in sizes}:
            fits(each)
    return replace(best[0], looked_at=len(sizes))


def search(
    config: Config,
    vocab_size: int,
    hardware: Hardware,
    num_ranks: int,
    *,
    keep: Sequence[str] = (),
    told: Callable[[Search], object] = lambda _: None,
) -> Search:
    """Layouts of `num_ranks` ranks that fit into the memory of a device. `keep`: keys that all have as the
    configuration has them. `told`: of what is found so far, behind each layout. Raises LayoutError where no layout has
    these keys so.
    """
    groups = ["parallel.recompute_every"] if "parallel.recompute" in keep else []
    kept = {key: attrgetter(key)(config) for key in (*keep, *groups)}
    found = Search(hardware["device.memory"])
    composer = Composer(config, vocab_size, Cost(hardware, num_ranks))
    for each in candidates(config, composer, num_ranks, partial(_keeps, kept)):
        found.tried += 1
        told(found)
        reason = refusal(each, composer)
        if reason is not None:
            found.refused[reason] = found.refused.get(reason, 0) + 1
            continue
        made = Candidate(each, *composer.compose(each))
        if found.least is None or made.memory < found.least.memory:
            found.least = made
        if made.memory <= found.limit:
            found.fitting.append(made)
    if kept and not found.tried:
        raise LayoutError(
            f"No layout of {num_ranks:,} ranks that a search tries has "
            + " and ".join(f"{key} = {value}" for key, value in kept.items())
            + ". Set other values, or keep fewer keys."
        )
    found.fitting.sort(key=lambda each: (each.seconds, each.memory))
    return found


def _keeps(kept: Mapping[str, Any], section: str = "parallel", **chosen: Any) -> bool:
    """Whether what is `chosen` of a section's keys is what is kept of them."""
    return all(kept.get(f"{section}.{key}", value) == value for key, value in chosen.items())


def candidates(
    config: Config, composer: Composer, num_ranks: int, keeps: Callable[..., bool] = lambda *_, **__: True
) -> Iterator[Config]:
    """All layouts of these ranks that are worth a look and whose keys it `keeps`; many cannot be."""
    units, node = len(composer.architecture.units), composer.cost.hardware["node.size"]
    most = max(1, min(MOST_MICRO_BATCH, MOST_TOKENS // config.model.sample_length))
    sixteen = config.train.precision in ("bf16", "fp16")
    group = next((each for each in (1, config.parallel.recompute_every) if keeps(recompute_every=each)), 1)
    for tp in (each for each in possible_tp(config) if num_ranks % each == 0 and each <= node):
        for pp in (each for each in divisors(num_ranks // tp) if each <= units):
            dp = num_ranks // tp // pp
            if not keeps(tp=tp, pp=pp, dp=dp):
                continue
            if config.train.global_batch_size % dp:
                yield _with(config, 1, {**PLAIN, "tp": tp, "pp": pp, "dp": dp})  # once, to be counted
                continue
            micro = [each for each in divisors(config.train.global_batch_size // dp) if each <= most]
            micro = [each for each in micro if keeps("train", micro_batch_size=each)]
            again = ("none", "full") if not config.model.attention_dropout else ("none", "selective", "full")
            for r, sp, b in product(again, (False, True) if tp > 1 else (False,), micro):
                how = {"recompute": r, "recompute_every": group if r == "full" else 1, "sequence_parallel": sp}
                for z, off in product((0, 1, 2, 3) if dp > 1 else (0,), (False, True) if sixteen else (False,)):
                    base = _with(config, b, {**PLAIN, "tp": tp, "pp": pp, "dp": dp, **how, "zero": z, "offload": off})
                    if keeps(**how, zero=z, offload=off):
                        yield from _pipelines(base, composer, pp, units, keeps)


PLAIN = {
    "schedule": "1f1b", "virtual_stages": 1, "partition": "layers", "cuts": (), "zero": 0, "recompute": "none",
    "recompute_every": 1, "sequence_parallel": False, "offload": False,
}  # fmt: skip
"""What a layout has where nothing else is tried, whatever the configuration has."""


def _with(config: Config, micro_batch: int, parallel: Mapping[str, Any]) -> Config:
    train = config.train.model_copy(update={"micro_batch_size": micro_batch})
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel), "train": train})


def _pipelines(config: Config, composer: Composer, pp: int, units: int, keeps: Callable[..., bool]) -> Iterator[Config]:
    """The ways to run and to cut a pipeline of `pp` stages."""
    if pp == 1:
        if keeps(schedule="1f1b", virtual_stages=1):
            yield config
        return
    several = (("interleaved", each) for each in (2, MOST_VIRTUAL) if pp <= units // each)
    for schedule, virtual in (("1f1b", 1), ("zero_bubble", 1), *several):
        run = {"schedule": schedule, "virtual_stages": virtual}
        if not keeps(**run):
            continue
        scheduled = config.model_copy(update={"parallel": config.parallel.model_copy(update=run)})
        if refusal(scheduled, composer) is not None:
            yield scheduled  # once, to be counted
            continue
        for cut in composer.ways_to_cut(scheduled):
            yield config.model_copy(update={"parallel": config.parallel.model_copy(update={**run, **cut})})


def refusal(config: Config, composer: Composer) -> str | None:
    """Why a layout cannot be, in the first words of a message; None where it can."""
    problems = check(config)
    if problems:
        keys, message = problems[0].keys, problems[0].message
        return _of(keys) if len(keys) > 1 else re.split(r"[:.](?!\S)", message)[0]
    if composer.teacher is not None and not composer.cuts_teacher(config):
        return "distillation.teacher cannot be cut over parallel.tp and parallel.pp"
    try:
        composer.live(config, 0)
    except LayoutError:
        return "micro-batches are no multiple of parallel.pp"
    return None


def _of(keys: Sequence[str]) -> str:
    return " and ".join(keys) + " do not go together"


def layout_in_words(each: Candidate) -> str:
    """tp 8, dp 64, ZeRO 1, micro-batch 2."""
    chosen = each.chosen
    parts = [f"{axis} {chosen[axis]}" for axis in ("tp", "pp", "dp") if chosen[axis] > 1] or ["one rank"]
    parts += [f"{chosen['virtual_stages']} virtual stages"] * (chosen["virtual_stages"] > 1)
    parts += ["zero bubble"] * (chosen["schedule"] == "zero_bubble")
    parts += [f"cut by {chosen['partition']}"] * (chosen["partition"] != "layers")
    parts += ["cut by time"] * bool(chosen["cuts"])
    parts += [f"ZeRO {chosen['zero']}"] * bool(chosen["zero"])
    groups = f" in groups of {chosen['recompute_every']}" * (chosen["recompute_every"] > 1)
    parts += [f"recompute {chosen['recompute']}{groups}"] * (chosen["recompute"] != "none")
    parts += ["sequence parallelism"] * chosen["sequence_parallel"] + ["offload"] * chosen["offload"]
    return ", ".join([*parts, f"micro-batch {chosen['micro_batch_size']}"])


def too_much(least: Candidate, memory: int, limit: float) -> str:
    """Of the layout with the least `memory`, where none fits: by how much it does not, and what to do."""
    return (
        f"The least, {amount(memory)}, is {amount(int(memory - limit))} more, with {layout_in_words(least)}. Use more "
        "--ranks, a higher --memory, shorter sequences or a smaller model."
    )
