"""A sweep's table: median and spread over seeds, the paper's figures, and what is refused."""

import csv
import html
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from colonnade.errors import ConfigError
from colonnade.report.page import sweep_page
from colonnade.report.published import PUBLISHED
from colonnade.report.sweep import as_csv, read_sweep_folder
from colonnade.report.write import write_report
from tests.commands import here
from tests.report.test_page import EVIL, Reader
from tests.report.test_top import cells

SCORES = {1e-5: [0.80, 0.84, 0.82], 2e-5: [0.85, 0.81, 0.86]}


def point(rate: float, seed: int, accuracy: float | None, state: str = "finished", **more: Any) -> dict[str, Any]:
    name = f"learning_rate-{rate:g}_seed-{seed}"
    scores = {} if accuracy is None else {"loss": 1 - accuracy, "accuracy": accuracy}
    values = {"optim.learning_rate": rate, "train.seed": seed}
    return {"point": name, **values, "state": state, "reason": "", "step": 90, **scores, "seconds": 12.5, **more}


def write(folder: Path, points: list[dict[str, Any]], score: str = "accuracy", task: str = "mnli") -> Path:
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps({"points": points, "settings": [{"score": score}], "best": None}))
    (folder / "dev.json").write_text(json.dumps({"examples": {"format": task}}))
    for each in points:
        (folder / f"{each['point']}.toml").write_text(f'[data]\ntrain = "all"\nvalidation = "{folder / "dev"}"\n')
    return folder


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    points = [point(rate, seed, each) for rate, scores in SCORES.items() for seed, each in enumerate(scores)]
    points.append(point(2e-5, 9, 0.1, "diverged", reason="loss is not finite"))
    points.append(point(2e-5, 10, 0.2, "failed", reason="exit status 137"))
    points.append(point(3e-5, 1, None, "failed", reason=EVIL))
    return write(tmp_path / "sweep", points)


def test_median_and_spread_over_seeds_the_best_setting_first(sweep: Path) -> None:
    found = read_sweep_folder(sweep)
    assert [group.values for group in found.groups] == [{"optim.learning_rate": 2e-5}, {"optim.learning_rate": 1e-5}]
    for group, rate in zip(found.groups, (2e-5, 1e-5), strict=True):
        spread = group.scores["accuracy"]
        assert spread.median == statistics.median(SCORES[rate])
        assert spread.deviation == pytest.approx(statistics.stdev(SCORES[rate]))
    assert found.task == "mnli"
    assert found.score_names == ["accuracy", "loss"], "keys of the configuration are none, nor is what a point took"


def test_a_score_that_no_float_can_hold_or_no_chart_is_none(tmp_path: Path) -> None:
    others = (10**400, math.nan, 1.7e308, -1.7e308)
    points = [point(1e-5, 1, 0.8), *({**point(1e-5, n, 0.5), "accuracy": each} for n, each in enumerate(others, 2))]
    found = read_sweep_folder(write(tmp_path / "s", points))
    (group,) = found.groups
    assert group.scores["accuracy"].numbers == [0.8] and sweep_page(found)


def test_a_setting_of_which_no_point_has_another_score_is_shown_without_it(tmp_path: Path) -> None:
    """Beside one that has it."""
    points = [point(1e-5, 1, 0.9, loss=math.nan), point(1e-5, 2, 0.9, loss=None), point(2e-5, 1, 0.8)]
    found = read_sweep_folder(write(tmp_path / "s", points, task="rte"))
    rows = csv.DictReader(as_csv(found).splitlines())
    assert [(row["accuracy median"], row["runs"], bool(row["loss median"])) for row in rows] == [
        ("0.9", "2", False),
        ("0.8", "1", True),
    ]
    assert ["1e-05", "2", "0.9000", ""] in [row[:4] for row in cells(sweep_page(found))]


def test_less_loss_is_better(tmp_path: Path) -> None:
    found = read_sweep_folder(write(tmp_path / "s", [point(1e-5, 1, 0.8), point(2e-5, 1, 0.9)], score="loss"))
    assert [group.values["optim.learning_rate"] for group in found.groups] == [2e-5, 1e-5]


@pytest.mark.parametrize("name", ["loss/web.v1", "loss/data/web.v1"])
def test_a_score_of_a_data_set_with_a_dot_in_its_name_is_a_score(tmp_path: Path, name: str) -> None:
    """And no key, by whose value each seed would be a setting of its own."""
    points = [point(1e-5, seed, 0.8, **{name: 2.0 + seed}) for seed in (1, 2)]
    found = read_sweep_folder(write(tmp_path / "s", points, score=name, task="rte"))
    (group,) = found.groups
    assert found.score == name and group.values == {"optim.learning_rate": 1e-5}
    assert group.scores[name].numbers == [3.0, 4.0]
    (row,) = csv.DictReader(as_csv(found).splitlines())
    assert row["runs"] == "2" and row[f"{name} median"] == "3.5"


