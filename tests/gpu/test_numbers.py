"""Numbers that are the same to the bit on a GPU, and copies of what it has."""

from pathlib import Path
from typing import Any

import torch

from colonnade import randomness
from colonnade.checkpoint.load import load
from colonnade.checkpoint.plan import Shard
from colonnade.gpu_kernels import lacking
from colonnade.kernels.dropout import keep_mask
from colonnade.kernels.gpu import norm_gradients
from colonnade.randomness import stream_keys
from tests.checkpoint.test_snapshot import number, payload, saver_of
from tests.gpus import on_gpu_ranks

MASKS = ((0, 1, 0.1), (3, 1 << 18, 0.1), (7, 1024, 0.5), (2, 2049, 0.9), (0, 7, 0.0), (5, 30_001, 0.25))
DRAWS = ("words", "uniform_16bit", "uniform", "normal")


def drawn(rank: int, num_ranks: int, device: str) -> dict[str, torch.Tensor]:
    keys = stream_keys(5, last=range(4))
    found = {name: getattr(randomness, name)(keys, 3, 1 << 18, device).cpu() for name in DRAWS}
    for at, (start, count, drop) in enumerate(MASKS):
        found[f"mask {at}"] = keep_mask(keys, start, count, drop, torch.device(device)).cpu()
    return found


def test_drawn_numbers() -> None:
    (on_gpu,), (on_cpu,) = (on_gpu_ranks(drawn, 1, device) for device in ("cuda", "cpu"))
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


def of_norm(rank: int, num_ranks: int) -> tuple[str, list[float]]:
    """How far sums are off, relative to the largest, in several shapes and both 16-bit formats."""
    off = []
    for seed, (t, h) in enumerate(((1, 1), (5, 7), (300, 130), (4096, 1024), (3000, 1536))):
        generator = torch.Generator().manual_seed(seed)
        x, g = (torch.randn(t, 1, h, generator=generator).cuda() for _ in range(2))
        for dtype in (torch.bfloat16, torch.float16):
            x16, g16 = x.to(dtype), g.to(dtype)
            mean = x16.float().mean(-1, keepdim=True)
            deviation = 1.0 / (x16.float().var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
            wide = g16.double() * ((x16.double() - mean) * deviation)
            exact = torch.stack([wide.sum((0, 1)), g16.double().sum((0, 1))])
            off.append(float((norm_gradients(g16, x16, mean, deviation) - exact).abs().max() / exact.abs().max()))
    return lacking(), off


def test_gradients_of_norms_are_summed_in_fp32() -> None:
    ((missing, off),) = on_gpu_ranks(of_norm, 1)
    assert missing == "" and max(off) < 1e-6, (missing, off)
