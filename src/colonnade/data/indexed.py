"""Tokens on disk in Megatron's format: read through memory maps, at any size, without reading what is not asked for.

    prefix.bin   the tokens of all sequences, end to end
    prefix.idx   9 bytes "MMIDIDX\\0\\0" · version 1 as uint64 · dtype code as uint8 ·
                 number of sequences (n) as uint64 · number of document boundaries (d) as uint64 ·
                 n lengths in tokens as int32 · n byte offsets as int64 ·
                 d boundaries as int64: document i is the sequences from boundary i up to boundary i + 1

All numbers are little-endian. A document is one sequence for GPT, a sequence a sentence for BERT.
Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import mmap
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colonnade.errors import DataError
from colonnade.mapped import mapped
from colonnade.storage import as_given, not_here

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
# 6 and 7 are Megatron's floating-point codes: no tokens.
DTYPES: dict[int, np.dtype[np.integer]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}

Tokens = NDArray[np.integer]
_AT_ONCE = 64  # documents whose places are looked up together: more than most samples hold
_CHUNK = 1 << 22  # items of an index that are worked on at a time, where all are


def bin_path(prefix: str | Path) -> Path:
    """Where the tokens of a prefix are."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Where the index of a prefix is."""
    return Path(f"{prefix}.idx")


def smallest_dtype(vocab_size: int) -> np.dtype[np.integer]:
    """uint16 where it holds every token id of a vocabulary, else int32: Megatron's choice."""
    return DTYPES[8] if vocab_size <= 65_535 else DTYPES[4]


def code_of(dtype: np.dtype[np.integer]) -> int:
    """Megatron's code of an integer dtype."""
    for code, known in DTYPES.items():
        if known == dtype:
            return code
    raise DataError(f"{dtype} is not a token type of the .idx format. Use one of {_names(DTYPES.values())}.")


