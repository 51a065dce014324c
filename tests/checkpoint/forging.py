"""Checkpoints as somebody with bad intentions would make them: changed, with hashes that are right again."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colonnade.checkpoint.names import MANIFEST


def content_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    return content


def write(path: Path, content: dict[str, Any]) -> None:
    """Make this the manifest, with a hash that is right."""
    content = {key: value for key, value in content.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (path / MANIFEST).write_text(json.dumps(content | {"sha256": digest}))


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = content_of(path)
    change(content)
    write(path, content)


def list_again(path: Path, name: str) -> None:
    """Put a file that has been changed among the files with the size and the hash that it has now."""
    data = (path / name).read_bytes()
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    forge(path, lambda content: content["files"].update({name: entry}))
