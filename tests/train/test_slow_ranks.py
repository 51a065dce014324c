"""Slow ranks are named by what they do themselves, not by how long a step takes: all wait for them."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from colonnade.config.schema import RunConfig
from colonnade.mesh import ledger as ledger_module
from colonnade.mesh.clock import Clock
from colonnade.mesh.layout import Layout
from colonnade.mesh.ledger import Entry, Ledger
from colonnade.mesh.mesh import Axis, Mesh, paper_mesh
from colonnade.train import slow_ranks
from colonnade.train.slow_ranks import FIRST_STEPS, Pace, SlowRanks, paces, slow
from tests.commands import forked
from tests.runs import events, metrics
from tests.told import Told

STEP = 1.0
LAYOUTS = st.builds(Layout, tp=st.integers(1, 3), pp=st.integers(1, 3), dp=st.integers(1, 3))
SECONDS = st.floats(1e-4, 1e3)


def named(seconds: list[float], layout: Layout, factor: float = 1.5) -> set[int]:
    return slow(paces(seconds, layout.groups("dp", "tp")), factor)


@given(LAYOUTS, SECONDS, st.data())
def test_nobody_is_slow_where_each_stage_is_even(layout: Layout, seconds: float, data: st.DataObject) -> None:
    of_stage = data.draw(st.lists(SECONDS, min_size=layout.pp, max_size=layout.pp))
    uneven = [seconds * of_stage[layout.coordinates(rank)["pp"]] for rank in range(layout.num_ranks)]
    assert named(uneven, layout) == set()


@given(st.data(), st.randoms(use_true_random=False))
def test_the_order_of_peers_does_not_matter(data: st.DataObject, chance: Random) -> None:
    layout = Layout(dp=6)
    seconds = data.draw(st.lists(SECONDS, min_size=6, max_size=6))
    order = list(range(6))
    chance.shuffle(order)
    assert {order[rank] for rank in named([seconds[rank] for rank in order], layout)} == named(seconds, layout)


@given(st.lists(st.floats(0.9, 1.1), min_size=4, max_size=12), st.integers(0, 11), st.floats(2.0, 100.0), SECONDS)
def test_one_that_takes_much_longer_is_named_alone_at_any_scale(
    near: list[float], at: int, times: float, scale: float
) -> None:
    at %= len(near)
    seconds = [scale * each * (times if rank == at else 1.0) for rank, each in enumerate(near)]
    assert named(seconds, Layout(dp=len(near))) == {at}


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.25, 3.0]), min_size=1, max_size=9))
def test_peers_are_the_others(seconds: list[float]) -> None:
    """Also where several take as long; who has none, or peers that do nothing, is held against nobody."""
    ranks = range(len(seconds))
    others = {rank: seconds[:rank] + seconds[rank + 1 :] for rank in ranks}
    medians = {rank: statistics.median(left) for rank, left in others.items() if left}
    expected = {rank: median for rank, median in medians.items() if median > 0}
    assert {rank: pace.peers for rank, pace in paces(seconds, [ranks]).items()} == expected


def test_ranks_are_put_in_order_once() -> None:
    """A stage may have thousands, and every rank judges all of them."""
    compared = []

    class Seconds(float):
        def __lt__(self, other: float) -> bool:
            compared.append(self)
            return float(self) < float(other)

    chance, count = Random(1), 256
    paces([Seconds(chance.random()) for _ in range(count)], [range(count)])
    assert len(compared) < count * 30


def test_a_rank_is_held_against_its_stage_and_a_pair_against_each_other() -> None:
    layout = Layout(pp=2, dp=2)
    assert named([1.0, 1.0, 5.0, 5.0], layout) == set()
    assert named([1.0, 2.0, 9.0, 5.0], layout) == {1, 2}
    assert paces([1.0, 2.0, 9.0, 5.0], layout.groups("dp", "tp"))[2] == Pace(9.0, 5.0)
    assert named([1.0, 9.0], Layout(pp=2)) == set(), "nobody does what another does"
    assert named([1.0, 1.5], Layout(dp=2)) == {1}, "as long as is called slow"
    assert named([0.0, 0.0, 1.0], Layout(dp=3)) == set(), "a clock that stands still names nobody"


# --- from waits to names ----------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the time is, for the ledger and for who watches."""
    now = [0.0]
    for module in (ledger_module, slow_ranks):
        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])  # type: ignore[attr-defined]
        monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])  # type: ignore[attr-defined]
    return now


