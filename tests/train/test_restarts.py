"""A local run that comes back by itself: from where, on which places, and what it tells."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from colonnade.config.load import load
from colonnade.errors import LayoutError
from colonnade.launch import launch
from colonnade.launch.supervisor import CRASH, EXCEPTION, MISTAKE, UNFINISHED, WAIT, Cause, Ended
from colonnade.report.page import state_of
from colonnade.report.record import read_run
from colonnade.train import memory_folder, restarts
from colonnade.train.change import BATCH, Change
from colonnade.train.change_requests import Decided, write_decided
from colonnade.train.interrupt import STOPPED, Interrupt, Request
from colonnade.train.monitor import last_step
from colonnade.train.restarts import POLL, TRIES, Restarts, kind_of
from colonnade.train.save_retries import SaveRetries
from tests.commands import environment, forked, ranks_of
from tests.runs import metrics

LOST = "Run the same command again"
FOUR = ["parallel.tp=2", "parallel.dp=2"]


def killed(rank: int) -> Ended:
    return Ended(137, 0, Cause(rank, CRASH, f"rank {rank} was killed"))


def raised(said: str) -> Ended:
    return Ended(1, 0, Cause(0, EXCEPTION, said))


DONE = Ended(0, 0, None)


@dataclass
class Fake:
    """Ranks that end as they are told to. What was started: places, overrides, and whether GPUs were chosen."""

    ends: Iterator[Callable[[Path], Ended]]
    run: Path
    started: list[tuple[tuple[int, ...], list[str], bool]] = field(default_factory=list)
    began: list[float | None] = field(default_factory=list)
    slept: list[float] = field(default_factory=list)
    """[seconds]"""
    faults: list[tuple[float, int] | None] = field(default_factory=list)
    """When the fault before was noticed, and the last step before it."""
    recalls: list[float | None] = field(default_factory=list)
    """[seconds] After which all ranks were to be tried again; None: all were there."""
    handed: list[dict[str, object]] = field(default_factory=list)
    """What else ranks were started with."""

    def __call__(
        self,
        places: Sequence[int],
        command: list[str],
        *,
        at: Any,
        choose_gpus: bool,
        began: Any,
        fault: Any,
        **more: object,
    ) -> Ended:
        self.began.append(began)
        self.handed.append(more)
        self.faults.append(fault)
        self.recalls.append(None if at is None else at[0])
        self.started.append((tuple(places), command[1:], choose_gpus))
        if at is not None:
            at[1]()  # the time is over at once
        return next(self.ends)(self.run)


def after(ended: Ended, saved: int = 0) -> Callable[[Path], Ended]:
    """A run that makes progress to a step, saves it, and ends so."""

    def make(run: Path) -> Ended:
        (run / "checkpoints" / f"step_{saved:08d}").mkdir(parents=True, exist_ok=True)
        (run / "metrics.jsonl").write_text(json.dumps({"step": saved + 1}) + "\n")
        if ended.status == UNFINISHED:
            (run / "leave").unlink()
        return ended

    return make


@pytest.fixture
def fake(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Fake]]:
    def run(
        *ends: Callable[[Path], Ended], keys: Sequence[str] = (), gpus: Iterable[int] = (), last: bool = True
    ) -> tuple[int, Fake]:
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        (folder / "lock").touch()
        made = Fake(iter(ends), folder)
        monkeypatch.setattr(restarts.launch, "run_on", made)
        monkeypatch.setattr(restarts.time, "sleep", made.slept.append)
        settings = load(config, [f"run.folder={folder}", "restarts.wait_for_ranks=0", *FOUR, *keys])
        counted = iter(gpus)
        monkeypatch.setattr(restarts, "count_gpus", lambda: next(counted) if gpus else 0)
        monkeypatch.setattr(restarts, "gpus_now", lambda: next(counted))
        supervised = Restarts(settings, ["train"], "text", (7,), lambda: LOST, ["some.module"], last)
        return supervised.run(), made

    return run


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def names(run: Path) -> list[str]:
    return [event["event"] for event in events(run)]


def test_a_run_that_ends_well_is_started_once(fake: Any) -> None:
    status, made = fake(after(DONE))
    assert status == 0 and made.started == [((0, 1, 2, 3), [], False)]
    assert not (made.run / "events.jsonl").exists()


def test_one_that_fails_is_started_again_and_says_so(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, made = fake(after(killed(2), 10), after(DONE, 20))
    assert status == 0 and len(made.started) == 2
    for handed in made.handed:
        assert (handed["file"], handed["keep"], handed["imports"]) == ("text", (7,), ["some.module"])
    fault, restart = events(made.run)
    assert (fault["event"], fault["what"], fault["place"], fault["step"]) == ("fault", "killed", 2, 11)
    assert restart["reason"] == "restart 1 of 3 without a new checkpoint, from step 10" and restart["wait"] == 0
    assert restart["saved"] == 10
    assert "rank 2 was killed: restart 1 of 3" in capsys.readouterr().err


def test_a_mistake_is_not(fake: Any) -> None:
    status, made = fake(after(Ended(2, 0, Cause(0, MISTAKE, "ConfigError: no"))))
    assert status == 2 and names(made.run) == ["fault", "no restart"]


def refused(name: str = "DiskError", order: int = MISTAKE) -> Ended:
    return Ended(2, 0, Cause(0, order, f"rank 0 raised {name}: config.toml cannot be written: No space left", 7.0))


@pytest.mark.parametrize("order", [MISTAKE, EXCEPTION])
def test_what_a_disk_refuses_behind_the_first_start_is_waited_out(
    fake: Any, capsys: pytest.CaptureFixture[str], order: int
) -> None:
    """A disk that is full for an hour and a rank that dies meanwhile end no night; they are no restarts without
    progress either.
    """
    full = [after(refused(order=order), 10)] * 4
    status, made = fake(after(killed(2), 10), *full, after(killed(2), 10), after(DONE, 20), keys=["restarts.limit=2"])
    assert status == 0 and len(made.started) == 7
    assert [round(each) for each in made.slept] == [0, 10, 10, 10, 10, 5]
    faults = [(each["what"], each["place"]) for each in events(made.run) if each["event"] == "fault"]
    assert faults == [("killed", 2), *[("disk refused", 0)] * 4, ("killed", 2)]
    told = (
        "No space left\nIt is started again by itself: what its disk refuses is waited out, to go on from step 10, in"
    )
    assert told in capsys.readouterr().err


def test_that_has_an_end(fake: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def full(run: Path) -> Ended:
        now[0] += 50.0
        return after(refused(), 10)(run)

    monkeypatch.setattr(restarts, "SaveRetries", partial(SaveRetries, clock=lambda: now[0]))
    keys = ["checkpoint.retry_for=100"]
    status, made = fake(after(killed(2), 10), *[full] * 4, keys=keys)
    assert status == 2 and names(made.run)[-2:] == ["fault", "no restart"] and made.slept == [0.0, 10.0, 25.0, 25.0]
    said = capsys.readouterr().err
    ends = "The run ends if that lasts for more than checkpoint.retry_for = 100 seconds"
    row = [
        f"to go on from step 10, in {wait}. {ends}{so_far}.\n"
        for wait, so_far in (("10 s", ""), ("25 s", ", and it has for 50"))
    ]
    assert all(each in said for each in row), "however often it is the same"
    assert said.endswith(f"its disk has refused for longer than checkpoint.retry_for.\n{LOST}\n")
    status, made = fake(after(killed(2), 10), full, keys=["checkpoint.retry_for=0"])
    assert status == 2 and len(made.started) == 2


def test_a_disk_that_refuses_now_and_then_ends_no_run_that_saves_meanwhile(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long after the first time: each time it is waited out as if it were the only one."""
    now = [0.0]

    def full(run: Path) -> Ended:
        now[0] += 60.0
        return after(refused(), int(now[0]))(run)

    monkeypatch.setattr(restarts, "SaveRetries", partial(SaveRetries, clock=lambda: now[0]))
    status, made = fake(after(killed(2), 10), *[full] * 4, after(DONE, 300), keys=["checkpoint.retry_for=100"])
    assert status == 0 and made.slept == [0.0, *[10.0] * 4]


