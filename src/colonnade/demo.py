"""The demonstration: everything this program is for, once, on bundled text, in minutes on two CPU cores.

Each part is a command that a user could have typed, and it is shown before it runs.
"""

import json
import lzma
import subprocess
import sys
import time
from pathlib import Path

from colonnade.data.bundle import BOOKS_SPLIT, books
from colonnade.errors import ColonnadeError

CONFIG = """\
# A small GPT on Sherlock Holmes, cut over two tensor-parallel ranks.
[model]
num_layers = 4
hidden_size = 256
num_heads = 4
seq_length = 128
dropout = 0.0            # no text is read twice
attention_dropout = 0.0

[parallel]
tp = 2                   # every layer is cut in two: each rank has half the heads, half the MLP, half the vocabulary

[data]
train = "{folder}/holmes"
tokenizer = "{folder}/tokenizer.json"
split = "{split}"         # by documents: two stories are kept for validation

[train]
steps = 300
global_batch_size = 16
micro_batch_size = 16
log_every = 25
evaluate_every = 150

[optim]
learning_rate = 2e-3
min_learning_rate = 1e-4
warmup_steps = 20
decay_steps = 300
weight_decay = 0.1
beta2 = 0.95

[run]
folder = "{folder}/run"
"""
HALF = 150  # the first command stops here, the second goes on
VOCAB_SIZE = 2048


def main(folder: Path) -> None:
    """Run the demonstration, writing to `folder`."""
    started = time.perf_counter()
    if (folder / "run").exists():
        raise ColonnadeError(
            f"{folder}/run exists: the demonstration has been run there. Remove {folder}, or choose another --folder."
        )
    text, config = folder / "holmes.jsonl", folder / "demo.toml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text.write_bytes(lzma.decompress(books().read_bytes()))
        config.write_text(CONFIG.format(folder=folder, split=BOOKS_SPLIT), encoding="utf-8")
    except OSError as error:
        raise ColonnadeError(
            f"{folder} cannot be written: {error.strerror} ({error.filename}). Choose another --folder, or fix that."
        ) from error

    _say("1. Text to tokens: 37 stories by Arthur Conan Doyle, a tokenizer of their own, and a token file.")
    _run(
        "data",
        "train-tokenizer",
        text,
        "--output",
        folder / "tokenizer.json",
        "--vocab-size",
        VOCAB_SIZE,
        "--overwrite",
    )
    _run(
        "data", "tokenize", text, "--output", folder / "holmes", "--tokenizer", folder / "tokenizer.json", "--overwrite"
    )

    _say(f"2. Train {HALF} steps on two processes that share every layer (tensor parallelism, tp = 2), and stop.")
    _run("train", config, f"train.steps={HALF}")
    _say(
        "3. The same command again, with more steps: it goes on from the checkpoint, to the bit as if it had never "
        "stopped."
    )
    _run("train", config)

    _say("4. How good is it? Bits per byte on the stories that it has not seen, beside what `xz -9` makes of the text.")
    _compare_with_xz(folder, text)

    _say("5. Let it write. The checkpoint was written by two ranks; one reads it.")
    _run("generate", folder / "run", "--prompt", '"My dear Watson," said Holmes,', "--max-new-tokens", 80)

    _say("6. The promise: the same run on any layout. tp = 2 against the serial run, in float64.")
    _run("verify", config, "--layout", "tp=2", "--steps", 2)
    _say(CLOSING.format(folder=folder, seconds=time.perf_counter() - started))


CLOSING = """\
Done in {seconds:.0f} s. What happened: a GPT was trained on two processes, each with half of every matrix; in every
layer they exchanged two sums going forward and two going back. It was stopped and resumed, measured, sampled, and shown
to be the run that one process would have made.

What to try next
  a longer text, written by both ranks together:
      colonnade generate {folder}/run --prompt "It was a foggy night" --tp 2 --temperature 1
  two copies of the model that share each batch, instead of one that is cut:
      colonnade train {folder}/demo.toml run.folder={folder}/dp parallel.tp=1 parallel.dp=2 train.micro_batch_size=8
  the same run on more layouts:
      colonnade verify {folder}/demo.toml train.micro_batch_size=8 --layout tp=4 --layout tp=2,dp=2
  every key of a configuration:
      colonnade train --help
  your own text: README.md and examples/books.toml"""


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)


def _run(*arguments: object, shown: bool = True) -> None:
    """Run `colonnade …` as a user would; a failure ends the demonstration with the command's own message."""
    words = [str(argument) for argument in arguments]
    if shown:
        print("\n$ colonnade " + " ".join(f"'{word}'" if " " in word else word for word in words), flush=True)
    status = subprocess.run([sys.executable, "-m", "colonnade", *words], check=False).returncode
    if status:
        raise ColonnadeError(f"`colonnade {words[0]}` failed with exit status {status}; its message is above.")


def _compare_with_xz(folder: Path, text: Path) -> None:
    """The model's bits per byte on the validation stories, from its last evaluation, beside those of xz."""
    last = json.loads((folder / "run" / "metrics.jsonl").read_bytes().splitlines()[-1])
    stories = [json.loads(line)["text"] for line in text.read_bytes().splitlines()]
    kept = "\n".join(stories[-2:]).encode()
    everything = "\n".join(stories).encode()
    print(f"  the model, on the validation stories    {last['validation_bits_per_byte']:.3f} bits per byte")
    print(f"  xz -9, on the validation stories        {_xz_bits_per_byte(kept):.3f}")
    print(f"  xz -9, on all the bundled text          {_xz_bits_per_byte(everything):.3f}")


def _xz_bits_per_byte(text: bytes) -> float:
    return 8 * len(lzma.compress(text, preset=9)) / len(text)
