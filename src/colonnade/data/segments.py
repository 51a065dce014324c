"""Tokens on their way to a token file, in segments on disk: what is done stays done when a run is stopped or killed.

    SEGMENT   a JSON line (`SegmentHeader`) · int32 length of each sequence · int32 sequences of each document · tokens

A segment is there as a whole or not at all. Joined in order, segments are the token file.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colonnade.atomic import remove_partial, written
from colonnade.corpus.documents import BEGIN, Place, Rejected
from colonnade.data.writer import TokenFileWriter

ENDING = ".segment"
_IDENTITY = "identity"


@dataclass(frozen=True)
class Encoded:
    """What a worker makes of one chunk."""

    tokens: bytes
    lengths: bytes
    """int32 of each sequence."""
    sequences: bytes
    """int32: sequences of each document."""
    text_bytes: int
    read_bytes: int
    empty: int
    rejected: tuple[Rejected, ...]
    end: Place
    """How far the inputs have been read with this chunk."""
    refused: bool
    """Whether the system did not give the rest of its file."""


@dataclass
class SegmentHeader:
    """What a segment holds."""

    end: Place = BEGIN
    """How far the inputs have been read with it."""
    refused: bool = False
    """Whether there is a file in it of which the system did not give all: it may give more another time."""
    documents: int = 0
    num_sequences: int = 0
    token_bytes: int = 0
    text_bytes: int = 0
    read_bytes: int = 0
    empty: int = 0
    rejected: list[Rejected] = field(default_factory=list)

    def as_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, line: bytes) -> SegmentHeader:
        content: dict[str, Any] = json.loads(line)
        rejected = [Rejected(**each) for each in content["rejected"]]
        return cls(**{**content, "end": Place(*content["end"]), "rejected": rejected})


class Segment:
    """Chunks that have been encoded, in memory."""

    def __init__(self) -> None:
        self.header = SegmentHeader()
        self._tokens: list[bytes] = []
        self._lengths: list[bytes] = []
        self._sequences: list[bytes] = []

    def add(self, done: Encoded) -> None:
        """One chunk more."""
        header = self.header
        header.end = done.end
        header.refused |= done.refused
        header.documents += len(done.sequences) // 4
        header.num_sequences += len(done.lengths) // 4
        header.token_bytes += len(done.tokens)
        header.text_bytes += done.text_bytes
        header.read_bytes += done.read_bytes
        header.empty += done.empty
        header.rejected += done.rejected
        self._tokens.append(done.tokens)
        self._lengths.append(done.lengths)
        self._sequences.append(done.sequences)

    def store(self, path: Path) -> None:
        """Writes it, under a temporary name until it is whole and on disk."""
        with written(path) as stream:
            stream.write(self.header.as_json() + b"\n")
            for part in (*self._lengths, *self._sequences, *self._tokens):
                stream.write(part)

    def append_to(self, writer: TokenFileWriter) -> None:
        """Adds its documents to a token file."""
        _append(writer, b"".join(self._lengths), b"".join(self._sequences), b"".join(self._tokens))


class SegmentFolder:
    """The segments of one token file that is being made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, identity: str) -> list[SegmentHeader]:
        """What has been done of the run `identity`. What another run, or a killed one, has left is removed, and so is
        what begins with a file that the system did not give: it is asked again."""
        self._folder.mkdir(parents=True, exist_ok=True)
        remove_partial(self._folder)
        named = self._folder / _IDENTITY
        if not named.exists() or named.read_text() != identity:
            self.remove()
            self._folder.mkdir(exist_ok=True)
            with written(named) as stream:
                stream.write(identity.encode())
        paths = self.paths()
        done = list(takewhile(lambda header: not header.refused, map(header_of, paths)))
        for path in reversed(paths[len(done) :]):  # whenever it is killed, those before are there
            path.unlink()
        return done

    def paths(self) -> list[Path]:
        """The segments, in order."""
        found = (path for path in self._folder.glob(f"*{ENDING}") if re.fullmatch(r"\d+", path.stem))
        return sorted(found, key=lambda path: int(path.stem))

    def store(self, segment: Segment) -> None:
        """Writes the next segment."""
        segment.store(self._folder / f"{len(self.paths()):06d}{ENDING}")

    def remove(self) -> None:
        """Removes what this class puts into the folder, and the folder, where nothing else is in it."""
        for path in (*self.paths(), self._folder / _IDENTITY):
            path.unlink(missing_ok=True)
        try:
            self._folder.rmdir()
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise


def header_of(path: Path) -> SegmentHeader:
    """What a stored segment holds."""
    with path.open("rb") as stream:
        return SegmentHeader.from_json(stream.readline())


def last_token(path: Path, dtype: np.dtype[Any]) -> int | None:
    """Of the last document in a stored segment; None where there is none."""
    with path.open("rb") as stream:
        if not SegmentHeader.from_json(stream.readline()).token_bytes:
            return None
        stream.seek(-dtype.itemsize, os.SEEK_END)
        return int(np.frombuffer(stream.read(), dtype)[0])


def append(paths: Iterable[Path], writer: TokenFileWriter) -> Iterator[SegmentHeader]:
    """Adds stored segments to a token file, and gives what each of them holds."""
    for path in paths:
        with path.open("rb") as stream:
            header = SegmentHeader.from_json(stream.readline())
            sizes = (header.num_sequences * 4, header.documents * 4, header.token_bytes)
            lengths, sequences, tokens = map(stream.read, sizes)
        _append(writer, lengths, sequences, tokens)
        yield header


def _append(writer: TokenFileWriter, lengths: bytes, sequences: bytes, tokens: bytes) -> None:
    counts: NDArray[Any] = np.frombuffer(sequences, "<i4")
    writer.add_documents(np.frombuffer(tokens, writer.dtype), np.frombuffer(lengths, "<i4"), sequences=counts)
