"""Which lines stand on which chart, and how each is drawn."""

from pathlib import Path

import numpy as np

from colonnade.report.charts import charts, final
from colonnade.report.page import page
from colonnade.report.record import read_run
from tests.report import written
from tests.report.test_top import measured


def test_one_run_has_training_and_validation_in_one_chart(tmp_path: Path) -> None:
    """In two colours; validation, which has few steps, as dots."""
    found = charts([read_run(written.run(tmp_path / "r"))])
    assert [chart.title for chart in found] == ["Loss", "Throughput", "MFU", "Learning rate", "Gradient norm"]
    lines = found[0].series
    assert [(line.name, line.colour, line.dots) for line in lines] == [
        ("training", 0, False),
        ("validation", 1, True),
    ]
    assert [chart.title for chart in found if not chart.may_be_log] == ["Learning rate"]


def test_several_runs_have_a_colour_each_in_every_chart(tmp_path: Path) -> None:
    """A run without such numbers takes nobody's colour."""
    names = ("first", "second", "third")
    runs = [read_run(written.run(tmp_path / name, steps=12)) for name in names]
    del runs[1].columns["mfu"]  # type: ignore[attr-defined]
    found = {chart.title: chart for chart in charts(runs)}
    assert [[line.colour for line in found[name].series] for name in ("Loss", "Validation loss")] == [[0, 1, 2]] * 2
    assert [(line.name, line.colour) for line in found["MFU"].series] == [("first", 0), ("third", 2)]
    assert all(line.dots for line in found["Validation loss"].series)


def test_each_loss_of_a_task_with_several_has_a_colour_or_among_several_runs_a_chart(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 3.0, "masked_loss": 2.0, "sentence_order_loss": 1.0} for step in (1, 2)]
    runs = [read_run(measured(tmp_path / name, lines)) for name in ("first", "second")]

    def told(count: int) -> dict[str, list[tuple[str, int]]]:
        return {chart.title: [(line.name, line.colour) for line in chart.series] for chart in charts(runs[:count])}

    assert told(1) == {"Loss": [("training", 0)], "Losses": [("masked_loss", 0), ("sentence_order_loss", 1)]}
    both = [("first", 0), ("second", 1)]
    assert told(2) == {"Loss": both, "Masked loss": both, "Sentence order loss": both}


def test_what_was_never_a_number_has_no_chart(tmp_path: Path) -> None:
    lines = [{"step": step, "loss": 1.0, "validation_accuracy": np.nan, "mfu": np.inf} for step in (1, 2)]
    run = read_run(measured(tmp_path / "r", lines))
    assert [chart.title for chart in charts([run])] == ["Loss"] and final(run) == {"loss": 1.0}


def test_a_page_begins_with_charts_by_step(tmp_path: Path) -> None:
    text = page([read_run(written.run(tmp_path / "r"))])
    assert text.count(' id="x-step" checked>') == text.count(" checked>") == 1
