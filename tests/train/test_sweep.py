"""Sweeps: which points there are, what is written down of each, and a whole one from the command line."""

from __future__ import annotations

import csv
import json
import math
import shutil
import signal
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from colonnade.config.load import load
from colonnade.errors import ConfigError, LockError
from colonnade.launch import launch
from colonnade.report.sweep import read_sweep_folder
from colonnade.report.write import write_report
from colonnade.train import tuning
from colonnade.train.side_by_side import Run, Share
from colonnade.train.sweep import SEED, Point, Sweep, read_sweep
from colonnade.train.tuning import Outcome, outcome_of, run_points, score_of, settings_of, summary_of, toml_of
from tests.commands import colonnade, forked
from tests.runs import Finished, at_step_4, events, metrics
from tests.tasks.examples import write_config, write_examples

BASE = """\
[model]
preset = "bert-base"
[data]
train = "tokens"
[train]
steps = 10
[run]
folder = "{folder}"
"""


def swept(folder: Path, lines: str) -> Sweep:
    path = folder / "config.toml"
    path.write_text(BASE.format(folder=folder / "runs") + f"[sweep]\n{lines}\n")
    found = read_sweep(path, [])
    assert found is not None
    return found


def test_every_combination_is_a_point(tmp_path: Path) -> None:
    found = swept(tmp_path, "optim.learning_rate = [1e-5, 2e-5]\ntrain.seed = [1, 2, 3]\nparts.frozen = [[], ['a']]")
    assert len(found.points) == 12 and len({point.name for point in found.points}) == 12
    point = found.points[3]
    assert point.name == "learning_rate-1e-05_seed-2_frozen-__a__"
    assert point.content["optim"] == {"learning_rate": 1e-5} and point.content["train"] == {"steps": 10, "seed": 2}
    assert point.content["run"] == {"folder": str(tmp_path / "runs" / point.name)}
    assert found.points[0].setting == found.points[2].setting != point.setting
    assert tomllib.loads(toml_of(point.content)) == point.content


def test_points_have_tables_of_their_own(tmp_path: Path) -> None:
    """Also within a section."""
    found = swept(tmp_path, "model.rotary.share = [0.25, 0.5]\n[model.rotary]\nbase = 1e6")
    expected = [{"base": 1e6, "share": share} for share in (0.25, 0.5)]
    assert [point.content["model"]["rotary"] for point in found.points] == expected


def test_points_are_uploaded_each_to_a_folder_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    stored = '[checkpoint]\nupload_to = "s3://bucket/runs?endpoint=host"\nkeep = 3\n[sweep]\ntrain.seed = [1, 2]\n'
    path.write_text(BASE.format(folder=tmp_path / "runs") + stored)
    found = read_sweep(path, [])
    assert found is not None
    assert [point.content["checkpoint"] for point in found.points] == [
        {"upload_to": f"s3://bucket/runs/seed-{seed}?endpoint=host", "keep": 3} for seed in (1, 2)
    ]


def test_a_sweep_without_a_folder_is_told(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    for run in ("", "[run]\ntensorboard = true\n", "[run]\nfolder = ''\n"):
        path.write_text(f"{run}[sweep]\ntrain.seed = [1, 2]\n")
        with pytest.raises(ConfigError, match=r"run\.folder names where its runs are\. Set both"):
            read_sweep(path, [])


def test_an_empty_text_stands_for_no_value(tmp_path: Path) -> None:
    """Also where the file has a value; of a key that a configuration must have it stays what it is."""
    path = tmp_path / "config.toml"
    given = BASE.replace("steps = 10", 'steps = 10\ninit_from = "some"').format(folder=tmp_path / "runs")
    path.write_text(given + "[sweep]\ntrain.init_from = ['', 'bert/base']\nmodel.num_labels = ['', 2]\n")
    found = read_sweep(path, [])
    assert found is not None
    names = [point.name for point in found.points]
    assert names[0] == "init_from-unset_num_labels-unset" and names[3] == "init_from-bert_base_num_labels-2"
    drawn, begun = found.points[0].content, found.points[3].content
    assert drawn["train"] == {"steps": 10} and drawn["model"] == {"preset": "bert-base"}
    assert begun["train"] == {"steps": 10, "init_from": "bert/base"} and begun["model"]["num_labels"] == 2
    assert tomllib.loads(toml_of(drawn)) == drawn
    assert found.points[0].setting[0] == 'train.init_from = ""' != found.points[3].setting[0]
    needed = swept(tmp_path, "train.precision = ['', 'fp32']").points[0]
    assert needed.content["train"]["precision"] == ""


def test_a_plain_configuration_has_no_sweep(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(BASE.format(folder="runs"))
    assert read_sweep(tmp_path / "config.toml", []) is None


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("", "lists nothing"),
        ("optim.learning_rat = [1]", "did you mean optim.learning_rate"),
        ("optim.learning_rate = 1e-5", "no list"),
        ("optim.learning_rate = []", "no list"),
        ("train.seed = [1, 1]", "twice"),
        ("train.init_from = ['a/b', 'a_b']", "alike as names of folders"),
        ("run.folder = ['a', 'b']", "same for all points"),
        ("train.epochs = [2, 3]", "leave train.steps out"),
        ("score = 3\ntrain.seed = [1]", "no name"),
    ],
)
def test_a_sweep_that_is_none(lines: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"(?i){said}"):
        swept(tmp_path, lines)


def test_a_point_with_a_name_that_no_file_can_have_is_told_with_the_value(tmp_path: Path) -> None:
    """Before anything is made; bytes count, not letters."""
    longest = "ä" * 104
    assert len(swept(tmp_path, f"train.init_from = ['{longest}']\ntrain.seed = [1]").points[0].name.encode()) == 225
    with pytest.raises(
        ConfigError, match=rf'would have 226 bytes, more than 225\. Shorten train\.init_from = "{longest}b"'
    ):
        swept(tmp_path, f"train.init_from = ['{longest}b']\ntrain.seed = [1]")
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs").mkdir()
    with pytest.raises(ConfigError, match=r"Shorten train\.init_from"):
        swept(tmp_path, f"train.init_from = ['{'a' * 300}']\ntrain.seed = [1]")


