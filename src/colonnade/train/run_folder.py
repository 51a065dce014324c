"""The folder of a run: where things lie in it.

config.toml      metrics.jsonl      events.jsonl      checkpoints/step_00000100/      lock
"""

from pathlib import Path

from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.errors import ConfigError, of_the_disk

ROLLBACKS = "rollbacks.json"
"""The rollbacks of a run: see `rollbacks.py`."""
CHANGES = "changes.jsonl"
"""What was asked to be changed in mid-run: see `change_requests.py`."""
DECIDED = "changes_decided.json"
"""What was changed in mid-run: see `change_requests.py`."""
TEACHER, ABOUT = "teacher", "about.json"
"""The folder of what a teacher has said, if no other is named, and the file in it that says which: see `taught.py`."""
COPIES = "memory_copies.json"
"""Which copies in memory are the run's: see `memory_copies.py`."""
STOP_FILE = "stop"
"""A run in whose folder it is stops, and does not start."""
LEAVE_FILE = "leave"
"""A run in whose folder it is removes it, saves, and stops, to be started again."""


def checkpoints(folder: Path) -> Path:
    """Where a run's checkpoints lie."""
    return folder / "checkpoints"


def was_asked_to_change(folder: Path) -> bool:
    """Whether another configuration than the run began with may be in force in it, or come to be."""
    return (folder / CHANGES).exists() or (folder / DECIDED).exists()


def was_trained(folder: Path) -> bool:
    """Whether a run has made a step there: it has reported one, or saved one, or has lost what it saved."""
    metrics = folder / "metrics.jsonl"
    return (metrics.exists() and metrics.stat().st_size > 0) or any(checkpoints(folder).glob("step_*"))


def configuration_of(checkpoint: Path) -> Config | None:
    """With which a checkpoint was written; None where that cannot be read."""
    try:
        return load(checkpoint / "config.toml", [])
    except ConfigError:
        return None


def unwritable(config: Config, error: OSError) -> ConfigError:
    """What the disk says of the run's folder, with what to do."""
    return of_the_disk(
        f"run.folder = {config.run.folder!r} cannot be written: {error.strerror} ({error.filename}). Choose another, "
        "or fix that.",
        error,
    )
