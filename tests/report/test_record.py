"""A run's folder is read as far as it can be."""

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from colonnade.errors import ConfigError
from colonnade.report import record
from colonnade.report.page import page
from colonnade.report.record import read_run
from tests.report import written
from tests.runs import Finished


def test_every_file_is_read(tmp_path: Path) -> None:
    run = read_run(written.run(tmp_path / "r"))
    assert run.notes == []
    assert run.steps.tolist() == list(range(1, 41))
    assert np.isfinite(run.columns["validation_loss"]).sum() == 10
    assert run.hours[-1] == pytest.approx(40 * 2 / 3600)
    assert (run.planned, run.setup["layout"], len(run.thermometers)) == (40, "tp2 pp2", 20)


def test_the_end_is_that_behind_a_change_to_come(finished: Finished, tmp_path: Path) -> None:
    """Of a run of 6 steps that has done 3."""
    folder = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:3]))
    assert read_run(folder).planned == 6
    (folder / "changes.jsonl").write_text(json.dumps({"change": {"train.steps": 12}, "at": 5}) + "\n")
    assert read_run(folder).planned == 12


def test_a_run_of_which_less_is_asked_than_it_has_done_ends_where_it_is(finished: Finished, tmp_path: Path) -> None:
    """By a start with fewer steps, or by a change."""
    folder = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace("\nsteps = 6\n", "\nsteps = 4\n"))
    assert read_run(folder).planned == 6
    (folder / "changes.jsonl").touch()
    assert read_run(folder).planned == 6


def test_a_step_that_is_written_twice_is_what_was_written_last_and_names_may_come_and_go(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    lines = [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0, "late": 7}, {"step": 1, "loss": 3.0}, {"step": 3}]
    (folder / "metrics.jsonl").write_text(written.lines(lines))
    run = read_run(folder)
    assert run.steps.tolist() == [1, 2, 3]
    assert run.columns["loss"][:2].tolist() == [3.0, 4.0]
    assert np.isnan(run.columns["loss"][2])
    assert np.isnan(run.columns["late"][0]) and run.columns["late"][1] == 7
    assert "metrics.jsonl has 1 step twice; what was written last is shown." in run.notes


def test_a_line_whose_step_is_none_is_passed_over(tmp_path: Path) -> None:
    """Of metrics and of thermometers alike; a report of it was a traceback."""
    folder = written.run(tmp_path / "r")
    for name in ("metrics.jsonl", "thermometers.jsonl", "events.jsonl"):
        with (folder / name).open("a") as file:
            for step in ("true", "false", "1e400", "0", f"1{'0' * 30}", '"7"'):
                file.write(f'{{"event": "saved", "step": {step}, "loss": 1.0, "updates": {{"u": 1.0}}}}\n')
    run = read_run(folder)
    assert run.steps.tolist() == list(range(1, 41)) and {type(line["step"]) for line in run.thermometers} == {int}
    assert len(run.thermometers) == 20 and "finished" in page([run])


