"""Numbers that are the same to the bit on a GPU, and copies of what it has."""

from pathlib import Path
from typing import Any

import torch

from colonnade import randomness
from colonnade.checkpoint.load import load
from colonnade.checkpoint.plan import Shard
from colonnade.gpu_kernels import lacking
from colonnade.kernels import gpu
from colonnade.kernels.dropout import keep_mask
from colonnade.kernels.norm import layer_norm, rms_norm
from colonnade.mesh.mesh import Mesh
from colonnade.model.gpt import GPT
from colonnade.model.initialize import initialize_
from colonnade.randomness import stream_keys
from colonnade.tensor_parallel.parallel import Parallel
from tests.checkpoint.test_snapshot import number, payload, saver_of
from tests.gpus import on_gpu_ranks
from tests.model.test_initialize import CONFIG, VOCAB

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


def behind_2_to_the_31(rank: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, count, last = stream_keys(5, last=range(1)), (1 << 31) + 4096, 8192
    on_gpu = keep_mask(keys, 0, count, 0.1, torch.device("cuda"))[:, -last:].cpu()
    return on_gpu, keep_mask(keys, count - last, last, 0.1, torch.device("cpu"))


def test_a_mask_of_more_elements_than_an_integer_of_32_bits_counts() -> None:
    ((on_gpu, on_cpu),) = on_gpu_ranks(behind_2_to_the_31, 1)
    assert torch.equal(on_gpu, on_cpu)


def weights(rank: int, num_ranks: int, device: str) -> dict[str, torch.Tensor]:
    gpt = GPT(CONFIG, VOCAB, Parallel(Mesh().tp)).float()
    initialize_(gpt, Mesh().tp, 1, device)
    return dict(gpt.state_dict())


def test_initial_weights() -> None:
    on_cpu, on_gpu = (on_gpu_ranks(weights, 1, device)[0] for device in ("cpu", "cuda"))
    assert len(on_cpu) > 20 and [name for name, w in on_cpu.items() if not torch.equal(w, on_gpu[name])] == []


NORMS = ((1, 256), (511, 257), (1200, 1024), (700, 5000), (40, 16_384), (30, 128), (30, 20_000))
"""Rows and their width; the last two have no kernel."""


def norm_gradients(rank: int, num_ranks: int) -> list[tuple[object, float]]:
    """Of how each is off: dx by its rounding to bf16, those of weights by fp32 sums."""
    found, generator = [], torch.Generator().manual_seed(1)
    for rows, h in NORMS:
        shapes = (rows, h), (rows, h), (h,), (h,)
        x, g, w, b = (torch.randn(*shape, generator=generator).bfloat16() for shape in shapes)
        x, g = x + 2.0, g.t().contiguous().t()  # with a mean, and strides of its own
        for kind in ("layernorm", "rmsnorm"):
            grads = []
            for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
                leaf, weight, bias = (t.to(device, dtype).requires_grad_() for t in (x, w, b))
                if kind == "rmsnorm":
                    y = rms_norm(leaf, weight, 1e-5, dtype)
                else:
                    y = layer_norm(leaf, weight, bias, 1e-5, dtype)
                for _ in range(2):  # gradients are added
                    torch.autograd.backward(y, g.to(device, dtype), retain_graph=True)
                assert leaf.grad is not None and weight.grad is not None
                grads.append([leaf.grad, weight.grad, *([bias.grad] if kind == "layernorm" else [])])
                assert device == "cpu" or gpu.differentiates(leaf) == (256 <= h <= 16_384), (rows, h)
            for name, exact, near in zip(("dx", "dw", "db"), *grads, strict=False):
                off = float((near.double().cpu() - exact).norm() / exact.norm())
                found.append(((rows, h, kind, name), off))
    return found


def test_gradients_of_norms() -> None:
    (found,) = on_gpu_ranks(norm_gradients, 1)
    assert len(found) == 5 * len(NORMS)
    assert [(name, off) for name, off in found if off > (0.004 if name[-1] == "dx" else 1e-5)] == []


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
