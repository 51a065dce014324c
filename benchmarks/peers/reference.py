"""The task every contestant is given, and the one stopwatch that times it.

A contestant is a script that builds the reference model in its own way and hands `measure` a function that takes one
whole optimizer step. The batch is fixed and random, so the loss must fall from ln(vocab_size): a contestant whose
loss stays where it was did not train, and its speed means nothing.

Every contestant prints one line, `RESULT {json}`, from rank 0.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

MODES = ("one", "tp", "sp", "pp", "dp", "zero1", "zero2", "zero3")
REPLICATED = ("dp", "zero1", "zero2", "zero3")
PIPELINE_MICROBATCHES = 8
DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class Task:
    """The reference model (a GPT-2 of 30M parameters), its optimizer, and how this run is laid out."""

    mode: str = "one"
    """`one` process, or two ranks: `tp` (tensor parallel), `sp` (with sequence parallelism), `pp` (pipeline), `dp`
    (data parallel), `zero1` to `zero3`."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    threads: int = 2
    """CPU threads of each rank."""
    steps: int = 10
    warmup: int = 3
    num_layers: int = 6
    hidden_size: int = 384
    num_heads: int = 6
    seq_length: int = 256
    vocab_size: int = 50_304
    micro_batch_size: int = 4
    learning_rate: float = 6e-4
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    gradient_clip: float = 1.0
    dropout: float = 0.0
    """Behind the embedding, of attention's probabilities and before each residual. Not all contestants have it."""
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def ffn_hidden_size(self) -> int:
        return 4 * self.hidden_size

    @property
    def bf16(self) -> bool:
        return self.dtype == "bf16"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one step over all ranks."""
        replicas = num_ranks() if self.mode in REPLICATED else 1
        return self.micro_batch_size * self.num_microbatches * self.seq_length * replicas

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a rank's step."""
        return PIPELINE_MICROBATCHES if self.mode == "pp" else 1


TINY = {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "seq_length": 32, "vocab_size": 512}
SIZES: dict[str, dict[str, Any]] = {
    "reference": {},
    "tiny": TINY,
    "gpt2-355m": {"num_layers": 24, "hidden_size": 1024, "num_heads": 16, "seq_length": 1024, "micro_batch_size": 16},
    "megatron-1.2b": {
        "num_layers": 40,
        "hidden_size": 1536,
        "num_heads": 16,
        "seq_length": 1024,
        "vocab_size": 51_200,
        "micro_batch_size": 8,
    },
}
"""The reference model, a toy, and for GPUs the models of the Megatron-LM paper (arXiv 1909.08053, tables 1 and 2) that
fit one: the second with the paper's batch.
"""


def read_task(parser: argparse.ArgumentParser | None = None) -> tuple[Task, argparse.Namespace]:
    """The task named on the command line, and the parsed line for options of the caller's own; sets the threads."""
    parser = parser or argparse.ArgumentParser()
    parser.add_argument("--mode", choices=MODES, default="one")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each rank")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the clock starts")
    parser.add_argument("--tiny", action="store_true", help="a toy model: tries the script, measures nothing")
    parser.add_argument("--size", choices=SIZES, default="reference", help="the model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dropout", type=float, default=0.0, help="chance of being dropped, everywhere")
    parser.add_argument("--onednn", action="store_true", help="fp32 products by oneDNN (matmul precision medium)")
    line = parser.parse_args()
    size = SIZES["tiny" if line.tiny else line.size]
    if (line.mode == "one") != (num_ranks() == 1):
        parser.error(f"--mode {line.mode} does not go with {num_ranks()} rank(s); start two with torchrun")
    torch.set_num_threads(line.threads)
    if line.onednn:
        torch.set_float32_matmul_precision("medium")
    more = {"dropout": line.dropout, "device": line.device}
    return Task(line.mode, line.dtype, line.threads, line.steps, line.warmup, **more, **size), line


