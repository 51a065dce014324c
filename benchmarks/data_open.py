"""How long does it take to open a corpus, and to read the samples of a step, when it has 100 billion tokens?

    python -m benchmarks.data_open [--tokens 100_000_000_000] [--documents 100_000_000] [--folder FOLDER]

The tokens are a hole in a sparse file (they read as zeros and take no room), so the disk is not measured; the index is
written in full: 20 bytes a document.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from colonnade.data.datasets import open_datasets
from colonnade.data.gpt_dataset import GPTDataset, TextSamples
from colonnade.data.indexed import HEADER, MAGIC, VERSION, bin_path, idx_path
from colonnade.tasks.gpt import LanguageModeling

CHUNK = 1 << 22


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        prefix = Path(folder) / "corpus"
        write_sparse(prefix, arguments.documents, arguments.tokens // arguments.documents)
        index_bytes = idx_path(prefix).stat().st_size
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.perf_counter()
        datasets = open_datasets(
            samples=TextSamples(), train=str(prefix), split=(29, 1, 0), seq_length=2_048, vocab_size=50_257, seed=1
        )
        opened = time.perf_counter()
        positions = range(10**6, 10**6 + 512)
        batch = LanguageModeling().batch(datasets.train.rows(positions), positions)
        read = time.perf_counter()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert isinstance(datasets.train, GPTDataset)
        print(f"{datasets.train.file}, index of {index_bytes / 1e9:.2f} GB, {len(datasets.train):,} training samples")
        print(f"opened, split and ordered in {opened - started:.4f} s")
        print(
            f"a global batch of {batch.tokens.shape[1]} samples in {read - opened:.3f} s; "
            f"memory grew by {grown / 1024:.0f} MB"
        )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000_000_000)
    parser.add_argument("--documents", type=int, default=100_000_000)
    parser.add_argument("--folder", default=None, help="where about 20 bytes a document fit")
    return parser.parse_args()


def write_sparse(prefix: Path, documents: int, tokens_each: int) -> None:
    """A token file of equal documents whose tokens are a hole."""
    with bin_path(prefix).open("wb") as stream:
        os.truncate(stream.fileno(), documents * tokens_each * 2)
    with idx_path(prefix).open("wb") as stream:
        stream.write(HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
        for first in range(0, documents, CHUNK):
            stream.write(np.full(min(CHUNK, documents - first), tokens_each, "<i4").data)
        for unit, count in ((tokens_each * 2, documents), (1, documents + 1)):
            for first in range(0, count, CHUNK):
                stream.write((np.arange(first, min(first + CHUNK, count), dtype="<i8") * unit).data)


if __name__ == "__main__":
    main()
