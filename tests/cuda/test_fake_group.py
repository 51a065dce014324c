"""What ranks ask NCCL for, on fewer processes than ranks: torch's "fake" process group carries nothing.

Groups of a mesh on hundreds of ranks; and all transfers of a step of a pipeline of two stages: which group carries
them, to whom, of which sizes, in which order, and that they come to an end, as NCCL carries them out.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from colonnade.mesh import mesh as mesh_module
from colonnade.mesh import transport
from colonnade.mesh.collectives import all_gather, all_reduce, copy_to, gather_sequence, reduce_from, reduce_scatter
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.mesh.transport import TorchTransport
from colonnade.pipeline.carry import Gradients
from colonnade.pipeline.mailbox import Mailbox
from colonnade.pipeline.messages import Message
from colonnade.pipeline.runner import Runner
from colonnade.train.state import build_state
from colonnade.train.step import train_step
from tests.parity.runs import CPU, Case, Way, configured, microbatches

LAYOUT = Layout(tp=8, pp=4, dp=16)
Groups = list[tuple[tuple[int, ...], str | None]]


@contextmanager
def joined(layout: Layout, rank: int) -> Iterator[tuple[Mesh, Groups]]:
    """The mesh of this rank, and every group that it has asked for, in order: (ranks, backend)."""
    groups: Groups = []
    make = dist.new_group

    def noted(ranks: list[int], **how: object) -> dist.ProcessGroup:
        backend = how.pop("backend", None)
        groups.append((tuple(ranks), None if backend is None else str(backend)))
        return make(ranks, backend="fake", **how)  # type: ignore[arg-type,return-value]

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.num_ranks)  # type: ignore[no-untyped-call]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "new_group", noted)
            patch.setattr(mesh_module, "_has_nccl", lambda: True)
            patch.setattr(mesh_module, "warm_up_p2p", lambda *_: None)
            patch.setattr(mesh_module, "share_memory", lambda *_: None)
            yield build_mesh(layout, rank), groups
    finally:
        dist.destroy_process_group()


def asked(rank: int) -> Groups:
    """The groups of this rank; and its collectives give the right sizes."""
    with joined(LAYOUT, rank) as (mesh, groups):
        x = torch.ones(16, 3, requires_grad=True)
        assert all_gather(x.detach(), mesh.tp).shape == (128, 3) and reduce_scatter(x.detach(), mesh.dp).shape == (1, 3)
        assert all_reduce(torch.ones(()), mesh.world).shape == ()
        reduce_from(copy_to(gather_sequence(x, mesh.tp), mesh.tp), mesh.tp).sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
        named = {getattr(mesh, name) for name in ("tp", "dp", "pp", "model", "stage", "world")}
        assert all(rank in axis.ranks and axis.ranks[axis.rank] == rank for axis in named)
    return groups


def test_all_ranks_of_512_ask_for_the_same_groups_in_the_same_order() -> None:
    first, *others = [asked(rank) for rank in (0, 137, 511)]
    assert all(groups == first for groups in others), "else they would wait for each other for ever"
    carried = {backend: [len(ranks) for ranks, asked_for in first if asked_for == backend] for _, backend in first}
    assert sorted(set(carried[None])) == [2, 4, 8, 16], "ends, pp, tp, dp: by what the run was joined with"
    assert set(carried["nccl"]) == {4} and len(carried["nccl"]) == 2 * 8 * 16, "both directions of each pipeline"
    assert sorted(set(carried["gloo"])) == [32, 128, 512], "model, stage, world: numbers alone"


# --- transfers of a pipeline ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """One end of the transfer of a tensor, as its rank asked for it."""

    group: str
    source: int
    to: int
    message: Message
    shape: tuple[int, ...]
    dtype: torch.dtype


Trace = list[Transfer | int]
"""What a rank asks for, in order; a number: its device is to wait for the transfer that stands at this place."""


class Noted:
    """What torch calls the work of a transfer."""

    def __init__(self, work: Any, trace: Trace) -> None:
        self.work, self.trace, self.place = work, trace, len(trace) - 1

    def wait(self) -> None:
        self.trace.append(self.place)
        self.work.wait()


class OnDevice(TorchFunctionMode):
    """Within: no tensor is in CPU memory, as far as who carries it can see."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function != Tensor.is_cpu.__get__ and function(*args, **(kwargs or {}))  # type: ignore[attr-defined]


