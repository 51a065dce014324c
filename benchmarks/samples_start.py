"""How soon is the first sample there, and what does a sample cost, beside megatron.core.datasets on the same file?

    python -m benchmarks.samples_start [--documents 100_000 1_000_000] [--peer-python PYTHON] [--rounds 3]

A synthetic corpus of random tokens in documents of log-normal length (about 500 tokens on average), in Megatron's
format. Each contestant is a fresh process, in turns; importing is not counted. Megatron runs twice: `builds` with an
empty cache, as the first rank of a new run does, and `cached`. Writes `results/samples-<date>-<machine>.md`, `.json`.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np

from benchmarks import hardware
from benchmarks.peers.sample_stopwatch import VOCABULARY
from colonnade.data.indexed import HEADER, MAGIC, VERSION, bin_path, idx_path

RESULTS = Path(__file__).resolve().parent / "results"
UINT16 = 8
COLUMNS = {
    "open_s": "open, ms",
    "first_sample_s": "first sample, ms",
    "us_a_sample": "a sample, µs",
    "us_a_sample_of_a_batch": "in batches of 16, µs",
    "own_mb": "own memory, MB",
}


def main() -> None:
    line = parse_line()
    lengths = dict[int, int]()
    results: dict[tuple[int, str], list[dict[str, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=line.folder) as name:
        for documents in line.documents:
            prefix, cache = Path(name) / f"corpus-{documents}", Path(name) / "cache"
            lengths[documents] = write_corpus(prefix, documents)
            for _ in range(line.rounds):
                for contestant, row in run_round(line, prefix, cache):
                    results[documents, contestant].append(row)
    text = describe(line, lengths, results)
    print(text)
    stem = RESULTS / f"samples-{datetime.now().date()}-{hardware.machine_name()}"
    stem.with_suffix(".md").write_text(text, encoding="utf-8")
    rounds = [{"documents": key[0], "contestant": key[1], "rounds": value} for key, value in results.items()]
    report = {"hardware": hardware.describe(), "command": hardware.command_line(), "results": rounds}
    stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def parse_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--seq-length", type=int, default=1_024)
    parser.add_argument("--samples", type=int, default=20_000, help="one by one, and as many in batches")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where 1,000 bytes a document fit")
    parser.add_argument("--peer-python", default=sys.executable, help="a Python that has megatron.core")
    return parser.parse_args()


def write_corpus(prefix: Path, documents: int) -> int:
    """A token file of random ids; returns how many tokens."""
    random = np.random.default_rng(0)
    lengths = np.maximum(random.lognormal(5.7, 1.0, documents), 2).astype("<i4")
    starts = np.cumsum(lengths, dtype="<i8") * 2 - lengths * 2
    with idx_path(prefix).open("wb") as stream:
        stream.write(HEADER.pack(MAGIC, VERSION, UINT16, documents, documents + 1))
        for part in (lengths, starts, np.arange(documents + 1, dtype="<i8")):
            stream.write(part.data)
    total = int(lengths.sum())
    with bin_path(prefix).open("wb") as stream:
        for first in range(0, total, 1 << 24):
            stream.write(random.integers(0, VOCABULARY, min(1 << 24, total - first), dtype="<u2").data)
    return total


def run_round(line: argparse.Namespace, prefix: Path, cache: Path) -> list[tuple[str, dict[str, float]]]:
    shutil.rmtree(cache, ignore_errors=True)
    rows = []
    for name, python, module in (
        ("colonnade", sys.executable, "colonnade_samples"),
        ("megatron, builds", line.peer_python, "megatron_samples"),
        ("megatron, cached", line.peer_python, "megatron_samples"),
    ):
        row = run([python, "-m", f"benchmarks.peers.{module}", str(prefix)], line, cache)
        if row is not None:
            rows.append((name, row))
    return rows


def run(start: Sequence[str], line: argparse.Namespace, cache: Path) -> dict[str, float] | None:
    """The row that a contestant printed; None, and its last words are printed, where it did not run."""
    options = ["--seq-length", str(line.seq_length), "--samples", str(line.samples), "--cache", str(cache)]
    done = subprocess.run([*start, *options], cwd=hardware.ROOT, capture_output=True, text=True, check=False)
    found = [text for text in done.stdout.splitlines() if text.startswith("RESULT ")]
    if done.returncode or not found:
        print(f"{start[2]} did not run: {(done.stderr.strip().splitlines() or ['no words'])[-1]}", file=sys.stderr)
        return None
    return dict(json.loads(found[-1].removeprefix("RESULT ")))


def describe(
    line: argparse.Namespace, lengths: dict[int, int], results: dict[tuple[int, str], list[dict[str, float]]]
) -> str:
    """The table: the median of the rounds."""
    machine = hardware.describe()
    text = f"# Opening a token file and taking samples of {line.seq_length:,} tokens\n\n"
    text += f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, commit {machine['commit']};\n"
    text += f"`{hardware.command_line()}`; medians of {line.rounds} rounds.\n\n"
    text += f"| documents | tokens | | {' | '.join(COLUMNS.values())} |\n|{'---|' * (len(COLUMNS) + 3)}\n"
    for (documents, contestant), rounds in results.items():
        values = [statistics.median(row[key] * (1e3 if key.endswith("_s") else 1) for row in rounds) for key in COLUMNS]
        numbers = " | ".join(f"{value:,.1f}" for value in values)
        text += f"| {documents:,} | {lengths[documents]:,} | {contestant} | {numbers} |\n"
    return text


if __name__ == "__main__":
    main()
