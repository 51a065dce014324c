"""What ranks tell each other about themselves, to prove that they are ranks of one run.

Each rank has properties, a text by name. All ranks gather a digest of them, 32 bytes a rank; only where digests differ
do they gather the texts as well, so that every rank can name what differs, and where.
"""

import hashlib
import json
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.mesh.background import Group
from colonnade.mesh.collectives import all_gather, broadcast_
from colonnade.mesh.ledger import Ledger
from colonnade.mesh.mesh import Axis
from colonnade.mesh.transport import Groups, TorchTransport

Properties = dict[str, str]
NONE = "(none)"  # what a rank has that lacks a property


def all_ranks(group: Group | None = None) -> Axis:
    """All ranks that have connected, whatever layout each of them believes in, over `group`, which has all of them;
    None: over the one that they have connected with.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return Axis("world")
    group = group or dist.group.WORLD
    assert group is not None, "ranks have connected"
    rank, size = dist.get_rank(), dist.get_world_size()
    transport = TorchTransport("world", Groups(group, group, group), size, Ledger())
    return Axis("world", size, rank, tuple(range(size)), transport)


def gather_texts(text: str, axis: Axis) -> list[str]:
    """Every rank's text, in the order of ranks. Sends the longest of them, through CPU memory."""
    mine = _as_tensor(text)
    lengths = all_gather(torch.tensor([len(mine)]), axis).tolist()
    padded = torch.zeros(1, max(lengths), dtype=torch.uint8)
    padded[0, : len(mine)] = mine
    rows = all_gather(padded, axis).numpy()
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]


def broadcast_text(text: str, axis: Axis) -> str:
    """The first rank's text, on every rank; what the others have does not count. Sends it, through CPU memory."""
    mine = _as_tensor(text)
    length = int(broadcast_(torch.tensor([len(mine)]), axis))
    sent = mine if axis.rank == 0 else torch.zeros(length, dtype=torch.uint8)
    return broadcast_(sent, axis).numpy().tobytes().decode()


def _as_tensor(text: str) -> Tensor:
    data = bytearray(text.encode())
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)


def disagreements(properties: Mapping[str, str], axis: Axis) -> dict[str, dict[str, list[int]]]:
    """The properties that are not the same on all ranks: name -> value -> its ranks. Equal on all ranks; empty is best.

    Sends 32 bytes, and the properties where some differ.
    """
    text = json.dumps(properties)
    digest = torch.frombuffer(bytearray(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8)
    digests = all_gather(digest[None], axis)
    if bool((digests == digests[0]).all()):
        return {}
    gathered: list[Properties] = [json.loads(theirs) for theirs in gather_texts(text, axis)]
    names = dict.fromkeys(name for theirs in gathered for name in theirs)
    found = {name: _ranks_by_value([theirs.get(name, NONE) for theirs in gathered]) for name in names}
    return {name: ranks for name, ranks in found.items() if len(ranks) > 1}


def _ranks_by_value(values: list[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks
