"""The best layout of a model on so many ranks: thousands of candidates, composed from what units cost.

    candidates   tp · pp · virtual stages · dp · ZeRO · micro-batch · recomputation · sequence parallelism · offload, of
                 those that `config.check` admits
    composed     step    = (m − 1) · slowest stage + Σ stages / v + gradients and parameters over dp + optimizer
                 memory  = buffers (exact) + live micro-batches · what units keep + one unit at work
    finalists    the fastest that fit are planned on the real program (`estimate.py`); the fastest of these wins

A composed time knows no order of collectives within a step, a composed memory no single moment: both are for ranking.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any

from colonnade.architecture.parts import trained_architecture
from colonnade.config.check import check, possible_tp
from colonnade.config.numbers import divisors
from colonnade.config.schema import Config
from colonnade.errors import LayoutError
from colonnade.pipeline.partition import chunks
from colonnade.pipeline.schedule import actions
from colonnade.pipeline.simulate import peak_activations
from colonnade.planner.cost import Cost
from colonnade.planner.estimate import Estimate, estimate
from colonnade.planner.hardware import Hardware
from colonnade.planner.memory import buffer_bytes
from colonnade.planner.unit_times import Costs, unit_costs

KEYS = ("tp", "pp", "dp", "virtual_stages", "zero", "recompute", "sequence_parallel", "offload")
MOST_MICRO_BATCH, MOST_VIRTUAL = 16, 4
FINALISTS = 3
"""Layouts that are planned on the real program."""
READ_AND_WRITTEN = 28
"""[bytes] By the optimizer for each parameter: weights, gradients and two moments, all but gradients written too."""


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
    def bound(self) -> str:
        return max(self.spent, key=lambda what: self.spent[what])


@dataclass
class Search:
    """What was found."""

    limit: float
    """[bytes] That a rank may take."""
    fitting: list[Candidate] = field(default_factory=list)
    """The fastest first."""
    least: Candidate | None = None
    """That with the least memory, whether it fits or not."""
    tried: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """How many candidates each reason has refused."""

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


def confirmed(found: Search, vocab_size: int, hardware: Hardware) -> Confirmed:
    """The fastest of the finalists that fits. More than FINALISTS are looked at where none of them does."""
    best: Confirmed | None = None
    for number, each in enumerate(found.fitting, 1):
        planned = estimate(each.config, vocab_size, hardware)
        fits = planned.memory <= found.limit
        if fits and (best is None or planned.seconds_per_step < best.estimate.seconds_per_step):
            best = Confirmed(each, planned, number)
        if number >= FINALISTS and best is not None:
            return replace(best, looked_at=number)
    if best is None:
        raise LayoutError(
            f"Of {len(found.fitting):,} layouts that seemed to fit, none does on the real program. Raise --memory."
        )
    return replace(best, looked_at=len(found.fitting))


def search(
    config: Config, vocab_size: int, hardware: Hardware, num_ranks: int, *, limit: float | None = None
) -> Search:
    """Layouts of `num_ranks` ranks within `limit` bytes (None: a device's memory)."""
    found = Search(hardware["device.memory"] if limit is None else limit)
    composer = _Composer(config, vocab_size, Cost(hardware, num_ranks))
    for each in candidates(config, hardware, num_ranks):
        found.tried += 1
        reason = refusal(each)
        if reason is not None:
            found.refused[reason] = found.refused.get(reason, 0) + 1
            continue
        made = composer.candidate(each)
        if found.least is None or made.memory < found.least.memory:
            found.least = made
        if made.memory <= found.limit:
            found.fitting.append(made)
    found.fitting.sort(key=lambda each: (each.seconds, each.memory))
    return found


def candidates(config: Config, hardware: Hardware, num_ranks: int) -> Iterator[Config]:
    """All layouts of these ranks that are worth a look; many cannot be."""
    units = len(trained_architecture(config, 128).units)
    sixteen = config.train.precision in ("bf16", "fp16")
    for tp in (each for each in possible_tp(config) if num_ranks % each == 0 and each <= hardware["node.size"]):
        for pp in (each for each in divisors(num_ranks // tp) if each <= units):
            dp = num_ranks // tp // pp
            if config.train.global_batch_size % dp:
                continue
            share = config.train.global_batch_size // dp
            micro = [each for each in divisors(share) if each <= MOST_MICRO_BATCH]
            virtual = [each for each in (1, 2, MOST_VIRTUAL) if each == 1 or 1 < pp <= units // each]
            again = ("none", "full") if not config.model.attention_dropout else ("none", "selective", "full")
            zero = (0, 1, 2, 3) if dp > 1 else (0,)
            for v, z, r, sp, off, b in product(
                virtual,
                zero,
                again,
                (False, True) if tp > 1 else (False,),
                (False, True) if sixteen else (False,),
                micro,
            ):
                parallel = config.parallel.model_copy(
                    update={
                        "tp": tp,
                        "pp": pp,
                        "dp": dp,
                        "virtual_stages": v,
                        "schedule": "interleaved" if v > 1 else "1f1b",
                        "zero": z,
                        "recompute": r,
                        "recompute_every": 1,
                        "sequence_parallel": sp,
                        "offload": off,
                        "cuts": None,
                    }
                )
                train = config.train.model_copy(update={"micro_batch_size": b})
                yield config.model_copy(update={"parallel": parallel, "train": train})


def refusal(config: Config) -> str | None:
    """Why a layout cannot be, in the first words of a message; None where it can."""
    problems = check(config)
    if problems:
        return problems[0].message.split(":")[0].split(".")[0] if len(problems[0].keys) < 2 else _of(problems[0].keys)
    parallel, count = config.parallel, config.train.num_microbatches(config.parallel.dp)
    try:
        actions(parallel.schedule, 0, parallel.pp, count, parallel.virtual_stages)
    except LayoutError:
        return "micro-batches are no multiple of parallel.pp"
    return None


def _of(keys: Sequence[str]) -> str:
    return " and ".join(keys) + " do not go together"


class _Composer:
    """Puts candidates together from what units cost."""

    def __init__(self, config: Config, vocab_size: int, cost: Cost) -> None:
        self.vocab_size, self.cost, self.device = vocab_size, cost, cost.hardware.kind
        self.architecture = trained_architecture(config, vocab_size)
        self._costs: dict[tuple[Any, ...], Costs] = {}
        self._lengths: dict[tuple[str, int], int] = {}

    def _length(self, bucket: str, tp: int) -> int:
        """Trained elements of a bucket on one rank."""
        if (bucket, tp) not in self._lengths:
            weights = [weight for weight in self.architecture.buckets[bucket] if not weight.is_frozen]
            self._lengths[bucket, tp] = sum(prod(weight.local_shape(tp)) for weight in weights)
        return self._lengths[bucket, tp]

    def costs(self, config: Config) -> Costs:
        parallel = config.parallel
        key = parallel.tp, parallel.sequence_parallel, parallel.recompute == "selective", config.train.micro_batch_size
        if key not in self._costs:
            self._costs[key] = unit_costs(config, self.vocab_size, self.cost, self.device)
        return self._costs[key]

    def candidate(self, config: Config) -> Candidate:
        parallel, costs = config.parallel, self.costs(config)
        every = chunks(self.architecture, parallel)
        lengths = [self._stage_length(every[stage :: parallel.pp], config) for stage in range(parallel.pp)]
        times = [self._stage_time(every[stage :: parallel.pp], costs, config) for stage in range(parallel.pp)]
        seconds, spent = self._step(times, max(lengths), costs, config)
        stages = {0, parallel.pp // 2, parallel.pp - 1}
        memory = max(self._memory(every[s :: parallel.pp], s, lengths[s], costs, config) for s in stages)
        return Candidate(config, seconds, memory, spent)

    def _stage_length(self, held: Sequence[Any], config: Config) -> int:
        buckets = {bucket for units in held for unit in units for bucket in unit.buckets}
        return sum(self._length(bucket, config.parallel.tp) for bucket in buckets)

    def _stage_time(self, held: Sequence[Any], costs: Costs, config: Config) -> tuple[float, float]:
        """[s] (forward, backward) of a micro-batch."""
        again = config.parallel.recompute == "full"
        each = [(costs.units[unit.kind], again and unit.recomputes) for units in held for unit in units]
        return sum(c.forward for c, _ in each), sum(c.backward + c.forward * twice for c, twice in each)

    def _step(
        self, times: Sequence[tuple[float, float]], length: int, costs: Costs, config: Config
    ) -> tuple[float, dict[str, float]]:
        parallel, cost = config.parallel, self.cost
        count, width = (
            config.train.num_microbatches(parallel.dp),
            2 if config.train.precision in ("bf16", "fp16") else 4,
        )
        group = range(0, parallel.dp * parallel.tp, parallel.tp)
        reduce = cost.move("all_reduce" if not parallel.zero else "reduce_scatter", 4 * length, group)
        gather = cost.move("all_gather", width * length // parallel.dp, group) if parallel.zero else 0.0
        if parallel.zero >= 2:
            times = [(f, max(b, reduce)) for f, b in times]
        if parallel.zero == 3:
            times = [(max(f, gather), max(b, gather + reduce)) for f, b in times]
        work = [f + b for f, b in times]
        slowest, last = max(work), max(b for _, b in times)
        pipeline = (sum(work) - slowest) / parallel.virtual_stages
        transfer = self._transfer(config) * 2 * (parallel.pp - 1)
        over_dp = max(reduce - last, reduce / max(1, len(self.architecture.units) // parallel.pp), 0.0)
        over_dp += max(0.0, gather - times[0][0]) if parallel.zero in (1, 2) else 0.0
        optimizer = self._optimizer(length, config)
        seconds = count * slowest + pipeline + transfer + over_dp + optimizer
        total = max(sum(costs.spent.values()), 1e-12)
        spent = {what: count * slowest * each / total for what, each in costs.spent.items()}
        return seconds, {**spent, "pipeline": pipeline + transfer, "dp": over_dp, "optimizer": optimizer}

    def _transfer(self, config: Config) -> float:
        parallel, model = config.parallel, config.model
        if parallel.pp == 1:
            return 0.0
        size = config.train.micro_batch_size * model.seq_length * model.hidden_size * 2
        return self.cost.move("send", size, (0, parallel.dp * parallel.tp))

    def _optimizer(self, length: int, config: Config) -> float:
        hardware, parallel = self.cost.hardware, config.parallel
        mine = length / (parallel.dp if parallel.zero else 1)
        if parallel.offload:
            return mine * (READ_AND_WRITTEN / hardware["host.memory_bandwidth"] + 6 / hardware["host.link_bandwidth"])
        return mine * READ_AND_WRITTEN / (hardware["device.memory_bandwidth"] * hardware["products.memory"])

    def _memory(self, held: Sequence[Any], stage: int, length: int, costs: Costs, config: Config) -> int:
        parallel, train = config.parallel, config.train
        units = [unit for each in held for unit in each]
        fixed = buffer_bytes(length, parallel, train)
        count = min(train.num_microbatches(parallel.dp), 3 * parallel.pp)
        live = peak_activations(actions(parallel.schedule, stage, parallel.pp, count, parallel.virtual_stages), "B")
        again = parallel.recompute == "full"
        first = min(costs.units[unit.kind].handed for unit in units if not unit.is_loss) if len(units) > 1 else 0
        kept = (
            sum(first if again and unit.recomputes else costs.units[unit.kind].kept for unit in units)
            // parallel.virtual_stages
        )
        once = max(
            costs.units[unit.kind].working + (costs.units[unit.kind].kept if again and unit.recomputes else 0)
            for unit in units
        )
        largest = max(self._stage_length([[unit]], config) for unit in units)
        whole = (20 * largest if parallel.zero >= 2 else 0) + (4 * largest if parallel.zero == 3 else 0)
        return int(fixed + live * kept + once + whole)
