"""The record of a run: the files of its folder that a run needs, besides a checkpoint, to go on as the same one.

    pack      into one file, as they are now: some are being written to
    unpack    into a folder on another machine

What is left out can be made again (what a teacher says, but not whose word it is), is of a machine (lock, heartbeat),
or belongs to other programs, which have it elsewhere (TensorBoard's files).
"""

import shutil
from contextlib import suppress
from pathlib import Path
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

from colonnade.atomic import written
from colonnade.errors import ZIP_FAULTS, ConfigError, DamagedError
from colonnade.train.change_requests import lines_in, lines_of, read_decided
from colonnade.train.run_folder import ABOUT, CHANGES, DECIDED, ROLLBACKS, TEACHER

_ABOUT = f"{TEACHER}/{ABOUT}"
FILES = (
    "config.toml",
    "metrics.jsonl",
    "events.jsonl",
    "thermometers.jsonl",
    "undone.jsonl",
    ROLLBACKS,
    CHANGES,
    DECIDED,
    "prediction.json",
    "comparison.json",
    "reference.npz",
    _ABOUT,
    "tracking/wandb",
    "tracking/mlflow",
)
LEVEL = 3  # of compression: higher ones take longer and save little of lines of numbers
BLOCK = 1 << 20


def pack(run: Path, target: Path) -> None:
    """Write the record of the run in a folder into one file."""
    with ZipFile(target, "w", ZIP_DEFLATED, compresslevel=LEVEL) as archive:
        for name in FILES:
            if (run / name).is_file():
                with (run / name).open("rb") as source, archive.open(name, "w", force_zip64=True) as packed:
                    shutil.copyfileobj(source, packed, BLOCK)


def unpack(record: Path, run: Path) -> list[str]:
    """Write a record's files, each whole, into a folder; their names. DamagedError where one cannot be read, when none
    has been written. A stranger's names are passed over. Changes that were asked for in the folder alone, and not
    refused there, come behind the record's, and whose answers it has from a teacher it knows better.
    """
    try:
        with ZipFile(record) as archive:
            bad = archive.testzip()
            if bad is not None:
                raise BadZipFile(f"{bad} is not what was written")
            kept = {_ABOUT} if (run / _ABOUT).exists() else set[str]()
            names = [name for name in FILES if name in archive.namelist() and name not in kept]
    except ZIP_FAULTS as error:
        raise DamagedError(f"{record} is damaged: {error}.") from None
    refused = _refused_here(run)
    with ZipFile(record) as archive:
        for name in names:
            with archive.open(name) as packed, written(run / name) as target:
                shutil.copyfileobj(packed, target, BLOCK)
                if name == CHANGES:
                    target.write(_asked_here(run, archive.read(name), refused))
    return names


def _refused_here(run: Path) -> frozenset[str]:
    """What the lines are known by that the run in a folder has refused; none where that cannot be read."""
    with suppress(ConfigError):
        return frozenset(each.line for each in read_decided(run).refused)
    return frozenset()


def _asked_here(run: Path, asked: bytes, refused: frozenset[str]) -> bytes:
    """The lines of a folder's changes.jsonl that were not `refused` there, and are not among those `asked` for, behind
    which they come.
    """
    known = refused.union(each.known_as for each in lines_in(asked))
    here = [each.text.encode() + b"\n" for each in lines_of(run) if each.known_as not in known]
    return b"".join([b"\n" * bool(here and not asked.endswith(b"\n")), *here])
