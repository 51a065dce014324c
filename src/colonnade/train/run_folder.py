"""The folder of a run: who it belongs to, and where things lie in it.

config.toml      metrics.jsonl      events.jsonl      checkpoints/step_00000100/
"""

import os
from pathlib import Path

from colonnade.checkpoint.manifest import checkpoints_in
from colonnade.config.compare import difference
from colonnade.config.load import load, to_toml
from colonnade.config.schema import Config
from colonnade.errors import ConfigError


def checkpoints(folder: Path) -> Path:
    """Where a run's checkpoints lie."""
    return folder / "checkpoints"


def occupy(config: Config) -> None:
    """Make the run's folder and write its config.toml, or raise ConfigError if another run lives there.

    A run may go on with other steps, layout, reporting and the like; the folder then tells of the newest configuration.
    """
    folder = Path(config.run.folder)
    written = folder / "config.toml"
    try:
        if written.exists():
            _check_same_run(written, config)
        _check_may_resume(config)
        checkpoints(folder).mkdir(parents=True, exist_ok=True)
        write_whole(written, to_toml(config).encode())
    except OSError as error:
        raise ConfigError(
            f"run.folder = {config.run.folder!r} cannot be written: {error.strerror} ({error.filename}). Choose "
            "another, or mend that."
        ) from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or, if anything goes wrong, as it was before."""
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _check_same_run(written: Path, config: Config) -> None:
    lines = difference(_before(written), config, only_what_forbids_resume=True)
    if lines:
        raise ConfigError(
            f"run.folder = {config.run.folder!r} belongs to a run with another configuration:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nThese change what is computed, so the run cannot go on with them. "
            "Set another run.folder, or change them back."
        )


def _check_may_resume(config: Config) -> None:
    saved = list(checkpoints_in(checkpoints(Path(config.run.folder))).values())
    if saved and not config.checkpoint.resume:
        raise ConfigError(
            f"run.folder = {config.run.folder!r} already has {saved[-1].name}, and checkpoint.resume = false. "
            "Set checkpoint.resume = true to go on from it, or choose another run.folder."
        )


def _before(written: Path) -> Config:
    """The configuration that the run in this folder was last started with."""
    try:
        return load(written, [])
    except ConfigError as error:
        saved = list(checkpoints_in(checkpoints(written.parent)).values())
        mend = (
            f"Copy {saved[-1] / written.name} over it" if saved else "Remove it, for there is no checkpoint beside it"
        )
        raise ConfigError(
            f"run.folder = {str(written.parent)!r}: the config.toml of the run there cannot be read, so that it is "
            f"unknown whether this is the same run. {mend}, or set another run.folder.\n{error}"
        ) from error
