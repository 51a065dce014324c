"""Object storages for tests: one in memory that fails, waits and counts as it is told to."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class FaultyStorage(MemoryFileSystem):  # type: ignore[misc]
    """`faulty://`: calls `before(operation, path)` first, which may raise or wait."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs = [""]
    before: ClassVar[Callable[[str, str], None]] = staticmethod(lambda operation, path: None)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).replace("faulty://", "memory://"))

    def put_file(self, lpath: str, rpath: str, **more: Any) -> None:
        type(self).before("put", rpath)
        super().put_file(lpath, rpath, **more)

    def get_file(self, rpath: str, lpath: str, **more: Any) -> None:
        type(self).before("get", rpath)
        super().get_file(rpath, lpath, **more)

    def pipe_file(self, path: str, value: bytes, **more: Any) -> None:
        type(self).before("pipe", path)
        super().pipe_file(path, value, **more)

    def cat_file(self, path: str, **more: Any) -> bytes:
        type(self).before("cat", path)
        found: bytes = super().cat_file(path, **more)
        return found

    def rm_file(self, path: str) -> None:
        type(self).before("rm", path)
        self._rm(path)

    def ls(self, path: str, detail: bool = True, **more: Any) -> Any:
        type(self).before("ls", path)
        return super().ls(path, detail=detail, **more)


fsspec.register_implementation("faulty", FaultyStorage, clobber=True)


@contextmanager
def emptied(*kinds: type[MemoryFileSystem]) -> Iterator[None]:
    """Storages in memory that have nothing, and no faults, when the block ends."""
    try:
        yield
    finally:
        for kind in kinds:
            kind.store.clear()
            kind.pseudo_dirs[:] = [""]
        FaultyStorage.before = staticmethod(lambda operation, path: None)
