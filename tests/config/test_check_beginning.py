"""What a run may not begin with is one message each, and is no hindrance for one that has begun."""

from collections.abc import Callable
from pathlib import Path

import pytest

from colonnade.config.check import BEGINNING, CHECKS, check_beginning
from colonnade.config.describe import all_keys
from colonnade.config.schema import Config
from colonnade.train import file_checks
from tests.commands import forked, here
from tests.runs import saved_steps

Loaded = Callable[..., Config]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("optim.warmup_tokens=11", "optim.decay_tokens=10"),
            "optim.warmup_tokens = 11 is more than optim.decay_tokens = 10, where the decay ends: the learning rate "
            "would never get to its highest value. Use at most 10.",
        ),
        (
            ("optim.warmup_steps=0", "optim.decay_start=10", "optim.decay_steps=10"),
            "optim.decay_start = 10 is not below optim.decay_steps = 10, where the decay ends: the learning rate would "
            "fall to its floor in a single step. Use a smaller one, or leave the end out: it is train.steps then.",
        ),
        (
            ("optim.warmup_tokens=0", "optim.decay_start_tokens=12", "optim.decay_tokens=11"),
            "optim.decay_start_tokens = 12 is not below optim.decay_tokens = 11, where the decay ends: the learning "
            "rate would fall to its floor in a single step. Use a smaller one, or leave the end out: it is train.steps "
            "then.",
        ),
        (
            ("train.patience=3", "train.evaluate_every=0"),
            "train.patience = 3 counts evaluations, and train.evaluate_every = 0 leaves them out. Set evaluate_every, "
            "or patience = 0.",
        ),
        (
            ("train.patience=3", "data.split=1:0", "train.evaluate_every=0"),
            'train.patience = 3 counts evaluations, but data.validation is not set and data.split = "1:0" leaves no '
            'validation part. Set data.validation, use a split like "29:1:0", or patience = 0.',
        ),
        (
            ("train.evaluate_at_start=true", "data.split=1:0", "train.evaluate_every=0"),
            "train.evaluate_at_start = true asks for an evaluation, but data.validation is not set and data.split = "
            '"1:0" leaves no validation part. Set data.validation, use a split like "29:1:0", or evaluate_at_start = '
            "false.",
        ),
        (
            ("lora.alpha=16.0", "lora.targets=['attention.qkv']"),
            "[lora] has no effect without lora.rank: all weights would be trained. Set lora.rank, or leave the section "
            "out.",
        ),
        (
            ("distillation.teacher=t", "distillation.top_k=3", "divergence.then=roll_back"),
            "distillation.top_k = 3 asks the teacher before the run about the samples that it will read, and "
            'divergence.then = "roll_back" passes over some and reads others. Set divergence.skip_batches = false, or '
            "leave top_k out, so that the teacher runs beside the student.",
        ),
    ],
)
def test_what_has_no_effect(loaded: Loaded, overrides: tuple[str, ...], message: str) -> None:
    """And can be read all the same: older runs have stored it."""
    assert [found.message for found in check_beginning(loaded(*overrides))] == [message]


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("data.split=1:0", "data.validation=v", "train.patience=3", "train.evaluate_at_start=true"),
        ("train.patience=3",),
        ("optim.decay_start=1000000",),
        ("optim.warmup_steps=0", "optim.decay_start=9", "optim.decay_steps=10"),
        ("optim.warmup_tokens=10", "optim.decay_start_tokens=9", "optim.decay_tokens=10"),
        ("lora.rank=4", "lora.alpha=16.0"),
        ("lora.rank=0", "lora.alpha=16.0"),
        ("train.init_from_resize=true",),
        ("model.vocab_size=100",),
        (
            "distillation.teacher=t",
            "distillation.top_k=3",
            "divergence.then=roll_back",
            "divergence.skip_batches=false",
            "divergence.rate_factor=0.5",
            "divergence.rate_steps=5",
        ),
    ],
)
def test_what_has(loaded: Loaded, overrides: tuple[str, ...]) -> None:
    assert check_beginning(loaded(*overrides)) == []


def test_no_check_is_of_both_kinds_and_all_name_keys_that_exist() -> None:
    assert not {each.messages for each in BEGINNING} & {each.messages for each in CHECKS}
    assert {key for each in BEGINNING for key in each.keys} <= set(all_keys())


def test_a_run_that_has_begun_so_goes_on(config: Path, tmp_path: Path) -> None:
    """As one of a version that did not ask."""
    keys = ["lora.alpha=4.0", "train.patience=2", "train.evaluate_every=0"]
    refused = here("train", config, *keys)
    assert refused.status == 2 and "2 problems" in refused.err and not (tmp_path / "run").exists()
    planned = here("plan", config, *keys)
    assert planned.status == 2 and "[lora] has no effect" in planned.err

    def ask_nothing(rank: int) -> None:
        file_checks.check_beginning = lambda *_: []  # type: ignore[assignment]

    assert forked("train", config, "train.steps=2", *keys, first=ask_nothing).status == 0
    answer = forked("train", config, "train.steps=4", *keys)
    assert answer.status == 0 and saved_steps(tmp_path / "run")[-1] == 4, answer
    assert here("generate", tmp_path / "run", "--prompt", "a", "--max-new-tokens", "1").status == 0
