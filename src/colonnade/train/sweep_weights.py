"""From which weights the points of a sweep begin: where train.init_from names a run, from one checkpoint of it.

A run that is named may go on beside a sweep, or between two starts of it: then its newest checkpoint is another one.
"""

from contextlib import suppress
from pathlib import Path

from colonnade.checkpoint.names import checkpoints_in
from colonnade.config.load import TomlTable
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.train.lines import objects_in
from colonnade.train.newest import INITIALIZED, checkpoint_at
from colonnade.train.run_folder import checkpoints


def named_weights(content: TomlTable) -> str | None:
    """What train.init_from is in a configuration, if it is a text."""
    train = content.get("train")
    named = train.get("init_from") if isinstance(train, dict) else None
    return named if isinstance(named, str) else None


def with_checkpoint(content: TomlTable) -> TomlTable:
    """A configuration with the checkpoint in the place of the run whose newest it is now."""
    named, found = named_weights(content), None
    with suppress(ColonnadeError, OSError):  # a damaged one: told by the run that begins from it
        found = None if named is None else checkpoint_at(Path(named))
    return content if found is None else _beginning_from(content, str(found))


def check_there(content: TomlTable, run: Path) -> None:
    """ConfigError where a run that begins would find its weights gone from where they lay."""
    named = named_weights(content)
    if named is None or Path(named).exists() or not Path(named).parent.is_dir() or checkpoints_in(checkpoints(run)):
        return
    raise ConfigError(
        f"train.init_from = {named!r} is gone: point {run.name} cannot begin from the weights of the others. Put it "
        "back, and the same command goes on; or set another run.folder, and train.init_from to a checkpoint that "
        "stays: a copy, or one that checkpoint.keep_every spares."
    )


def as_begun(content: TomlTable, run: Path) -> TomlTable:
    """A configuration with the weights that its run began from, as its events tell."""
    began = [event.get("source") for event in objects_in(run / "events.jsonl") if event.get("event") == INITIALIZED]
    source = next((each for each in reversed(began) if isinstance(each, str)), None)
    named = named_weights(content)
    if named is None or source is None or Path(source) == Path(named):  # however the name is written
        return with_checkpoint(content)
    return _beginning_from(content, source)


def _beginning_from(content: TomlTable, weights: str) -> TomlTable:
    return {**content, "train": {**content["train"], "init_from": weights}}
