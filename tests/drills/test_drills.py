"""The drills in short: a few kills, a full disk, signals, damage. All of it is `make drills`."""

from pathlib import Path

import pytest

from tests.drills.disturb import disk_drill, signal_drill, stop_drill
from tests.drills.full import Job, jobs, page, run
from tests.drills.fuzz import checkpoint_drill, file_drill
from tests.drills.kills import kill_drill
from tests.drills.runs import VARIANTS, Place

SERIAL, TP2 = VARIANTS[0], VARIANTS[5]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("drills"), steps=8)


def test_kills(place: Place) -> None:
    rows = [kill_drill(place, variant, seed=0, kills=3) for variant in (SERIAL, TP2)]
    assert [row["problems"] for row in rows] == [[], []]
    assert sum(row["kills"] for row in rows) >= 3


def test_a_full_disk(place: Place) -> None:
    assert disk_drill(place, SERIAL, seed=1) == {"failed saves": 1, "problems": []}


def test_a_signal_and_a_pause(place: Place) -> None:
    assert signal_drill(place, SERIAL, seed=0)["problems"] == []
    assert stop_drill(place, TP2, seed=0)["problems"] == []


def test_damaged_files(place: Place) -> None:
    found = checkpoint_drill(place, seed=0, tries=30)
    assert found["problems"] == [] and found["refused"] >= 20 and found["refused"] + found["right"] == 30
    found = file_drill(place, seed=0, tries=90)
    assert found["problems"] == [] and found["refused"] >= 20


def test_at_least_500_kills_on_eight_variants() -> None:
    names = [job.name for job in jobs()]
    assert len(set(names)) == len(names) == 8 * 4 * 5 + 2 * 5


def test_what_is_written_names_what_is_wrong(tmp_path: Path) -> None:
    rows = [{"job": "kills | serial | 0", "kills": 3, "seconds": 1.0, "problems": []}]
    rows.append({"job": "kills | serial | 1", "kills": 4, "seconds": 1.0, "problems": ["it hangs"]})
    hardware = dict.fromkeys(("cpu", "cores", "python", "torch", "system", "commit"), "x")
    text = page({"date": "2026-01-01", "hardware": hardware, "command": "c", "rows": rows}, 9)
    assert "| kills | serial | 2 | 7 kills | 1 |" in text and "WRONG: kills | serial | 1: it hangs" in text


@pytest.mark.slow
@pytest.mark.parametrize("job", list(jobs(rounds=1, kills=5)), ids=lambda job: job.name)
def test_each_drill_once(job: Job, tmp_path: Path) -> None:
    assert run(job, tmp_path)["problems"] == []
