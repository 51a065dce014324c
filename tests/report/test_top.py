"""The top of a page: whether a run goes on, how far it has come, and its numbers beside those of others."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from colonnade.report.charts import charts, final
from colonnade.report.page import page, seconds_left, state_of
from colonnade.report.record import read_run
from colonnade.train.divergence import BY_HAND
from tests.report import written
from tests.report.test_page import shown, under_way


def measured(folder: Path, lines: Sequence[Mapping[str, Any]]) -> Path:
    """A run with these metrics."""
    written.run(folder)
    (folder / "metrics.jsonl").write_text(written.lines(lines))
    return folder


def cells(text: str) -> list[list[str]]:
    """Rows of tables."""
    rows = [row.split("</td>")[:-1] for row in text.split("<tr>")]
    return [[re.sub("<.*?>", "", cell) for cell in row] for row in rows if row]


def test_a_run_that_has_written_nothing_for_long_is_silent(tmp_path: Path) -> None:
    folder, long_ago = under_way(tmp_path / "r"), time.time() - 7200
    assert "r under way" in shown(folder).text
    for name in ("metrics.jsonl", "events.jsonl"):
        os.utime(folder / name, (long_ago, long_ago))
    assert "r silent for 2 h 00 min" in shown(folder).text


def test_a_bar_and_a_time_show_how_far_a_run_has_come(tmp_path: Path) -> None:
    """40 of 100 steps, of two seconds each."""
    text = page([read_run(under_way(tmp_path / "r"))])
    assert '<div class="progress" title="step 40 of 100"><i style="width:40.00%"></i>' in text
    assert re.search(r"<span>training</span><b>1 min 20 s</b>", text)


def test_the_best_validation_is_the_lowest_and_is_told_with_its_step(tmp_path: Path) -> None:
    losses = {5: 3.0, 6: 2.0, 7: 4.0}
    lines = [{"step": step, "loss": 1.0, "validation_loss": loss} for step, loss in losses.items()]
    folder = measured(tmp_path / "r", lines)
    assert final(read_run(folder)) == {"loss": 1.0, "validation_loss": 2.0, "best_step": 6.0}
    assert "best validation 2.0000 at step 6" in shown(folder).text


def test_several_runs_have_their_last_numbers_beside_each_other(tmp_path: Path) -> None:
    """Of what a run has none of, there is a dash."""
    first = measured(
        tmp_path / "first",
        [
            {"step": 1, "loss": 4.0, "seconds": 30.0, "tokens": 1000, "validation_loss": 5.0},
            {"step": 2, "loss": 3.0, "seconds": 40.0, "tokens": 2000, "tokens_per_second": 50.0, "mfu": 0.25},
        ],
    )
    second = measured(tmp_path / "second", [{"step": 1, "loss": 2.0, "seconds": 5.0}])
    rows = cells(page([read_run(first), read_run(second)]))
    assert rows[:2] == [
        ["first", "2", "3.0000", "5.0000", "2k", "50", "25.0%", "1 min 10 s"],
        ["second", "1", "2.0000", "–", "–", "–", "–", "5 s"],
    ]


def test_notes_of_several_runs_say_of_which_they_are(tmp_path: Path) -> None:
    """What several say alike is said once."""
    first, second = written.run(tmp_path / "first"), written.run(tmp_path / "second")
    (second / "config.toml").unlink()
    assert "first There is no" not in (alone := shown(second).text) and "second: There is no" not in alone
    both = shown(first, second).text
    assert "second: There is no config.toml." in both and "first: There" not in both
    assert both.count("a note of the run") == 1


def test_losses_of_training_share_a_chart_and_scores_of_validation_have_their_own(tmp_path: Path) -> None:
    line = {"loss": 2.0, "masked_loss": 1.5, "sentence_order_loss": 0.5, "validation_masked_loss": 1.6, "mfu": 0.4}
    found = {chart.title: chart for chart in charts([read_run(measured(tmp_path / "r", [{"step": 1, **line}]))])}
    assert [*found] == ["Loss", "Losses", "MFU", "Validation masked loss"]
    assert [series.name for series in found["Losses"].series] == ["masked_loss", "sentence_order_loss"]
    assert (found["MFU"].words(0.4), found["Loss"].words(0.4)) == ("40.0%", "0.4")


def test_a_number_of_parameters_that_no_float_can_hold_is_not_shown(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r")
    (folder / "events.jsonl").write_text(f'{{"event": "setup", "layout": "tp2", "parameters": {10**400}}}\n')
    assert '<p class="quiet">tp2</p>' in page([read_run(folder)])


def test_the_setup_that_is_shown_is_that_of_the_newest_start(tmp_path: Path) -> None:
    folder = written.run(tmp_path / "r")
    with (folder / "events.jsonl").open("a") as file:
        file.write(written.lines([{"time": 1400.0, "event": "setup", "layout": "tp8", "precision": "bf16"}]))
    assert "tp8 · bf16" in shown(folder).text and "tp2 pp2" not in shown(folder).text


def test_of_several_runs_each_adds_its_own_charts(tmp_path: Path) -> None:
    """A score, or another loss, that the first has none of."""
    first = measured(tmp_path / "first", [{"step": 1, "loss": 4.0}])
    second = measured(tmp_path / "second", [{"step": 1, "loss": 3.0, "tokens_loss": 2.0, "validation_accuracy": 0.5}])
    found = {chart.title: [line.name for line in chart.series] for chart in charts([read_run(first), read_run(second)])}
    assert found == {
        "Loss": ["first", "second"],
        "Tokens loss": ["second"],
        "Validation accuracy": ["second"],
    }


def test_a_run_beyond_its_plan_is_at_its_end(tmp_path: Path) -> None:
    """As where fewer steps are asked of one that goes on."""
    folder = under_way(tmp_path / "r")
    (folder / "config.toml").write_text(written.CONFIG.format(steps=32))
    run = read_run(folder)
    assert '<div class="progress" title="step 40 of 40"><i style="width:100.00%"></i>' in page([run])
    assert seconds_left(run) == 0.0


def test_a_device_is_told_by_its_name_where_it_has_one(tmp_path: Path) -> None:
    for about, words in (({"device": "cuda", "device_name": "H200"}, "tp2 · H200"), ({"device": "cpu"}, "tp2 · cpu")):
        folder = written.run(tmp_path / words[-3:])
        (folder / "events.jsonl").write_text(written.lines([{"event": "setup", "layout": "tp2", **about}]))
        assert words in shown(folder).text


def test_of_several_runs_the_details_of_each_are_a_click_away(tmp_path: Path) -> None:
    runs = [read_run(written.run(tmp_path / name, steps=3)) for name in ("first", "second")]
    folded = [page(each).count("thermometers, memory, profile, events, configuration") for each in (runs[:1], runs)]
    assert folded == [0, 2]


@pytest.mark.parametrize("end", ["finished", "interrupted", "diverged"])
def test_a_run_that_was_set_back_by_hand_is_as_it_was_until_it_is_started(tmp_path: Path, end: str) -> None:
    folder, states = written.run(tmp_path / "r", steps=3), list[str]()
    events: list[dict[str, Any]] = [{"event": "started"}, {"event": end, "step": 3}]
    for more in ({"event": "rolled back", "to": 2, "reason": BY_HAND}, {"event": "resumed", "step": 2}):
        events.append(more)
        (folder / "events.jsonl").write_text(written.lines(events))
        states.append(state_of(read_run(folder)))
    assert states == [end, "running"]
