"""Made-up questions about texts, as SQuAD's files and as token files, and configurations that are trained on them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from colonnade.examples.formats import format_of
from colonnade.examples.make import make_examples
from tests.tasks.examples import CONFIG, WORDS, vocabulary

STRIDE = 5


def squad(number: int, seed: int = 0) -> dict[str, Any]:
    """A file of 2.0: texts longer than a window; every third question has no answer."""
    chance = random.Random(seed)
    paragraphs = []
    for index in range(number):
        words = chance.choices(WORDS, k=chance.randint(3, 30))
        first = chance.randrange(len(words))
        answer = " ".join(words[first : first + chance.randint(1, 3)])
        start = len(" ".join([*words[:first], ""]))
        qas = {"id": f"q{index}", "question": " ".join(chance.choices(WORDS, k=chance.randint(1, 4)))}
        impossible = index % 3 == 2
        answers = [] if impossible else [{"text": answer, "answer_start": start}]
        paragraphs.append(
            {"context": " ".join(words), "qas": [{**qas, "is_impossible": impossible, "answers": answers}]}
        )
    return {"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}


def write_questions(folder: Path, number: int = 11) -> Path:
    """A vocabulary, dev.json, and a token file of it."""
    tokenizer = vocabulary(folder)
    (folder / "dev.json").write_text(json.dumps(squad(number)))
    format = format_of("squad", tokenizer, windows={"doc_stride": STRIDE, "max_query_length": 3})
    make_examples(format, [folder / "dev.json"], folder / "squad", tokenizer)
    return folder


def write_config(folder: Path, run: Path, *, model: str = "") -> Path:
    """A configuration of a run in float64."""
    run.mkdir(parents=True, exist_ok=True)
    path = run / "config.toml"
    text = CONFIG.format(head="spans", labels=0, folder=folder, task="squad", run=run / "run", model=model)
    path.write_text(text.replace("num_labels = 0\n", ""))
    return path
