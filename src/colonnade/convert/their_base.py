"""The base of adapters in a folder of PEFT: whether what they are merged with is what they were trained with.

Where the folder was written here, a file beside PEFT's own has the digests of its base, and another base is refused.
Elsewhere there is only a name, and another name is told.
"""

import json
import os
import re
from pathlib import Path

from pydantic import ValidationError

from colonnade.checkpoint.names import MANIFEST, NAME
from colonnade.checkpoint.schema import clip, first_fault
from colonnade.data.sidecar import hash_file
from colonnade.errors import CheckpointError
from colonnade.huggingface.files import read_json
from colonnade.huggingface.folder import CONFIG as MODEL_CONFIG
from colonnade.huggingface.peft import CONFIG, NAMED
from colonnade.train.base import BaseMetadata

FILE = "colonnade_base.json"
"""{"path": …, "files": {"config.json": SHA-256, …}}. peft reads only the files that it knows by name."""
_IN_CACHE = re.compile(r"models--([^/]+)/snapshots/[^/]+$")
"""A model's folder in the hub's own cache, as "org--model": its last part is a revision."""


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


def check_their_base(folder: Path, wanted: BaseMetadata, base: Path) -> str | None:
    """CheckpointError if the base has files of weights by the names of `wanted`, which is kept in `folder`, with other
    digests: reads all of these. What else is to be told of the base comes back.
    """
    there = {name: hash_file(base / name) for name in sorted(os.listdir(base)) if name in wanted.files}
    other = [name for name in there if there[name] != wanted.files[name]]
    weights = [name for name in other if name != MODEL_CONFIG]
    if weights:
        raise CheckpointError(
            f"{base} has other weights than the base of the adapters in {folder}: {', '.join(map(clip, weights))} "
            f"{'has' if len(weights) == 1 else 'have'} another SHA-256 than in {FILE}. They were trained beside "
            f"{clip(repr(wanted.path))}: name where that lies now with --base. If they were trained again since then, "
            f"beside {base}, remove {folder / FILE}."
        )
    if there.keys() <= {MODEL_CONFIG}:
        return f"{base} has none of the files of weights that {FILE} names: whether it is their base is not known."
    if other:
        return f"{MODEL_CONFIG} of {base} is not what it was when the adapters were exported; the weights are."
    return None


def named_otherwise(folder: Path, base: Path) -> str | None:
    """What is to be told where adapter_config.json names another base; for where no digests were kept."""
    named = read_json(folder / CONFIG).get(NAMED)
    if not isinstance(named, str) or not named or _is_same(named, base):
        return None
    said = f"{CONFIG} says that the adapters were trained with {clip(repr(named))}, "
    if NAME.fullmatch(_parts(named)[-1]):
        return said + f"a checkpoint of Colonnade, and whether {base} is what was exported of it cannot be told."
    return said + (
        f"and they are merged with {base}. If these are two models, what comes of it means nothing: name the right one "
        "with --base."
    )


def _is_same(named: str, base: Path) -> bool:
    """Whether a name, of a folder or on the hub, can be that of a folder here."""
    if os.path.isdir(named):  # of a name that no file can have, Path.is_dir raises
        is_one = os.path.samefile(named, base)
        if is_one or os.path.isabs(named):  # beside another folder to begin from, "gpt2" was that of the hub
            return is_one
    parts = _parts(named)
    names = {_plain(part) for part in (parts[-1:], parts[-2:])}
    return any(_plain(_parts(str(path))[-1:]) in names for path in (base.absolute(), base.resolve()))


def _parts(name: str) -> list[str]:
    """Of a path of any system, or a name on the hub; of a folder in the hub's cache, the model's own."""
    name = name.rstrip("/\\")
    found = _IN_CACHE.search(name.replace("\\", "/"))
    if found:
        return found[1].split("--", 1)
    return [part for part in re.split(r"[/\\]+", name) if part not in ("", ".")] or [name]


def _plain(parts: list[str]) -> str:
    """Letters and digits alone: "org/model" is often kept as "org--model" or "org_model"."""
    return "".join(character for character in "".join(parts).casefold() if character.isalnum())
