"""`verify`: layouts that are the serial run are told so; a broken one is caught, with the number that differs first."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade import cli
from colonnade.errors import ColonnadeError, ConfigError
from colonnade.mesh import launch
from colonnade.train import verify as verification
from colonnade.train.verify import Box
from tests.commands import colonnade, start

Verdicts = Callable[..., dict[str, Any]]


@pytest.fixture
def verdict(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Verdicts:
    """`verify --json` on forked ranks; `broken(rank)` is called in those of a layout that is not serial."""

    def run(*arguments: str, broken: Callable[[int], None] = lambda rank: None, status: int = 0) -> dict[str, Any]:
        def run_ranks(num_ranks: int, command: list[str]) -> int:
            first = broken if num_ranks > 1 else lambda rank: None
            return max(answer.status for answer in start(*command[3:], num_ranks=num_ranks, first=first).answers())

        monkeypatch.setattr(launch, "run_ranks", run_ranks)
        monkeypatch.setattr("sys.argv", ["colonnade", "verify", str(config), *arguments, "--json", "--steps", "2"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert (ended.value.code or 0) == status
        output = json.loads(capsys.readouterr().out)
        assert isinstance(output, dict)
        return output

    return run


def test_layouts_that_are_the_serial_run(verdict: Verdicts) -> None:
    told = verdict("--layout", "tp=2", "--layout", "dp=2")
    assert [layout["layout"] for layout in told["layouts"]] == ["tp=2", "dp=2"]
    for layout in told["layouts"]:
        assert layout.keys() == {"layout", "max_relative_difference", "first_difference", "ok"}
        assert layout["ok"] is True and layout["first_difference"] is None
        assert 0 <= layout["max_relative_difference"] <= 1e-10


def no_sum_over_dp(rank: int) -> None:
    from colonnade.data_parallel import reduce

    reduce.GradientReducer.finish = lambda self: None  # type: ignore[method-assign]
    reduce.GradientReducer.arm = lambda self: None  # type: ignore[method-assign]


def another_seed_on_rank_1(rank: int) -> None:
    from colonnade.train import step

    masks = step.Masks
    step.Masks = lambda seed, samples: masks(seed + rank, samples)  # type: ignore[assignment, misc]


def no_number_in_the_norm(rank: int) -> None:
    from colonnade.train import verify

    step = verify.train_step
    verify.train_step = lambda *args: step(*args).__class__(1.0, math.nan, 0.1, 1)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("layout", "broken", "first"),
    [
        ("dp=2", no_sum_over_dp, "gradient norm of step 1"),
        ("tp=2", another_seed_on_rank_1, "loss of step 1"),
    ],
)
def test_a_broken_layout(verdict: Verdicts, layout: str, broken: Callable[[int], None], first: str) -> None:
    (told,) = verdict("--layout", layout, broken=broken, status=1)["layouts"]
    assert told["ok"] is False and told["max_relative_difference"] > 1e-3
    assert told["first_difference"].startswith(f"{first} by ")


def test_no_number_is_a_difference_and_valid_json(verdict: Verdicts) -> None:
    (told,) = verdict("--layout", "tp=2", broken=no_number_in_the_norm, status=1)["layouts"]
    assert told["ok"] is False and told["max_relative_difference"] is None


def test_a_layout_that_cannot_be_is_refused_before_anything_runs(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "run_ranks", lambda *_: pytest.fail("started ranks"))
    for layout, said in (
        ("tp=3", "does not divide"),
        ("foo", "is no layout"),
        ("tp=x", "is no layout"),
        ("pp=2", "pp"),
    ):
        with pytest.raises(ConfigError, match=said):
            verification.verify(config, [], [layout], steps=1, as_json=False)


def test_a_run_that_fails_is_no_verdict(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "run_ranks", lambda *_: 2)
    with pytest.raises(ColonnadeError, match=r"the run under the layout .* failed \(exit status 2\)"):
        verification.verify(config, [], ["tp=2"], steps=1, as_json=False)
    monkeypatch.setattr(launch, "run_ranks", lambda *_: 130)
    with pytest.raises(SystemExit) as ended:
        verification.verify(config, [], ["tp=2"], steps=1, as_json=False)
    assert ended.value.code == 130


def boxes(**values: list[float]) -> list[Box]:
    return [Box(name, (0,), torch.tensor(x, dtype=torch.float64)) for name, x in values.items()]


def test_the_first_difference_is_the_first_of_the_run_on_any_rank() -> None:
    serial = {0: boxes(a=[1.0, 2.0], b=[3.0, 4.0], c=[0.0, 0.0])}
    cut = {0: boxes(a=[1.0, 2.0], b=[3.0, 4.4]), 1: boxes(a=[1.0, 2.2], b=[3.0, 4.0])}
    told = verification._compare("tp=2", serial, cut)
    assert (told.ok, told.first_difference) == (False, "a by 1.0e-01")
    assert told.max_relative_difference == pytest.approx(0.1)
    same = verification._compare("tp=2", serial, {0: [Box("b", (1,), torch.tensor([4.0], dtype=torch.float64))]})
    assert same.ok and same.max_relative_difference == 0.0


def test_rounding_is_no_difference() -> None:
    serial = {0: boxes(a=[1.0, 2.0])}
    assert verification._compare("tp=2", serial, {0: boxes(a=[1.0 + 1e-11, 2.0])}).ok
    assert not verification._compare("tp=2", serial, {0: boxes(a=[1.0 + 1e-9, 2.0])}).ok


@pytest.mark.slow
def test_the_command(config: Path, tmp_path: Path) -> None:
    """In processes of its own: one JSON object on standard output, and nothing written."""
    answer = colonnade("verify", config, "--layout", "tp=2", "--steps", 1, "--json")
    assert (answer.status, answer.err) == (0, "")
    (told,) = json.loads(answer.out)["layouts"]
    assert told["layout"] == "tp=2" and told["ok"] is True and answer.out.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_mutated_copy_of_the_program(config: Path, tmp_path: Path) -> None:
    """Its row-parallel layers leave out the sum over tp."""
    source = Path(verification.__file__).parents[1]
    shutil.copytree(source, tmp_path / "copy" / "colonnade", ignore=shutil.ignore_patterns("__pycache__"))
    linear = tmp_path / "copy/colonnade/tensor_parallel/linear.py"
    mutated = linear.read_text().replace("reduce_from(linear(x, self.weight), self.tp)", "linear(x, self.weight)")
    assert mutated != linear.read_text()
    linear.write_text(mutated)
    answer = colonnade("verify", config, "--layout", "tp=2", "--steps", 1, PYTHONPATH=str(tmp_path / "copy"))
    assert answer.status == 1, answer
    assert "DIFFERS, first in the loss of step 1 by " in answer.out
