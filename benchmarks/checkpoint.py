"""How fast are checkpoints saved and loaded, beside a plain copy of the same bytes?

    python -m benchmarks.checkpoint [--rounds 5] [--folder DISK]

The reference model with its optimizer state: 30M parameters in float32, three times (weights and two moments of Adam),
363 MB. Rows of one rank and of two (tp = 2). In each round, one after the other, everything synced to the disk:

    copy            shutil.copyfile of one file of the same size, and fsync: the measure of the others
    torch.save      the whole state dict into one file, and fsync; torch.load of it
    plain dcp       torch.distributed.checkpoint as it comes
    colonnade       with SHA-256 of every byte while saving, and checked while loading

Files are read from the page cache, as after any save on the same machine; each target is removed before it is written
again.

Then, again in turn, for how long a save blocks training, at once and in the background. Training is a stretch of matrix
products; with `checkpoint.asynchronous` it begins when the save has begun, and ends with an optimizer step, which waits
until what it changes is copied. What the writing takes from the training beside it is told too.

Writes `results/checkpoint-<date>-<machine>.md` and `.json`.
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
from colonnade.checkpoint.save import Payload, Target, save
from colonnade.checkpoint.saver import Saved, Saver
from colonnade.launch import launch
from colonnade.mesh.background import background_group

RESULTS = Path(__file__).resolve().parent / "results"
HIDDEN, LAYERS, VOCABULARY, POSITIONS = 384, 6, 50304, 1024
RANKS = (1, 2)
STEP = 20  # products of matrices that stand for a step of training
AT_ONCE, BLOCKED = "synchronous save, training blocked", "asynchronous save, training blocked"


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
    """A way to save and a way to load what it saved; `target` is removed before each save, outside of the time."""

    target: Path
    save: Callable[[], object]
    loads: dict[str, Callable[[], object]]


def contestants(folder: Path, rank: int, num_ranks: int) -> dict[str, Contestant]:
    """Name → how. Every save ends with its target on the disk."""
    shards = shards_of(rank, num_ranks)
    original, copy, plain, ours = (folder / name for name in ("original", "copy", "plain", "ours"))
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

    return {
        "copy": Contestant(copy, copy_file, {}),
        "torch": Contestant(mine, torch_save, {"": lambda: torch.load(mine, weights_only=True)}),
        "plain dcp": Contestant(
            plain,
            lambda: save_plainly(state, storage_writer=FileSystemWriter(plain)),
            {"": lambda: load_plainly(state, storage_reader=FileSystemReader(plain))},
        ),
        "colonnade": Contestant(
            ours,
            lambda: save(ours, 1, shards, {}),
            {"": lambda: load_ours(True), " without hashes": lambda: load_ours(False)},
        ),
    }


def measure(folder: Path, rounds: int) -> dict[str, list[float]]:
    """What was done → GB/s of each round. Every rank calls this."""
    rank, num_ranks = launch.rank_and_size()
    barrier: Callable[[], object] = torch.distributed.barrier if num_ranks > 1 else lambda: None
    speeds: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, action: Callable[[], object]) -> None:
        barrier()
        start = time.perf_counter()
        action()
        barrier()
        speeds[name].append(num_bytes() / 1e9 / (time.perf_counter() - start))

    entrants = contestants(folder, rank, num_ranks)
    for _ in range(rounds + 1):
        for name, contestant in entrants.items():
            remove(contestant.target)
            if rank == 0:
                os.sync()  # nothing of what came before is left to be written
            timed(f"{name} save" if contestant.loads else name, contestant.save)
            for how, action in contestant.loads.items():
                timed(f"{name} load{how}", action)
    return {name: values[1:] for name, values in speeds.items()}  # the first round warms up


def measure_blocking(folder: Path, rounds: int) -> dict[str, list[float]]:
    """What was done → seconds of each round. Every rank calls this."""
    rank, num_ranks = launch.rank_and_size()
    barrier: Callable[[], object] = torch.distributed.barrier if num_ranks > 1 else lambda: None
    shards, told = shards_of(rank, num_ranks), list[Saved]()
    seconds: dict[str, list[float]] = defaultdict(list)
    x = torch.randn(1024, 1024)

    def train() -> float:
        barrier()
        start = time.perf_counter()
        for _ in range(STEP):
            torch.mm(x, x)
        return time.perf_counter() - start

    group = background_group(600.0)
    with Saver(
        Target(folder / "later", 1), shards, asynchronous=True, group=group, overlap=True, on_saved=told.append
    ) as saver:
        for step in range(1, rounds + 2):
            seconds["training alone"].append(train())
            barrier()
            start = time.perf_counter()
            save(folder / "ours", step, shards, {}, keep=1)
            seconds[AT_ONCE].append(time.perf_counter() - start)
            barrier()
            saver.save(Payload(step, {}), lambda: shards)
            seconds["training beside an asynchronous save"].append(train())
            saver.copied()
            saver.wait()
            seconds[BLOCKED].append(told[-1].blocked_seconds)
            seconds["asynchronous save, until it is whole"].append(told[-1].seconds)
    return {name: values[1:] for name, values in seconds.items()}


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)  # the other rank is at it too
    else:
        path.unlink(missing_ok=True)


def run_rank(line: argparse.Namespace) -> None:
    launch.connect(line.ranks, "cpu")
    with quiet():
        speeds = measure(line.folder, line.rounds)
        seconds = measure_blocking(line.folder, line.rounds)
    if launch.rank_and_size()[0] == 0:
        line.result.write_text(json.dumps({"gb_per_s": speeds, "seconds": seconds}))
    launch.disconnect()


def run(num_ranks: int, line: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Unit → what was done → each round."""
    with tempfile.TemporaryDirectory(dir=line.folder) as folder:
        result = Path(folder, "result.json")
        options = ["--ranks", str(num_ranks), "--rounds", str(line.rounds), "--folder", folder, "--result", str(result)]
        status = launch.run_ranks(num_ranks, [sys.executable, "-m", "benchmarks.checkpoint", *options])
        if status:
            sys.exit(status)
        found: dict[str, dict[str, list[float]]] = json.loads(result.read_text())
        return found