@pytest.mark.parametrize(
    ("lines", "override", "said"),
    [
        ("train.seed = [1, 2]", "train.seed=77", r"lists values of train.seed in \[sweep\], \[1, 2\]"),
        ("data.blend = [{a = 1.0}, {a = 1.0, b = 1.0}]", "data.blend.a=3", "lists values of data.blend in"),
        ("train.seed = [1, 2]", "sweep.train.seed=[1, 2, 3]", "stand in the file"),
        ("train.seed = [1, 2]", "sweep.train={seed = [1, 2, 3]}", "stand in the file"),
    ],
)
def test_what_would_have_no_effect_on_the_command_line_is_refused(
    lines: str, override: str, said: str, tmp_path: Path
) -> None:
    swept(tmp_path, lines)
    with pytest.raises(ConfigError, match=said):
        read_sweep(tmp_path / "config.toml", [override])
    assert read_sweep(tmp_path / "config.toml", ["train.seeds=77", "sweep.at_once=2"]) is not None


@pytest.mark.parametrize(("given", "lists"), [("train = 3", "train.seed"), ("model.rotary = 3", "model.rotary.share")])
def test_a_value_where_a_section_stands_is_told_with_the_point(tmp_path: Path, given: str, lists: str) -> None:
    """As in a configuration without [sweep]."""
    path = tmp_path / "config.toml"
    path.write_text(f"{given}\nrun.folder = 'runs'\n[sweep]\n{lists} = [1, 2]\n")
    found = read_sweep(path, [])
    assert found is not None and len(found.points) == 2
    path.write_text(toml_of(found.points[0].content))
    with pytest.raises(ConfigError, match=f"{given} gives a value to a section"):
        load(path)


def made(accuracy: Callable[[dict[str, object]], float | int]) -> Run:
    """A run that finds an accuracy, or ends with an exit status."""

    def run(config: Path, share: Share) -> int:
        content = tomllib.loads(config.read_text())
        found, folder = accuracy(content), Path(content["run"]["folder"])
        folder.mkdir(exist_ok=True)
        kind = "finished" if isinstance(found, float) else "diverged" if found == 3 else "started"
        with (folder / "events.jsonl").open("a") as stream:
            stream.write(json.dumps({"event": kind}) + "\n")
        if isinstance(found, int):
            return found
        line = {"step": 10, "validation_loss": 1 - found, "validation_accuracy": found}
        (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        return 0

    return run


def test_what_comes_of_the_points_is_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The median of the seeds decides; what diverges or fails is recorded, and the others go on."""
    sweep = swept(tmp_path, "optim.learning_rate = [0.1, 0.2, 0.3]\ntrain.seed = [1, 2, 3]")
    table: dict[tuple[float, int], float | int] = {
        (0.1, 1): 0.5, (0.1, 2): 0.9, (0.1, 3): 0.6,
        (0.2, 1): 0.7, (0.2, 2): 0.7, (0.2, 3): 0.8,
        (0.3, 1): 3, (0.3, 2): 1, (0.3, 3): 0.1,
    }  # fmt: skip
    calls: list[tuple[float, int]] = []

    def accuracy(content: dict[str, dict[str, float]]) -> float | int:  # type: ignore[misc]
        calls.append((content["optim"]["learning_rate"], int(content["train"]["seed"])))
        return table[calls[-1]]

    assert run_points(sweep, made(accuracy)) == 1  # type: ignore[arg-type]
    summary = json.loads((tmp_path / "runs" / "summary.json").read_text())
    assert summary["best"] == {
        "optim.learning_rate": 0.2, "points": 3, "score": "accuracy", "median": 0.7, "lowest": 0.7, "highest": 0.8,
    }  # fmt: skip
    assert [each["median"] for each in summary["settings"]] == [0.7, 0.6, 0.1]
    rows = list(csv.DictReader((tmp_path / "runs" / "summary.csv").read_text().splitlines()))
    assert [row["state"] for row in rows] == ["finished"] * 6 + ["diverged", "failed", "finished"]
    assert rows[4]["accuracy"] == "0.7" and rows[4]["step"] == "10" and "exit status 1" in rows[7]["reason"]
    told = capsys.readouterr().out
    assert "9 points: 7 finished, 1 diverged, 1 failed" in told
    assert "accuracy 0.7000 (0.7000 to 0.8000), 3 runs: optim.learning_rate = 0.2" in told
    assert "accuracy 0.1000, 1 run: optim.learning_rate = 0.3" in told, "one run has no spread"
    assert "Point 1 of 9: optim.learning_rate = 0.1, train.seed = 1\n" in told
    assert "  diverged: learning_rate-0.3_seed-1: exit status 3\n" in told
    assert "  failed: learning_rate-0.3_seed-2: exit status 1\n" in told
    calls.clear()
    table[0.3, 2] = 0.9
    assert run_points(sweep, made(accuracy)) == 1  # type: ignore[arg-type]
    assert calls == [(0.3, 2)], "what has ended is not run again, and what failed is"


def test_credentials_stand_in_the_configuration_of_a_point_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which others cannot read. Points that differ in them alone are two."""
    urls = [f"s3://ada:{secret}@bucket/run" for secret in ("s3cr3t", "0ther")]
    sweep = swept(tmp_path, f"train.init_from = {urls}\ntrain.seed = [1]")
    assert run_points(sweep, made(lambda content: 0.5)) == 0
    names = [point.name for point in sweep.points]
    assert len(set(names)) == 2 and all(name.startswith("init_from-s3_____bucket_run__") for name in names)
    for point in sweep.points:
        config = tmp_path / "runs" / f"{point.name}.toml"
        assert tomllib.loads(config.read_text()) == point.content and config.stat().st_mode & 0o77 == 0
    kept = [(tmp_path / "runs" / name).read_text() for name in ("summary.json", "summary.csv")]
    for text in (capsys.readouterr().out, *kept, *names):
        assert "bucket" in text and "s3cr3t" not in text and "0ther" not in text
    assert len(json.loads(kept[0])["settings"]) == 2


def test_others_cannot_read_credentials_that_all_points_have(tmp_path: Path) -> None:
    place = "s3://ada:s3cr3t@bucket/run"
    sweep = swept(tmp_path, f"train.seed = [1]\n[checkpoint]\nupload_to = '{place}'")
    assert run_points(sweep, made(lambda content: 0.5)) == 0
    config = tmp_path / "runs" / "seed-1.toml"
    assert place in config.read_text() and config.stat().st_mode & 0o77 == 0


def test_points_that_were_begun_with_credentials_in_their_names_go_on(tmp_path: Path) -> None:
    lines = "train.init_from = ['s3://ada:s3cr3t@bucket/run']"
    (tmp_path / "runs" / "init_from-s3___ada_s3cr3t_bucket_run").mkdir(parents=True)
    assert [point.name for point in swept(tmp_path, lines).points] == ["init_from-s3___ada_s3cr3t_bucket_run"]


def test_a_sweep_of_which_no_point_has_ended_can_be_reported(tmp_path: Path) -> None:
    """Its folder is known as a sweep's from the first point on, and an earlier summary stays as it is."""
    sweep, notes = swept(tmp_path, "train.seed = [1, 2]"), list[list[str]]()

    def accuracy(content: dict[str, object]) -> float:
        write_report([sweep.folder], tmp_path / "report.html")
        notes.append(read_sweep_folder(sweep.folder).notes)
        return 0.5

    assert run_points(sweep, made(accuracy)) == 0
    assert run_points(swept(tmp_path, "train.seed = [1, 2, 3]"), made(accuracy)) == 0
    assert notes == [["No point of the sweep has ended yet."], [], []]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_point_of_which_a_rank_was_killed_has_failed(tmp_path: Path, number: int) -> None:
    """For want of memory, say: it would be again each time, and no other point would ever begin."""
    sweep = swept(tmp_path, "train.seed = [1, 2]")
    assert run_points(sweep, made(lambda content: 128 + number if content["train"]["seed"] == 1 else 0.5)) == 1  # type: ignore[index]
    rows = list(csv.DictReader((tmp_path / "runs" / "summary.csv").read_text().splitlines()))
    assert [row["state"] for row in rows] == ["failed", "finished"]
    assert rows[0]["reason"] == f"exit status {128 + number}"


@pytest.mark.parametrize("status", [99, *(128 + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))])
def test_an_interrupted_sweep_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    sweep = swept(tmp_path, "train.seed = [1, 2, 3]")
    calls: list[int] = []

    def accuracy(content: dict[str, dict[str, int]]) -> float | int:  # type: ignore[misc]
        calls.append(content["train"]["seed"])
        return status if calls == [1, 2] else 0.5

    assert run_points(sweep, made(accuracy)) == status  # type: ignore[arg-type]
    assert "goes on with point 2" in capsys.readouterr().out
    assert run_points(sweep, made(accuracy)) == 0  # type: ignore[arg-type]
    assert calls == [1, 2, 2, 3]


