"""Documents to a token file, on all cores: `.bin`, `.idx` and a sidecar, the same bytes for any number of workers.

    files ── chunks (this process) ──▶ parse and encode (workers) ──▶ in order ──▶ TokenFileWriter (this process)

Workers return the bytes of arrays, so that no list of integers is ever pickled.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from colonnade.data.documents import Chunk, Rejected, chunks, expand, parse, read_documents
from colonnade.data.indexed import bin_path, idx_path, smallest_dtype
from colonnade.data.parallel import ordered_map
from colonnade.data.sentences import split_sentences
from colonnade.data.sidecar import Sidecar, sidecar_path
from colonnade.data.tokenizer import Tokenizer, train_bpe
from colonnade.data.word_cache import DocumentEncoder
from colonnade.data.writer import TokenFileWriter
from colonnade.errors import DataError

_EXAMPLES = 10
_BYTES_A_WORKER = 4 << 20  # less work than this is done before another process has started


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


@dataclass(frozen=True)
class TokenizeReport:
    """What was made, and what was left out."""

    prefix: str
    documents: int
    tokens: int
    dtype: str
    text_bytes: int
    empty: int
    """Documents without text, left out."""
    rejected: int
    """Lines that were no documents, left out."""
    examples: tuple[Rejected, ...]
    """The first of them."""
    seconds: float

    def summary(self) -> str:
        """Some lines for people."""
        lines = [
            f"{self.documents:,} documents, {self.text_bytes / 1e6:,.1f} MB of text -> {self.tokens:,} tokens "
            f"({self.dtype}, {self.text_bytes / self.tokens:.2f} bytes each) in {self.prefix}.bin and .idx; "
            f"{self.seconds:.1f} s, {self.documents / self.seconds:,.0f} documents/s, "
            f"{self.text_bytes / 1e6 / self.seconds:.1f} MB/s"
        ]
        if self.empty:
            lines.append(f"{self.empty:,} documents had no text and were left out")
        if self.rejected:
            where = rejected_path(self.prefix)
            lines.append(f"{self.rejected:,} lines were no documents and were left out; all are listed in {where}:")
            lines += [f"  {example}" for example in self.examples]
        return "\n".join(lines)


def rejected_path(prefix: str | Path) -> Path:
    """Where the rejected lines of a prefix are listed, one JSON object a line: file, line, reason."""
    return Path(f"{prefix}.rejected.jsonl")


def tokenize_files(
    inputs: Iterable[str | Path],
    output_prefix: str | Path,
    tokenizer: Tokenizer,
    *,
    key: str = "text",
    workers: int | None = None,
    append_end: bool = True,
    sentences: bool = False,
    overwrite: bool = False,
    progress: bool = True,
) -> TokenizeReport:
    """Write the documents of files (see `documents`) as a token file.

    `workers`: processes; None: one a core, fewer for small inputs. `key`: of the text in a .jsonl.
    `append_end`: put the end-of-document id behind each document. `sentences`: store each sentence as a sequence of its
    own, as BERT samples need it.
    Raises DataError, with nothing written, for inputs that are missing, damaged or without a single document.
    """
    paths, prefix = expand(inputs), str(output_prefix)
    _check_output(prefix, overwrite)
    end = _end_of_document(tokenizer) if append_end else None
    dtype = smallest_dtype(tokenizer.vocab_size)
    total_bytes = sum(path.stat().st_size for path in paths)
    make = partial(_make_encoder, tokenizer.to_json(), dtype.str, key, end, sentences)
    encoded = ordered_map(make, chunks(paths), workers=_num_workers(workers, total_bytes))
    origin = partial(
        Sidecar,
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        end_of_document=end,
        sources=tuple(str(path) for path in paths),
    )
    try:
        with closing(encoded), _Bar(total_bytes, shown=progress) as bar:
            return _write(prefix, dtype, encoded, origin=origin, bar=bar)
    except OSError as error:
        raise DataError(
            f"{prefix} cannot be written: {error}. Nothing is left of it. Free some space or choose another output."
        ) from error


def _write(
    prefix: str,
    dtype: np.dtype[np.integer],
    encoded: Iterable[Encoded],
    *,
    origin: Callable[..., Sidecar],
    bar: _Bar,
) -> TokenizeReport:
    """Store the chunks as they come; `origin` makes the sidecar when it is told the counts."""
    started = time.perf_counter()
    text_bytes = empty = 0
    with TokenFileWriter(prefix, dtype) as writer, _RejectedList(prefix) as rejected:
        for done in encoded:
            tokens, lengths = np.frombuffer(done.tokens, dtype), np.frombuffer(done.lengths, "<i4")
            writer.add_documents(tokens, lengths, sequences=np.frombuffer(done.sequences, "<i4"))
            rejected.add(done.rejected)
            text_bytes, empty = text_bytes + done.text_bytes, empty + done.empty
            bar.advance(done.read_bytes, writer.num_documents, text_bytes)
        _check_any(writer.num_documents, empty, rejected)
        writer.close(origin(documents=writer.num_documents, tokens=writer.num_tokens, text_bytes=text_bytes))
    return TokenizeReport(
        prefix=prefix,
        documents=writer.num_documents,
        tokens=writer.num_tokens,
        dtype=str(dtype),
        text_bytes=text_bytes,
        empty=empty,
        rejected=rejected.count,
        examples=tuple(rejected.examples),
        seconds=time.perf_counter() - started,
    )


def train_tokenizer(
    inputs: Iterable[str | Path],
    output: str | Path,
    vocab_size: int,
    *,
    key: str = "text",
    min_frequency: int = 2,
    overwrite: bool = False,
    progress: bool = True,
) -> Tokenizer:
    """Train a byte-level BPE on the documents of files and write its tokenizer.json."""
    if Path(output).exists() and not overwrite:
        raise DataError(f"{output} exists. Choose another output, or pass --overwrite.")
    seen = 0

    def texts() -> Iterable[str]:
        nonlocal seen
        for text in read_documents(inputs, key=key):
            seen += bool(text)
            yield text

    tokenizer = train_bpe(texts(), vocab_size, min_frequency=min_frequency, progress=progress)
    if not seen:
        raise DataError(f"no document with the key {key!r} has any text: nothing to train a tokenizer on. Check --key.")
    tokenizer.save(output)
    return tokenizer


def _make_encoder(
    tokenizer_json: str, dtype: str, key: str, end: int | None, sentences: bool
) -> Callable[[Chunk], Encoded]:
    encoder = DocumentEncoder(Tokenizer.from_json(tokenizer_json), np.dtype(dtype))
    ending = b"" if end is None else np.array([end], dtype).tobytes()
    cut = split_sentences if sentences else _whole
    return partial(_encode, encoder, cut, ending, np.dtype(dtype).itemsize, key)


def _whole(document: str) -> list[str]:
    return [document]


def _encode(
    encoder: DocumentEncoder, cut: Callable[[str], list[str]], ending: bytes, itemsize: int, key: str, chunk: Chunk
) -> Encoded:
    parts: list[bytes] = []
    sequences: list[int] = []
    rejected: list[Rejected] = []
    text_bytes = empty = 0
    for document in parse(chunk, key):
        if isinstance(document, Rejected):
            rejected.append(document)
        elif not (encoded := [tokens for text in cut(document) if (tokens := encoder.encode(text))]):
            empty += 1
        else:
            encoded[-1] += ending
            parts += encoded
            sequences.append(len(encoded))
            text_bytes += len(document) if document.isascii() else len(document.encode())
    lengths = np.array([len(part) // itemsize for part in parts], "<i4").tobytes()
    counts = np.array(sequences, "<i4").tobytes()
    return Encoded(b"".join(parts), lengths, counts, text_bytes, chunk.read_bytes, empty, tuple(rejected))


def _num_workers(asked: int | None, total_bytes: int) -> int:
    if asked is not None:
        if asked < 1:
            raise DataError(f"workers = {asked}: at least one process has to do the work. Leave it out for one a core.")
        return asked
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, total_bytes // _BYTES_A_WORKER))


def _end_of_document(tokenizer: Tokenizer) -> int:
    if tokenizer.end_of_document is None:
        raise DataError(
            "the tokenizer has no end-of-document token (<|endoftext|> or the like) to put behind each document. "
            "Train one with `colonnade data train-tokenizer`, or pass --no-append-end."
        )
    return tokenizer.end_of_document


def _check_output(prefix: str, overwrite: bool) -> None:
    present = [str(path) for path in (bin_path(prefix), idx_path(prefix)) if path.exists()]
    if present and not overwrite:
        raise DataError(f"{' and '.join(present)} exist already. Choose another output, or pass --overwrite.")
    if sidecar_path(prefix).exists() and not present and not overwrite:
        raise DataError(f"{sidecar_path(prefix)} exists already. Choose another output, or pass --overwrite.")


def _check_any(documents: int, empty: int, rejected: _RejectedList) -> None:
    if documents:
        return
    first = f" The first: {rejected.examples[0]}." if rejected.examples else ""
    raise DataError(
        f"the inputs hold no document with text: {rejected.count:,} lines rejected, {empty:,} empty documents.{first} "
        "Check the files, and --key for .jsonl."
    )


class _RejectedList:
    """The list of rejected lines on disk, under a temporary name until the token file is whole; no list if none was."""

    def __init__(self, prefix: str) -> None:
        self.count, self.examples = 0, list[Rejected]()
        self._path = rejected_path(prefix)
        self._partial = Path(f"{self._path}.partial-{os.getpid()}")
        self._stream: IO[str] | None = None

    def __enter__(self) -> Self:
        return self

    def add(self, lines: Iterable[Rejected]) -> None:
        for line in lines:
            self._stream = self._stream or self._partial.open("w", encoding="utf-8")
            self._stream.write(json.dumps({"file": line.file, "line": line.line, "reason": line.reason}) + "\n")
            self.count += 1
            if self.count <= _EXAMPLES:
                self.examples.append(line)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.close()
        if kind is not None:
            self._partial.unlink(missing_ok=True)
        elif self.count:
            self._partial.replace(self._path)
        else:
            self._path.unlink(missing_ok=True)


class _Bar:
    """Share of the input read, documents/s, MB/s of text and the time left, on standard error."""

    def __init__(self, total_bytes: int, *, shown: bool) -> None:
        columns = (TextColumn("tokenize"), BarColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), disable=not shown, transient=True)
        self._task: TaskID = self._progress.add_task("tokenize", total=max(total_bytes, 1), speed="")
        self._started = time.perf_counter()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, read_bytes: int, documents: int, text_bytes: int) -> None:
        seconds = max(time.perf_counter() - self._started, 1e-9)
        speed = f"{documents:,} documents · {documents / seconds:,.0f}/s · {text_bytes / 1e6 / seconds:.1f} MB/s"
        self._progress.update(self._task, advance=read_bytes, speed=speed)
