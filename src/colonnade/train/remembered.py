"""What was measured of this machine, remembered between runs in the user's cache folder.

One small JSON file, in which each measurement has the name of all that it depends on. It can be deleted at any time;
what cannot be read or written is measured again.
"""

import json
from contextlib import suppress
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from colonnade.atomic import write_whole
from colonnade.kernels.choice import Kernel, Use
from colonnade.kernels.timing import Seconds

FILE = "products.json"
MOST = 200
"""Measurements that are kept: the newest."""
_ENTRIES: TypeAdapter[dict[str, dict[Use, dict[Kernel, float]]]] = TypeAdapter(
    dict[str, dict[Use, dict[Kernel, float]]]
)


def recall(folder: Path | None, name: str) -> Seconds | None:
    """What was measured under this name; None where nothing is known."""
    return _entries(folder).get(name)


def remember(folder: Path | None, name: str, seconds: Seconds) -> None:
    """Keep it for later runs, where there is a place for it."""
    if folder is None:
        return
    others = {other: entry for other, entry in _entries(folder).items() if other != name}
    newest = dict([*others.items(), (name, seconds)][-MOST:])
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / FILE, json.dumps(newest, indent=1).encode())


def _entries(folder: Path | None) -> dict[str, Seconds]:
    if folder is None:
        return {}
    try:
        return _ENTRIES.validate_json((folder / FILE).read_bytes())
    except (OSError, ValidationError):
        return {}
