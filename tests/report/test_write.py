"""Where a page is written, and of how many runs."""

from pathlib import Path

import pytest

from colonnade.errors import ConfigError
from colonnade.report.write import DEFAULT, MOST_RUNS, write_report
from tests.report import written


def test_a_page_of_as_many_runs_as_it_can_show_is_written_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written.run(tmp_path / "r", steps=2)
    monkeypatch.chdir(tmp_path)
    write_report([folder] * MOST_RUNS, None)
    assert f"{MOST_RUNS} runs" in Path(DEFAULT).read_text() and not (folder / DEFAULT).exists()


def test_what_could_not_be_read_of_a_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written.run(tmp_path / "r", steps=2)
    (folder / "config.toml").unlink()
    write_report([folder], None)
    assert "r: There is no config.toml.\n" in capsys.readouterr().out


def test_a_task_is_asked_of_a_sweep_alone(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r", steps=2)
    with pytest.raises(ConfigError, match="--task is for the folder of a sweep: give one such folder alone"):
        write_report([folder], None, task="mnli")
    assert not (folder / DEFAULT).exists()
