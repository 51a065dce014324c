"""What the ledger keeps of an operation on a device."""

import gc
import weakref
from functools import partial

import pytest
import torch

from colonnade.mesh import mesh as mesh_module
from colonnade.mesh import transport
from colonnade.mesh.collectives import all_reduce
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
        self.out = out

    def wait(self) -> None:
        pass


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
