"""What fine-tuning reaches on rows that were kept apart, over seeds: a table a command, from files that are named.

    python -m benchmarks.finetuned mnli --weights MODEL --train train.json --held-out dev.json --folder runs/finetuned
    python -m benchmarks.finetuned squad --weights MODEL --train dev-v2.0.json --held-out xquad.en.json --folder …
    python -m benchmarks.finetuned books --task qqp --books books.jsonl.xz --train … --held-out … --folder …
    python -m benchmarks.finetuned race --weights MODEL --train race.jsonl --folder …
    python -m benchmarks.finetuned chat --squad dev-v2.0.json --books books.jsonl.xz --folder …

MODEL is a folder of Hugging Face with a BERT and its tokenizer. Everything is run by `colonnade` as a user would; the
seeds, of weights that are drawn, order and dropout, are a sweep. Rows kept apart are scored before the first step and
after the last, and choose nothing. Each command writes its table to the page of the day in `results/`, beside those
that are there.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import chat as talk
from benchmarks.as_user import OPTIM, colonnade, write_books
from benchmarks.finetuned_page import Run, Table, record
from benchmarks.hardware import command_line, describe

SEEDS = (1, 2, 3)
PARTS = ("train", "held-out")
VOCABULARY = 8192
LINEAR = "linear warm-up and decay, dropout 0.1"
SMALL = """kind = "bert"
num_layers = 4
hidden_size = 128
num_heads = 4
norm_position = "post"
embedding_norm = true"""
CONFIG = (
    """
[model]
{model}
dropout = 0.1
attention_dropout = 0.1
[data]
train = "{folder}/train"
validation = "{folder}/held-out"
tokenizer = "{tokenizer}"
split = "1:0"
{data}
[train]
{init}
steps = {steps}
global_batch_size = {batch}
micro_batch_size = {batch}
precision = "{precision}"
evaluate_every = {steps}
evaluate_at_start = true
evaluate_samples = {evaluated}
log_every = 20
threads = 1
device = "cpu"
[optim]
learning_rate = {rate}
warmup_steps = {warmup}"""
    + OPTIM
    + """[checkpoint]
every = 0
[run]
folder = "{folder}/{name}"
[sweep]
train.seed = [{seeds}]
score = "{score}"
"""
)
READ = (
    """
[model]
{model}
seq_length = 128
[data]
train = "{folder}/sentences"
tokenizer = "{tokenizer}"
split = "95:5"
[train]
steps = {reading}
global_batch_size = 32
micro_batch_size = 32
precision = "{precision}"
evaluate_every = {reading}
evaluate_samples = 512
log_every = 50
threads = 1
device = "cpu"
[optim]
learning_rate = 1e-3
warmup_steps = 100"""
    + OPTIM
    + """[run]
folder = "{folder}/read"
"""
)


def shape_of(weights: Path) -> str:
    """[model] of a published BERT."""
    config = json.loads((weights / "config.json").read_text())
    keys = {
        "num_layers": "num_hidden_layers",
        "hidden_size": "hidden_size",
        "num_heads": "num_attention_heads",
        "ffn_hidden_size": "intermediate_size",
    }
    lines = [f"{ours} = {config[theirs]}" for ours, theirs in keys.items()]
    return "\n".join(
        ['kind = "bert"', *lines, 'norm_position = "post"', "embedding_norm = true", "norm_epsilon = 1e-12"]
    )


def make_examples(format_name: str, folder: Path, tokenizer: Path, suffix: str = ".json") -> None:
    """Token files `train` and `held-out`, where they are not there yet, of rows-train and rows-held-out."""
    for name in PARTS:
        if not (folder / f"{name}.bin").exists():
            rows = folder / f"rows-{name}{suffix}"
            colonnade(
                "data", "examples", format_name, rows, "--output", folder / name, "--tokenizer", tokenizer, shown=True
            )


def sweep(name: str, given: argparse.Namespace, **values: str) -> list[Run]:
    """All seeds of one beginning."""
    seeds = ", ".join(map(str, SEEDS))
    keys = {"data": "", "evaluated": "100_000", "seeds": seeds, "warmup": given.steps // 10, "name": name}
    file = given.folder / f"{name}.toml"
    file.write_text(CONFIG.format(**(vars(given) | keys | values)))
    colonnade("finetune", file, shown=True)
    points = json.loads((given.folder / name / "summary.json").read_text())["points"]
    return [run_of(given.folder / name / point["point"], point) for point in points]


def run_of(run: Path, point: Mapping[str, Any]) -> Run:
    """What a point of a sweep found at its two evaluations."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    first = next(event for event in events if event["event"] == "evaluated" and event["step"] == 0)
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    return Run(point["train.seed"], scores_of(first), scores_of(last), point["seconds"])


