"""A tiny corpus of made-up text, with a tokenizer and a token file: what a small run needs, in a tenth of a second."""

import json
import random
from dataclasses import dataclass
from pathlib import Path

from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.data.tokenize import tokenize_files
from colonnade.data.tokenizer import Tokenizer, train_bpe

VOCAB_SIZE = 275  # 2 does not divide it: the vocabulary is padded under tp = 2

CONFIG = """\
[model]
num_layers = 2
hidden_size = 16
num_heads = 2
seq_length = 16
dropout = 0.1
attention_dropout = 0.1

[data]
revision = 2
train = "{prefix}"
tokenizer = "{tokenizer}"
split = "5:1"

[train]
steps = 6
global_batch_size = 4
micro_batch_size = 2
threads = 1
device = "cpu"
evaluate_every = 3
evaluate_samples = 4

[optim]
learning_rate = 1e-2
warmup_steps = 2

[checkpoint]
every = 2

[run]
folder = "{run}"
"""


@dataclass(frozen=True)
class TinyCorpus:
    """Where its parts lie."""

    folder: Path

    @property
    def text(self) -> Path:
        """One JSON document a line."""
        return self.folder / "text.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer.json"

    @property
    def prefix(self) -> Path:
        """Of the token file."""
        return self.folder / "tokens"


def make(folder: Path, *, num_documents: int = 24, seed: int = 0) -> TinyCorpus:
    """Write text, tokenizer and token file into `folder`."""
    corpus = TinyCorpus(folder)
    folder.mkdir(parents=True, exist_ok=True)
    documents = made_up(num_documents, seed)
    corpus.text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    train_bpe(documents, VOCAB_SIZE).save(corpus.tokenizer)
    tokenizer = Tokenizer.load(corpus.tokenizer)
    tokenize_files([corpus.text], corpus.prefix, tokenizer, workers=1, progress=False)
    return corpus


def made_up(num_documents: int, seed: int) -> list[str]:
    """Documents of some twenty words each."""
    chance = random.Random(seed)
    words = ["".join(chance.choices("aeionrst", k=chance.randint(2, 6))) for _ in range(40)]
    return [" ".join(chance.choices(words, k=20)) + "." for _ in range(num_documents)]


def write_config(corpus: TinyCorpus, folder: Path) -> Path:
    """A configuration file in `folder` of a run in `folder`/run."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.toml"
    path.write_text(CONFIG.format(prefix=corpus.prefix, tokenizer=corpus.tokenizer, run=folder / "run"))
    return path


def small_run_of(kind: str, corpus: TinyCorpus, folder: Path, *, model: str = "") -> Path:
    """A configuration file of a run of another family in float64, with lines for [model]."""
    path = write_config(corpus, folder)
    content = path.read_text()
    for before, now in {
        "[model]\n": f'[model]\nkind = "{kind}"\n{model}',
        'split = "5:1"': 'split = "5:1:1"',
        "steps = 6\n": 'steps = 4\nprecision = "fp64"\n',
        "evaluate_every = 3": "evaluate_every = 2",
        "[checkpoint]\nevery = 2": "[checkpoint]\nevery = 4",
    }.items():
        assert content.count(before) == 1
        content = content.replace(before, now)
    path.write_text(content)
    return path


def config(corpus: TinyCorpus, folder: Path, *overrides: str) -> Config:
    """The same, read, with overrides."""
    return load(write_config(corpus, folder), overrides)
