"""The last stages of a cleaning run, if its recipe has them: token files of each part.

    tokens    each task's documents of each part ──▶ a segment           one per task of the run
    join      the segments of up to JOINED tasks ──▶ PART.bin, .idx      one per JOINED tasks
    list      what was made ──▶ tokens.json                              one task

Beyond JOINED tasks (256 GB of text, at the default run.piece_bytes) a part has several token files, PART-00000 and on:
the index of one is held in memory while it is written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from colonnade.atomic import write_whole
from colonnade.corpus.documents import Chunk, chunks
from colonnade.corpus.recipe import Recipe
from colonnade.corpus.stages import CleaningStage
from colonnade.corpus.step import Setting
from colonnade.data.indexed import smallest_dtype
from colonnade.data.segments import ENDING, Encoded, Segment, append, last_token
from colonnade.data.sidecar import Sidecar
from colonnade.data.tokenize import encoder_for, end_of_document
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.writer import TokenFileWriter
from colonnade.errors import DataError

JOINED = 1_024


class Tokens(PipelineStep):
    """A step of making token files."""

    type = "colonnade"

    def __init__(
        self, name: str, tokenizer: str, parts: Sequence[str], setting: Setting, *, sha256: str, end: int | None
    ) -> None:
        """`end`: what stands behind each document."""
        self.name, self.tokenizer, self.parts, self.setting = name, tokenizer, tuple(parts), setting
        self.sha256, self.end = sha256, end
        super().__init__()


class MakeTokens(Tokens):
    """Turns a task's documents of each part into tokens."""

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Gives nothing."""
        encode = encoder_of(self.tokenizer, self.sha256, self.end)
        for part in self.parts:
            if files := _written_files(self.setting.folder, part, rank):
                segment = Segment()
                for chunk in chunks(files):
                    segment.add(encode(chunk))
                check_whole(segment)
                segment.store(segment_path(self.setting.folder, part, rank))
        yield from ()


@lru_cache(maxsize=1)
def encoder_of(tokenizer: str, sha256: str, end: int | None) -> Callable[[Chunk], Encoded]:
    """What makes tokens by the tokenizer at a path. The tasks of a process share it, as in `cleaning.token_counter`."""
    return encoder_for(unchanged(tokenizer, sha256), key="text", end=end)()


def unchanged(path: str, sha256: str) -> Tokenizer:
    """The tokenizer at `path`. Raises DataError where it is another than when the run was started."""
    tokenizer = Tokenizer.load(path)
    if tokenizer.sha256 != sha256:
        raise DataError(
            f"{path} has changed since the run was started: its tokens would be mixed with others. Put the one with "
            f"sha256 {sha256[:12]}… back, or clean into a new write.folder."
        )
    return tokenizer


def end_begun(tokenizer: Tokenizer, folder: Path, parts: Sequence[str]) -> int:
    """What stands behind each document: as in the segments that there are, by a version that may have taken another
    token of the vocabulary for it.
    """
    dtype = smallest_dtype(tokenizer.vocab_size)
    made = (path for part in parts for path in segment_path(folder, part, 0).parent.glob(f"*{ENDING}"))
    found = (token for path in made if (token := last_token(path, dtype)) is not None)
    begun = next(found, None)
    return end_of_document(tokenizer) if begun is None else begun


def check_whole(segment: Segment) -> None:
    """Raises DataError where something of what the run itself has written cannot be read again."""
    for rejected in segment.header.rejected:
        raise DataError(
            f"{rejected}. It was whole when it was written: manifest.json has its SHA-256. Restore it and start the "
            "same command again, or clean into a new write.folder."
        )


class JoinTokens(Tokens):
    """Joins the segments of some tasks to token files."""

    def __init__(self, *arguments: Any, num_tasks: int, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.num_tasks = num_tasks

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Gives nothing."""
        tokenizer = unchanged(self.tokenizer, self.sha256)
        tasks = range(rank * JOINED, min((rank + 1) * JOINED, self.num_tasks))
        made = {}
        for part in self.parts:
            name = part if world_size == 1 else f"{part}-{rank:05d}"
            if made_file := self._join(tokenizer, part, tasks, self.setting.folder / "tokens" / name):
                made[name] = made_file
        write_whole(_made_path(self.setting.folder, rank), json.dumps(made).encode())
        yield from ()

    def _join(self, tokenizer: Tokenizer, part: str, tasks: range, prefix: Path) -> dict[str, Any]:
        folder = self.setting.folder
        paths = [path for task in tasks if (path := segment_path(folder, part, task)).exists()]
        if not paths:
            return {}
        dtype = smallest_dtype(tokenizer.vocab_size)
        self._check_ends(paths, dtype)
        with TokenFileWriter(prefix, dtype) as writer:
            text_bytes = sum(header.text_bytes for header in append(paths, writer))
            if not writer.num_tokens:
                writer.discard()
                return {}
            sidecar = Sidecar(
                tokenizer_sha256=tokenizer.sha256,
                vocab_size=tokenizer.vocab_size,
                end_of_document=self.end,
                documents=writer.num_documents,
                tokens=writer.num_tokens,
                text_bytes=text_bytes,
                sources=tuple(str(file) for task in tasks for file in _written_files(folder, part, task)),
                sentences=False,
            )
            writer.close(sidecar)
        return {"documents": writer.num_documents, "tokens": writer.num_tokens, "dtype": str(dtype)}

    def _check_ends(self, paths: Sequence[Path], dtype: np.dtype[Any]) -> None:
        for path in paths if self.end is not None else ():
            if (found := last_token(path, dtype)) not in (None, self.end):
                state = self.setting.folder / "state"
                raise DataError(
                    f"{path} ends documents with token {found}, and others with {self.end}: another version has made "
                    f"it. Remove {state / 'tokens'}, and what is named tokens or join in {state / 'logs'} and in "
                    f"{state / 'done'}, and start the same command again: all of it is made anew."
                )


