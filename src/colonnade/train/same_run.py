"""Who a run's folder belongs to: the run that goes on in it, and no other.

Only checkpoints need torch to be read, so `check` takes none before there is one to name.
"""

from pathlib import Path

from colonnade.atomic import write_new
from colonnade.checkpoint.names import checkpoints_in
from colonnade.config.compare import difference
from colonnade.config.describe import all_keys
from colonnade.config.load import load, to_toml
from colonnade.config.schema import Config
from colonnade.errors import ConfigError, DiskError
from colonnade.train.run_folder import (
    DECIDED,
    STOP_FILE,
    checkpoints,
    configuration_of,
    unwritable,
    was_trained,
)


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


def _check_same_run(written: Path, config: Config) -> None:
    folder, lines = written.parent, _differing(_before(written), config, written.parent)
    saved = _saved(folder)
    if lines and saved and (past := configuration_of(saved[-1])) is not None:
        lines = _differing(past, config, folder)  # what was asked for since has computed nothing
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


def _differing(before: Config, config: Config, folder: Path) -> list[str]:
    """What makes another run of it, beside a configuration that may have what was changed in mid-run: as a checkpoint
    has it, and so config.toml where it was copied from one.
    """
    if (folder / DECIDED).exists():
        from colonnade.train.change import as_it_began
        from colonnade.train.change_requests import read_decided

        before = as_it_began(before, read_decided(folder).changes)
    return difference(before, config, only_what_forbids_resume=True)


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
    return list(checkpoints_in(checkpoints(folder)).values())
