"""--profile: parts that add up to the step, who waits for whom, and numbers that it does not change."""

import json
import mmap
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from colonnade.errors import ConfigError
from colonnade.mesh.clock import Clock, Span, own_seconds
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, paper_mesh
from colonnade.pipeline.runner import Runner
from colonnade.train.profile import Profile, TimedOwner, TimedRunner, memory_in_use
from colonnade.train.profile_report import merged, table
from colonnade.train.profiled_steps import steps_of
from tests import tiny
from tests.commands import forked
from tests.runs import events, metrics
from tests.told import Told


def test_own_times_add_up_to_the_outermost_span() -> None:
    clock = Clock()
    clock.begin("unit", "nobody times a step: nothing is written")
    clock.end()
    with clock.within("step", "1"), clock.within("action", "F0"):
        for name in ("a", "b"):
            with clock.within("unit", name):
                sum(range(1000))
    assert [(span.kind, span.parent) for span in clock.spans] == [("step", -1), ("action", 0), ("unit", 1), ("unit", 1)]
    own = own_seconds(clock.spans)
    assert sum(own) == pytest.approx(clock.spans[0].seconds, rel=1e-12) and min(own) >= 0
    assert own[2] == clock.spans[2].seconds and own[1] < clock.spans[1].seconds


def test_a_wait_has_the_axis_and_the_number_of_its_operation() -> None:
    """By which the spans of all ranks that meet in it are found."""
    clock = Clock()
    with clock.within("step", "1"):
        clock.begin("wait", "all_reduce tp", axis="tp", number=3)
        clock.end()
    assert [(span.axis, span.number) for span in clock.spans] == [("", 0), ("tp", 3)]


def test_a_device_is_waited_for_at_both_ends_of_a_span() -> None:
    waited: list[int] = []
    clock = Clock(lambda: waited.append(len(clock.spans)))
    with clock.within("step", "1"):
        pass
    assert waited == [0, 1]


@pytest.mark.parametrize(("text", "steps"), [(None, []), ("5", [5]), ("5:8", [5, 6, 7, 8])])
def test_which_steps(text: str | None, steps: list[int]) -> None:
    assert list(steps_of(text, last_step=8)) == steps


def test_as_many_steps_as_may_be() -> None:
    assert len(steps_of("1:50", last_step=50)) == 50
    with pytest.raises(ConfigError, match=r"--profile 50:51: the run ends with step 50 \(train\.steps\)"):
        steps_of("50:51", last_step=50)
    with pytest.raises(ConfigError, match=r"--profile 1{20}: the run ends with step 50"):
        steps_of("1" * 20, last_step=50)


@pytest.mark.parametrize(
    ("steps", "done", "left"),
    [(range(3, 5), 2, [3, 4]), (range(1, 4), 1, [2, 3]), (range(1, 4), 3, []), (range(0), 9, [])],
)
def test_steps_that_a_run_has_done_are_not_profiled_which_is_said(steps: range, done: int, left: list[int]) -> None:
    run: Any = SimpleNamespace(run=SimpleNamespace(folder="run"))
    told = Told()
    profile = Profile(steps, done, run, Mesh(), torch.device("cpu"), cast(Any, told))
    assert list(profile._steps) == left
    said = f"--profile 1:3: the run is at step {done}; what is before is not profiled."
    assert told.said == ([] if list(steps) == left else [said])


@pytest.mark.parametrize("text", ["", "0", "-1", "8:5", "a", "1:", "1:2:3", "1:51", f"1:{10**20}"])
def test_no_steps(text: str) -> None:
    with pytest.raises(ConfigError, match=r"names no steps. Give one, like --profile 5"):
        steps_of(text, last_step=99)


def test_ranks_of_every_axis_are_told() -> None:
    """Also of one that was made for stages that share a weight, whose waits would all count as moves otherwise."""
    mesh = paper_mesh(Layout(pp=3, dp=2), 3)
    mesh.holders([0, 1])
    profile: Any = SimpleNamespace(_mesh=mesh, _clock=Clock(), _done=[], _memory=[])
    groups = Profile._told(profile)["groups"]
    assert (groups["pp"], groups["ends"], groups["holders 0,1"]) == ([1, 3, 5], [3], [1, 3])