def watched(every: int, rank: int, layout: Layout) -> tuple[SlowRanks, Mesh, Told]:
    told, mesh = Told(), paper_mesh(layout, rank)
    return SlowRanks(RunConfig(folder="run", slow_ranks_every=every), mesh, told), mesh, told  # type: ignore[arg-type]


def entry() -> Entry:
    return Entry("all_reduce", "dp", (1,), "float32", 4, "here.py:1", False, 0.0)


def spend(clock: list[float], ledger: Ledger, own: float, waits: float) -> None:
    clock[0] += own
    ledger.wait(entry(), lambda: clock.__setitem__(0, clock[0] + waits))


def test_own_seconds_are_those_without_waiting(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of a step take equally long; a window has each rank's median, and the first steps do not count."""
    sent: list[list[float]] = []
    watch, mesh, _ = watched(3, 1, Layout(dp=2))
    monkeypatch.setattr(slow_ranks, "all_reduce", lambda x, axis, op: sent.append(x.reshape(-1).tolist()) or x)
    for own in (*[0.9] * FIRST_STEPS, 0.25, 0.25, 0.75):
        with watch.step():
            spend(clock, mesh.ledger, own, STEP - own)
        clock[0] += 100.0  # an evaluation, or a save
        assert watch.largest(1, 8) == 1
    assert sent == [[1.0]] * (FIRST_STEPS + 2) + [[1.0, 0.0, 0.25]]


def test_a_step_that_is_profiled_does_not_count(clock: list[float]) -> None:
    """It waits for the device all the time."""
    watch, mesh, _ = watched(3, 0, Layout(dp=2))
    watch._uncounted = 0
    for profiled, own in ((None, 0.25), (Clock(), 5.0), (None, 0.5)):
        mesh.ledger.clock = profiled
        with watch.step():
            spend(clock, mesh.ledger, own, 0.0)
    assert watch._own == [0.25, 0.5]


def test_who_is_named_is_named_once_and_said_to_be_well_again(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch, mesh, told = watched(2, 0, Layout(dp=3))
    theirs = [0.0]
    monkeypatch.setattr(slow_ranks, "gather_texts", lambda text, axis: ["near", "near", "far"])

    def reduced(x: Tensor, axis: Axis, op: str) -> Tensor:
        return x + 2 if not x.ndim else x.new_tensor([2, 0.1, 0.1, theirs[0]])

    monkeypatch.setattr(slow_ranks, "all_reduce", reduced)
    watch._uncounted = 0
    for step, theirs[0] in enumerate([0.1, 0.1, 0.4, 0.4, 0.5, 0.5, 0.12, 0.12], 1):
        with watch.step():
            spend(clock, mesh.ledger, 0.1, 0.4)
        assert watch.largest(0, step) == 2
    assert [(kind, details["step"], details["factor"]) for kind, details in told.events] == [
        ("slow rank", 4, 4.0),
        ("rank well again", 8, 1.2),
    ]
    assert told.events[0][1]["rank"] == 2 and told.events[0][1]["host"] == "far"
    assert told.events[0][1]["place"] == {"pp": 0, "dp": 2, "tp": 0}
    assert (told.events[0][1]["seconds"], told.events[0][1]["of_peers"]) == (0.4, 0.1)
    assert told.said[1].startswith("[pp0 dp2 tp0] rank 2 on far is well again: by step 8 ")
    assert told.said[0] == (
        "[pp0 dp2 tp0] rank 2 on far is slow: by step 4 its own part of a step takes 0.4 s, 4.00 × the 0.1 s of those "
        "that do the same work."
    )


def test_a_slow_rank_stays_slow_while_the_clocks_of_its_peers_stand_still() -> None:
    """There is nothing to hold it against; it is well again when there is."""
    watch, _, told = watched(2, 0, Layout(dp=2))
    for step, seconds in ((2, [0.1, 0.4]), (4, [0.0, 0.4]), (6, [0.1, 0.1])):
        watch._judge(paces(seconds, [[0, 1]]), step)
    assert [(kind, details["rank"], details["step"]) for kind, details in told.events] == [
        ("slow rank", 1, 2),
        ("rank well again", 1, 6),
    ]


@pytest.mark.parametrize(("every", "layout"), [(0, Layout(dp=2)), (2, Layout(pp=2)), (2, Layout())])
def test_off_and_without_peers_nothing_is_measured(every: int, layout: Layout) -> None:
    watch, mesh, _ = watched(every, 0, layout)
    assert mesh.ledger.stalls is None
    for _ in range(FIRST_STEPS + 3):
        with watch.step():
            pass
    assert watch._own == []


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=2), Layout(tp=2, pp=2)])
def test_ranks_of_one_stage_are_peers_whichever_axis_they_differ_in(layout: Layout) -> None:
    _, mesh, _ = watched(2, 0, layout)
    assert mesh.ledger.stalls == [], "what it stands still is measured"


