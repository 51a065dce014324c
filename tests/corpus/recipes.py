"""Running recipes in tests, and looking at what they left."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import zstandard

from colonnade.corpus.load import build
from colonnade.corpus.recipe import Recipe


def make_recipe(*inputs: Path | str, folder: Path, **sections: Any) -> Recipe:
    """A recipe with one worker, unless the sections say otherwise."""
    content = {
        "run": {"workers": 1, **sections.pop("run", {})},
        "read": {"paths": [str(path) for path in inputs], **sections.pop("read", {})},
        "write": {"folder": str(folder), **sections.pop("write", {})},
        **sections,
    }
    return build(content)


class Result:
    """A cleaned folder."""

    def __init__(self, folder: Path, said: str) -> None:
        self.folder, self.said = folder, said
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())

    def rows(self, part: str = "train") -> list[dict[str, Any]]:
        """The documents of a part, in order."""
        return [row for path in sorted((self.folder / part).glob("*")) for row in read_rows(path)]

    def texts(self, part: str = "train") -> list[str]:
        """Their texts."""
        return [row["text"] for row in self.rows(part)]

    def ids(self, part: str = "train") -> list[str]:
        """Their ids."""
        return [row["id"] for row in self.rows(part)]

    def dropped(self, step: str) -> list[dict[str, Any]]:
        """What a step has listed as dropped."""
        files = sorted((self.folder / "dropped" / step).glob("*.jsonl.gz"))
        return [json.loads(line) for path in files for line in gzip.open(path, "rt")]

    def reasons(self, step: str) -> dict[str, int]:
        """How many documents a step has dropped, by reason."""
        return {reason: amount["documents"] for reason, amount in self.manifest["steps"][step]["dropped"].items()}

    def files(self) -> dict[str, bytes]:
        """All that a user looks at: the result, what was dropped, the manifest."""
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file() and path.relative_to(self.folder).parts[0] != "state"
        }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl, compressed or not."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    elif path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
    return [json.loads(line) for line in data.splitlines()]


def words(count: int, seed: int, *, vocabulary: int = 5_000) -> list[str]:
    """Random words: two texts of them share no shingle."""
    draw = random.Random(seed)
    return [f"w{draw.randrange(vocabulary)}x{seed}" for _ in range(count)]
