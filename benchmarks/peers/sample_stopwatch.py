"""The stopwatch of the programs that `benchmarks.samples_start` compares: it needs the standard library alone."""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

VOCABULARY, END_OF_DOCUMENT, BATCH = 50_257, 50_256, 16

Data = TypeVar("Data")


def read_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("prefix", help="of a token file")
    parser.add_argument("--seq-length", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--cache", help="where a program may keep what it builds")
    return parser.parse_args()


def measure(
    line: argparse.Namespace,
    open_data: Callable[[], Data],
    get: Callable[[Data, int], object],
    get_batch: Callable[[Data, range], object],
) -> None:
    """Open, take the first sample, then samples one by one and batches, all in training order; print `RESULT {…}`.

    `own_mb` is memory of this process alone (RssAnon): pages of mapped files are the system's, to drop when it likes.
    """
    before, started = own_memory(), time.perf_counter()
    data = open_data()
    opened = time.perf_counter()
    get(data, 0)
    first = time.perf_counter()
    for index in range(1, line.samples):
        get(data, index)
    singles = time.perf_counter()
    for index in range(line.samples, 2 * line.samples, BATCH):
        get_batch(data, range(index, index + BATCH))
    batches = time.perf_counter()
    result = {
        "open_s": opened - started,
        "first_sample_s": first - opened,
        "us_a_sample": (singles - first) / (line.samples - 1) * 1e6,
        "us_a_sample_of_a_batch": (batches - singles) / line.samples * 1e6,
        "own_mb": own_memory() - before,
    }
    print("RESULT " + json.dumps(result), flush=True)


def own_memory() -> float:
    """[MB] Of this process alone: without the pages of files, which the system may drop at any time."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(float(line.split()[1]) for line in status if line.startswith("RssAnon")) / 1024
