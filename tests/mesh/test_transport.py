"""What the ledger keeps of an operation on a device."""

import gc
import weakref
from functools import partial

import pytest
import torch

from colonnade.mesh import transport
from colonnade.mesh.ledger import Ledger, Site
from colonnade.mesh.transport import Groups, TorchTransport


class OnDevice(torch.Tensor):
    """Says that it is not in CPU memory."""

    is_cpu = False  # type: ignore[assignment]


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
