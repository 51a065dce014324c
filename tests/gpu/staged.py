"""Several ranks on one GPU. NCCL wants a GPU for each: here what ranks send goes by way of the host, over gloo.

The program of a rank is that of several GPUs but for NCCL itself, and for streams: everything sent has arrived when its
call returns.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from colonnade.mesh import mesh
from colonnade.mesh.ledger import Site
from colonnade.mesh.transport import Pending, TorchTransport


class _Arrives:
    """Takes what has been received to the device when it is waited for."""

    def __init__(self, work: Any, then: Callable[[], object]) -> None:
        self._work, self._then = work, then

    def wait(self) -> None:
        self._work.wait()
        self._then()


class StagedTransport(TorchTransport):
    def all_reduce_(self, x: Tensor, op: str, site: Site) -> Pending:
        host = x.cpu()
        super().all_reduce_(host, op, site).wait()
        x.copy_(host)
        return Pending(None)

    def all_gather_into_(self, out: Tensor, x: Tensor, site: Site) -> Pending:
        host = out.cpu()
        super().all_gather_into_(host, x.cpu(), site).wait()
        out.copy_(host)
        return Pending(None)

    def reduce_scatter_into_(self, out: Tensor, x: Tensor, site: Site) -> Pending:
        host = out.cpu()
        super().reduce_scatter_into_(host, x.cpu(), site).wait()
        out.copy_(host)
        return Pending(None)

    def broadcast_(self, x: Tensor, source: int, site: Site) -> None:
        host = x.cpu()
        super().broadcast_(host, source, site)
        x.copy_(host)

    def send(self, x: Tensor, to: int, site: Site) -> Pending:
        host = x.cpu()
        return super().send(host, to, site)

    def receive_(self, x: Tensor, source: int, site: Site) -> Pending:
        host = x.cpu()
        return Pending(_Arrives(super().receive_(host, source, site), lambda: x.copy_(host)))


@contextmanager
def staged() -> Iterator[None]:
    """Within, meshes send what is on a GPU by way of the host."""
    assert dist.get_backend() == "gloo"
    with patch.object(mesh, "TorchTransport", StagedTransport), patch.object(mesh, "share_memory", lambda *_: None):
        yield
