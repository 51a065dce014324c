"""Numbers that are the same to the bit on a GPU, and copies of what it has."""

from pathlib import Path
from typing import Any

import torch

from colonnade import randomness
from colonnade.checkpoint.load import load
from colonnade.checkpoint.plan import Shard
from colonnade.gpu_kernels import lacking
from colonnade.kernels.dropout import keep_mask
from colonnade.randomness import stream_keys
from tests.checkpoint.test_snapshot import number, payload, saver_of
from tests.gpus import on_gpu_ranks

MASKS = ((0, 1, 0.1), (3, 1 << 18, 0.1), (7, 1024, 0.5), (2, 2049, 0.9), (0, 7, 0.0), (5, 30_001, 0.25))
DRAWS = ("words", "uniform_16bit", "uniform", "normal")


def drawn(rank: int, num_ranks: int, device: str) -> tuple[str, dict[str, torch.Tensor]]:
    keys = stream_keys(5, last=range(4))
    found = {name: getattr(randomness, name)(keys, 3, 1 << 18, device).cpu() for name in DRAWS}
    for at, (start, count, drop) in enumerate(MASKS):
        found[f"mask {at}"] = keep_mask(keys, start, count, drop, torch.device(device)).cpu()
    return lacking(), found


def test_drawn_numbers() -> None:
    """And masks, by the kernel where it can be had."""
    ((_, on_cpu),), ((missing, on_gpu),) = (on_gpu_ranks(drawn, 1, device) for device in ("cpu", "cuda"))
    assert missing == ""
    assert [name for name, x in on_gpu.items() if not torch.equal(x, on_cpu[name])] == []


def saved(rank: int, num_ranks: int, folder: Path) -> tuple[bool, list[torch.Tensor]]:
    x = number((1000, 1000)).cuda()
    shards = [Shard("x", (1000, 1000), (0, 0), x), Shard("t", (1000, 1000), (0, 0), x.t())]
    with saver_of(folder, shards, overlap=True) as writer:
        snapshot: Any = writer._snapshot
        for step in (1, 2, 3):
            x.mul_(2.0)
            writer.save(payload(step), lambda: shards)
            writer.copied()
            x.add_(1.0)
        writer.wait()
        pinned = snapshot is not None and snapshot._memory.is_pinned()
    found = [Shard(s.name, s.shape, s.offsets, torch.zeros(s.shape)) for s in shards]
    load(folder / "step_00000003", found)
    return pinned, [each.data for each in found]


def test_a_gpu_is_copied_to_pinned_memory(tmp_path: Path) -> None:
    ((pinned, found),) = on_gpu_ranks(saved, 1, tmp_path)
    want = ((number((1000, 1000)) * 2 + 1) * 2 + 1) * 2
    assert pinned and torch.equal(found[0], want) and torch.equal(found[1], want.t())
