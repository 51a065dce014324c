"""How long does a sample take, of each kind, and how many documents does each way of packing cut?

    python -m benchmarks.samples_speed PREFIX [--seq-length 1024] [--rounds 5]

PREFIX is a token file; all its ids are taken for ordinary tokens, and for BERT each of its sequences for a sentence.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy as np

from colonnade.config.corruption import Lengths
from colonnade.data.bert_dataset import BertCut, BertDataset
from colonnade.data.gpt_dataset import GPTDataset
from colonnade.data.indexed import TokenFile
from colonnade.data.masking import WordPieces
from colonnade.data.packing import pack
from colonnade.data.rows import WINDOW, Cut
from colonnade.data.sampler import EpochOrder
from colonnade.data.t5_dataset import Corruption, T5Dataset
from colonnade.tasks.bert import as_bert_batch
from colonnade.tasks.gpt import LanguageModeling
from colonnade.tasks.t5 import as_t5_batch

BATCH = 64


def main() -> None:
    arguments = parse_arguments()
    file, s = TokenFile(arguments.prefix), arguments.seq_length
    print(f"{file}; samples of {s:,} tokens, batches of {BATCH} in random order, median of {arguments.rounds} rounds")
    for name, load in kinds(file, s).items():
        times = []
        for number in range(arguments.rounds):
            started = time.process_time()
            load(range(number * BATCH, (number + 1) * BATCH))
            times.append((time.process_time() - started) / BATCH)
        print(f"{name:32} {statistics.median(times) * 1e6:8.0f} µs of CPU time a sample")
    print_cuts(file, s)


def kinds(file: TokenFile, s: int) -> dict[str, Callable[[range], object]]:
    """A loader of a batch for each kind of sample."""
    whole, vocab_size = range(file.num_documents), 1 << 17

    def texts(length: int, cut: Cut) -> GPTDataset:
        count = len(GPTDataset(file, whole, length, vocab_size=vocab_size))
        return GPTDataset(file, whole, length, vocab_size=vocab_size, order=EpochOrder(count, 1), cut=cut)

    corruption = Corruption(sentinels=tuple(range(70_000, 71_000)), end=1, start=0)
    length = Lengths().widths(Lengths().text(s))[1]
    t5 = T5Dataset(file, whole, s, decoder_length=length, vocab_size=vocab_size, corruption=corruption, seed=1)
    t5.order = EpochOrder(len(t5), 1)
    pieces = WordPieces(70_000, 70_001, 70_002, 70_003, np.arange(1_000), np.arange(vocab_size) % 4 == 3)
    bert = BertDataset(file, whole, s, pieces=pieces, seed=1, cut=BertCut())
    cuts = {
        "GPT, joined": Cut(),
        "GPT, separate documents": Cut(separate=True),
        "GPT, best fit": Cut(separate=True, best_fit=True),
    }

    def batch(data: GPTDataset, positions: range) -> object:
        return LanguageModeling().batch(data.rows(positions), positions)

    loaders: dict[str, Callable[[range], object]] = {name: partial(batch, texts(s, cut)) for name, cut in cuts.items()}
    return {
        **loaders,
        "BERT, sentence order": lambda positions: as_bert_batch(bert.rows(positions), positions),
        "T5": lambda positions: as_t5_batch(t5.rows(positions), positions),
    }


def print_cuts(file: TokenFile, s: int) -> None:
    """Of the documents that fit into a sample: how many are cut."""
    total = (file.num_tokens - 1) // (s * WINDOW) * s * WINDOW
    cut = {"stream": 0, "best fit": 0}
    fitting = 0
    for begin in range(0, total, s * WINDOW):
        starts = [0, *(file.document_starts(begin + 1, begin + s * WINDOW) - begin).tolist()]
        short = [(a, b) for a, b in pairwise(starts[1:]) if b - a <= s]
        whole = {piece for pieces in pack(starts, s, WINDOW) for piece in pieces}
        fitting += len(short)
        cut["stream"] += sum(a // s != (b - 1) // s for a, b in short)
        cut["best fit"] += sum((a, b - a) not in whole for a, b in short)
    for name, count in cut.items():
        print(f"{name:9} cuts {count:,} of {fitting:,} documents that fit into a sample")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", help="of a token file")
    parser.add_argument("--seq-length", type=int, default=1_024)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
