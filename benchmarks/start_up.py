"""How soon does a run begin, save and go on, beside another checkout, or without what its ranks agree on?

    python -m benchmarks.start_up --before ../parent [--layouts one tp dp zero1] [--rounds 5] [--output NAME]
    python -m benchmarks.start_up --trusting --layouts tp dp

In turns, each contestant trains the reference model (30M parameters, fp32, random tokens) as a user would: six steps
with a checkpoint after four, then the same command again with two steps more. What is told comes from when lines arrive
in metrics.jsonl, less what their steps took: so faster kernels do not show in the start. Medians over rounds.

    start       from the command to the first step: imports, ranks, agreements, data, products chosen, weights drawn
    step        the program's own seconds of steps 3 to 6
    save        363 MB and their checksums, with all that ranks agree on; training waits for it
    go on       from the second command to its first step: as start, with the checkpoint read and checked
    end         from the last line to the end of the command, its last checkpoint included

With `--trusting` torchrun starts the ranks, as they are and with `benchmarks.without_agreements`.

Writes `results/start-up-<date>-<machine>.md` and `.json`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from benchmarks.hardware import ROOT, command_line, commit, describe, machine_name
from benchmarks.pace import pace
from benchmarks.waiting import LAYOUTS, MODEL, write_tokens

RESULTS = Path(__file__).resolve().parent / "results"
ONE = {"one": ("tp = 1", 4)}
STEPS, SAVED, MORE = 6, 4, 8
COLUMNS = ("start", "step", "save", "go on", "end")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
Row = dict[str, float]
"""[seconds] Of one run and its continuation."""


@dataclass(frozen=True)
class Contestant:
    """A checkout, and what Python starts there."""

    root: Path
    start: tuple[str, ...] = ("-m", "colonnade")


def contestants(before: Path | None, *, trusting: bool) -> dict[str, Contestant]:
    if trusting:
        modules = {"as it is": "colonnade", "without agreements": "benchmarks.without_agreements"}
        return {name: Contestant(ROOT, (*TORCHRUN, "-m", module)) for name, module in modules.items()}
    return {"now": Contestant(ROOT)} | ({"before": Contestant(before.resolve())} if before else {})


class Arrivals:
    """When the lines of a file that grows arrive."""

    def __init__(self, file: Path) -> None:
        self._file, self._ends = file, threading.Event()
        self._known, self._at = 0, list[float]()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> list[float]:
        """[seconds] Of `time.monotonic`, one a line that the file has not had before; whole behind the block."""
        self._known = self._lines()
        self._thread.start()
        return self._at

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ends.wait(0.005):
            new = self._lines() - self._known - len(self._at)
            self._at.extend([time.monotonic()] * new)

    def _lines(self) -> int:
        return self._file.read_bytes().count(b"\n") if self._file.exists() else 0


def measured(layout: str, tokens: Path, contestant: Contestant) -> Row:
    """One run of it, and how it goes on."""
    parallel, batch = {**ONE, **LAYOUTS}[layout]
    with tempfile.TemporaryDirectory(dir=tokens.parent) as folder:
        config, metrics = Path(folder) / "config.toml", Path(folder) / "run" / "metrics.jsonl"
        data = f'data = {{ train = "{tokens}" }}\nrun = {{ folder = "{folder}/run" }}\nparallel = {{ {parallel} }}\n'
        config.write_text(f"{data}checkpoint = {{ every = {SAVED} }}\n{MODEL}global_batch_size = {batch}\n")
        first = _run(config, metrics, contestant, STEPS)
        again = _run(config, metrics, contestant, MORE)
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    seconds = {line["step"]: line["seconds"] for line in lines}
    assert len(first.lines) == STEPS and len(again.lines) == MORE - STEPS, "each step writes one line"
    return {
        "start": first.lines[0] - first.started - seconds[1],
        "step": statistics.median(seconds[step] for step in range(3, STEPS + 1)),
        "save": first.lines[SAVED] - first.lines[SAVED - 1] - seconds[SAVED + 1],
        "go on": again.lines[0] - again.started - seconds[STEPS + 1],
        "end": first.ended - first.lines[-1],
    }


@dataclass(frozen=True)
class _Ran:
    """[seconds] Of `time.monotonic`."""

    started: float
    lines: Sequence[float]
    ended: float


def _run(config: Path, metrics: Path, contestant: Contestant, steps: int) -> _Ran:
    command = [sys.executable, *contestant.start, "train", str(config), f"train.steps={steps}"]
    environment = {**os.environ, "PYTHONPATH": str(contestant.root / "src"), "OMP_NUM_THREADS": "1"}
    with Arrivals(metrics) as lines:
        started = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment, cwd=contestant.root)
        ended = time.monotonic()
    return _Ran(started, lines, ended)


def page(hardware: Mapping[str, object], results: Mapping[tuple[str, str], Sequence[Row]], commits: str) -> str:
    """Medians with the smallest and largest, in Markdown."""
    lines = [
        f"# Start, save, go on, end, {datetime.now():%Y-%m-%d}, {hardware['cpu']}, {hardware['cores']} cores",
        "",
        f"Commit {commits}; torch {hardware['torch']}, Python {hardware['python']}; `{command_line()}`",
        "",
        "Seconds: the median of the rounds (smallest to largest).",
        "",
        f"| layout | | rounds | {' | '.join(COLUMNS)} |",
        "|" + "---|" * (len(COLUMNS) + 3),
    ]
    for (layout, name), rows in results.items():
        cells = [_cell([row[column] for row in rows]) for column in COLUMNS]
        lines.append(f"| {layout} | {name} | {len(rows)} | {' | '.join(cells)} |")
    paces = [row["pace"] for rows in results.values() for row in rows]
    slowest = f"Before each run cores had {min(paces) / max(paces):.2f} of their best pace here or more."
    return "\n".join([*lines, "", slowest]) + "\n"


def _cell(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout, which runs in turns with this one")
    parser.add_argument("--trusting", action="store_true", help="with and without what ranks agree on, by torchrun")
    parser.add_argument("--layouts", nargs="+", choices=[*ONE, *LAYOUTS], default=["one", "tp", "dp", "zero1"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="results file without its ending")
    line = parser.parse_args()
    commits = commit() + (f" beside {commit(line.before)}" if line.before else "")
    output = line.output or RESULTS / f"start-up-{datetime.now():%Y-%m-%d}-{machine_name()}"
    hardware, results = describe(), defaultdict[tuple[str, str], list[Row]](list)
    with tempfile.TemporaryDirectory() as folder:
        write_tokens(Path(folder) / "tokens")
        for layout in line.layouts:
            for _ in range(line.rounds):
                for name, contestant in contestants(line.before, trusting=line.trusting).items():
                    now = pace()
                    row = {**measured(layout, Path(folder) / "tokens", contestant), "pace": now}
                    results[layout, name].append(row)
                    print(layout, name, json.dumps({key: round(value, 3) for key, value in row.items()}), flush=True)
            rows = {f"{layout} {name}": rows for (layout, name), rows in results.items()}
            text = json.dumps({"hardware": hardware, "commits": commits, "command": command_line(), "rows": rows})
            output.with_name(output.name + ".json").write_text(text + "\n")
            output.with_name(output.name + ".md").write_text(page(hardware, results, commits))
    print(page(hardware, results, commits))


if __name__ == "__main__":
    main()