def test_a_disk_that_refuses_the_first_start_is_told_at_once(fake: Any) -> None:
    """Whatever steps an earlier run has left there."""
    for before in (DONE, killed(2)):
        fake(after(before, 10), after(DONE, 20))
        status, made = fake(lambda run: refused())
        assert status == 2 and names(made.run)[-2:] == ["fault", "no restart"]


def test_nor_are_steps_made_where_those_behind_the_checkpoint_are_taken_away(fake: Any) -> None:
    """As by a run that goes on, before its first step."""

    def cut(run: Path) -> Ended:
        (run / "metrics.jsonl").write_text('{"step": 10}\n')
        return refused()

    fake(after(DONE, 10))
    status, made = fake(cut)
    assert status == 2 and names(made.run) == ["fault", "no restart"]


def test_what_it_refuses_behind_a_step_of_the_first_start_is_waited_out(fake: Any) -> None:
    """As where a change in mid-run reads other data, for whose copy there is no room."""
    status, made = fake(after(refused(), 10), after(DONE, 20))
    assert (status, made.slept, names(made.run)) == (0, [10.0], ["fault", "restart"])


def test_nor_does_it_matter_that_an_earlier_run_has_ended_with_the_same_step(fake: Any, tmp_path: Path) -> None:
    """Behind the checkpoint from which the steps were made again."""
    fake(after(DONE, 10))
    os.utime(tmp_path / "run" / "metrics.jsonl", (1, 1))
    status, made = fake(after(refused(), 10), after(DONE, 20))
    assert (status, made.slept, names(made.run)) == (0, [10.0], ["fault", "restart"])


