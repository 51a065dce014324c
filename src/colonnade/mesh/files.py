"""Files sent between ranks whose machines share none: in rounds, in each of which a rank sends one and receives one.

Blocks of a bounded size go through memory. Every rank knows the whole list of transfers, and so which are its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import IO, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.mesh.background import Group

BLOCK = 1 << 24
"""Bytes that are on their way at a time: so many are held for what a rank sends, and as many for what it receives."""


class Transfer(NamedTuple):
    """One file that one rank sends to another."""

    source: int
    target: int
    name: str
    size: int
    """[bytes]"""


def rounds(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    """The same transfers, each in the first round in which its source sends, and its target receives, nothing else."""
    found: list[list[Transfer]] = []
    sends: dict[int, set[int]] = {}
    receives: dict[int, set[int]] = {}
    for each in transfers:
        busy = sends.setdefault(each.source, set()) | receives.setdefault(each.target, set())
        number = next(n for n in range(len(found) + 1) if n not in busy)
        if number == len(found):
            found.append([])
        found[number].append(each)
        sends[each.source].add(number)
        receives[each.target].add(number)
    return found


def exchange(transfers: Sequence[Transfer], folder: Path, rank: int, group: Group | None) -> str:
    """Send from `folder` what this rank is the source of, and receive into `folder` what it is the target of; every
    rank calls this with the same list. What the file system refused, in words: then all was sent nonetheless, so that
    nobody waits, but is worth nothing. A file that is received has its name when it is whole.
    """
    problems: list[OSError] = []
    for each_round in rounds(transfers):
        out = next((each for each in each_round if each.source == rank), None)
        into = next((each for each in each_round if each.target == rank), None)
        _exchange_two(out, into, folder, group, problems)
    return str(problems[0]) if problems else ""


def broadcast(data: bytes, source: int, group: Group | None) -> bytes:
    """What rank `source` has, on every rank."""
    if group is None:
        return data
    size = torch.tensor([len(data)])
    dist.broadcast(size, source, group=group)
    sent = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == source:
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.broadcast(sent, source, group=group)
    return sent.numpy().tobytes()


def _exchange_two(
    out: Transfer | None, into: Transfer | None, folder: Path, group: Group | None, problems: list[OSError]
) -> None:
    file = None if into is None else _Received(folder / into.name, problems)
    for sent, received in zip_longest(_blocks(folder, out, problems), _spaces(into)):
        works = []
        if into is not None and received is not None:
            works.append(dist.irecv(received, into.source, group=group))
        if out is not None and sent is not None:
            works.append(dist.isend(sent, out.target, group=group))
        for work in works:
            assert work is not None, "this rank is in the group"
            work.wait()
        if file is not None and received is not None:
            file.write(received)
    if file is not None:
        file.close()


def _spaces(into: Transfer | None) -> Iterator[Tensor]:
    """Where the blocks of a file are received."""
    size = 0 if into is None else into.size
    for first in range(0, size, BLOCK):
        yield torch.zeros(min(BLOCK, size - first), dtype=torch.uint8)


def _blocks(folder: Path, out: Transfer | None, problems: list[OSError]) -> Iterator[Tensor]:
    """Those of a file to send; zeros from where on it cannot be read."""
    if out is None:
        return
    with ExitStack() as stack:
        file: IO[bytes] | None = None
        try:
            file = stack.enter_context((folder / out.name).open("rb"))
        except OSError as error:
            problems.append(error)
        for block in _spaces(out):
            try:
                if file is not None and file.readinto(block.numpy()) != len(block):  # type: ignore[attr-defined]
                    raise OSError(f"{folder / out.name} is shorter than {out.size} bytes")
            except OSError as error:
                problems.append(error)
                file = None
            yield block


class _Received:
    """A file that is received block by block, and has its name in the end. Of one that cannot be written nothing stays,
    and the rest is dropped.
    """

    def __init__(self, path: Path, problems: list[OSError]) -> None:
        self._path, self._partial = path, path.with_name(f"{path.name}.received")
        self._file: IO[bytes] | None = None
        self._problems = problems
        with self._noting():
            self._file = self._partial.open("wb")

    def write(self, block: Tensor) -> None:
        with self._noting():
            if self._file is not None:
                self._file.write(block.numpy().data)

    def close(self) -> None:
        with self._noting():
            if self._file is not None:
                self._file.close()
                self._partial.rename(self._path)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._problems.append(error)
            file, self._file = self._file, None
            with suppress(OSError):
                if file is not None:
                    file.close()  # which tries once more to write, and gives the space back whether it can or not
            with suppress(OSError):
                self._partial.unlink(missing_ok=True)
