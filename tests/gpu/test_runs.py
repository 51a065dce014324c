"""Whole commands on a GPU: what a user would start."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.gpus import command, start, wait_for
from tests.runs import assert_near, assert_same_end, metrics
from tests.tiny import TinyCorpus

CUDA = "train.device=cuda"
EVEN = ("train.evaluate_every=2", "optim.decay_steps=6")
"""So that a run of fewer steps is the beginning of one of six."""


def trained(config: Path, folder: Path, *overrides: str) -> Path:
    answer = command("train", config, f"run.folder={folder}", *overrides)
    assert answer.status == 0, answer
    return folder


def test_float64_is_that_of_the_cpu(config: Path, tmp_path: Path) -> None:
    on_cpu, on_gpu = (
        trained(config, tmp_path / where, "train.precision=fp64", f"train.device={where}") for where in ("cpu", "cuda")
    )
    assert_near(on_gpu, on_cpu)


@pytest.mark.parametrize(("first", "then"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_a_run_moves_between_devices(first: str, then: str, config: Path, tmp_path: Path) -> None:
    exact = ("train.precision=fp64", *EVEN)
    whole = trained(config, tmp_path / "whole", *exact)
    moved = trained(config, tmp_path / "moved", *exact, f"train.device={first}", "train.steps=4")
    trained(config, moved, *exact, f"train.device={then}")
    assert_near(moved, whole)


@pytest.mark.parametrize(("precision", "near"), [("fp32", 1e-4), ("bf16", 0.03), ("fp16", 0.01)])
def test_losses_of_other_precisions_are_near(precision: str, near: float, config: Path, tmp_path: Path) -> None:
    exact = trained(config, tmp_path / "exact", "train.precision=fp64")
    found = trained(config, tmp_path / "found", f"train.precision={precision}", "train.loss_scale=1024", CUDA)
    for mine, theirs in zip(metrics(found), metrics(exact), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=near)


@pytest.mark.parametrize(("precision", "drop"), [("bf16", "0.1"), ("bf16", "0.0"), ("fp16", "0.1"), ("fp32", "0.0")])
def test_a_deterministic_run_goes_on_to_the_bit(precision: str, drop: str, config: Path, tmp_path: Path) -> None:
    more = [CUDA, f"train.precision={precision}", "train.deterministic=true"]
    more += [f"model.dropout={drop}", f"model.attention_dropout={drop}"]
    more += EVEN
    whole = trained(config, tmp_path / "whole", *more)
    parts = trained(config, tmp_path / "parts", *more, "train.steps=4")
    trained(config, parts, *more)
    assert_same_end(parts, whole)


@pytest.mark.parametrize(
    "more",
    [
        ("checkpoint.asynchronous=true", "checkpoint.every=1"),
        ("--profile", "3:4"),
        ("thermometers.every=1",),
    ],
    ids=lambda more: more[0],
)
def test_with(more: tuple[str, ...], config: Path, tmp_path: Path) -> None:
    on_cpu, on_gpu = (
        trained(config, tmp_path / where, "train.precision=fp64", f"train.device={where}", *more)
        for where in ("cpu", "cuda")
    )
    assert_near(on_gpu, on_cpu)


@pytest.mark.parametrize("zero", [3])
def test_offloaded_states_are_those_of_the_device(zero: int, config: Path, tmp_path: Path) -> None:
    more = (CUDA, "train.precision=bf16", "train.deterministic=true", f"parallel.zero={zero}")
    here = trained(config, tmp_path / "here", *more)
    there = trained(config, tmp_path / "there", *more, "parallel.offload=true")
    for mine, theirs in zip(metrics(there), metrics(here), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


def test_auto_takes_the_gpu_and_says_so(config: Path, tmp_path: Path) -> None:
    answer = command("train", config, "train.device=auto", f"run.folder={tmp_path / 'auto'}")
    assert answer.status == 0 and "NVIDIA" in answer.out, answer
    compared = json.loads((tmp_path / "auto" / "comparison.json").read_text())
    assert compared["memory"]["total_bytes"]["measured"] > 0, compared


def test_one_rank_that_was_launched(config: Path, tmp_path: Path) -> None:
    """It joins process groups of NCCL and gloo."""
    for name, launched in (("plain", False), ("launched", True)):
        more = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        more |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
        answer = command(
            "train", config, CUDA, "train.precision=fp64", f"run.folder={tmp_path / name}", **(more if launched else {})
        )
        assert answer.status == 0, answer
    assert_near(tmp_path / "launched", tmp_path / "plain")


def test_more_ranks_than_gpus(config: Path, tmp_path: Path) -> None:
    answer = command("train", config, CUDA, "parallel.dp=64", "train.global_batch_size=64", "train.micro_batch_size=1")
    assert answer.status == 2 and "each rank needs a GPU of its own" in answer.err, answer


def test_a_state_that_no_gpu_can_hold_is_refused_at_once(config: Path, tmp_path: Path) -> None:
    large = ("model.hidden_size=16384", "model.num_layers=64")
    answer = command("train", config, CUDA, f"run.folder={tmp_path / 'large'}", *large, timeout=60.0)
    assert answer.status == 2 and "Traceback" not in answer.err, answer
    assert "for parameters, gradients and optimizer alone, and the GPU has" in answer.err, answer


def test_memory_that_is_refused(config: Path, tmp_path: Path) -> None:
    large = ("model.hidden_size=1024", "train.global_batch_size=200000", "train.micro_batch_size=200000")
    answer = command("train", config, CUDA, f"run.folder={tmp_path / 'large'}", *large)
    assert answer.status != 0 and "Traceback" not in answer.err, answer
    assert "has run out of memory" in answer.err and "GPU" in answer.err, answer


def test_it_writes_and_measures(config: Path, corpus: TinyCorpus, tmp_path: Path) -> None:
    run = trained(config, tmp_path / "run", CUDA, "train.precision=fp64")
    written, measured = [], []
    for device in ("cpu", "cuda"):
        options = ["--prompt", "aeion rst", "--max-new-tokens", "12", "--temperature", "0", "--device", device]
        written.append(command("generate", run, *options))
        measured.append(json.loads(command("evaluate", run, "--data", corpus.text, "--device", device, "--json").out))
    assert written[0].status == 0 and written[0].out == written[1].out, written
    assert measured[0]["perplexity"] == pytest.approx(measured[1]["perplexity"], rel=1e-10), measured


def test_sampling_on_a_gpu(config: Path, tmp_path: Path) -> None:
    run = trained(config, tmp_path / "run", CUDA, "train.precision=bf16")
    options = ["--prompt", "aeion rst", "--max-new-tokens", "12", "--top-k", "20", "--top-p", "0.9"]
    answers = [command("generate", run, *options) for _ in range(2)]
    assert answers[0].status == 0 and answers[0].out == answers[1].out, answers


def test_a_signal_saves(config: Path, tmp_path: Path) -> None:
    run = start(
        "train", config, CUDA, f"run.folder={tmp_path / 'run'}", "train.steps=100000", "checkpoint.every=100000"
    )
    wait_for(tmp_path / "run" / "metrics.jsonl")
    assert run.process.pid is not None
    os.kill(run.process.pid, signal.SIGTERM)
    answer = run.answer()
    assert "Traceback" not in answer.err, answer
    assert list((tmp_path / "run" / "checkpoints").glob("step_*")), os.listdir(tmp_path / "run")


def test_verify_on_a_gpu(config: Path) -> None:
    answer = command("verify", config, CUDA)
    assert "Traceback" not in answer.err, answer
    assert answer.status == 0, answer