class ListTokens(PipelineStep):
    """Says what was made, and removes the segments. One that was killed while it removed them goes on with that."""

    type, name = "colonnade", "list"

    def __init__(self, num_files: int, setting: Setting) -> None:
        self.num_files, self.setting = num_files, setting
        super().__init__()

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Gives nothing."""
        listed = self.setting.folder / "tokens" / "tokens.json"
        if not listed.exists():
            made: dict[str, Any] = {}
            for each in range(self.num_files):
                made |= json.loads(_made_path(self.setting.folder, each).read_bytes())
            write_whole(listed, (json.dumps(dict(sorted(made.items())), indent=1) + "\n").encode())
        shutil.rmtree(self.setting.folder / "state" / "tokens", ignore_errors=True)
        yield from ()


def token_stages(recipe: Recipe, num_tasks: int, setting: Setting) -> list[CleaningStage]:
    """The stages that make token files, if the recipe has them."""
    tokenizer = recipe.tokenize and (recipe.tokenize.tokenizer or recipe.run.tokenizer)
    if not recipe.tokenize or not tokenizer:
        return []
    parts, num_files, loaded = list(recipe.parts), num_joins(num_tasks), Tokenizer.load(tokenizer)
    end = end_begun(loaded, setting.folder, parts) if recipe.tokenize.append_end else None
    making = MakeTokens("tokens", tokenizer, parts, setting, sha256=loaded.sha256, end=end)
    joining = JoinTokens("join", tokenizer, parts, setting, sha256=loaded.sha256, end=end, num_tasks=num_tasks)
    return [
        CleaningStage("tokens", [making], num_tasks),
        CleaningStage("join", [joining], num_files),
        CleaningStage("list", [ListTokens(num_files, setting)], 1),
    ]


def num_joins(num_tasks: int) -> int:
    """How many token files a part has."""
    return -(-num_tasks // JOINED)


def segment_path(folder: Path, part: str, task: int) -> Path:
    """Where the tokens of a task's documents of a part are kept until they are joined."""
    return folder / "state" / "tokens" / part / f"{task:05d}{ENDING}"


def _made_path(folder: Path, rank: int) -> Path:
    return folder / "state" / "tokens" / f"{rank:05d}.json"


def _written_files(folder: Path, part: str, task: int) -> list[Path]:
    """The file that a task has written of a part, if it has."""
    names = (f"{task:05d}.jsonl{compression}" for compression in ("", ".gz", ".zst"))
    return [path for name in names if (path := folder / part / name).exists()]
