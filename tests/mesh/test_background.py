"""The group of a second thread: all ranks, an order of its own, and the end of a rank is the end of its operations."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from colonnade.mesh.background import background_group
from colonnade.mesh.mesh import LONGEST
from tests.distributed import run_on_ranks


def test_one_process_alone_needs_none() -> None:
    assert background_group(60.0) is None


def test_an_operation_may_take_so_many_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "new_group", lambda **how: how)
    assert background_group(90.0) == {"backend": "gloo", "timeout": timedelta(minutes=1.5)}
    assert background_group(1e15) == {"backend": "gloo", "timeout": timedelta(seconds=LONGEST)}


def test_two_threads_keep_orders_of_their_own() -> None:
    """The threads of rank 0 and of rank 1 run in opposite orders. On one group this would add apples to pears."""

    def both(rank: int, num_ranks: int) -> list[float]:
        group = background_group(60.0)
        assert group is not None and group.size() == num_ranks
        x, y = torch.full((), 1.0 + rank), torch.full((), 10.0 + rank)
        second = threading.Thread(target=dist.all_reduce, args=(y,), kwargs={"group": group})
        if rank == 0:
            second.start()
            dist.all_reduce(x)
        else:
            dist.all_reduce(x)
            second.start()
        second.join()
        return [x.item(), y.item()]

    assert run_on_ranks(both, 2) == [[3.0, 21.0]] * 2


def test_a_rank_that_does_not_come_is_not_waited_for() -> None:
    def late(rank: int, num_ranks: int) -> None:
        group = background_group(0.3)
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
                dist.all_reduce(torch.zeros(()), group=group)
        dist.barrier()

    run_on_ranks(late, 2)
