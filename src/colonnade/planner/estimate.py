"""How long a configuration takes on a machine, what that costs, and what it waits for. Before it runs.

    step        reading · before the schedule · the schedule, simulated with the actions' times · behind it
    MFU         model FLOPs / (seconds · ranks · peak): those of `Architecture.flops_per_token`, in which a causal
                model's attention counts half and recomputed work nothing
    failures    M = hours of a device between failures / devices, and s seconds from one checkpoint to the next: a run
                takes e^(restart/M)·(e^(s/M) − 1)·M/s times as long (Daly 2006); best is a checkpoint every
                √(2·δ·M) − δ, δ the stall for it (Young 1974, Daly, first order)

One rank of each kind of stage is walked through (`paper.py`) and played (`timeline.py`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from colonnade.architecture.parts import trained_architecture
from colonnade.architecture.statement import Architecture
from colonnade.config.schema import Config, ParallelConfig
from colonnade.kernels.choice import Products
from colonnade.mesh.layout import Layout
from colonnade.pipeline.messages import chunk_number
from colonnade.pipeline.partition import chunks, first_trained
from colonnade.pipeline.schedule import all_actions
from colonnade.pipeline.simulate import Durations, Simulation, simulate
from colonnade.planner.cost import Cost
from colonnade.planner.hardware import Hardware
from colonnade.planner.paper import Walk, walk
from colonnade.planner.ranks import RankPlan, largest, plan_run
from colonnade.planner.stand_in import device_of
from colonnade.planner.step import BYTES
from colonnade.planner.teacher import live_teacher
from colonnade.planner.teacher_time import teacher_costs, teacher_seconds
from colonnade.planner.timeline import Played, of_actions, play
from colonnade.train.corpus import tokens_of

DAY = 86400.0
STATE = 3
"""[numbers] Of a trained weight in a checkpoint: its master weight and two moments."""


@dataclass(frozen=True)
class Failures:
    """What failures cost."""

    between: float
    """[s] From one to the next, on all devices."""
    interval: float
    """[s] Between checkpoints, that is best by Young and Daly."""
    best: int
    """[steps] As long as that, for checkpoint.every."""
    lost: float
    """[share of the time] To restarts and to what is computed again, with checkpoint.every as it is."""


@dataclass(frozen=True)
class Estimate:
    """A configuration on a machine."""

    hardware: Hardware
    layout: Layout
    seconds_per_step: float
    tokens_per_step: int
    flops_per_token: float
    peak: float
    """[FLOP/s] Of a device, in the precision of the run."""
    steps: int
    tokens: int
    """Of the whole run: fewer than steps × tokens_per_step where sequences or batches grow."""
    spent: Mapping[str, float]
    """[s of a step] Of the stage that works longest, by what for; "pipeline" is its waiting."""
    stall: float
    """[s] That training stands still for a checkpoint."""
    failures: Failures
    ranks: RankPlan | None
    """Memory of every kind of rank; None: those of `walks` alone are known."""
    walks: Mapping[int, Walk]
    """Of one stage of each kind."""
    played: Mapping[int, Played]
    """Their times, with communication that overlaps."""
    simulation: Simulation

    @property
    def cost(self) -> Cost:
        """Of its operators and collectives."""
        return Cost(self.hardware, self.layout.num_ranks)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds_per_step

    @property
    def mfu(self) -> float:
        """[share of the peak]"""
        return self.tokens_per_second * self.flops_per_token / (self.layout.num_ranks * self.peak)

    @property
    def days(self) -> float:
        """Of all steps and checkpoints, without failures. Each token takes as long as at the end of a curriculum."""
        return self.tokens / self.tokens_per_second / DAY

    @property
    def days_with_failures(self) -> float:
        """The same with what failures cost; infinite where nothing is left."""
        return self.days / (1 - self.failures.lost) if self.failures.lost < 1 else math.inf

    @property
    def dollars(self) -> float:
        return self.days_with_failures * 24 * self.layout.num_ranks * self.hardware["cost.device_hour"]

    @property
    def memory(self) -> int:
        """[bytes] Of the rank that takes most."""
        told = [] if self.ranks is None else [largest(self.ranks).memory.total]
        return max([*told, *(each.peak.bytes for each in self.walks.values())])

    @property
    def room(self) -> float:
        """[bytes] That are left of a device's memory; negative where it does not fit."""
        return self.hardware["device.memory"] - self.memory

    @property
    def bound(self) -> str:
        """What most of the time goes to."""
        return max(self.spent, key=lambda what: self.spent[what])


