"""Planned time beside measured, on this machine's CPUs: layouts and sizes that are small enough to run.

    python -m benchmarks.planner_time --hardware mine.toml [--output FILE]

`colonnade hardware --output mine.toml` writes the description. Each line is a process group of its own: one step to
warm up, the fastest of five counts. Prints the median error and the rank correlation.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from colonnade.config.model import ModelConfig
from colonnade.config.saving import CheckpointConfig
from colonnade.config.schema import (
    Config,
    DataConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import build_mesh
from colonnade.planner.estimate import estimate
from colonnade.planner.hardware import hardware
from colonnade.tasks.tasks import TASKS
from colonnade.train.state import build_state
from colonnade.train.step import train_step

VOCAB, STEPS, BATCH = 512, 5, 8
SIZES = ((2, 64, 64), (4, 128, 128), (6, 256, 128), (4, 384, 128), (8, 256, 256))
"""(layers, hidden, sequence)"""
LAYOUTS: tuple[dict[str, object], ...] = (
    {},
    {"recompute": "full"},
    {"tp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"dp": 2},
    {"dp": 2, "zero": 3},
    {"pp": 2},
    {"pp": 2, "schedule": "zero_bubble"},
    {"tp": 2, "dp": 2, "zero": 1},
)


def cases() -> Iterator[Config]:
    for layers, hidden, length in SIZES:
        for keys in LAYOUTS:
            yield Config(
                model=ModelConfig(
                    num_layers=layers,
                    hidden_size=hidden,
                    num_heads=4,
                    seq_length=length,
                    vocab_size=VOCAB,
                    dropout=0.0,
                    attention_dropout=0.0,
                ),
                parallel=ParallelConfig.model_validate(keys),
                data=DataConfig(train="unused"),
                train=TrainConfig(steps=1, global_batch_size=BATCH, micro_batch_size=2, precision="fp32", device="cpu"),
                optim=OptimConfig(learning_rate=1e-4),
                checkpoint=CheckpointConfig(every=0),
                run=RunConfig(folder="unused"),
            )


def measured(config: Config) -> float:
    """[s] Of the fastest step."""
    ranks = config.parallel.num_ranks
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=on_a_rank, args=(config, rank, folder)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return float((Path(folder) / "seconds").read_text())


def on_a_rank(config: Config, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    parallel = config.parallel
    dist.init_process_group("gloo", init_method=f"file://{folder}/join", rank=rank, world_size=parallel.num_ranks)
    mesh = build_mesh(Layout(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp), rank)
    state = build_state(config, mesh, VOCAB, torch.device("cpu"))
    task = TASKS[config.model.kind_and_head]
    count = config.train.num_microbatches(parallel.dp)
    batches = [task.random_batch(config.model, 2, VOCAB, separate_documents=False) for _ in range(count)]
    seconds = []
    for _ in range(1 + STEPS):
        dist.barrier()
        began = time.perf_counter()
        train_step(state, batches, mesh, config.train)
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        (Path(folder) / "seconds").write_text(str(min(seconds[1:])))
    dist.barrier()
    dist.destroy_process_group()


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: of the ranks."""
    places = [[sorted(values).index(value) for value in values] for values in (one, other)]
    return statistics.correlation(*places)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", required=True)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/planner_time.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine, rows, pairs = hardware(arguments.hardware), [], list[tuple[float, float]]()
    for config in cases():
        took = measured(config)
        expected = estimate(config, VOCAB, machine).seconds_per_step
        changed = {key: value for key, value in config.parallel if value != getattr(ParallelConfig(), key)}
        model = config.model
        rows.append(
            {
                "model": [model.num_layers, model.hidden_size, model.seq_length],
                "layout": changed,
                "planned": round(expected, 5),
                "measured": round(took, 5),
            }
        )
        pairs.append((expected, took))
        print(json.dumps(rows[-1]), flush=True)
    planned, real = ([pair[place] for pair in pairs] for place in (0, 1))
    errors = [abs(p / m - 1) for p, m in zip(planned, real, strict=True)]
    summary = {
        "cases": len(rows),
        "median_error": round(statistics.median(errors), 3),
        "rank_correlation": round(correlation(planned, real), 3),
        "hardware": machine.name,
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({key: value for key, value in summary.items() if key != "rows"}))


if __name__ == "__main__":
    main()
