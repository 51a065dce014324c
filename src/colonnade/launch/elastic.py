"""Torchrun's key-value store, as one start of its ranks has it: under a name that no other start has.

Torchrun starts ranks again with the store of those before them (seen with torch 2.13, unless the environment has
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), and whoever reads a key there that an earlier start has written waits for ranks
that are gone. The number of the attempt names no start: where a machine is lost, others count differently. So rank 0
names it, and a name holds once every rank that it was made for has said so:

    each rank    writes a word that nobody else has
    rank 0       reads the words of all, and publishes them with a name; again, when one of them is another
    each rank    says yes to a name that was made with its word
    rank 0       has every yes: the name holds

A word of an earlier start cannot hold a name up for ever, since its rank writes a new one, nor make one hold, since
nobody says yes for it.
"""

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

START = "COLONNADE_START"  # the name of this start
TICK = 0.05
"""[seconds] Between two looks."""


def is_shared() -> bool:
    """Whether torchrun hands on its own store, with what ranks of earlier starts have left there."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_of_start(rank: int, size: int, timeout: float = 600.0) -> Any:
    """A connection to the store, with this start's own keys; every rank calls this. The first time the ranks agree on
    a name, for at most `timeout` seconds.
    """
    import torch.distributed as dist

    # A connection of its own: that of the process group is held by whatever waits on it.
    host, port, limit = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timedelta(seconds=timeout)
    store = dist.TCPStore(host, port, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]
    if is_shared() and START not in os.environ:
        os.environ[START] = agreed_name(store, rank, size, timeout)
    return dist.PrefixStore(f"colonnade/{os.environ.get(START, '')}", store)  # type: ignore[attr-defined]


def store_of_group(rank: int, size: int, timeout: float = 600.0, *, new: bool = False) -> Any:
    """The same, with keys of the process group that this rank forms now (`new`), or has formed last: a program may form
    one after the other, and in the store is where ranks were to be reached in those before.
    """
    import torch.distributed as dist

    store = store_of_start(rank, size, timeout)
    number = store.add(f"groups/{rank}", int(new))  # the same on all ranks, since all form every group
    return dist.PrefixStore(str(number), store)  # type: ignore[attr-defined]


def agreed_name(store: Any, rank: int, size: int, timeout: float) -> str:
    """The name of this start, the same on all of its `size` ranks. TimeoutError after `timeout` seconds."""
    end, word = time.monotonic() + timeout, uuid4().hex
    store.set(f"word/{rank}", word)
    look = _leader(store, size) if rank == 0 else _follower(store, rank, word)
    while (name := look()) is None:
        if time.monotonic() > end:
            raise TimeoutError(f"the {size} ranks that torchrun has started did not all come within {timeout:.0f} s")
        time.sleep(TICK)
    return name


def _leader(store: Any, size: int) -> Callable[[], str | None]:
    words, followers = [f"word/{rank}" for rank in range(size)], range(1, size)
    name, named = "", None

    def look() -> str | None:
        nonlocal name, named
        if not store.check(words):
            return None
        found = [each.decode() for each in store.multi_get(words)]
        if found != named:
            name, named = uuid4().hex, found
            store.set("name", json.dumps({"name": name, "words": found}))
        if followers and not store.check([f"yes/{name}/{rank}" for rank in followers]):
            return None
        store.set(f"holds/{name}", "1")
        return name

    return look


def _follower(store: Any, rank: int, word: str) -> Callable[[], str | None]:
    agreed = ""

    def look() -> str | None:
        nonlocal agreed
        if not store.check(["name"]):
            return None
        published = json.loads(store.get("name"))
        name, words = published["name"], published["words"]
        if name != agreed and words[rank : rank + 1] == [word]:
            store.set(f"yes/{name}/{rank}", "1")
            agreed = name
        return agreed if agreed and store.check([f"holds/{agreed}"]) else None

    return look
