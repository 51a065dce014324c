"""Where a page is written, and of how many runs."""

from pathlib import Path

import pytest

from colonnade.report.write import DEFAULT, MOST_RUNS, write_report
from tests.report import written


def test_a_page_of_as_many_runs_as_it_can_show_is_written_where_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written.run(tmp_path / "r", steps=2)
    monkeypatch.chdir(tmp_path)
    write_report([folder] * MOST_RUNS, None)
    assert f"{MOST_RUNS} runs" in Path(DEFAULT).read_text() and not (folder / DEFAULT).exists()
