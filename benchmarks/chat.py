"""A small decoder fine-tuned on questions about a sentence: loss of the answers, and answers that are right, before and
after, on articles that it has not read.

    python -m benchmarks.chat --squad dev-v2.0.json --books classic_books.jsonl.xz --folder runs/chat

A model of 5 million parameters reads books first, for minutes: it is no assistant, and has no business knowing answers
that do not stand in the sentence. Everything is run by `colonnade` as a user would.
"""

import argparse
import json
import lzma
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.as_user import colonnade
from benchmarks.hardware import describe
from colonnade.data.chat_template import BUILT_IN
from colonnade.evaluation.squad import scores_1

MODEL = """
[model]
num_layers = 4
hidden_size = 256
num_heads = 4
seq_length = {length}
position = "rotary"
[data]
tokenizer = "{folder}/tokenizer"
{data}
[train]
global_batch_size = {batch}
micro_batch_size = {batch}
steps = {steps}
precision = "{precision}"
evaluate_every = {steps}
evaluate_at_start = true
evaluate_samples = 1000
threads = 1
{train}
[optim]
learning_rate = {rate}
warmup_steps = 20
[run]
folder = "{folder}/{name}"
"""
TALKS = """train = "{folder}/learned"
validation = "{folder}/held-out"
split = "1:0"
documents = "separate"
packing = "whole"
too_long = "drop"
loss_on = "answers"
"""
HELD_OUT_ARTICLES = 2


def questions(file: Path) -> Iterator[tuple[int, str, list[str]]]:
    """(article, sentence and question, answers) of every question whose answer stands in one sentence."""
    for number, article in enumerate(json.loads(file.read_text())["data"]):
        for paragraph in article["paragraphs"]:
            text = paragraph["context"]
            for question in paragraph["qas"]:
                answers = [answer["text"] for answer in question["answers"]]
                if question.get("is_impossible") or not answers:
                    continue
                start = question["answers"][0]["answer_start"]
                sentence = next(s.group() for s in re.finditer(r".+?(?:[.!?](?=\s)|$)", text, re.S) if s.end() > start)
                yield number, f"{sentence.strip()}\n{question['question'].strip()}", answers


def prepare(folder: Path, squad: Path, books: Path) -> list[tuple[str, list[str]]]:
    """Tokenizer, text and conversations; returns the held-out questions with their answers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer").mkdir(exist_ok=True)
    rows = list(questions(squad))
    last = max(article for article, _, _ in rows)
    held_out = [(asked, answers) for article, asked, answers in rows if article > last - HELD_OUT_ARTICLES]
    learned = [(asked, answers) for article, asked, answers in rows if article <= last - HELD_OUT_ARTICLES]
    random.Random(1).shuffle(held_out)
    for name, part in (("learned", learned), ("held-out", held_out)):
        lines = (json.dumps({"prompt": asked, "completion": answers[0]}) for asked, answers in part)
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    texts = [asked for asked, _ in learned]
    with lzma.open(books, "rt", encoding="utf-8") as stream:
        texts += [json.loads(line)["text"] for _, line in zip(range(20), stream, strict=False)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = folder / "tokenizer" / "tokenizer.json"
    colonnade(
        "data", "train-tokenizer", folder / "text.jsonl", "--output", tokenizer, "--vocab-size", 8192, "--overwrite"
    )
    settings = {"chat_template": BUILT_IN["plain"], "eos_token": "<|endoftext|>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    colonnade(
        "data", "tokenize", folder / "text.jsonl", "--output", folder / "text", "--tokenizer", tokenizer, "--overwrite"
    )
    for name in ("learned", "held-out"):
        output = ("--output", folder / name, "--tokenizer", folder / "tokenizer", "--overwrite")
        colonnade("data", "examples", "chat", folder / f"{name}.jsonl", *output)
    return held_out


def train(folder: Path, name: str, **values: Any) -> dict[str, float]:
    """Run it; validation losses before and after."""
    path = folder / f"{name}.toml"
    path.write_text(MODEL.format(folder=folder, name=name, **values))
    colonnade("train", path)
    run = folder / name
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    before = next(event["validation_loss"] for event in events if event["event"] == "evaluated")
    after = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["validation_loss"]
    return {"before": before, "after": after}


def scores(folder: Path, name: str, held_out: list[tuple[str, list[str]]]) -> tuple[dict[str, float], list[str]]:
    """Exact match and F1 of greedy answers, in percent, by the rules of SQuAD 1.1; and the answers."""
    file = folder / "asked.jsonl"
    lines = (json.dumps({"messages": [{"role": "user", "content": asked}]}) for asked, _ in held_out)
    file.write_text("\n".join(lines) + "\n")
    options = ("--temperature", 0, "--max-new-tokens", 20, "--threads", 1, "--json")
    texts = [
        made["text"] for made in json.loads(colonnade("generate", folder / name, "--messages", file, *options))["texts"]
    ]
    right = {str(number): answers for number, (_, answers) in enumerate(held_out)}
    return scores_1(right, {str(number): text for number, text in enumerate(texts)}).numbers(), texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--squad", type=Path, required=True)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--reading", type=int, default=300, help="steps on text")
    parser.add_argument("--tuning", type=int, default=300, help="steps on questions")
    parser.add_argument("--asked", type=int, default=150, help="held-out questions that are answered")
    given = parser.parse_args()
    folder = given.folder.resolve()
    held_out = prepare(folder, given.squad, given.books)[: given.asked]
    text = f'train = "{folder}/text"\nsplit = "200:1"'
    how = {"length": 128, "rate": 1e-3, "precision": "fp32"}
    read = train(folder, "read", data=text, batch=32, steps=given.reading, train="", **how)
    talks, init = TALKS.format(folder=folder), f'init_from = "{folder}/read"'
    tuned = train(folder, "tuned", data=talks, batch=16, steps=given.tuning, train=init, **how)
    found = {name: scores(folder, name, held_out) for name in ("read", "tuned")}
    shown = [
        {"asked": asked, "right": answers[0], "before": before, "after": after}
        for (asked, answers), before, after in zip(held_out, found["read"][1], found["tuned"][1], strict=True)
    ]
    report = {
        "machine": describe(),
        "text_loss": read,
        "loss_on_answers": tuned,
        "answers": {name: percent for name, (percent, _) in found.items()},
        "questions": len(held_out),
        "first": shown[:5],
    }
    print(json.dumps(report, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
