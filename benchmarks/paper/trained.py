"""Two tables of the Megatron-LM paper in small, by real training: perplexity by size, and BERT's orders of LayerNorm.

    python -m benchmarks.paper.trained --books books.jsonl.xz --folder runs/paper [--tokens 2_000_000]

Figure 6 of the paper: a larger GPT-2 has a lower validation perplexity after as many tokens. Figure 7: a BERT that has
its LayerNorm behind the residual sum, as the original has it, trains worse the deeper it is, and with LayerNorm in
front of each sublayer it does not. Models are of a hundredth to a thousandth of the paper's sizes and read English
books; each is trained by `colonnade` as a user would, and writes its line to the page of the day in `results/`.
"""

import argparse
import json
import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.as_user import OPTIM, colonnade, write_books
from benchmarks.hardware import command_line, describe, machine_name

RESULTS = Path(__file__).parents[1] / "results"
VOCABULARY, LENGTH, BATCH = 4096, 128, 32


class Model(NamedTuple):
    """[model] of a run."""

    name: str
    table: str
    keys: str
    rate: float


SIZES = tuple(
    Model(
        f"{layers} layers of width {width}",
        "size",
        f"num_layers={layers}\nhidden_size={width}\nnum_heads=4",
        2e-3 * (64 / width) ** 0.5,
    )
    for layers, width in ((2, 64), (4, 128), (6, 192), (8, 256))
)
ORDERS = tuple(
    Model(
        f"{layers} layers, LayerNorm {order}",
        "order",
        f'kind="bert"\nnum_layers={layers}\nhidden_size=64\nnum_heads=4\nnorm_position="{order}"\nembedding_norm=true',
        1e-3,
    )
    for layers in (4, 24)
    for order in ("post", "pre")
)
CONFIG = (
    """
[model]
{keys}
seq_length = {length}
dropout = 0.0
attention_dropout = 0.0
[data]
train = "{data}"
tokenizer = "{tokenizer}"
split = "95:5"
[train]
steps = {steps}
global_batch_size = {batch}
micro_batch_size = {batch}
precision = "bf16"
evaluate_every = {steps}
evaluate_samples = 512
log_every = 50
threads = 1
device = "cpu"
[optim]
learning_rate = {rate}
warmup_steps = {warmup}"""
    + OPTIM
    + """[checkpoint]
every = 0
[run]
folder = "{run}"
"""
)


def prepare(folder: Path, books: Path) -> None:
    """Token files `text` for GPT-2 and `sentences` for BERT, where they are not there yet."""
    if (folder / "sentences.bin").exists():
        return
    write_books(books, folder / "text.jsonl", 8_000_000)
    for kind, name, more in (("bpe", "text", ()), ("wordpiece", "sentences", ("--sentences",))):
        tokenizer = folder / f"{kind}.json"
        made = ("--kind", kind, "--vocab-size", VOCABULARY, "--output", tokenizer, "--overwrite")
        colonnade("data", "train-tokenizer", folder / "text.jsonl", *made)
        colonnade("data", "tokenize", folder / "text.jsonl", *more, "--tokenizer", tokenizer, "--output", folder / name)


def trained(model: Model, folder: Path, tokens: int) -> dict[str, Any]:
    """The last line of metrics of its run."""
    run = folder / model.name.replace(" ", "-").replace(",", "")
    kind, data = ("wordpiece", "sentences") if model.table == "order" else ("bpe", "text")
    steps = tokens // (BATCH * LENGTH)
    sizes = {"length": LENGTH, "batch": BATCH, "steps": steps, "warmup": steps // 10, "rate": model.rate}
    where = {"data": folder / data, "tokenizer": folder / f"{kind}.json", "run": run}
    file = run.with_suffix(".toml")
    file.write_text(CONFIG.format(keys=model.keys, **sizes, **where))
    colonnade("train", file)
    last: dict[str, Any] = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return last


def page(sizes: dict[str, float], orders: dict[str, tuple[float, float]], tokens: int) -> Iterator[str]:
    hardware = describe()
    yield f"# Two tables of the Megatron-LM paper in small, by training, {hardware['cpu']}"
    yield ""
    yield (
        f"Each model read {tokens:,} tokens of English books (vocabulary {VOCABULARY:,}, {BATCH} samples of {LENGTH} "
        f"tokens a step, AdamW with warm-up and linear decay, bf16, one seed). Commit {hardware['commit']}, torch "
        f"{hardware['torch']}, `{command_line()}`."
    )
    yield from (
        "",
        "## Validation perplexity by size (figure 6)",
        "",
        "| GPT-2 | perplexity of other books |",
        "|---|---|",
    )
    yield from (f"| {name} | {perplexity:.1f} |" for name, perplexity in sizes.items())
    yield from (
        "",
        "The paper has, at iteration 300,000 on its own validation set, a lower perplexity the larger the model.",
    )
    yield from (
        "",
        "## Orders of LayerNorm (figure 7)",
        "",
        "| BERT of width 64 | masked loss of other books | right |",
    )
    yield "|---|---|---|"
    yield from (f"| {name} | {loss:.3f} | {100 * right:.1f} % |" for name, (loss, right) in orders.items())
    yield from ("", "The paper has the original order (post) diverge or train worse where the model is large.", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    line = parser.parse_args()
    folder = line.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder, line.books)
    sizes, orders = {}, {}
    for model in (*SIZES, *ORDERS):
        last = trained(model, folder, line.tokens)
        if model.table == "size":
            sizes[model.name] = math.exp(last["validation_loss"])
        else:
            orders[model.name] = last["validation_masked_loss"], last["validation_masked_accuracy"]
        print(model.name, {key: value for key, value in last.items() if key.startswith("validation")}, flush=True)
    text = "\n".join(page(sizes, orders, line.tokens))
    today = datetime.now(UTC).date().isoformat()
    (RESULTS / f"paper-trained-{today}-{machine_name()}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
