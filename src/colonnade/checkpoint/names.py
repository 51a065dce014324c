"""What checkpoints are called, and which a folder has. Imports no torch: whoever starts ranks looks here too."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

NAME = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,17})")
Count = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
"""A step, a size or a number of things, as files say it."""
MANIFEST = "manifest.json"
"""Of a checkpoint's files the one that says what it consists of."""


def folder_name(step: int) -> str:
    """`step_00000100`."""
    return f"step_{step:08d}"


def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Step → checkpoint, in order of steps. Temporary names are not among them."""
    try:
        paths = list(folder.iterdir())  # raises where it cannot look, and `glob` finds nothing there
    except FileNotFoundError:
        return {}
    found = {int(m[1]): path for path in paths if (m := NAME.fullmatch(path.name)) and path.is_dir()}
    return dict(sorted(found.items()))


def newest_in(folder: Path) -> Path | None:
    """The newest checkpoint of a folder by its name, whatever is in it; None where there is none."""
    found = checkpoints_in(folder)
    return found[max(found)] if found else None


def newest_step(folder: Path) -> int:
    """Of the checkpoints in a folder; 0 for none."""
    return max(checkpoints_in(folder), default=0)
