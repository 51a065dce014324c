"""The real program on paper: one rank's `build_state` and `train_step`, as any rank of any layout, in this process.

Nothing is modelled here. Weights, buffers, optimizer state and activations are tensors of torch's meta device, which
have sizes and no memory; a paper mesh carries what is sent. What the step did is read off: operators with FLOPs and
bytes, collectives in their order, what is alive at each moment.

A step of many micro-batches repeats itself. Of schedules that come to a steady state a shorter step is walked, and its
period repeated (`expanded`); that the actions come out as those of the whole schedule is asserted, and that ledgers and
memory do is tested.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from colonnade.config.schema import Config, ParallelConfig
from colonnade.config.thermometers import ThermometersConfig
from colonnade.kernels.choice import Products
from colonnade.mesh.layout import Layout
from colonnade.mesh.ledger import Entry, Ledger
from colonnade.mesh.mesh import Mesh, paper_mesh
from colonnade.mesh.transport import Transport
from colonnade.pipeline.runner import Runner
from colonnade.pipeline.schedule import Action, actions
from colonnade.planner.live import Watch, storage_bytes
from colonnade.planner.memory import Memory
from colonnade.planner.operators import Operator, Recorder, Section, TracingTransport
from colonnade.planner.stand_in import META, Device, StandIn, device_of
from colonnade.tasks.tasks import TASKS
from colonnade.train.state import TrainState, build_state
from colonnade.train.step import train_step


@dataclass(frozen=True)
class Peak:
    """When the most was alive."""

    bytes: int
    """In all, with what is always there."""
    action: Action | None
    """None: before the first or behind the last."""
    place: int
    """The section of the walk."""


@dataclass(frozen=True)
class Walk:
    """A training step of one rank, as the program takes it."""

    rank: int
    coordinates: Mapping[str, int]
    memory: Memory
    sections: tuple[Section, ...]
    """Before the schedule, each action, and behind it: of the whole step."""
    walked: int
    """Micro-batches that were walked through; the others repeat them."""

    @property
    def entries(self) -> Iterator[Entry]:
        """What is sent and received, in order."""
        return (entry for section in self.sections for entry in section.entries)

    @property
    def operators(self) -> Iterator[Operator]:
        return (operator for section in self.sections for operator in section.operators)

    @property
    def launches(self) -> int:
        """Kernels that the device is asked to run."""
        return sum(1 for each in self.operators if each.on_host != "host")

    @property
    def flops(self) -> int:
        return sum(each.flops for each in self.operators)

    @property
    def peak(self) -> Peak:
        """The moment with the most alive."""
        place = max(range(len(self.sections)), key=lambda at: self.sections[at].most)
        always = self.memory.parameters + self.memory.gradients + self.memory.optimizer
        section = self.sections[place]
        return Peak(always + section.most, section.action, place)

    def flops_by_operator(self) -> dict[str, int]:
        """FLOPs of each kind of operator, the most first."""
        found = Counter[str]()
        for each in self.operators:
            found[each.name] += each.flops
        return {name: count for name, count in found.most_common() if count}


def walk(
    config: Config,
    vocab_size: int,
    rank: int,
    *,
    device: Device | None = None,
    products: Products | None = None,
    whole: bool = False,
) -> Walk:
    """One step of `rank`. `device`: what it is on (None: what train.device says). `whole`: walk through every
    micro-batch. Raises LayoutError for what cannot be cut or scheduled.
    """
    parallel = config.parallel
    layout = Layout(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp)
    count = config.train.num_microbatches(parallel.dp)
    actions(parallel.schedule, 0, parallel.pp, count, parallel.virtual_stages)  # refuses what cannot be
    walked = count if whole else steady(parallel, count)
    place = StandIn(device or device_of(config.train.device))
    recorder = Recorder(place)

    def on_paper(name: str, ranks: tuple[int, ...], ledger: Ledger) -> Transport:
        return TracingTransport(name, ranks, rank, ledger, recorder)

    mesh = paper_mesh(layout, rank, on_paper)
    with META, place:
        unmeasured = config.model_copy(update={"thermometers": ThermometersConfig()})
        state = build_state(unmeasured, mesh, vocab_size, META, draw=False, products=products)
    mesh.ledger.clear()
    recorder.ledger = mesh.ledger
    recorder.sections[:] = [Section(None)]
    memory = _step(config, state, mesh, recorder, walked, vocab_size)
    assert recorder.sections[-1].action is None, "the last section is behind the schedule"
    sections = expanded(recorder.sections, parallel, mesh.pp.rank, walked, count)
    return Walk(rank, layout.coordinates(rank), memory, tuple(sections), walked)


def steady(parallel: ParallelConfig, count: int) -> int:
    """The micro-batches of a shorter step that has all that the whole one has, its period included."""
    few = 2 * parallel.pp + 2
    if parallel.schedule == "interleaved":
        few = 8 * parallel.pp  # its warm-up and its period are several rounds long
    return count if parallel.schedule == "gpipe" else min(count, few)


def expanded(
    sections: Sequence[Section], parallel: ParallelConfig, stage: int, walked: int, count: int
) -> list[Section]:
    """The sections of a step of `count` micro-batches, given those of one of `walked`: its period, repeated."""
    if walked == count:
        return list(sections)
    wanted = actions(parallel.schedule, stage, parallel.pp, count, parallel.virtual_stages)
    period = parallel.pp if parallel.virtual_stages > 1 else 1
    kinds = 3 if parallel.schedule == "zero_bubble" else 2
    length = period * kinds * parallel.virtual_stages
    before, *done, after = sections
    cut = len(done) // 2
    times, rest = divmod(count - walked, period)
    assert rest == 0, "interleaved steps are whole rounds"
    pattern = done[cut - length : cut]
    middle = [_moved(each, period * turn) for turn in range(1, times + 1) for each in pattern]
    end = [_moved(each, count - walked) for each in done[cut:]]
    found = [before, *done[:cut], *middle, *end, after]
    assert [each.action for each in found[1:-1]] == wanted, "a schedule's steady state repeats"
    return found


def _moved(section: Section, by: int) -> Section:
    """The same of a later micro-batch."""
    assert section.action is not None, "only actions repeat"
    kind, microbatch, chunk = section.action
    return replace(section, action=Action(kind, microbatch + by, chunk))


def _step(config: Config, state: TrainState, mesh: Mesh, recorder: Recorder, count: int, vocab_size: int) -> Memory:
    """Run a step in which all micro-batches are there, and `count` of them pass; the memory that it took."""
    train, task = config.train, TASKS[config.model.kind_and_head]
    separate = config.data.documents == "separate"
    made = [
        task.random_batch(config.model, train.micro_batch_size, vocab_size, separate_documents=separate).to(META)
        for _ in range(train.num_microbatches(config.parallel.dp))
    ]
    with recorder.place, recorder, _heard(state, recorder, count) as watch:
        train_step(state, made, mesh, train)
    return taken(state, watch)


@dataclass(frozen=True)
class _Shorter(Runner):
    """Runs the first micro-batches alone."""

    count: int = 0

    def run(self, inputs: Sequence[Any]) -> Tensor:
        return super().run(inputs[: self.count])


@contextmanager
def _heard(state: TrainState, recorder: Recorder, count: int) -> Iterator[Watch]:
    """A step that runs within this tells the recorder of its actions, is watched, and runs `count` micro-batches."""
    with watched(state, recorder) as watch:
        recorder.come_and_go = lambda: watch.come_and_go
        runner = state.runner
        state.runner = _Shorter(**vars(replace(runner, begins=recorder.begin)), count=count)
        try:
            yield watch
        finally:
            state.runner = runner


@contextmanager
def watched(state: TrainState, live: Any) -> Iterator[Watch]:
    """A step that runs within this is watched."""
    watch, runner = Watch(state.ownership, state.buckets, live), state.runner
    owners = [chunk.owner for chunk in runner.chunks]
    state.runner = replace(runner, owner=watch)
    for chunk in runner.chunks:
        chunk.owner = watch
    try:
        yield watch
    finally:
        state.runner = runner
        for chunk, owner in zip(runner.chunks, owners, strict=True):
            chunk.owner = owner


def taken(state: TrainState, watch: Watch) -> Memory:
    """What a state holds between steps, and the most that came on top of it in the step that was watched."""
    buckets, kept = state.buckets, state.optimizer_state
    parameters = [buffer for bucket in buckets for buffer in (bucket.parameters, bucket.shard)]
    gradients = [buffer for bucket in buckets for buffer in (bucket.gradients, bucket.reduced)]
    rule = [bucket.master for bucket in buckets] + [flat for each in kept for flat in each.values()]
    offloaded = any(bucket.storage.offload for bucket in buckets)
    brought = [bucket.optimizer_gradients for bucket in buckets] if offloaded else []
    every = storage_bytes([*parameters, *gradients, *rule, *brought])
    apart = every - storage_bytes(parameters) - storage_bytes(gradients)
    return Memory(
        parameters=storage_bytes(parameters),
        gradients=storage_bytes(gradients),
        optimizer=0 if offloaded else apart,
        buffers=watch.buffers,
        activations=watch.activations,
        operators=watch.operators,
        host=apart if offloaded else 0,
    )