class TokenFile:
    """A token file opened for reading: header and end are checked, and `check_index` checks the rest."""

    def __init__(self, prefix: str | Path, *, local: str | None = None, bin_size: int | None = None) -> None:
        """`local`: prefix of the index where it is not beside the tokens, which are `bin_size` bytes then."""
        self.prefix, self.local_prefix = str(prefix), local or str(prefix)
        idx, data = idx_path(self.local_prefix), bin_path(prefix)
        if bin_size is None:
            self._check_presence(idx, data)
        self.dtype, self.num_sequences, num_boundaries = _read_header(idx)
        self.num_documents = num_boundaries - 1
        copy = f"Copy {data.stem}.bin and {data.stem}.idx to another, and name them there."
        otherwise = copy if local is None else "Set data.cache to a folder on another."
        index = _map_index(idx, self.num_sequences, num_boundaries, otherwise)
        self._lengths, self._offsets, self._boundaries = index
        self.num_tokens = self._check_size(idx, data, data.stat().st_size if bin_size is None else bin_size)
        self._tokens = _map_tokens(data, self.dtype, otherwise) if bin_size is None else np.empty(0, self.dtype)

    def __repr__(self) -> str:
        return f"TokenFile({self.prefix!r}: {self.num_documents:,} documents, {self.num_tokens:,} tokens, {self.dtype})"

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFile, (self.prefix,)

    @property
    def num_bytes(self) -> int:
        """Size of the .bin in bytes."""
        return self.num_tokens * self.dtype.itemsize

    @property
    def lengths(self) -> NDArray[np.int32]:
        """Tokens of each sequence [num_sequences], memory-mapped."""
        return self._lengths

    @property
    def boundaries(self) -> NDArray[np.int64]:
        """First sequence of each document, and behind the last [num_documents + 1], memory-mapped."""
        return self._boundaries

    def check_index(self) -> None:
        """Refuse an index that contradicts itself anywhere, for what uses all of it. Reads 12 bytes a sequence and 8 a
        document.
        """
        first = 0
        for begins in starts_of(self._lengths, self.dtype.itemsize):
            lengths, offsets = (part[first : first + len(begins)] for part in (self._lengths, self._offsets))
            wrong = (lengths < 0) | (offsets != begins)
            if wrong.any():
                at = int(np.argmax(wrong))
                raise DataError(
                    self._broken(
                        f"sequence {first + at:,} has {int(lengths[at]):,} tokens from byte {int(offsets[at]):,} on, "
                        f"and those before it end at byte {int(begins[at]):,}"
                    )
                )
            first += len(begins)
        for first in range(0, self.num_documents, _CHUNK):
            self._check_rising("document", first, self._boundaries[first : first + _CHUNK + 1], self.num_sequences)

    def document_start(self, document: int) -> int:
        """Where a document's tokens begin; of document `num_documents`: where the last one's end."""
        assert 0 <= document <= self.num_documents, "a document of this file, or the end"
        sequence = int(self._boundaries[document])
        if not 0 <= sequence <= self.num_sequences:
            raise DataError(self._broken(f"document {document:,} begins at sequence {sequence:,}"))
        if sequence == self.num_sequences:
            return self.num_tokens
        start = int(self._offsets[sequence]) // self.dtype.itemsize
        if not 0 <= start <= self.num_tokens:
            raise DataError(self._broken(f"document {document:,} begins at token {start:,}"))
        return start

    def document(self, document: int) -> Tokens:
        """All tokens of one document."""
        start, stop = self.document_start(document), self.document_start(document + 1)
        if stop < start:
            raise DataError(self._broken(f"document {document:,} runs from token {start:,} to {stop:,}"))
        return self.read(start, stop - start)

    def sequences(self, document: int) -> list[Tokens]:
        """The tokens of each sequence of one document."""
        start, stop = self.document_start(document), self.document_start(document + 1)
        first, end = int(self._boundaries[document]), int(self._boundaries[document + 1])
        ends = np.cumsum(self._lengths[first:end], dtype=np.int64)
        if not 0 <= first < end or (self._lengths[first:end] < 0).any() or ends[-1] != stop - start:
            raise DataError(self._broken(f"document {document:,} has other sequences than tokens"))
        return np.split(self.read(start, stop - start), ends[:-1])

    def sequence_ends(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """Behind the last token of each of some sequences, by their numbers."""
        ends = self._offsets[sequences] // self.dtype.itemsize + self._lengths[sequences]
        if ((ends < 0) | (ends > self.num_tokens)).any():
            raise DataError(self._broken(f"a sequence ends at token {int(ends.max()):,}"))
        return np.asarray(ends)

    def document_at(self, token: int) -> int:
        """The document that holds a token: a binary search, for messages."""
        low, high = 0, self.num_documents
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.document_start(middle) <= token else (low, middle)
        return low

    def document_starts(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where documents begin, of those that begin at tokens `start … stop`: rising, each place once."""
        assert 0 <= start <= stop, "a range of tokens"
        document = self.document_at(start) if start < self.num_tokens else self.num_documents
        document = max(0, document - 1)  # that one too: a search in a damaged index ends beside the damage
        found: list[int] = []
        while document < self.num_documents and (not found or found[-1] < stop):
            found += self._starts(document, min(document + _AT_ONCE, self.num_documents))
            document += _AT_ONCE
        starts = np.array(found, dtype=np.int64)
        return np.unique(starts[(start <= starts) & (starts < stop)])

    def sequence_starts(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where sequences (sentences) begin, of those that begin at tokens `start … stop`: rising, each place once."""
        size = self.dtype.itemsize
        first = bisect_left(range(self.num_sequences), start * size, key=lambda number: int(self._offsets[number]))
        first = max(0, first - 1)  # as for documents
        found: list[int] = []
        while first < self.num_sequences and (not found or found[-1] < stop):
            places = self._offsets[first : first + _AT_ONCE] // size
            self._check_rising("sequence", first, places, self.num_tokens)
            found += places.tolist()
            first += _AT_ONCE
        starts = np.array(found, dtype=np.int64)
        return np.unique(starts[(start <= starts) & (starts < stop)])

    def answered(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Of tokens `start … stop` of conversations, whether each is a part of an answer: [stop - start].

        What is given and what is answered are the sequences of a document by turns.
        """
        assert 0 <= start <= stop <= self.num_tokens, "a range within the file"
        size, numbers = self.dtype.itemsize, range(self.num_sequences)
        first = max(0, bisect_right(numbers, start * size, key=lambda number: int(self._offsets[number])) - 1)
        last = bisect_left(numbers, stop * size, first, key=lambda number: int(self._offsets[number]))
        sequences = np.arange(first, max(last, first + 1))
        starts = self._offsets[first : sequences[-1] + 1] // size
        self._check_rising("sequence", first, starts, self.num_tokens)
        begins = self._document_begins(int(sequences[0]), int(sequences[-1]))
        turns = (sequences - begins[np.searchsorted(begins, sequences, side="right") - 1]) % 2 == 1
        edges = np.clip(np.append(starts, stop), start, stop)
        return np.repeat(turns, np.diff(edges))

    def _document_begins(self, first: int, last: int) -> NDArray[np.int64]:
        """First sequence of each document that has one of the sequences `first … last`."""
        documents = range(len(self._boundaries))
        begin, stop = (
            bisect_right(documents, number, key=lambda document: int(self._boundaries[document]))
            for number in (first, last)
        )
        return self._boundaries[begin - 1 : stop]

    def _starts(self, first: int, stop: int) -> list[int]:
        """Where some documents begin; they cost one look at each part of the index."""
        sequences = self._boundaries[first:stop]
        self._check_rising("document", first, sequences, self.num_sequences)
        offsets = self._offsets[np.minimum(sequences, self.num_sequences - 1)] // self.dtype.itemsize
        starts = np.where(sequences < self.num_sequences, offsets, self.num_tokens)
        self._check_rising("document", first, starts, self.num_tokens)
        found: list[int] = starts.tolist()
        return found

    def _check_rising(self, what: str, first: int, starts: NDArray[np.int64], most: int) -> None:
        """Refuse places, of items from `first` on, that no sound index has: they rise, from 0 to at most `most`."""
        wrong = (starts < 0) | (starts > most)
        wrong[1:] |= starts[1:] < starts[:-1]
        if wrong.any():
            number = int(np.argmax(wrong))
            raise DataError(self._broken(f"{what} {first + number:,} begins at {int(starts[number]):,}"))

    def read(self, start: int, count: int) -> Tokens:
        """Tokens [count] from `start` on, in the file's dtype and not copied; they may cross documents."""
        assert 0 <= start <= start + count <= self.num_tokens, "a range within the file"
        return self._tokens[start : start + count]

    def _check_presence(self, idx: Path, data: Path) -> None:
        missing = [as_given(path) for path in (data, idx) if not path.is_file()]
        if not missing:
            return
        named = Path(self.prefix)
        if named.suffix in (".bin", ".idx") and idx_path(named.with_suffix("")).is_file():
            hint = f"A token file is named without its ending: write {named.with_suffix('')}."
        else:
            begins = "" if named.is_absolute() or not_here(named) else ", which begins at the current folder"
            hint = f"Check the path{begins}, or make the file with `colonnade data tokenize INPUT --output PREFIX`."
        raise DataError(f"{self.prefix}: there is no {' and no '.join(missing)}.{not_here(self.prefix)} {hint}")

    def _check_size(self, idx: Path, data: Path, found: int) -> int:
        last = self.num_sequences - 1
        if int(self._boundaries[0]) != 0 or int(self._boundaries[-1]) != self.num_sequences:
            raise DataError(
                self._broken(
                    f"its documents run from sequence {int(self._boundaries[0]):,} to {int(self._boundaries[-1]):,} "
                    f"where it holds {self.num_sequences:,} sequences"
                )
            )
        expected = int(self._offsets[last]) + int(self._lengths[last]) * self.dtype.itemsize
        if expected == found and found > 0:
            return found // self.dtype.itemsize
        if expected == 0:
            raise DataError(f"{self.prefix} holds no tokens: its {self.num_sequences:,} sequences are empty.")
        what = "is cut short" if found < expected else "is longer than its index says"
        raise DataError(
            f"{data} {what}: {found:,} bytes where the end of {idx} asks for {expected:,} "
            f"({self.num_sequences:,} sequences of {self.dtype}). Copy both files again from one source, or tokenize "
            "again."
        )

    def _broken(self, what: str) -> str:
        return (
            f"{idx_path(self.prefix)} is damaged: {what}, of {self.num_sequences:,} sequences and "
            f"{getattr(self, 'num_tokens', 0):,} tokens. Copy it again from its source, or tokenize again."
        )


def starts_of(counts: NDArray[np.integer], unit: int) -> Iterator[NDArray[np.int64]]:
    """Where each item begins, in units: an exclusive sum, a chunk at a time."""
    total = 0
    for first in range(0, len(counts), _CHUNK):
        chunk = counts[first : first + _CHUNK].astype("<i8") * unit
        ends = total + np.cumsum(chunk)
        total = int(ends[-1])
        yield ends - chunk


def _read_header(path: Path) -> tuple[np.dtype[np.integer], int, int]:
    with path.open("rb") as stream:
        start = stream.read(HEADER.size)
    if not start:
        raise DataError(f"{path} is empty: a token index begins with {MAGIC!r}. Copy it again, or tokenize again.")
    if not start.startswith(MAGIC[: len(start)]):
        raise DataError(
            f"{path} is no token index of Megatron's format: it begins with {_what_begins(start)} where {MAGIC!r} is "
            "expected. Point to a prefix whose .bin and .idx `colonnade data tokenize` or Megatron's tools wrote."
        )
    if len(start) < HEADER.size:
        raise DataError(
            f"{path} is cut short: {len(start)} bytes, and its header alone has {HEADER.size}. Copy it again from its "
            "source, or tokenize again."
        )
    _, version, code, num_sequences, num_boundaries = HEADER.unpack(start)
    if version != VERSION:
        raise DataError(f"{path} has version {version} of Megatron's format; this program reads version {VERSION}.")
    if code not in DTYPES:
        known = ", ".join(f"{known} ({dtype})" for known, dtype in DTYPES.items())
        what = "floating-point numbers, which are no tokens" if code in (6, 7) else "not known"
        raise DataError(f"{path} has dtype code {code}: {what}. The codes of tokens are {known}.")
    if num_sequences == 0 or num_boundaries < 2:
        raise DataError(
            f"{path} holds no documents: {num_sequences} sequences, {num_boundaries} boundaries of documents."
        )
    return DTYPES[code], num_sequences, num_boundaries


def _map_index(
    path: Path, num_sequences: int, num_boundaries: int, otherwise: str
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    expected, found = HEADER.size + 12 * num_sequences + 8 * num_boundaries, path.stat().st_size
    if found != expected:
        what = "is cut short" if found < expected else "has bytes too many"
        raise DataError(
            f"{path} {what}: {found:,} bytes where {num_sequences:,} sequences and {num_boundaries - 1:,} documents "
            f"take {expected:,}. Copy it again from its source, or tokenize again."
        )
    whole = np.frombuffer(mapped(path, otherwise), np.uint8)
    offsets, boundaries = HEADER.size + 4 * num_sequences, HEADER.size + 12 * num_sequences
    return (
        whole[HEADER.size : offsets].view("<i4"),
        whole[offsets:boundaries].view("<i8"),
        whole[boundaries:].view("<i8"),
    )


def _map_tokens(path: Path, dtype: np.dtype[np.integer], otherwise: str) -> Tokens:
    """Map the tokens for reading here and there.

    A shuffled run reads a few kilobytes at random places. Without the advice the kernel reads on after each of them,
    which made 512 samples of a 200 GB file take seconds instead of hundredths of one.
    """
    whole = mapped(path, otherwise)
    if hasattr(mmap, "MADV_RANDOM"):
        whole.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(whole, dtype)


def _what_begins(start: bytes) -> str:
    known = {
        b"TNTIDX": "fairseq's older index (TNTIDX)",
        b"\x1f\x8b": "gzip data",
        b"\xfd7zXZ": "xz data",
        b"\x28\xb5\x2f\xfd": "Zstandard data",
        b"PK\x03\x04": "a zip archive",
        b"\x93NUMPY": "a NumPy array",
        b"version https://git-lfs": "a Git LFS pointer (run `git lfs pull`)",
    }
    for magic, name in known.items():
        if start.startswith(magic):
            return name
    return repr(start[:16])


def _names(dtypes: object) -> str:
    return ", ".join(str(dtype) for dtype in dtypes)  # type: ignore[attr-defined]
