"""That all machines see one folder of their run: each rank writes its part of a checkpoint there, and reads all of it.

    rank 0, or its supervisor, has the folder's lock, which says by whom it is held ──▶ each rank reads the same there

It is read again for as long as a network file system may show what it has seen of a folder before.
"""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from colonnade.config.schema import Config
from colonnade.errors import ConfigError
from colonnade.lock import NAME, holder_of
from colonnade.mesh.agreement import gather_texts
from colonnade.mesh.layout import ranks_in_words
from colonnade.mesh.mesh import Axis

OLDEST = 90.0
"""[seconds] NFS shows a folder as it was 60 seconds ago, at most, unless it is mounted otherwise."""
TICK = 1.0  # seconds between two looks


def check(config: Config, world: Axis) -> None:
    """ConfigError, on all ranks, unless all see the folder that rank 0 sees; every rank calls this."""
    folder, began = Path(config.run.folder), time.monotonic()
    if world.rank == 0:
        _put_on_disk(folder / NAME)
    while True:
        mine = (holder_of(folder), socket.gethostname(), time.monotonic() - began)
        seen = [json.loads(text) for text in gather_texts(json.dumps(mine), world)]
        holder, host, waited = seen[0]
        others = {rank: each[1] for rank, each in enumerate(seen) if each[0] != holder}
        if not others:
            return
        if waited > OLDEST:
            raise ConfigError(
                f"run.folder = {config.run.folder!r} is not one folder: {ranks_in_words([*others])} (on "
                f"{', '.join(dict.fromkeys(others.values()))}) cannot see there what rank 0 (on {host}) has written, "
                "and each rank saves its part of a checkpoint there. Name a folder on a file system that all machines "
                "share, by its whole path."
            )
        time.sleep(TICK)


def _put_on_disk(file: Path) -> None:
    with suppress(OSError):  # nobody has the run, or the file system has no such call
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
