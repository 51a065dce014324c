"""Fine-tuning beside transformers' Trainer: the same weights, examples, batches and machine, by turns (A B A B …).

    python -m benchmarks.finetuning_speed --weights MODEL --train train.json --dev dev.json --folder runs/speed

MODEL is a folder of Hugging Face with a BERT and its tokenizer; the rows are MNLI's, as .json. Both sides train a
classifier of three labels with AdamW in fp32, on pairs padded to one length, with dropout 0.1. A step's seconds are
without the first steps: of Colonnade those that metrics.jsonl has, of the Trainer from the end of one step to the end
of the next. Memory is a whole command's peak.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from benchmarks.as_user import OPTIM
from benchmarks.hardware import command_line, describe, machine_name

RESULTS = Path(__file__).parent / "results"
LEFT_OUT = 5  # first steps
RATE = 1e-4
LABELS = ("entailment", "neutral", "contradiction")
CONFIG = (
    """
[model]
kind = "bert"
head = "classification"
num_labels = 3
num_layers = {num_hidden_layers}
hidden_size = {hidden_size}
num_heads = {num_attention_heads}
ffn_hidden_size = {intermediate_size}
seq_length = {length}
norm_position = "post"
embedding_norm = true
norm_epsilon = 1e-12
dropout = 0.1
attention_dropout = 0.1
[data]
train = "{folder}/train"
validation = "{folder}/dev"
tokenizer = "{weights}/tokenizer.json"
split = "1:0"
[train]
init_from = "{weights}"
init_from_resize = true
steps = {steps}
global_batch_size = {batch}
micro_batch_size = {batch}
seed = {seed}
precision = "fp32"
evaluate_every = 0
log_every = 1
threads = {threads}
device = "cpu"
[optim]
learning_rate = 1e-4
warmup_steps = 0"""
    + OPTIM
    + """[checkpoint]
every = 0
[run]
folder = "{folder}/{name}"
"""
)


class Run(NamedTuple):
    """What one command showed."""

    seconds: float
    """[s] Median of a step."""
    memory: float
    """[bytes] Most that one of its processes had."""
    loss: float
    """Mean of the last ten steps: both sides learn."""


def prepare(given: argparse.Namespace) -> None:
    """Token files of the examples, where they are not there yet."""
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "dev"):
        if not (given.folder / f"{name}.bin").exists():
            arguments = ["data", "examples", "mnli", getattr(given, name), "--output", given.folder / name]
            command = [*arguments, "--tokenizer", given.weights / "tokenizer.json"]
            subprocess.run([sys.executable, "-m", "colonnade", *map(str, command)], check=True)


def measured(command: Sequence[object], threads: int) -> float:
    """[bytes] The peak memory of a command, which has to succeed."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    child = subprocess.Popen([sys.executable, *map(str, command)], env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0, f"{command} ended with {child.returncode}"
    return usage.ru_maxrss * 1024.0


def ours(given: argparse.Namespace, turn: int) -> Run:
    """`colonnade train`, one rank."""
    name = f"colonnade-{turn}"
    shape = json.loads((given.weights / "config.json").read_text())
    values = {**vars(given), **shape, "name": name, "seed": turn}
    file = given.folder / f"{name}.toml"
    file.write_text(CONFIG.format(**values))
    memory = measured(["-m", "colonnade", "train", file], given.threads)
    lines = [json.loads(line) for line in (given.folder / name / "metrics.jsonl").read_text().splitlines()]
    tokens = given.batch * given.length
    seconds = [tokens / line["tokens_per_second"] for line in lines[LEFT_OUT:]]
    return Run(median(seconds), memory, mean(line["loss"] for line in lines[-10:]))


def theirs(given: argparse.Namespace, turn: int) -> Run:
    """transformers' Trainer."""
    output = given.folder / f"trainer-{turn}.json"
    options = ("weights", "train", "dev", "folder", "length", "batch", "steps", "threads")
    arguments = [each for name in options for each in (f"--{name}", getattr(given, name))]
    memory = measured(["-m", "benchmarks.finetuning_speed", *arguments, "--trainer", turn], given.threads)
    found = json.loads(output.read_text())
    return Run(median(found["seconds"][LEFT_OUT - 1 :]), memory, mean(found["losses"][-10:]))