def scores_of(line: Mapping[str, Any]) -> dict[str, float]:
    return {key.removeprefix("validation_"): value for key, value in line.items() if key.startswith("validation_")}


def pairs_kept_apart(train: Path, held_out: Path, folder: Path) -> tuple[int, int, int]:
    """Rows of pairs of texts, of those kept apart without each that has a text of the rows to train on. Returns how
    many are trained on, kept apart and left out.
    """
    rows, apart = (json.loads(each.read_text()) for each in (train, held_out))
    known = {text for row in rows.values() for text in (row["text_a"], row["text_b"])}
    kept = {key: row for key, row in apart.items() if known.isdisjoint((row["text_a"], row["text_b"]))}
    (folder / "rows-train.json").write_text(json.dumps(rows))
    (folder / "rows-held-out.json").write_text(json.dumps(kept))
    return len(rows), len(kept), len(apart) - len(kept)


def mnli(given: argparse.Namespace) -> Table:
    trained, kept, left = pairs_kept_apart(given.train, given.held_out, given.folder)
    tokenizer = given.weights / "tokenizer.json"
    make_examples("mnli", given.folder, tokenizer)
    model = f"{shape_of(given.weights)}\n{classifier(3, given.length)}"
    values = {"model": model, "tokenizer": str(tokenizer), "score": "accuracy"}
    runs = {"MiniLM": sweep("weights", given, **values, init=begun_from(given.weights))}
    runs["drawn weights"] = sweep("drawn", given, **values, init="")
    what = f"{kept_apart('MNLI', trained, kept, left)} Three labels, alike frequent: 33 % is chance."
    return Table("MNLI, from published weights", what, LINEAR, ("loss", "accuracy"), {"accuracy": 100.0}, runs)


def classifier(num_labels: int, length: int) -> str:
    return f'head = "classification"\nnum_labels = {num_labels}\nseq_length = {length}'


def begun_from(weights: Path) -> str:
    return f'init_from = "{weights}"\ninit_from_resize = true'


def kept_apart(rows: str, trained: int, kept: int, left: int) -> str:
    return (
        f"{trained:,} rows of {rows} to train on; {kept:,} kept apart, from which {left} were left out that share a "
        "text with those."
    )


def squad(given: argparse.Namespace) -> Table:
    """Questions that have an answer alone, in the form of 1.1: a model that answers nothing scores nothing."""
    files = {"train": given.train, "held-out": given.held_out}
    articles = {name: json.loads(file.read_text())["data"] for name, file in files.items()}
    known = {article["title"] for article in articles["train"]}
    articles["held-out"] = [each for each in articles["held-out"] if each["title"] not in known][: given.articles]
    counts = {}
    for name, found in articles.items():
        rows = [answerable(article) for article in found]
        counts[name] = sum(len(text["qas"]) for article in rows for text in article["paragraphs"])
        (given.folder / f"rows-{name}.json").write_text(json.dumps({"version": "1.1", "data": rows}))
    tokenizer = given.weights / "tokenizer.json"
    make_examples("squad", given.folder, tokenizer)
    model = f'{shape_of(given.weights)}\nhead = "spans"\nseq_length = {given.length}'
    asked = f'questions = "{given.folder}/rows-held-out.json"'
    values = {"model": model, "tokenizer": str(tokenizer), "score": "f1", "data": asked, "evaluated": "64"}
    runs = {"MiniLM": sweep("weights", given, **values, init=begun_from(given.weights))}
    what = (
        f"{counts['train']:,} questions with an answer, of {len(articles['train'])} articles, to train on; "
        f"{counts['held-out']:,} of {len(articles['held-out'])} other articles kept apart. Exact match and F1 are "
        "those of evaluate-v1.1.py. Before the first step the head is drawn."
    )
    return Table("SQuAD, from published weights", what, LINEAR, ("exact_match", "f1"), {}, runs)


