"""The ledger: what was sent, how much, on which axis, and who asked."""

import inspect
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from colonnade.mesh import collectives, shared_memory
from colonnade.mesh import mesh as mesh_module
from colonnade.mesh.collectives import Entrance, copy_to, reduce_from
from colonnade.mesh.layout import Layout
from colonnade.mesh.ledger import Entry, Ledger, Site
from colonnade.mesh.mesh import Mesh, build_mesh, paper_mesh
from colonnade.mesh.point_to_point import receive_, send
from colonnade.mesh.shared_memory import SharedMemoryTransport
from tests.distributed import run_on_ranks

LAYOUT = Layout(tp=4, dp=2)
HERE = "/".join(Path(__file__).parts[-2:])


def line() -> int:
    """The line that calls this."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def without_times(entry: Entry) -> dict[str, Any]:
    return {key: value for key, value in asdict(entry).items() if key not in ("started", "seconds")}


def everything(mesh: Mesh) -> list[dict[str, Any]]:
    """One of each collective; what was written down."""
    x = torch.ones(8, 3, dtype=torch.float32, requires_grad=True)
    collectives.all_reduce(x.detach().bfloat16(), mesh.dp, "max")
    collectives.all_reduce_(torch.ones(5), mesh.world).wait()
    collectives.all_gather(x.detach()[:, :1], mesh.tp)
    collectives.reduce_scatter(x.detach(), mesh.tp)
    collectives.broadcast_(torch.ones(2, dtype=torch.int64), mesh.model, source=1)
    y = reduce_from(copy_to(x, mesh.tp) * 2, mesh.tp)
    collectives.gather_sequence(collectives.scatter_sequence(y, mesh.tp), mesh.tp).sum().backward()
    return [without_times(entry) for entry in mesh.ledger.entries]


def test_every_collective_is_an_entry() -> None:
    entries = everything(paper_mesh(LAYOUT, 5))
    first = inspect.getsourcelines(everything)[1] + 3
    brief = [(e["operation"], e["axis"], e["shape"], e["dtype"], e["bytes"], e["backward"]) for e in entries]
    assert brief == [
        ("all_reduce", "dp", (8, 3), "bfloat16", 48, False),
        ("all_reduce", "world", (5,), "float32", 20, False),
        ("all_gather", "tp", (8, 1), "float32", 32, False),
        ("reduce_scatter", "tp", (8, 3), "float32", 96, False),
        ("broadcast", "model", (2,), "int64", 16, False),
        ("all_reduce", "tp", (8, 3), "float32", 96, False),
        ("reduce_scatter", "tp", (8, 3), "float32", 96, False),
        ("all_gather", "tp", (2, 3), "float32", 24, False),
        ("reduce_scatter", "tp", (8, 3), "float32", 96, True),
        ("all_gather", "tp", (2, 3), "float32", 24, True),
        ("all_reduce", "tp", (8, 3), "float32", 96, True),
    ]
    lines = [0, 1, 2, 3, 4, 5, 6, 6, 6, 6, 5]  # a backward entry names the line of its forward
    assert [e["site"] for e in entries] == [f"{HERE}:{first + offset}" for offset in lines]


def in_place(mesh: Mesh) -> list[dict[str, Any]]:
    """What writes into memory that is there, and transfers."""
    collectives.all_gather_into_(torch.empty(12), torch.ones(3), mesh.tp).wait()
    collectives.reduce_scatter_into_(torch.empty(3, dtype=torch.bfloat16), torch.ones(12).bfloat16(), mesh.tp).wait()
    number = torch.ones(7, dtype=torch.int64)
    (send(number, mesh.dp, 1) if mesh.dp.rank == 0 else receive_(number, mesh.dp, 0)).wait()
    return [without_times(entry) for entry in mesh.ledger.entries]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("one_machine", [True, False])
@pytest.mark.parametrize("operations", [everything, in_place])
def test_paper_and_real_ranks_write_the_same(
    operations: Callable[[Mesh], list[dict[str, Any]]], one_machine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through memory that ranks share, and through torch's groups where they share none."""
    if not one_machine:
        monkeypatch.setattr(mesh_module, "share_memory", lambda *_: None)

    def program(rank: int, num_ranks: int) -> tuple[bool, list[dict[str, Any]]]:
        mesh = build_mesh(LAYOUT, rank)
        return isinstance(mesh.tp.transport, SharedMemoryTransport), operations(mesh)

    for rank, (shares, entries) in enumerate(run_on_ranks(program, LAYOUT.num_ranks)):
        assert shares == one_machine and entries == operations(paper_mesh(LAYOUT, rank))


def test_an_axis_of_one_rank_writes_nothing() -> None:
    assert everything(Mesh()) == []


