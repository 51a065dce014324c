"""How long is a run out of work after a kill: under Colonnade's supervisor, and under torchrun's restart of all ranks?

    python -m benchmarks.recovery [--pairs 3]

A tiny model on two CPU ranks (dp = 2), saved every ten steps. One rank is killed (SIGKILL) some steps behind a save,
and the time is taken from the kill until the run says that it goes on from its checkpoint (event `resumed`), and until
it is further than it was when it was killed. In turns, a start of each in a pair:

    colonnade    `colonnade train`: its own supervisor
    torchrun     `torchrun --standalone --nproc-per-node 2 --max-restarts 3 -m colonnade train`: the same ranks

Both start all ranks and their process group anew and read the same kind of checkpoint; what differs is how a death is
noticed, how the other ranks are ended, and how ranks are started: forked from a process that has imported torch, or
each as a new one.

Writes `results/recovery-<date>-<machine>.md` and `.json`.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.hardware import command_line, describe, machine_name
from tests import tiny
from tests.commands import environment

RESULTS = Path(__file__).resolve().parent / "results"
RANKS, EVERY, BEHIND = 2, 10, 5
LONGEST = 300.0  # seconds
FRESH = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""For torchrun: a store of its own for each attempt. Without it, torch 2.13's ranks find the addresses of the attempt
before theirs, and restarts over gloo hang, but for programs that name their starts, as this one does since.
"""
AGENT = ("-m", "torch.distributed.run")
STARTS = {
    "colonnade": ["-m", "colonnade", "train"],
    "torchrun": [*AGENT, "--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=3", "-m", "colonnade", "train"],
}
KEYS = (
    f"parallel.dp={RANKS}",
    f"checkpoint.every={EVERY}",
    "train.steps=1000000",
    "train.evaluate_every=0",
    "checkpoint.keep_best=false",
)
Row = dict[str, Any]


def recovery(start: list[str], config: Path, run: Path) -> Row:
    """A run that is killed once: [seconds] from the kill, and the steps that were made twice."""
    with (run.parent / f"{run.name}.said").open("w") as said:
        command = [sys.executable, *start, str(config), *KEYS, f"run.folder={run}"]
        process = subprocess.Popen(command, env=environment() | FRESH, stdout=said, stderr=said, start_new_session=True)
    try:
        await_(process, lambda: last_step(run) > EVERY and last_step(run) % EVERY >= BEHIND)
        rank = rank_one(process.pid)
        killed_at, began = last_step(run), time.monotonic()
        os.kill(rank, signal.SIGKILL)
        await_(process, lambda: bool(resumed(run)))
        until_resumed = time.monotonic() - began
        await_(process, lambda: last_step(run) > killed_at)
        until_further = time.monotonic() - began
        return {
            "until resumed": round(until_resumed, 2),
            "until further": round(until_further, 2),
            "steps lost": max(0, killed_at - resumed(run)[0]["step"]),
        }
    finally:
        (run / "stop").touch()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def rank_one(parent: int) -> int:
    """The process of rank 1: by its name where it was forked, else by what it was given."""
    found = []
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        process = Path(f"/proc/{child}")
        given = (process / "environ").read_bytes().split(b"\0")
        if (process / "comm").read_text() == "rank 1\n" or b"RANK=1" in given:
            found.append(int(child))
    (rank,) = found
    return rank


def await_(process: "subprocess.Popen[bytes]", there: Callable[[], bool]) -> None:
    end = time.monotonic() + LONGEST
    while not there():
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the run has ended, or stands still: status {process.returncode}")
        time.sleep(0.01)


def last_step(run: Path) -> int:
    """The step of the last whole line of metrics.jsonl."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[-3:-1] if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"}")), default=0)


def resumed(run: Path) -> list[Row]:
    path = run / "events.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [event for line in lines if (event := json.loads(line))["event"] == "resumed"]


def page(results: dict[str, Any]) -> str:
    hardware, rows = results["hardware"], results["rows"]
    names = list(dict.fromkeys(row["start"] for row in rows))
    lines = [
        f"# Recovery from a killed rank, {results['date'][:10]}, {hardware['cpu']}, {hardware['cores']} cores",
        "",
        f"{len(rows) // len(names)} pairs, in turns; load of the machine {results['load']} when they began; Python "
        f"{hardware['python']}, torch {hardware['torch']}, {hardware['system']}; commit {hardware['commit']}; "
        f"`{results['command']}`. {results['note']}".rstrip(),
        "",
        "| | until resumed [s], median (all) | until further than before [s], median (all) | steps lost |",
        "|---|---|---|---|",
    ]
    for name in names:
        own = [row for row in rows if row["start"] == name]
        cells = [_cell([row[key] for row in own]) for key in ("until resumed", "until further")]
        lines.append(f"| {name} | {' | '.join(cells)} | {', '.join(str(row['steps lost']) for row in own)} |")
    for other in names[1:]:
        pairs = zip(*([row for row in rows if row["start"] == name] for name in (names[0], other)), strict=True)
        ratios = [theirs["until resumed"] / ours["until resumed"] for ours, theirs in pairs]
        lines += ["", f"{other} ÷ {names[0]}, until resumed, of each pair: {', '.join(f'{r:.2f}' for r in ratios)}."]
    return "\n".join(lines) + "\n"


def _cell(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.1f} ({', '.join(f'{each:.1f}' for each in seconds)})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description=__doc__.split("\n\n")[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--note", default="", help="a sentence about the machine, for the page")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    date, rows = datetime.now(UTC).isoformat(timespec="seconds"), list[Row]()
    results: dict[str, Any] = {
        "date": date,
        "hardware": describe(),
        "command": re.sub(r" --note.*", "", command_line()),
    }
    results |= {"load": " ".join(f"{load:.1f}" for load in os.getloadavg()), "note": given.note, "rows": rows}
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        config = tiny.write_config(tiny.make(Path(folder) / "corpus"), Path(folder))
        for pair in range(given.pairs):
            for name, start in STARTS.items():
                row = {"start": name, "pair": pair, **recovery(start, config, Path(folder) / f"{name}{pair}")}
                rows.append(row)
                print(json.dumps(row), flush=True)
    path = given.output / f"recovery-{date[:10]}-{machine_name()}"
    path.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(results))
    print(page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