@pytest.mark.parametrize(("points", "status"), [(1, 0), (2, 143)])
def test_a_point_that_could_finish_though_it_was_asked_to_end_has_ended(
    points: int, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And with the last of them the sweep has."""
    finished = made(lambda content: 0.5)

    def asked_in_its_last_step(config: Path, share: Share) -> int:
        return finished(config, share) or 143

    sweep = swept(tmp_path, f"train.seed = {[1, 2][:points]}")
    assert run_points(sweep, asked_in_its_last_step) == status
    found = json.loads((sweep.folder / "summary.json").read_text())["points"]
    assert [(each["point"], each["state"], each["reason"]) for each in found] == [("seed-1", "finished", "")]
    told = capsys.readouterr().out
    assert ("The same command goes on with point 2." if status else "1 point: 1 finished") in told


def test_what_has_ended_is_not_mixed_with_other_configurations(tmp_path: Path) -> None:
    """As where a seed is added on another day, and the learning rate was changed meanwhile."""
    assert run_points(swept(tmp_path, "train.seed = [1, 2]"), made(lambda content: 0.5)) == 0
    calls: list[object] = []

    def accuracy(content: dict[str, dict[str, object]]) -> float:  # type: ignore[misc]
        calls.append(content["train"]["seed"])
        return 0.5

    def again(lines: str, *overrides: str) -> int:
        swept(tmp_path, lines)
        sweep = read_sweep(tmp_path / "config.toml", overrides)
        assert sweep is not None
        return run_points(sweep, made(accuracy))  # type: ignore[arg-type]

    with pytest.raises(ConfigError) as told:
        again("train.seed = [1, 2, 3]", "train.steps=20", "optim.learning_rate=0.05", "train.threads=1")
    assert calls == []
    assert "  train.steps: 10 -> 20\n    in all points\n  optim.learning_rate: unset -> 0.05\n" in str(told.value)
    assert "threads" not in str(told.value)
    with pytest.raises(ConfigError, match=r"checkpoint\.every: unset -> 5"):  # of which the best one has the score
        again("train.seed = [1, 2, 3]", "checkpoint.every=5")
    assert again("train.seed = [1, 2, 3]", "train.threads=1", "parallel.dp=2", "checkpoint.retry_for=1") == 0
    assert calls == [3]


def test_points_have_the_revision_of_samples_with_which_the_first_has_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep that was begun by a version that knew no other, whose runs do not say it."""
    finished, calls = made(lambda content: 0.5), list[str]()

    def run(config: Path, share: Share) -> int:
        status, content = finished(config, share), tomllib.loads(config.read_text())
        write(config.stem, f"revision = {content['data'].get('revision', 2)}\n")
        calls.append(config.stem)
        return status

    def write(point: str, says: str) -> None:
        (tmp_path / "runs" / point / "config.toml").write_text(f"[data]\ntrain = 'tokens'\n{says}")

    def revision(seed: int) -> int | None:
        found = tomllib.loads((tmp_path / "runs" / f"seed-{seed}.toml").read_text())["data"].get("revision")
        assert found is None or type(found) is int
        return found

    assert run_points(swept(tmp_path, "train.seed = [1]"), run) == 0
    write("seed-1", "")
    sweep = swept(tmp_path, "train.seed = [1, 2]")
    assert run_points(sweep, run) == 0 and [revision(1), revision(2)] == [None, 1]
    kept = "config.toml, as the defaults were when the run began: data.revision = 1.\n"
    assert f"Kept from {tmp_path}/runs/seed-1/{kept}" in capsys.readouterr().out
    assert all("revision" not in point.content["data"] for point in sweep.points), "what was read stays as it is"
    shutil.rmtree(tmp_path / "runs" / "seed-1")
    (tmp_path / "runs" / "seed-1").mkdir()
    assert run_points(swept(tmp_path, "train.seed = [1, 2, 3]"), run) == 0, "all are alike"
    assert f"Kept from {tmp_path}/runs/seed-2/{kept}" in capsys.readouterr().out, "the first of which there is a run"
    other = tmp_path / "runs" / "seed-3.toml"  # as if that had been run by a version that did not look
    other.write_text(other.read_text().replace("revision = 1\n", ""))
    write("seed-3", "revision = 2\n")
    with pytest.raises(ConfigError, match=r"  data\.revision: unset -> 1\n    in seed-3\n"):
        run_points(swept(tmp_path, "train.seed = [1, 2, 3]"), run)
    shutil.rmtree(tmp_path / "runs" / "seed-1")
    shutil.rmtree(tmp_path / "runs" / "seed-2")
    assert run_points(swept(tmp_path, "train.seed = [1, 2, 3]"), run) == 0
    assert [revision(seed) for seed in (1, 2, 3)] == [None] * 3, "the first that is there is of the newest"
    assert calls == [*("seed-1", "seed-2"), *("seed-1", "seed-3"), *("seed-1", "seed-2")]


def test_a_sweep_over_the_revision_of_samples_keeps_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished = made(lambda content: 0.5)

    def run(config: Path, share: Share) -> int:
        status, content = finished(config, share), tomllib.loads(config.read_text())
        Path(content["run"]["folder"], "config.toml").write_text(f"[data]\nrevision = {content['data']['revision']}\n")
        return status

    sweep = swept(tmp_path, "data.revision = [1, 2]")
    for _ in range(2):
        assert run_points(sweep, run) == 0
    found = [tomllib.loads((tmp_path / "runs" / f"revision-{each}.toml").read_text()) for each in (1, 2)]
    assert [each["data"]["revision"] for each in found] == [1, 2]
    assert "Kept from" not in capsys.readouterr().out


def begun_from_weights(config: Path, share: Share) -> int:
    """A run that tells, by its events alone, what it began from."""
    content = tomllib.loads(config.read_text())
    status = made(lambda content: 0.5)(config, share)
    with (Path(content["run"]["folder"]) / "events.jsonl").open("a") as stream:
        stream.write(json.dumps({"event": "initialized", "source": content["train"]["init_from"]}) + "\n")
    return status


@pytest.fixture
def weights(finished: Finished, tmp_path: Path) -> Path:
    return at_step_4(finished, tmp_path / "weights")


def with_seeds(seeds: list[int], folder: Path, weights: Path) -> Sweep:
    swept(folder, f"train.seed = {seeds}")
    found = read_sweep(folder / "config.toml", [f"train.init_from={weights}"])
    assert found is not None
    return found


def test_all_points_begin_from_the_checkpoint_that_was_the_newest(weights: Path, tmp_path: Path) -> None:
    """Of a run that goes on beside them."""
    began: list[object] = []

    def accuracy(content: dict[str, dict[str, object]]) -> float:  # type: ignore[misc]
        began.append(content["train"]["init_from"])
        if len(began) == 1:
            (tmp_path / "step_00000006").rename(weights / "checkpoints" / "step_00000006")
        return 0.5

    assert run_points(with_seeds([1, 2], tmp_path, weights), made(accuracy)) == 0  # type: ignore[arg-type]
    assert began == [str(weights / "checkpoints" / "step_00000004")] * 2


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_sweep_ends_where_its_checkpoint_is_gone(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """As that of a run that goes on beside it, and keeps the newest alone. No point counts as failed."""
    newest = weights / "checkpoints" / "step_00000004"

    def begun(config: Path, share: Share) -> int:
        status = begun_from_weights(config, share)
        newest.rename(tmp_path / "elsewhere")
        return status

    def run_side_by_side(items: Any, shares: int, *, start: Any, ended: Any) -> int:
        for item in items:
            start(item, Share(0, shares))
            ended(item, 0, 1.0)
        return 0

    monkeypatch.setattr(tuning, "run_side_by_side", run_side_by_side)
    monkeypatch.setattr(tuning, "process_of", lambda run, config, share, log: run(config, share))
    sweep = replace(with_seeds([1, 2, 3], tmp_path, weights), at_once=at_once)
    with pytest.raises(ConfigError) as told:
        run_points(sweep, begun)
    assert str(told.value) == (
        f"train.init_from = '{newest}' is gone: point seed-2 cannot begin from the weights of the others. Put it back, "
        "and the same command goes on; or set another run.folder, and train.init_from to a checkpoint that stays: a "
        "copy, or one that checkpoint.keep_every spares."
    )
    points = json.loads((sweep.folder / "summary.json").read_text())["points"]
    assert [(each["point"], each["state"]) for each in points] == [("seed-1", "finished")]
    (tmp_path / "elsewhere").rename(newest)
    assert run_points(sweep, begun_from_weights) == 0


def test_a_seed_that_is_added_begins_from_the_same_weights(weights: Path, tmp_path: Path) -> None:
    """Earlier versions wrote the run's name into the configurations of points, whose events tell the checkpoint."""
    saved, summary = weights / "checkpoints", tmp_path / "runs" / "summary.json"
    for _ in range(2):
        assert run_points(with_seeds([1], tmp_path, weights), begun_from_weights) == 0
        config = tmp_path / "runs" / "seed-1.toml"
        config.write_text(config.read_text().replace(str(saved / "step_00000004"), str(weights)))
    (tmp_path / "step_00000006").rename(saved / "step_00000006")
    before = summary.read_text()
    with pytest.raises(ConfigError) as told:
        run_points(with_seeds([1, 2], tmp_path, weights), begun_from_weights)
    line = f'train.init_from: "{saved / "step_00000004"}" -> "{saved / "step_00000006"}"'
    assert f"\n  {line}\n    in the point seed-1\n" in str(told.value) and summary.read_text() == before
    assert run_points(with_seeds([1, 2], tmp_path, saved / "step_00000004"), begun_from_weights) == 0
    shutil.rmtree(weights)
    assert run_points(with_seeds([1, 2], tmp_path, weights), begun_from_weights) == 0, "what is gone is no other"


@pytest.mark.parametrize("published", [False, True])
def test_weights_are_the_same_however_their_folder_is_written(weights: Path, tmp_path: Path, published: bool) -> None:
    """Events tell a path as it is read, without a / at its end."""
    if published:
        shutil.rmtree(weights / "checkpoints")
    named: Any = f"{weights}/"

    def began(config: Path, share: Share) -> int:
        content = tomllib.loads(config.read_text())
        assert content["train"]["init_from"] == (named if published else f"{weights}/checkpoints/step_00000004")
        status = begun_from_weights(config, share)
        events = tmp_path / "runs" / f"seed-{content['train']['seed']}" / "events.jsonl"
        events.write_text(events.read_text().replace(f'{weights}/"', f'{weights}"'))
        return status

    assert run_points(with_seeds([1], tmp_path, named), began) == 0
    assert run_points(with_seeds([1, 2], tmp_path, named), began) == 0


@pytest.mark.parametrize("has_saved", [False, True])
def test_a_point_that_goes_on_has_begun_from_the_weights_of_the_others(
    weights: Path, tmp_path: Path, has_saved: bool
) -> None:
    """One that has saved nothing begins anew."""

    def interrupted(config: Path, share: Share) -> int:
        begun_from_weights(config, share)
        events = config.with_suffix("") / "events.jsonl"
        events.write_text(events.read_text().replace('"finished"', '"interrupted"'))
        if has_saved:
            (tmp_path / "runs" / "seed-1" / "checkpoints" / "step_00000002").mkdir(parents=True)
        return 130

    assert run_points(with_seeds([1, 2], tmp_path, weights), interrupted) == 130
    (tmp_path / "step_00000006").rename(weights / "checkpoints" / "step_00000006")
    if not has_saved:
        assert run_points(with_seeds([1, 2], tmp_path, weights), begun_from_weights) == 0
        return
    with pytest.raises(ConfigError, match=r'step_00000004" -> ".*step_00000006"\n    in seed-1\n'):
        run_points(with_seeds([1, 2], tmp_path, weights), begun_from_weights)
    shutil.copytree(weights, tmp_path / "moved")
    assert run_points(with_seeds([1, 2], tmp_path, tmp_path / "moved"), begun_from_weights) == 0, (
        "its run looks after it"
    )


def test_points_that_began_from_other_weights_are_told_beside_those_that_have_ended(
    weights: Path, tmp_path: Path
) -> None:
    def interrupted(config: Path, share: Share) -> int:
        begun_from_weights(config, share)
        events = config.with_suffix("") / "events.jsonl"
        events.write_text(events.read_text().replace('"finished"', '"interrupted"'))
        (config.with_suffix("") / "checkpoints" / "step_00000002").mkdir(parents=True)
        return 130

    for seed in (3, 4):
        assert run_points(with_seeds([seed], tmp_path, weights), interrupted) == 130
    (tmp_path / "step_00000006").rename(weights / "checkpoints" / "step_00000006")
    assert run_points(with_seeds([1, 2], tmp_path, weights), begun_from_weights) == 0
    with pytest.raises(ConfigError, match=r'step_00000004" -> ".*step_00000006"\n    in seed-3, seed-4\n'):
        run_points(with_seeds([1, 2, 3, 4], tmp_path, weights), begun_from_weights)


@pytest.mark.parametrize("is_in_one_start", [False, True])
def test_points_are_of_the_same_data(
    finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_one_start: bool
) -> None:
    """Of a sweep whose files change while it runs all is written down before that is told."""
    lines: list[str] = []
    monkeypatch.setattr(tuning, "other_files", lambda path: lines if path.name == "step_00000006" else ["older"])

    def accuracy(content: dict[str, dict[str, Any]]) -> float:  # type: ignore[misc]
        if content["train"]["seed"] == 1:
            shutil.copytree(finished.folder / "checkpoints", Path(content["run"]["folder"]) / "checkpoints")
        lines[:] = ["data.validation (dev): 90 tokens, now 91"] if is_in_one_start else []
        return 0.5

    def run(seeds: list[int]) -> int:
        return run_points(swept(tmp_path, f"train.seed = {seeds}"), made(accuracy))  # type: ignore[arg-type]

    if not is_in_one_start:
        assert run([1]) == run([1, 2]) == 0
        lines.append("data.validation (dev): 90 tokens, now 91")
    with pytest.raises(ConfigError, match=r"\n  data\.validation \(dev\): 90 tokens, now 91\n    in seed-1\n"):
        run([1, 2])
    points = json.loads((tmp_path / "runs" / "summary.json").read_text())["points"]
    assert [each["state"] for each in points] == ["finished"] * 2


@pytest.mark.parametrize("gone", ["folder", "content"])
def test_a_point_whose_run_is_gone_is_run_anew(tmp_path: Path, gone: str) -> None:
    """And beside points that ended with another configuration it does not count as one that did."""
    calls: list[object] = []

    def accuracy(content: dict[str, dict[str, object]]) -> float:  # type: ignore[misc]
        calls.append(content["train"]["seed"])
        return 0.5

    assert run_points(swept(tmp_path, "train.seed = [1, 2]"), made(accuracy)) == 0  # type: ignore[arg-type]
    before = json.loads((tmp_path / "runs" / "summary.json").read_text())["settings"]
    shutil.rmtree(run := tmp_path / "runs" / "seed-1")
    if gone == "content":
        run.mkdir()
    assert run_points(swept(tmp_path, "train.seed = [1, 2]"), made(accuracy)) == 0  # type: ignore[arg-type]
    assert calls == [1, 2, 1] and before[0]["points"] == 2
    assert json.loads((tmp_path / "runs" / "summary.json").read_text())["settings"] == before


def test_what_came_of_a_point_is_what_its_last_start_says(tmp_path: Path) -> None:
    def state(*kinds: str, reason: str = "") -> str:
        told = ({"event": kind, "then": "returns to step 4"} for kind in kinds)
        (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in told))
        return outcome_of(tmp_path, Point("point", {}, {}), reason=reason, seconds=1.0).state

    assert state("started", "setup", "diverged", reason="exit status 2") == "diverged"
    assert state("started", "setup", "diverged", "no rollback", reason="exit status 1") == "diverged"
    assert state("started", "setup", "diverged", "resumed", "setup", reason="killed") == "failed"
    assert state("started", "setup", "diverged", "rolled back", reason="killed") == "failed", "it was left behind"
    again = ("diverged", "rolled back", "diverged")
    assert state("started", "setup", *again, reason="exit status 2") == "diverged"
    assert state("started", "setup", "stopped early", "finished") == "stopped early"
    assert state("started", "setup", "stopped early", "resumed", "setup", "finished") == "finished"
    assert state("started", "setup", "stopped early", "copies differ", "finished") == "finished", "it was undone"


def test_a_point_whose_first_numbers_are_gone_has_the_loss_that_its_events_tell(
    finished: Finished, tmp_path: Path
) -> None:
    """As where what rotates logs has cut metrics.jsonl at its front."""
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    whole = outcome_of(run, Point("point", {}, {}), reason="", seconds=1.0)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(line for line in lines if "validation_loss" not in line))
    cut = outcome_of(run, Point("point", {}, {}), reason="", seconds=1.0)
    assert whole.scores is not None and cut == replace(whole, scores={"loss": whole.scores["loss"]})