def train_theirs(given: argparse.Namespace) -> None:
    """In a process of its own: as a user of transformers would write it."""
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    torch.set_num_threads(given.threads)
    tokenizer = AutoTokenizer.from_pretrained(given.weights)
    model = AutoModelForSequenceClassification.from_pretrained(given.weights, num_labels=3)
    rows = list(json.loads(given.train.read_text()).values())
    pairs = ([row["text_a"] for row in rows], [row["text_b"] for row in rows])
    read = tokenizer(*pairs, truncation=True, padding="max_length", max_length=given.length)
    examples = [
        {**{key: read[key][number] for key in read}, "labels": LABELS.index(row["label"])}
        for number, row in enumerate(rows)
    ]
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: object, **__: object) -> None:
            ends.append(time.perf_counter())

    arguments = TrainingArguments(
        output_dir=str(given.folder / "trainer"),
        per_device_train_batch_size=given.batch,
        max_steps=given.steps,
        learning_rate=RATE,
        weight_decay=0.01,
        lr_scheduler_type="linear",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=given.trainer,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=examples, callbacks=[Clock()])
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    seconds = [after - before for before, after in pairwise(ends)]
    found = {"seconds": seconds, "losses": [float(loss) for loss in losses]}
    (given.folder / f"trainer-{given.trainer}.json").write_text(json.dumps(found))


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetuning_speed", description=__doc__.split("\n\n")[0])
    parser.add_argument("--weights", type=Path, required=True, help="a folder of Hugging Face")
    parser.add_argument("--train", type=Path, required=True, help="MNLI's rows, as .json")
    parser.add_argument("--dev", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for runs")
    parser.add_argument("--length", type=int, default=64, help="[tokens] of a pair")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trainer", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.trainer is not None:
        train_theirs(given)
        return
    prepare(given)
    turns = []
    for turn in range(1, given.turns + 1):
        turns.append((ours(given, turn), theirs(given, turn)))
        print(turns[-1], flush=True)
    write(given, turns)


def write(given: argparse.Namespace, turns: Sequence[tuple[Run, Run]]) -> None:
    """A page in Markdown."""
    import transformers

    hardware, today = describe(), datetime.now(UTC).date().isoformat()
    ratios = [other.seconds / mine.seconds for mine, other in turns]
    lines = [
        f"# Fine-tuning beside transformers' Trainer, {today}, {hardware['cpu']}, {hardware['cores']} cores",
        "",
        f"A published BERT with a new classifier on MNLI's rows: {given.steps} steps of {given.batch} pairs padded to "
        f"{given.length} tokens, fp32, AdamW, dropout 0.1, {given.threads} thread; by turns. Seconds are the median of "
        f"a step without the first {LEFT_OUT}; memory is the most that a process of the command had; losses are means "
        "of the last ten steps, Colonnade's first. The orders of examples differ. "
        f"Commit {hardware['commit']}; torch {hardware['torch']}; transformers {transformers.__version__}; "
        f"`{re.sub(r'/[^ ]*/', '…/', command_line())}`.",
        "",
        "| turn | colonnade, s/step | Trainer, s/step | times as fast | colonnade, MB | Trainer, MB | losses |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, (mine, other) in enumerate(turns, 1):
        lines.append(
            f"| {number} | {mine.seconds:.3f} | {other.seconds:.3f} | {other.seconds / mine.seconds:.2f} | "
            f"{mine.memory / 1e6:,.0f} | {other.memory / 1e6:,.0f} | {mine.loss:.4f}, {other.loss:.4f} |"
        )
    lines += ["", f"Median: {median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f}).", ""]
    (RESULTS / f"finetuning-speed-{today}-{machine_name()}.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
