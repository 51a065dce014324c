"""What each kind of rank of a layout will hold and send, before any rank exists: a table, and the same for JSON. Pure.

Ranks differ by their pipeline stage alone: stages whose ranks hold and send the same are one kind, of which the first
rank stands for all. (Under ZeRO a rank may send a few numbers more or fewer than its neighbour along dp.)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from colonnade.architecture.families import architecture_of
from colonnade.architecture.parts import trained_architecture
from colonnade.architecture.statement import Architecture
from colonnade.config.model import ModelConfig
from colonnade.config.numbers import amount, counted
from colonnade.config.schema import Config, ParallelConfig, TrainConfig
from colonnade.mesh.layout import Layout, consecutive
from colonnade.pipeline.partition import chunks
from colonnade.planner.kept import kept_of
from colonnade.planner.memory import Memory, stage_memory
from colonnade.planner.stand_in import Device, device_of
from colonnade.planner.step import Step
from colonnade.planner.teacher import has_live_teacher, live_teacher, with_model
from colonnade.planner.traffic import totals, traffic

SMALL = 1000
"""[bytes in a step] Traffic below this is in the JSON alone."""
NOT_COUNTED = "without what libraries take for themselves"


@dataclass(frozen=True)
class RankKind:
    """Ranks that hold and send the same."""

    stages: tuple[int, ...]
    num_ranks: int
    memory: Memory
    traffic: Mapping[tuple[str, str], tuple[int, int]]
    """(count, bytes) in a step by (operation, axis): what a rank puts in, or receives."""

    @property
    def sent(self) -> int:
        """[bytes] All of it, but what is received."""
        return sum(size for (operation, _), (_, size) in self.traffic.items() if operation != "receive")


@dataclass(frozen=True)
class RankPlan:
    """All ranks of a layout."""

    layout: Layout
    parameters: int
    """Of the whole model."""
    trained: int
    """Of these, not frozen."""
    kinds: tuple[RankKind, ...]
    without_teacher: bool = False
    """Whether there is one beside the student that could not be read, or not be cut so."""

    @property
    def not_counted(self) -> str:
        """What memory and time are without, in words."""
        unread = " and the teacher, which cannot be read here, or not be cut so"
        return NOT_COUNTED + unread * self.without_teacher


def plan_ranks(
    model: ModelConfig,
    parallel: ParallelConfig,
    train: TrainConfig,
    *,
    optimizer: str,
    vocab_size: int,
    device: Device = "cuda",
    separate_documents: bool = False,
    architecture: Architecture | None = None,
    beside: Callable[[Memory, int], Memory] = lambda memory, stage: memory,
) -> RankPlan:
    """Memory and traffic of every kind of rank. `architecture`: with what of the model is trained; None: all.
    `beside`: a stage's memory with what is there beside the model. Raises LayoutError for what cannot be cut or
    scheduled.
    """
    layout = Layout(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp)
    architecture = architecture or architecture_of(model, vocab_size)
    kept = kept_of(
        model,
        parallel,
        train,
        vocab_size=vocab_size,
        device=device,
        separate_documents=separate_documents,
        architecture=architecture,
    )
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for stage in range(parallel.pp):
        memory = beside(stage_memory(architecture, kept, parallel, train, stage=stage, device=device), stage)
        rank = layout.rank_at(pp=stage, dp=0, tp=0)
        step = Step(model, parallel, train, optimizer, vocab_size, rank, cuda=device == "cuda", stated=architecture)
        kinds.setdefault((memory, tuple(totals(traffic(step)).items())), []).append(stage)
    return RankPlan(
        layout,
        architecture.num_parameters,
        architecture.num_trained,
        tuple(
            RankKind(tuple(stages), len(stages) * parallel.dp * parallel.tp, memory, dict(sent))
            for (memory, sent), stages in kinds.items()
        ),
    )


def plan_run(config: Config, vocab_size: int) -> RankPlan:
    """`plan_ranks` of a whole configuration, its teacher among them."""
    parallel, device = config.parallel, device_of(config.train.device)
    teacher, architecture = live_teacher(config), trained_architecture(config, vocab_size)
    every = chunks(architecture, parallel)

    def beside(held: Memory, stage: int) -> Memory:
        units = [unit for chunk in every[stage :: parallel.pp] for unit in chunk]
        return with_model(held, config, teacher, vocab_size, units=units, stage=stage, device=device)

    plan = plan_ranks(
        config.model,
        parallel,
        config.train,
        optimizer=config.optim.name,
        vocab_size=vocab_size,
        device=device,
        separate_documents=config.data.documents == "separate",
        architecture=architecture,
        beside=beside,
    )
    unread = teacher is None and has_live_teacher(config)
    return replace(plan, without_teacher=True) if unread else plan


def largest(plan: RankPlan) -> RankKind:
    """The kind of rank that takes the most memory."""
    return max(plan.kinds, key=lambda kind: kind.memory.total)


def as_text(plan: RankPlan) -> str:
    """Memory and traffic, a line for each kind of rank."""
    hosted = any(kind.memory.host for kind in plan.kinds)
    memory = [
        ["stage", "ranks", "parameters", "gradients", "optimizer", "buffers", "activations", "operators", "in all"],
        *(
            [stages_in_words(kind.stages), f"{kind.num_ranks:,}", *map(amount, _parts(kind.memory))]
            for kind in plan.kinds
        ),
    ]
    if hosted:
        memory[0].append("CPU memory")
        for row, kind in zip(memory[1:], plan.kinds, strict=True):
            row.append(amount(kind.memory.host))
    ranks = counted(plan.layout.num_ranks, "rank")
    trained = "" if plan.trained == plan.parameters else f", {plan.trained:,} of them trained,"
    lines = [
        f"{plan.parameters:,} parameters{trained} on {ranks} ({plan.layout})",
        "",
        f"memory of a rank, {plan.not_counted}:",
        "",
        *table(memory),
        "",
        *_traffic(plan),
    ]
    return "\n".join(lines)


def _traffic(plan: RankPlan) -> list[str]:
    """Stages that send the same on the same lines; single numbers on which all ranks agree are left out."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for kind in plan.kinds:
        flows = sorted((axis, operation, *sent) for (operation, axis), sent in kind.traffic.items() if sent[1] >= SMALL)
        alike.setdefault(tuple(flows), []).extend(kind.stages)
    rows = [
        [stages_in_words(sorted(stages)), axis, operation, f"{count:,}", amount(size)]
        for flows, stages in alike.items()
        for axis, operation, count, size in flows
    ]
    if not rows:
        return ["traffic of a rank in a step: none"]
    heading = ["stage", "axis", "operation", "times", "in all"]
    return [
        f"traffic of a rank in a step, from {SMALL} bytes on: what it puts in, or receives:",
        "",
        *table([heading, *rows], left=(1, 2)),
    ]