def test_a_line_that_was_cut_off_is_counted_and_numbers_that_are_none_are_gaps(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r", steps=4)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": NaN, "grad_norm": Infinity, "mfu": ' + "9" * 400 + '}\n{"step": 6, "lo')
    run = read_run(folder)
    assert run.notes == ["metrics.jsonl: 1 line could not be read and is left out."]
    assert run.steps[-1] == 5 and np.isnan(run.columns["loss"][-1]) and np.isnan(run.columns["grad_norm"][-1])
    assert np.isnan(run.columns["mfu"][-1]), "no float can hold it"


@pytest.mark.parametrize("name", ["prediction.json", "comparison.json", "profile.json", "config.toml"])
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"a":' * 5000])
def test_damaged_files_are_notes(tmp_path: Path, name: str, content: bytes) -> None:
    folder = written.run(tmp_path / "r", steps=4)
    (folder / name).write_bytes(content)
    notes = read_run(folder).notes
    expected = [] if name == "config.toml" and content in (b"", b"[1]") else [f"{name} is damaged"]  # TOML, both
    assert [note.partition(":")[0] for note in notes] == expected


def test_a_file_that_is_too_large_is_left_out_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written.run(tmp_path / "r", steps=4)
    size = (folder / "profile.json").stat().st_size
    assert size > (folder / "comparison.json").stat().st_size
    for largest, notes in ((size, []), (size - 1, ["profile.json is larger than 0 MB and left out."])):
        monkeypatch.setattr(record, "LARGEST", largest)
        run = read_run(folder)
        assert run.notes == notes and bool(run.profile) is not bool(notes) and run.comparison


def test_what_a_run_that_began_anew_wrote_again_is_in_order(tmp_path: Path) -> None:
    """Of what starts said of themselves, the newest counts."""
    folder = written.run(tmp_path / "r", steps=4)
    before = read_run(folder)
    with (folder / "events.jsonl").open("a") as file:
        file.write(written.lines([{**before.setup, "layout": "tp4"}]))
    with (folder / "thermometers.jsonl").open("a") as file:
        file.write(written.lines([{**before.thermometers[0], "updates": {}}]))
    after = read_run(folder)
    assert (before.setup["layout"], after.setup["layout"]) == ("tp2 pp2", "tp4")
    steps = [line["step"] for line in before.thermometers]
    assert [line["step"] for line in after.thermometers] == sorted([*steps, steps[0]])


@pytest.mark.parametrize("steps", ['"6"', "6.0", "true"])
def test_a_number_of_steps_that_is_none_is_not_known(tmp_path: Path, steps: str) -> None:
    folder = written.run(tmp_path / "r", steps=4)
    (folder / "config.toml").write_text(f"[train]\nsteps = {steps}\n")
    assert read_run(folder).planned == 0


def test_a_configuration_is_read_without_its_credentials(tmp_path: Path) -> None:
    """Also without a key that has slashes, which is one as long as it is known where it is."""
    folder = written.run(tmp_path / "r", steps=4)
    (folder / "config.toml").write_text('[data]\ntrain = "s3://me:top/secret@bucket/tokens?token=alsosecret"\n')
    train = read_run(folder).config["data"]["train"]
    assert train.startswith("s3://") and "bucket/tokens" in train and "secret" not in train


def test_files_that_are_missing(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "events.jsonl").write_text(json.dumps({"event": "started", "time": 1.0}))
    assert read_run(folder).notes == ["There is no metrics.jsonl.", "There is no config.toml."]


@pytest.mark.parametrize("old", ["metrics.jsonl", "events.jsonl"])
def test_a_run_is_silent_since_the_newest_of_what_it_wrote(tmp_path: Path, old: str) -> None:
    folder = written.run(tmp_path / "r", steps=4)
    os.utime(folder / old, (1000.0, 1000.0))
    assert read_run(folder).seconds_since < 600


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no folder"):
        read_run(tmp_path / "absent")
    with pytest.raises(ConfigError, match="is no folder of a run"):
        read_run(tmp_path)


def test_a_large_file_is_told_by_the_megabytes_that_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written.run(tmp_path / "r", steps=4)
    monkeypatch.setattr(record, "LARGEST", 1 << 20)
    (folder / "profile.json").write_text(f'{{"a": "{"x" * (1 << 20)}"}}')
    assert read_run(folder).notes == ["profile.json is larger than 1 MB and left out."]


def test_what_is_no_number_and_no_event_is_passed_over(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r", steps=4)
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "odd": true, "name": "x"}\n')
    (folder / "events.jsonl").write_text('{"time": 1.0}\n{"event": 3}\n{"event": "saved", "time": "noon"}\n')
    run = read_run(folder)
    assert list(run.columns) == ["step", "loss"] and run.events == [{"event": "saved", "time": None}]


def test_hours_are_those_of_the_steps_that_tell_theirs(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r", steps=4)
    (folder / "metrics.jsonl").write_text(
        written.lines([{"step": 1, "seconds": 3600.0}, {"step": 2}, {"step": 3, "seconds": 1800.0}])
    )
    assert read_run(folder).hours.tolist() == [1.0, 1.0, 1.5]


def test_a_run_of_a_clock_that_is_ahead_has_written_just_now(tmp_path: Path) -> None:
    folder, later = written.run(tmp_path / "r", steps=4), time.time() + 7200
    os.utime(folder / "metrics.jsonl", (later, later))
    assert read_run(folder).seconds_since == 0.0