def answerable(article: Mapping[str, Any]) -> dict[str, Any]:
    """An article with those of its questions that have an answer, as 1.1 writes them."""
    keys = ("id", "question", "answers")
    texts = [
        {"context": text["context"], "qas": [{key: q[key] for key in keys} for q in text["qas"] if q["answers"]]}
        for text in article["paragraphs"]
    ]
    return {"title": article["title"], "paragraphs": texts}


def books(given: argparse.Namespace) -> Table:
    """A small BERT that reads books first, beside the same without; what it read serves every task of its folder."""
    read, given.folder = given.folder, given.folder / given.task
    given.folder.mkdir(exist_ok=True)
    trained, kept, left = pairs_kept_apart(given.train, given.held_out, given.folder)
    tokenizer = read / "wordpiece.json"
    last = read_books(given, read, tokenizer)
    make_examples(given.task, given.folder, tokenizer)
    shares = shares_of(given.folder / "rows-held-out.json")
    model = f"{SMALL}\n{classifier(len(shares), given.length)}"
    values = {"model": model, "tokenizer": str(tokenizer), "score": "accuracy"}
    runs = {"books": sweep("weights", given, **values, init=begun_from(read / "read"))}
    runs["drawn weights"] = sweep("drawn", given, **values, init="")
    task = given.task.upper()
    what = (
        f"A BERT of 4 layers of width 128, post-norm, with a vocabulary of {VOCABULARY:,}, read {last['tokens']:,} "
        f"tokens of English books in {last['step']:,} steps (one seed; masked loss of other books "
        f"{last['validation_masked_loss']:.3f}, {100 * last['validation_masked_accuracy']:.1f} % of masked tokens "
        f"right). {kept_apart(task, trained, kept, left)} The most frequent label is "
        f"{100 * max(shares.values()):.1f} % of them."
    )
    shown = ("loss", "accuracy", "f1") if given.task == "qqp" else ("loss", "accuracy")
    unit = {"accuracy": 100.0, "f1": 100.0}
    return Table(f"{task}, from a BERT that has read books", what, LINEAR, shown, unit, runs)


def read_books(given: argparse.Namespace, read: Path, tokenizer: Path) -> dict[str, Any]:
    """The last line of metrics of the run that reads, which is run where its folder does not have it."""
    metrics = read / "read" / "metrics.jsonl"
    if not (read / "sentences.bin").exists():
        write_books(given.books, read / "text.jsonl", given.characters)
        vocabulary = ("--kind", "wordpiece", "--vocab-size", VOCABULARY, "--output", tokenizer, "--overwrite")
        colonnade("data", "train-tokenizer", read / "text.jsonl", *vocabulary, shown=True)
        output = ("--tokenizer", tokenizer, "--output", read / "sentences")
        colonnade("data", "tokenize", read / "text.jsonl", "--sentences", *output, shown=True)
    keys = vars(given) | {"folder": read}
    (read / "read.toml").write_text(READ.format(**keys, tokenizer=tokenizer, model=SMALL))
    colonnade("train", read / "read.toml", shown=True)
    last: dict[str, Any] = json.loads(metrics.read_text().splitlines()[-1])
    return last


def shares_of(rows: Path) -> dict[str, float]:
    """How frequent each label is."""
    labels = Counter(row["label"] for row in json.loads(rows.read_text()).values())
    return {label: count / labels.total() for label, count in labels.items()}


