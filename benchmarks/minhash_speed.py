"""How fast are near-duplicates found, beside plain datatrove and datasketch on the same documents?

    python -m benchmarks.minhash_speed INPUT.jsonl[.xz …] [--copies 3] [--rounds 3]

All three take word 5-grams of the same words (runs of letters and digits in small letters), 128 hash functions in 32
bands of 4, one process, and go from texts in memory to groups of candidates; ours also compares every pair exactly,
which the others do not. Processor seconds are shown, the least of all rounds. `--copies` adds changed copies of each
document. datatrove wants xxhash < 4.
"""

from __future__ import annotations

import argparse
import importlib
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document

from colonnade.corpus.components import PAIR, decided
from colonnade.corpus.documents import read_documents
from colonnade.corpus.matching import similar_pairs
from colonnade.corpus.minhash import Bands
from colonnade.corpus.signatures import OWN, SignatureIndex, SignatureWriter, Source, band_files
from colonnade.corpus.words import PlainWords, WordHashes, shingles_of, words_of

BANDS, ROWS, SHINGLE = 32, 4, 5


def ours(texts: Sequence[str], folder: Path) -> int:
    """Signatures, candidates, exact comparison, groups."""
    writer, hashes = SignatureWriter(folder, 0, Bands(BANDS, ROWS)), WordHashes()
    for number, text in enumerate(texts):
        writer.add(str(number), len(text), shingles_of(text, SHINGLE, hashes))
    writer.close()
    sources = [Source(OWN, folder, 0)]
    with SignatureIndex(sources) as index:
        pairs, _ = similar_pairs(index, band_files(sources, folder), 0, 1, similarity=0.7)
    found = decided(np.array([(*pair, 0, 0) for pair in pairs], PAIR), keep="first")
    return int((found.members != found.stays).sum())


class LowerWords(PlainWords):
    """The same words for datatrove."""

    def word_tokenize(self, text: str) -> list[str]:
        return words_of(text)


def datatrove(texts: Sequence[str], folder: Path) -> int:
    """Its four steps: signatures, buckets, clusters, filter."""
    steps: Any = importlib.import_module("datatrove.pipeline.dedup.minhash")
    config = steps.MinhashConfig(n_grams=SHINGLE, num_buckets=BANDS, hashes_per_bucket=ROWS)
    names = [str(folder / name) for name in ("signatures", "buckets", "clusters")]
    documents = [Document(text=text, id=str(number)) for number, text in enumerate(texts)]
    for _ in steps.MinhashDedupSignature(names[0], config=config, language=LowerWords()).run(documents, 0, 1) or ():
        pass
    for bucket in range(BANDS):
        for _ in steps.MinhashDedupBuckets(names[0], names[1], config=config).run(None, bucket, BANDS) or ():
            pass
    for _ in steps.MinhashDedupCluster(names[1], names[2], config=config).run(None, 0, 1) or ():
        pass
    kept = sum(1 for _ in steps.MinhashDedupFilter(names[2]).run(iter(documents), 0, 1))
    return len(texts) - kept


def datasketch(texts: Sequence[str], folder: Path) -> int:
    """Signatures and a query of the index for each document."""
    library: Any = importlib.import_module("datasketch")
    index = library.MinHashLSH(params=(BANDS, ROWS), num_perm=BANDS * ROWS)
    dropped = 0
    for number, text in enumerate(texts):
        words = words_of(text)
        shingles = {" ".join(words[i : i + SHINGLE]).encode() for i in range(max(len(words) - SHINGLE + 1, 1))}
        signature = library.MinHash(num_perm=BANDS * ROWS)
        signature.update_batch(list(shingles))
        dropped += bool(index.query(signature))
        index.insert(str(number), signature)
    return dropped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("input", type=Path)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    texts = changed_copies(list(read_documents([options.input])), options.copies)
    size = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts):,} documents, {size:.1f} MB")
    best: dict[str, float] = {}
    for _ in range(options.rounds):
        for find in (ours, datatrove, datasketch):
            try:
                seconds, dropped = timed(find, texts)
            except ImportError as error:
                print(f"{find.__name__:12} not here: {error}")
                continue
            best[find.__name__] = min(seconds, best.get(find.__name__, seconds))
            print(f"{find.__name__:12} {seconds:7.2f} s, {dropped:,} dropped", flush=True)
    for name, seconds in best.items():
        speed = f"{len(texts) / seconds:9,.0f} documents/s  {size / seconds:6.2f} MB/s"
        print(f"{name:12} {speed}  {seconds / best['ours']:.2f} × ours")


def timed(find: Callable[[Sequence[str], Path], int], texts: Sequence[str]) -> tuple[float, int]:
    with tempfile.TemporaryDirectory() as folder:
        started = time.process_time()
        dropped = find(texts, Path(folder))
        return time.process_time() - started, dropped


def changed_copies(texts: list[str], copies: int) -> list[str]:
    """The texts, and copies in which some words are others."""
    draw = random.Random(0)
    result = list(texts)
    for text in texts:
        for _ in range(copies):
            words = text.split(" ")
            for _ in range(max(1, len(words) // draw.choice((20, 50, 100)))):
                words[draw.randrange(len(words))] = f"changed{draw.randrange(1000)}"
            result.append(" ".join(words))
    draw.shuffle(result)
    return result


if __name__ == "__main__":
    main()
