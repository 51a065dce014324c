"""The groups of a mesh on more ranks than there are, as NCCL would be asked for them: torch's "fake" process group."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from colonnade.mesh import mesh as mesh_module
from colonnade.mesh.collectives import all_gather, all_reduce, copy_to, gather_sequence, reduce_from, reduce_scatter
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import build_mesh

LAYOUT = Layout(tp=8, pp=4, dp=16)


def asked(rank: int, patch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], str | None]]:
    """Every group that this rank asks for, in order: (ranks, backend); and its collectives give the right sizes."""
    groups: list[tuple[tuple[int, ...], str | None]] = []
    make = dist.new_group

    def noted(ranks: list[int], **how: object) -> dist.ProcessGroup:
        backend = how.pop("backend", None)
        groups.append((tuple(ranks), None if backend is None else str(backend)))
        return make(ranks, backend="fake", **how)  # type: ignore[arg-type,return-value]

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=LAYOUT.num_ranks)  # type: ignore[no-untyped-call]
    try:
        patch.setattr(dist, "new_group", noted)
        patch.setattr(mesh_module, "_has_nccl", lambda: True)
        patch.setattr(mesh_module, "warm_up_p2p", lambda *_: None)
        patch.setattr(mesh_module, "share_memory", lambda *_: None)
        mesh = build_mesh(LAYOUT, rank)
        x = torch.ones(16, 3, requires_grad=True)
        assert all_gather(x.detach(), mesh.tp).shape == (128, 3) and reduce_scatter(x.detach(), mesh.dp).shape == (1, 3)
        assert all_reduce(torch.ones(()), mesh.world).shape == ()
        reduce_from(copy_to(gather_sequence(x, mesh.tp), mesh.tp), mesh.tp).sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
        named = {getattr(mesh, name) for name in ("tp", "dp", "pp", "model", "stage", "world")}
        assert all(rank in axis.ranks and axis.ranks[axis.rank] == rank for axis in named)
    finally:
        patch.undo()
        dist.destroy_process_group()
    return groups


def test_all_ranks_of_512_ask_for_the_same_groups_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = [asked(rank, monkeypatch) for rank in (0, 137, 511)]
    assert all(groups == first for groups in others), "else they would wait for each other for ever"
    carried = {backend: [len(ranks) for ranks, asked_for in first if asked_for == backend] for _, backend in first}
    assert sorted(set(carried[None])) == [2, 4, 8, 16], "ends, pp, tp, dp: by what the run was joined with"
    assert set(carried["nccl"]) == {4} and len(carried["nccl"]) == 2 * 8 * 16, "both directions of each pipeline"
    assert sorted(set(carried["gloo"])) == [32, 128, 512], "model, stage, world: numbers alone"
