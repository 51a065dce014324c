"""Where a supervised run keeps copies of its state in memory: a folder of /dev/shm, as long as its supervisor lives.

Made and removed by the process that was started by hand, which imports no torch; by its guard if it is killed.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from colonnade.config.schema import Config

MEMORY = Path("/dev/shm")  # a file system whose files are memory (Linux)


@contextmanager
def folder_for(config: Config) -> Iterator[Path | None]:
    """A folder for the copies of one run, removed in the end; None where it wants none, or none can be."""
    if not config.checkpoint.memory_every:
        yield None
        return
    try:
        made = tempfile.TemporaryDirectory(prefix="colonnade-memory-", dir=MEMORY, ignore_cleanup_errors=True)
    except OSError as error:
        print(f"No copies of the state are kept in memory: {MEMORY} refuses ({error.strerror}).", file=sys.stderr)
        yield None
        return
    with made as folder:
        yield Path(folder)
