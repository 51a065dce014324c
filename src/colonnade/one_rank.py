"""One rank of a run that trains: what is imported here, local ranks have from the process that they are forked from."""

from collections.abc import Callable

from colonnade.config.schema import Config
from colonnade.launch.process import hear_no_more
from colonnade.planner.banner import banner
from colonnade.planner.comparison import Watcher
from colonnade.planner.memory_limit import within_memory
from colonnade.train import loop


def train(settings: Config, *, dry_run: bool, profile: range, again: Callable[[], Config] | None) -> None:
    """Train as one rank of the layout, or as the only one: `loop.main` with what the planner says before and behind.
    The process ends with it.
    """
    watcher = Watcher(banner, within_memory, active=not dry_run)
    loop.main(settings, watcher.banner, watcher.within, dry_run=dry_run, profile=profile, again=again)
    hear_no_more()  # the interpreter, as it ends, would hear signals by itself again
