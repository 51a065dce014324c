"""One rank to another: what arrives, in which order, what the ledger says."""

import pytest
import torch
import torch.distributed as dist

from colonnade.mesh.collectives import all_reduce_
from colonnade.mesh.layout import Layout
from colonnade.mesh.ledger import Ledger
from colonnade.mesh.mesh import Axis, build_mesh, paper_mesh
from colonnade.mesh.point_to_point import receive_, send
from colonnade.mesh.transport import Groups, TorchTransport, warm_up_p2p
from tests.distributed import run_on_ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64]


def numbers(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(6).view(2, 3) + 10 * rank).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_who_both_send_first(dtype: torch.dtype) -> None:
    def ring(rank: int, size: int) -> list[torch.Tensor]:
        pp = build_mesh(Layout(pp=size), rank).pp
        sent = [send(numbers(rank, dtype), pp, (rank + step) % size) for step in (1, -1)]
        left, right = torch.empty(2, 3, dtype=dtype), torch.empty(2, 3, dtype=dtype)
        pending = [receive_(left, pp, (rank - 1) % size), receive_(right, pp, (rank + 1) % size)]
        for one in (*pending, *sent):
            one.wait()
        return [left, right]

    for rank, (left, right) in enumerate(run_on_ranks(ring, 3)):
        assert torch.equal(left, numbers((rank - 1) % 3, dtype)) and torch.equal(right, numbers((rank + 1) % 3, dtype))


def test_what_one_rank_sends_another_arrives_in_order_whatever_else_goes_on() -> None:
    def program(rank: int, size: int) -> list[float]:
        mesh = build_mesh(Layout(pp=2, dp=2), rank)
        boxes = [torch.full((70000,), float(i) * (1 - mesh.pp.rank)) for i in range(8)]
        move = (lambda x: send(x, mesh.pp, 1)) if mesh.pp.rank == 0 else (lambda x: receive_(x, mesh.pp, 0))
        pending = []
        for box in boxes:
            pending.append(move(box))
            all_reduce_(torch.ones(3), mesh.dp).wait()
        for one in pending:
            one.wait()
        return [float(box.sum()) / 70000 for box in boxes]

    for boxes in run_on_ranks(program, 4):
        assert boxes == [float(i) for i in range(8)]


def written(pp: Axis) -> list[tuple[str, str, tuple[int, ...], str, int, int | None, int]]:
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    pending = []
    if pp.rank == 1:
        pending = [receive_(x, pp, 0), send(x, pp, 2), send(x, pp, 2), receive_(x.clone(), pp, 2)]
    elif pp.rank == 0:
        pending = [send(x, pp, 1)]
    else:
        pending = [receive_(x, pp, 1), receive_(x.clone(), pp, 1), send(x, pp, 1)]
    for one in pending:
        one.wait()
    assert pp.transport is not None
    assert all(entry.site.startswith("mesh/test_point_to_point.py:") for entry in pp.transport.ledger.entries)
    return [(e.operation, e.axis, e.shape, e.dtype, e.bytes, e.peer, e.number) for e in pp.transport.ledger.entries]


def test_both_ends_are_in_the_ledger_on_paper_as_on_ranks() -> None:
    real = run_on_ranks(lambda rank, size: written(build_mesh(Layout(pp=size), rank).pp), 3)
    assert real == [written(paper_mesh(Layout(pp=3), rank).pp) for rank in range(3)]
    assert real[1] == [
        ("receive", "pp", (2, 3), "bfloat16", 12, 0, 1),
        ("send", "pp", (2, 3), "bfloat16", 12, 2, 1),
        ("send", "pp", (2, 3), "bfloat16", 12, 2, 2),
        ("receive", "pp", (2, 3), "bfloat16", 12, 2, 1),
    ]


def test_nobody_talks_to_themselves_or_to_who_is_not_there() -> None:
    x = torch.ones(1)
    with pytest.raises(AssertionError, match="pp has one rank: it has nobody to talk to"):
        send(x, Axis("pp"), 0)
    for peer in (1, 2, -1):
        with pytest.raises(AssertionError, match=f"rank 1 of pp cannot talk to rank {peer}"):
            receive_(x, paper_mesh(Layout(pp=2), 1).pp, peer)


def test_on_a_device_each_direction_has_its_group() -> None:
    """Their order within a group is the same on both ends, whatever the two send first."""

    class Group:
        def __init__(self, rank: int) -> None:
            self.rank = lambda: rank

    x = torch.empty(1, device="meta")  # no CPU tensor
    for rank in range(3):
        groups = Groups(*(Group(rank) for _ in range(3)))  # type: ignore[arg-type]
        transport = TorchTransport("pp", groups, 3, Ledger())
        for other in {0, 1, 2} - {rank}:
            up, down = groups.upward, groups.downward
            assert transport._between(x, rank, other) is (up if other > rank else down)
            assert transport._between(x, other, rank) is (down if other > rank else up)
        assert transport._between(torch.empty(1), rank, (rank + 1) % 3) is groups.collective


@pytest.mark.parametrize(("size", "pairs"), [(2, [(0, 1)]), (4, [(0, 1), (0, 3), (1, 2), (2, 3)])])
def test_neighbours_are_greeted_both_ways_each_by_the_group_of_its_direction(
    size: int, pairs: list[tuple[int, int]]
) -> None:
    """The last and the first among them. gloo stands in for NCCL here: every word is awaited by whom it is for."""

    def program(rank: int, size: int) -> list[tuple[int, bool]]:
        own, up, down = (dist.new_group(list(range(size))) for _ in range(3))
        greeted, send = list[tuple[int, bool]](), dist.send

        def noted(word: torch.Tensor, *, group: dist.ProcessGroup, group_dst: int) -> None:
            assert group in (up, down)
            greeted.append((group_dst, group is up))
            send(word, group=group, group_dst=group_dst)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "send", noted)
            warm_up_p2p(Groups(own, up, down), rank, size, torch.device("cpu"))
        return greeted

    found = run_on_ranks(program, size)
    for rank, greeted in enumerate(found):
        above, below = ([pair[1 - at] for pair in pairs if pair[at] == rank] for at in (0, 1))
        assert sorted(greeted) == sorted([(other, True) for other in above] + [(other, False) for other in below])
