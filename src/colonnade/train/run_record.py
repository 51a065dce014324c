"""The record of a run: the files of its folder that a run needs, besides a checkpoint, to go on as the same one.

    pack      into one file, as they are now: some are being written to
    unpack    into a folder on another machine

What is left out can be made again (what a teacher says), is of a machine (lock, heartbeat), or belongs to other
programs, which have it elsewhere (TensorBoard's files).
"""

import shutil
from pathlib import Path
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

from colonnade.atomic import written
from colonnade.errors import ZIP_FAULTS, DamagedError
from colonnade.train.run_folder import CHANGES, DECIDED, ROLLBACKS

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
    has been written. A stranger's names are passed over.
    """
    try:
        with ZipFile(record) as archive:
            bad = archive.testzip()
            if bad is not None:
                raise BadZipFile(f"{bad} is not what was written")
            names = [name for name in FILES if name in archive.namelist()]
    except ZIP_FAULTS as error:
        raise DamagedError(f"{record} is damaged: {error}.") from None
    with ZipFile(record) as archive:
        for name in names:
            with archive.open(name) as packed, written(run / name) as target:
                shutil.copyfileobj(packed, target, BLOCK)
    return names
