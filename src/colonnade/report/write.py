"""`colonnade report`: the page of the folders that were named, written once or as long as a run goes on."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from colonnade.atomic import write_whole
from colonnade.config.numbers import size_of_text
from colonnade.errors import ConfigError
from colonnade.outputs import PAGES, check_output
from colonnade.report.page import page, state_of, sweep_page
from colonnade.report.record import Record, RunReader, names_of
from colonnade.report.sweep import as_csv, is_sweep, read_sweep_folder
from colonnade.train.sweep import SUMMARY, SUMMARY_TABLE

MOST_RUNS = 16
DEFAULT = "report.html"


def write_report(folders: Sequence[Path], output: Path | None, *, live: int = 0, task: str | None = None) -> None:
    """Write the page, and say where it is. `live`: write it again every so many seconds while a run is under way.
    `task`: of a sweep, that it was scored on.
    """
    sweeps = [folder for folder in folders if is_sweep(folder)]
    if sweeps and len(folders) == 1:
        if live:
            raise ConfigError(f"--live is of runs, and {sweeps[0]} is the folder of a sweep. Leave it out.")
        _write_sweep(sweeps[0], output, task)
        return
    if sweeps or task is not None:
        what = f"{sweeps[0]} is the folder of a sweep" if sweeps else "--task is for the folder of a sweep"
        raise ConfigError(f"{what}: give one such folder alone. A sweep's runs are the folders in it.")
    if len(folders) > MOST_RUNS:
        raise ConfigError(
            f"{len(folders)} runs are more than a page can show beside each other. Name {MOST_RUNS} at most."
        )
    path = output or (folders[0] / DEFAULT if len(folders) == 1 else Path(DEFAULT))
    check_output(path, PAGES)
    otherwise = f", or the folder of a sweep, with its {SUMMARY}" if len(folders) == 1 else ""
    readers = [(name, RunReader(folder, otherwise)) for folder, name in zip(folders, names_of(folders), strict=True)]
    runs = _written(readers, path, live)
    for run in runs:
        for note in run.notes:
            print(f"{run.name}: {note}", flush=True)
    print(f"{path}: {size_of_text(path.stat().st_size)}.", flush=True)
    while live and any(state_of(run) == "running" for run in runs):
        time.sleep(live)
        runs = _written(readers, path, live)


def _write_sweep(folder: Path, output: Path | None, task: str | None) -> None:
    """A page and, beside it, a table of the settings."""
    found, path = read_sweep_folder(folder, task), output or folder / DEFAULT
    table = path.with_suffix(".csv")
    check_output(path, PAGES, files=(path, table), inputs=[folder / SUMMARY_TABLE])
    write_whole(path, sweep_page(found).encode())
    write_whole(table, as_csv(found).encode())
    for note in found.notes:
        print(f"{found.name}: {note}", flush=True)
    if found.task is None:
        print("The task is not known as one of the paper's; --task NAME puts its figures beside it.", flush=True)
    print(f"{path}: {size_of_text(path.stat().st_size)}; {table}.", flush=True)


def _written(readers: Sequence[tuple[str, RunReader]], path: Path, live: int) -> list[Record]:
    """The runs as they are now, by their names. The page of runs that have ended is not read again by a browser."""
    runs = [replace(reader.read(), called=name) for name, reader in readers]
    under_way = any(state_of(run) == "running" for run in runs)
    write_whole(path, page(runs, refresh=live if under_way else 0).encode())
    return runs
