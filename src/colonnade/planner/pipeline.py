"""What a pipeline will do with a model, before it runs: the parts of each stage, its waiting and its activations. Pure.

Parameters say what a stage holds, work how long it computes: matrix products alone, so looking up the embedding costs
nothing, while the head is worth several blocks of a small model with a large vocabulary. The schedule is simulated with
the stages' work; theory supposes equal stages, and the difference is what the partition costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise

from colonnade.architecture.families import architecture_of
from colonnade.architecture.statement import Architecture, Unit
from colonnade.config.model import ModelConfig
from colonnade.config.schema import ParallelConfig
from colonnade.pipeline import theory
from colonnade.pipeline.partition import chunks, cut, first_trained
from colonnade.pipeline.schedule import all_actions
from colonnade.pipeline.simulate import Durations, Simulation, simulate


@dataclass(frozen=True)
class PipelineStage:
    """One stage of the pipeline, over its tp ranks."""

    chunks: Sequence[Sequence[str]]
    """The units of each of its chunks."""
    parameters: int
    """Those it computes with: a tied token table counts on both ends, and once where they are one stage."""
    work: float
    """[operations a token, or seconds where they were measured] Its forward and backward."""
    peak: int
    """The most micro-batches × chunks whose activations live at once."""
    busy: float
    """The share of a step in which it computes, 0 … 1."""


@dataclass(frozen=True)
class PipelinePlan:
    """A model, cut, and its schedule."""

    schedule: str
    num_microbatches: int
    virtual_stages: int
    stages: Sequence[PipelineStage]
    simulation: Simulation
    theory: float
    """The bubble that this schedule has when all stages are equal."""
    cuts_by_work: Sequence[int]
    """The parallel.cuts that spread work most evenly over the chunks."""
    bubble_by_work: float
    """The bubble with those cuts."""

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they wait, 0 … 1, by the work of each stage."""
        return self.simulation.bubble


def plan_pipeline(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    num_microbatches: int,
    vocab_size: int,
    seconds: Mapping[str, float] | None = None,
    architecture: Architecture | None = None,
) -> PipelinePlan:
    """Cut the model and run its schedule on paper. Raises LayoutError for what cannot be cut or scheduled.

    `seconds`: measured, of each unit, in place of its operations (`measure.py`). `architecture`: with what of the model
    is trained; None: all.
    """
    architecture = architecture or architecture_of(model, vocab_size)
    held, work = chunks(architecture, parallel), seconds or unit_work(architecture)
    run = partial(_simulate, parallel, num_microbatches, architecture.units, list(work.values()))
    simulation, cuts_by_work = run([len(units) for units in held]), cut(list(work.values()), len(held))
    return PipelinePlan(
        schedule=parallel.schedule,
        num_microbatches=num_microbatches,
        virtual_stages=parallel.virtual_stages,
        stages=[
            _stage(architecture, held[stage :: parallel.pp], work, simulation, stage) for stage in range(parallel.pp)
        ],
        simulation=simulation,
        theory=theory.bubble(
            parallel.schedule, parallel.pp, num_microbatches, parallel.virtual_stages, durations(parallel.recompute)
        ),
        cuts_by_work=cuts_by_work,
        bubble_by_work=run(cuts_by_work).bubble,
    )


def durations(recompute: str) -> Durations:
    """Those of a micro-batch on a stage of mean work; full recomputation has another forward in its backward."""
    return Durations(input_gradients=2.0 if recompute == "full" else 1.0)


def _simulate(
    parallel: ParallelConfig,
    num_microbatches: int,
    units: Sequence[Unit],
    work: Sequence[float],
    counts: Sequence[int],
) -> Simulation:
    """Run the schedule over chunks of so many units, given the work of each unit. Below the first trained chunk all
    work is forward, and nothing is computed again.
    """
    ends = list(accumulate(counts, initial=0))
    mean, each = sum(work) / parallel.pp, durations(parallel.recompute)
    trained = first_trained([units[start:end] for start, end in pairwise(ends)])
    forward = Durations(durations("none").microbatch, 0.0, 0.0)
    return simulate(
        all_actions(parallel.schedule, parallel.pp, num_microbatches, parallel.virtual_stages),
        num_microbatches,
        virtual_stages=parallel.virtual_stages,
        durations=[forward if chunk < trained else each for chunk in range(len(counts))],
        sizes=[sum(work[start:end]) / mean for start, end in pairwise(ends)],
        first_trained=trained,
    )


def unit_work(architecture: Architecture) -> dict[str, float]:
    """Operations a token of each unit, forward and backward: those of matrix products."""
    return {unit.name: architecture.flops_of(unit) for unit in architecture.units}


def _stage(
    architecture: Architecture,
    held: Sequence[Sequence[Unit]],
    work: Mapping[str, float],
    simulation: Simulation,
    stage: int,
) -> PipelineStage:
    units = [unit for chunk in held for unit in chunk]
    buckets = {bucket for unit in units for bucket in unit.buckets}
    return PipelineStage(
        chunks=[[unit.name for unit in chunk] for chunk in held],
        parameters=sum(weight.size for bucket in buckets for weight in architecture.buckets[bucket]),
        work=sum(work[unit.name] for unit in units),
        peak=simulation.peak[stage],
        busy=simulation.busy[stage] / simulation.makespan,
    )
