"""Zero-shot evaluation beside lm-eval's own model and a plain script with `transformers`: the same weights, in turns.

    python -m benchmarks.evaluate --lambada lambada_test.jsonl --wikitext wikitext-103.test.tokens --tokenizer gpt2-bpe

The weights are random, of the 30M parameters of the other benchmarks or of GPT-2 small (`--model gpt2`). Read are the
first passages of LAMBADA and the first windows of WikiText-103, 1024 tokens that move by 32, by everyone as the same
tokens in batches of the same size, sorted by length, in a process of its own. The time is from tokens to numbers,
without reading the weights. The plain script is batched as people write it: `model(tokens).logits`, `log_softmax`,
gather. `--precision bf16` is for all.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.hardware import command_line, describe
from colonnade.data.tokenizer import Tokenizer
from colonnade.evaluation.continuations import Continuation, score
from colonnade.evaluation.passages import examples, read_passages
from colonnade.evaluation.wikitext import PAPER_STRIDE, PAPER_WINDOW, read_wikitext

CONTESTANTS = ("colonnade", "plain", "lm-eval")
TASKS = ("lambada", "wikitext")
MODELS: dict[str, dict[str, Any]] = {
    "reference": {"n_embd": 384, "n_layer": 6, "n_head": 6},
    "gpt2": {},
    "tiny": {"n_embd": 64, "n_layer": 2, "n_head": 4},
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Run = Callable[[Sequence[Continuation]], float]


def make(folder: Path, line: argparse.Namespace) -> None:
    """The weights: a folder of transformers, and our checkpoint of it."""
    import transformers

    tokenizer = Tokenizer.load(line.tokenizer)
    end = tokenizer.end_of_document
    config = transformers.GPT2Config(
        vocab_size=tokenizer.vocab_size, bos_token_id=end, eos_token_id=end, **MODELS[line.model]
    )
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "theirs")
    tokenizer.save(folder / "theirs" / "tokenizer.json")
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    (folder / "theirs" / "tokenizer_config.json").write_text(json.dumps(names))
    command = [sys.executable, "-m", "colonnade", "convert", str(folder / "theirs"), str(folder / "ours")]
    subprocess.run(command, check=True, capture_output=True)


def work(task: str, line: argparse.Namespace) -> list[Continuation]:
    """What is scored: LAMBADA's words behind their passages, or the last 32 tokens of each window."""
    tokenizer = Tokenizer.load(line.tokenizer)
    if task == "lambada":
        passages = read_passages(line.lambada)[: line.passages]
        cut = examples(line.lambada, passages, tokenizer, variant="whole-word", longest=PAPER_WINDOW)
        return [Continuation(each.context, each.target) for each in cut]
    tokens = tokenizer.encode(read_wikitext(line.wikitext, "invertible").text)
    starts = range(PAPER_STRIDE, PAPER_STRIDE * (line.windows + 1), PAPER_STRIDE)
    windows = [tokens[start : start + PAPER_WINDOW + 1] for start in starts]
    return [Continuation(each[:-PAPER_STRIDE], each[-PAPER_STRIDE:]) for each in windows]


def colonnade_run(folder: Path, line: argparse.Namespace) -> Run:
    from colonnade.mesh.mesh import Mesh
    from colonnade.serving.trained import open_trained

    model = open_trained(folder / "ours", Mesh(), torch.device("cpu"), line.precision)

    def run(wanted: Sequence[Continuation]) -> float:
        found = score(model.left_to_right, wanted, mesh=Mesh(), hidden=model.hidden, batch_size=line.batch_size)
        return float(found.losses.sum())

    return run


def plain_run(folder: Path, line: argparse.Namespace) -> Run:
    import transformers

    dtype = DTYPES[line.precision]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / "theirs", dtype=dtype)
    model.eval()

    @torch.no_grad()
    def run(wanted: Sequence[Continuation]) -> float:
        total, order = 0.0, sorted(wanted, key=lambda each: -len(each.context) - len(each.target))
        for begin in range(0, len(order), line.batch_size):
            batch = order[begin : begin + line.batch_size]
            rows = [torch.tensor([*context, *target][:-1]) for context, target in batch]
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            chances = model(padded).logits.float().log_softmax(-1)
            for row, (tokens, (_, target)) in enumerate(zip(rows, batch, strict=True)):
                behind = chances[row, len(tokens) - len(target) : len(tokens)]
                total -= float(behind[range(len(target)), list(target)].sum())
        return total

    return run


