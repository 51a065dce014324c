"""What a terminal shows beside numbers, and how long it waits."""

import math
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from colonnade.errors import ConfigError
from colonnade.report import growing
from colonnade.report.watch import spark, watch
from tests.report import written


def test_a_line_of_bars_is_as_high_as_its_numbers() -> None:
    assert spark([1.0, 2.0, 3.0, 1.5]) == "▁▅█▃" and spark([4.0, 4.0]) == "▁▁"


def test_what_could_not_be_read_is_said(tmp_path: Path) -> None:
    folder, terminal = written.run(tmp_path / "r", steps=3), StringIO()
    (folder / "config.toml").unlink()
    watch(folder, every=1, once=True, console=Console(file=terminal, width=100))
    assert "There is no config.toml." in terminal.getvalue()


def seen(folder: Path, width: int = 100) -> str:
    terminal = StringIO()
    watch(folder, every=1, once=True, console=Console(file=terminal, width=width))
    return terminal.getvalue()


def test_where_the_end_is_not_known_the_step_alone_is_shown(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r", steps=3)
    (folder / "config.toml").unlink()
    assert "of 0" not in seen(folder) and "3 of 3" in seen(written.run(tmp_path / "whole", steps=3))


def test_numbers_have_their_units_and_lines_their_ends(tmp_path: Path) -> None:
    """The lowest and the highest of all steps, also of those that share a bar."""
    folder = written.run(tmp_path / "r", steps=1000)
    text = seen(folder)
    assert "40.0%" in text and "1 – 3" in text


def test_an_event_of_which_no_step_is_known_is_not_shown(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r", steps=3)
    (folder / "events.jsonl").write_text(written.lines([{"event": "saved", "step": 2}, {"event": "rank lost"}]))
    assert "saved" in seen(folder) and "rank lost" not in seen(folder)


@pytest.mark.parametrize("name", ["exp[lr=1]", "exp[bold]", "exp[@click=x]", "exp[warm,lr"])
def test_a_name_with_brackets_is_shown_as_it_is(tmp_path: Path, name: str) -> None:
    assert f" {name}: finished " in seen(written.run(tmp_path / name, steps=3))


def test_a_narrow_terminal_has_lines_too(tmp_path: Path) -> None:
    text = seen(written.run(tmp_path / "r"), width=34)
    assert "▁" in text and "█" in text


@pytest.mark.parametrize("every", [math.nan, math.inf, 1e6])
def test_a_wait_without_an_end_is_refused(tmp_path: Path, every: float) -> None:
    with pytest.raises(ConfigError, match="is no time between two looks"):
        watch(written.run(tmp_path / "r", steps=3), every=every)


def test_a_run_that_goes_on_is_read_once_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is looked at."""
    folder, terminal, read, looks = written.run(tmp_path / "r", steps=3), StringIO(), [], []
    events, metrics = folder / "events.jsonl", folder / "metrics.jsonl"
    kept = events.read_text().splitlines(keepends=True)
    events.write_text("".join(line for line in kept if "finished" not in line))
    object_in = growing.object_in

    def look_again(seconds: float) -> None:
        looks.append(seconds)
        with metrics.open("a") as file:
            file.write(f'{{"step": {3 + len(looks)}, "loss": 1.0, "seconds": 2.0}}\n')
        if len(looks) == 4:
            with events.open("a") as file:
                file.write('{"time": 1.0, "event": "finished", "step": 7, "loss": 1.0}\n')

    monkeypatch.setattr(growing, "object_in", lambda line: read.append(line) or object_in(line))
    monkeypatch.setattr(time, "sleep", look_again)
    watch(folder, every=0.5, console=Console(file=terminal, width=100))
    assert looks == [0.5] * 4 and terminal.getvalue().count("7 of") == 1
    names = ("events.jsonl", "metrics.jsonl")
    assert len(read) == sum((folder / name).read_bytes().count(b"\n") for name in names)


def test_credentials_are_not_shown_and_an_event_takes_one_line(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r", steps=3)
    saved = {"event": "saved", "step": 2, "where": "s3://me:topsecret@bucket/x", "about": "more " * 50}
    (folder / "events.jsonl").write_text(written.lines([saved]))
    text = seen(folder, width=80)
    assert "bucket" in text and "topsecret" not in text
    assert sum("more" in line for line in text.splitlines()) == 1


def test_a_run_without_a_step_is_shown(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r", steps=3)
    (folder / "metrics.jsonl").write_text("")
    assert "r: finished" in (text := seen(folder)) and "metrics.jsonl has no step yet." in text


def test_whoever_has_seen_enough_of_a_run_leaves_it_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written.run(tmp_path / "r", steps=3)
    (folder / "events.jsonl").write_text(written.lines([{"event": "started"}]))

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    try:
        watch(folder, every=1, console=Console(file=(terminal := StringIO()), width=100))
    except KeyboardInterrupt:
        pytest.fail("it is no error")
    assert "r: under way" in terminal.getvalue()
