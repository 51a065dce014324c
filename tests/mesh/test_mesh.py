"""A rank's axes: who is on them, and which of them can talk."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colonnade.mesh import mesh as mesh_module
from colonnade.mesh.collectives import all_gather
from colonnade.mesh.layout import AXES, Layout
from colonnade.mesh.mesh import COMBINED, Axis, Mesh, build_mesh, paper_mesh
from colonnade.mesh.shared_memory import SharedMemoryTransport
from colonnade.mesh.transport import TorchTransport
from tests.distributed import run_on_ranks

LAYOUT = Layout(tp=2, pp=2, dp=2)
ALONG = {**{name: (name,) for name in AXES}, **COMBINED}
GROUPS = [*ALONG, "ends"]


def axis_of(mesh: Mesh, name: str) -> Axis:
    axis: Axis = getattr(mesh, name)
    return axis


@pytest.mark.parametrize("rank", range(8))
def test_every_axis_is_this_ranks_group(rank: int) -> None:
    mesh = paper_mesh(LAYOUT, rank)
    for name in GROUPS:
        axis = axis_of(mesh, name)
        assert axis.ranks in (LAYOUT.groups(*ALONG[name]) if name in ALONG else LAYOUT.ends())
        assert axis.ranks[axis.rank] == rank and axis.size == len(axis.ranks) and axis.name == name
    assert mesh.rank == rank and mesh.layout == LAYOUT


def test_coordinates_as_log_lines_start() -> None:
    assert paper_mesh(LAYOUT, 6).coordinates == "[pp1 dp1 tp0]"
    assert Mesh().coordinates == "[pp0 dp0 tp0]"


def test_only_axes_of_several_ranks_have_a_transport() -> None:
    mesh = paper_mesh(Layout(tp=4, dp=1), 2)
    assert {name for name in GROUPS if axis_of(mesh, name).transport is not None} == {"tp", "model", "stage", "world"}
    assert all(axis_of(Mesh(), name).transport is None for name in GROUPS)


def test_all_axes_write_one_ledger() -> None:
    mesh = paper_mesh(LAYOUT, 0)
    for name in GROUPS:
        all_gather(torch.zeros(1), axis_of(mesh, name))
    assert [entry.axis for entry in mesh.ledger.entries] == list(GROUPS)


def test_real_groups_join_the_ranks_of_the_layout() -> None:
    def ranks_met(rank: int, num_ranks: int) -> dict[str, list[float]]:
        mesh = build_mesh(LAYOUT, rank)
        return {name: all_gather(torch.tensor([float(rank)]), axis_of(mesh, name)).tolist() for name in GROUPS}

    for rank, met in enumerate(run_on_ranks(ranks_met, 8)):
        expected = {name: list(axis_of(paper_mesh(LAYOUT, rank), name).ranks) for name in GROUPS}
        assert met == expected


def test_ends_join_the_first_and_the_last_stage() -> None:
    layout = Layout(tp=2, pp=3)
    ends = [paper_mesh(layout, rank).ends for rank in range(6)]
    assert [(end.size, end.rank, end.ranks) for end in ends] == [
        (2, 0, (0, 4)), (2, 0, (1, 5)), (1, 0, (2,)), (1, 0, (3,)), (2, 1, (0, 4)), (2, 1, (1, 5))
    ]  # fmt: skip
    assert [end.transport is None for end in ends] == [False, False, True, True, False, False]


def test_axes_of_the_same_ranks_share_their_groups() -> None:
    def groups(rank: int, num_ranks: int) -> tuple[bool, int]:
        mesh = build_mesh(Layout(pp=2), rank)
        joined = {
            id(getattr(axis_of(mesh, name).transport, "groups", None)) for name in ("pp", "model", "world", "ends")
        }
        return len(joined) == 1, torch.distributed.get_pg_count()

    assert run_on_ranks(groups, 2) == [(True, 2)] * 2  # the run's own and one more


def test_a_pipeline_of_gpus_has_a_group_for_each_direction_and_no_other_axis_has() -> None:
    """Stages 0 and 2 of three share weights besides. gloo stands in for NCCL."""

    def groups(rank: int, num_ranks: int) -> tuple[list[str | None], bool]:
        asked: list[str | None] = []
        new_group = dist.new_group

        def noted(ranks: list[int], *, timeout: timedelta, backend: str | None) -> Any:
            asked.append(backend)
            return new_group(ranks, timeout=timeout)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "new_group", noted)
            patch.setattr(mesh_module, "_has_nccl", lambda: True)
            patch.setattr(mesh_module, "warm_up_p2p", lambda *_: None)
            transport = build_mesh(Layout(pp=3), rank).pp.transport
        assert isinstance(transport, TorchTransport)
        own, up, down = transport.groups.collective, transport.groups.upward, transport.groups.downward
        return asked, own is not up is not down is not own

    assert run_on_ranks(groups, 3) == [([None, "nccl", "nccl", None], True)] * 3


def test_the_serial_mesh_is_the_mesh_of_one_rank() -> None:
    def axes(rank: int, num_ranks: int) -> list[Axis]:
        mesh = build_mesh(Layout(), rank)
        return [axis_of(mesh, name) for name in GROUPS]

    (built,) = run_on_ranks(axes, 1)
    assert built == [axis_of(Mesh(), name) for name in GROUPS] == [axis_of(paper_mesh(Layout(), 0), n) for n in GROUPS]


def test_every_group_fails_after_the_time_that_an_operation_may_take() -> None:
    """Torch's own limit would be half an hour. And every wait in memory that ranks share."""

    def limits(rank: int, num_ranks: int) -> set[float]:
        found: list[timedelta] = []
        new_group = dist.new_group

        def noted(*arguments: Any, **more: Any) -> Any:
            found.append(more["timeout"])
            return new_group(*arguments, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "new_group", noted)
            mesh = build_mesh(Layout(tp=2, dp=2), rank, timeout=77.0)
        transports = [axis_of(mesh, name).transport for name in GROUPS]
        shared = {each.segment.timeout for each in transports if isinstance(each, SharedMemoryTransport)}
        return {limit.total_seconds() for limit in found} | shared

    assert run_on_ranks(limits, 4) == [{77.0}] * 4
