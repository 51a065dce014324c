"""What fine-tuning reaches on rows that were kept apart, over seeds: a table a command, from files that are named.

    python -m benchmarks.finetuned mnli --weights MODEL --train train.json --held-out dev.json --folder runs/finetuned

MODEL is a folder of Hugging Face with a BERT and its tokenizer. Everything is run by `colonnade` as a user would; the
seeds, of weights that are drawn, order and dropout, are a sweep. Rows kept apart are scored before the first step and
after the last, and choose nothing. Each command writes its table to the page of the day in `results/`, beside those
that are there.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks.hardware import command_line, describe, machine_name

RESULTS = Path(__file__).parent / "results"
SEEDS = (1, 2, 3)
PARTS = ("train", "held-out")
CONFIG = """
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
evaluate_samples = 100_000
log_every = 20
threads = 1
device = "cpu"
[optim]
learning_rate = {rate}
min_learning_rate = 0.0
warmup_steps = {warmup}
decay = "linear"
weight_decay = 0.01
beta2 = 0.999
[checkpoint]
every = 0
[run]
folder = "{folder}/{name}"
[sweep]
train.seed = [{seeds}]
score = "{score}"
"""


class Run(NamedTuple):
    """One seed: scores of the rows kept apart, by name, before the first step and after the last."""

    seed: int
    before: dict[str, float]
    after: dict[str, float]
    seconds: float


class Table(NamedTuple):
    """What a command found."""

    title: str
    what: str
    """Rows, lengths and rates, in sentences."""
    shown: tuple[str, ...]
    """The scores that the table has, by name."""
    unit: dict[str, float]
    """What a score is multiplied by to be shown: 100 of shares."""
    runs: dict[str, list[Run]]
    """By what they began from."""


def colonnade(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "colonnade", *map(str, arguments)], check=True)


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
            colonnade("data", "examples", format_name, rows, "--output", folder / name, "--tokenizer", tokenizer)


def sweep(name: str, given: argparse.Namespace, **values: str) -> list[Run]:
    """All seeds of one beginning."""
    keys = {**vars(given), "data": "", "seeds": ", ".join(map(str, SEEDS)), "warmup": given.steps // 10, "name": name}
    file = given.folder / f"{name}.toml"
    file.write_text(CONFIG.format(**(keys | values)))
    colonnade("finetune", file)
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
    head = f'head = "classification"\nnum_labels = 3\nseq_length = {given.length}'
    values = {"model": f"{shape_of(given.weights)}\n{head}", "tokenizer": str(tokenizer), "score": "accuracy"}
    begun = f'init_from = "{given.weights}"\ninit_from_resize = true'
    runs = {"MiniLM": sweep("weights", given, **values, init=begun)}
    runs["drawn weights"] = sweep("drawn", given, **values, init="")
    what = (
        f"{trained:,} rows of MNLI to train on; {kept:,} kept apart, from which {left} were left out that share a text "
        "with those. Three labels, alike frequent: 33 % is chance."
    )
    return Table("MNLI, from published weights", what, ("loss", "accuracy"), {"accuracy": 100.0}, runs)


TABLES: dict[str, Callable[[argparse.Namespace], Table]] = {"mnli": mnli}


def options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.finetuned", description=__doc__.split("\n\n")[0])
    tables = parser.add_subparsers(dest="table", required=True)

    def table(name: str, *files: str, **defaults: float) -> None:
        own = tables.add_parser(name)
        for file in files:
            own.add_argument(f"--{file}", type=Path, required=True)
        own.add_argument("--folder", type=Path, required=True, help="for runs")
        own.add_argument("--precision", default="bf16")
        for option, value in defaults.items():
            own.add_argument(f"--{option}", type=type(value), default=value)

    table("mnli", "weights", "train", "held-out", steps=400, batch=16, length=48, rate=1e-4)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    given = options(arguments)
    given.folder = given.folder.resolve() / given.table
    given.folder.mkdir(parents=True, exist_ok=True)
    measured_on = describe()
    found = TABLES[given.table](given)
    settings = {key: vars(given)[key] for key in ("steps", "batch", "length", "rate", "precision")}
    record(given.table, {**found._asdict(), "settings": settings, "command": command_line(), "hardware": measured_on})


def record(name: str, found: Mapping[str, Any]) -> None:
    """Put a table beside those of the day, and write the page anew."""
    today = datetime.now(UTC).date().isoformat()
    file = RESULTS / f"finetuned-{today}-{machine_name()}.json"
    there = json.loads(file.read_text()) if file.exists() else {}
    runs = {begun: [run._asdict() for run in group] for begun, group in found["runs"].items()}
    there[name] = {**found, "runs": runs}
    tables = {each: there[each] for each in TABLES if each in there}
    file.write_text(json.dumps(tables, indent=1) + "\n")
    file.with_suffix(".md").write_text(page(today, tables))
    print(page(today, tables))


def page(today: str, tables: Mapping[str, Mapping[str, Any]]) -> str:
    """In Markdown."""
    hardware = next(iter(tables.values()))["hardware"]
    lines = [
        f"# Fine-tuning over seeds, {today}, {hardware['cpu']}, {hardware['cores']} cores",
        "",
        "One rank of one thread on a machine that did other work besides: seconds are of whole runs, evaluations "
        "included, and no measure of speed. Scores are of rows kept apart, before the first step and after the last; "
        "they choose nothing, and settings were not tuned. A gain is **beyond the spread** where the lowest seed of "
        "the one is above the highest of the other.",
    ]
    return "\n".join([*lines, *(line for table in tables.values() for line in section(table)), ""])


def section(table: Mapping[str, Any]) -> Iterable[str]:
    """A heading, what was done, and a line for each seed; then medians, and what is gained."""
    settings, hardware = table["settings"], table["hardware"]
    yield from ("", f"## {table['title']}", "")
    yield (
        f"{table['what']} {settings['steps']} steps of {settings['batch']} samples of {settings['length']} tokens, "
        f"AdamW at {settings['rate']:g} with linear warm-up and decay, dropout 0.1, {settings['precision']}. Commit "
        f"{hardware['commit']}; torch {hardware['torch']}; `{table['command']}`."
    )
    shown = table["shown"]
    heads = [f"{name} {when}" for name in shown for when in ("before", "after")]
    yield from ("", f"| begins from | seed | {' | '.join(heads)} | seconds |", "|---" * (len(heads) + 3) + "|")
    for begun, runs in table["runs"].items():
        for run in runs:
            yield f"| {begun} | {run['seed']} | {' | '.join(cells(table, run))} | {run['seconds']:.0f} |"
    yield ""
    for name in shown:
        yield from gains(table, name)


def cells(table: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    return [written(table, name, run[when][name]) for name in table["shown"] for when in ("before", "after")]


def written(table: Mapping[str, Any], name: str, score: float) -> str:
    """A share or a percentage as percent, a loss as it is."""
    if name == "loss":
        return f"{score:.4f}"
    return f"{score * table['unit'].get(name, 1.0):.1f} %"


def gains(table: Mapping[str, Any], name: str) -> Iterable[str]:
    """A line for each beginning: median, lowest and highest after the last step, and each beside what it is held to:
    the second beginning where there are two, else the same runs before their first step.
    """
    groups = {begun: [run["after"][name] for run in runs] for begun, runs in table["runs"].items()}
    if len(groups) == 1:
        ((_, runs),) = table["runs"].items()
        groups |= {"before the first step": [run["before"][name] for run in runs]}
    told = [
        f"{begun} {written(table, name, median(scores))} ({written(table, name, min(scores))} to "
        f"{written(table, name, max(scores))})"
        for begun, scores in groups.items()
    ]
    yield f"- {name}, median and spread: {'; '.join(told)}. {verdict(name, *groups.values())}"


def verdict(name: str, ours: Sequence[float], held_to: Sequence[float]) -> str:
    """Whether every seed of the one is better than every seed of the other."""
    sign = -1 if name == "loss" else 1
    best = max(sign * score for score in held_to)
    if min(sign * score for score in ours) > best:
        return "The gain is beyond the spread."
    return "**The gain is within the spread.**"


if __name__ == "__main__":
    main(sys.argv[1:])