def test_totals_outlive_entries() -> None:
    mesh = paper_mesh(LAYOUT, 0)
    for _ in range(5000):
        collectives.all_reduce(torch.ones(3), mesh.tp)
    collectives.all_gather(torch.ones(2), mesh.dp)
    assert len(mesh.ledger.entries) < 5000
    assert mesh.ledger.counts == {("all_reduce", "tp"): 5000, ("all_gather", "dp"): 1}
    assert mesh.ledger.bytes == {("all_reduce", "tp"): 60000, ("all_gather", "dp"): 8}
    mesh.ledger.clear()
    assert not mesh.ledger.entries and not mesh.ledger.counts and not mesh.ledger.bytes


def test_a_step_behind_forgotten_totals_counts_all_that_it_sends() -> None:
    mesh = paper_mesh(LAYOUT, 0)
    mesh.ledger.begin_step(1)
    collectives.all_reduce(torch.ones(5), mesh.tp)
    mesh.ledger.begin_step(2)
    mesh.ledger.clear()
    collectives.all_reduce(torch.ones(8), mesh.tp)
    mesh.ledger.begin_step(3)
    assert [*mesh.ledger.sent_by_step] == [(1, {"tp": 20}), (2, {"tp": 32})]


def test_a_step_has_sent_what_all_its_operations_put_in_by_axis() -> None:
    """What comes is what another rank sends: it counts there."""
    mesh = paper_mesh(Layout(tp=2, pp=2), 0)
    for step in (1, 2):
        mesh.ledger.begin_step(step)
        collectives.all_reduce(torch.ones(5), mesh.tp)
        collectives.all_gather(torch.ones(2), mesh.tp)
        send(torch.ones(3), mesh.pp, 1), receive_(torch.ones(7), mesh.pp, 1)
    assert mesh.ledger.least_of_steps() == {"tp": 28, "pp": 12}
    assert [*mesh.ledger.sent_by_step] == [(step, {"tp": 28, "pp": 12}) for step in (1, 2)]


def test_what_is_sent_between_steps_is_no_steps() -> None:
    """Which step was last is known meanwhile."""
    mesh = paper_mesh(LAYOUT, 0)
    for step in (1, 2):
        mesh.ledger.begin_step(step)
        collectives.all_reduce(torch.ones(5), mesh.tp)
        mesh.ledger.rest()
        collectives.all_reduce(torch.ones(70), mesh.tp)
        assert mesh.ledger.step == step
    assert mesh.ledger.least_of_steps() == {"tp": 20}
    assert [*mesh.ledger.sent_by_step] == [(1, {"tp": 20}), (2, {"tp": 20})]


def test_steps_that_sent_nothing_are_not_those_that_sent_least() -> None:
    mesh = paper_mesh(LAYOUT, 0)
    for step, count in enumerate((5, 0, 3), 1):
        mesh.ledger.begin_step(step)
        if count:
            collectives.all_reduce(torch.ones(count), mesh.tp)
    assert mesh.ledger.least_of_steps() == {"tp": 12} and Ledger().least_of_steps() == {}
    assert mesh.ledger.least_of_steps({1, 2}) == {"tp": 20} and mesh.ledger.least_of_steps({2, 4}) == {}


def test_the_backward_of_a_line_in_another_function_names_that_line() -> None:
    mesh = paper_mesh(LAYOUT, 0)
    x = torch.ones(2, requires_grad=True)
    y, asked = copy_to(x, mesh.tp), line()
    y.sum().backward()
    (entry,) = mesh.ledger.entries
    assert entry.site == f"{HERE}:{asked}" and entry.backward


def test_waits_for_one_collective_have_its_number_on_all_ranks_and_transfers_none() -> None:
    """A profile finds by it who came last; of transfers the numbers are of a direction and a peer."""
    ledger, numbers = Ledger(), list[int]()
    begin = SimpleNamespace(begin=lambda *_, number, **__: numbers.append(number), end=lambda: None)
    ledger.clock = cast(Any, begin)
    for peer in (None, None, 1):
        ledger.wait(ledger.open("all_reduce", "tp", torch.ones(2), Site("somewhere.py:1"), peer), lambda: None)
    assert numbers == [1, 2, 0]


def test_an_entry_is_open_until_its_result_can_be_used() -> None:
    ledger = Ledger()
    entry = ledger.open("all_reduce", "tp", torch.ones(2), Site("somewhere.py:1"))
    assert ledger.entries[-1] is entry and entry.seconds is None
    ledger.close(entry)
    assert entry.seconds is not None and entry.seconds >= 0


def test_a_pending_all_reduce_is_open_until_waited_for() -> None:
    def program(rank: int, num_ranks: int) -> tuple[float | None, float | None]:
        shared_memory.is_possible = lambda: False  # gloo works beside the program; this process ends with it
        mesh = build_mesh(Layout(dp=2), rank)
        pending = collectives.all_reduce_(torch.ones(2), mesh.dp)
        (entry,) = mesh.ledger.entries
        before = entry.seconds
        pending.wait()
        return before, entry.seconds

    for before, after in run_on_ranks(program, 2):
        assert before is None and after is not None and after > 0


