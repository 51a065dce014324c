"""Points of a sweep: what of the base each keeps, what makes another run of it, and sweeps that cannot be one."""

from pathlib import Path
from typing import Any

import pytest

from colonnade.config.load import load
from colonnade.errors import ConfigError
from colonnade.train.sweep import Sweep, changed, read_sweep
from colonnade.train.tuning import toml_of


def swept(folder: Path, text: str, *overrides: str) -> Sweep:
    path = folder / "config.toml"
    path.write_text(text)
    found = read_sweep(path, overrides)
    assert found is not None
    return found


def test_a_point_keeps_what_the_base_says_of_its_run(tmp_path: Path) -> None:
    """But for the folder, which is its own."""
    found = swept(tmp_path, "[run]\nfolder = 'runs'\ntensorboard = true\n[sweep]\ntrain.seed = [1, 2]\n")
    expected = [{"folder": f"runs/seed-{seed}", "tensorboard": True} for seed in (1, 2)]
    assert [point.content["run"] for point in found.points] == expected


@pytest.mark.parametrize("number", ["0", "-1", "true", "2.0", "'2'", "[1]"])
def test_points_side_by_side_are_a_whole_number_of_one_or_more(number: str, tmp_path: Path) -> None:
    lists = "run.folder = 'runs'\n[sweep]\ntrain.seed = [1, 2]\nat_once = "
    with pytest.raises(ConfigError, match=r"sweep\.at_once = .* is no number of points\. Use 1 or more"):
        swept(tmp_path, f"{lists}{number}\n")
    assert swept(tmp_path, f"{lists}1\n").at_once == 1


def test_what_is_wrong_with_the_command_line_is_told_before_there_are_points(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"optim\.learning_rate.* is not of the form"):
        swept(tmp_path, "run.folder = 'runs'\n[sweep]\ntrain.seed = [1]\n", "optim.learning_rate")


def test_epochs_are_listed_without_steps_wherever_these_stand(tmp_path: Path) -> None:
    text = "run.folder = 'runs'\n[sweep]\ntrain.epochs = [2, 3]\n"
    with pytest.raises(ConfigError, match=r"train\.epochs has no effect where train\.steps is set"):
        swept(tmp_path, f"{text}train.steps = [10, 20]\n")
    assert len(swept(tmp_path, text).points) == 2


@pytest.mark.parametrize(
    ("given", "lists"),
    [("train = 3", "train.epochs = [2, 3]"), ("checkpoint = 3", "train.seed = [1, 2]")],
)
def test_a_value_in_the_place_of_a_section_is_told_with_the_point(given: str, lists: str, tmp_path: Path) -> None:
    found = swept(tmp_path, f"{given}\nrun.folder = 'runs'\n[sweep]\n{lists}\n")
    (tmp_path / "point.toml").write_text(toml_of(found.points[0].content))
    with pytest.raises(ConfigError, match=f"{given} gives a value to a section"):
        load(tmp_path / "point.toml")


def test_a_run_that_is_no_section_names_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.folder names where its runs are\. Set both"):
        swept(tmp_path, "run = 3\n[sweep]\ntrain.seed = [1]\n")


def test_a_place_to_upload_to_that_is_no_text_is_told_with_the_point(tmp_path: Path) -> None:
    text = "run.folder = 'runs'\ncheckpoint.upload_to = 3\n[sweep]\ntrain.seed = [1]\n"
    assert swept(tmp_path, text).points[0].content["checkpoint"] == {"upload_to": 3}


@pytest.mark.parametrize(
    ("key", "is_another"),
    [
        ("parallel.tp", False),
        ("restarts.limit", False),
        ("tracking.project", False),
        ("thermometers.every", False),
        ("data.cache", False),
        ("train.log_every", False),
        ("train.threads", False),
        ("train.device", False),
        ("train.products", False),
        ("train.timeout", False),
        ("train.micro_batch_size", False),
        ("checkpoint.memory_every", False),
        ("checkpoint.asynchronous", False),
        ("checkpoint.compare_copies_every", False),
        ("checkpoint.unequal_copies", False),
        ("checkpoint.upload_to", False),
        ("checkpoint.upload_keep", False),
        ("train.precision", True),
        ("train.global_batch_size", True),
        ("train.patience", True),
        ("data.order", True),
        ("checkpoint.keep", True),
        ("checkpoint.every", True),
        ("model.num_layers", True),
    ],
)
def test_a_point_is_another_run_where_it_computes_or_keeps_something_else(key: str, is_another: bool) -> None:
    """And the same where it is made in another way."""
    section, name = key.split(".")
    before: dict[str, Any] = {section: {name: 1}}
    expected = [f"{key}: 1 -> 2"] if is_another else []
    assert changed(before, {section: {name: 2}}) == expected and changed(before, before) == []


def test_a_point_is_another_run_where_a_key_has_come_or_gone() -> None:
    """Whatever else stands in its section, in the order of the keys."""
    before = {"optim": {"beta1": 0.9, "epsilon": 1e-8}, "train": {"steps": 10, "threads": 2}, "data": {"blend": {}}}
    now = {"train": {"seed": 7, "steps": 20}, "optim": {"beta1": 0.9}, "checkpoint": {"keep": 3}}
    gone, changed_or_new = "optim.epsilon: 1e-08 -> unset", ["train.steps: 10 -> 20", "train.seed: unset -> 7"]
    assert changed(before, now) == [gone, *changed_or_new, "checkpoint.keep: unset -> 3"]
    assert changed({}, {}) == [] and changed({"optim": {"epsilon": 1e-8}}, {}) == [gone]
