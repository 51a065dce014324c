"""`colonnade change`: other values for keys of a run, while it goes on."""

import time
from pathlib import Path
from typing import Annotated

import typer

from colonnade.errors import ConfigError


def change(
    run: Annotated[Path, typer.Argument(help="The folder of a run.", show_default=False)],
    keys: Annotated[
        list[str] | None,
        typer.Argument(help="Keys and their new values.", metavar="SECTION.KEY=VALUE", show_default=False),
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(help="The last step without them; unset: that at which the run sees it.", min=0),
    ] = None,
    by: Annotated[str, typer.Option(help="Who changes it: kept with the run.", show_default=False)] = "",
    reason: Annotated[str, typer.Option(help="Why: kept with the run.", show_default=False)] = "",
    listed: Annotated[bool, typer.Option("--list", help="What was asked for, and what came of it.")] = False,
) -> None:
    """Give keys of a run other values while it goes on.

    Learning rate, batch, data mixture, intervals. All keys of one command change
    behind the same step, together or not at all. The run may be at work, or stand
    still: then they change when it goes on.
    """
    from colonnade.train import change_requests
    from colonnade.train.run_folder import CHANGES

    if listed == bool(keys) or (listed and (at is not None or by or reason)):
        raise ConfigError("Give keys to change, like optim.learning_rate=1e-4, or --list alone.")
    if not run.is_dir():
        raise ConfigError(f"{run} is not the folder of a run. Name one.")
    if listed:
        print("\n".join(change_requests.listed(run)))
        return
    request = {"change": change_requests.values_of(keys or []), **({} if at is None else {"at": at})}
    request |= {name: text for name, text in (("by", by), ("reason", reason)) if text}
    change_requests.ask(run, {**request, "time": round(time.time(), 3)})
    when = "behind the next step that it ends" if at is None else f"behind step {at:,}"
    print(f"Asked for in {run / CHANGES}: the run changes {when}.")