def test_an_unknown_reduction_is_refused_on_paper_too() -> None:
    with pytest.raises(AssertionError, match="median is no reduction"):
        collectives.all_reduce(torch.ones(2), paper_mesh(LAYOUT, 0).tp, "median")


def in_part(part: str | None, call: Callable[[], Any]) -> Any:
    """`call`, as if a file had called it that names itself a part of a unit, or one that does not."""
    scope: dict[str, Any] = {} if part is None else {"LEDGER_PART": part}
    exec("def run(call):\n    return call()", scope)
    return scope["run"](call)


def test_entries_name_the_layer_forward_and_backward() -> None:
    mesh = paper_mesh(LAYOUT, 0)
    x = torch.ones(2, requires_grad=True)

    def layer() -> torch.Tensor:
        return reduce_from(copy_to(x, mesh.tp), mesh.tp)

    for unit, part in (("blocks.7", "mlp"), ("blocks.8", "attention"), ("head", None)):
        mesh.ledger.unit = unit
        y = in_part(part, layer)
    mesh.ledger.unit = "blocks.7"
    in_part("mlp", layer).sum().backward()
    mesh.ledger.unit = "another"
    y.sum().backward()  # the backward of a layer is that layer's, whatever is at work
    assert [(entry.layer, entry.backward) for entry in mesh.ledger.entries] == [
        ("blocks.7.mlp", False), ("blocks.8.attention", False), ("head", False),
        ("blocks.7.mlp", False), ("blocks.7.mlp", True), ("head", True),
    ]  # fmt: skip


@pytest.mark.parametrize("cut", [False, True])
def test_the_way_back_through_an_entrance_is_its_layers_too(cut: bool) -> None:
    mesh = paper_mesh(LAYOUT, 0)
    mesh.ledger.unit = "blocks.7"
    x, back = in_part("mlp", lambda: Entrance(mesh.tp, cut).enter(torch.ones(4)))
    mesh.ledger.unit = "another"
    back.start_back(x)[1].wait()
    operation = "reduce_scatter" if cut else "all_reduce"
    forward = [("all_gather", "blocks.7.mlp", False)] if cut else []
    assert [(entry.operation, entry.layer, entry.backward) for entry in mesh.ledger.entries] == [
        *forward,
        (operation, "blocks.7.mlp", True),
    ]


def test_entries_are_numbered_by_axis_and_transfers_by_peer() -> None:
    mesh = paper_mesh(Layout(tp=2, pp=3), 2)
    x = torch.ones(2)
    for _ in range(2):
        collectives.all_reduce(x, mesh.tp)
        collectives.all_gather(x, mesh.tp)
        send(x, mesh.pp, 2), receive_(x, mesh.pp, 0), receive_(x, mesh.pp, 2)
        mesh.ledger.clear()  # numbers go on, as those of the other ranks do
    collectives.all_reduce(x, mesh.world)
    mesh.ledger.begin_step(3)
    collectives.all_reduce(x, mesh.tp)
    assert [entry.number for entry in mesh.ledger.entries] == [1, 5]
    assert mesh.ledger.numbers == {"tp": 5, "world": 1, "pp send 2": 2, "pp receive 0": 2, "pp receive 2": 2}
    assert mesh.ledger.step == 3 and mesh.ledger.step_numbers["tp"] == 4


def test_what_is_waited_for_is_known_meanwhile_and_a_failure_is_told_first() -> None:
    ledger, told = Ledger(), []
    entry = ledger.open("all_reduce", "tp", torch.ones(2), Site("somewhere.py:1"))

    def fail() -> None:
        assert ledger.waiting is not None and ledger.waiting[0] is entry
        raise ConnectionError("gone")

    ledger.on_failure = lambda error: told.append((error, ledger.waiting is not None))
    with pytest.raises(ConnectionError) as caught:
        ledger.wait(entry, fail)
    assert told == [(caught.value, True)] and ledger.waiting is None
    assert ledger.wait(entry, lambda: 5) == 5


def test_a_device_that_stood_still_is_counted_when_it_has_come_that_far() -> None:
    """Its events are in milliseconds; a pair that is not over yet counts later, and each once."""
    over = [False]

    def pair(milliseconds: float, is_over: list[bool]) -> tuple[Any, Any]:
        began = SimpleNamespace(elapsed_time=lambda ended: milliseconds)
        return began, SimpleNamespace(query=lambda: is_over[0])

    ledger = Ledger(waited=1.0, stalls=[pair(2000.0, [True]), pair(500.0, over), pair(1000.0, [True])])
    assert ledger.stood_still() == ledger.stood_still() == 4.0
    over[0] = True
    assert ledger.stood_still() == ledger.stood_still() == 4.5
    assert Ledger(waited=1.0).stood_still() == 1.0, "nobody timed a device"


def test_waits_add_up() -> None:
    ledger = Ledger(waited=100.0)
    for _ in range(2):
        ledger.wait(ledger.open("all_reduce", "tp", torch.ones(2), Site("somewhere.py:1")), lambda: time.sleep(0.01))
    assert 100.02 <= ledger.waited < 200.0