def test_of_losses_the_lowest_median_is_the_best_and_of_other_scores_the_highest() -> None:
    rates = {0.1: (1.0, 3.0, 2.0), 0.2: (1.5, 1.6, 9.0), 0.3: (4.0, 4.0, 4.0)}
    outcomes = [
        Outcome(Point("point", {"optim.learning_rate": rate, SEED: seed}, {}), "finished", scores={"loss": n, "f1": n})
        for rate, numbers in rates.items()
        for seed, n in enumerate(numbers)
    ]
    assert [each.median for each in settings_of(outcomes, "loss")] == [1.6, 2.0, 4.0]
    assert [each.median for each in settings_of(outcomes, "f1")] == [4.0, 2.0, 1.6]


@pytest.mark.parametrize("other", ["diverged", "failed"])
def test_a_run_that_diverged_or_failed_behind_a_good_evaluation_is_not_counted(other: str) -> None:
    """Neither as a setting nor beside the runs of its own that have ended well."""
    outcomes = [
        Outcome(Point("point", {"optim.learning_rate": rate, SEED: seed}, {}), state, scores={"accuracy": accuracy})
        for rate, seed, state, accuracy in (
            (0.1, 1, other, 0.9),
            (0.2, 1, "finished", 0.5),
            (0.2, 2, "stopped early", 0.6),
            (0.2, 3, other, 0.9),
        )
    ]
    (setting,) = settings_of(outcomes, "accuracy")
    assert setting.values == {"optim.learning_rate": 0.2}
    assert (setting.points, setting.median, setting.lowest, setting.highest) == (2, 0.55, 0.5, 0.6)


