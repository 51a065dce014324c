"""Last stage, if the recipe has it: a token file of each part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from colonnade.data.atomic import written
from colonnade.data.clean.step import Setting
from colonnade.data.tokenize import tokenize_files
from colonnade.data.tokenizer import Tokenizer


class MakeTokens(PipelineStep):
    """Turns every part into tokens/PART.bin and .idx."""

    type, name = "colonnade", "tokens"

    def __init__(self, tokenizer: str, setting: Setting, *, append_end: bool, workers: int) -> None:
        self.tokenizer, self.setting = tokenizer, setting
        self.append_end, self.workers = append_end, workers
        super().__init__()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Gives nothing."""
        folder, tokenizer = self.setting.folder, Tokenizer.load(self.tokenizer)
        facts = {}
        for part, files in sorted(_files_of_parts(folder).items()):
            made = tokenize_files(
                files,
                folder / "tokens" / part,
                tokenizer,
                workers=self.workers,
                append_end=self.append_end,
                overwrite=True,
                progress=False,
            )
            facts[part] = {"documents": made.documents, "tokens": made.tokens, "dtype": made.dtype}
        with written(folder / "tokens" / "tokens.json") as stream:
            stream.write((json.dumps(facts, indent=1) + "\n").encode())
        yield from ()


def _files_of_parts(folder: Path) -> dict[str, list[Path]]:
    """The written files, by part, in order."""
    outputs = json.loads((folder / "manifest.json").read_bytes())["outputs"]
    found: dict[str, list[Path]] = {}
    for entry in outputs:
        found.setdefault(entry["part"], []).append(folder / entry["path"])
    return found