def estimate(
    config: Config,
    vocab_size: int,
    hardware: Hardware,
    *,
    products: Products | None = None,
    every_rank: bool = True,
) -> Estimate:
    """Of a configuration. `products`: the kernels (None: the usual ones). `every_rank`: tell the memory of all.

    Raises LayoutError for what cannot be cut or scheduled.
    """
    parallel, architecture = config.parallel, trained_architecture(config, vocab_size)
    layout = Layout(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp)
    cost = Cost(hardware, layout.num_ranks)
    kinds = stage_kinds(architecture, parallel)
    device = hardware.kind if config.train.device == "auto" else device_of(config.train.device)
    walks = {
        stage: walk(config, vocab_size, layout.rank_at(pp=stage, dp=0, tp=0), device=device, products=products)
        for stage in dict.fromkeys(kinds)
    }
    played = {stage: play(each.sections, cost) for stage, each in walks.items()}
    trained = first_trained(chunks(architecture, parallel))
    simulation = simulated(config, kinds, walks, played, cost, first_trained=trained)
    seconds, spent = _step(kinds, played, simulation)
    teacher = live_teacher(config)
    if teacher is not None:
        costs = teacher_costs(config, teacher, vocab_size, cost, device, products=products)
        spent["teacher"] = teacher_seconds(config, teacher, vocab_size, costs)
        seconds += spent["teacher"]
    stall = checkpoint_stall(config, architecture, hardware)
    every, reading = config.checkpoint.every, cost.reading(config, seconds)
    tokens, tokens_per_step = tokens_of(config), config.train.global_batch_size * config.model.sample_length
    seconds += reading + (stall / every if every else 0.0)
    return Estimate(
        hardware=hardware,
        layout=layout,
        seconds_per_step=seconds,
        tokens_per_step=tokens_per_step,
        flops_per_token=architecture.flops_per_token,
        peak=hardware.peak(TORCH_NAMES[config.train.precision]),
        steps=config.train.steps,
        tokens=tokens,
        spent={
            **spent,
            **({"data": reading} if reading else {}),
            **({"checkpoints": stall / every} if every else {}),
        },
        stall=stall,
        failures=failures(hardware, layout.num_ranks, stall, step=seconds, every=every, steps=tokens / tokens_per_step),
        ranks=plan_run(config, vocab_size) if every_rank else None,
        walks=walks,
        played=played,
        simulation=simulation,
    )


TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def stage_kinds(architecture: Architecture, parallel: ParallelConfig) -> list[int]:
    """For each stage, the one that stands for it: the first of those with the same kinds of units, the ends apart."""
    every, first = chunks(architecture, parallel), dict[object, int]()
    found = []
    for stage in range(parallel.pp):
        held = tuple(tuple(unit.kind for unit in units) for units in every[stage :: parallel.pp])
        end = stage in (0, parallel.pp - 1)
        found.append(first.setdefault((held, stage if end else None), stage))
    return found


def simulated(
    config: Config,
    kinds: Sequence[int],
    walks: Mapping[int, Walk],
    played: Mapping[int, Played],
    cost: Cost,
    *,
    first_trained: int = 0,
) -> Simulation:
    """The schedule of all stages, with the times of their actions. `first_trained`: the first chunk with a backward."""
    parallel = config.parallel
    times = {stage: of_actions(each.sections, played[stage].seconds) for stage, each in walks.items()}
    durations = []
    for number in range(parallel.pp * parallel.virtual_stages):
        of_stage, chunk = times[kinds[number % parallel.pp]], number // parallel.pp
        forward, backward, weights = (of_stage.get((kind, chunk), 0.0) for kind in "FBW")
        durations.append(Durations(forward, backward, weights))
    count = config.train.num_microbatches(parallel.dp)
    return simulate(
        all_actions(parallel.schedule, parallel.pp, count, parallel.virtual_stages),
        count,
        virtual_stages=parallel.virtual_stages,
        durations=durations,
        links=_links(kinds, walks, Layout(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp), cost),
        pace=(lambda busy: cost.pace(busy / parallel.pp)) if cost.hardware.cores else None,
        first_trained=first_trained,
    )


