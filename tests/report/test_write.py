"""Where a page is written, and of how many runs."""

from pathlib import Path

import pytest

from colonnade.errors import ConfigError
from colonnade.report.record import names_of
from colonnade.report.write import DEFAULT, MOST_RUNS, write_report
from colonnade.train.lines import object_in
from tests.report import written


def test_a_page_of_as_many_runs_as_it_can_show_is_written_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written.run(tmp_path / "r", steps=2)
    monkeypatch.chdir(tmp_path)
    write_report([folder] * MOST_RUNS, None)
    assert f"{MOST_RUNS} runs" in Path(DEFAULT).read_text() and not (folder / DEFAULT).exists()


def test_the_page_of_a_run_has_what_its_thermometers_have_measured(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r", steps=4)
    write_report([folder], None)
    assert "<h2>Thermometers</h2>" in (folder / DEFAULT).read_text()


def test_a_page_that_is_written_again_reads_what_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, parsed = written.run(tmp_path / "r", steps=50), list[object]()
    events = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    (folder / "events.jsonl").write_text(events[0])

    def sleep(seconds: float) -> None:
        parsed.clear()
        (folder / "events.jsonl").write_text("".join(events))

    monkeypatch.setattr("colonnade.report.write.time.sleep", sleep)
    monkeypatch.setattr("colonnade.report.growing.object_in", lambda line: (parsed.append(line), object_in(line))[1])
    write_report([folder], None, live=1)
    assert "saved" in (folder / DEFAULT).read_text() and 0 < len(parsed) < 50


def test_what_could_not_be_read_of_a_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written.run(tmp_path / "r", steps=2)
    (folder / "config.toml").unlink()
    write_report([folder], None)
    assert "r: There is no config.toml.\n" in capsys.readouterr().out


def test_runs_are_named_by_as_little_of_their_paths_as_tells_them_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [written.run(tmp_path / name, steps=2) for name in ("x/a/run", "y/a/run", "b/run", "other")]
    for folder in folders:
        (folder / "config.toml").unlink()
    write_report(folders, tmp_path / "page.html")
    names = ["x/a/run", "y/a/run", "b/run", "other"]
    assert capsys.readouterr().out.splitlines()[:4] == [f"{name}: There is no config.toml." for name in names]
    assert all(f"<b>{name}</b>" in (tmp_path / "page.html").read_text() for name in names)
    assert names_of([folders[0], folders[0], Path("/")]) == ["run", "run", "/"]


def test_a_task_is_asked_of_a_sweep_alone(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r", steps=2)
    with pytest.raises(ConfigError, match="--task is for the folder of a sweep: give one such folder alone"):
        write_report([folder], None, task="mnli")
    assert not (folder / DEFAULT).exists()
