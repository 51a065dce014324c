"""What reading the next step's batches in a thread gains on CPUs: steps with it and without, in turns, in one process.

python -m benchmarks.read_ahead [--rounds 40] [--threads 2] [--packing best_fit]

The bundled stories, 4 layers of 128, 16 samples of 128 tokens a step: the smallest model that one would train, so that
reading is as large a part of a step as it gets.
"""

import argparse
import json
import statistics
import tempfile
import time
from datetime import date
from functools import partial
from pathlib import Path

import torch

from benchmarks import hardware
from colonnade.config.load import loads
from colonnade.config.schema import Config
from colonnade.data.tokenize import tokenize_files
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.train_tokenizer import train_tokenizer
from colonnade.mesh.mesh import Mesh
from colonnade.train.corpus import Corpus, open_corpus
from colonnade.train.read_ahead import ReadAhead
from colonnade.train.state import TrainState, build_state
from colonnade.train.step import train_step

STORIES = Path(__file__).parents[1] / "src/colonnade/bundled/books.jsonl.xz"
CONFIG = """
model = {{ num_layers = 4, hidden_size = 128, num_heads = 4, seq_length = 128 }}
data = {{ train = "{folder}/tokens", tokenizer = "{folder}/tokenizer.json", {data} }}
train = {{ steps = 100_000, global_batch_size = 16, micro_batch_size = 16, device = "cpu" }}
optim = {{ learning_rate = 1e-3 }}
run = {{ folder = "unused" }}
"""


def timed(reader: ReadAhead, state: TrainState, position: int, config: Config) -> float:
    """[s] Of a step with the reading of its batches, the next one's begun."""
    started = time.perf_counter()
    batches = reader.take(position, position + config.train.global_batch_size)
    train_step(state, batches, Mesh(), config.train)
    return time.perf_counter() - started


def paired(config: Config, corpus: Corpus, rounds: int) -> dict[bool, list[float]]:
    """[s] Of each step, by whether its reader was active; three rounds warm up."""
    state = build_state(config, Mesh(), corpus.vocab_size, torch.device("cpu"))
    read = partial(corpus.batches, micro_batch_size=16, dp=Mesh().data)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    readers = {active: ReadAhead(read, active=active) for active in seconds}
    position = 0
    for turn in range(rounds + 3):
        for active in (True, False) if turn % 2 else (False, True):
            readers[active].take(position, position + 16)  # outside of the time: what the step before would have begun
            readers[active].settle()
            took = timed(readers[active], state, position + 16, config)
            readers[active].settle()
            seconds[active] += [took] if turn >= 3 else []
        position += 32
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--packing", choices=("none", "best_fit"), default="none")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as folder:
        train_tokenizer([str(STORIES)], Path(folder) / "tokenizer.json", 2048, progress=False)
        tokenizer = Tokenizer.load(f"{folder}/tokenizer.json")
        tokenize_files([STORIES], Path(folder) / "tokens", tokenizer, workers=1, progress=False)
        data = 'documents = "separate", packing = "best_fit"' if asked.packing == "best_fit" else "order = 'epoch'"
        config = loads(CONFIG.format(folder=folder, data=data))
        corpus = open_corpus(config)
        reading = []
        for step in range(asked.rounds):
            started = time.perf_counter()
            corpus.batches(16 * step, micro_batch_size=16, dp=Mesh().data)
            reading.append(time.perf_counter() - started)
        seconds = paired(config, corpus, asked.rounds)
    ratios = [ahead / alone for ahead, alone in zip(seconds[True], seconds[False], strict=True)]
    result = {
        "reading_ms": round(1e3 * statistics.median(reading), 3),
        "step_ms": round(1e3 * statistics.median(seconds[False]), 2),
        "step_that_reads_ahead_ms": round(1e3 * statistics.median(seconds[True]), 2),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(each, 4) for each in statistics.quantiles(ratios, n=4)],
        "packing": asked.packing,
        "threads": asked.threads,
        "command": hardware.command_line(),
        **hardware.describe(),
    }
    name = f"read-ahead-{date.today()}-{hardware.machine_name()}-{asked.packing}.json"
    (Path(__file__).parent / "results" / name).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
