"""Loss curves of runs, drawn from their metrics.jsonl: `python -m benchmarks.curves OUT.svg NAME=RUN NAME=RUN …`

Needs matplotlib (`pip install matplotlib`), which the program itself does not. `--key` names the number to draw; lines
are means over `--window` steps, dots are the run's evaluations (`validation_KEY`), where it has any.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run, a line for each step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Means over the last `window` values."""
    return [sum(values[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def draw(output: Path, runs: dict[str, Path], *, key: str, window: int, title: str) -> None:
    """Write the curves of several runs to an SVG file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel=key.replace("_", " "), title=title)
    for number, (name, run) in enumerate(runs.items()):
        lines, color = read(run), f"C{number}"
        axes.plot([line["step"] for line in lines], smoothed([line[key] for line in lines], window), color, label=name)
        held_out = [(line["step"], line[f"validation_{key}"]) for line in lines if f"validation_{key}" in line]
        if held_out:
            axes.plot(*zip(*held_out, strict=True), f"{color}o", markersize=4)
    axes.grid(alpha=0.3)
    axes.legend()
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
    given = parser.parse_args()
    named = (run.rpartition("=") for run in given.runs)
    runs = {name: Path(path) for name, _, path in named}
    draw(given.output, runs, key=given.key, window=given.window, title=given.title)


if __name__ == "__main__":
    main()
