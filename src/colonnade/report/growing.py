"""Files with one JSON object a line, read while they grow: no line twice."""

from collections.abc import Callable, Iterator
from os import fstat
from pathlib import Path
from typing import Any, BinaryIO

from colonnade.config.numbers import counted
from colonnade.train.lines import object_in


class Growing:
    """A file to which lines are appended. One that was replaced, or cut as a rollback does, is read from its beginning.

    What no JSON object is, is passed over and counted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begin()

    def _begin(self) -> None:
        self._place, self._last, self._inode, self._broken = 0, b"", 0, 0

    def new(self, notes: list[str], forget: Callable[[], None]) -> Iterator[dict[str, Any]]:
        """The objects behind those that were read before; `forget` is called before a file's first, and where there is
        none. What could not be read, now or before, is told in `notes`.
        """
        torn = False
        try:
            with self.path.open("rb") as file:
                if not self._goes_on(file):
                    self._begin()
                    self._inode = _inode(file)
                    forget()
                file.seek(self._place)
                for line in file:
                    content = object_in(line)
                    if content is None and line.strip():
                        torn = not line.endswith(b"\n")
                        if torn:
                            break  # it may be whole when it is read again
                        self._broken += 1
                    self._place += len(line)
                    self._last = line
                    if content is not None:
                        yield content
        except FileNotFoundError:
            self._begin()
            forget()
            return
        except OSError as error:
            notes.append(f"{self.path.name} cannot be read: {error.strerror}.")
        if broken := self._broken + torn:
            are = "is" if broken == 1 else "are"
            notes.append(f"{self.path.name}: {counted(broken, 'line')} could not be read and {are} left out.")

    def _goes_on(self, file: BinaryIO) -> bool:
        """Whether what was read before is still there."""
        file.seek(self._place - len(self._last))
        return self._place > 0 and _inode(file) == self._inode and file.read(len(self._last)) == self._last


def _inode(file: BinaryIO) -> int:
    return fstat(file.fileno()).st_ino
