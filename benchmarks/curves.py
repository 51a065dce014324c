"""Loss curves of runs, drawn from their metrics.jsonl: `python -m benchmarks.curves OUT.svg NAME=RUN NAME=RUN …`

Needs matplotlib (`pip install matplotlib`), which the program itself does not. `--key` names the number to draw; lines
are means over `--window` steps, dots are the run's evaluations (`validation_KEY`), where it has any.

`--beside NAME` also draws how far each step of the others is from that run's, and prints a table of that; `--numbers
FILE` keeps what is drawn as JSON. Of runs that differ in rounding alone, the curves lie on one another:

    python -m benchmarks.curves OUT.svg native=run-native widened=run-blas compiled=run-compiled --beside widened
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

Lines = list[dict[str, Any]]
"""The metrics of a run, one for each step."""


def read(run: Path) -> Lines:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Means over the last `window` values."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def differences(lines: Lines, others: Lines, key: str) -> list[float]:
    """At each step."""
    if [line["step"] for line in lines] != [line["step"] for line in others]:
        raise SystemExit("runs that were not logged at the same steps cannot be compared step by step")
    return [line[key] - other[key] for line, other in zip(lines, others, strict=True)]


def table(runs: Mapping[str, Lines], key: str, beside: str) -> list[str]:
    """How far each run is from one of them, and how far that one is from itself a step later."""
    held_out = f"validation_{key}"
    words = f"{key} differs a step", "at most", "at step", f"{held_out.replace('_', ' ')} at the end"
    found = [f"| | {' | '.join(words)} |", "|---|---|---|---|---|"]
    for name, lines in runs.items():
        last = f"{lines[-1][held_out]:.4f}" if held_out in lines[-1] else "–"
        apart = [abs(each) for each in differences(lines, runs[beside], key)]
        most = max(apart)
        cells = f"{statistics.mean(apart):.4f} | {most:.4f} | {lines[apart.index(most)]['step']}"
        found.append(f"| {name} | {'– | – | –' if name == beside else cells} | {last} |")
    steps = [abs(a[key] - b[key]) for a, b in pairwise(runs[beside])]
    return [*found, "", f"A step of {beside} differs from the next by {statistics.mean(steps):.3f}."]


def numbers(runs: Mapping[str, Lines], key: str) -> dict[str, dict[str, list[float]]]:
    """What is drawn of each run: every step's number, and those of its evaluations."""
    keys = key, f"validation_{key}"
    return {
        name: {each: [line[each] for line in lines if each in line] for each in keys} for name, lines in runs.items()
    }


def draw(output: Path, runs: Mapping[str, Lines], *, key: str, window: int, title: str, beside: str = "") -> None:
    """Write the curves of several runs to an SVG file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6 if beside else 4), layout="constrained")
    heights = [3, 2] if beside else [3]
    axes = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    axes[0].set(ylabel=key.replace("_", " "), title=title)
    for number, (name, lines) in enumerate(runs.items()):
        steps, color = [line["step"] for line in lines], f"C{number}"
        axes[0].plot(steps, smoothed([line[key] for line in lines], window), color, label=name)
        held_out = [(line["step"], line[f"validation_{key}"]) for line in lines if f"validation_{key}" in line]
        if held_out:
            axes[0].plot(*zip(*held_out, strict=True), f"{color}o", markersize=4)
        if beside and name != beside:
            apart = differences(lines, runs[beside], key)
            axes[1].plot(steps, apart, color, linewidth=1, label=f"{name}: at most {max(map(abs, apart)):.4f}")
    if beside:
        axes[1].set(ylabel=f"{key.replace('_', ' ')} − that of {beside}")
    axes[-1].set(xlabel="step")
    for each in axes:
        each.grid(alpha=0.3)
        each.legend()
    with rc_context({"svg.hashsalt": "curves", "svg.fonttype": "none"}):
        figure.savefig(output, format="svg", metadata={"Date": None})


def main() -> None:
    """Draw what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN")
    parser.add_argument("--key", default="loss")
    parser.add_argument("--window", type=int, default=20, help="steps that are averaged")
    parser.add_argument("--title", default="")
    parser.add_argument("--beside", default="", metavar="NAME")
    parser.add_argument("--numbers", type=Path, metavar="FILE")
    given = parser.parse_args()
    named = (run.rpartition("=") for run in given.runs)
    runs = {name: read(Path(path)) for name, _, path in named}
    if given.beside and given.beside not in runs:
        parser.error(f"--beside {given.beside} is none of the runs: {', '.join(runs)}")
    draw(given.output, runs, key=given.key, window=given.window, title=given.title, beside=given.beside)
    if given.beside:
        print("\n".join(table(runs, given.key, given.beside)))
    if given.numbers:
        given.numbers.write_text(json.dumps(numbers(runs, given.key), indent=1) + "\n")


if __name__ == "__main__":
    main()
