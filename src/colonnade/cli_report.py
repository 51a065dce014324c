"""`colonnade report` and `colonnade watch`: a run, or several, to look at."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs, beside each other; or one of a sweep.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="The file to write. Unset: report.html, in the folder where it is one.", show_default=False),
    ] = None,
    live: Annotated[
        int,
        typer.Option(
            help="Write it again every so many seconds while a run is under way; 0: once.", min=0, max=1_000_000
        ),
    ] = 0,
    task: Annotated[
        str | None,
        typer.Option(help="Of a sweep: the task whose published figures stand beside it, where it is not known."),
    ] = None,
) -> None:
    """Draw runs: one HTML file that needs nothing else.

    Loss, speed, thermometers, memory, a profiled step, events and configuration. Of a sweep: median and spread of each
    setting, beside the paper's figures, and the same as a .csv.
    """
    from colonnade.report.write import write_report

    write_report(runs, output, live=live, task=task)


def watch(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)],
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.2)] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show it as it is now, and end.")] = False,
) -> None:
    """Show a run in the terminal while it goes on."""
    from colonnade.report.watch import watch as watching

    watching(run, every=every, once=once)
