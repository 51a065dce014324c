"""The machines of a run as far as copies in memory go: who shares a folder, what lies where, who sends what to whom.

    machine      0            1            2
    its own      files 0, 1   files 2, 3   files 4, 5
    kept too     files 2, 3   files 4, 5   files 0, 1     those of the next machine

So any one machine, and any that are no neighbours, may be lost with their memory. Pure but for `machines_of`.
"""

import re
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from colonnade.mesh.agreement import gather_texts
from colonnade.mesh.files import Transfer
from colonnade.mesh.mesh import Axis

_OF_A_RANK = re.compile(r"__(\d+)_\d+\.distcp")  # as torch.distributed.checkpoint names a rank's file

Sizes = Mapping[str, int]
"""[bytes] Of files, by name."""
Machines = Sequence[Sequence[int]]
"""The ranks of each machine, in order."""


class Held(NamedTuple):
    """What one machine has of the copy of a step."""

    digest: str
    """Of the manifest; empty where there is none that can be read."""
    files: dict[str, int]
    """[bytes] What is there."""
    wanted: dict[str, int]
    """[bytes] What the copy consists of, as the manifest says."""


class Whole(NamedTuple):
    """A copy of which all files are somewhere."""

    step: int
    digest: str
    wanted: Sizes
    on: Mapping[str, Sequence[int]]
    """The machines that have a file, by its name."""
    manifests: Sequence[int]
    """The machines that have its manifest."""


def machines_of(folder: Path, world: Axis) -> Machines:
    """Ranks that see the same folder, on the same host, are on one machine; every rank calls this."""
    there = folder.stat()
    seen = gather_texts(f"{socket.gethostname()} {there.st_dev} {there.st_ino}", world)
    return [[rank for rank, each in enumerate(seen) if each == name] for name in dict.fromkeys(seen)]


def writer(name: str) -> int:
    """The rank that has written a file of a checkpoint: rank 0 what is no rank's share."""
    found = _OF_A_RANK.fullmatch(name)
    return int(found[1]) if found else 0


def is_share(name: str) -> bool:
    """Whether a file is what one rank has written of the tensors; the others are small, and everybody has them."""
    return _OF_A_RANK.fullmatch(name) is not None


def bytes_of_machines(own: Sequence[int], machines: Machines) -> list[int]:
    """[bytes] Of one copy on each machine, its neighbour's files included. `own`: what each rank writes."""
    each = [sum(own[rank] for rank in ranks) for ranks in machines]
    return [each[k] + (each[(k + 1) % len(each)] if len(each) > 1 else 0) for k in range(len(each))]


def to_neighbours(files: Sizes, machines: Machines) -> list[Transfer]:
    """What is sent when a copy has been written: to each machine what the next one's ranks have written, and to all
    what rank 0 has written besides.
    """
    at = {rank: k for k, ranks in enumerate(machines) for rank in ranks}
    found = []
    for name, size in files.items():
        k = at[writer(name)]
        others = [(k - 1) % len(machines)] if is_share(name) else range(len(machines))
        for other in others:
            if other != k:
                ranks = machines[other]
                found.append(Transfer(writer(name), ranks[machines[k].index(writer(name)) % len(ranks)], name, size))
    return found


def newest_whole(held: Sequence[Mapping[int, Held]], after: int) -> tuple[Whole | None, list[str]]:
    """The newest copy behind step `after` of which all files are somewhere; and what is said of newer ones. `held`: by
    step, of each machine.
    """
    said: list[str] = []
    for step in sorted({step for each in held for step in each if step > after}, reverse=True):
        lacks: Collection[str] = ()
        for digest in dict.fromkeys(each[step].digest for each in held if step in each and each[step].digest):
            whole = _gathered(step, digest, held)
            lacks = whole.wanted.keys() - whole.on.keys()
            if not lacks:
                return whole, said
        why = f"{len(lacks)} of its files are on no machine" if lacks else "no machine has a manifest that can be read"
        said.append(f"The copy of step {step} in memory is not whole: {why}.")
    return None, said


def _gathered(step: int, digest: str, held: Sequence[Mapping[int, Held]]) -> Whole:
    there = {k: each[step] for k, each in enumerate(held) if step in each and each[step].digest in (digest, "")}
    manifests = [k for k, each in there.items() if each.digest == digest]
    wanted = there[manifests[0]].wanted
    on = {name: [k for k, each in there.items() if each.files.get(name) == size] for name, size in wanted.items()}
    return Whole(step, digest, wanted, {name: each for name, each in on.items() if each}, manifests)


def to_those_that_lack(whole: Whole, needed: Sequence[Collection[str]], machines: Machines) -> list[Transfer]:
    """What is sent before a copy is read. `needed`: by each machine; small files go to all. Senders and receivers take
    turns.
    """
    found: list[Transfer] = []
    turns = [0] * len(machines)

    def next_of(k: int) -> int:
        turns[k] += 1
        return machines[k][turns[k] % len(machines[k])]

    for k, names in enumerate(needed):
        for name in _in_order(whole.wanted, names):
            if k not in whole.on[name]:
                source = min(whole.on[name], key=lambda other: (turns[other], other))
                found.append(Transfer(next_of(source), next_of(k), name, whole.wanted[name]))
    return found


def holders(whole: Whole, sent: Sequence[Transfer], machines: Machines) -> dict[str, list[int]]:
    """The ranks that see each file, when all has been sent."""
    at = {rank: k for k, ranks in enumerate(machines) for rank in ranks}
    on = {
        name: {*machines_with, *(at[t.target] for t in sent if t.name == name)}
        for name, machines_with in whole.on.items()
    }
    return {name: [rank for k in sorted(found) for rank in machines[k]] for name, found in on.items()}


def _in_order(files: Sizes, needed: Collection[str]) -> Iterator[str]:
    return (name for name in files if name in needed or not is_share(name))
