"""Pairs of answers, a tokenizer and a model to begin from: what a small run of preferences needs."""

import random
from pathlib import Path

import torch
import transformers

from colonnade.data.tokenizer import Tokenizer
from tests.commands import here
from tests.examples.chats import CHATML, TEXT, folder_of, jsonl

CONFIG = """
[model]
head = "{head}"
num_layers = 2
hidden_size = 32
num_heads = 4
seq_length = 48
activation = "gelu_tanh"
init_std = 0.1
[data]
train = "{folder}/pairs"
tokenizer = "{folder}/tokenizer"
split = "4:1"
[train]
init_from = "{folder}/base"
steps = 4
global_batch_size = 4
micro_batch_size = 2
precision = "fp64"
evaluate_every = 2
[optim]
learning_rate = 1e-2
warmup_steps = 1
[run]
folder = "{run}"
"""


def make(folder: Path) -> Path:
    """Write into `folder` a tokenizer, a token file of pairs, and a model to begin from, in `base`."""
    folder_of(folder / "tokenizer", CHATML)
    chance, words = random.Random(3), TEXT.split()

    def text() -> str:
        return " ".join(chance.choices(words, k=chance.randint(1, 8)))

    records = [{"prompt": text(), "chosen": text(), "rejected": text()} for _ in range(40)]
    file = jsonl(folder / "pairs.jsonl", *records, {"prompt": "a", "chosen": "b", "rejected": "b "}, {"prompt": "a"})
    answer = here(
        "data", "examples", "preferences", file, "--output", folder / "pairs", "--tokenizer", folder / "tokenizer"
    )
    assert answer.status == 0 and "left out: 2 rows" in answer.out, answer
    assert "chosen and rejected are the same: nothing is preferred" in answer.out
    torch.manual_seed(1)
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=Tokenizer.load(folder / "tokenizer").vocab_size,
            n_positions=48,
            n_embd=32,
            n_layer=2,
            n_head=4,
            initializer_range=0.1,
        )
    ).double().save_pretrained(folder / "theirs")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "theirs" / name).write_bytes((folder / "tokenizer" / name).read_bytes())
    answer = here("convert", folder / "theirs", folder / "base")
    assert answer.status == 0, answer
    return folder


def write_config(pairs: Path, folder: Path, *, head: str = "preferences") -> Path:
    """A configuration file in `folder` of a run in `folder`/run that begins from `base`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.toml"
    path.write_text(CONFIG.format(folder=pairs, run=folder / "run", head=head))
    return path
