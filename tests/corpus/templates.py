"""Pages of one template, and which of them are found alike.

python -m tests.corpus.templates FOLDER    of 20,000: how many groups, pairs compared, seconds, and bytes of memory at
                                           the peak, beside what the pages take
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

from colonnade.corpus.matching import Groups, similar_pairs
from colonnade.corpus.minhash import Bands
from colonnade.corpus.signatures import OWN, SignatureIndex, SignatureWriter, Source, band_files


def template_pages(count: int, *, shared: int, own: int, copies: int = 0, seed: int = 0) -> list[np.ndarray]:
    """Shingle sets of pages of one template: `shared` shingles that all have, some fields that every tenth page has,
    `own` that no other has. The last `copies` are changed in one shingle, each of another page."""
    draw = np.random.default_rng(seed)
    template, fields = (draw.integers(0, 2**64, size, np.uint64) for size in (shared, 100))
    pages = [
        np.unique(np.concatenate([template, draw.choice(fields, 10), draw.integers(0, 2**64, own, np.uint64)]))
        for _ in range(count - copies)
    ]
    for page in draw.choice(count - copies, copies, replace=False):
        changed = pages[page].copy()
        changed[draw.integers(len(changed))] = draw.integers(0, 2**64, 1, np.uint64)[0]
        pages.append(np.unique(changed))
    return pages


def matched(folder: Path, pages: list[np.ndarray]) -> tuple[list[tuple[int, int, float]], int]:
    """The pairs of pages, numbered from 0 on, and how many were compared."""
    writer = SignatureWriter(folder, 0, Bands(32, 4))
    for number, page in enumerate(pages):
        writer.add(str(number), 1, page)
    writer.close()
    sources = [Source(OWN, folder, 0)]
    with SignatureIndex(sources) as index:
        pairs, compared = similar_pairs(index, band_files(sources, folder), 0, 1, similarity=0.7)
    return [(first & 0xFFFFFFFF, second & 0xFFFFFFFF, found) for first, second, found in pairs], compared


def groups_of(pairs: list[tuple[int, int, float]]) -> list[list[int]]:
    groups = Groups()
    for first, second, _ in pairs:
        groups.join(first, second)
    return groups.sets()


def peak_bytes() -> int:
    """Of this process; but Linux counts that of whoever started it as its own."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def main() -> None:
    pages = template_pages(20_000, shared=60, own=40, copies=500)
    before, started = peak_bytes(), time.process_time()
    pairs, compared = matched(Path(sys.argv[1]), pages)
    print(len(groups_of(pairs)), compared, time.process_time() - started, peak_bytes() - before)


if __name__ == "__main__":
    main()