def traced(rank: int, case: Case, way: Way) -> Trace:
    """All transfers of a training step of this rank of two."""
    trace: Trace = []
    put, buffers, send, receive = Mailbox.put, Runner._buffers, dist.isend, dist.irecv
    said: list[Message] = []

    def noted_put(box: Mailbox, message: Message, entries: Gradients) -> None:
        said.append(message)
        put(box, message, entries)

    def noted_buffers(runner: Runner, inputs: Sequence[Any], message: Message) -> Gradients:
        said.append(message)
        return buffers(runner, inputs, message)

    with joined(way.layout, rank) as (mesh, _), pytest.MonkeyPatch.context() as patch:
        carrier = mesh.pp.transport
        assert isinstance(carrier, TorchTransport)
        of = carrier.groups
        names = {of.collective: "collective", of.upward: "upward", of.downward: "downward"}

        def isend(x: Tensor, *, group: dist.ProcessGroup, group_dst: int) -> Noted:
            trace.append(Transfer(names[group], rank, group_dst, said[-1], tuple(x.shape), x.dtype))
            return Noted(send(x, group=group, group_dst=group_dst), trace)

        def irecv(x: Tensor, *, group: dist.ProcessGroup, group_src: int) -> Noted:
            trace.append(Transfer(names[group], group_src, rank, said[-1], tuple(x.shape), x.dtype))
            return Noted(receive(x.zero_(), group=group, group_src=group_src), trace)

        for owner, name, stands_in in (
            *((dist, "isend", isend), (dist, "irecv", irecv), (transport, "_record_event", lambda device: None)),
            *((Mailbox, "put", noted_put), (Runner, "_buffers", noted_buffers)),
        ):
            patch.setattr(owner, name, stands_in)
        config = configured(case, way)
        state = build_state(config, mesh, case.vocab_size, CPU)
        with OnDevice():
            train_step(state, microbatches(case, way, 0, mesh), mesh, config.train)
    return trace


def transfers(trace: Trace, source: int) -> list[Transfer]:
    """What goes from rank `source` to the other one, in the order in which this rank asks for it."""
    return [each for each in trace if isinstance(each, Transfer) and each.source == source]


def come_to_an_end(traces: Sequence[Trace]) -> bool:
    """Whether two ranks carry all of it out, where a device begins nothing that was asked for behind a wait that is not
    over, does what one group is asked for in turn, and a transfer is over when both have begun it.
    """
    places, over = [0, 0], [set[int](), set[int]()]
    lines = [defaultdict[str, deque[int]](deque), defaultdict[str, deque[int]](deque)]

    def goes_on(rank: int) -> bool:
        trace, place = traces[rank], places[rank]
        if place == len(trace):
            return False
        asked_for = trace[place]
        if isinstance(asked_for, int) and asked_for not in over[rank]:
            return False
        if isinstance(asked_for, Transfer):
            lines[rank][asked_for.group].append(place)
        places[rank] += 1
        return True

    def meets(group: str) -> bool:
        first, second = (line[group] for line in lines)
        if not first or not second or traces[0][first[0]] != traces[1][second[0]]:
            return False
        over[0].add(first.popleft())
        over[1].add(second.popleft())
        return True

    while any([goes_on(0), goes_on(1), *(meets(group) for group in {*lines[0], *lines[1]})]):
        pass
    return places == [len(trace) for trace in traces] and not any(
        waiting for line in lines for waiting in line.values()
    )


GPT, T5 = Case(precision="bf16", num_layers=4), Case(precision="bf16", block="t5")
WAYS: dict[str, tuple[Case, Way, int, list[tuple[int, ...]]]] = {
    "1f1b": (GPT, Way(pp=2, micro_batch_size=2), 1, [(8, 2, 16)]),
    "interleaved": (
        GPT,
        Way(pp=2, micro_batch_size=2, schedule="interleaved", virtual_stages=2),
        3,
        [(8, 2, 16)],
    ),
    "t5": (T5, Way(pp=2, micro_batch_size=4), 1, [(12, 4, 16), (8, 4, 16)]),
}
"""With the cuts of the model, and the tensors that cross one for a micro-batch."""


@pytest.mark.parametrize("name", WAYS)
def test_both_stages_ask_for_the_same_transfers_and_they_come_to_an_end(name: str) -> None:
    """Each micro-batch's activations cross each cut once, and their gradients once the other way. Between two virtual
    stages activations go down and gradients up, in line with those of other cuts.
    """
    case, way, cuts, shapes = WAYS[name]
    traces = [traced(rank, case, way) for rank in (0, 1)]
    count = case.global_batch_size // way.micro_batch_size
    for source, group in ((0, "upward"), (1, "downward")):
        sent, received = (transfers(traces[rank], source) for rank in (source, 1 - source))
        assert sent == received, "a transfer meets the one that stands at its place, whatever it is"
        assert {(each.group, each.to, each.dtype) for each in sent} == {(group, 1 - source, torch.bfloat16)}
        assert [each.shape for each in sent] == shapes * (count * cuts)
    everything = Counter(each.message for source in (0, 1) for each in transfers(traces[0], source))
    assert set(everything) == {
        Message(kind, microbatch, chunk + (kind == "B"))
        for kind in "FB" for microbatch in range(count) for chunk in range(cuts)
    }  # fmt: skip
    assert come_to_an_end(traces)
    in_one = [
        [replace(each, group="one") if isinstance(each, Transfer) else each for each in trace] for trace in traces
    ]
    assert not come_to_an_end(in_one), "each stage's transfer would stand in line behind one that waits for it"
