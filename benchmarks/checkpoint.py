"""How fast are checkpoints saved and loaded, beside a plain copy of the same bytes?

    python -m benchmarks.checkpoint [--rounds 5] [--folder DISK]

The reference model with its optimizer state: 30M parameters in float32, three times (weights and two moments of Adam),
363 MB. Rows of one rank and of two (tp = 2). In each round, one after the other, everything synced to the disk:

    copy            shutil.copyfile of one file of the same size, and fsync: the measure of the others
    torch.save      the whole state dict into one file, and fsync; torch.load of it
    plain dcp       torch.distributed.checkpoint as it comes
    colonnade       with SHA-256 of every byte while saving, and checked while loading
    asynchronous    the same in the background: how long training is blocked (copying to memory), and how long until the
                    checkpoint is whole; nothing else runs meanwhile

Files are read from the page cache, as after any save on the same machine; each target is removed before it is written
again. Writes `results/checkpoint-<date>-<machine>.md` and `.json`.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_plainly
from torch.distributed.checkpoint.state_dict_saver import save as save_plainly

from benchmarks.hardware import command_line, describe, machine_name
from colonnade.checkpoint.load import load
from colonnade.checkpoint.plan import Shard
from colonnade.checkpoint.save import Content, Place, save
from colonnade.checkpoint.saver import Saver
from colonnade.mesh import launch
from colonnade.mesh.background import background_group

RESULTS = Path(__file__).resolve().parent / "results"
HIDDEN, LAYERS, VOCABULARY, POSITIONS = 384, 6, 50304, 1024
RANKS = (1, 2)
SYNCHRONOUS, BLOCKED = "colonnade save", "asynchronous save, blocked"


def shapes() -> dict[str, tuple[tuple[int, ...], int | None]]:
    """Tensor → its shape and the dim that tp cuts."""
    one: dict[str, tuple[tuple[int, ...], int | None]] = {
        "tokens": ((VOCABULARY, HIDDEN), 0),
        "positions": ((POSITIONS, HIDDEN), None),
    }
    for i in range(LAYERS):
        one |= {f"{i}.qkv": ((3 * HIDDEN, HIDDEN), 0), f"{i}.output": ((HIDDEN, HIDDEN), 1)}
        one |= {f"{i}.up": ((4 * HIDDEN, HIDDEN), 0), f"{i}.down": ((HIDDEN, 4 * HIDDEN), 1)}
        one |= {f"{i}.norm.{kind}": ((HIDDEN,), None) for kind in "abcd"}
    return {f"{copy}.{name}": it for copy in ("weight", "exp_avg", "exp_avg_sq") for name, it in one.items()}


def num_bytes() -> int:
    return sum(4 * math.prod(shape) for shape, _ in shapes().values())


def shards_of(rank: int, num_ranks: int) -> list[Shard]:
    shards = []
    for name, (shape, dim) in shapes().items():
        size = [n // num_ranks if d == dim else n for d, n in enumerate(shape)]
        offsets = tuple(rank * n if d == dim else 0 for d, n in enumerate(size))
        shards.append(Shard(name, shape, offsets, torch.randn(size)))
    return shards


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dcp, about having no process group
        yield


@dataclass(frozen=True)
class Contestant:
    """What is timed, one after the other, by its name; `target` is removed before that, outside of the time."""

    target: Path
    steps: dict[str, Callable[[], object]]


@contextmanager
def contestants(folder: Path, rank: int, num_ranks: int) -> Iterator[list[Contestant]]:
    """Those that save end with their target on the disk."""
    shards = shards_of(rank, num_ranks)
    original, copy, plain, ours, later = (folder / name for name in ("original", "copy", "plain", "ours", "later"))
    state = {
        f"{shard.name}@{shard.offsets}": shard.data for shard in shards
    }  # dcp: each rank's parts by their own names
    mine = folder / f"torch{rank}"
    if rank == 0:
        original.write_bytes(os.urandom(1 << 20) * (num_bytes() >> 20))

    def copy_file() -> None:
        if rank == 0:
            shutil.copyfile(original, copy)
            sync(copy)

    def torch_save() -> None:
        torch.save(state, mine)
        sync(mine)

    def load_ours(check_hashes: bool) -> None:
        load(ours / "step_00000001", shards, check_hashes=check_hashes)

    with Saver(Place(later, 2), shards, asynchronous=True, group=background_group(600.0)) as saver:
        yield [
            Contestant(copy, {"copy": copy_file}),
            Contestant(mine, {"torch save": torch_save, "torch load": lambda: torch.load(mine, weights_only=True)}),
            Contestant(
                plain,
                {
                    "plain dcp save": lambda: save_plainly(state, storage_writer=FileSystemWriter(plain)),
                    "plain dcp load": lambda: load_plainly(state, storage_reader=FileSystemReader(plain)),
                },
            ),
            Contestant(
                ours,
                {
                    SYNCHRONOUS: lambda: save(ours, 1, shards, {}),
                    "colonnade load": lambda: load_ours(True),
                    "colonnade load without hashes": lambda: load_ours(False),
                },
            ),
            Contestant(
                later,
                {
                    BLOCKED: lambda: saver.save(Content(1, {}), lambda: shards),
                    "asynchronous save, until it is whole": saver.wait,
                },
            ),
        ]


def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    """What was done → GB/s of each round. Every rank calls this."""
    rank, num_ranks = launch.rank_and_size()
    barrier: Callable[[], object] = torch.distributed.barrier if num_ranks > 1 else lambda: None
    speeds: dict[str, list[float]] = defaultdict(list)

    with contestants(folder, rank, num_ranks) as entrants:
        for _ in range(rounds + 1):
            for contestant in entrants:
                remove(contestant.target)
                if rank == 0:
                    os.sync()  # nothing of what came before is left to be written
                barrier()
                start = time.perf_counter()
                for name, action in contestant.steps.items():
                    if not name.startswith("asynchronous"):  # whose two times have one beginning
                        start = time.perf_counter()
                    action()
                    barrier()
                    speeds[name].append(num_bytes() / 1e9 / (time.perf_counter() - start))
    return {name: values[1:] for name, values in speeds.items()}  # the first round warms up


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)  # the other rank is at it too
    else:
        path.unlink(missing_ok=True)


def run_rank(line: argparse.Namespace) -> None:
    launch.connect(line.ranks, "cpu")
    with quiet():
        speeds = measure(line.folder, line.rounds)
    if launch.rank_and_size()[0] == 0:
        line.result.write_text(json.dumps(speeds))
    launch.disconnect()


def run(num_ranks: int, line: argparse.Namespace) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory(dir=line.folder) as folder:
        result = Path(folder, "result.json")
        options = ["--ranks", str(num_ranks), "--rounds", str(line.rounds), "--folder", folder, "--result", str(result)]
        status = launch.run_ranks(num_ranks, [sys.executable, "-m", "benchmarks.checkpoint", *options])
        if status:
            sys.exit(status)
        speeds: dict[str, list[float]] = json.loads(result.read_text())
        return speeds


def table(rows: dict[int, dict[str, list[float]]]) -> str:
    text, notes = "| ranks | what | GB/s | low – high | to a copy |\n|---|---|---|---|---|\n", ""
    for num_ranks, speeds in rows.items():
        measure_of = statistics.median(speeds["copy"])
        for name, values in speeds.items():
            median = statistics.median(values)
            text += f"| {num_ranks} | {name} | {median:.2f} | {min(values):.2f} – {max(values):.2f} "
            text += f"| {median / measure_of:.2f} |\n"
        share = statistics.median(a / b for a, b in zip(speeds[SYNCHRONOUS], speeds[BLOCKED], strict=True))
        notes += f"\n{num_ranks} rank(s): an asynchronous save blocks {share:.1%} of the time of a synchronous one.\n"
    return text + notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to be measured")
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    line = parser.parse_args()
    if launch.is_rank():
        run_rank(line)
        return
    rows = {num_ranks: run(num_ranks, line) for num_ranks in RANKS}
    now, machine = datetime.now().astimezone(), describe()
    report = {"date": now.isoformat(timespec="seconds"), "hardware": machine, "command": command_line()}
    heading = (
        f"# Checkpoints, {now:%Y-%m-%d}, {machine['cpu']}, {machine['cores']} cores\n\n{num_bytes() / 1e6:.0f} MB in "
        f"{len(shapes())} tensors; medians of {line.rounds} rounds; Python {machine['python']}, torch "
        f"{machine['torch']}, {machine['system']}; commit {machine['commit']}; `{command_line()}`\n\n"
    )
    RESULTS.mkdir(exist_ok=True)
    output = RESULTS / f"checkpoint-{now:%Y-%m-%d}-{machine_name()}"
    output.with_name(output.name + ".md").write_text(heading + table(rows))
    output.with_name(output.name + ".json").write_text(json.dumps(report | {"bytes": num_bytes(), "gb_per_s": rows}))
    print(heading + table(rows) + f"\n{output}.md")


if __name__ == "__main__":
    main()
