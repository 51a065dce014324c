"""Under torchrun with fewer ranks than before: who goes on, who waits, and who tells of it."""

from pathlib import Path

import pytest

from colonnade.config.fitting import Fit
from colonnade.config.load import load
from colonnade.launch import launch
from colonnade.train import start as begin
from colonnade.train.restarts import fitting_by_now
from tests.runs import events


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_without_a_place_wait_for_the_end_and_the_first_tells_why(
    rank: int, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three of four have come back, for a layout of two."""
    settings, waited = load(config, ["parallel.tp=2", "parallel.dp=2", "model.num_layers=1"]), list[int]()
    fit = fitting_by_now(settings, 3, 0)
    assert fit.num_ranks == 2 and fit.reason
    monkeypatch.setattr(launch, "elastic_run", lambda: "job")
    monkeypatch.setattr(launch, "rank_and_size", lambda: (rank, 3))
    monkeypatch.setattr(launch, "speaks_first", lambda: rank == 0)
    monkeypatch.setattr(launch, "use_first", lambda num_ranks: rank < num_ranks)
    monkeypatch.setattr(launch, "be_idle", lambda: waited.append(rank))
    assert begin.fitted(settings) == (fit if rank < 2 else None) and waited == [2] * (rank == 2)
    said = f"Going on with fewer ranks: {fit.reason}.\n"
    assert capsys.readouterr().out == said * (rank == 0)
    (tmp_path / "run").mkdir()
    begin.note_fewer_ranks(fit)
    begin.note_fewer_ranks(Fit(settings, ""))
    told = [each["reason"] for each in events(tmp_path / "run")] if rank == 0 else list((tmp_path / "run").iterdir())
    assert told == [fit.reason] * (rank == 0)
