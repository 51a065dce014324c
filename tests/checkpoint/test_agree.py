"""What ranks tell each other to agree on who writes what."""

import pickle
from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan

from colonnade.checkpoint import agree as module
from colonnade.checkpoint.agree import agree
from colonnade.checkpoint.plan import Shard
from colonnade.mesh.background import background_group
from tests.distributed import run_on_ranks

ROWS = 8


def cut(half: int, num_tensors: int) -> list[Shard]:
    """Half of the rows of some matrices."""
    rows = torch.zeros(ROWS // 2, 3)
    return [Shard(f"w{number}", (ROWS, 3), (half * ROWS // 2, 0), rows) for number in range(num_tensors)]


def agreed(shards: Sequence[Shard], *, grouped: bool = False) -> tuple[int, int, int]:
    """How many boxes this rank has told, in how many bytes, and how many bytes it is to write."""
    told: list[SavePlan] = []
    create = module._Planner.create_local_plan

    def created(planner: module._Planner) -> SavePlan:
        told.append(create(planner))
        return told[-1]

    with patch.object(module._Planner, "create_local_plan", created):
        agreement = agree(shards, background_group(60.0) if grouped else None)
    (plan,) = told
    return len(plan.planner_data.boxes or []), len(pickle.dumps(plan)), agreement.num_bytes


def copied(rank: int, num_ranks: int, num_tensors: int, grouped: bool) -> tuple[int, int, int]:
    return agreed(cut(rank % 2, num_tensors), grouped=grouped)


@pytest.mark.parametrize("grouped", [False, True])
def test_of_equal_ranks_one_tells_what_it_holds(grouped: bool) -> None:
    """Two halves on three ranks each: each rank's bytes do not grow with what another one tells, and all write some."""
    for num_tensors in (10, 100):
        boxes, sizes, written = zip(*run_on_ranks(copied, 6, num_tensors, grouped), strict=True)
        assert boxes == (num_tensors, num_tensors, 0, 0, 0, 0)
        assert max(sizes[2:]) < 250 < min(sizes[:2])
        assert sum(written) == num_tensors * ROWS * 3 * 4 and min(written) > 0


def test_what_is_told_of_a_box_is_a_few_numbers() -> None:
    """And no objects, which take three times the bytes, and many times as long to be read."""
    (_, few, _), (_, many, _) = agreed(whole(10)), agreed(whole(1010))
    assert many - few < 60 * 1000


def whole(num_tensors: int) -> list[Shard]:
    return [Shard(f"w{number}", (ROWS, 3), (0, 0), torch.zeros(ROWS, 3)) for number in range(num_tensors)]


def unlike(rank: int, num_ranks: int, change: str) -> str:
    """Four ranks of which the last is no copy of the second."""
    shards = cut(rank % 2, 3)
    if rank == 3:
        shards[1:2] = {
            "hole": [],
            "overlap": [Shard("w1", (ROWS, 3), (3, 0), torch.zeros(5, 3))],
            "dtype": [Shard("w1", (ROWS, 3), (4, 0), torch.zeros(4, 3, dtype=torch.bfloat16))],
            "shape": [Shard("w1", (ROWS + 1, 3), (4, 0), torch.zeros(4, 3))],
        }[change]
    try:
        agree(shards)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("hole", ""),  # the second rank has it
        ("overlap", "w1 [8, 3]: boxes must cover it, each element once"),
        ("dtype", "w1: shape and dtype must be the same on all ranks"),
        ("shape", "w1: shape and dtype must be the same on all ranks"),
    ],
)
def test_a_rank_that_holds_other_boxes_than_its_copies_tells_them(change: str, said: str) -> None:
    told = run_on_ranks(unlike, 4, change)
    assert len(set(told)) == 1 and told[0].startswith(said) and bool(told[0]) == bool(said)
