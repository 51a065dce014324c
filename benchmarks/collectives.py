"""An all-reduce between two CPU ranks of one machine: through shared memory and through gloo, in turns, in one run.

python -m benchmarks.collectives [--rounds 5]
"""

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import hardware
from colonnade.launch.freed_memory import keep_freed_memory
from colonnade.mesh.collectives import all_reduce_
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, build_mesh
from colonnade.mesh.shared_memory import SharedMemoryTransport
from colonnade.mesh.transport import TorchTransport
from tests.distributed import run_on_ranks

SIZES = {"4 KB": 1024, "1.5 MB": 393216, "7 MB": 1769472, "77 MB": 19316736}
REPEATS = 20


def timed(axis: Axis, x: torch.Tensor, repeats: int) -> float:
    """Median milliseconds of an all-reduce."""
    taken = []
    for _ in range(repeats):
        dist.barrier()
        started = time.perf_counter()
        all_reduce_(x, axis).wait()
        taken.append(1e3 * (time.perf_counter() - started))
    return statistics.median(taken)


def on_rank(rank: int, num_ranks: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    keep_freed_memory()
    mesh = build_mesh(Layout(tp=num_ranks), rank)
    shared = mesh.tp
    assert isinstance(shared.transport, SharedMemoryTransport), "this machine cannot share memory between ranks"
    plain = TorchTransport("tp", shared.transport.groups, num_ranks, mesh.ledger)
    axes = {"shared memory": shared, "gloo": Axis("tp", num_ranks, rank, shared.ranks, plain)}
    found: dict[str, dict[str, list[float]]] = {size: {name: [] for name in axes} for size in SIZES}
    for _ in range(rounds):
        for size, numel in SIZES.items():
            x = torch.zeros(numel)
            for name, axis in axes.items():
                found[size][name].append(timed(axis, x, REPEATS if numel < 1e6 else 4))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    found = run_on_ranks(on_rank, 2, parser.parse_args().rounds, time_limit=300.0)[0]
    medians = {size: {name: round(statistics.median(t), 3) for name, t in row.items()} for size, row in found.items()}
    result = {"milliseconds": medians, "command": hardware.command_line(), **hardware.describe()}
    path = Path(__file__).parent / "results" / f"{date.today()}-{hardware.machine_name()}-collectives.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