@pytest.mark.parametrize("times", [1, TRIES])
def test_so_it_is_where_the_folder_is_away_with_it(fake: Any, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """For a moment, or for so long that nobody knows of steps."""

    def gone(run: Path) -> Ended:
        lost("metrics.jsonl", monkeypatch, times)
        return after(refused(), 10)(run)

    status, made = fake(gone, after(DONE, 20))
    assert status == 0 and names(made.run) == ["fault", "restart"]


def test_no_room_for_temporary_files_is_waited_out_too(fake: Any, tmp_path: Path) -> None:
    def full(run: Path) -> Ended:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/colonnade-x")

    status, made = fake(after(killed(2), 10), full, after(DONE, 20))
    assert status == 0 and len(made.started) == 3
    with pytest.raises(OSError, match="No space left"):
        fake(full)


def test_from_the_second_on_restarts_without_progress_are_waited_with(fake: Any) -> None:
    lost = [after(killed(rank)) for rank in (0, 1, 2)]
    status, made = fake(*lost, after(DONE, 10), keys=["restarts.backoff=3"])
    assert status == 0 and made.slept == [0.0, 3.0, 6.0]


def test_what_linux_kills_for_its_memory_twice_is_not(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would need it again. Its place is not lost, and what was killed before the attempt was another's."""
    kills = [7]

    def killed_for_memory(run: Path) -> Ended:
        kills[0] += 1
        return after(killed(2), 10)(run)

    monkeypatch.setattr(restarts, "_oom_kills", lambda: kills[0])
    status, made = fake(after(killed(1), 10), killed_for_memory, killed_for_memory)
    assert status == 137 and names(made.run) == ["fault", "restart", "fault", "restart", "fault", "no restart"]
    assert [event["what"] for event in events(made.run)[::2]] == ["killed", "out of memory", "out of memory"]


def test_it_gives_up_and_says_how_to_go_on(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, made = fake(*[after(killed(rank)) for rank in (0, 1, 2, 3)])
    assert status == 137 and len(made.started) == 4
    assert f"3 times in a row without a new checkpoint (restarts.limit).\n{LOST}" in capsys.readouterr().err


def test_a_lost_place_is_left_out_and_tried_again(fake: Any) -> None:
    """Place 3 fails twice: two ranks go on with what is left, are recalled, and all four run to the end."""
    recalled = Ended(UNFINISHED, 0, None)
    status, made = fake(after(killed(3), 10), after(killed(3), 10), after(recalled, 20), after(DONE, 30))
    assert status == 0
    places = [places for places, _, _ in made.started]
    assert places[0] == places[1] == places[3] == (0, 1, 2, 3) and 3 not in places[2] and len(places[2]) >= 2
    assert "parallel.dp=1" in made.started[2][1]
    assert names(made.run) == ["fault", "restart", "fault", "restart", "fewer ranks", "all ranks"]
    assert "for 3 ranks" in events(made.run)[4]["reason"] and events(made.run)[4]["lost"] == [3]
    assert not any(chosen for _, _, chosen in made.started), "it is on CPUs"


def test_a_place_that_is_lost_again_at_once_is_tried_half_as_often(fake: Any) -> None:
    """Its first failure is enough; another place, that was never lost before, changes nothing."""
    recalled = Ended(UNFINISHED, 0, None)
    ends = [after(killed(3), 10), after(killed(3), 10), after(recalled, 20), after(killed(3), 30), after(recalled, 40)]
    status, made = fake(*ends, after(killed(3), 50), after(DONE, 60), keys=["restarts.return_after=100"])
    assert status == 0 and made.recalls == [None, None, 100.0, None, 200.0, None, 400.0]
    ends = [after(killed(3), 70), after(killed(3), 70), after(recalled, 80), after(killed(0), 90), after(killed(0), 90)]
    status, made = fake(*ends, after(DONE, 99), keys=["restarts.return_after=100"])
    assert status == 0 and made.recalls == [None, None, 100.0, None, None, 100.0]


class Clock:
    """Tells when a run has written the last line of its metrics.jsonl."""

    now = 1e6

    def later(self, seconds: float, end: Callable[[Path], Ended], silent: float = 0.0) -> Callable[[Path], Ended]:
        """A run that ends so long behind the one before, the last of it `silent`."""

        def make(run: Path) -> Ended:
            self.now += seconds
            ended = end(run)
            os.utime(run / "metrics.jsonl", (self.now - silent, self.now - silent))
            return ended

        return make

    def recalled(self, saved: int) -> Callable[[Path], Ended]:
        return self.later(1000, after(Ended(UNFINISHED, 0, None), saved))


@pytest.mark.parametrize(("seconds", "silent"), [(99, 0), (1900, 1850)])
def test_a_place_that_has_held_up_is_as_another_again(fake: Any, seconds: float, silent: float) -> None:
    """Its next failure, much later, is a first one; and left out again, it is tried as soon as at first. One that
    hangs has not held up, however long that is waited for.
    """
    clock = Clock()
    later, recalled = clock.later, clock.recalled
    ends = [*[later(1, after(killed(3), 10))] * 2, recalled(20), later(seconds, after(killed(3), 30), silent)]
    ends += [recalled(40), later(200, after(killed(3), 50)), later(1, after(killed(3), 50)), recalled(60)]
    status, made = fake(*ends, later(1, after(DONE, 70)), keys=["restarts.return_after=100"])
    assert status == 0 and made.recalls == [None, None, 100.0, None, 200.0, None, None, 100.0, None]


def test_a_place_has_not_held_up_by_steps_that_were_made_without_it(fake: Any) -> None:
    """Lost a second time and left out for long, it has to hold up for twice as long as at first."""
    clock = Clock()
    later, recalled = clock.later, clock.recalled
    ends = [*[later(1, after(killed(3), 10))] * 2, recalled(20), later(1, after(killed(3), 30)), recalled(40)]
    ends += [later(150, after(killed(3), 50)), later(1, after(DONE, 60))]
    status, made = fake(*ends, keys=["restarts.return_after=100"])
    assert status == 0 and made.recalls == [None, None, 100.0, None, 200.0, None, 400.0]


def test_who_is_asked_to_leave_after_a_recall_is_not_recalled_again(fake: Any) -> None:
    """The whole layout is at work by then: it is the user's own `leave`, and ends the run."""

    def asked_to_leave(run: Path) -> Ended:
        (run / "leave").touch()
        return after(Ended(UNFINISHED, 0, None), 30)(run)

    lost = [after(killed(3), 10)] * 2
    status, made = fake(*lost, after(Ended(UNFINISHED, 0, None), 20), asked_to_leave)
    assert status == UNFINISHED and [len(places) for places, _, _ in made.started][3:] == [4]


def test_a_signal_while_recalled_ranks_leave_ends_the_run(fake: Any) -> None:
    """They hear it no more; nobody who has asked a run to end sees it started again."""
    recalled = Ended(UNFINISHED, signal.SIGTERM, None)
    status, made = fake(*[after(killed(3), 10)] * 2, after(recalled, 20))
    assert status == 143 and len(made.started) == 3


def test_who_is_asked_to_stop_while_all_are_recalled_stops_as_asked(
    fake: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its ranks have told that they stop."""

    def asked_to_stop(run: Path) -> Ended:
        (run / "stop").touch()
        return after(Ended(UNFINISHED, 0, None), 20)(run)

    status, made = fake(*[after(killed(3), 10)] * 2, asked_to_stop)
    assert status == UNFINISHED and len(made.started) == 3 and names(made.run)[-1] == "fewer ranks"
    assert "Not started again" not in capsys.readouterr().err


@pytest.mark.parametrize("at", [5, 50])
def test_what_is_left_suits_the_batches_from_now_on(fake: Any, tmp_path: Path, at: int) -> None:
    """Three ranks would share the batch that the run began with, and not the one that it has now, or will have."""
    keys = ["parallel.tp=1", "parallel.dp=4", "train.global_batch_size=12", "train.micro_batch_size=1"]
    lost = [after(killed(3), 10), after(killed(3), 10)]
    status, made = fake(*lost, after(DONE, 20), keys=keys)
    assert status == 0 and made.started[-1][:2] == ((0, 1, 2), ["parallel.dp=3"])
    change = Change(at=at, values={BATCH: 8}, was={BATCH: 12}, line="1")
    write_decided(tmp_path / "run", Decided(changes=(change,)))
    status, made = fake(*lost, after(DONE, 20), keys=keys)
    assert status == 0 and "parallel.dp=3" not in made.started[-1][1] and len(made.started[-1][0]) <= 3


def test_places_are_lost_one_after_the_other(fake: Any) -> None:
    ends = [*[after(killed(3), 10)] * 2, *[after(killed(0), 20)] * 2, after(DONE, 30)]
    status, made = fake(*ends, keys=["parallel.tp=1", "parallel.dp=4", "train.micro_batch_size=1"])
    assert status == 0 and made.started[2][0][0] == 0 and not {0, 3} & {*made.started[4][0]}
    told = [event["lost"] for event in events(made.run) if event["event"] == "fewer ranks"]
    assert told == [[3], [3], [0, 3]]
    assert not (made.run / "leave").exists(), "which asks no later ranks to leave"


@pytest.mark.parametrize(("num_ranks", "starts"), [(1, 4), (2, 6)])
def test_the_last_place_is_tried_until_nothing_more_is_to_be_expected(fake: Any, num_ranks: int, starts: int) -> None:
    """The run then ends with the status of its failure."""
    keys = ["parallel.tp=1", f"parallel.dp={num_ranks}", f"restarts.limit={starts - 1}"]
    status, made = fake(*[after(killed(0), 10)] * starts, keys=keys)
    assert status == 137 and [places for places, _, _ in made.started][-3:] == [(num_ranks - 1,)] * 3
    assert names(made.run)[-1] == "no restart"


def test_where_nobody_knows_who_is_to_blame_no_place_is(fake: Any) -> None:
    hung = Ended(75, 0, Cause(None, WAIT, "rank 0 waited too long"))
    status, made = fake(after(hung, 10), after(killed(3), 20), after(DONE, 30))
    assert status == 0 and [each["place"] for each in events(made.run) if each["event"] == "fault"] == [None, 3]


def test_a_rank_that_fails_again_is_blamed_by_the_place_that_it_has_by_now(fake: Any) -> None:
    ends = [*[after(killed(0), 10)] * 2, *[after(killed(1), 20)] * 2, after(DONE, 30)]
    status, made = fake(*ends, keys=["parallel.tp=1", "parallel.dp=4", "train.micro_batch_size=1"])
    assert status == 0 and made.started[2][0][:2] == (1, 2)
    assert [event["lost"] for event in events(made.run) if event["event"] == "fewer ranks"][-1] == [0, 2]


def test_missing_gpus_shrink_it_and_sound_ones_are_chosen(fake: Any) -> None:
    """On the second start, two GPUs are there of four."""
    keys = ["train.device=auto"]
    status, made = fake(after(killed(1), 10), after(DONE, 20), keys=keys, gpus=[2] * 8)
    assert status == 0 and made.started[1][0] == (0, 1)
    status, made = fake(*[after(killed(0), 30)] * 2, after(DONE, 40), keys=keys, gpus=[4] * 8)
    assert status == 0 and [chosen for _, _, chosen in made.started] == [False, False, True]
    assert 0 not in made.started[2][0]


def test_where_fewer_ranks_are_not_wanted_all_are_started_whatever_is_there(fake: Any) -> None:
    keys = ["train.device=auto", "restarts.fewer_ranks=false"]
    status, made = fake(after(killed(1), 10), after(DONE, 20), keys=keys, gpus=[2] * 8)
    assert status == 0 and made.started[1][:2] == ((0, 1, 2, 3), [])


def test_ranks_learn_of_the_fault_before_them(fake: Any) -> None:
    """When it was noticed and how far the run had come, for the time that it has cost."""
    lost = Ended(137, 0, Cause(2, CRASH, "rank 2 was killed", 55.5))
    _, made = fake(after(lost, 10), after(killed(2), 20), after(DONE, 30))
    assert made.faults == [None, (55.5, 11), None], "of the second one no time is known"


def test_copies_in_memory_count_behind_a_checkpoint_of_the_run(config: Path, tmp_path: Path) -> None:
    """Without one on the disk nothing goes on from them."""
    settings = load(config, [f"run.folder={tmp_path / 'run'}"])
    found = Restarts(settings, [], "", (), lambda: LOST, memory=tmp_path / "memory")
    (tmp_path / "memory" / "step_00000012").mkdir(parents=True)
    assert found._saved() == 0
    (tmp_path / "run" / "checkpoints" / "step_00000010").mkdir(parents=True)
    assert found._saved() == 12
    (tmp_path / "run" / "checkpoints" / "step_00000015").mkdir()
    assert found._saved() == 15


def test_what_to_do_is_said_where_the_run_could_go_on(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Not behind an error of the program, which would come again, nor behind a mistake, which a rank has told."""
    off = ["restarts.limit=0"]
    for end, remedy in ((killed(0), True), (raised("rank 0 raised ValueError: no"), False)):
        fake(after(end), keys=off)
        said = capsys.readouterr().err
        assert "Not started again: " in said and (LOST in said) == remedy
    fake(after(Ended(2, 0, Cause(0, MISTAKE, "ConfigError: no"))))
    assert capsys.readouterr().err == ""


def test_a_run_on_gpus_waits_for_them_also_when_all_are_gone(fake: Any) -> None:
    keys = ["train.device=auto", "restarts.wait_for_ranks=60"]
    status, made = fake(after(killed(1), 10), after(DONE, 20), keys=keys, gpus=[4, 0, 0, 4])
    assert status == 0 and made.started[1][0] == (0, 1, 2, 3) and made.slept == [0.0, POLL, POLL]


def test_and_does_not_go_on_without_them(fake: Any, tmp_path: Path) -> None:
    keys = ["train.device=auto"]
    with pytest.raises(LayoutError, match=r"The run was on GPUs, and none has come back within .* = 0 seconds"):
        fake(after(killed(1), 10), keys=keys, gpus=[4, 0])
    assert names(tmp_path / "run") == ["fault", "restart", "no restart"]
    status, made = fake(after(killed(1), 10), after(DONE, 20), keys=keys, gpus=[0])
    assert status == 0 and len(made.started) == 2, "one that began on CPUs asks for none"


def lost(name: str, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """A file of the run is refused so many times, as where a file system is lost for a while."""
    refused = [OSError(errno.ESTALE, "Stale file handle")] * times

    def refusing(honest: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *words: Any, **more: Any) -> Any:
            if path.name == name and refused:
                raise refused.pop()
            return honest(path, *words, **more)

        return call

    for what in ("read_bytes", "touch", "unlink", "exists"):
        monkeypatch.setattr(Path, what, refusing(getattr(Path, what)))


@pytest.mark.parametrize("name", ["metrics.jsonl", "leave", "stop"])
def test_a_file_system_that_is_lost_for_a_moment_ends_nothing(
    fake: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def gone(run: Path) -> Ended:
        lost(name, monkeypatch, 2)
        return after(killed(2), 10)(run)

    status, made = fake(gone, after(DONE, 20))
    assert status == 0 and made.slept == [POLL, POLL, 0.0]
    assert [(event["step"], event.get("saved")) for event in events(made.run)[:1]] == [(11, None)]
    assert events(made.run)[1]["saved"] == 10


def test_nor_one_that_stays_lost_what_would_go_on_with_it(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are started again from where the run was known to be; one that has ended well needs nothing more."""

    def gone(run: Path) -> Ended:
        lost("metrics.jsonl", monkeypatch, 1000)
        return after(killed(3), 20)(run)

    status, made = fake(after(killed(2), 10), gone, after(DONE, 30))
    assert status == 0 and made.slept == [0.0, *[POLL] * (TRIES - 1), 5.0]
    faults = [event for event in events(made.run) if event["event"] == "fault"]
    assert [event["step"] for event in faults] == [11, 11]


def test_nor_is_what_was_saved_forgotten_at_the_first_failure(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on, and whose folder is lost when it fails."""

    def gone(run: Path) -> Ended:
        end = after(killed(3), 20)(run)
        lost("metrics.jsonl", monkeypatch, TRIES)
        return end

    begun = after(DONE, 10)
    status, made = fake(begun)
    assert status == 0
    status, made = fake(gone, after(DONE, 30))
    assert status == 0 and [event["saved"] for event in events(made.run) if event["event"] == "restart"] == [10]


def test_a_run_that_cannot_be_written_is_looked_into(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a file system refuses to remove what is not there, too."""

    def refused(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    def read_only(run: Path) -> Ended:
        end = after(killed(2), 10)(run)
        monkeypatch.setattr(Path, "unlink", refused)
        return end

    status, made = fake(read_only, after(DONE, 20))
    assert status == 0 and made.slept == [0.0]
    assert [event["saved"] for event in events(made.run) if event["event"] == "restart"] == [10]


@pytest.mark.parametrize(("back", "starts"), [(2, 2), (TRIES, 2), (1000, 1)])
def test_where_its_folder_is_gone_no_run_begins_anew(
    fake: Any, monkeypatch: pytest.MonkeyPatch, back: int, starts: int
) -> None:
    """The disk is not mounted: the folder would be made on another one. It goes on when that is back."""
    slept = list[float]()

    def away(run: Path) -> Ended:
        end, aside = after(killed(2), 10)(run), run.with_name("aside")
        run.rename(aside)

        def sleep(seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == back:
                aside.rename(run)

        monkeypatch.setattr(restarts.time, "sleep", sleep)
        return end

    status, made = fake(away, after(DONE, 20), keys=["checkpoint.retry_for=0"])
    assert len(made.started) == starts and made.run.exists() == (status == 0) == (starts == 2)
    if status == 0:
        assert last_step(made.run / "metrics.jsonl") == 21


def test_fewer_ranks_are_fitted_when_the_run_can_be_looked_into(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which layouts fit goes by what was changed in it; where it stays lost, by the configuration."""
    for times in (2, 1000):

        def gone(run: Path, times: int = times) -> Ended:
            lost("changes.jsonl", monkeypatch, times)
            return after(killed(1), 10)(run)

        status, made = fake(after(killed(1), 10), gone, after(DONE, 30))
        assert status == 0 and len(made.started[2][0]) < 4
        assert made.slept.count(POLL) == min(times, TRIES - 1)


def test_a_second_signal_does_not_stop_the_first_one(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(kind: str, **details: object) -> None:
        os.kill(os.getpid(), signal.SIGHUP)

    def asked(run: Path) -> Ended:
        monkeypatch.setattr(Restarts, "_event", lambda self, kind, **details: tell(kind))
        os.kill(os.getpid(), signal.SIGTERM)
        return after(DONE, 20)(run)

    status, _ = fake(asked)
    assert status == 128 + signal.SIGTERM


def test_a_recall_that_the_disk_refuses_is_tried_again(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervised = Restarts(load(config, [f"run.folder={tmp_path}"]), [], "", (), lambda: LOST)
    lost("leave", monkeypatch, 1)
    again = supervised._recall(100.0)
    assert again is not None and again[0] > 100.0 and not supervised.recalled
    assert again[1]() is None and supervised.recalled and (tmp_path / "leave").exists()


def test_all_are_started_anew_without_the_file_that_asked_to_leave_though_the_disk_refuses_at_first(
    fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would leave at once."""
    asked = list[bool]()

    def recalled(run: Path) -> Ended:
        end = after(Ended(UNFINISHED, 0, None), 20)(run)
        (run / "leave").touch()  # its ranks could not remove it
        lost("leave", monkeypatch, 1)
        return end

    def all_again(run: Path) -> Ended:
        asked.append((run / "leave").exists())
        return after(DONE, 30)(run)

    status, made = fake(*[after(killed(3), 10)] * 2, recalled, all_again)
    assert status == 0 and asked == [False] and len(made.started[-1][0]) == 4
    assert made.slept.count(POLL) == 1 and names(made.run)[-1] == "all ranks"


def test_ctrl_c_ends_it_while_it_waits_for_gpus(fake: Any) -> None:
    def interrupted() -> Iterator[int]:
        yield 4
        yield 2
        raise KeyboardInterrupt

    keys = ["train.device=auto", "restarts.wait_for_ranks=60"]
    status, made = fake(after(killed(1), 10), keys=keys, gpus=interrupted())
    assert status == 130 and len(made.started) == 1 and names(made.run)[-1] == STOPPED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_while_it_waits_for_a_restart(
    fake: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    """In order: no copy of the state stays in memory, and the run is told as interrupted."""
    signal.signal(number, lambda *_: pytest.fail("not heard"))
    memory = list[Path | None]()
    monkeypatch.setattr(memory_folder, "MEMORY", tmp_path)
    monkeypatch.setattr(Restarts, "_lose", lambda self, _: (memory.append(self.memory), os.kill(os.getpid(), number)))
    status, made = fake(after(killed(1), 10), keys=["checkpoint.memory_every=1"])
    assert status == 128 + number and memory != [None] and not any(each and each.exists() for each in memory)
    assert [(each["event"], each.get("reason")) for each in events(made.run)][-1] == (STOPPED, number.name)
    assert f"Not started again: {number.name} has asked this process to end.\n" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, UNFINISHED])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_behind_its_end_changes_nothing_of_it(
    fake: Any, monkeypatch: pytest.MonkeyPatch, status: int, number: signal.Signals
) -> None:
    """Or who has started it takes a run that has finished for one that has failed."""
    find = Restarts._saved

    def saved(self: Restarts) -> int:
        if self.began is not None:
            signal.raise_signal(number)
        return find(self)

    def end(run: Path) -> Ended:
        (run / "leave").touch()
        return after(Ended(status, 0, None, [number]), 20)(run)

    monkeypatch.setattr(Restarts, "_saved", saved)
    found, made = fake(end)
    signal.raise_signal(number)
    assert found == status and not (made.run / "events.jsonl").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_heard_where_other_runs_follow(fake: Any, number: signal.Signals) -> None:
    """As in a sweep: it ends there, and the next point is not started; without one the next hears as this did."""
    signal.signal(number, before := signal.default_int_handler)
    assert fake(after(DONE, 20), last=False)[0] == 0 and signal.getsignal(number) is before
    assert fake(after(Ended(0, 0, None, [number]), 20), last=False)[0] == 128 + number


@pytest.mark.parametrize("status", [0, UNFINISHED])
def test_a_run_that_was_started_again_and_has_ended_is_not_told_as_interrupted_for_a_signal_behind_its_end(
    fake: Any, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    def end(run: Path) -> Ended:
        (run / "leave").touch()
        return after(Ended(status, 0, None, [signal.SIGTERM]), 20)(run)

    found, made = fake(after(killed(2), 10), end, last=False)
    assert found == 143 and names(made.run) == ["fault", "restart"]
    assert "Not started again" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ended", "status"), [(0, 143), (1, 143), (143, 143), (UNFINISHED, UNFINISHED)], ids=lambda number: str(number)
)
def test_a_run_that_could_finish_though_it_was_asked_to_end_is_the_last(fake: Any, ended: int, status: int) -> None:
    """As one that is asked in its last step, or while it saves that. By itself it has finished."""
    asked = Ended(ended, signal.SIGTERM, Cause(0, EXCEPTION, "rank 0 raised") if ended == 1 else None)

    def end(run: Path) -> Ended:
        (run / "leave").touch()
        return after(asked, 20)(run)

    assert [fake(end, last=last)[0] for last in (False, True)] == [status, ended]


def test_a_signal_that_no_rank_has_heard_ends_a_run_that_would_be_started_again(fake: Any) -> None:
    status, made = fake(after(Ended(137, 0, killed(2).cause, [signal.SIGTERM]), 10))
    assert status == 128 + signal.SIGTERM and len(made.started) == 1


def test_hangups_stay_ignored_while_it_waits_for_a_restart(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(Restarts, "_lose", lambda *_: os.kill(os.getpid(), signal.SIGHUP))
    assert fake(after(killed(1), 10), after(DONE, 20))[0] == 0


def test_a_signal_ends_it(fake: Any) -> None:
    status, made = fake(after(Ended(143, signal.SIGTERM, None)))
    assert status == 143 and len(made.started) == 1


def test_kinds() -> None:
    assert kind_of(raised("rank 0 raised RuntimeError: CUDA error: uncorrectable ECC error")) == "device"
    assert kind_of(raised("rank 0 raised ValueError: no")) == "raised"
    assert kind_of(raised("rank 0 raised RuntimeError: NCCL communicator was aborted")) == "device"
    assert kind_of(Ended(2, 0, None)) == "mistake" and kind_of(Ended(1, 0, None)) == "raised"
    assert kind_of(Ended(1, 0, Cause(0, WAIT, "rank 0 waits"))) == "hung"
    assert kind_of(killed(0)) == "killed" and kind_of(killed(0), killed_for_memory=True) == "out of memory"
    assert kind_of(Ended(2, 0, Cause(0, MISTAKE, "rank 0 raised MemoryShortError: x"))) == "out of memory"


def test_a_run_that_is_to_stop_is_not_started_again(fake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Its stop file was made while it was not there to see it."""

    def lost(run: Path) -> Ended:
        (run / "stop").touch()
        return after(killed(2), 10)(run)

    status, made = fake(lost)
    assert status == UNFINISHED and len(made.started) == 1 and names(made.run) == ["fault", "restart", STOPPED]
    assert state_of(read_run(made.run)) == "interrupted"
    assert f"Not started again: there is a file {made.run / 'stop'}." in capsys.readouterr().err


def test_a_time_limit_goes_on_over_restarts(fake: Any, tmp_path: Path) -> None:
    """Ranks that are started again learn when the first ones were started, and count from there."""
    before = time.monotonic()
    _, made = fake(after(killed(2), 10), after(killed(2), 20), after(DONE, 30))
    first, second, third = made.began
    assert first is None and second == third and before <= second <= time.monotonic()
    begun = [Interrupt(tmp_path, 50.0, time.monotonic() - ago) for ago in (40.0, 60.0)]
    assert [each.newest() for each in begun] == [Request.NOTHING, Request.STOP]
    assert Interrupt(tmp_path, 50.0).newest() == Request.NOTHING and begun[1].exit_code == UNFINISHED


def test_other_gpus_are_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert launch._environment((0, 2), tmp_path, True, 1, 9)["CUDA_VISIBLE_DEVICES"] == "0,2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    found = launch._environment((0, 2), tmp_path, True, 1, 9)
    assert found["CUDA_VISIBLE_DEVICES"] == "4,6" and found[launch.PLACE] == "2"
    assert launch._environment((0, 2), tmp_path, False, 1, 9)["CUDA_VISIBLE_DEVICES"] == "4,5,6"


# --- with ranks -------------------------------------------------------------------------------------------------------

EXACT = ["train.precision=fp64", "optim.epsilon=1e-6", "train.steps=60", "checkpoint.every=5", "train.evaluate_every=0"]


def started(config: Path, run: Path, *keys: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "colonnade", "train", str(config), f"run.folder={run}", *keys]
    with (run.parent / "said").open("w") as said:
        return subprocess.Popen(command, env=environment(), text=True, stdout=subprocess.DEVNULL, stderr=said)


def kill(process: "subprocess.Popen[str]", rank: int) -> int:
    """End a rank as soon as there is one; its process."""
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        if (pid := ranks_of(process.pid).get(rank)) is not None:
            os.kill(pid, signal.SIGKILL)
            return pid
        time.sleep(0.01)
    raise AssertionError("no such rank")


def wait_for_step(run: Path, step: int) -> None:
    end = time.monotonic() + 120
    while restarts.last_step(run / "metrics.jsonl") < step:
        assert time.monotonic() < end, "no progress"
        time.sleep(0.01)


@pytest.mark.slow
def test_what_is_written_into_the_file_of_a_run_is_not_for_its_ranks(config: Path, tmp_path: Path) -> None:
    """The next experiment is prepared in the same file while this one goes on, and then a rank is lost."""
    run = tmp_path / "run"
    process = started(config, run, "train.steps=400", "checkpoint.every=5", "parallel.dp=2", "train.evaluate_every=0")
    wait_for_step(run, 10)
    config.write_text('[run]\nfolder = "next"\n')
    kill(process, 1)
    while names(run).count("started") + names(run).count("resumed") < 2 and process.poll() is None:
        time.sleep(0.01)
    (run / "stop").touch()
    status = process.wait(60)
    assert (status, names(run).count("restart")) == (UNFINISHED, 1), (run.parent / "said").read_text()


@pytest.mark.slow
def test_ranks_have_a_file_that_can_be_read_once(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "colonnade", "train", "/dev/stdin", "parallel.dp=2", "train.steps=2"]
    more = {"input": config.read_text(), "capture_output": True, "timeout": 120.0}
    answer = subprocess.run(command, env=environment(), text=True, check=False, **more)  # type: ignore[call-overload]
    assert answer.returncode == 0, answer
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]


@pytest.mark.slow
def test_a_rank_is_lost_for_good_and_comes_back(config: Path, tmp_path: Path) -> None:
    """tp 2 × dp 2 loses place 3, goes on with fewer ranks, gets it back: the same losses throughout."""
    expected, run = tmp_path / "expected", tmp_path / "run"
    assert forked("train", config, f"run.folder={expected}", *EXACT).status == 0
    process = started(config, run, *EXACT, *FOUR, "restarts.return_after=6", "restarts.backoff=0.1", "train.threads=1")
    wait_for_step(run, 10)
    first = kill(process, 3)
    while ranks_of(process.pid).get(3) == first:
        time.sleep(0.01)
    kill(process, 3)
    assert process.wait(180) == 0, (run.parent / "said").read_text()
    told = names(run)
    assert told.count("fault") == 2 and "fewer ranks" in told
    losses, others = ([line["loss"] for line in metrics(each)] for each in (run, expected))
    assert losses == pytest.approx(others, rel=1e-10)
