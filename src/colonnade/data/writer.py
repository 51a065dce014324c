"""Writing token files as a stream: temporary names until everything is on disk, so that none is ever half-written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from colonnade.atomic import partial_path, put_on_disk, remove_partial_of
from colonnade.config.numbers import counted
from colonnade.data.indexed import HEADER, MAGIC, VERSION, TokenFile, Tokens, bin_path, code_of, idx_path, starts_of
from colonnade.data.rejected import rejected_path
from colonnade.data.sidecar import Sidecar, files_of, hash_file, merge_sidecars, read_sidecar, sidecar_path
from colonnade.errors import DataError, names
from colonnade.lock import Lock, locked
from colonnade.outputs import check_output

LONGEST = np.iinfo(np.int32).max  # tokens of a sequence
_CHUNK = 1 << 22  # tokens that are copied at a time


class TokenFileWriter:
    """Appends documents to a new token file; `with` closes it, or removes it when something failed.

    The index is kept in memory until the end: 12 bytes a document. An older file of the prefix is replaced at the end.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[np.integer]) -> None:
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        self.num_tokens = self.num_documents = 0
        self._code = code_of(self.dtype)
        self._lengths: list[NDArray[np.int32]] = []
        self._sequences: list[NDArray[np.int64]] = []
        self._bin, self._idx, self._json = map(partial_path, files_of(prefix))
        bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
        self._stream = self._bin.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def add_document(self, tokens: Sequence[int] | Tokens, *, lengths: Sequence[int] | None = None) -> None:
        """Append one document; `lengths` cuts it into sequences (sentences), else it is one."""
        array = np.asarray(tokens)
        parts = [len(array)] if lengths is None else list(lengths)
        assert sum(parts) == len(array), "the sequences of a document are all of it"
        self.add_documents(array, np.array(parts), sequences=np.array([len(parts)]))

    def add_documents(
        self, tokens: Tokens, lengths: NDArray[np.integer], *, sequences: NDArray[np.integer] | None = None
    ) -> None:
        """Append many documents at once: their tokens end to end, the length of each sequence, sequences a document."""
        check_lengths(f"{self.prefix}, after {counted(self.num_documents, 'document')}", lengths)
        if tokens.dtype != self.dtype:
            self._check_range(tokens)
        with names(bin_path(self.prefix)):
            self._stream.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
        counts = np.ones(len(lengths), np.int64) if sequences is None else sequences.astype(np.int64)
        self._lengths.append(lengths.astype("<i4"))
        self._sequences.append(counts)
        self.num_tokens += len(tokens)
        self.num_documents += len(counts)

    def close(self, sidecar: Sidecar | None = None) -> None:
        """Write the index, put everything on disk and give the files their names."""
        if self._stream.closed:
            return
        if not self.num_tokens:
            self.discard()
            raise DataError(f"{self.prefix}: there is nothing to write, no document has a token.")
        try:
            with names(bin_path(self.prefix)):
                put_on_disk(self._stream)
                self._stream.close()
            self._write_index()
            if sidecar is not None:
                self._write_sidecar(sidecar)
            self._publish()
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Remove what was written."""
        with suppress(OSError):  # what a full disk does not take of it is removed anyway
            self._stream.close()
        self._bin.unlink(missing_ok=True)
        self._idx.unlink(missing_ok=True)
        self._json.unlink(missing_ok=True)

    def _publish(self) -> None:
        """The index comes last, and an older one goes first: none ever stands beside tokens that are not its own."""
        idx_path(self.prefix).unlink(missing_ok=True)
        sidecar_path(self.prefix).unlink(missing_ok=True)
        self._bin.replace(bin_path(self.prefix))
        if self._json.exists():
            self._json.replace(sidecar_path(self.prefix))
        self._idx.replace(idx_path(self.prefix))

    def _write_sidecar(self, sidecar: Sidecar) -> None:
        with names(sidecar_path(self.prefix)), self._json.open("wb") as stream:
            stream.write(replace(sidecar, index_sha256=hash_file(self._idx)).as_json())
            put_on_disk(stream)

    def _write_index(self) -> None:
        lengths, sequences = np.concatenate(self._lengths), np.concatenate(self._sequences)
        self._check_sums(int(lengths.sum()), len(lengths), int(sequences.sum()))
        with names(idx_path(self.prefix)), self._idx.open("wb") as stream:
            stream.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(sequences) + 1))
            stream.write(lengths.data)
            for offsets in starts_of(lengths, self.dtype.itemsize):
                stream.write(offsets.data)
            for boundaries in starts_of(sequences, 1):
                stream.write(boundaries.data)
            stream.write(np.array(sequences.sum(), "<i8").data)
            put_on_disk(stream)

    def _check_sums(self, tokens: int, num_sequences: int, sequences: int) -> None:
        """Whether the tokens that came are those of the sequences, and the sequences those of the documents."""
        if (tokens, sequences) != (self.num_tokens, num_sequences):
            raise DataError(
                f"{self.prefix} cannot be made: {self.num_tokens:,} tokens in {num_sequences:,} sequences came for an "
                f"index of {tokens:,} in {sequences:,}. What it is made of is damaged or cut short: copy that again "
                "from its source, or make it again."
            )

    def _check_range(self, tokens: Tokens) -> None:
        if not len(tokens):
            return
        limits, low, high = np.iinfo(self.dtype), int(tokens.min()), int(tokens.max())
        if low < limits.min or high > limits.max:
            raise DataError(
                f"{self.prefix}: token ids {low}..{high} do not fit into {self.dtype} ({limits.min}..{limits.max}). "
                "Write the file with a wider dtype."
            )


def check_lengths(where: str, lengths: Sequence[int] | NDArray[np.integer]) -> None:
    """DataError if a document or sentence is longer than the format can say."""
    longest = int(np.max(lengths, initial=0))
    if longest > LONGEST:
        raise DataError(
            f"{where}: a document, or a sentence of one, has {longest:,} tokens, but the format has room for "
            f"{LONGEST:,}: it stores lengths as int32. Cut the text into several documents."
        )


def check_prefix(output: str | Path) -> None:
    """Refuse no name, one with the ending of one of the files that it will name, and where these cannot be written."""
    if os.path.basename(output) in ("", ".", ".."):
        raise DataError(
            f'--output "{output}": a token file is named by what its .bin and .idx share, and no name stands there. '
            f"Write --output {Path(output) / 'NAME'}."
        )
    ending = Path(output).suffix
    if ending in (".bin", ".idx"):
        raise DataError(
            f"--output {output}: a token file is named by what its .bin and .idx share, and {output}{ending} would be "
            f"made of it. Write --output {Path(output).with_suffix('')}."
        )
    check_output(output, files=files_of(output))


def unfinished_path(prefix: str | Path) -> Path:
    """Where `data tokenize` keeps what it has done, until the token file is whole."""
    return Path(f"{prefix}.unfinished")


@contextmanager
def held(prefix: str | Path, command: str, *, overwrite: bool) -> Iterator[Lock]:
    """Holds a prefix while its files are made: nobody else makes them, and what killed commands have left is removed.

    Raises LockError where another has it; DataError where there is a file already that may not be replaced.
    """
    place = Path(prefix)
    purpose, instead = f"{command} --output {prefix}", "choose another output"
    with locked(place.parent, purpose, name=f"{place.name}.lock", what=str(prefix), instead=instead) as lock:
        _check_absent(prefix, overwrite=overwrite)
        for path in (*files_of(prefix), rejected_path(prefix)):
            remove_partial_of(path)
        yield lock


def _check_absent(output: str | Path, *, overwrite: bool) -> None:
    """Refuse to replace a file of that prefix, unless that is asked for. Tokens without an index that stand beside what
    `data tokenize` has done are its own: it was killed while it named its files.
    """
    present = [str(path) for path in files_of(output) if os.path.lexists(path)]
    half_named = str(bin_path(output)) in present and str(idx_path(output)) not in present
    if present and not overwrite and not (half_named and unfinished_path(output).is_dir()):
        exist = "exists" if len(present) == 1 else "exist"
        raise DataError(f"{' and '.join(present)} {exist} already. Choose another output, or pass --overwrite.")


def merge(prefixes: Sequence[str | Path], output: str | Path, *, overwrite: bool = True) -> list[str]:
    """Join token files end to end into a new one; all must have one dtype and, where it is known, one tokenizer.

    Returns the files without a sidecar: where there are any, the new file has none either.
    """
    check_prefix(output)
    before = [(prefix, _state_of(prefix)) for prefix in prefixes]
    files = [TokenFile(prefix) for prefix in prefixes]
    if not files:
        raise DataError("there are no token files to merge. Name at least one prefix.")
    if Path(output).resolve() in (Path(file.prefix).resolve() for file in files):
        raise DataError(f"{output} is among the files to merge. Choose another output.")
    for file in files:
        if file.dtype != files[0].dtype:
            raise DataError(
                f"{file.prefix} holds {file.dtype} and {files[0].prefix} {files[0].dtype}: only files of one dtype can "
                "be joined. Tokenize both with the same tokenizer."
            )
        file.check_index()
    sidecars = [(file.prefix, read_sidecar(file)) for file in files]
    sidecar = merge_sidecars(sidecars)
    with held(output, "colonnade data merge", overwrite=overwrite), TokenFileWriter(output, files[0].dtype) as writer:
        for file, (prefix, state) in zip(files, before, strict=True):
            with suppress(FileNotFoundError):  # removed meanwhile
                for tokens, lengths, sequences in _pieces(file):
                    writer.add_documents(tokens, lengths, sequences=sequences)
            if _state_of(prefix) != state:
                raise DataError(
                    f"{prefix} was replaced or written to while it was joined: what was read of it may be of both. Run "
                    "the command again when nobody writes there."
                )
        writer.close(sidecar)
        rejected_path(output).unlink(missing_ok=True)  # of the file that was replaced
    return [prefix for prefix, found in sidecars if found is None]


def _state_of(prefix: str | Path) -> list[tuple[int, int, int] | None]:
    """What tells the files of a prefix from others that take their names, and from what is written into them."""
    states: list[tuple[int, int, int] | None] = []
    for path in files_of(prefix):
        try:
            found = path.stat()
            states.append((found.st_ino, found.st_size, found.st_mtime_ns))
        except OSError:
            states.append(None)
    return states


def _pieces(file: TokenFile) -> Iterator[tuple[Tokens, NDArray[np.int32], NDArray[np.int64]]]:
    """A file's tokens by and by, with the whole index in the first piece."""
    yield file.read(0, 0), file.lengths, np.diff(file.boundaries)
    nothing32, nothing64 = np.empty(0, np.int32), np.empty(0, np.int64)
    for start in range(0, file.num_tokens, _CHUNK):
        tokens = np.fromfile(bin_path(file.prefix), file.dtype, _CHUNK, offset=start * file.dtype.itemsize)
        yield tokens, nothing32, nothing64
