"""Documents to a token file, on all cores: `.bin`, `.idx` and a sidecar, the same bytes for any number of workers.

    files ── chunks (this process) ──▶ parse and encode (workers) ──▶ in order ──▶ TokenFileWriter (this process)

Workers return the bytes of arrays, so that no list of integers is ever pickled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from colonnade.config.numbers import counted, size_of_text
from colonnade.control_groups import num_cores
from colonnade.corpus.documents import BEGIN, Chunk, Rejected, chunks, look_at, parse
from colonnade.corpus.folders import told_aside
from colonnade.data.indexed import smallest_dtype
from colonnade.data.parallel import ordered_map
from colonnade.data.rejected import RejectedList, check_inputs, rejected_path
from colonnade.data.segments import Encoded, Segment, SegmentFolder, SegmentHeader, append
from colonnade.data.sentences import split_sentences
from colonnade.data.sidecar import Sidecar
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.word_cache import DocumentEncoder
from colonnade.data.writer import TokenFileWriter, check_lengths, check_prefix, held, unfinished_path
from colonnade.errors import DataError, printable
from colonnade.lock import Lock
from colonnade.terminal import BarColumn, Console, Progress, TaskID, TextColumn, TimeRemainingColumn

SEGMENT_BYTES = 64 << 20
"""[bytes] Text that is stored at a time, for a run that is stopped to go on behind it."""
_BYTES_A_WORKER = 4 << 20  # less work than this is done before another process has started


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
    left_aside: dict[str, int]
    """Files of other kinds in the input folders, by ending; fifos, broken links and the like, by what they are."""
    resumed: int = 0
    """Documents that an earlier run, which was stopped, had done."""

    def summary(self) -> str:
        """Some lines for people."""
        lines = [
            f"{counted(self.documents, 'document')}, {size_of_text(self.text_bytes)} of text -> {self.tokens:,} tokens "
            f"({self.dtype}, {self.text_bytes / self.tokens:.2f} bytes each) in {self.prefix}.bin and .idx; "
            f"{self.seconds:.1f} s, {self.documents / self.seconds:,.0f} documents/s, "
            f"{size_of_text(self.text_bytes / self.seconds)}/s"
        ]
        if self.resumed:
            lines.append(f"it went on behind the {counted(self.resumed, 'document')} that the run before had done")
        lines += told_aside(self.left_aside)
        if self.empty:
            lines.append(f"left out: {counted(self.empty, 'document')} without text")
        if self.rejected:
            where = rejected_path(self.prefix)
            lines.append(f"left out: {counted(self.rejected, 'unusable line')}, listed in {where}; the first:")
            lines += [f"  {example}" for example in self.examples]
        return printable("\n".join(lines))


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
    own, as BERT samples need it. A run that was stopped or killed goes on where it was when it is started again with
    the same inputs, tokenizer and options.
    Raises DataError, with nothing written, for inputs that are missing, without a single document, or written over by
    the output; LockError where another run is writing the same output.
    """
    found, prefix = look_at(inputs), str(output_prefix)
    check_prefix(prefix)
    check_inputs(prefix, found.files)
    making = _Making(
        prefix=prefix,
        paths=found.files,
        tokenizer=tokenizer,
        key=key,
        end=end_of_document(tokenizer) if append_end else None,
        sentences=sentences,
    )
    total_bytes = sum(path.stat().st_size for path in found.files)
    started = time.perf_counter()
    num_workers = _num_workers(workers, total_bytes)
    with held(prefix, "colonnade data tokenize", overwrite=overwrite) as lock:
        store = SegmentFolder(unfinished_path(prefix))
        try:
            with _Bar(total_bytes, shown=progress) as bar:
                done = _encode_all(making, store, bar, workers=num_workers, lock=lock)
                report = _join(making, store, done)
        except OSError as error:
            raise DataError(f"{prefix} cannot be written: {error}. {_kept(store)}") from error
        except BaseException:
            _kept(store)
            raise
        store.remove()
    return replace(report, seconds=time.perf_counter() - started, left_aside=found.left_aside)


@dataclass(frozen=True)
class _Making:
    """What is made of what, and how."""

    prefix: str
    paths: list[Path]
    tokenizer: Tokenizer
    key: str
    end: int | None
    sentences: bool

    @property
    def dtype(self) -> np.dtype[np.integer]:
        return smallest_dtype(self.tokenizer.vocab_size)

    def identity(self) -> str:
        """Changes with everything that the result depends on."""
        files = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in self.paths]
        stored = [field.name for field in dataclasses.fields(SegmentHeader)]  # what another version has left is no part
        properties = [stored, files, self.tokenizer.sha256, self.key, self.end, self.sentences, self.dtype.str]
        return hashlib.sha256(json.dumps(properties).encode()).hexdigest()

    def encoder(self) -> Callable[[], Callable[[Chunk], Encoded]]:
        """What makes a worker's function."""
        return encoder_for(self.tokenizer, key=self.key, end=self.end, sentences=self.sentences)

    def sidecar(self, writer: TokenFileWriter, text_bytes: int) -> Sidecar:
        return Sidecar(
            tokenizer_sha256=self.tokenizer.sha256,
            vocab_size=self.tokenizer.vocab_size,
            end_of_document=self.end,
            documents=writer.num_documents,
            tokens=writer.num_tokens,
            text_bytes=text_bytes,
            sources=tuple(str(path) for path in self.paths),
            sentences=self.sentences,
        )


