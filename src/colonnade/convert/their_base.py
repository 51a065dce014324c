"""The base of adapters in a folder of PEFT: whether what they are merged with is what they were trained with.

Where the folder was written here, a file beside PEFT's own has the digests of its base, and another base is refused.
Elsewhere there is only a name, and another name is told.
"""

import json
import os
import re
from pathlib import Path

from pydantic import ValidationError

from colonnade.checkpoint.names import MANIFEST
from colonnade.checkpoint.schema import clip, first_fault
from colonnade.errors import CheckpointError
from colonnade.huggingface.files import read_json
from colonnade.huggingface.peft import CONFIG, NAMED
from colonnade.train.base import BaseMetadata, check_base, content_of

FILE = "colonnade_base.json"
"""{"path": …, "files": {"config.json": SHA-256, …}}. peft reads only the files that it knows by name."""
_IN_CACHE = re.compile(r"models--.+?--(.+)/snapshots/[^/]+$")
"""A model's folder in the hub's own cache: its last part is a revision."""


def write_base(folder: Path, base: BaseMetadata | None) -> None:
    """Keep the digests of a published base. Those of a checkpoint are not: no folder that is made of it has them."""
    if base is not None and MANIFEST not in base.files:
        content = base.model_dump(include={"path", "files"})
        (folder / FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def base_written(folder: Path) -> BaseMetadata | None:
    """What `write_base` kept. CheckpointError for a file that does not say it."""
    if not (folder / FILE).exists():
        return None
    try:
        return BaseMetadata.model_validate({**read_json(folder / FILE), "weights": ()})
    except ValidationError as error:
        raise CheckpointError(
            f"{folder / FILE} is damaged: {first_fault(error)}. Convert the adapters again, or remove it: then nothing "
            "is known of their base but its name."
        ) from None


def check_their_base(folder: Path, base: Path) -> None:
    """CheckpointError if digests were kept in `folder`, and the base has others. Reads all of the base then."""
    wanted = base_written(folder)
    if wanted is not None:
        check_base(folder, wanted, base, content_of(base))


def named_otherwise(folder: Path, base: Path) -> str | None:
    """What is to be told where adapter_config.json names another base, and no digests were kept."""
    named = read_json(folder / CONFIG).get(NAMED)
    if not isinstance(named, str) or not named or (folder / FILE).exists() or _is_same(named, base):
        return None
    return (
        f"{CONFIG} says that the adapters were trained with {clip(repr(named))}, and they are merged with {base}. If "
        "these are two models, what comes of it means nothing: name the right one with --base."
    )


def _is_same(named: str, base: Path) -> bool:
    """Whether a name, of a folder or on the hub, can be that of a folder here."""
    if os.path.isdir(named):  # of a name that no file can have, Path.is_dir raises
        return os.path.samefile(named, base)
    parts = [part for part in re.split(r"[/\\]+", named) if part not in ("", ".")]
    names = {_plain(part) for part in (parts[-1:], parts[-2:])}
    return any(_plain([_own_name(path)]) in names for path in (base.absolute(), base.resolve()))


def _own_name(path: Path) -> str:
    found = _IN_CACHE.search(path.as_posix())
    return found[1] if found else path.name


def _plain(parts: list[str]) -> str:
    """Letters and digits alone: "org/model" is often kept as "org--model" or "org_model"."""
    return "".join(character for character in "".join(parts).casefold() if character.isalnum())
