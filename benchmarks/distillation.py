"""A small student taught by a larger model, beside the same student without: loss of held-out text after equal steps.

    python -m benchmarks.distillation --books classic_books.jsonl.xz --folder runs/distillation

The teacher is trained first. Then, for each seed, three students that differ in nothing else: on labels alone, with the
teacher beside them, and with its likeliest tokens from disk. Everything is run by `colonnade` as a user would. Without
--books, the text is the bundled sample.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from math import isnan, nan
from pathlib import Path
from statistics import mean

from benchmarks.as_user import colonnade, write_books
from benchmarks.hardware import command_line, describe, machine_name
from colonnade import bundled

RESULTS = Path(__file__).parent / "results"
BUNDLED = Path(next(iter(bundled.__path__))) / "books.jsonl.xz"
CONFIG = """
[model]
num_layers = {layers}
hidden_size = {hidden}
num_heads = 4
seq_length = 128
position = "rotary"
[data]
tokenizer = "{folder}/tokenizer.json"
train = "{folder}/tokens"
split = "19:1"
[train]
global_batch_size = 16
micro_batch_size = 16
steps = {steps}
seed = {seed}
precision = "fp32"
evaluate_every = {steps}
evaluate_samples = 512
threads = 1
[optim]
learning_rate = {rate}
warmup_steps = 20
[run]
folder = "{folder}/{name}"
"""
TEACHER = {"layers": 2, "hidden": 128, "rate": 2e-3}
STUDENT = {"layers": 2, "hidden": 32, "rate": 4e-3}
WAYS: dict[str, str] = {
    "labels alone": "",
    "teacher beside it": "alpha = 0.5\ntemperature = 2.0\n",
    "32 tokens from disk": "alpha = 0.5\ntemperature = 2.0\ntop_k = 32\n",
}


def prepare(folder: Path, books: Path, characters: int) -> int:
    """Tokenizer and token file of so much text, in documents of some pages; returns the number of tokens. What is there
    from an earlier start stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "tokens.bin").exists():
        return int((folder / "tokens.bin").stat().st_size // 2)
    text = folder / "text.jsonl"
    write_books(books, text, characters)
    colonnade("data", "train-tokenizer", text, "--vocab-size", 2048, "--output", folder / "tokenizer.json")
    colonnade("data", "tokenize", text, "--tokenizer", folder / "tokenizer.json", "--output", folder / "tokens")
    return int((folder / "tokens.bin").stat().st_size // 2)


def trained(
    folder: Path, name: str, seed: int, steps: int, size: dict[str, float], more: str = ""
) -> tuple[float, float]:
    """(held-out loss, seconds) of a run; NaN seconds where it was begun by an earlier start."""
    file = folder / f"{name.replace(' ', '-')}.toml"
    file.write_text(CONFIG.format(folder=folder, name=file.stem, seed=seed, steps=steps, **size) + more)
    started = nan if (folder / file.stem).exists() else time.perf_counter()
    colonnade("train", file)
    seconds = time.perf_counter() - started
    last = json.loads((folder / file.stem / "metrics.jsonl").read_text().splitlines()[-1])
    return last["validation_loss"], seconds


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distillation", description=__doc__.split("\n\n")[0])
    parser.add_argument("--books", type=Path, default=BUNDLED, help="JSON lines with text, compressed by xz")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--characters", type=int, default=15_000_000, help="of the text that are read")
    parser.add_argument("--teacher-steps", type=int, default=200)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--name", default="distillation", help="what the name of the page of results begins with")
    given = parser.parse_args(arguments)
    tokens = prepare(given.folder, given.books, given.characters)
    teachers, taught_for = trained(given.folder, "teacher", 1, given.teacher_steps, TEACHER)
    print(f"teacher: {teachers:.4f} in {taught_for:.0f} s", flush=True)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for seed in range(1, given.seeds + 1):
        for way, keys in WAYS.items():
            more = f'[distillation]\nteacher = "{given.folder}/teacher"\n{keys}' if keys else ""
            found[way].append(trained(given.folder, f"{way} {seed}", seed, given.steps, STUDENT, more))
            print(f"{way}, seed {seed}: {found[way][-1][0]:.4f} in {found[way][-1][1]:.0f} s", flush=True)
    write(given, tokens, teachers, found)


def _size(of: dict[str, float]) -> str:
    return f"{of['layers']} layers and hidden size {of['hidden']}"


def write(given: argparse.Namespace, tokens: int, teachers: float, found: dict[str, list[tuple[float, float]]]) -> None:
    """A page in Markdown."""
    hardware, today = describe(), datetime.now(UTC).date().isoformat()
    seeds = range(1, given.seeds + 1)
    lines = [
        f"# Distillation, {today}, {hardware['cpu']}, {hardware['cores']} cores",
        "",
        f"Held-out loss (nats a token) of a student of {_size(STUDENT)} after {given.steps} steps of 2,048 tokens, by "
        f"what it learned from, with seeds of weights and order. The teacher has {_size(TEACHER)}, "
        f"{given.teacher_steps} steps on the same {tokens:,} tokens of English books, and a loss of "
        f"{teachers:.4f}. alpha 0.5, temperature 2. Commit {hardware['commit']}; torch {hardware['torch']}; "
        f"`{re.sub(r'/[^ ]*/', '', command_line())}`.",
        "",
        f"| learned from | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | seconds |",
        "|---" * (given.seeds + 3) + "|",
    ]
    for way, runs in found.items():
        losses, seconds = zip(*runs, strict=True)
        shown, took = " | ".join(f"{loss:.4f}" for loss in losses), mean(seconds)
        lines.append(f"| {way} | {shown} | {mean(losses):.4f} | {'–' if isnan(took) else f'{took:.0f}'} |")
    note = "Seconds are of a whole command on a machine that did other work besides: start, evaluation and, from disk, "
    lines += ["", note + "asking the teacher once are in them.", ""]
    (RESULTS / f"{given.name}-{today}-{machine_name()}.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