def test_a_score_that_is_no_number_is_none_of_a_setting() -> None:
    """Nothing is better or worse than it."""
    outcomes = [
        Outcome(Point("point", {"optim.learning_rate": rate, SEED: seed}, {}), "finished", scores={"spearman": n})
        for rate, numbers in {0.1: (0.2, math.nan), 0.2: (math.nan, math.nan), 0.3: (0.5, 0.7)}.items()
        for seed, n in enumerate(numbers)
    ]
    found = [(setting.points, setting.lowest, setting.highest) for setting in settings_of(outcomes, "spearman")]
    assert found == [(2, 0.5, 0.7), (1, 0.2, 0.2)]


@pytest.mark.parametrize("score", ["perplexity", "bits_per_byte", "masked_loss", "loss/news"])
def test_what_is_computed_from_losses_is_better_where_it_is_less(score: str) -> None:
    outcomes = [
        Outcome(Point("point", {"optim.learning_rate": rate}, {}), "finished", scores={score: number})
        for rate, number in ((0.1, 9.0), (0.2, 3.0))
    ]
    assert [each.median for each in settings_of(outcomes, score)] == [3.0, 9.0]


def test_seeds_alone_are_one_setting(tmp_path: Path) -> None:
    sweep = swept(tmp_path, "train.seed = [1, 2]")
    outcomes = [Outcome(point, "finished", scores={"loss": float(n)}) for n, point in enumerate(sweep.points, 1)]
    assert "  loss 1.5000 (1.0000 to 2.0000), 2 runs: all\n" in summary_of(sweep, outcomes)


