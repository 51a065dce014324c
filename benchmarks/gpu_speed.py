"""How fast is a training step on one GPU, in bf16, beside other programs that train the same model?

All contestants are built in one process and take turns, A B C A B C …; a step lasts until its loss is known. Peak
memory is what torch's allocator gave out beyond what was there before a contestant was built. Writes
`results/<date>-<gpu>.json` and `.md`.

    python -m benchmarks.gpu_speed                                         some three minutes
    python -m benchmarks.gpu_speed --rows gpt2-355m --contestants colonnade plain
"""

import argparse
import contextlib
import datetime
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks import colonnade_step, hardware, plain_gpt
from benchmarks.peers.reference import SIZES, Task
from colonnade import gpu_kernels
from colonnade.architecture.devices import peak_flops
from colonnade.architecture.families import architecture_of

RESULTS = Path(__file__).resolve().parent / "results"
Step = Callable[[], float]
ROWS = {name: Task(dtype="bf16", device="cuda", **SIZES[name]) for name in ("gpt2-355m", "megatron-1.2b")}
ROWS["gpt2-355m, dropout 0.1"] = replace(ROWS["gpt2-355m"], dropout=0.1, micro_batch_size=8)


def without_own_kernels(task: Task) -> Step:
    step = colonnade_step.build_step(task)

    def by_operators() -> float:
        with patch.object(gpu_kernels, "lacking", lambda: "own kernels"):
            return step()

    return by_operators


def transformers(task: Task) -> Step:
    from benchmarks.peers.transformers_step import build_step

    assert not task.dropout, "its own places of dropout are other ones"
    return build_step(task)


CONTESTANTS: dict[str, Callable[[Task], Step]] = {
    "colonnade": colonnade_step.build_step,
    "colonnade, torch's operators alone": without_own_kernels,
    "plain": lambda task: plain_gpt.build_step(task, compiled=False),
    "compile": lambda task: plain_gpt.build_step(task, compiled=True),
    "transformers": transformers,
}
LEFT_OUT = {
    "megatron-1.2b": ("colonnade, torch's operators alone", "transformers", "compile"),
    "gpt2-355m, dropout 0.1": ("transformers", "compile"),
}
"""What takes long to build, and transformers where it cannot."""


@contextlib.contextmanager
def built(task: Task, names: list[str], warmup: int) -> Iterator[tuple[dict[str, Step], dict[str, dict[str, Any]]]]:
    """Steps that have been warmed up, and what was learnt meanwhile."""
    steps: dict[str, Step] = {}
    told: dict[str, dict[str, Any]] = {}
    for name in names:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        try:
            steps[name] = CONTESTANTS[name](task)
            losses = [steps[name]() for _ in range(warmup)]
        except Exception as error:  # noqa: BLE001  the others go on
            steps.pop(name, None)
            told[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
            continue
        most = torch.cuda.max_memory_allocated() - before
        told[name] = {"peak_gpu_mb": most >> 20, "first_loss": round(losses[0], 4)}
        told[name]["seconds_to_build_and_warm_up"] = round(time.perf_counter() - began, 1)
        print(name, told[name], flush=True)
    yield steps, told
    steps.clear()
    gc.collect()
    torch.cuda.empty_cache()


def compare(row: str, line: argparse.Namespace) -> dict[str, Any]:
    task = replace(ROWS[row], threads=line.threads)
    names = [name for name in line.contestants if name not in LEFT_OUT.get(row, ())]
    per_token = architecture_of(colonnade_step.reference_config(task).model, task.vocab_size).flops_per_token
    peak = peak_flops(torch.cuda.get_device_name(), "bf16")
    seconds: dict[str, list[float]] = {}
    with built(task, names, line.warmup) as (steps, told):
        for _ in range(line.rounds):
            for name, step in steps.items():
                torch.cuda.synchronize()
                for _ in range(line.steps):
                    began = time.perf_counter()
                    told[name]["last_loss"] = round(step(), 4)
                    seconds.setdefault(name, []).append(time.perf_counter() - began)
    for name, times in seconds.items():
        rate = task.tokens_per_step / statistics.median(times)
        told[name] |= {
            "step_ms": round(1e3 * statistics.median(times), 1),
            "step_ms_min": round(1e3 * min(times), 1),
            "step_ms_max": round(1e3 * max(times), 1),
            "tokens_per_second": round(rate),
            "tflops": round(rate * per_token / 1e12, 1),
            "mfu": None if peak is None else round(rate * per_token / peak, 4),
        }
    return {"row": row, "tokens_per_step": task.tokens_per_step, "flops_per_token": per_token, "contestants": told}


def table(report: dict[str, Any]) -> str:
    """As Markdown."""
    lines = ["| | tokens/s | step, ms | TFLOP/s | of peak | peak memory, MB |", "|---|---|---|---|---|---|"]
    for row in report["rows"]:
        lines.append(f"| **{row['row']}**, {row['tokens_per_step']:,} tokens a step | | | | | |")
        for name, found in row["contestants"].items():
            if "step_ms" not in found:
                lines.append(f"| {name} | did not run: {found.get('error', '')} | | | | |")
                continue
            times = f"{found['step_ms']} ({found['step_ms_min']} to {found['step_ms_max']})"
            share = "" if found["mfu"] is None else f"{found['mfu']:.1%}"
            numbers = f"{found['tflops']} | {share} | {found['peak_gpu_mb']:,}"
            lines.append(f"| {name} | {found['tokens_per_second']:,} | {times} | {numbers} |")
    about = ", ".join(f"{key} {value}" for key, value in report["machine"].items())
    return "\n".join([f"# One training step on one GPU, bf16\n\n{about}.\n\n`{report['command']}`\n", *lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Training steps on one GPU, side by side.")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each round")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--threads", type=int, default=8, help="CPU threads")
    parser.add_argument("--commit", default=hardware.commit(), help="where git does not say")
    parser.add_argument("--output", type=Path, help="results file without its ending")
    line = parser.parse_args()
    torch.set_num_threads(line.threads)
    gpu = torch.cuda.get_device_name()
    machine = {
        "GPU": gpu,
        "CPU": hardware.cpu_name(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "commit": line.commit,
    }
    name = f"{datetime.date.today()}-{'-'.join(gpu.lower().split())}"
    output = line.output or RESULTS / name
    report: dict[str, Any] = {"machine": machine, "command": hardware.command_line(), "rows": []}
    for row in line.rows:
        report["rows"].append(compare(row, line))
        output.with_name(output.name + ".json").write_text(json.dumps(report, indent=1) + "\n")
        output.with_name(output.name + ".md").write_text(table(report))
        print(table(report), flush=True)


if __name__ == "__main__":
    main()
