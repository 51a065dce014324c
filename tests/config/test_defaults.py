"""Defaults that have changed: the examples do not lean on them, and a run keeps those that it began with."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from colonnade.config.defaults import BEFORE, has, in_words, kept_from_run, put
from colonnade.config.describe import all_keys
from colonnade.config.schema import OptimConfig

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))
OLD = """\
[model]
dropout = 0.1
attention_dropout = 0.0
seq_length = 64
[train]
evaluate_every = 0
precision = "fp32"
[optim]
beta2 = 0.999
weight_decay = 0.05
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text(OLD)
    return tmp_path


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_examples_say_every_value_whose_default_has_changed(path: Path) -> None:
    content = tomllib.loads(path.read_text())
    assert [key for key in [*BEFORE, "train.precision"] if not has(content, key)] == []
    assert content["model"].get("preset") != "tiny" or "seq_length" in content["model"]


def test_defaults_before_are_others_now() -> None:
    assert [key for key, before in BEFORE.items() if all_keys()[key].default == before] == []


def test_a_run_keeps_what_was_a_default_when_it_began(run: Path) -> None:
    """Not what its file has changed since, nor what was set to something else: those are the file's own business."""
    kept = kept_from_run({"optim": {"learning_rate": 1e-3}}, run)
    assert kept == {
        "model.dropout": 0.1,
        "train.evaluate_every": 0,
        "optim.beta2": 0.999,
        "train.precision": "fp32",
    }
    assert "model.dropout" not in kept_from_run({"model": {"dropout": 0.0}}, run)
    assert "train.precision" not in kept_from_run({"train": {"precision": "bf16"}}, run), "it was asked for"
    assert kept_from_run({}, run / "nowhere") == {}
    content = {"model": {"num_layers": 2}}
    put(content, kept)
    assert content["model"] == {"num_layers": 2, "dropout": 0.1} and content["optim"] == {"beta2": 0.999}
    wrong: dict[str, Any] = {"optim": 3}
    put(wrong, kept)
    assert wrong["optim"] == 3, "others say what is wrong with it"


def test_a_run_of_the_first_version_keeps_all_that_it_began_with(tmp_path: Path) -> None:
    began: dict[str, dict[str, float]] = {
        "model": {"dropout": 0.1, "attention_dropout": 0.1},
        "train": {"evaluate_every": 0},
        "optim": {"min_learning_rate": 0.0, "warmup_steps": 0, "weight_decay": 0.01, "beta2": 0.999},
        "checkpoint": {"every": 0},
    }
    lines = [
        f"[{name}]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items()) for name, keys in began.items()
    ]
    (tmp_path / "config.toml").write_text("".join(lines))
    content: dict[str, Any] = {}
    put(content, kept_from_run({}, tmp_path))
    assert content == began
    (tmp_path / "config.toml").write_text("[train]\nevaluate_every = false\n")
    assert kept_from_run({}, tmp_path) == {}, "what no version has written"


def test_the_preset_tiny_keeps_its_positions(run: Path) -> None:
    assert kept_from_run({"model": {"preset": "tiny"}}, run)["model.seq_length"] == 64
    assert "model.seq_length" not in kept_from_run({"model": {"preset": "tiny", "seq_length": 128}}, run)
    assert "model.seq_length" not in kept_from_run({"model": {}}, run)
    (run / "config.toml").write_text(OLD.replace("seq_length = 64", "seq_length = 128"))
    assert "model.seq_length" not in kept_from_run({"model": {"preset": "tiny"}}, run), "it was set to that"


@pytest.mark.parametrize("written", ["", "[model", "model = 3", "[optim]\nbeta2 = 1\n"])
def test_nothing_is_kept_of_what_says_nothing(tmp_path: Path, written: str) -> None:
    (tmp_path / "config.toml").write_text(written)
    assert kept_from_run({"model": {"preset": "tiny"}}, tmp_path) == {}


def test_what_is_kept_is_told() -> None:
    told = in_words({"model.dropout": 0.1, "train.precision": "fp32"}, "runs/a")
    assert told == "Kept from runs/a/config.toml, as the defaults were when the run began: model.dropout = 0.1."
    assert in_words({"train.precision": "fp32"}, "runs/a") == ""


def test_floor_and_warm_up_follow_from_the_rest() -> None:
    assert OptimConfig(learning_rate=2e-3).floor == pytest.approx(2e-4)
    assert OptimConfig(learning_rate=2e-3, min_learning_rate=0.0).floor == 0.0
    assert [OptimConfig(learning_rate=1.0, decay_steps=end).warmup for end in (None, 40, 4000)] == [100, 40, 100]
    assert OptimConfig(learning_rate=1.0, warmup_steps=0).warmup == 0
    assert OptimConfig(learning_rate=1.0, warmup_tokens=5000).warmup == 0, "it is one of tokens"


@pytest.mark.parametrize(
    ("written", "kept"), [("", 1), ("revision = 1\n", 1), ("revision = 2\n", None), ("revision = 3\n", 3)]
)
def test_a_run_keeps_the_revision_of_its_samples(tmp_path: Path, written: str, kept: int | None) -> None:
    """The first one where it says none, beside what else it keeps; what is written wins."""
    (tmp_path / "config.toml").write_text(f'[model]\ndropout = 0.1\n[data]\ntrain = "x"\n{written}')
    expected = {"model.dropout": 0.1} | ({} if kept is None else {"data.revision": kept})
    assert kept_from_run({}, tmp_path) == expected
    assert "data.revision" not in kept_from_run({"data": {"revision": 1}}, tmp_path)
