"""The folder of a run: who it belongs to, and where things lie in it.

config.toml      metrics.jsonl      events.jsonl      checkpoints/step_00000100/
"""

from pathlib import Path

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
    if written.exists():
        _check_same_run(written, config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial = written.with_suffix(".partial")
        partial.write_text(to_toml(config))
        partial.replace(written)
    except OSError as error:
        raise ConfigError(
            f"run.folder = {config.run.folder!r} cannot be written: {error.strerror}. Choose another."
        ) from error


def _check_same_run(written: Path, config: Config) -> None:
    lines = difference(load(written, []), config, only_what_forbids_resume=True)
    if lines:
        raise ConfigError(
            f"run.folder = {config.run.folder!r} belongs to a run with another configuration:\n"
            + "\n".join(f"  {line}" for line in lines)
            + "\nThese change what is computed, so the run cannot go on with them. "
            "Set another run.folder, or change them back."
        )