def num_ranks() -> int:
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def start_gloo() -> None:
    """The default process group, under torchrun or, for peers that need one even so, of a single process."""
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def fixed_batch(task: Task) -> tuple[Tensor, Tensor]:
    """Tokens and labels, each int64 `[b, s]`; replicas get different ones, tensor-parallel ranks the same."""
    seed = rank() if task.mode in REPLICATED else 0
    generator = torch.Generator().manual_seed(seed)
    shape = (task.micro_batch_size, task.seq_length + 1)
    stream = torch.randint(0, task.vocab_size, shape, generator=generator)
    return stream[:, :-1].contiguous(), stream[:, 1:].contiguous()


def decay_groups(model: torch.nn.Module, task: Task) -> list[dict[str, object]]:
    """Weights decay; biases and norms do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": task.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def fused_adamw(model: torch.nn.Module, task: Task) -> torch.optim.Optimizer:
    betas = (task.beta1, task.beta2)
    return torch.optim.AdamW(decay_groups(model, task), lr=task.learning_rate, betas=betas, fused=True)


def measure(step: Callable[[], float], task: Task, *, peer: str, note: str = "") -> None:
    """Warm up, time `task.steps` calls of `step` (which returns the loss), print one `RESULT` line.

    A step lasts from a barrier to the moment the slowest rank is done. `others` is how many cores programs other than
    this one kept busy meanwhile: near 0 on a quiet machine, and a reason to distrust the numbers otherwise.
    `cpu_ms` is the CPU time of a step, all threads of all ranks: with one thread a rank, load of others hardly
    changes it.
    """
    losses = [step() for _ in range(task.warmup)]
    machine, own, began = _machine_seconds(), time.process_time(), time.perf_counter()
    seconds = []
    for _ in range(task.steps):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
    wall = time.perf_counter() - began
    mine = (seconds, time.process_time() - own, _peak_megabytes())
    ranks = _from_all_ranks(mine)
    busy = _machine_seconds() - machine
    if rank() == 0:
        slowest = [max(times) for times in zip(*(times for times, _, _ in ranks), strict=True)]
        cpu = sum(cpu for _, cpu, _ in ranks)
        result = {
            "peer": peer + (" + oneDNN" if torch.get_float32_matmul_precision() == "medium" else ""),
            **_layout(task),
            **_speed(slowest, task.tokens_per_step),
            "cpu_ms": round(1e3 * cpu / task.steps, 1),
            "peak_rss_mb": [megabytes for _, _, megabytes in ranks],
            **_on_gpu(task),
            "others": round(max(0.0, busy - cpu) / wall, 2),
            "first_loss": round(losses[0], 4),
            "last_loss": round(losses[-1], 4),
            "note": note,
        }
        print("RESULT", json.dumps(result), flush=True)


def _layout(task: Task) -> dict[str, object]:
    named = {"mode": task.mode, "dtype": task.dtype, "threads": task.threads}
    return {**named, "ranks": num_ranks(), "torch": torch.__version__}


def _on_gpu(task: Task) -> dict[str, object]:
    """The most memory that torch's allocator gave out at once."""
    if task.device == "cpu":
        return {}
    most = torch.cuda.max_memory_allocated()
    return {"device": torch.cuda.get_device_name(), "peak_gpu_mb": most >> 20, "micro_batch": task.micro_batch_size}


def _speed(seconds: list[float], tokens: int) -> dict[str, object]:
    median, low, high = statistics.median(seconds), min(seconds), max(seconds)
    return {
        "tokens_per_second": round(tokens / median, 1),
        "best_tokens_per_second": round(tokens / low, 1),
        "step_ms": round(1e3 * median, 1),
        "step_ms_min": round(1e3 * low, 1),
        "step_ms_max": round(1e3 * high, 1),
        "tokens_per_step": tokens,
    }


def _from_all_ranks(mine: tuple[list[float], float, int]) -> list[tuple[list[float], float, int]]:
    if not dist.is_initialized():
        return [mine]
    ranks = [mine] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return ranks


def _peak_megabytes() -> int:
    """The most resident memory this process ever had (VmHWM); 0 where /proc does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM")), 0)


def _machine_seconds() -> float:
    """CPU seconds all programs on this machine have used since it started; 0 where /proc does not say."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _wait, irq, softirq = map(int, stat.read_text().split("\n")[0].split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
