"""Training speed as bars, drawn from results: `python -m benchmarks.speed_picture OUT.svg RESULTS.json`

Needs matplotlib (`pip install matplotlib`), which the program itself does not. A row has a bar for each contestant, and
a line where all its cores would be if they did nothing but products at the best rate that was measured beside it.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.speed_table import OURS, limit_of, rows

HEIGHT = 0.8
"""Of the bars of a row together."""


def draw(output: Path, report: Mapping[str, Any]) -> None:
    """Write the bars of one results file to an SVG file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    table = rows(report["runs"])
    names = ordered(table)
    figure = Figure(figsize=(8, 0.9 + 0.75 * len(table)), layout="constrained")
    axes = figure.add_subplot(xlabel="tokens/s", title=title(report))
    for number, name in enumerate(names):
        places, speeds = bars(table, name, number, len(names))
        axes.barh(places, speeds, HEIGHT / len(names), label=name)
    for place, row in enumerate(table):
        if most := limit_of(row, report.get("limits")):
            axes.plot([most, most], [place - HEIGHT / 2, place + HEIGHT / 2], color="black", linewidth=1)
    axes.set_yticks(range(len(table)), list(table))
    axes.invert_yaxis()
    figure.legend(loc="outside lower center", ncols=len(names))
    with rc_context({"svg.hashsalt": "colonnade"}):  # equal names of parts in every drawing
        figure.savefig(output, metadata={"Date": None})


def ordered(table: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Every contestant once, ours first."""
    found = {name: None for row in table.values() for name in row}
    return sorted(found, key=lambda name: name != OURS)


def bars(
    table: Mapping[str, Mapping[str, Any]], name: str, number: int, count: int
) -> tuple[Sequence[float], Sequence[float]]:
    """(where, how long) the bars of one contestant are: one in each row that it has run."""
    middle = (number + 0.5) / count - 0.5
    found = [(place, row[name]) for place, row in enumerate(table.values()) if name in row]
    return [place + middle * HEIGHT for place, _ in found], [line["tokens_per_second"] for _, line in found]


def title(report: Mapping[str, Any]) -> str:
    """On what, and at which commit."""
    machine = report["hardware"]
    return f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, commit {machine['commit']}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the results of train_speed.")
    parser.add_argument("output", type=Path)
    parser.add_argument("results", type=Path, help="the .json file")
    line = parser.parse_args()
    draw(line.output, json.loads(line.results.read_text()))


if __name__ == "__main__":
    main()
