"""`colonnade report`: the page of the folders that were named, written once or as long as a run goes on."""

import time
from collections.abc import Sequence
from pathlib import Path

from colonnade.atomic import write_whole
from colonnade.config.numbers import size_of_text
from colonnade.errors import ConfigError
from colonnade.report.page import page, state_of
from colonnade.report.record import Record, read_run

MOST_RUNS = 16
DEFAULT = "report.html"


def write_report(folders: Sequence[Path], output: Path | None, *, live: int = 0) -> None:
    """Write the page, and say where it is. `live`: write it again every so many seconds while a run is under way."""
    if len(folders) > MOST_RUNS:
        raise ConfigError(
            f"{len(folders)} runs are more than a page can show beside each other. Name {MOST_RUNS} at most."
        )
    path = output or (folders[0] / DEFAULT if len(folders) == 1 else Path(DEFAULT))
    if path.is_dir():
        raise ConfigError(f"--output {path} is a folder. Name a file, like {path / DEFAULT}.")
    runs = _written(folders, path, live)
    for run in runs:
        for note in run.notes:
            print(f"{run.name}: {note}", flush=True)
    print(f"{path}: {size_of_text(path.stat().st_size)}.", flush=True)
    while live and any(state_of(run) == "running" for run in runs):
        time.sleep(live)
        runs = _written(folders, path, live)


def _written(folders: Sequence[Path], path: Path, live: int) -> list[Record]:
    """The runs as they are now. The page of runs that have ended is not read again by a browser."""
    runs = [read_run(folder) for folder in folders]
    under_way = any(state_of(run) == "running" for run in runs)
    write_whole(path, page(runs, refresh=live if under_way else 0).encode())
    return runs
