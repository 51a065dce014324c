"""Two tables of the Megatron-LM paper in small, by real training: perplexity by size, and BERT's orders of LayerNorm.

    python -m benchmarks.paper.trained --books books.jsonl.xz --folder runs/paper [--tables size order] [--tokens …]

Figure 6 of the paper: a larger GPT-2 has a lower validation perplexity after as many tokens. Figure 7: a BERT that has
its LayerNorm behind the residual sum, as the original has it, trains worse the deeper it is, and with LayerNorm in
front of each sublayer it does not. Models are of a hundredth to a thousandth of the paper's sizes and read English
books; each is trained by `colonnade` as a user would, and writes its line to the page of the day in `results/`.
"""

import argparse
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.as_user import OPTIM, colonnade, write_books
from benchmarks.hardware import command_line, describe, machine_name
from benchmarks.paper.tables import header, line

RESULTS = Path(__file__).parents[1] / "results"


class Table(NamedTuple):
    """What its models read."""

    kind: str
    """Of its tokenizer."""
    data: str
    vocabulary: int
    length: int
    batch: int
    tokens: int
    precision: str


TABLES = {
    "size": Table("bpe", "text", 4096, 128, 32, 1_000_000, "bf16"),
    "order": Table("wordpiece", "sentences", 1024, 64, 16, 2_000_000, "fp32"),
}
"""A small BERT that reads so little learns more than how frequent words are only where it predicts few of them."""


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
        2e-3,
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
precision = "{precision}"
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


def prepare(folder: Path, books: Path, names: Iterable[str]) -> None:
    """The token files of these tables, where they are not there yet."""
    missing = [TABLES[name] for name in names if not (folder / f"{TABLES[name].data}.bin").exists()]
    if missing:
        write_books(books, folder / "text.jsonl", 8_000_000)
    for table in missing:
        tokenizer, more = folder / f"{table.kind}.json", ("--sentences",) if table.data == "sentences" else ()
        made = ("--kind", table.kind, "--vocab-size", table.vocabulary, "--output", tokenizer, "--overwrite")
        colonnade("data", "train-tokenizer", folder / "text.jsonl", *made)
        read = ("--tokenizer", tokenizer, "--output", folder / table.data)
        colonnade("data", "tokenize", folder / "text.jsonl", *more, *read)


def trained(model: Model, folder: Path, tokens: int) -> dict[str, Any]:
    """The last line of metrics of its run."""
    run = folder / model.name.replace(" ", "-").replace(",", "")
    table = TABLES[model.table]
    steps = tokens // (table.batch * table.length)
    sizes = {"length": table.length, "batch": table.batch, "precision": table.precision}
    course = {"steps": steps, "warmup": steps // 10, "rate": model.rate}
    where = {"data": folder / table.data, "tokenizer": folder / f"{table.kind}.json", "run": run}
    file = run.with_suffix(".toml")
    file.write_text(CONFIG.format(keys=model.keys, **sizes, **course, **where))
    colonnade("train", file)
    last: dict[str, Any] = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return last


def train_all(folder: Path, books: Path, tokens: Mapping[str, int]) -> dict[str, dict[str, dict[str, Any]]]:
    """Of each table, which reads so many tokens, of each model, the last line of its metrics."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    prepare(folder, books, tokens)
    found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in tokens}
    for model in (*SIZES, *ORDERS):
        if model.table in found:
            found[model.table][model.name] = last = trained(model, folder, tokens[model.table])
            print(model.name, {key: value for key, value in last.items() if key.startswith("validation")}, flush=True)
    return found


def page(found: Mapping[str, Mapping[str, dict[str, Any]]], tokens: Mapping[str, int]) -> Iterator[str]:
    """`found`: of `train_all`."""
    hardware = describe()
    yield f"# Two tables of the Megatron-LM paper in small, by training, {hardware['cpu']}"
    yield ""
    yield (
        f"AdamW with warm-up and linear decay, one seed. Commit {hardware['commit']}, torch {hardware['torch']}, "
        f"`{command_line()}`."
    )
    yield from sections(found, tokens)


def sections(found: Mapping[str, Mapping[str, dict[str, Any]]], tokens: Mapping[str, int]) -> Iterator[str]:
    """A table each."""
    for name, models in found.items():
        yield from ("", *(_sizes(models) if name == "size" else _orders(models)), "", _read(TABLES[name], tokens[name]))


def _read(table: Table, tokens: int) -> str:
    return (
        f"Each read {tokens:,} tokens of English books: vocabulary {table.vocabulary:,}, {table.batch} samples of "
        f"{table.length} tokens a step, {table.precision}."
    )


def _sizes(models: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    yield from ("## Validation perplexity by size (figure 6)", "", *header("GPT-2", "perplexity of other books"))
    yield from (line(name, f"{math.exp(last['validation_loss']):.1f}") for name, last in models.items())
    yield from ("", "The paper has, at iteration 300,000 on its own validation set, a lower one the larger the model.")


def _orders(models: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    names = ("BERT of width 64", "masked loss of other books", "right")
    yield from ("## Orders of LayerNorm (figure 7)", "", *header(*names))
    for name, last in models.items():
        right = f"{100 * last['validation_masked_accuracy']:.1f} %"
        yield line(name, f"{last['validation_masked_loss']:.3f}", right)
    yield from ("", "The paper has the original order (post) diverge or train worse where the model is large.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tables", nargs="+", choices=tuple(TABLES), default=tuple(TABLES))
    read = ", ".join(f"{name}: {table.tokens:,}" for name, table in TABLES.items())
    parser.add_argument("--tokens", type=int, help=f"that each model reads ({read})")
    arguments = parser.parse_args()
    tokens = {name: arguments.tokens or TABLES[name].tokens for name in arguments.tables}
    found = train_all(arguments.folder, arguments.books, tokens)
    text = "\n".join(page(found, tokens)) + "\n"
    today, tables = datetime.now(UTC).date().isoformat(), "-".join(found)
    (RESULTS / f"paper-trained-{tables}-{today}-{machine_name()}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