def test_the_score_that_decides_is_the_one_that_is_named_or_else_the_first_that_is_there(tmp_path: Path) -> None:
    """Before a point has ended there are none, and one that is named may come."""
    unnamed, named = swept(tmp_path, "train.seed = [1]"), swept(tmp_path, 'train.seed = [1]\nscore = "f1"')

    def outcomes(*names: str) -> list[Outcome]:
        return [Outcome(unnamed.points[0], "finished", scores=dict.fromkeys(names, 0.5))]

    for names, score in ((("loss", "f1", "accuracy"), "accuracy"), (("loss", "matthews", "f1"), "f1"), ((), "loss")):
        assert score_of(unnamed, outcomes(*names)) == score
    assert score_of(named, outcomes("loss", "f1", "accuracy")) == score_of(named, outcomes()) == "f1"


def test_the_scores_of_a_point_are_those_of_its_best_checkpoint_or_else_of_its_lowest_loss(tmp_path: Path) -> None:
    """Of two that are as low the earlier; a loss that is not finite is never the lowest."""
    losses = {1: "NaN", 2: 1.5, 3: 0.5, 4: 0.5, 5: 0.7}
    text = "".join(f'{{"step": {n}, "validation_loss": {x}, "validation_f1": 0.{n}}}\n' for n, x in losses.items())
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "events.jsonl").write_text('{"event": "finished"}\n{"event": "cut o')

    def found() -> tuple[int | None, object]:
        outcome = outcome_of(tmp_path, Point("point", {}, {}), reason="", seconds=1.0)
        return outcome.step, outcome.scores

    assert found() == (3, {"loss": 0.5, "f1": 0.3})
    for step in (2, 5):
        (tmp_path / "checkpoints" / f"step_0000000{step}").mkdir(parents=True)
    assert found() == (5, {"loss": 0.7, "f1": 0.5})
    (tmp_path / "metrics.jsonl").unlink()
    assert found() == (None, None)


