"""The configuration of a run, as its page shows it."""

from pathlib import Path

import pytest

from colonnade.config.thermometers import ALL_SITES
from colonnade.report.record import read_run
from colonnade.report.settings import differences, drawn, keys_of
from tests.report import written
from tests.report.test_top import cells


def test_keys_at_their_defaults_are_in_the_table_of_all_alone(tmp_path: Path) -> None:
    """Lists too, which are no lists in the schema."""
    folder = written.run(tmp_path / "r")
    sites = ", ".join(f'"{site}"' for site in ALL_SITES)
    (folder / "config.toml").write_text(
        f"[train]\nsteps = 7\n[checkpoint]\nkeep = 2\nkeep_every = 3\n[thermometers]\nsites = [{sites}]\n"
    )
    (folder / "events.jsonl").unlink()
    own, every = str(drawn(read_run(folder))).split("all 4 keys")
    assert cells(own) == [["train.steps", "7", ""], ["checkpoint.keep_every", "3", "0"]]
    assert [name for name, _ in cells(every)] == [
        "train.steps", "checkpoint.keep", "checkpoint.keep_every", "thermometers.sites",
    ]  # fmt: skip


def test_a_key_that_no_version_knows_here_is_shown_without_a_default(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r")
    (folder / "config.toml").write_text('[train]\nsteps = 7\n[of_later]\nkey = "new"\n')
    own, _ = str(drawn(read_run(folder))).split("<h3")
    assert cells(own) == [["train.steps", "7", ""], ["of_later.key", "&quot;new&quot;", ""]]


@pytest.mark.parametrize("changed", ["train.steps: 4 -> 8", ["train.steps: 4 -> 8"]])
def test_a_change_on_the_way_stands_with_the_step_behind_which_it_came(tmp_path: Path, changed: object) -> None:
    """Also where the event says one alone."""
    folder = written.run(tmp_path / "r")
    (folder / "events.jsonl").write_text(written.lines([{"event": "resumed", "step": 3, "changed": changed}]))
    changes = str(drawn(read_run(folder))).split("Changes on the way")[1].split("<details")[0]
    assert cells(changes) == [["3", "train.steps: 4 -&gt; 8"]]


def test_a_table_of_values_is_one_key() -> None:
    blend = {"data": {"blend": {"a/web": 3, "b.books": 1}, "train": "x"}}
    assert keys_of(blend) == {"data.blend": {"a/web": 3, "b.books": 1}, "data.train": "x"}


def test_runs_differ_in_neither_their_folders_nor_in_changes_of_no_key(tmp_path: Path) -> None:
    runs = [written.run(tmp_path / name) for name in ("first", "second")]
    config = (runs[0] / "config.toml").read_text()
    (runs[1] / "config.toml").write_text(config.replace("runs/<b>bold</b>", "runs/other"))
    (runs[0] / "events.jsonl").write_text(written.lines([{"event": "started"}]))
    odd = {"event": "resumed", "step": 3, "changed": ["the machine: a -> b", "no more"]}
    (runs[1] / "events.jsonl").write_text(written.lines([odd]))
    assert "Their configurations are the same." in differences([read_run(folder) for folder in runs])


def test_all_changes_of_a_key_are_told_once(tmp_path: Path) -> None:
    runs = [written.run(tmp_path / name) for name in ("first", "second")]
    steps = [(3, "40 -> 50"), (3, "40 -> 50"), (7, "50 -> 60")]
    changes = [{"event": "changed", "step": step, "changed": [f"train.steps: {words}"]} for step, words in steps]
    for folder, events in zip(runs, ([], changes), strict=True):
        (folder / "events.jsonl").write_text(written.lines([{"event": "started"}, *events]))
    rows = cells(differences([read_run(folder) for folder in runs]))
    assert rows == [["train.steps", "40", "40 -&gt; 50 behind step 3; 50 -&gt; 60 behind step 7"]]