def race(given: argparse.Namespace) -> Table:
    """Of one file, a question a line: every fifth article is kept apart."""
    rows = [json.loads(line) for line in given.train.read_text().splitlines()]
    apart = set(list(dict.fromkeys(row["article"] for row in rows))[::5])
    parts = {
        "train": [row for row in rows if row["article"] not in apart],
        "held-out": [row for row in rows if row["article"] in apart],
    }
    for name, part in parts.items():
        (given.folder / f"rows-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    tokenizer = given.weights / "tokenizer.json"
    make_examples("race", given.folder, tokenizer, ".jsonl")
    model = f'{shape_of(given.weights)}\nhead = "choice"\nnum_labels = 4\nseq_length = {given.length}'
    values = {"model": model, "tokenizer": str(tokenizer), "score": "accuracy"}
    runs = {"MiniLM": sweep("weights", given, **values, init=begun_from(given.weights))}
    what = (
        f"{len(parts['train'])} questions of RACE's middle part to train on, {len(parts['held-out'])} of other "
        "articles kept apart; one option of four is right: 25 % is chance. A sample is four sequences."
    )
    return Table("RACE, from published weights", what, LINEAR, ("loss", "accuracy"), {"accuracy": 100.0}, runs)


def chat(given: argparse.Namespace) -> Table:
    """The decoder of `benchmarks.chat`, over seeds of the second run."""
    held_out = talk.prepare(given.folder, given.squad, given.books)[: given.asked]
    text = f'train = "{given.folder}/text"\nsplit = "200:1"'
    how = {"length": given.length, "rate": given.rate, "precision": given.precision}
    read = talk.train(given.folder, "read", data=text, batch=32, steps=given.reading, train="", **how)

    def answers(name: str) -> dict[str, float]:
        return talk.scores(given.folder, name, held_out)[0] if held_out else {}

    first = answers("read")
    runs = []
    for seed in SEEDS:
        began, name = time.perf_counter(), f"seed-{seed}"
        init = f'init_from = "{given.folder}/read"\nseed = {seed}'
        data = talk.TALKS.format(folder=given.folder)
        loss = talk.train(given.folder, name, data=data, batch=given.batch, steps=given.steps, train=init, **how)
        seconds = time.perf_counter() - began
        before, after = {"loss": loss["before"], **first}, {"loss": loss["after"], **answers(name)}
        runs.append(Run(seed, before, after, seconds))
    what = (
        f"A decoder of 4 layers of width 256 read books and sentences in {given.reading} steps of 32 samples (loss "
        f"{read['after']:.3f}), and then questions with the sentence that has the answer; loss is of the answers of "
        "two articles kept apart."
    )
    if held_out:
        what += (
            f" Exact match and F1 (of evaluate-v1.1.py) are of greedy answers to {len(held_out)} of their questions."
        )
    return Table(
        "Answers of a small decoder",
        what,
        "warm-up, cosine decay and no dropout",
        tuple(runs[0].after),
        {},
        {"text": runs},
    )


TABLES: dict[str, Callable[[argparse.Namespace], Table]] = {
    "mnli": mnli,
    "squad": squad,
    "books": books,
    "race": race,
    "chat": chat,
}


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetuned", description=__doc__.split("\n\n")[0])
    tables = parser.add_subparsers(dest="table", required=True)

    def table(name: str, *files: str, **defaults: float) -> argparse.ArgumentParser:
        own = tables.add_parser(name)
        for file in files:
            own.add_argument(f"--{file}", type=Path, required=True)
        own.add_argument("--folder", type=Path, required=True, help="for runs")
        own.add_argument("--precision", default="bf16")
        for option, value in defaults.items():
            own.add_argument(f"--{option}", type=type(value), default=value)
        return own

    table("mnli", "weights", "train", "held-out", steps=400, batch=16, length=48, rate=1e-4)
    table("squad", "weights", "train", "held-out", steps=200, batch=8, length=160, rate=1e-4, articles=16)
    sizes = {"characters": 12_000_000, "reading": 1500}
    after_books = table("books", "books", "train", "held-out", steps=562, batch=16, length=48, rate=3e-4, **sizes)
    after_books.add_argument("--task", choices=("mnli", "qqp"), required=True)
    table("race", "weights", "train", steps=100, batch=4, length=128, rate=5e-5)
    table("chat", "squad", "books", steps=150, batch=16, length=128, rate=1e-3, reading=200, asked=150)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    given = options(arguments)
    given.folder = given.folder.resolve() / given.table
    given.folder.mkdir(parents=True, exist_ok=True)
    measured_on = describe()
    found = TABLES[given.table](given)
    name = f"{given.table} {given.task}" if "task" in given else given.table
    settings = {key: vars(given)[key] for key in ("steps", "batch", "length", "rate", "precision")}
    record(name, {**found._asdict(), "settings": settings, "command": command_line(), "hardware": measured_on})


if __name__ == "__main__":
    main(sys.argv[1:])