def test_names_with_dots_and_spaces_are_in_quotes_in_the_configuration_of_a_point() -> None:
    content = {"data": {"blend": {"data/a.b": 0.5, "c d": 0.25, "bücher": 0.25}}, "my.own": {"a-b_1": 3}}
    assert tomllib.loads(toml_of(content)) == content and "a-b_1 = 3" in toml_of(content)


def test_a_sweep_is_not_started_by_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "is_rank", lambda: True)
    with pytest.raises(ConfigError, match="starts the ranks of each point itself, and was started by a launcher"):
        run_points(swept(tmp_path, "train.seed = [1, 2]"), made(lambda content: 0.5))


def test_one_sweep_at_a_time_has_a_folder(tmp_path: Path) -> None:
    sweep = swept(tmp_path, "train.seed = [1]")

    def accuracy(content: dict[str, object]) -> float:
        with pytest.raises(LockError, match="is in use by `colonnade finetune`"):
            run_points(sweep, made(lambda content: 0.5))
        return 0.5

    assert run_points(sweep, made(accuracy)) == 0


def test_a_score_that_is_no_number_is_null_in_the_summary(tmp_path: Path) -> None:
    """Which is no score to a report of the sweep."""
    sweep = swept(tmp_path, "train.seed = [1, 2]")
    sweep.folder.mkdir()
    scores = (math.nan, 0.25)
    outcomes = [
        Outcome(point, "finished", scores={"loss": 0.5, "spearman": n})
        for point, n in zip(sweep.points, scores, strict=True)
    ]
    tuning._write(sweep, outcomes)
    text = (sweep.folder / "summary.json").read_text()
    assert [each["spearman"] for each in json.loads(text)["points"]] == [None, 0.25] and "NaN" not in text
    assert read_sweep_folder(sweep.folder).groups[0].scores["spearman"].numbers == [0.25]


def test_a_mistake_that_a_run_tells_fails_its_point_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error of the program ends the sweep, and shows where it was made."""
    sweep = swept(tmp_path, "train.seed = [1, 2]")

    def accuracy(content: dict[str, dict[str, int]]) -> float:  # type: ignore[misc]
        if content["train"]["seed"] == 1:
            raise ConfigError("train.steps = 0: use more")
        return 0.5

    assert run_points(sweep, made(accuracy)) == 1  # type: ignore[arg-type]
    points = json.loads((sweep.folder / "summary.json").read_text())["points"]
    assert [(each["state"], each["reason"]) for each in points] == [
        ("failed", "train.steps = 0: use more"),
        ("finished", ""),
    ]
    assert "\ncolonnade: train.steps = 0: use more\n" in capsys.readouterr().out

    def broken(config: Path, share: Share) -> int:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_points(sweep, broken)


def test_how_long_a_point_took_is_kept(tmp_path: Path) -> None:
    """In seconds, also where the sweep goes on another day."""
    sweep, file = swept(tmp_path, "train.seed = [1, 2]"), tmp_path / "runs" / "summary.json"
    assert run_points(sweep, made(lambda content: 0.5)) == 0
    content = json.loads(file.read_text())
    assert all(0 <= each["seconds"] < 60 for each in content["points"])
    assert Outcome(sweep.points[0], "finished", seconds=12.345).record()["seconds"] == 12.3
    content["points"][1]["seconds"] = 12.3
    file.write_text(json.dumps(content))
    assert run_points(sweep, made(lambda content: 0.5)) == 0
    assert json.loads(file.read_text())["points"][1]["seconds"] == 12.3


@pytest.mark.parametrize("content", ["{", "{}", "[]", '{"points": [1]}'])
def test_a_summary_that_is_none_is_told(tmp_path: Path, content: str) -> None:
    sweep = swept(tmp_path, "train.seed = [1]")
    sweep.folder.mkdir()
    (sweep.folder / "summary.json").write_text(content)
    with pytest.raises(ConfigError, match=r"summary\.json is no summary of a sweep .*\. Remove it: the runs beside it"):
        run_points(sweep, made(lambda content: 0.5))


def test_what_came_of_points_side_by_side_is_told_as_each_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One finishes, one fails with a last word in its log, and one is interrupted and goes on later."""
    sweep = swept(tmp_path, "train.seed = [1, 2, 3]\nat_once = 3")
    results: dict[int, float | int] = {1: 0.5, 2: 1, 3: 130}
    began = made(lambda content: results[content["train"]["seed"]])  # type: ignore[index]

    def run_side_by_side(items: list[tuple[int, Point]], shares: int, *, start: Any, ended: Any) -> int:
        assert shares == 3
        for item in items:
            start(item, Share(0, 3))
            ended(item, began(sweep.folder / f"{item[1].name}.toml", Share(0, 3)), 2.5)
        return 130

    monkeypatch.setattr(tuning, "run_side_by_side", run_side_by_side)
    monkeypatch.setattr(tuning, "process_of", lambda run, config, share, log: log.write_text("It\nwent wrong.\n"))
    assert run_points(sweep, began) == 130
    points = json.loads((sweep.folder / "summary.json").read_text())["points"]
    assert [(each["state"], each["reason"], each["seconds"]) for each in points] == [
        ("finished", "", 2.5),
        ("failed", "exit status 1: went wrong.", 2.5),
    ]
    told = capsys.readouterr().out
    assert f"Point 2 of 3: train.seed = 2 -> {sweep.folder / 'seed-2.log'}\n" in told
    assert "Point 1 of 3: finished, accuracy 0.5000\n" in told and "Point 2 of 3: failed\n" in told


