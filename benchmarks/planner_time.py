"""Planned time beside measured, on this machine's CPUs: layouts and sizes that are small enough to run.

    python -m benchmarks.planner_time --hardware machine.toml [--rounds N] [--output FILE]

`colonnade hardware --output machine.toml` writes the description. Of each size `plan --search` over two ranks chooses a
layout, which runs beside others of its candidates, from the fastest to the slowest. All layouts run once in each round,
so that a host that is slow for minutes slows no layout alone. A launch is a process group of its own: one step to warm
up, the fastest of five counts, and so does the fastest launch. All multiply by the kernels that the description was
measured with. Prints the median error, the rank correlation, and how much longer the chosen layouts take than the best
of two ranks that were run of their size.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.configs import gpt
from benchmarks.hardware import describe
from benchmarks.pace import pace
from colonnade.config.schema import Config, ParallelConfig
from colonnade.kernels.choice import Products
from colonnade.launch.freed_memory import keep_freed_memory
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import build_mesh
from colonnade.planner.estimate import estimate
from colonnade.planner.hardware import Hardware, hardware
from colonnade.planner.measure_operators import products_here
from colonnade.planner.search import Candidate, confirmed, search
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


@dataclass
class Launched:
    """One layout of one size, with a launch a round."""

    config: Config
    seconds: list[float] = field(default_factory=list)
    """[s] The fastest step of each launch."""
    pace: list[float] = field(default_factory=list)
    """[loops/s] Of the cores, before or behind each launch: the slower."""

    @property
    def best(self) -> float:
        return min(self.seconds)

    def launch(self, products: Products) -> None:
        before = pace()
        self.seconds.append(measured(self.config, products))
        self.pace.append(min(before, pace()))

    def row(self, fastest: float) -> dict[str, object]:
        """`fastest`: the pace that those of all launches are told as shares of."""
        return {
            "model": shape(self.config),
            "layout": {key: value for key, value in self.config.parallel if value != DEFAULTS[key]},
            "measured": round(self.best, 5),
            "launches": [round(each, 5) for each in self.seconds],
            "pace": [round(each / fastest, 2) for each in self.pace],
        }


@dataclass
class Choice:
    """What a search over RANKS ranks chooses for a size, and others of its candidates."""

    tried: int
    best: Candidate
    others: list[Config]

    @classmethod
    def of(cls, config: Config, machine: Hardware) -> "Choice":
        found = search(config, VOCAB, machine, RANKS)
        others = found.fitting[:: max(1, len(found.fitting) // OTHERS)][:OTHERS]
        return cls(found.tried, confirmed(found, VOCAB, machine).candidate, [each.config for each in others])

    def row(self, launched: Mapping[str, Launched]) -> dict[str, object]:
        took, size = launched[key_of(self.best.config)].best, shape(self.best.config)
        of_size = [
            each.best
            for each in launched.values()
            if each.config.parallel.num_ranks == RANKS and shape(each.config) == size
        ]
        return {
            "model": size,
            "tried": self.tried,
            "chosen": {key: value for key, value in self.best.chosen.items() if value != DEFAULTS.get(key)},
            "planned": round(self.best.seconds, 5),
            "measured": round(took, 5),
            "layouts_run": len(of_size),
            "best_run": round(min(of_size), 5),
            "slower": round(took / min(of_size) - 1, 3),
        }


def key_of(config: Config) -> str:
    """Equal for configurations that run alike."""
    return str(config)


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
    parser.add_argument("--rounds", type=int, default=3, help="launches of each layout (3)")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/planner_time.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine, products = hardware(arguments.hardware).having(host__token_seconds=0.0), products_here()  # nothing is read
    choices = [Choice.of(case(*size, parallel={}), machine) for size in SIZES]
    asked = [*cases(), *(config for choice in choices for config in (choice.best.config, *choice.others))]
    launched = {key_of(config): Launched(config) for config in sorted(asked, key=shape)}  # of a size: near each other
    for number in range(arguments.rounds):
        for each in launched.values():
            each.launch(products)
            print(number, shape(each.config), each.seconds[-1], flush=True)
    fastest = max(pace for each in launched.values() for pace in each.pace)
    rows, planned, real, candidates = list[dict[str, object]](), list[float](), list[float](), dict(launched)
    for config in cases():
        found = candidates.pop(key_of(config))
        planned.append(estimate(config, VOCAB, machine, products=products).seconds_per_step)
        real.append(found.best)
        rows.append({**found.row(fastest), "planned": round(planned[-1], 5)})
    summary = {
        "cases": len(rows),
        "rounds": arguments.rounds,
        "median_error": round(statistics.median(abs(p / m - 1) for p, m in zip(planned, real, strict=True)), 3),
        "rank_correlation": round(correlation(planned, real), 3),
        "hardware": machine.name,
        "searched": [choice.row(launched) for choice in choices],
        "commit_and_machine": describe(),
        "rows": rows,
        "candidates": [each.row(fastest) for each in candidates.values()],
    }
    arguments.output.write_text(json.dumps(summary, indent=1) + "\n")
    print(json.dumps({key: value for key, value in summary.items() if key not in ("rows", "candidates")}))


if __name__ == "__main__":
    main()