def as_json(plan: RankPlan) -> dict[str, Any]:
    """The same, ready for JSON. Memory and traffic are in bytes."""
    return {
        "num_ranks": plan.layout.num_ranks,
        "parameters": plan.parameters,
        "trained_parameters": plan.trained,
        "without_teacher": plan.without_teacher,
        "ranks": [
            {
                "stages": list(kind.stages),
                "num_ranks": kind.num_ranks,
                "memory": {**asdict(kind.memory), "total": kind.memory.total},
                "sent": kind.sent,
                "traffic": [
                    {"axis": axis, "operation": operation, "count": count, "bytes": size}
                    for (operation, axis), (count, size) in kind.traffic.items()
                ],
            }
            for kind in plan.kinds
        ],
    }


def table(rows: Sequence[Sequence[str]], *, left: Sequence[int] = ()) -> list[str]:
    """Columns two spaces apart, right-aligned but for those in `left`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _parts(memory: Memory) -> tuple[int, ...]:
    held = memory.parameters, memory.gradients, memory.optimizer, memory.buffers
    return (*held, memory.activations, memory.operators, memory.total)


def stages_in_words(stages: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> '0–2, 5'."""
    return ", ".join("–".join(dict.fromkeys((str(run[0]), str(run[-1])))) for run in consecutive(stages))
