"""Ranks that torchrun has started and that the layout leaves idle: they stay until the run has ended.

rank 0       the run is over ──▶ store ──▶ waits for the idle ones to have read it: the store may be its own
idle rank    reads it ──▶ says so ──▶ ends
"""

import time
from typing import Any

TICK = 1.0  # seconds between looks of a rank that has nothing to do
PATIENCE = 10.0  # seconds for idle ranks to read that the run is over
_OVER, _READ = "over", "read"


def tell(store: Any, num_idle: int) -> None:
    """On rank 0: idle ranks may end. Returns when all of them know it, or after some seconds."""
    store.set(_OVER, "1")
    end = time.monotonic() + PATIENCE
    while store.add(_READ, 0) < num_idle and time.monotonic() < end:
        time.sleep(TICK / 10)


def stay(store: Any) -> None:
    """On an idle rank: return when the run is over. One that leaves would count as one that has finished its work."""
    while not store.check([_OVER]):
        time.sleep(TICK)
    store.add(_READ, 1)
