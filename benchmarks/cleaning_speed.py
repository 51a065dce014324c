"""How many documents a second does each step of cleaning take on one core?

    python -m benchmarks.cleaning_speed INPUT.jsonl[.xz …] --tokenizer TOKENIZER --test SET.jsonl [--rounds 3]

Processor seconds of the work on texts in memory, the least of all rounds; a first round fills the caches of words.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from datatrove.data import Document

from colonnade.corpus.decontaminate import shared_runs
from colonnade.corpus.documents import read_documents
from colonnade.corpus.filters import quality_filter
from colonnade.corpus.language import identifier
from colonnade.corpus.minhash import Bands
from colonnade.corpus.recipe import RepairStep
from colonnade.corpus.repair import repair_text
from colonnade.corpus.testsets import read_tests
from colonnade.corpus.words import WordHashes, shingles_of, spans_of
from colonnade.data.cleaning import token_counter
from colonnade.data.tokenizer import Tokenizer

Work = Callable[[str], object]


def steps(tokenizer: str, test: str) -> dict[str, Work]:
    """The work of each step on one text."""
    hashes, bands, repair = WordHashes(), Bands(32, 4), RepairStep()
    tests = read_tests({"test": test}, ngram=13, key="text")
    cases: dict[str, Work] = {"repair (ftfy)": lambda text: repair_text(text, repair)}
    cases["language (cld2)"] = identifier("cld2")
    for name in ("gopher", "repetition", "c4"):
        judge = quality_filter(name)
        cases[f"filter ({name})"] = lambda text, judge=judge: judge.filter(Document(text=text, id=""))  # type: ignore[misc]
    cases["filter (tokens)"] = token_counter(tokenizer, Tokenizer.load(tokenizer).sha256)
    cases["sign"] = lambda text: bands.of(shingles_of(text, 5, hashes))
    cases["decontaminate"] = lambda text: shared_runs(spans_of(text)[0], tests, hashes)
    return cases


def measured(work: Work, texts: Sequence[str], rounds: int) -> float:
    """The least processor seconds of all rounds but the first."""
    found = []
    for _ in range(rounds + 1):
        started = time.process_time()
        for text in texts:
            work(text)
        found.append(time.process_time() - started)
    return min(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("input", type=Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    texts = list(read_documents([options.input]))
    size = sum(len(text.encode()) for text in texts) / 1e6
    print(f"{len(texts):,} documents, {size:.1f} MB")
    for name, work in steps(options.tokenizer, options.test).items():
        seconds = measured(work, texts, options.rounds)
        print(f"{name:20} {len(texts) / seconds:9,.0f} documents/s {size / seconds:7.2f} MB/s", flush=True)


if __name__ == "__main__":
    main()