def test_a_rank_tells_its_place_on_each_axis() -> None:
    layout = Layout(tp=2, pp=3, dp=4)
    mesh = paper_mesh(layout, layout.rank_at(pp=2, dp=3, tp=1))
    profile: Any = SimpleNamespace(_mesh=mesh, _clock=Clock(), _done=[], _memory=[])
    told = Profile._told(profile)
    assert (told["rank"], told["coordinates"]) == (mesh.rank, {"pp": 2, "dp": 3, "tp": 1})


def test_a_rank_tells_by_how_much_its_clock_differs_from_the_systems() -> None:
    """By which the spans of ranks on two machines are laid side by side."""
    profile: Any = SimpleNamespace(_mesh=paper_mesh(Layout(), 0), _clock=Clock(), _done=[], _memory=[])
    before = time.time()
    now = Profile._told(profile)["epoch"] + time.perf_counter()
    assert before - 1e-3 <= now <= time.time() + 1e-3


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not tell what is in RAM")
def test_memory_of_a_process_is_what_it_has_touched() -> None:
    cpu, size = torch.device("cpu"), 64 << 20
    before = memory_in_use(cpu) or 0
    with mmap.mmap(-1, size) as room:
        asked_for = memory_in_use(cpu) or 0
        for at in range(0, size, mmap.PAGESIZE):
            room[at] = 1
        touched = memory_in_use(cpu) or 0
    assert before > 0 and abs(asked_for - before) < size / 4
    assert touched - asked_for == pytest.approx(size, rel=0.25)


def rank(number: int, spans: list[Span], **more: Any) -> dict[str, Any]:
    groups = {"tp": [0, 1], "pp": [number]}
    told = {"rank": number, "coordinates": {"pp": 0, "dp": 0, "tp": number}, "groups": groups, "steps": [7]}
    return {**told, "epoch": 100.0, "spans": [asdict(span) for span in spans], "memory": [], **more}


def step_with(start: float, arrives: float, leaves: float) -> list[Span]:
    """A step from `start` to 10: one unit, in it a collective over tp."""
    return [
        Span("step", "7", start, -1, 10.0),
        Span("action", "F0", start, 0, 9.0),
        Span("unit", "blocks.0", start, 1, 8.0),
        Span("wait", "all_reduce tp", arrives, 2, leaves, "tp", 3),
        Span("part", "optimizer", 9.0, 0, 9.5),
    ]


def test_who_comes_first_waits_for_the_last_and_then_both_move() -> None:
    profile, trace = merged([rank(0, step_with(0.0, 2.0, 6.0)), rank(1, step_with(0.0, 5.0, 6.0))])
    first, second = (each["parts"] for each in profile["ranks"])
    assert first == pytest.approx({"forward": 4.0, "optimizer": 0.5, "tp moves": 1.0, "wait for tp": 3.0, "rest": 1.5})
    assert second == pytest.approx({"forward": 7.0, "optimizer": 0.5, "tp moves": 1.0, "rest": 1.5})
    assert all(sum(each["parts"].values()) == pytest.approx(each["seconds"]) for each in profile["ranks"])
    assert profile["ranks"][0]["units"] == {"blocks.0": {"forward": pytest.approx(4.0)}}
    (row,) = profile["gantt"]["rows"]
    assert [(each["kind"], each["start"], each["end"]) for each in row["actions"]] == [
        ("F", pytest.approx(0.0), pytest.approx(8.0)),
        ("optimizer", pytest.approx(9.0), pytest.approx(9.5)),
    ]
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 1} and len(slices) == 10
    assert slices[0]["name"] == "step 7" and slices[0]["dur"] == pytest.approx(10e6)
    assert table(profile).splitlines()[-1].split()[:3] == ["together", "10.0000", "s"]


def test_of_several_steps_the_mean_is_told_for_units_too() -> None:
    """Two that are alike, a second after the other: each number is that of one."""
    once = step_with(0.0, 2.0, 6.0)
    again = [
        Span(**{**asdict(span), "start": span.start + 11, "end": span.end + 11, "parent": span.parent + 5})
        for span in once
    ]
    again[0].parent = -1
    (one,), (both,) = (
        merged([rank(0, spans, groups={"tp": [0]}, steps=steps)])[0]["ranks"]
        for spans, steps in ((once, [7]), ([*once, *again], [7, 8]))
    )
    assert both["units"] == {"blocks.0": {"forward": pytest.approx(one["units"]["blocks.0"]["forward"])}}
    assert both["parts"] == pytest.approx(one["parts"]) and both["seconds"] == pytest.approx(one["seconds"])


def test_clocks_of_two_machines_are_set_by_their_system_times() -> None:
    """The second one's clock began 50 s later: what it calls 5 is 55 on the first one's."""
    later = [
        Span(**{**asdict(span), "start": span.start - 50, "end": span.end - 50}) for span in step_with(0.0, 5.0, 6.0)
    ]
    profile, trace = merged([rank(0, step_with(0.0, 2.0, 6.0)), rank(1, later, epoch=150.0)])
    assert profile["ranks"][0]["parts"]["wait for tp"] == pytest.approx(3.0)
    begins = [event["ts"] for event in trace["traceEvents"] if event.get("cat") == "step"]
    assert begins == [0.0, 0.0], "the trace begins with the first step"


def test_a_step_takes_as_long_as_on_the_slowest_rank() -> None:
    profile, _ = merged([rank(0, step_with(2.0, 3.0, 6.0)), rank(1, step_with(0.0, 3.0, 6.0))])
    assert [each["seconds"] for each in profile["ranks"]] == [8.0, 10.0] and profile["seconds_per_step"] == 10.0


def test_the_table_has_a_rank_beside_the_least_and_the_most_of_all_the_rest_last() -> None:
    profile, _ = merged([rank(0, step_with(0.0, 2.0, 6.0)), rank(1, step_with(0.0, 5.0, 6.0))])
    assert [line.split() for line in table(profile).splitlines()[1:]] == [
        ["forward", "4.0000", "s", "40.0%", "4.0000", "s", "7.0000", "s"],
        ["optimizer", "0.5000", "s", "5.0%", "0.5000", "s", "0.5000", "s"],
        ["tp", "moves", "1.0000", "s", "10.0%", "1.0000", "s", "1.0000", "s"],
        ["wait", "for", "tp", "3.0000", "s", "30.0%", "0.0000", "s", "3.0000", "s"],
        ["rest", "1.5000", "s", "15.0%", "1.5000", "s", "1.5000", "s"],
        ["together", "10.0000", "s", "100.0%", "10.0000", "s", "10.0000", "s"],
    ]


def test_the_picture_has_a_row_for_each_stage_and_the_last_step() -> None:
    """Of a chunk that is not the first too; whoever is no first rank of a stage is left out."""
    late = step_with(1.0, 2.0, 6.0)
    late[1].name = "B3.1"
    places = {0: {"pp": 1, "dp": 0, "tp": 0}, 1: {"pp": 0, "dp": 0, "tp": 0}, 2: {"pp": 0, "dp": 1, "tp": 0}}
    profile, _ = merged(
        [
            rank(number, late if number == 0 else step_with(0.0, 5.0, 6.0), coordinates=place, steps=[7, 8])
            for number, place in places.items()
        ]
    )
    assert profile["steps"] == [7, 8]
    gantt = profile["gantt"]
    assert (gantt["step"], gantt["seconds"]) == (8, 10.0)
    assert [row["name"] for row in gantt["rows"]] == ["stage 0", "stage 1"]
    action = gantt["rows"][1]["actions"][0]
    assert action == {"kind": "B", "microbatch": 3, "chunk": 1, "start": 1.0, "end": 8.0}


def test_memory_is_told_with_its_peak_and_at_its_time_in_the_trace() -> None:
    memory = [(101.0, 5_000), (102.0, 9_000), (103.0, 2_000)]
    profile, trace = merged([rank(3, step_with(100.0, 101.0, 102.0), memory=memory, groups={})])
    (told,) = profile["ranks"]
    assert (told["name"], told["peak_memory_bytes"]) == ("rank 3 [pp0 dp0 tp3]", 9_000)
    counters = [(event["ts"], event["args"], event["pid"]) for event in trace["traceEvents"] if event["ph"] == "C"]
    assert counters == [(1e6, {"bytes": 5_000}, 3), (2e6, {"bytes": 9_000}, 3), (3e6, {"bytes": 2_000}, 3)]
    (name,) = (event for event in trace["traceEvents"] if event["name"] == "process_name")
    assert (name["pid"], name["args"]) == (3, {"name": "rank 3 [pp0 dp0 tp3]"})


def test_memory_that_cannot_be_told_is_no_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, which has no /proc."""

    def missing(_: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    noted: Any = SimpleNamespace(_memory=[], _device=torch.device("cpu"))
    Profile._note_memory(noted)
    profile, trace = merged([rank(0, step_with(100.0, 101.0, 102.0), memory=noted._memory, groups={})])
    assert noted._memory == [] and profile["ranks"][0]["peak_memory_bytes"] is None
    assert not [event for event in trace["traceEvents"] if event["ph"] == "C"]


@pytest.mark.slow
def test_two_stages_of_two_ranks(tmp_path: Path) -> None:
    """Parts add up to what the metrics say of the step; the numbers of the run are the same to the bit."""
    corpus = tiny.make(tmp_path / "corpus")
    config = tiny.write_config(corpus, tmp_path)
    wanted = ("train", config, "parallel.pp=2", "train.evaluate_every=0", "checkpoint.every=0")
    plain = forked(*wanted, f"run.folder={tmp_path / 'plain'}", num_ranks=2)
    run = tmp_path / "profiled"
    answer = forked(*wanted, f"run.folder={run}", "--profile", "3:4", num_ranks=2)
    assert (plain.status, answer.status) == (0, 0), answer.err
    assert "together" in answer.out and "trace.json for https://ui.perfetto.dev" in answer.out

    profile = json.loads((run / "profile.json").read_text())
    seconds = [json.loads(line)["seconds"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    mean = (seconds[2] + seconds[3]) / 2
    for each in profile["ranks"]:
        assert sum(each["parts"].values()) == pytest.approx(each["seconds"], abs=1e-9)
        assert {"forward", "backward", "optimizer", "data", "wait for pp"} <= set(each["parts"])
    assert profile["ranks"][0]["seconds"] == pytest.approx(mean, rel=0.1, abs=0.02)
    assert profile["steps"] == [3, 4] and len(profile["ranks"]) == 2
    assert set(profile["ranks"][1]["units"]) >= {"head", "blocks.1"}
    rows = profile["gantt"]["rows"]
    assert [row["name"] for row in rows] == ["stage 0", "stage 1"] and profile["gantt"]["step"] == 4
    assert [action["kind"] for action in rows[1]["actions"]] == ["F", "B", "F", "B", "optimizer"]
    trace = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in trace} == {"M", "X", "C"}
    assert [event["steps"] for event in events(run) if event["event"] == "profiled"] == [[3, 4]]
    assert sorted(path.name for path in (run / "profile").iterdir()) == ["rank_00000.json", "rank_00001.json"]
    assert not list(run.glob("rank_*"))

    without_times = [
        [{name: line[name] for name in ("step", "loss", "grad_norm")} for line in metrics(folder)]
        for folder in (run, tmp_path / "plain")
    ]
    assert without_times[0] == without_times[1]


@pytest.mark.slow
def test_zero_bubble_and_recomputation_have_their_parts(tmp_path: Path) -> None:
    corpus = tiny.make(tmp_path / "corpus")
    config, run = tiny.write_config(corpus, tmp_path), tmp_path / "run"
    extra = ("train.steps=2", "train.evaluate_every=0", "parallel.schedule=zero_bubble", "parallel.zero=3")
    assert forked("train", config, *extra, "--profile", "2").status == 0
    (told,) = json.loads((run / "profile.json").read_text())["ranks"]
    assert {"forward", "backward", "weight gradients"} <= set(told["parts"])
    assert sum(told["parts"].values()) == pytest.approx(told["seconds"], abs=1e-9)


@pytest.mark.slow
def test_steps_behind_the_end_are_refused_and_those_before_the_beginning_are_left_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--profile 6:7: the run ends with step 6"):
        steps_of("6:7", last_step=6)
    config = tiny.write_config(tiny.make(tmp_path / "corpus"), tmp_path)
    assert forked("train", config, "train.steps=2", "checkpoint.every=2").status == 0
    answer = forked("train", config, "train.steps=4", "--profile", "1:3")
    assert answer.status == 0 and "--profile 1:3: the run is at step 2; what is before is not profiled." in answer.out
    assert json.loads((tmp_path / "run/profile.json").read_text())["steps"] == [3, 3]


@pytest.mark.parametrize(("behind", "ends", "writes"), [(3, False, False), (3, True, True), (4, False, True)])
def test_a_profile_is_written_behind_its_last_step_or_where_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: int, ends: bool, writes: bool
) -> None:
    merged: list[Path] = []
    monkeypatch.setattr(Profile, "_merge", lambda self, folder: merged.append(folder))
    run: Any = SimpleNamespace(run=SimpleNamespace(folder=str(tmp_path)))
    profile = Profile(range(3, 5), 2, run, Mesh(), torch.device("cpu"), cast(Any, None))
    profile.finish(behind, ends=ends)
    assert merged == [], "no step has been timed"
    profile._done.append(3)
    monkeypatch.setattr(Profile, "_told", lambda self: {"steps": self._done})
    profile.finish(behind, ends=ends)
    profile.finish(behind, ends=ends)
    assert len(merged) == writes == len(list(tmp_path.rglob("rank_00000.json"))), "once"


class Owner:
    """Of units; tells how many spans were open when it was called."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.calls, self.more = clock, list[tuple[str, str, int]](), list[dict[str, object]]()

    def __getattr__(self, name: str) -> Any:
        def called(unit: str, **more: object) -> None:
            self.calls.append((name, unit, len(self._clock._open)))
            self.more.append(more)

        return called