def encoder_for(
    tokenizer: Tokenizer, *, key: str, end: int | None, sentences: bool = False
) -> Callable[[], Callable[[Chunk], Encoded]]:
    """What makes, in whichever process, the function from a chunk to its tokens."""
    dtype = smallest_dtype(tokenizer.vocab_size)
    return partial(_make_encoder, tokenizer.to_json(), dtype.str, key, end, sentences)


class _Done(NamedTuple):
    """What is encoded when the inputs are at their end."""

    last: Segment
    """What is not in a stored segment."""
    resumed: int


def _encode_all(making: _Making, store: SegmentFolder, bar: _Bar, *, workers: int, lock: Lock) -> _Done:
    """Encode what is not in a stored segment, and store it in segments of SEGMENT_BYTES; the last one is given."""
    before = store.open(making.identity())
    documents, text_bytes = sum(header.documents for header in before), sum(header.text_bytes for header in before)
    done = _Done(Segment(), documents)
    bar.advance(sum(header.read_bytes for header in before), documents, text_bytes)
    todo = chunks(making.paths, before[-1].end if before else BEGIN)
    with closing(ordered_map(making.encoder(), todo, workers=workers, lock=lock)) as encoded:
        for each in encoded:
            done.last.add(each)
            documents, text_bytes = documents + len(each.sequences) // 4, text_bytes + each.text_bytes
            bar.advance(each.read_bytes, documents, text_bytes)
            if done.last.header.text_bytes >= SEGMENT_BYTES:
                store.store(done.last)
                done = done._replace(last=Segment())
    return done


def _join(making: _Making, store: SegmentFolder, done: _Done) -> TokenizeReport:
    """Make the token file of the stored segments and the last one."""
    total = SegmentHeader()
    with TokenFileWriter(making.prefix, making.dtype) as writer, RejectedList(making.prefix) as rejected:
        for header in append(store.paths(), writer):
            rejected.add(header.rejected)
            total.text_bytes, total.empty = total.text_bytes + header.text_bytes, total.empty + header.empty
        done.last.append_to(writer)
        rejected.add(done.last.header.rejected)
        total.text_bytes += done.last.header.text_bytes
        total.empty += done.last.header.empty
        _check_any(writer.num_documents, total.empty, rejected)
        rejected.put_on_disk()
        writer.close(making.sidecar(writer, total.text_bytes))
    return TokenizeReport(
        prefix=making.prefix,
        documents=writer.num_documents,
        tokens=writer.num_tokens,
        dtype=str(making.dtype),
        text_bytes=total.text_bytes,
        empty=total.empty,
        rejected=rejected.count,
        examples=tuple(rejected.examples),
        seconds=0.0,
        left_aside={},
        resumed=done.resumed,
    )


def _kept(store: SegmentFolder) -> str:
    """What is left of a run that stopped, in words; a folder without a segment is removed."""
    if store.paths():
        return "Free some space, or fix that, and start the same command again: it goes on where it stopped."
    store.remove()
    return "Nothing is left of it. Free some space or choose another output."


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
    counted = [len(part) // itemsize for part in parts]
    check_lengths(f"{chunk.path}, from line {chunk.first_line:,} on", counted)
    lengths = np.array(counted, "<i4").tobytes()
    counts = np.array(sequences, "<i4").tobytes()
    return Encoded(
        b"".join(parts),
        lengths,
        counts,
        text_bytes,
        chunk.read_bytes,
        empty,
        tuple(rejected),
        chunk.end,
        chunk.refused,
    )


def _num_workers(asked: int | None, total_bytes: int) -> int:
    if asked is not None:
        if asked < 1:
            raise DataError(f"workers = {asked}: at least one process has to do the work. Leave it out for one a core.")
        return asked
    return max(1, min(num_cores(), total_bytes // _BYTES_A_WORKER))


def end_of_document(tokenizer: Tokenizer) -> int:
    """The token behind each document. Raises DataError where the tokenizer has none."""
    if tokenizer.end_of_document is None:
        raise DataError(
            "the tokenizer has no end-of-document token (<|endoftext|> or the like) to put behind each document. "
            "Train one with `colonnade data train-tokenizer`, or pass --no-append-end."
        )
    return tokenizer.end_of_document


def _check_any(documents: int, empty: int, rejected: RejectedList) -> None:
    if documents:
        return
    first = f" The first: {rejected.examples[0]}." if rejected.examples else ""
    raise DataError(
        f"the inputs hold no document with text: {counted(rejected.count, 'line')} rejected, "
        f"{counted(empty, 'empty document')}.{first} "
        "Check the files, and --key for .jsonl."
    )


class _Bar:
    """Share of the input read, documents/s, MB/s of text and the time left, on standard error."""

    def __init__(self, total_bytes: int, *, shown: bool) -> None:
        columns = (TextColumn("tokenize"), BarColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
        console = Console(stderr=True)
        console.quiet = hidden = not shown or not console.is_terminal  # a bar in a file is a blank line
        self._progress = Progress(*columns, console=console, disable=hidden, transient=True)
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
        each = f"{documents / seconds:,.0f}/s · {text_bytes / 1e6 / seconds:.1f} MB/s"
        speed = f"{counted(documents, 'document')} · {each}"
        self._progress.update(self._task, advance=read_bytes, speed=speed)
