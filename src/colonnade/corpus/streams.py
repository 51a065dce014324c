"""Bytes out of files that may be compressed, damaged, cut short or malicious: in blocks of bounded size, and lines.

What can be read is given; what is wrong is raised after it, as `Damaged`. A compressed file is fed to its decoder in
spoonfuls, so that no block is larger than some tens of megabytes however strongly it expands.
"""

from __future__ import annotations

import bz2
import hashlib
import importlib
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

from colonnade.errors import DataError, not_installed

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_BLOCK = 1 << 20
_BEGINNINGS = {".gz": b"\x1f\x8b", ".xz": b"\xfd7zXZ\0"}
"""Of streams whose decoders wait for more before they refuse a single foreign byte."""
BOMB_BYTES = 1 << 30  # below that, no expansion is worth stopping for
_WINDOW = 128 << 20  # memory that a decoder may ask for
_FOREIGN = "foreign bytes stand behind its end"
_NEEDS_MORE = ("Memory usage limit exceeded", "Frame requires too much memory")  # as .xz and .zst say it


class Damaged(Exception):
    """The rest of a file cannot be read; the message says why.

    `ended`: what was read before is a whole compressed file, behind which something else stands. `refused`: the system
    did not give it, and may give it another time.
    """

    def __init__(self, message: str, *, ended: bool = False, refused: bool = False) -> None:
        super().__init__(message)
        self.ended, self.refused = ended, refused


class Line(NamedTuple):
    """A line without its end, counted from 1. `data` is None where it was longer than allowed."""

    number: int
    data: bytes | None
    size: int


class HashedFile:
    """A file that is read from `start` to `stop` and hashed on the way, unless nobody wants the hash."""

    def __init__(self, raw: IO[bytes], start: int = 0, stop: int | None = None, *, hashed: bool = True) -> None:
        raw.seek(start)
        self._raw, self._left = raw, None if stop is None else stop - start
        self._hash, self._buffer = hashlib.sha256(), b""
        self._hashed, self._at, self._failed = hashed, 0, False
        self.num_bytes = 0

    def read(self, size: int) -> bytes:
        """At most `size` bytes; none at the end. Raises Damaged where the system does not give them."""
        if self._at == len(self._buffer):
            wanted = _BLOCK if self._left is None else min(_BLOCK, self._left)
            self._buffer, self._at = self._read(wanted) if wanted else b"", 0
            self._left = None if self._left is None else self._left - len(self._buffer)
            if self._hashed:
                self._hash.update(self._buffer)
            self.num_bytes += len(self._buffer)
        data = self._buffer[self._at : self._at + size]
        self._at += len(data)
        return data

    def _read(self, size: int) -> bytes:
        try:
            return self._raw.read(size)
        except OSError as error:
            self._failed = True
            raise Damaged(f"cannot be read: {error.strerror or error}", refused=True) from error

    def finish(self) -> str | None:
        """Reads what is left, and gives the SHA-256 of all of it; None where the system does not give it."""
        while not self._failed and self.read(_BLOCK):
            pass
        return None if self._failed else self._hash.hexdigest()


def blocks(file: HashedFile, compression: str, *, max_expansion: int = 1_100) -> Iterator[bytes]:
    """The decompressed content. Raises Damaged, behind all that can be had."""
    if not compression:
        while data := file.read(_BLOCK):
            yield data
        return
    make, feed_size, faults = _decoders(compression)
    taken = given = 0
    beginning = _BEGINNINGS.get(compression, b"")
    for consumed, data in _decoded(file, make, feed_size, faults, beginning=beginning):
        taken, given = taken + consumed, given + len(data)
        if given > BOMB_BYTES and given > max_expansion * (taken + feed_size):
            raise Damaged(f"expands more than {max_expansion:,}-fold: a decompression bomb")
        if data:
            yield data


