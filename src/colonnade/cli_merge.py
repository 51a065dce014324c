"""`colonnade merge`, and the options that it shares with other commands."""

from pathlib import Path
from typing import Annotated

import typer

BaseFolder = Annotated[
    Path | None, typer.Option("--base", help="Of adapters: where their base lies now.", show_default=False)
]
Best = Annotated[
    bool, typer.Option("--best", help="Of a run, the checkpoint with the lowest validation loss, not the newest.")
]


def merge(
    source: Annotated[
        Path, typer.Argument(help="A checkpoint with adapters, or a run's folder (its newest).", show_default=False)
    ],
    target: Annotated[Path, typer.Argument(help="A new folder: an ordinary checkpoint.", show_default=False)],
    base: BaseFolder = None,
    best: Best = False,
) -> None:
    """Add adapters to their base: an ordinary checkpoint of both."""
    from colonnade.convert import merge as merging

    merging.merge(source, target, base=base, best=best)
