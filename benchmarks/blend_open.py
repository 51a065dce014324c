"""How long does it take to open a blend of 1,000 token files with two billion documents, and to read its samples?

    python -m benchmarks.blend_open [--files 1000] [--documents 2_000_000] [--folder FOLDER]

Each of the files has its own name, split and order, but all names are links to one file of 2,000,000 documents: its
index is written in full, 20 bytes a document, and its tokens are a hole, so that the disk is not measured.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.data_open import write_sparse
from benchmarks.peers.sample_stopwatch import own_memory
from colonnade.data.blend import Blend, whole_weights
from colonnade.data.blended_dataset import BlendedDataset, Mixture, open_blend
from colonnade.data.gpt_dataset import TextSamples
from colonnade.data.indexed import bin_path, idx_path
from colonnade.tasks.gpt import LanguageModeling

BATCH = 512


def main() -> None:
    arguments = parse_arguments()
    weights = np.random.default_rng(0).uniform(0.2, 5.0, arguments.files).tolist()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        names = write_files(Path(folder), arguments.files, arguments.documents)
        before, started = own_memory(), time.perf_counter()
        datasets = open_blend(
            Mixture(dict(zip(names, weights, strict=True))),
            samples=TextSamples(),
            split=(29, 1, 0),
            seq_length=1_024,
            vocab_size=50_257,
            seed=1,
        )
        opened = time.perf_counter()
        assert isinstance(datasets.train, BlendedDataset)
        print(
            f"{arguments.files:,} files of {arguments.documents:,} documents and "
            f"{datasets.train.num_tokens / 1e12:.2f}T training tokens, "
            f"opened, split and ordered in {opened - started:.3f} s; memory grew by {own_memory() - before:.0f} MB"
        )
        report_batches(datasets.train)
    report_orders()


def report_batches(data: BlendedDataset) -> None:
    """Batches of a run that begins at a position far from the start."""
    position, times, before = 10**8, [], own_memory()
    for step in range(20):
        started = time.perf_counter()
        positions = range(position + step * BATCH, position + (step + 1) * BATCH)
        LanguageModeling().batch(data.rows(positions), positions)
        times.append(time.perf_counter() - started)
    print(
        f"batches of {BATCH} samples from position {position:,} on: the first {times[0]:.3f} s, the others "
        f"{statistics.median(times[1:]):.4f} s (median of {len(times) - 1}); memory grew by "
        f"{own_memory() - before:.0f} MB"
    )


def report_orders() -> None:
    """The order alone: position -> (data set, index)."""
    for count in (2, 20, 1_000):
        weights = whole_weights(np.random.default_rng(1).uniform(0.2, 5.0, count).tolist())
        blend = Blend(weights)
        started = time.perf_counter()
        blend.locate(np.arange(10**9, 10**9 + 1))
        first = time.perf_counter() - started
        span = 400_000
        started = time.perf_counter()
        for start in range(10**9, 10**9 + span, BATCH):
            blend.locate(np.arange(start, start + BATCH))
        each = (time.perf_counter() - started) / span
        print(f"{count:5} data sets: position 10^9 alone {first * 1e3:.1f} ms, then {each * 1e6:.2f} µs a sample")


def write_files(folder: Path, files: int, documents: int) -> list[str]:
    """One token file and links to it."""
    write_sparse(folder / "corpus", documents, 700)
    names = [str(folder / f"part-{number:04}") for number in range(files)]
    for name in names:
        bin_path(name).symlink_to(bin_path(folder / "corpus"))
        idx_path(name).symlink_to(idx_path(folder / "corpus"))
    return names


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=1_000)
    parser.add_argument("--documents", type=int, default=2_000_000, help="of each file")
    parser.add_argument("--folder", default=None, help="where 20 bytes a document of one file fit")
    return parser.parse_args()


if __name__ == "__main__":
    main()
