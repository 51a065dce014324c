"""What ranks tell each other to agree on who writes what."""

import pickle
from collections.abc import Sequence
from typing import Any
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
    over: list[object] = []
    group, create, ranks, save = (
        background_group(60.0) if grouped else None,
        module._Planner.create_local_plan,
        module.all_ranks,
        module.save_distributed,
    )

    def created(planner: module._Planner) -> SavePlan:
        told.append(create(planner))
        return told[-1]

    def saved(*arguments: Any, process_group: object, **more: Any) -> object:
        over.append(process_group)
        return save(*arguments, process_group=process_group, **more)

    with (
        patch.object(module._Planner, "create_local_plan", created),
        patch.object(module, "all_ranks", lambda group: (over.append(group), ranks(group))[1]),
        patch.object(module, "save_distributed", saved),
    ):
        agreement = agree(shards, group)
    (plan,) = told
    assert over == [group] * 2, "what is said is said there"
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


def planned(*ranks: Sequence[Shard]) -> list[list[str]]:
    """Of which tensors each of these ranks is to write something."""
    boxes = [module._boxes(shards) for shards in ranks]
    firsts = [boxes.index(each) for each in boxes]
    told = [
        module._Told(str(first), each if first == rank else None)
        for rank, (first, each) in enumerate(zip(firsts, boxes, strict=True))
    ]
    plans = [SavePlan([], planner_data=each) for each in told]
    shared, _ = module._Planner(told[0], {}).create_global_plan(plans)
    return [[name for name, *_ in plan.planner_data] for plan in shared]


def test_what_ranks_write_is_shared_by_its_bytes() -> None:
    """And not by how many numbers there are, where tensors are of several types."""
    wide = Shard("wide", (1200,), (0,), torch.zeros(1200, dtype=torch.float64))
    narrow = [Shard(f"narrow{n}", (1200,), (0,), torch.zeros(1200, dtype=torch.bfloat16)) for n in range(3)]
    assert planned([wide, *narrow], [wide, *narrow]) == [["wide"], ["narrow0", "narrow1", "narrow2"]]


def test_a_box_that_unlike_ranks_hold_is_written_by_any_of_them() -> None:
    """As the weights of norms are, beside halves of matrices."""
    norms = [Shard(f"norm{n}", (64,), (0,), torch.zeros(64)) for n in range(4)]
    written = planned([*cut(0, 1), *norms], [*cut(1, 1), *norms])
    assert [sorted(names) for names in written] == [["norm0", "norm2", "w0"], ["norm1", "norm3", "w0"]]


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