def table(rows: dict[int, dict[str, list[float]]]) -> str:
    text = "| ranks | what | GB/s | low – high | to a copy |\n|---|---|---|---|---|\n"
    for num_ranks, speeds in rows.items():
        measure_of = statistics.median(speeds["copy"])
        for name, values in speeds.items():
            median = statistics.median(values)
            text += f"| {num_ranks} | {name} | {median:.2f} | {min(values):.2f} – {max(values):.2f} "
            text += f"| {median / measure_of:.2f} |\n"
    return text


def table_of_blocking(rows: dict[int, dict[str, list[float]]]) -> str:
    text, notes = "\n| ranks | what | seconds | low – high |\n|---|---|---|---|\n", ""
    for num_ranks, seconds in rows.items():
        for name, values in seconds.items():
            text += f"| {num_ranks} | {name} | {statistics.median(values):.3f} "
            text += f"| {min(values):.3f} – {max(values):.3f} |\n"
        share = statistics.median(a / b for a, b in zip(seconds[BLOCKED], seconds[AT_ONCE], strict=True))
        notes += f"\n{num_ranks} rank(s): an asynchronous save blocks training for {share:.1%} of a save at once.\n"
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
    speeds, seconds = ({n: row[unit] for n, row in rows.items()} for unit in ("gb_per_s", "seconds"))
    tables = table(speeds) + table_of_blocking(seconds)
    now, machine = datetime.now().astimezone(), describe()
    report = {"date": now.isoformat(timespec="seconds"), "hardware": machine, "command": command_line()}
    heading = (
        f"# Checkpoints, {now:%Y-%m-%d}, {machine['cpu']}, {machine['cores']} cores\n\n{num_bytes() / 1e6:.0f} MB in "
        f"{len(shapes())} tensors; medians of {line.rounds} rounds; Python {machine['python']}, torch "
        f"{machine['torch']}, {machine['system']}; commit {machine['commit']}; `{command_line()}`\n\n"
    )
    RESULTS.mkdir(exist_ok=True)
    output = RESULTS / f"checkpoint-{now:%Y-%m-%d}-{machine_name()}"
    output.with_name(output.name + ".md").write_text(heading + tables)
    output.with_name(output.name + ".json").write_text(
        json.dumps(report | {"bytes": num_bytes(), "gb_per_s": speeds, "seconds": seconds})
    )
    print(heading + tables + f"\n{output}.md")


if __name__ == "__main__":
    main()
