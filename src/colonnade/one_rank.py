"""One rank of a run that trains: what is imported here, local ranks have from the process that they are forked from."""

import atexit
from collections.abc import Callable

from colonnade.config.schema import Config
from colonnade.launch.process import hear_no_more
from colonnade.planner.banner import banner
from colonnade.planner.comparison import Watcher
from colonnade.planner.memory_limit import within_memory
from colonnade.train import loop


def train(settings: Config, *, dry_run: bool, profile: range, again: Callable[[], Config] | None) -> None:
    """Train as one rank of the layout, or as the only one: `loop.main` with what the planner says before and behind.
    The process ends with it, and hears no signal any more while the interpreter ends, unless this has failed.
    """
    watcher = Watcher(banner, within_memory, active=not dry_run)
    atexit.register(hear_no_more)  # a little later signals would end the process; called behind what trackers register
    try:
        loop.main(settings, watcher.banner, watcher.within, dry_run=dry_run, profile=profile, again=again)
    except (Exception, KeyboardInterrupt):
        atexit.unregister(hear_no_more)
        raise