def test_a_unit_is_at_work_between_what_its_owner_does_for_it() -> None:
    """Weights that are gathered before, and gradients that are sent behind it, are not its own."""
    clock = Clock()
    owner = Owner(clock)
    timed = TimedOwner(cast(Any, owner), clock)
    with clock.within("step", "1"):
        timed.acquire("blocks.0", gradients=True)
        timed.release("blocks.0")
        timed.open("blocks.0")
        timed.gradients_ready("blocks.0", last=False)
        timed.gradients_ready("blocks.1", last=True)
    assert [(span.kind, span.name) for span in clock.spans] == [("step", "1"), *[("unit", "blocks.0")] * 2]
    assert [(name, spans) for name, _, spans in owner.calls] == [
        ("acquire", 1), ("release", 1), ("open", 1), ("gradients_ready", 1), ("gradients_ready", 1)
    ]  # fmt: skip
    assert owner.calls[-1][1] == "blocks.1"
    assert owner.more == [{"gradients": True}, {}, {}, {"last": False}, {"last": True}]


def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Profile, Mesh, Any, Told]:
    """A profile of steps 3 and 4, its mesh, a state behind step 2, and what is told."""
    run: Any = SimpleNamespace(run=SimpleNamespace(folder=str(tmp_path)))
    mesh, told = Mesh(), Told()
    state = SimpleNamespace(step=2, runner=SimpleNamespace(chunks=[SimpleNamespace(owner="owner")]))
    monkeypatch.setattr(TimedRunner, "of", lambda runner, clock, memory: memory() or "timed")
    return Profile(range(3, 5), 2, run, mesh, torch.device("cpu"), cast(Any, told)), mesh, state, told


def test_a_run_is_timed_in_the_steps_that_were_asked_for_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, mesh, state, _ = watched(tmp_path, monkeypatch)
    runner, timed = state.runner, []
    for state.step in range(1, 6):
        with profile.step(state):
            timed.append((state.step + 1, state.runner == "timed", mesh.ledger.clock is not None))
        assert state.runner is runner and mesh.ledger.clock is None and runner.chunks[0].owner == "owner"
    assert [number for number, *is_timed in timed if all(is_timed)] == profile._done == [3, 4]
    assert [any(is_timed) for _, *is_timed in timed] == [False, True, True, False, False]
    (third, fourth), noted = profile._clock.spans, [moment for moment, _ in profile._told()["memory"]]
    assert [third.name, fourth.name] == ["3", "4"]
    assert noted == sorted(noted) and len(noted) == 2 and third.end <= noted[1] <= fourth.start


