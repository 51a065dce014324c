"""What benchmarks share that run `colonnade` as a user would: the command, text to read, how a BERT is optimized."""

import json
import lzma
import subprocess
import sys
from pathlib import Path

DOCUMENT = 20_000  # characters: some pages
OPTIM = """
min_learning_rate = 0.0
decay = "linear"
weight_decay = 0.01
beta2 = 0.999
"""
"""Of [optim], as the BERT papers fine-tune; rate and warm-up are each benchmark's own."""


def colonnade(*arguments: object, shown: bool = False) -> str:
    """What the command printed; empty where that is `shown` on the terminal."""
    command = [sys.executable, "-m", "colonnade", *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=None if shown else subprocess.PIPE, text=True)
    return done.stdout or ""


def write_books(books: Path, text: Path, characters: int) -> None:
    """So much of the books (a text a line, as .jsonl.xz), in documents of some pages."""
    left = characters
    with lzma.open(books, "rt", encoding="utf-8") as lines, text.open("w", encoding="utf-8") as out:
        for line in lines:
            taken = json.loads(line)["text"][: max(0, left)]
            left -= len(taken)
            for start in range(0, len(taken), DOCUMENT):
                out.write(json.dumps({"text": taken[start : start + DOCUMENT]}) + "\n")
