"""What layouts are held against: the serial run in fp64, of the file's schedule, at a scale that fits."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.errors import ConfigError
from colonnade.launch import launch
from colonnade.verify import verify as verification
from colonnade.verify.compare import LATER_TIMES, ROUNDINGS, TIMES, UNIT, Number
from colonnade.verify.trace import file_of

Loss = Callable[[str, int], float]


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Callable[[Loss], None]:
    """Runs that tell nothing but the loss of two steps, by precision and number of ranks; 1.0 in the first step."""

    def told_by(loss: Loss) -> None:
        def run_ranks(num_ranks: int, command: list[str]) -> int:
            value = loss(load(Path(command[4])).train.precision, num_ranks)
            Path(command[6]).mkdir(exist_ok=True)
            told = [(*Number("loss", "", step), (), (), torch.tensor(x)) for step, x in ((1, 1.0), (2, value))]
            for rank in range(num_ranks):
                torch.save(told, file_of(Path(command[6]), rank))
            return 0

        monkeypatch.setattr(launch, "run_ranks", run_ranks)

    return told_by


@pytest.mark.parametrize("side", [1, -1])
def test_in_fewer_bits_the_distance_is_that_from_fp64_and_bounded_by_the_serial_runs(
    config: Path, losses: Callable[[Loss], None], side: int
) -> None:
    """Not from the serial run in the same format, which is off on one side."""
    bound = LATER_TIMES * 0.25 + ROUNDINGS * UNIT["bf16"]
    for factor, equal in ((0.99, True), (1.01, False)):

        def loss(precision: str, num_ranks: int, off: float = side * factor * bound) -> float:
            return 1.0 + off if num_ranks > 1 else 1.25 if precision == "bf16" else 1.0

        losses(loss)
        assert verification.verify(config, [], ["tp=2"], steps=2, precision="bf16") is equal


def test_several_layouts_are_each_told_as_they_are(
    config: Path, losses: Callable[[Loss], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """One that differs is enough for the run's status, wherever it stands."""
    losses(lambda precision, num_ranks: 1.5 if num_ranks == 4 else 1.0)
    assert not verification.verify(config, [], ["tp=2,dp=2", "tp=2", "dp=2"], steps=2, json_only=True)
    told = json.loads(capsys.readouterr().out)
    assert [(each["layout"], each["ok"]) for each in told["layouts"]] == [
        ("tp=2,dp=2", False),
        ("tp=2", True),
        ("dp=2", True),
    ]
    assert told["steps"] == 2 and TIMES < LATER_TIMES


def test_the_learning_rate_is_that_of_the_run_for_as_many_steps_as_are_compared(config: Path) -> None:
    """A run of one step decays within it."""
    base = load(config, ["train.steps=6"])
    for steps, expected in ((1, 6), (6, 6), (9, 9)):
        plan = verification.make_plan(base, ["tp=2"], shrink=False, precision="fp64", steps=steps)
        assert [each.train.steps for each in (plan.base, plan.variants[0].config)] == [expected] * 2


def test_a_high_loss_scale_begins_where_it_can_be_compared(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would come down by skipping steps, each of which is a run here."""
    scales = list[float]()

    def run_ranks(num_ranks: int, command: list[str]) -> int:
        train = load(Path(command[4])).train
        scales.extend([train.loss_scale] * (train.precision == "fp16"))
        Path(command[6]).mkdir(exist_ok=True)
        told = [(*Number("overflow", "", 1), (), (), torch.tensor(0.0))]
        for rank in range(num_ranks):
            torch.save(told, file_of(Path(command[6]), rank))
        return 0

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    for keys, expected in (
        (["train.loss_scale=1e9"], 2.0**16),
        (["train.loss_scale=64"], 64.0),
        (["train.loss_scale=1e9", "train.min_loss_scale=1e6"], 1e6),
    ):
        scales.clear()
        assert verification.verify(config, keys, ["tp=2"], steps=1, precision="fp16")
        assert scales == [expected] * 2, "in the serial run and in the layout's"


def test_where_no_layout_fits_each_is_told_with_its_reason(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "MOST_RANKS", 0)
    with pytest.raises(ConfigError) as refused:
        verification.make_plan(load(config), [], shrink=False, precision="fp64", steps=1)
    said = str(refused.value)
    assert said.startswith("no layout fits this configuration and this machine. Name one with --layout.\n")
    assert "\n  - tp=2: 2 ranks: more than 0 are not started unasked" in said and said.count("\n  - ") == 11


def test_ranks_read_the_configuration_that_is_compared(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the credentials of what it names: they are to read it."""
    read = list[Config]()
    monkeypatch.setattr(launch, "run_ranks", lambda num_ranks, command: read.append(load(Path(command[4]))) or 0)
    base = load(config, ["data.train=s3://me:s3cr3t@bucket/tokens", "parallel.dp=2"])
    assert verification._run(base, "dp=2", 2, tmp_path / "layout") == 0 and read == [base]