def test_the_page(sweep: Path) -> None:
    read = Reader(sweep_page(read_sweep_folder(sweep)))
    text = read.text
    for words in ("9 points: 6 finished, 1 diverged, 2 failed", "0.8500", "0.8100 to 0.8600", "0.0265", "BERT 3.9B",
                  "0.9140", "mismatched", "loss is not finite", "alert(1)",
                  "this sweep: optim.learning_rate = 2e-05", "median of 3 runs", "deviation 2e-05 3 ",
                  "0.1500 12.5 s"):  # fmt: skip
        assert words in text, words
    assert not [script for script in read.scripts if "alert(1)" in script]


def test_a_strip_has_its_mark_at_the_median(sweep: Path) -> None:
    """Wherever that stands among the seeds."""
    strips = sweep_page(read_sweep_folder(sweep)).split('class="strip"')[1:]
    for strip in strips:
        dots, (median,) = (re.findall(f'class="{kind}" style="left:(.*?)%', strip) for kind in ("dot", "median"))
        assert median == sorted(dots, key=float)[1]
    assert len(strips) == 2


@pytest.mark.parametrize(
    ("task", "keys"), [("mnli", ["a run", "median", "the paper's models"]), ("rte", ["a run", "median"])]
)
def test_each_kind_of_mark_in_a_strip_is_named(tmp_path: Path, task: str, keys: list[str]) -> None:
    """The paper's models where there are some, each in every strip."""
    points = [point(rate, 1, 0.8 + 1000 * rate) for rate in (1e-5, 2e-5)]
    text = sweep_page(read_sweep_folder(write(tmp_path / "s", points, task=task)))
    legend = text.split('class="legend">')[1].split("</figcaption>")[0]
    assert [html.unescape(each) for each in re.findall(r"</i>([^<]+)</span>", legend)] == keys
    theirs = [strip.count('class="theirs"') for strip in text.split('class="strip"')[1:]]
    assert theirs == [6 if task == "mnli" else 0] * 2
    places = re.findall(r'class="(?:dot|median|theirs)" style="left:(.*?)%', text)
    assert len(places) == 2 * (2 + theirs[0]) and all(0 < float(place) < 100 for place in places)


def test_points_that_have_failed_stand_out_among_those_that_have_not(sweep: Path) -> None:
    states = re.findall(r'<span class="(\w*)">(finished|diverged|failed)<', sweep_page(read_sweep_folder(sweep)))
    assert states == [("", "finished")] * 6 + [("bad", "diverged"), ("bad", "failed"), ("bad", "failed")]


def test_what_the_paper_scored_otherwise_is_not_in_the_table(tmp_path: Path) -> None:
    """And settings are ordered by a score that there is, where the summary names none."""
    points = [{"point": "a", "optim.learning_rate": 1e-3, "state": "finished", "matthews": 0.5}]
    found = read_sweep_folder(write(tmp_path / "s", points, score="accuracy"))
    assert (found.task, found.score) == ("mnli", "matthews")
    assert [row["source"] for row in csv.DictReader(as_csv(found).splitlines())] == ["this sweep"]
    assert "a finished" in Reader(sweep_page(found)).text, "a summary of few columns is shown too"


