"""What commands write: files, held against the disk before work begins, and JSON that every reader takes."""

import json
import math
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from colonnade.atomic import try_to_write, write_whole
from colonnade.config.numbers import one_of
from colonnade.errors import ConfigError

PAGES = (".html", ".htm")
"""Endings of pages."""

_BEGINNING = 4096
"""[bytes] Of a file, in which it says what wrote it."""


def output_problems(
    output: str | Path | None,
    suffixes: Sequence[str] = (),
    *,
    files: Collection[Path] = (),
    inputs: Iterable[Path] = (),
    option: str = "--output",
    makes_folder: bool = True,
    written_by: str = "",
) -> Iterator[str]:
    """What is wrong with what an option names to be written, the first of it.

    `suffixes`: one of which its name must have; empty: any. `files`: all that is written; empty: the output itself.
    `inputs`: what the command reads, which may not be written over. `makes_folder`: a folder that is missing is made.
    `written_by`: a command, which replaces only what it wrote before and says so at its beginning; empty: any file.
    """
    if output is None:
        return
    if suffixes and Path(output).suffix not in suffixes and not Path(output).is_dir():
        yield f"{option} {output}: what is written is {one_of(suffixes)}. Use a name that ends so."
        return
    read = [path for path in inputs if path.exists()]
    for place in files or [Path(output)]:
        problem = _problem(place, read, makes_folder=makes_folder, written_by=written_by)
        if problem is not None:
            yield f"{option} {output}: {problem}"
            return


def check_output(
    output: str | Path | None,
    suffixes: Sequence[str] = (),
    *,
    files: Collection[Path] = (),
    inputs: Iterable[Path] = (),
    option: str = "--output",
    written_by: str = "",
) -> None:
    """ConfigError with what `output_problems` finds."""
    for problem in output_problems(output, suffixes, files=files, inputs=inputs, option=option, written_by=written_by):
        raise ConfigError(problem)


def write_output(path: Path, content: bytes) -> None:
    """Write a file as a whole, where a link leads and with the rights that it has; into a device or pipe as it is."""
    if _is_device(path):
        path.write_bytes(content)
        return
    place = path.resolve()
    rights = place.stat().st_mode if place.exists() else None
    write_whole(place, content)
    if rights is not None:
        place.chmod(rights)


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _problem(place: Path, read: Sequence[Path], *, makes_folder: bool, written_by: str) -> str | None:
    """Why a file cannot be written there; None: it can."""
    if place.is_dir():
        return f"{place} is a folder. Name a file."
    if _is_device(place):
        return None
    if place.exists() and any(path.samefile(place) for path in read):
        return f"{place} is among what this command is given, and would be replaced. Name another."
    if place.exists() and not _is_by(place, written_by):
        return f"{place} is not of `colonnade {written_by}`, and would be replaced. Name another, or remove it."
    folder = place.absolute().parent
    if not makes_folder and not folder.is_dir():
        return f"there is no folder {folder}. Make it, or name another."
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is no folder. Name another."
    try:
        try_to_write(folder / place.name)
    except OSError as error:
        return f"{folder} cannot be written to: {error.strerror}. Name another."
    return None


def _is_by(place: Path, command: str) -> bool:
    """Whether the command wrote a file, by one of its first two lines; an empty one is anybody's."""
    if not command:
        return True
    with place.open("rb") as file:
        beginning = file.read(_BEGINNING)
    says = re.compile(rf"# (Written|Measured) by `colonnade {command}`".encode())
    return not beginning or any(map(says.match, beginning.split(b"\n")[:2]))


def json_of(content: Any, *, ensure_ascii: bool = True, indent: int | None = None) -> str:
    """The text of an object for others, in one line or indented. JSON has no NaN and no infinite numbers: null."""
    return json.dumps(_finite(content), ensure_ascii=ensure_ascii, indent=indent, allow_nan=False)


def json_to_print(content: Any) -> str:
    """The same in one line for standard output: letters that its encoding has as they are, all others as JSON has them
    escaped; what Python writes in their place is none.
    """
    line = json_of(content, ensure_ascii=False)
    try:
        line.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return json_of(content)
    return line


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