def lines(content: Iterator[bytes], *, max_bytes: int) -> Iterator[Line]:
    """Every line that ends; then the last one, if the content ends without a line end and is not cut."""
    number, size, parts, damage = 1, 0, list[bytes](), list[Damaged]()
    for block in until_foreign(content, damage):
        first, *others = block.split(b"\n")
        size += len(first)
        if size <= max_bytes:
            parts.append(first)
        for following in others:
            yield Line(number, b"".join(parts) if size <= max_bytes else None, size)
            number, size, parts = number + 1, len(following), [following]
    if size:
        yield Line(number, b"".join(parts) if size <= max_bytes else None, size)
    if damage:
        raise damage[0]


def until_foreign(content: Iterator[bytes], damage: list[Damaged]) -> Iterator[bytes]:
    """The content. Where something foreign stands behind its end, that is told in `damage`; other damage is raised."""
    try:
        yield from content
    except Damaged as error:
        if not error.ended:
            raise
        damage.append(error)


class BlockStream(io.RawIOBase):
    """Blocks as a file to read from, for libraries that want one."""

    def __init__(self, content: Iterator[bytes]) -> None:
        super().__init__()
        self._content, self._rest = content, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            block = next(self._content, None)
            if block is None:
                return 0
            self._rest = memoryview(block)
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _decoders(compression: str) -> tuple[Callable[[], Any], int, tuple[type[Exception], ...]]:
    """What makes a decoder, how many bytes it is fed at once, and what it raises: those that do not bound what they
    give get so few bytes that they give some tens of megabytes at most."""
    match compression:
        case ".gz":
            return lambda: zlib.decompressobj(31), 16 << 10, (zlib.error,)
        case ".bz2":
            return bz2.BZ2Decompressor, 64 << 10, (OSError, ValueError, EOFError)
        case ".xz":
            return lambda: lzma.LZMADecompressor(memlimit=_WINDOW), 64 << 10, (lzma.LZMAError, EOFError)
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ImportError:
        instead = "decompress the file first"
        raise DataError(
            not_installed("a file that is compressed with Zstandard", "zstandard", "colonnade[zstd]", instead)
        ) from None
    return lambda: zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj(), 1 << 10, (zstandard.ZstdError,)


def _decoded(
    file: HashedFile,
    make: Callable[[], Any],
    feed_size: int,
    faults: tuple[type[Exception], ...],
    *,
    beginning: bytes,
) -> Iterator[tuple[int, bytes]]:
    """(bytes consumed, bytes given), over all the streams that stand one after the other in a file."""
    decoder, started, num_streams, num_given, head = make(), False, 0, 0, b""
    data = file.read(feed_size)
    while data:
        if beginning and num_streams and not started:
            data = data.lstrip(b"\0")
            started = bool(data)
            data = data or file.read(feed_size)
            continue
        started, head = True, (head + data)[: len(beginning)]
        try:
            for given in _given(decoder, data):
                num_given += len(given)
                yield 0, given
        except faults as error:
            if any(said in str(error) for said in _NEEDS_MORE):
                raise Damaged(
                    f"needs too much memory: more than {_WINDOW >> 20} MiB for what it repeats. Decompress it first, "
                    "with `xz -d` or `zstd -d --long=31`"
                ) from error
            foreign = num_streams > 0 and not num_given
            what = _FOREIGN if foreign else f"damaged: {error}"
            raise Damaged(what, ended=foreign) from error
        rest = decoder.unused_data if decoder.eof else b""
        yield len(data) - len(rest), b""
        if decoder.eof:
            decoder, started, num_streams, num_given, head = make(), False, num_streams + 1, 0, b""
        data = rest or file.read(feed_size)
    if started and num_streams and not beginning.startswith(head):
        raise Damaged(_FOREIGN, ended=True)
    if started or not num_streams:
        raise Damaged("cut short: it ends in the middle of a compressed stream" if started else "empty")


def _given(decoder: Any, data: bytes) -> Iterator[bytes]:
    """What a decoder makes of some bytes, in blocks of bounded size."""
    if not hasattr(decoder, "needs_input"):  # zlib and zstandard: bounded by feed_size
        yield decoder.decompress(data)
        return
    yield decoder.decompress(data, _BLOCK)
    while not decoder.eof and not decoder.needs_input:
        yield decoder.decompress(b"", _BLOCK)
