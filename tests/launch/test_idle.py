"""Idle ranks stay until the run has ended, and rank 0 until they know that it has."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from colonnade.launch import idle


def test_rank_0_stays_until_all_idle_ranks_have_read_that_the_run_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it goes the store, where that is its own: who looks then ends with an error."""
    monkeypatch.setattr(idle, "TICK", 0.01)
    monkeypatch.setattr(idle, "PATIENCE", 60.0)
    store = HashStore()
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(idle.stay, store)
        told = threads.submit(idle.tell, store, 2)
        first.result()
        assert not told.done(), "one has not read it yet"
        idle.stay(store)
        told.result()


def test_rank_0_goes_on_waiting_when_the_first_of_two_idle_ranks_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time rank 0 waits, one more of them looks."""
    store, waits = HashStore(), list[float]()

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        idle.stay(store)

    monkeypatch.setattr(idle, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    idle.tell(store, 2)
    assert len(waits) == 2


def test_rank_0_waits_for_no_idle_rank_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    store, waits = HashStore(), list[float]()
    monkeypatch.setattr(idle, "time", SimpleNamespace(monotonic=lambda: float(len(waits)), sleep=waits.append))
    idle.tell(store, 0)
    assert store.check(["over"]) and waits == []


def test_rank_0_waits_in_vain_for_so_long_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    def sleep(_: float) -> None:
        now.append(now[-1] + 4.0)
        assert len(now) < 9, "it waits for ever"

    monkeypatch.setattr(idle, "time", SimpleNamespace(monotonic=lambda: now[-1], sleep=sleep))
    monkeypatch.setattr(idle, "PATIENCE", 10.0)
    idle.tell(HashStore(), 1)
    assert now == [100.0, 104.0, 108.0, 112.0]