def test_a_score_that_there_is_not(tmp_path: Path) -> None:
    sweep = swept(tmp_path, 'train.seed = [1, 2]\nscore = "f2"')
    with pytest.raises(ConfigError, match=r"f2.*loss, accuracy"):
        run_points(sweep, made(lambda content: 0.5))


def test_what_is_wrong_with_points_is_told_before_the_first_runs(tmp_path: Path) -> None:
    sweep = swept(tmp_path, "optim.learning_rate = [0.1, 0.2]\ntrain.seed = [1, 2, 3]")
    started: list[Path] = []

    def check(path: Path) -> None:
        if tomllib.loads(path.read_text())["train"]["seed"] == 2:
            raise ConfigError(f"{path}: no seed")

    with pytest.raises(ConfigError) as told:
        run_points(sweep, lambda path: started.append(path) or 0, check)  # type: ignore[func-returns-value]
    assert started == [] and str(told.value).count("no seed") == 1
    assert "in learning_rate-0.1_seed-2, learning_rate-0.2_seed-2" in str(told.value)


@pytest.mark.parametrize(
    ("seeds", "wrong", "said"),
    [
        ([1, 2], [1, 2], "in all points"),
        ([1], [1], "in the point seed-1"),
        ([1, 2, 3, 4], [1, 2, 4], "in seed-1, seed-2, seed-4"),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4], "in seed-1, seed-2, seed-3 and 1 other"),
        ([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 6], "in seed-1, seed-2, seed-3 and 2 others"),
    ],
)
def test_of_many_points_that_are_wrong_the_first_are_named(
    tmp_path: Path, seeds: list[int], wrong: list[int], said: str
) -> None:
    def check(path: Path) -> None:
        if tomllib.loads(path.read_text())["train"]["seed"] in wrong:
            raise ConfigError(f"{path}: no seed")

    with pytest.raises(ConfigError) as told:
        run_points(swept(tmp_path, f"train.seed = {seeds}"), made(lambda content: 0.5), check)
    assert str(told.value).endswith(f"no seed\n  {said}")


def test_a_point_that_failed_runs_with_what_its_configuration_says_now(tmp_path: Path) -> None:
    steps: list[int] = []

    def accuracy(content: dict[str, dict[str, int]]) -> float | int:  # type: ignore[misc]
        steps.append(content["train"]["steps"])
        return 0.5 if steps[-1] == 20 else 1

    assert run_points(swept(tmp_path, "train.seed = [1]"), made(accuracy)) == 1  # type: ignore[arg-type]
    sweep = read_sweep(tmp_path / "config.toml", ["train.steps=20"])
    assert sweep is not None and run_points(sweep, made(accuracy)) == 0 and steps == [10, 20]  # type: ignore[arg-type]


# --- whole runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_examples(tmp_path_factory.mktemp("examples"), ("qqp",))


@pytest.mark.slow
def test_the_command(examples: Path, tmp_path: Path) -> None:
    """Two learning rates, one of which is no number that trains; epochs in the place of steps."""
    path = write_config(examples, "qqp", tmp_path)
    text = path.read_text().replace("steps = 4\n", "epochs = 1.0\n").replace("warmup_steps = 2", "warmup_steps = 0")
    path.write_text(text + "[sweep]\noptim.learning_rate = [1e-2, 1e300]\n")
    answer = colonnade("finetune", path)
    assert answer.status == 1, answer
    assert "2 points: 1 finished, 1 diverged" in answer.out, answer
    run = tmp_path / "run" / "learning_rate-0.01"
    assert [line["step"] for line in metrics(run)] == [1, 2, 3], "11 examples are 3 batches of 4"
    assert {"accuracy", "f1", "matthews"} <= json.loads((tmp_path / "run" / "summary.json").read_text())["points"][
        0
    ].keys()
    again = colonnade("finetune", path)
    assert again.status == 1 and "Point" not in again.out, again


@pytest.mark.slow
def test_drawn_and_given_weights_in_one_sweep(examples: Path, tmp_path: Path) -> None:
    begun = write_config(examples, "qqp", tmp_path / "begun")
    assert forked("train", begun).status == 0
    path = write_config(examples, "qqp", tmp_path)
    weights = tmp_path / "begun" / "run"
    path.write_text(path.read_text() + f'[sweep]\ntrain.init_from = ["", "{weights}"]\n')
    answer = colonnade("finetune", path)
    assert answer.status == 0 and "2 points: 2 finished" in answer.out, answer
    points = json.loads((tmp_path / "run" / "summary.json").read_text())["points"]
    assert [point["train.init_from"] for point in points] == ["", str(weights)]
    sources = [
        [event["source"] for event in events(tmp_path / "run" / point["point"]) if event["event"] == "initialized"]
        for point in points
    ]
    assert sources == [[], [str(weights / "checkpoints" / "step_00000004")]]


@pytest.mark.slow
def test_a_run_ends_early(examples: Path, tmp_path: Path) -> None:
    """With a learning rate that moves nothing, no evaluation is better than the first, and the same command again
    trains no further.
    """
    path = write_config(examples, "qqp", tmp_path)
    still = ["optim.learning_rate=1e-30", "train.steps=40", "train.patience=2", "train.evaluate_every=1"]
    answer = forked("train", path, *still, "parallel.dp=2", num_ranks=2)
    assert answer.status == 0 and "train.patience = 2" in answer.out, answer
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]
    assert any(event["event"] == "stopped early" for event in events(tmp_path / "run"))
    answer = forked("train", path, *still, "parallel.dp=2", num_ranks=2)
    assert answer.status == 0 and "Finished" in answer.out, answer
    assert len(metrics(tmp_path / "run")) == 3