def test_the_task_is_that_of_the_training_data_where_there_is_no_other(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", [point(1e-5, 1, 0.8)], task="qqp")
    (config,) = folder.glob("*.toml")
    config.write_text(config.read_text().replace('train = "all"\nvalidation', "train"))
    assert read_sweep_folder(folder).task == "qqp"


def test_the_table(sweep: Path) -> None:
    rows = list(csv.DictReader(as_csv(read_sweep_folder(sweep)).splitlines()))
    assert rows[0]["optim.learning_rate"] == "2e-05" and rows[0]["runs"] == "3"
    assert [float(rows[0][f"accuracy {what}"]) for what in ("median", "lowest", "highest")] == [0.85, 0.81, 0.86]
    assert [float(rows[1][f"accuracy {what}"]) for what in ("median", "lowest", "highest")] == [0.82, 0.80, 0.84]
    assert float(rows[0]["accuracy deviation"]) == pytest.approx(0.0264575)
    theirs = [row for row in rows if row["source"] != "this sweep"]
    assert theirs[0]["source"] == "BERT 336M (matched), Megatron-LM" and float(theirs[0]["accuracy median"]) == 0.897
    assert len(theirs) == 6


def test_credentials_are_in_no_table(tmp_path: Path) -> None:
    places = [f"s3://me:topsecret@bucket/{name}" for name in ("a", "b")]
    points = [point(1e-5, seed, 0.8, **{"data.train": place}) for seed, place in enumerate(places)]
    found = read_sweep_folder(write(tmp_path / "s", points))
    assert len(found.groups) == 2 and "topsecret" not in as_csv(found) + sweep_page(found)


def test_the_command(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_report([sweep], None)
    assert (sweep / "report.html").is_file() and (sweep / "report.csv").is_file()
    assert "report.csv" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="one such folder alone"):
        write_report([sweep, sweep], None)
    with pytest.raises(ConfigError, match=r"--task chess: the paper has no figures of it. It has those of mnli"):
        write_report([sweep], None, task="chess")
    with pytest.raises(ConfigError, match=r"--output .*res\.csv: what is written is \.html or \.htm"):
        write_report([sweep], sweep / "res.csv")
    with pytest.raises(ConfigError, match=r"--live is of runs, and .* is the folder of a sweep"):
        write_report([sweep], None, live=5)
    write_report([sweep], None, task="qqp")
    assert ",0.923," in (sweep / "report.csv").read_text()


def test_a_sweep_is_not_watched(sweep: Path, tmp_path: Path) -> None:
    answer = here("watch", sweep, "--once")
    assert answer.status == 2 and f"{sweep} is the folder of a sweep, and one run is shown." in answer.err
    assert f"Name a run's folder in it, or draw the sweep with `colonnade report {sweep}`." in answer.err
    (tmp_path / "none").mkdir()
    for command, takes_sweeps in (("watch", False), ("report", True)):
        answer = here(command, tmp_path / "none")
        assert answer.status == 2 and "is no folder of a run" in answer.err
        assert ("or the folder of a sweep, with its summary.json" in answer.err) == takes_sweeps


def test_another_task_has_no_figures_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "s", [point(1e-5, 1, 0.8)], task="rte")
    write_report([folder], tmp_path / "x.html")
    assert "--task NAME" in capsys.readouterr().out
    assert "BERT 336M" not in (tmp_path / "x.html").read_text()


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"points": 3}', '{"points": [1]}', '{"points": [{"point": "a"}]}', "{" * 9]
)
def test_a_damaged_summary_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(ConfigError, match=r"is no summary of a sweep .*\. Remove it, and run `colonnade finetune`"):
        read_sweep_folder(tmp_path)


def test_a_sweep_of_which_nothing_has_ended(tmp_path: Path) -> None:
    text = Reader(sweep_page(read_sweep_folder(write(tmp_path / "s", [])))).text
    assert "No point of the sweep has ended yet." in text


def test_the_published_figures_are_the_papers() -> None:
    """Read again from the paper's tables, one by one."""
    medians = {task: [tuple(each.figures.values()) for each in models] for task, models in PUBLISHED.items()}
    assert medians["qqp"] == [(0.923,), (0.926,), (0.927,)]
    assert medians["race"][:3] == [(0.83,), (0.873,), (0.895,)] and medians["race"][3] == (0.909,)
    assert medians["squad"][2] == (95.5, 90.0) and medians["squad"][5] == (91.2, 88.5), "as questions are scored here"
    assert medians["wikitext103"] == [(19.31,), (12.76,), (10.81,)]
    assert medians["lambada"] == [(0.4518,), (0.6173,), (0.6651,)]


def test_figures_of_answers_stand_beside_those_of_the_sweep(tmp_path: Path) -> None:
    """In percent, as evaluations tell them, and by their names."""
    scores = {"f1": 94.0, "exact_match": 87.0}
    folder = write(tmp_path / "s", [point(1e-5, 1, None, **scores)], score="f1", task="squad")
    ours, theirs, *_ = csv.DictReader(as_csv(read_sweep_folder(folder)).splitlines())
    assert [(row["f1 median"], row["exact_match median"]) for row in (ours, theirs)] == [
        ("94.0", "87.0"),
        ("94.2", "88.0"),
    ]


def test_a_setting_of_one_run_has_no_range(tmp_path: Path) -> None:
    """Nor a deviation; a step has its thousands apart."""
    folder = write(tmp_path / "s", [point(1e-5, 1, 0.8, step=12_345)], task="rte")
    settings, points = sweep_page(read_sweep_folder(folder)).split("<h2>Points")
    assert cells(settings)[-1] == ["1e-05", "1", "0.8000", "0.2000", "", ""]
    (row,) = csv.DictReader(as_csv(read_sweep_folder(folder)).splitlines())
    assert [row[f"accuracy {what}"] for what in ("median", "lowest", "highest", "deviation")] == ["0.8"] * 3 + [""]
    assert cells(points)[-1][1:3] == ["finished", "12,345"]


def test_the_table_of_a_page_replaces_no_table_of_the_sweep(sweep: Path) -> None:
    (sweep / "summary.csv").write_text("the sweep's own")
    with pytest.raises(ConfigError, match=r"summary\.csv is among what this command is given"):
        write_report([sweep], sweep / "summary.html")
    assert (sweep / "summary.csv").read_text() == "the sweep's own" and not (sweep / "summary.html").exists()