def harness_run(folder: Path, line: argparse.Namespace) -> Run:
    from lm_eval.models.huggingface import HFLM

    dtype = {"fp32": "float32", "bf16": "bfloat16"}[line.precision]
    model: Any = HFLM(pretrained=str(folder / "theirs"), device="cpu", dtype=dtype, batch_size=line.batch_size)

    def run(wanted: Sequence[Continuation]) -> float:
        requests = [((str(number), ""), list(context), list(target)) for number, (context, target) in enumerate(wanted)]
        return -float(sum(each for each, _ in model._loglikelihood_tokens(requests, disable_tqdm=True)))

    return run


def measure(folder: Path, line: argparse.Namespace) -> None:
    """In a process of its own: both tasks, once."""
    torch.set_num_threads(line.threads)
    run = {"colonnade": colonnade_run, "plain": plain_run, "lm-eval": harness_run}[line.only](folder, line)
    for task in TASKS:
        wanted = work(task, line)
        run(wanted[: line.batch_size])  # what is made once
        start = time.perf_counter()
        loss = run(wanted)
        seconds = time.perf_counter() - start
        tokens = sum(len(context) + len(target) - 1 for context, target in wanted)
        found = {"who": line.only, "task": task, "seconds": seconds, "tokens_per_second": tokens / seconds}
        print("RESULT " + json.dumps({**found, "tokens": tokens, "sequences": len(wanted), "loss": loss}), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("lambada", "wikitext", "tokenizer"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name, default in (("passages", 128), ("windows", 16), ("batch-size", 8), ("rounds", 2), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", choices=DTYPES, default="fp32")
    parser.add_argument("--model", choices=MODELS, default="reference")
    parser.add_argument("--only", choices=CONTESTANTS, help="measure one of them, here")
    parser.add_argument("--folder", type=Path, help="of the weights, with --only")
    return parser.parse_args()


def table(found: Sequence[dict[str, Any]]) -> str:
    """Seconds and tokens a second of each contestant, and how many times as long the others take."""
    lines = ["| task | who | seconds, by round | tokens/s | times Colonnade's time |", "|---|---|---|---|---|"]
    for task in TASKS:
        seconds = {
            who: [each["seconds"] for each in found if (each["who"], each["task"]) == (who, task)]
            for who in CONTESTANTS
        }
        rates = {
            who: median(each["tokens_per_second"] for each in found if (each["who"], each["task"]) == (who, task))
            for who in CONTESTANTS
        }
        for who in CONTESTANTS:
            times = median(seconds[who]) / median(seconds["colonnade"])
            rounds = ", ".join(f"{each:.2f}" for each in seconds[who])
            lines.append(f"| {task} | {who} | {rounds} | {rates[who]:,.0f} | {times:.2f} |")
    return "\n".join(lines)


def check(found: Sequence[dict[str, Any]], tolerance: float) -> None:
    """Everyone has found the same."""
    for task in TASKS:
        losses = [each["loss"] for each in found if each["task"] == task]
        assert max(losses) - min(losses) <= tolerance * max(losses), f"{task}: losses differ, {losses}"


def main() -> None:
    line = arguments()
    if line.only:
        measure(line.folder, line)
        return
    print(json.dumps({**describe(), "command": command_line()}))
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), line)
        for _ in range(line.rounds):
            for who in CONTESTANTS:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.evaluate",
                    *sys.argv[1:],
                    "--only",
                    who,
                    "--folder",
                    folder,
                ]
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
                for result in (each.removeprefix("RESULT ") for each in out if each.startswith("RESULT ")):
                    print(result, flush=True)
                    found.append(json.loads(result))
    check(found, 1e-4 if line.precision == "fp32" else 2e-2)
    print(table(found))


if __name__ == "__main__":
    main()
