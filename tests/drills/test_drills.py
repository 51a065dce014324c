"""The drills in short: a few kills, a full disk, signals, damage. All of it is `make drills`."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.drills import full
from tests.drills.clocks import clock_drill, slow_drill
from tests.drills.faults import again_drill, flip_drill, memory_drill, restart_drill
from tests.drills.full import Job, jobs, page, run
from tests.drills.fuzz import checkpoint_drill, file_drill
from tests.drills.histories import history_drill
from tests.drills.kills import kill_drill
from tests.drills.lost import lost_drill, rename_drill
from tests.drills.runs import VARIANTS, Place, Variant

SERIAL, TP2 = VARIANTS[0], VARIANTS[5]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("drills"), steps=8)


def test_damaged_files(place: Place) -> None:
    found = checkpoint_drill(place, seed=0, tries=30)
    assert found["problems"] == [] and found["refused"] >= 20 and found["refused"] + found["right"] == 30
    found = file_drill(place, seed=0, tries=90)
    assert found["problems"] == [] and found["refused"] >= 20


@pytest.mark.slow
def test_a_run_survives_by_itself(place: Place) -> None:
    found = restart_drill(place, TP2, seed=0, faults=1)
    assert found["problems"] == [] and found["injected"] == found["detected"] == 1


@pytest.mark.slow
def test_a_run_is_killed_again_while_it_starts(place: Place) -> None:
    found = again_drill(place, TP2, seed=0)
    assert found["problems"] == [] and found["injected"] == 2 and found["detected"] >= 1


@pytest.mark.slow
def test_a_run_goes_on_from_memory(place: Place) -> None:
    found = memory_drill(place, TP2, seed=0, faults=1)
    assert found["problems"] == [] and found["injected"] == found["detected"] == 1


@pytest.mark.slow
def test_a_slow_rank(place: Place) -> None:
    assert slow_drill(place, TP2, seed=0) == {"injected": 1, "detected": 1, "problems": []}


@pytest.mark.slow
def test_clocks_that_jump(place: Place) -> None:
    assert clock_drill(place, TP2, seed=0) == {"injected": 1, "detected": 1, "problems": []}


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "seeds"), [(SERIAL, (2, 3, 4)), (TP2, (2, 4, 5))], ids=[SERIAL.name, TP2.name])
def test_a_file_system_that_is_lost(place: Place, variant: Variant, seeds: tuple[int, ...]) -> None:
    """Each way once: two errors, and calls that stand still."""
    rows = [lost_drill(place, variant, seed=seed) for seed in seeds]
    assert [row["problems"] for row in rows] == [[]] * 3
    assert len({row["what"] for row in rows}) == 3


@pytest.mark.slow
def test_kills_at_a_rename(place: Place) -> None:
    rows = [rename_drill(place, variant, seed=1) for variant in (SERIAL, TP2)]
    assert [row["problems"] for row in rows] == [[], []] and [row["kills"] for row in rows] == [1, 1]


@pytest.mark.slow
def test_a_flipped_bit_is_found_and_undone(place: Place) -> None:
    assert flip_drill(place, full.FLIPPED, seed=0) == {"injected": 1, "detected": 1, "problems": []}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [10, 16, 29, 11])
def test_a_history_ends_as_on_one_rank_left_alone(place: Place, seed: int) -> None:
    """With a change behind the step to which a flipped bit lets the run return, twice, once in a base of adapters; with
    all checkpoints lost in which some weights, which were frozen before, had been trained; and with batches that do
    not divide each other.
    """
    found = history_drill(place, seed=seed)
    assert found["problems"] == [] and found["injected"]


def test_at_least_500_kills_on_eight_variants() -> None:
    names = [job.name for job in jobs()]
    assert len(set(names)) == len(names) == (8 * 6 + 6 * 5 + 4 + 2) * 5 + 2 * 5 + 60
    kills = Counter[str]()
    for job in jobs():
        kills[job.asked["variant"].name if job.do is kill_drill else "none"] += job.asked.get("kills", 0)
    assert kills.pop("none") == 0, "the other drills are not asked for kills"
    assert len(kills) == 8 and len(set(kills.values())) == 1 and kills.total() >= full.PROMISED == 500


def test_a_run_that_is_killed_inside_a_save_ends_in_the_same_bits(tmp_path: Path) -> None:
    """The shortest drill: it is killed when its second checkpoint is written and has no name yet, and goes on."""
    found = rename_drill(Place(tmp_path, steps=4), SERIAL, seed=4)
    assert found == {"kills": 1, "inside a save": 1, "problems": []}


@pytest.mark.slow
def test_it_kills_as_often_as_it_is_asked_to(tmp_path: Path) -> None:
    """Its first kill is aimed at the third save of a run, which ends with the second: another run is killed."""
    found = kill_drill(Place(tmp_path, steps=2), SERIAL, seed=11, kills=4)
    assert found["problems"] == [] and found["kills"] == 4 >= found["inside a save"]


def test_what_is_written_names_what_is_wrong(tmp_path: Path) -> None:
    rows = [{"job": "kills | serial | 0", "kills": 3, "seconds": 1.0, "problems": []}]
    rows.append({"job": "kills | serial | 1", "kills": 4, "seconds": 1.0, "problems": ["it hangs"]})
    text = page_of(rows)
    assert "| kills | serial | 2 | 7 kills | 1 |" in text and "WRONG: kills | serial | 1: it hangs" in text


@pytest.mark.parametrize(
    ("kills", "inside", "told"),
    [
        (200, 150, "501 kills, 251 inside a save. Promised are 500 (reached), half inside a save (reached)."),
        (199, 149, "500 kills, 250 inside a save. Promised are 500 (reached), half inside a save (reached)."),
        (199, 148, "500 kills, 249 inside a save. Promised are 500 (reached), half inside a save (not reached)."),
        (198, 149, "499 kills, 250 inside a save. Promised are 500 (not reached), half inside a save (reached)."),
    ],
)
def test_what_is_written_adds_up_kills(kills: int, inside: int, told: str) -> None:
    """Of all drills that kill; what others inject is none."""
    rows = [
        {"job": "kills | serial | 0", "kills": 300, "inside a save": 100},
        {"job": "signals | serial | 0", "stopped": 1},
        {"job": "restarts | tp2 | 0", "injected": 3},
        {"job": "killed at a rename | tp2 | 0", "kills": 1, "inside a save": 1},
        {"job": "kills | tp2 | 0", "kills": kills, "inside a save": inside},
    ]
    assert f"\n{told}\n" in page_of([{**row, "seconds": 1.0, "problems": []} for row in rows])


def test_of_no_kills_none_were_inside_a_save() -> None:
    row = {"job": "signals | serial | 0", "stopped": 1, "seconds": 1.0, "problems": []}
    assert "0 kills, 0 inside a save. Promised are 500 (not reached), half inside a save (not reached)." in page_of(
        [row]
    )


def page_of(rows: list[dict[str, object]]) -> str:
    hardware = dict.fromkeys(("cpu", "cores", "python", "torch", "system", "commit"), "x")
    return page({"date": "2026-01-01", "hardware": hardware, "command": "c", "rows": rows}, 9)


def test_it_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(place: Place) -> dict[str, object]:
        raise OSError("no disk")

    some = [job for job in jobs(rounds=2, tries=3) if job.name.startswith("files")]
    monkeypatch.setattr(full, "jobs", lambda: some)
    assert full.main(["--output", str(tmp_path)]) == 0
    monkeypatch.setattr(full, "jobs", lambda: [*some, Job("broken | x | 0", fail, {})])
    assert full.main(["--output", str(tmp_path)]) == 1
    (found,) = (json.loads(path.read_text()) for path in tmp_path.glob("drills-*.json"))
    assert [row["job"] for row in found["rows"]] == [*(job.name for job in some), "broken | x | 0"]
    assert [row.get("tries") for row in found["rows"]] == [18, 18, None]
    (text,) = (path.read_text() for path in tmp_path.glob("drills-*.md"))
    assert "3 of 3 jobs" in text and "WRONG: broken | x | 0: OSError: no disk" in text


def of_each_drill_and_variant() -> list[Job]:
    """Each drill on two variants, of several ranks for one of them; each variant once."""
    names = ["kills", "full disk", "signals", "SIGSTOP", "signals", "SIGSTOP", "kills", "full disk"]
    wanted = {f"{name} | {variant.name} | 0" for name, variant in zip(names, VARIANTS, strict=True)}
    found = [job for job in jobs(rounds=1, kills=3) if job.name in wanted]
    assert len(found) == len(VARIANTS) == 8
    return found


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("longer"), steps=16)


@pytest.mark.slow
@pytest.mark.parametrize("job", of_each_drill_and_variant(), ids=lambda job: job.name)
def test_each_drill_and_each_variant_once(job: Job, longer: Place) -> None:
    found = run(job, longer)
    assert found["problems"] == []
    assert found.get("kills") == job.asked.get("kills")
    assert all(found[count] for count in {"failed saves", "stopped"} & found.keys()), "nothing was disturbed"
