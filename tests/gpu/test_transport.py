"""What NCCL does with one rank, by the program's own transport."""

from typing import Any

import torch
import torch.distributed as dist

from colonnade.mesh.ledger import Ledger, Site
from colonnade.mesh.transport import Groups, TorchTransport
from tests.gpus import on_gpu_ranks


def over_nccl(rank: int, num_ranks: int) -> dict[str, Any]:
    device = torch.device("cuda", 0)
    group = dist.new_group([0], backend="nccl")
    ledger, found = Ledger(), {}
    transport, site = TorchTransport("tp", Groups(group, group, group), 1, ledger), Site("here")
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.arange(6, device=device).to(dtype)
        gathered, part = torch.zeros_like(x), torch.zeros_like(x)
        for op in ("sum", "max"):
            transport.all_reduce_(x, op, site).wait()
        transport.all_gather_into_(gathered, x, site).wait()
        transport.reduce_scatter_into_(part, x, site).wait()
        transport.broadcast_(x, 0, site)
        torch.cuda.synchronize()
        found[str(dtype)] = [t.tolist() for t in (x, gathered, part)]
    return {"found": found, "operations": [(e.operation, e.bytes) for e in ledger.entries]}


def test_collectives_of_one_rank() -> None:
    (told,) = on_gpu_ranks(over_nccl, 1)
    assert list(told["found"].values()) == [[[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 3] * 3
    assert len(told["operations"]) == 15
