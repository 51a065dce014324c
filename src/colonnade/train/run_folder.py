"""The folder of a run: who it belongs to, and where things lie in it.

config.toml      metrics.jsonl      events.jsonl      checkpoints/step_00000100/      lock

Only checkpoints need torch to be read, so `check` takes none before there is one to name.
"""

from pathlib import Path

from colonnade.atomic import write_new
from colonnade.config.compare import difference
from colonnade.config.describe import all_keys
from colonnade.config.load import load, to_toml
from colonnade.config.schema import Config
from colonnade.errors import ConfigError, DiskError, of_the_disk

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


def check(config: Config) -> None:
    """ConfigError if another run lives in the run's folder, or one that must not be gone on with. Writes nothing.

    A folder in which nothing was trained belongs to nobody: a model that did not fit is no hindrance for a smaller one.
    """
    folder = Path(config.run.folder)
    if (folder / STOP_FILE).exists():
        raise ConfigError(
            f"{folder / STOP_FILE} exists: whoever made it wants this run to stop. Remove the file to train on."
        )
    written = folder / "config.toml"
    if written.exists() and was_trained(folder):
        _check_same_run(written, config)
    if not config.checkpoint.resume:
        _check_may_begin(config)


def was_trained(folder: Path) -> bool:
    """Whether a run has made a step there: it has reported one, or saved one, or has lost what it saved."""
    metrics = folder / "metrics.jsonl"
    return (metrics.exists() and metrics.stat().st_size > 0) or any(checkpoints(folder).glob("step_*"))


def occupy(config: Config) -> None:
    """Make the run's folder and write its config.toml, or raise ConfigError if another run lives there.

    A run may go on with other steps, layout, reporting and the like; the folder then tells of the newest configuration.
    """
    folder = Path(config.run.folder)
    try:
        check(config)
        checkpoints(folder).mkdir(parents=True, exist_ok=True)
        write_new(folder / "config.toml", to_toml(config).encode())
    except OSError as error:
        raise unwritable(config, error) from error


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


def _check_same_run(written: Path, config: Config) -> None:
    lines = difference(_before(written), config, only_what_forbids_resume=True)
    saved = _saved(written.parent)
    if lines and saved and (past := configuration_of(saved[-1])) is not None:
        lines = difference(past, config, only_what_forbids_resume=True)  # what was asked for since has computed nothing
    if lines:
        changing = [key for key in (line.partition(":")[0] for line in lines) if all_keys()[key].while_running]
        later = (
            f" {', '.join(changing)} may change while the run goes on: change them back, and ask for it by "
            f"`colonnade change {config.run.folder} KEY=VALUE`."
        )
        raise ConfigError(
            f"run.folder = {config.run.folder!r} belongs to a run with another configuration:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nThese change what is computed, so the run cannot go on with them. "
            "Set another run.folder, or change them back." + later * bool(changing)
        )


def _check_may_begin(config: Config) -> None:
    saved = _saved(Path(config.run.folder))
    if saved:
        raise ConfigError(
            f"run.folder = {config.run.folder!r} already has {saved[-1].name}, and checkpoint.resume = false. "
            "Set checkpoint.resume = true to go on from it, or choose another run.folder."
        )


def _before(written: Path) -> Config:
    """The configuration that the run in this folder was last started with."""
    try:
        return load(written, [])
    except DiskError:
        raise
    except ConfigError as error:
        saved = _saved(written.parent)
        fix = f"Copy {saved[-1] / written.name} over it" if saved else "Remove it, for there is no checkpoint beside it"
        raise ConfigError(
            f"run.folder = {str(written.parent)!r}: the config.toml of the run there cannot be read, so that it is "
            f"unknown whether this is the same run. {fix}, or set another run.folder.\n{error}"
        ) from error


def _saved(folder: Path) -> list[Path]:
    """A run's checkpoints, oldest first."""
    from colonnade.checkpoint.names import checkpoints_in

    return list(checkpoints_in(checkpoints(folder)).values())
