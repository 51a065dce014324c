"""Made-up examples with labels, as token files, and configurations that are trained on them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from colonnade.data.tokenizer import Tokenizer
from colonnade.data.wordpiece import train_wordpiece
from colonnade.examples.formats import FORMATS
from colonnade.examples.make import make_examples

WORDS = ("dog", "cat", "sun", "rain", "tree", "stone", "river", "boat", "north", "south")
CONFIG = """\
[model]
kind = "bert"
head = "{head}"
num_labels = {labels}
num_layers = 2
hidden_size = 16
num_heads = 2
seq_length = 16
dropout = 0.1
attention_dropout = 0.1
{model}
[data]
train = "{folder}/{task}"
validation = "{folder}/{task}"
tokenizer = "{folder}/tokenizer.json"
split = "1:0"

[train]
steps = 4
global_batch_size = 4
micro_batch_size = 2
threads = 1
device = "cpu"
precision = "fp64"
evaluate_every = 2

[optim]
learning_rate = 1e-2
warmup_steps = 2

[checkpoint]
every = 2

[run]
folder = "{run}"
"""
TASKS = {
    "mnli": ("classification", 3),
    "qqp": ("classification", 2),
    "rte": ("classification", 2),
    "stsb": ("classification", 1),
    "race": ("choice", 4),
}


def vocabulary(folder: Path, *more: str) -> Tokenizer:
    """Of `WORDS` and `more`, and of so many ids that scores can be stored."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(train_wordpiece(lambda: [" ".join((*WORDS, *more))], 200, min_frequency=1))
    tokenizer.save(folder / "tokenizer.json")
    return tokenizer


def some_words(chance: random.Random, most: int = 12) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randint(1, most)))


def write_examples(folder: Path, tasks: Sequence[str] = ("mnli", "qqp", "race"), number: int = 11, *more: str) -> Path:
    """A vocabulary of the examples' words and `more`, and a token file of each task."""
    tokenizer, chance = vocabulary(folder, *more), random.Random(0)
    for task in tasks:
        lines = [record(task, chance) for _ in range(number)]
        (folder / f"{task}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        make_examples(FORMATS[task], [folder / f"{task}.jsonl"], folder / task, tokenizer)
    return folder


def record(task: str, chance: random.Random) -> dict[str, object]:
    if task == "race":
        return {
            "article": some_words(chance, 30),
            "question": some_words(chance, 4),
            "options": [some_words(chance, 3) for _ in range(4)],
            "answer": chance.choice("ABCD"),
        }
    label = chance.randint(0, 30) / 1000 if task == "stsb" else chance.randrange(TASKS[task][1])
    return {"text_a": some_words(chance), "text_b": some_words(chance), "label": label}


def write_config(folder: Path, task: str, run: Path, *, model: str = "") -> Path:
    """A configuration of a run in float64."""
    head, labels = TASKS[task]
    run.mkdir(parents=True, exist_ok=True)
    path = run / "config.toml"
    path.write_text(CONFIG.format(head=head, labels=labels, folder=folder, task=task, run=run / "run", model=model))
    return path
