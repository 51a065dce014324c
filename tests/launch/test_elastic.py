"""A start of torchrun's ranks has a name of its own in a store that earlier starts have used."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
from torch.distributed import HashStore, TCPStore

from colonnade.launch.elastic import START, agreed_name, store_of_group


def started(store: HashStore, size: int, ranks: Sequence[int]) -> list[str]:
    """The names that ranks of a start agree on, each in a thread."""
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: agreed_name(store, rank, size, 20.0), ranks))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_have_one_name_and_each_start_another(size: int) -> None:
    store, names = HashStore(), []
    for ranks in (range(size), reversed(range(size)), range(size)):
        (name,) = set(started(store, size, list(ranks)))
        names.append(name)
    assert len(set(names)) == 3


def test_a_name_of_ranks_that_are_gone_does_not_hold() -> None:
    """Two of three ranks died while they came together; of the next start rank 0 comes first, and reads their words."""
    store = HashStore()
    for rank in (1, 2):
        with pytest.raises(TimeoutError, match="3 ranks"):
            agreed_name(store, rank, 3, 0.0)
    late = Event()
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(agreed_name, store, 0, 3, 20.0)
        late.wait(0.3)
        assert not first.done(), "nobody has said yes"
        others = [threads.submit(agreed_name, store, rank, 3, 20.0) for rank in (2, 1)]
        assert {first.result()} == {each.result() for each in others}


def test_who_has_agreed_to_a_name_that_does_not_hold_agrees_to_the_next() -> None:
    """The last of three comes when the others have a name, made with its word of the start before."""
    store = HashStore()
    with pytest.raises(TimeoutError, match="3 ranks"):
        agreed_name(store, 2, 3, 0.0)
    with ThreadPoolExecutor(3) as threads:
        first = [threads.submit(agreed_name, store, rank, 3, 20.0) for rank in (0, 1)]
        while store.num_keys() < 5 and not first[1].done():  # three words, a name, and a yes to it
            time.sleep(0.01)
        last = threads.submit(agreed_name, store, 2, 3, 20.0)
        assert {each.result() for each in first} == {last.result()}


def test_fewer_ranks_start_again() -> None:
    store = HashStore()
    (before,) = set(started(store, 4, range(4)))
    (after,) = set(started(store, 2, range(2)))
    assert before != after


def test_each_group_of_a_rank_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a program joins its ranks again, the store has the addresses of the group before."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), START: "start"}.items():
        monkeypatch.setenv(name, value)
    for number in range(3):
        first, second = (store_of_group(rank, 2, 20.0, new=True) for rank in range(2))
        assert not second.check(["address"])
        first.set("address", str(number))
        assert second.get("address") == store_of_group(1, 2).get("address") == str(number).encode()
