"""Planned time beside measured, on this machine's CPUs: layouts and sizes that are small enough to run.

    python -m benchmarks.planner_time --hardware mine.toml [--output FILE]

`colonnade hardware --output mine.toml` writes the description. Each line is a process group of its own: one step to
warm up, the fastest of five counts. All multiply by the kernels that the description was measured with. Prints the
median error and the rank correlation. Then of each size `plan --search` over two ranks chooses a layout, which runs
beside others of its candidates, from the fastest to the slowest, and beside those of two ranks above: how much longer
the chosen one takes than the best of all that were run.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.configs import gpt
from benchmarks.hardware import describe
from colonnade.config.schema import Config, ParallelConfig
from colonnade.kernels.choice import Products
from colonnade.launch.freed_memory import keep_freed_memory
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import build_mesh
from colonnade.planner.estimate import estimate
from colonnade.planner.hardware import Hardware, hardware
from colonnade.planner.measure_operators import products_here
from colonnade.planner.search import confirmed, search
from colonnade.tasks.tasks import TASKS
from colonnade.train.state import build_state
from colonnade.train.step import train_step

VOCAB, STEPS, BATCH = 512, 5, 8
RANKS, OTHERS = 2, 8
"""Of a search, and how many of its candidates are run beside the chosen one."""
DEFAULTS = dict(ParallelConfig())
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
    for size in SIZES:
        for keys in LAYOUTS:
            yield case(*size, parallel=keys)


def case(
    layers: int, hidden: int, length: int, *, parallel: Mapping[str, object], heads: int = 4, batch: int = BATCH
) -> Config:
    """A GPT-2 in fp32 on CPU ranks; `parallel`: keys of [parallel]."""
    model = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "seq_length": length,
        "vocab_size": VOCAB,
    }
    train = {"global_batch_size": batch, "micro_batch_size": 2, "precision": "fp32", "device": "cpu"}
    return gpt(model, parallel, train)


def measured(config: Config, products: Products) -> float:
    """[s] Of the fastest step."""
    ranks = config.parallel.num_ranks
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=on_a_rank, args=(config, products, rank, folder)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return float((Path(folder) / "seconds").read_text())


def on_a_rank(config: Config, products: Products, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    keep_freed_memory()  # as all ranks of runs do
    parallel = config.parallel
    dist.init_process_group("gloo", init_method=f"file://{folder}/join", rank=rank, world_size=parallel.num_ranks)
    mesh = build_mesh(Layout(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp), rank)
    state = build_state(config, mesh, VOCAB, torch.device("cpu"), products=products)
    task = TASKS[config.model.kind_and_head]
    count = config.train.num_microbatches(parallel.dp)
    batches = [
        task.random_batch(config.model, config.train.micro_batch_size, VOCAB, separate_documents=False)
        for _ in range(count)
    ]
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


def searched(config: Config, machine: Hardware, products: Products, seconds: Sequence[float]) -> dict[str, object]:
    """What a search over RANKS ranks chooses for a model, beside other candidates and layouts that took `seconds`."""
    found = search(config, VOCAB, machine, RANKS)
    best = confirmed(found, VOCAB, machine).candidate
    others = found.fitting[:: max(1, len(found.fitting) // OTHERS)][:OTHERS]
    took = measured(best.config, products)
    least = min([took, *seconds, *(measured(each.config, products) for each in others)])
    return {
        "model": shape(config),
        "tried": found.tried,
        "chosen": {key: value for key, value in best.chosen.items() if value != DEFAULTS.get(key)},
        "planned": round(best.seconds, 5),
        "measured": round(took, 5),
        "best_run": round(least, 5),
        "slower": round(took / least - 1, 3),
    }


def shape(config: Config) -> list[int]:
    """[layers, hidden, sequence]"""
    return [config.model.num_layers, config.model.hidden_size, config.model.seq_length]


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
    machine, products = hardware(arguments.hardware).having(host__token_seconds=0.0), products_here()  # nothing is read
    rows, pairs = [], list[tuple[float, float]]()
    times = dict[str, tuple[Config, list[float]]]()
    for config in cases():
        took = measured(config, products)
        expected = estimate(config, VOCAB, machine, products=products).seconds_per_step
        changed = {key: value for key, value in config.parallel if value != DEFAULTS[key]}
        row = {"layout": changed, "planned": round(expected, 5), "measured": round(took, 5)}
        rows.append({"model": shape(config), **row})
        of_size = times.setdefault(str(shape(config)), (config, []))[1]
        if config.parallel.num_ranks == RANKS:
            of_size.append(took)
        pairs.append((expected, took))
        print(json.dumps(rows[-1]), flush=True)
    choices = [searched(config, machine, products, seconds) for config, seconds in times.values()]
    planned, real = ([pair[place] for pair in pairs] for place in (0, 1))
    errors = [abs(p / m - 1) for p, m in zip(planned, real, strict=True)]
    summary = {
        "cases": len(rows),
        "median_error": round(statistics.median(errors), 3),
        "rank_correlation": round(correlation(planned, real), 3),
        "hardware": machine.name,
        "searched": choices,
        "commit_and_machine": describe(),
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({key: value for key, value in summary.items() if key != "rows"}))


if __name__ == "__main__":
    main()
