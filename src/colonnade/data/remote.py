"""Token files on object storage: s3://, gs://, https://, whatever `fsspec` opens, through a folder on the local disk.

    URL.idx, URL.json ──whole, once──▶ cache/KEY/tokens.idx, tokens.json        memory-mapped as any other
    URL.bin           ──by blocks, as they are asked for──▶ cache/KEY/blocks/00000017

The ranks of a machine share the folder without a word: a block is written under a temporary name and renamed, and two
ranks that fetch the same one write the same bytes. KEY is made of the URL and what the storage says about the
versions of all three, so that what was replaced is fetched anew. Nothing is ever deleted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from colonnade.atomic import write_whole
from colonnade.data.indexed import TokenFile, Tokens, bin_path
from colonnade.errors import ColonnadeError, DataError, DiskError, hidden, of_the_disk
from colonnade.storage import ATTEMPTS, is_remote, is_there, open_storage, reason, retry, unreached

BLOCK = 1 << 20  # bytes: at 100 MB/s as long as a request takes to be answered
_VERSIONS = ("ETag", "Content-MD5", "Digest", "Last-Modified")
_PROBE = 1 << 16  # bytes of either end of the tokens, where nothing else tells a version


def open_token_file(prefix: str, cache: str | None = None) -> TokenFile:
    """A token file by its prefix, which may be a URL if there is a folder for copies."""
    if not is_remote(prefix):
        return TokenFile(prefix)
    if cache is None:
        raise DataError(
            f"{prefix} is a URL, but data.cache is not set: what is read is kept in a folder. Set data.cache to a "
            "folder on a local disk with room for the file."
        )
    return RemoteTokenFile(prefix, cache)


class RemoteTokenFile(TokenFile):
    """A token file by its URL: the index is copied when it is opened, tokens when they are read."""

    def __init__(self, url: str, cache: str) -> None:
        self._storage, self._path = open_storage(url, DataError, "copy the file")
        self._cache = cache
        copied = [".idx"]  # whole
        if _try(url, lambda: is_there(self._storage, f"{self._path}.json")):
            copied.append(".json")
        size, version = _try(
            url, lambda: (self._storage.size(f"{self._path}.bin"), _version(self._storage, self._path, copied))
        )
        key = hashlib.blake2b(f"{hidden(url)} {size} {version}".encode(), digest_size=12).hexdigest()
        self._folder = Path(cache) / key
        self._size = int(size)
        _keep(self._folder / "url", hidden(url).encode())
        local = str(self._folder / "tokens")
        for ending in copied:
            self._copy(url, ending, Path(f"{local}{ending}"))
        super().__init__(url, local=local, bin_size=self._size)

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteTokenFile, (self.prefix, self._cache)

    def read(self, start: int, count: int) -> Tokens:
        """Tokens [count] from `start` on, in the file's dtype; blocks that are not here yet are fetched."""
        assert 0 <= start <= start + count <= self.num_tokens, "a range within the file"
        first, stop = start * self.dtype.itemsize, (start + count) * self.dtype.itemsize
        parts = [
            self._block(number)[max(first - number * BLOCK, 0) : stop - number * BLOCK]
            for number in range(first // BLOCK, -(-stop // BLOCK))
        ]
        return np.frombuffer(b"".join(parts), self.dtype)

    def _block(self, number: int) -> bytes:
        path = self._folder / "blocks" / f"{number:08}"
        begin, end = number * BLOCK, min((number + 1) * BLOCK, self._size)
        if path.is_file() and path.stat().st_size == end - begin:
            return path.read_bytes()
        data: bytes = _try(self.prefix, lambda: self._storage.cat_file(f"{self._path}.bin", start=begin, end=end))
        if len(data) != end - begin:
            raise DataError(
                f"{bin_path(self.prefix)} gave {len(data):,} bytes where {end - begin:,} from {begin:,} on were asked "
                "for: it was replaced while it is read. Start again, so that it is opened anew."
            )
        _keep(path, data)
        return data

    def _copy(self, url: str, ending: str, target: Path) -> None:
        if not target.is_file():
            _keep(target, _try(url, lambda: self._storage.cat_file(f"{self._path}{ending}")))


def _version(storage: Any, path: str, copied: Sequence[str]) -> str:
    """What tells a version of the tokens at `path`, and of the files beside them with these endings, from others.

    Of most storages `ukey`, which is made of time, size and checksum. Over HTTP that is the URL alone: there it is what
    the server says of its version or, where it says nothing, the content of both ends of the tokens and of the others.
    """
    files = [f"{path}{ending}" for ending in (".bin", *copied)]
    kinds = {storage.protocol} if isinstance(storage.protocol, str) else set(storage.protocol)
    if not kinds & {"http", "https"}:
        return " ".join(str(storage.ukey(file)) for file in files)
    said = [_stated(storage.info(file)) for file in files]
    if all(said):
        return " ".join(said)
    tokens, *others = files
    size = int(storage.size(tokens))
    begin = storage.cat_file(tokens, start=0, end=min(_PROBE, size))
    end = storage.cat_file(tokens, start=max(0, size - _PROBE), end=size)
    return hashlib.blake2b(b"".join([begin, end, *map(storage.cat_file, others)]), digest_size=12).hexdigest()


def _stated(info: Mapping[str, Any]) -> str:
    """What a server says of a file's version; "" where it says nothing."""
    return " ".join(f"{name}={info[name]}" for name in _VERSIONS if info.get(name))


def _try(name: str, ask: Callable[[], Any]) -> Any:
    """What the storage answers; it is asked again where a connection fails. DiskError where it is not reached, which it
    may get over.
    """
    try:
        return retry(ask)
    except Exception as error:  # noqa: BLE001  each storage's package raises its own kinds
        raise _refusal(name, error) from None  # a traceback would show what is hidden here


def _refusal(name: str, error: Exception) -> ColonnadeError:
    away = unreached(error)
    if away is not None:
        return DiskError(
            f"{name} cannot be reached after {ATTEMPTS} attempts: {reason(away, name)}. Check the server's name and "
            "the connection, and start the same command again when it answers."
        )
    if isinstance(error, FileNotFoundError):
        return DataError(
            f"{name}: there is no {reason(error, name)}. Check the URL, which has no .bin or .idx at its end."
        )
    return DataError(
        f"{name} cannot be read after {ATTEMPTS} attempts: {reason(error, name)}. Check the connection and the rights."
    )


def _keep(path: Path, data: bytes) -> None:
    """Write a file of the cache. ConfigError where that is impossible, DiskError where its disk may get over it."""
    try:
        write_whole(path, data)
    except OSError as error:
        said = f"{path} cannot be written: {error}. Free some space, or set data.cache elsewhere."
        raise of_the_disk(said, error) from error