def _links(
    kinds: Sequence[int], walks: Mapping[int, Walk], layout: Layout, cost: Cost
) -> dict[tuple[int, int], tuple[float, float]]:
    """[s] From each chunk to the one that uses what it makes: of a message with all of its tensors, and of one without
    bytes, which does not occupy the link.
    """
    links = {}
    for stage, kind in enumerate(kinds):
        for (action, chunk), size in _sent(walks[kind]).items():
            number = chunk_number(stage, chunk, layout.pp)
            to = number + (1 if action == "F" else -1)
            stages = number % layout.pp, to % layout.pp
            whole, empty = (cost.message(each, stages, layout.dp * layout.tp) for each in (size, 0))
            links[number, to] = whole, empty
    return links


def _sent(walk: Walk) -> dict[tuple[str, int], int]:
    """[bytes] That each kind of action on each chunk sends to another stage."""
    found: dict[tuple[str, int], int] = {}
    for section in walk.sections:
        sizes = [each.entry.bytes for each in section.sent if each.entry.operation == "send"]
        if section.action is not None and sizes:
            found[section.action.kind, section.action.chunk] = sum(sizes)
    return found


def _step(kinds: Sequence[int], played: Mapping[int, Played], simulation: Simulation) -> tuple[float, dict[str, float]]:
    """(seconds of a step, what the busiest stage spends them on)."""
    ends = [played[stage].seconds[0] + played[stage].seconds[-1] for stage in kinds]
    if len(kinds) == 1:
        return played[kinds[0]].total, dict(played[kinds[0]].spent)
    busiest = max(range(len(kinds)), key=lambda stage: simulation.busy[stage] + ends[stage])
    seconds = simulation.makespan + max(ends)
    spent = dict(played[kinds[busiest]].spent)
    scale = min(1.0, seconds / max(sum(spent.values()), 1e-12))
    spent = {what: each * scale for what, each in spent.items()}
    return seconds, {**spent, "pipeline": max(0.0, seconds - sum(spent.values()))}


def checkpoint_stall(config: Config, architecture: Architecture, hardware: Hardware) -> float:
    """[s] That training stands still for a checkpoint: for the copy to memory, or until it is written."""
    size = checkpoint_bytes(config, architecture)
    if config.checkpoint.asynchronous:
        return size / config.parallel.num_ranks / hardware["host.link_bandwidth"]
    return size / hardware["storage.write_bandwidth"]


def checkpoint_bytes(config: Config, architecture: Architecture) -> int:
    """Of all ranks. Frozen weights are saved as they are computed with; adapters of a base leave them to it."""
    width, trained = BYTES[config.train.precision], architecture.num_trained
    has_base = config.lora.rank > 0 and config.train.init_from is not None
    frozen = 0 if has_base else architecture.num_parameters - trained
    return STATE * max(width, 4) * trained + width * frozen


def failures(hardware: Hardware, num_ranks: int, stall: float, *, step: float, every: int, steps: float) -> Failures:
    """What they cost so many devices in a run of so many steps, each of which takes `step` seconds with its share of a
    checkpoint `every` so many of them (0: none before the end).
    """
    between = hardware["failures.device_hours"] * 3600 / num_ranks
    least = max(stall, 1e-3)
    interval = math.sqrt(2 * least * between) - least if least < between / 2 else between
    best = max(1, round(interval / (step - (stall / every if every else 0.0))))
    failed = step * (min(every, steps) if every else steps) / between
    restarts = hardware["failures.restart_seconds"] / between
    kept = failed * math.exp(-failed - restarts) / -math.expm1(-failed)
    return Failures(between, interval, best, 1 - kept)
