"""A record that is damaged is said to be, whatever its bytes are now."""

from pathlib import Path
from zipfile import ZipFile

import pytest

from colonnade.errors import DamagedError, DataError
from colonnade.train import reference, taught, trackers
from colonnade.train.change import Change
from colonnade.train.change_requests import Decided, Refusal, lines_of, read_decided, write_decided
from colonnade.train.monitor import EVENTS, HEARTBEAT, METRICS, THERMOMETERS, UNDONE
from colonnade.train.run_folder import CHANGES, COPIES, DECIDED, ROLLBACKS
from colonnade.train.run_record import FILES, pack, unpack
from tests.runs import snapshot


@pytest.fixture
def record(tmp_path: Path) -> bytes:
    run = tmp_path / "run"
    run.mkdir()
    for name in FILES[:2]:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("".join(f"{name} {number}\n" for number in range(300)))
    pack(run, tmp_path / "record")
    return (tmp_path / "record").read_bytes()


def test_every_flipped_byte_is_found_or_changes_nothing(record: bytes, tmp_path: Path) -> None:
    """Compressed bytes that cannot be, sums that differ, an index that leads nowhere."""
    unpack(tmp_path / "record", tmp_path / "whole")
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    damaged, found = tmp_path / "damaged", 0
    for at in range(0, len(record), 7):
        damaged.write_bytes(record[:at] + bytes([record[at] ^ 0xFF]) + record[at + 1 :])
        try:
            unpack(damaged, tmp_path / "out")
        except DamagedError as error:
            found += str(damaged) in str(error)
        else:
            here = {path.name: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
            assert here.items() <= whole.items(), at
    assert found > len(record) // 14


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.99])
def test_a_record_that_is_cut_short(record: bytes, tmp_path: Path, kept: float) -> None:
    (tmp_path / "cut").write_bytes(record[: int(kept * len(record)) if kept < 1 else int(kept)])
    with pytest.raises(DamagedError, match="is damaged"):
        unpack(tmp_path / "cut", tmp_path / "out")


def test_a_run_has_all_that_it_told_on_another_machine(tmp_path: Path) -> None:
    """What it was, what was asked of it, and its names in other programs; not what is of one machine."""
    run, other = tmp_path / "run", tmp_path / "other"
    told = [METRICS, EVENTS, THERMOMETERS, UNDONE, ROLLBACKS, CHANGES, DECIDED, reference.FILE, "config.toml"]
    told.append(f"{taught.TEACHER}/{taught.ABOUT}")
    told += [f"{trackers.KNOWN}/{program}" for program in ("wandb", "mlflow")]
    for name in (*told, HEARTBEAT, "lock", COPIES):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(f"{name} of this run")
    pack(run, tmp_path / "record")
    with ZipFile(tmp_path / "record", "a") as archive:
        archive.writestr("../elsewhere", "a stranger's")
        archive.writestr("stop", "a stranger's")
    assert sorted(unpack(tmp_path / "record", other)) == sorted(told)
    assert {name: each for name, each in snapshot(other).items() if each is not None} == {
        name: f"{name} of this run".encode() for name in told
    }
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("packed", "here", "then"),
    [
        ("a\nb\n", None, "a\nb\n"),
        ("a\nb\n", "a\n", "a\nb\n"),
        ("a\nb\n", "a\nc\na\nd", "a\nb\nc\na\nd\n"),
        ("a", "c\n\n", "a\nc\n"),
    ],
)
def test_changes_that_were_asked_for_here_alone_stay(packed: str, here: str | None, then: str, tmp_path: Path) -> None:
    """Behind those that the record has, whose names they leave as they are; a line that was asked for twice counts."""
    for folder, content in (("packed", packed), ("here", here)):
        (tmp_path / folder).mkdir()
        if content is not None:
            (tmp_path / folder / CHANGES).write_text(content)
    pack(tmp_path / "packed", tmp_path / "record")
    assert unpack(tmp_path / "record", tmp_path / "here") == [CHANGES]
    assert (tmp_path / "here" / CHANGES).read_text() == then


def test_changes_that_were_refused_here_are_not_asked_for_again(tmp_path: Path) -> None:
    """Those that were made on the course that is left are asked of this one."""
    packed, here = tmp_path / "packed", tmp_path / "here"
    for folder, content in ((packed, "both\n"), (here, "both\nrefused\nmade\nnew\nrefused\n")):
        folder.mkdir()
        (folder / CHANGES).write_text(content)
    _, refused, made, *_ = lines_of(here)
    change = Change(at=5, values={}, was={}, line=made.known_as)
    write_decided(packed, Decided())
    write_decided(
        here, Decided(changes=(change,), refused=(Refusal(line=refused.known_as, text="refused", reason=""),))
    )
    pack(packed, tmp_path / "record")
    unpack(tmp_path / "record", here)
    assert (here / CHANGES).read_text() == "both\nmade\nnew\nrefused\n"
    assert read_decided(here) == Decided()


def test_a_teacher_whose_answers_are_here_is_not_said_to_be_another(tmp_path: Path) -> None:
    for folder in ("packed", "here"):
        about = tmp_path / folder / taught.TEACHER / taught.ABOUT
        about.parent.mkdir(parents=True)
        about.write_text(f'{{"teacher": {{"manifest.json": "{folder}"}}}}')
    pack(tmp_path / "packed", tmp_path / "record")
    for folder, whose in (("here", "here"), ("new", "packed")):
        unpack(tmp_path / "record", tmp_path / folder)
        taught._check(tmp_path / folder / taught.TEACHER, {"teacher": {"manifest.json": whose}})
        with pytest.raises(DataError, match="for: teacher differs"):
            taught._check(tmp_path / folder / taught.TEACHER, {"teacher": {"manifest.json": "another"}})
