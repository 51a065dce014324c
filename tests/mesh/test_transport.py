"""What the ledger keeps of an operation on a device."""

import gc
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch

from colonnade.mesh import mesh as mesh_module
from colonnade.mesh import shared_memory, transport
from colonnade.mesh.collectives import all_gather_into_, all_reduce, reduce_scatter_into_
from colonnade.mesh.layout import Layout
from colonnade.mesh.ledger import Ledger, Site
from colonnade.mesh.mesh import build_mesh
from colonnade.mesh.transport import Groups, TorchTransport
from tests.distributed import run_on_ranks


class OnDevice(torch.Tensor):
    """Says that it is not in CPU memory."""

    is_cpu = False  # type: ignore[assignment]

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor).clone()


class Work:
    """As NCCL's: it owns the tensors of its operation."""

    def __init__(self, out: torch.Tensor) -> None:
        self.out, self.completed = out, False

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return self.completed


class Event:
    def __init__(self) -> None:
        self.reached = False

    def query(self) -> bool:
        return self.reached


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Those recorded, in order."""
    made: list[Event] = []
    monkeypatch.setattr(transport, "_record_event", lambda device: made.append(Event()) or made[-1])
    return made


def test_what_was_waited_for_is_not_kept_alive(events: list[Event]) -> None:
    ledger = Ledger()
    carried = TorchTransport("tp", Groups(None, None, None), 2, ledger)  # type: ignore[arg-type]
    out = torch.ones(4)
    alive = weakref.ref(out)
    pending = carried._run("all_reduce", out.as_subclass(OnDevice), Site("here.py:1"), partial(Work, out))
    (flight,) = ledger.flying
    assert len(events) == 1 and not flight.is_over, "nobody has waited for it: it may be under way"
    events[0].reached = True
    assert not flight.is_over
    pending.wait()
    assert len(events) == 2 and not flight.is_over, "the device has not come to the end of it"
    events[1].reached = True
    assert flight.is_over
    del out, pending
    gc.collect()
    assert alive() is None and list(ledger.flying) == [flight]


def test_what_the_device_has_done_is_over_before_the_program_waits_for_it(events: list[Event]) -> None:
    ledger, work = Ledger(), Work(torch.ones(4))
    carried = TorchTransport("dp", Groups(None, None, None), 2, ledger)  # type: ignore[arg-type]
    pending = carried._run("all_gather", work.out.as_subclass(OnDevice), Site("here.py:1"), lambda: work)
    (flight,) = ledger.flying
    assert not flight.is_over
    work.completed = True
    assert flight.is_over
    pending.wait()
    assert not flight.is_over, "now the end of the program's own wait counts"
    events[-1].reached = True
    assert flight.is_over


@pytest.mark.parametrize("timed", [True, False])
def test_where_a_device_is_timed_it_stands_still_from_the_wait_to_its_end(events: list[Event], timed: bool) -> None:
    """Not from the beginning of the operation: beside it the device has computed."""
    ledger = Ledger(stalls=[] if timed else None)
    carried = TorchTransport("tp", Groups(None, None, None), 2, ledger)  # type: ignore[arg-type]
    out = torch.ones(4)
    pending = carried._run("all_reduce", out.as_subclass(OnDevice), Site("here.py:1"), partial(Work, out))
    pending.wait()
    pending.wait()
    (flight,) = ledger.flying
    assert flight.ready is events[0] and flight.done is events[-1] and len(events) == (3 if timed else 2)
    assert ledger.stalls == ([(events[1], events[2])] if timed else None)


def test_an_operation_that_hangs_is_not_over(events: list[Event]) -> None:
    """The device does all that comes before the wait for it, and nothing that comes behind."""

    class Hanging(Work):
        def wait(self) -> None:
            for event in events:
                event.reached = True

    ledger = Ledger()
    carried = TorchTransport("tp", Groups(None, None, None), 2, ledger)  # type: ignore[arg-type]
    out = torch.ones(4)
    carried._run("all_reduce", out.as_subclass(OnDevice), Site("here.py:1"), partial(Hanging, out)).wait()
    (flight,) = ledger.flying
    assert flight.ready.query() and flight.done is not None and not flight.is_over


def begun_alone(rank: int, num_ranks: int, began: Path, gathers: bool) -> tuple[bool, list[float]]:
    """(Whether rank 0 had gone on while rank 1 had not begun, the result)"""
    shared_memory.is_possible = lambda: False
    axis = build_mesh(Layout(dp=2), rank).dp
    whole, part = torch.full((4,), float(rank + 1)), torch.full((2,), float(rank + 1))
    end = time.monotonic() + 10
    while rank == 1 and not began.exists() and time.monotonic() < end:
        time.sleep(0.005)
    gone_on = began.exists()
    pending = all_gather_into_(whole, part, axis) if gathers else reduce_scatter_into_(part, whole, axis)
    began.touch()
    pending.wait()
    return gone_on, (whole if gathers else part).tolist()


@pytest.mark.parametrize("gathers", [True, False])
def test_who_has_begun_an_operation_goes_on_before_the_others_begin_it(tmp_path: Path, gathers: bool) -> None:
    """So that weights are gathered and gradients are summed beside the computation."""
    expected = [1.0, 1.0, 2.0, 2.0] if gathers else [3.0, 3.0]
    found = run_on_ranks(begun_alone, 2, tmp_path / "began", gathers)
    assert found == [(False, expected), (True, expected)]


def sums_over_all(rank: int, num_ranks: int) -> tuple[list[str], float]:
    """(The kind of transport of each axis, a sum over the world) as on a CUDA run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh_module, "_has_nccl", lambda: True)
        mesh = build_mesh(Layout(tp=2, dp=2), rank)
    axes = (mesh.tp, mesh.dp, mesh.world, mesh.stage)
    total = all_reduce(torch.tensor(float(rank), dtype=torch.float64).as_subclass(OnDevice), mesh.world)
    return [type(axis.transport).__name__ for axis in axes], total.item()


def test_groups_that_sum_numbers_alone_need_no_nccl() -> None:
    for kinds, total in run_on_ranks(sums_over_all, 4):
        assert kinds[2:] == ["ScalarTransport"] * 2 and "ScalarTransport" not in kinds[:2]
        assert total == 6.0