def test_a_step_that_failed_is_no_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made again behind a rollback, and counts once."""
    profile, mesh, state, _ = watched(tmp_path, monkeypatch)
    runner = state.runner
    with pytest.raises(RuntimeError, match="lost"), profile.step(state):
        raise RuntimeError("lost")
    assert profile._done == [] == profile._clock.spans
    assert state.runner is runner and mesh.ledger.clock is None and runner.chunks[0].owner == "owner"
    with profile.step(state):
        pass
    assert profile._done == [3] and len(profile._clock.spans) == 1


def test_what_came_of_a_profile_is_an_event_of_its_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, _, state, told = watched(tmp_path, monkeypatch)
    for state.step in (2, 3):
        with profile.step(state):
            pass
    monkeypatch.setattr("colonnade.train.profile.table", lambda found: f"rank {found}")
    monkeypatch.setattr("colonnade.train.profile.merged", lambda ranks: ([each["rank"] for each in ranks], "trace"))
    profile.finish(4)
    assert told.events == [("profiled", {"step": 4, "steps": [3, 4]})]
    assert told.said[0] == "rank [0]" and told.said[1].startswith(f"Profiled 2 steps: {tmp_path / 'trace.json'} for ")
    assert json.loads((tmp_path / "profile.json").read_text()) == [0]
    assert json.loads((tmp_path / "trace.json").read_text()) == "trace"


def test_wrong_steps_are_told_without_torch(tmp_path: Path) -> None:
    code = "import sys; from colonnade.train import profiled_steps; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def step_of_units(start: float, first: int) -> list[Span]:
    """A step of four seconds: two units in its one action, and the optimizer."""
    units = [("unit", f"blocks.{layer}", 1) for layer in range(2)]
    kinds = [("step", "7", -1), ("action", "F0", 0), *units, ("part", "optimizer", 0)]
    ends = [(0.0, 4.0), (0.0, 3.0), (0.0, 1.0), (1.5, 3.0), (3.0, 3.5)]
    return [
        Span(kind, name, start + at, parent + first if parent >= 0 else -1, start + end)
        for (kind, name, parent), (at, end) in zip(kinds, ends, strict=True)
    ]


def test_of_two_steps_the_picture_has_the_last_from_its_first_unit_to_its_last() -> None:
    spans = [*step_of_units(0.0, 0), *step_of_units(10.0, 5)]
    gantt = merged([rank(0, spans, steps=[7, 8])])[0]["gantt"]
    assert (gantt["step"], gantt["seconds"]) == (8, 4.0)
    assert gantt["rows"][0]["actions"] == [
        {"kind": "F", "microbatch": 0, "chunk": 0, "start": 0.0, "end": 3.0},
        {"kind": "optimizer", "start": 3.0, "end": 3.5},
    ]


def test_what_crosses_two_stages_is_a_wait_as_a_whole() -> None:
    """And of no other transfer: they have no number by which ranks would meet in them."""
    sent = [Span("step", "7", 0.0, -1, 10.0), Span("wait", "send pp", 1.0, 0, 4.0, "pp", 0)]
    (told,) = merged([rank(0, sent, groups={"pp": [0, 1]})])[0]["ranks"]
    assert told["parts"] == pytest.approx({"wait for pp": 3.0, "rest": 7.0})


def test_a_rank_waits_at_most_as_long_as_it_stood_in_the_operation() -> None:
    """Clocks of two machines differ: the other one's may say that it came when this one had left."""
    profile, _ = merged([rank(0, step_with(0.0, 2.0, 4.0)), rank(1, step_with(0.0, 7.0, 7.5))])
    assert profile["ranks"][0]["parts"]["wait for tp"] == pytest.approx(2.0)
    assert sum(profile["ranks"][0]["parts"].values()) == pytest.approx(10.0)


@pytest.mark.parametrize(("num_chunks", "name"), [(1, "B3"), (2, "B3.1")])
def test_each_action_is_timed_by_its_name_and_its_memory_noted(
    num_chunks: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages of several chunks say which it was of."""
    clock, done = Clock(), list[Any]()
    nobody: Any = None
    runner = Runner([nobody] * num_chunks, (), nobody, nobody, nobody, "1f1b", torch.device("cpu"))
    monkeypatch.setattr(Runner, "do", lambda self, *given, last: (done.append((len(clock._open), last)), "made")[1])
    timed = TimedRunner.of(runner, clock, lambda: done.append("memory"))
    with clock.within("step", "1"):
        action: Any = SimpleNamespace(kind="B", microbatch=3, chunk=1)
        assert cast(Any, timed).do(action, nobody, nobody, last=True) == "made"
    assert [span.name for span in clock.spans] == ["1", name] and done == [(2, True), "memory"]
