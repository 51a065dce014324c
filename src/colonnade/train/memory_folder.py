"""Where a run keeps copies of its state in memory: a folder of /dev/shm, as long as what starts its ranks again lives.

    supervisor    `colonnade train`: makes it and removes it; a guard does if it is killed
    agent         torchrun: the ranks make it, and start a guard that removes it when the agent has ended

No torch is imported here: the supervisor has none.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from colonnade.config.restarts import RestartsConfig
from colonnade.config.schema import Config
from colonnade.launch import agent, launch
from colonnade.mesh.process import mine

MEMORY = Path("/dev/shm")  # a file system whose files are memory (Linux)


@contextmanager
def folder_for(config: Config) -> Iterator[Path | None]:
    """A folder for the copies of one run, removed in the end; None where it wants none, or none can be."""
    if not config.checkpoint.memory_every:
        yield None
        return
    try:
        agent.sweep(MEMORY)
        prefix = f"{agent.name_of(mine())}-"
        made = tempfile.TemporaryDirectory(prefix=prefix, dir=MEMORY, ignore_cleanup_errors=True)
    except OSError as error:
        print(f"No copies of the state are kept in memory: {MEMORY} refuses ({error.strerror}).", file=sys.stderr)
        yield None
        return
    guard = None
    with suppress(OSError):  # no process can be started: what is left then, the next run removes
        guard = agent.guard(mine(), Path(made.name))
    try:
        with made as folder:
            yield Path(folder)
    finally:
        if guard is not None:
            guard.kill()
            guard.wait()


def folder_of_rank(restarts: RestartsConfig) -> tuple[Path | None, str]:
    """The folder of this rank's machine; or none, and why: nothing where that has been said."""
    made = launch.memory_folder()
    if made is not None or (launch.has_supervisor() and restarts.limit):  # it has said why it made none
        return made, ""
    behind = agent.agent()
    if behind is None:
        return None, (
            "they last as long as what starts ranks again, the supervisor of `colonnade train` (with restarts.limit "
            "above 0, and with one rank restarts.one_rank = true) or torchrun, and this run has neither"
        )
    try:
        if launch.local_rank() == 0:
            agent.sweep(MEMORY)
        folder = agent.folder_of(behind, MEMORY)
        if launch.local_rank() == 0:
            agent.guard(behind, folder)
    except OSError as error:
        return None, f"{MEMORY} refuses ({error.strerror})"
    return folder, ""
