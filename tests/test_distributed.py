"""The test helper itself: results, errors, deaths and time limits of forked ranks."""

import os
import signal
import time

import pytest
import torch

from tests.distributed import RankFailed, run_on_ranks


def test_every_ranks_result_comes_back() -> None:
    def total(rank: int, num_ranks: int, scale: float) -> tuple[int, torch.Tensor]:
        x = torch.full((2,), scale * rank)
        torch.distributed.all_reduce(x)
        return rank, x

    torch.ones(300, 300) @ torch.ones(300, 300)  # the parent has used its thread pool
    results = run_on_ranks(total, 4, 0.5)
    assert [rank for rank, _ in results] == [0, 1, 2, 3]
    assert all(torch.equal(x, torch.full((2,), 3.0)) for _, x in results)


def test_the_first_exception_is_raised_with_its_traceback() -> None:
    def fails(rank: int, num_ranks: int) -> None:
        if rank == 2:
            raise KeyError("two")
        torch.distributed.barrier()

    with pytest.raises(KeyError) as caught:
        run_on_ranks(fails, 3)
    assert "on rank 2" in caught.value.__notes__[0] and "in fails" in caught.value.__notes__[0]


def test_an_exception_that_cannot_be_pickled() -> None:
    class Local(Exception):
        pass

    def fails(rank: int, num_ranks: int) -> None:
        raise Local("here")

    with pytest.raises(RankFailed, match="Local: here"):
        run_on_ranks(fails, 1)


def test_a_rank_that_dies_is_named() -> None:
    def dies(rank: int, num_ranks: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()

    with pytest.raises(RankFailed, match=r"rank 1 died without an exception \(exit code -9;"):
        run_on_ranks(dies, 2)


def test_the_time_limit_holds() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"ranks \[1\] did not answer within 1.0 s"):
        run_on_ranks(lambda rank, _: time.sleep(20 * rank), 2, time_limit=1.0)
    assert time.monotonic() - start < 5