class Moment:
    """An event of a device, in milliseconds."""

    def __init__(self, at: float, reached: bool = True) -> None:
        self.at, self.reached = at, reached

    def query(self) -> bool:
        return self.reached

    def elapsed_time(self, other: "Moment") -> float:
        return other.at - self.at


def test_a_device_that_stood_still_is_counted_when_it_has_come_to_the_end_of_it() -> None:
    late = Moment(900.0, reached=False)
    ledger = Ledger(stalls=[(Moment(0.0), Moment(250.0)), (Moment(400.0), late)])
    assert ledger.stood_still() == 0.25 == ledger.stood_still()
    late.reached = True
    assert ledger.stood_still() == 0.75 and ledger.stalls == []


# --- real ranks -------------------------------------------------------------------------------------------------------


def sleeping(seconds: Callable[[int, int], float]) -> Callable[[int], None]:
    """In a rank: before each step, sleep as long as is given for (rank, step)."""

    def first(rank: int) -> None:
        from colonnade.train import loop

        train_step = loop.train_step

        def later(state: Any, *args: Any, **more: Any) -> Any:
            time.sleep(seconds(rank, state.step + 1))
            return train_step(state, *args, **more)

        loop.__dict__["train_step"] = later

    return first


def keys(steps: int, run: Path) -> list[str]:
    watch = ["run.slow_ranks_every=3", "run.slow_ranks_factor=3.0", "train.evaluate_every=0", "checkpoint.every=0"]
    return [f"train.steps={steps}", f"run.folder={run}", *watch]


@pytest.mark.slow
def test_a_rank_that_sleeps_is_named_until_it_is_well(config: Path, tmp_path: Path) -> None:
    """All sleep a little: a step of so small a model takes three times as long by chance where a machine is busy."""

    def seconds(rank: int, step: int) -> float:
        if step <= FIRST_STEPS:
            return 0.0
        return 2.0 if rank == 1 and step <= FIRST_STEPS + 3 else 0.4

    first = sleeping(seconds)
    slow_run, even = tmp_path / "slow", tmp_path / "even"
    answer = forked("train", config, *keys(11, slow_run), "parallel.dp=2", num_ranks=2, first=first)
    assert answer.status == 0 and "[pp0 dp1 tp0] rank 1 on" in answer.out
    told = [event for event in events(slow_run) if event["event"] in ("slow rank", "rank well again")]
    assert [(event["event"], event["rank"], event["step"]) for event in told] == [
        ("slow rank", 1, 8),
        ("rank well again", 1, 11),
    ]
    assert told[0]["factor"] > 3 and told[0]["seconds"] >= 1.5
    answer = forked("train", config, *keys(11, even), "run.slow_ranks_every=0", "parallel.dp=2", num_ranks=2)
    assert answer.status == 0 and metrics(even) == metrics(slow_run)


@pytest.mark.slow
def test_stages_of_unequal_work_and_those_who_wait_are_not_named(config: Path, tmp_path: Path) -> None:
    """The second stage takes longer than the first, and one of its two ranks several times as long as the other."""
    first = sleeping(lambda rank, step: {0: 0.1, 1: 0.1, 2: 0.4, 3: 3.0}[rank] if step > FIRST_STEPS else 0.0)
    layout = ["parallel.pp=2", "parallel.dp=2"]
    answer = forked("train", config, *keys(8, tmp_path / "run"), *layout, num_ranks=4, first=first)
    assert answer.status == 0
    assert [event["rank"] for event in events(tmp_path / "run") if event["event"] == "slow rank"] == [3]
