"""A run that stops and goes on with other ranks is the run that never stopped: losses, learning rate, weights, moments.

Global batch, order of samples, dropout masks and the place on the learning-rate curve follow from the number of samples
alone. In float64, so that what is left of a layout is rounding.
"""

from pathlib import Path

import pytest
import torch

from tests.commands import forked
from tests.runs import metrics, tensors

EXACT = ["train.precision=fp64", "optim.decay_steps=6", "optim.epsilon=1e-6", "model.num_layers=4"]
EXACT += ["checkpoint.every=0"]  # each part of a run is saved at its end, and nothing else is gone on from
SHARDED = ["parallel.dp=2", "parallel.tp=2", "parallel.zero=3", "parallel.sequence_parallel=true"]
DEEP = ["parallel.pp=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2", "train.micro_batch_size=1"]

CHAINS = {
    "fewer, more, other ranks": [SHARDED, [], DEEP],
    "ZeRO by ZeRO": [
        ["parallel.dp=4", "parallel.zero=1", "train.micro_batch_size=1"],
        ["parallel.dp=2", "parallel.zero=2"],
        SHARDED,
    ],
    "schedules": [
        ["parallel.pp=3", "parallel.schedule=gpipe"],
        ["parallel.pp=2", "parallel.schedule=zero_bubble", "parallel.recompute=full", "parallel.dp=2"],
        ["parallel.pp=4", "parallel.cuts=[2,1,1,2]"],
    ],
}


def num_ranks(layout: list[str]) -> int:
    sizes = dict(each.removeprefix("parallel.").split("=") for each in layout)
    return int(sizes.get("tp", 1)) * int(sizes.get("pp", 1)) * int(sizes.get("dp", 1))


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("fewer, more, other ranks", "adamw"), ("ZeRO by ZeRO", "lamb"), ("schedules", "adamw")],
)
@pytest.mark.slow
def test_a_run_follows_the_uninterrupted_one(config: Path, tmp_path: Path, name: str, optimizer: str) -> None:
    exact, whole, run = [*EXACT, f"optim.name={optimizer}"], tmp_path / "whole", tmp_path / "run"
    assert forked("train", config, f"run.folder={whole}", *exact).status == 0
    for stop, layout in zip((2, 4, 6), CHAINS[name], strict=True):
        arguments = [f"run.folder={run}", *exact, *layout, f"train.steps={stop}"]
        answer = forked("train", config, *arguments, num_ranks=num_ranks(layout))
        assert answer.status == 0, (layout, answer)
    for ours, theirs in zip(metrics(run), metrics(whole), strict=True):
        shared = ours.keys() & theirs.keys()  # a run is evaluated at its end, too
        assert {"step", "loss", "learning_rate", "grad_norm", "tokens"} <= shared
        assert {key: ours[key] for key in shared} == pytest.approx({key: theirs[key] for key in shared}, rel=1e-9)
    expected = tensors(whole)
    for tensor, x in tensors(run).items():
        torch.testing.assert_close(x, expected[tensor], rtol=1e-9, atol=1e-12, msg=f"{name}: {tensor}")


@pytest.mark.slow
def test_the_loss_scale_goes_on(config: Path, tmp_path: Path) -> None:
    """fp16: scale, the steps since it changed, and the skipped steps are part of the state.

    The first scales overflow, so that steps are skipped, others are not, and the run stops between a scale's first good
    step and its last.
    """
    scaling = ["train.precision=fp16", "train.loss_scale=2.4e6", "train.loss_scale_window=3", "optim.decay_steps=6"]
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert forked("train", config, f"run.folder={whole}", *scaling).status == 0
    expected = metrics(whole)
    skipped, scales = ([line[name] for line in expected] for name in ("skipped_steps", "loss_scale"))
    assert 0 < skipped[1] == skipped[5], "the first overflow, the last do not"
    assert scales[2] == scales[4] < scales[5], "three good steps double the scale"
    for stop in (3, 6):
        answer = forked("train", config, f"run.folder={run}", *scaling, f"train.steps={stop}")
        assert answer.status == 0, answer
    for ours, theirs in zip(metrics(run), expected, strict=True):
        assert ours == {**theirs, **{name: ours[name] for name in ours.keys() - theirs.keys()}}
    final = tensors(whole)
    assert [name for name, x in tensors(run).items() if not torch.equal(x, final[name])] == []
