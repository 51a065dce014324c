"""What a run may not begin with is one message each, and is no hindrance for one that has begun."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from colonnade.config.check import BEGINNING, CHECKS, check_beginning
from colonnade.config.describe import all_keys
from colonnade.config.load import load, to_toml
from colonnade.config.schema import Config
from colonnade.train import file_checks
from tests.commands import forked, here
from tests.runs import saved_steps
from tests.tiny import TinyCorpus

Loaded = Callable[..., Config]
WHOLE = (
    *("data.documents=separate", "data.packing=whole"),
    *("curriculum.tokens=[0, 99]", "curriculum.global_batch_size=[12, 24]"),
)
YARN = ("model.rotary.scaling=yarn", "model.rotary.factor=2", "model.rotary.original_length=16")


def test_what_a_run_has_written_begins_another(loaded: Loaded, tmp_path: Path) -> None:
    """All keys stand in it, defaults too."""
    (tmp_path / "written.toml").write_text(to_toml(loaded()))
    assert list(check_beginning(load(tmp_path / "written.toml"))) == []


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
            ("optim.rewarm_at=10", "optim.rewarm_steps=3", "optim.decay_steps=13"),
            "optim.rewarm_at = 10 with rewarm_steps = 3 ends the second rise at step 13, which is not below "
            "optim.decay_steps = 13, where the decay ends: the learning rate would fall to its floor in a single step. "
            "Use a later decay_steps, or leave it out: it is train.steps then.",
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
            ("parts.frozen=['!head.*', 'head.norm.*']",),
            'parts.frozen has "!head.*" first, which has no effect: ! takes out again what patterns before it have '
            "frozen. Put those before it, or leave it out.",
        ),
        (
            ("thermometers.sites=['updates']",),
            "thermometers.sites has no effect without thermometers.every: nothing is measured. Set thermometers.every, "
            "like 10, or leave sites out.",
        ),
        (
            (
                "model.position=rotary",
                "model.rotary.scaling=linear",
                "model.rotary.factor=2",
                "model.rotary.beta_fast=3",
            ),
            'model.rotary.beta_fast = 3 has no effect with model.rotary.scaling = "linear". Leave it out, or set '
            'scaling = "yarn".',
        ),
        (
            ("model.position=rotary", "model.rotary.original_length=16"),
            'model.rotary.original_length = 16 has no effect with model.rotary.scaling = "none". Leave it out, or set '
            'scaling = "yarn" or "llama3".',
        ),
        (
            ("model.position=rotary", "model.rotary.low_frequency_factor=3"),
            'model.rotary.low_frequency_factor = 3 has no effect with model.rotary.scaling = "none". Leave it out, or '
            'set scaling = "llama3".',
        ),
        (
            ("model.position=rotary", "model.rotary.scaling=linear"),
            'model.rotary.scaling = "linear" has no effect without model.rotary.factor: 1 scales nothing. Set factor '
            "to how many times longer the texts are, or leave scaling out.",
        ),
        (
            ("checkpoint.upload_patience=5",),
            "checkpoint.upload_patience = 5 has no effect: checkpoint.upload_to is not set. Set it, or leave "
            "upload_patience out.",
        ),
        (
            ("distillation.teacher=t", "distillation.top_k=3", "divergence.then=roll_back"),
            "distillation.top_k = 3 asks the teacher before the run about the samples that it will read, and "
            'divergence.then = "roll_back" passes over some and reads others. Set divergence.skip_batches = false, or '
            "leave top_k out, so that the teacher runs beside the student.",
        ),
        (
            (*WHOLE, "curriculum.seq_length=[8, 16]", "model.seq_length=16"),
            "curriculum.seq_length has 8 before model.seq_length = 16: samples are cut in pieces in that phase, and "
            'data.packing = "whole" cuts no document that fits into a sample. Set all of curriculum.seq_length to 16, '
            "so that batches alone grow, or use another packing.",
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
        ("optim.rewarm_at=10", "optim.rewarm_steps=3", "optim.decay_steps=14"),
        ("optim.rewarm_at=10", "optim.rewarm_steps=3"),
        ("optim.rewarm_at=10", "optim.decay_steps=10", "optim.decay=constant"),
        ("lora.rank=4", "lora.alpha=16.0"),
        ("lora.rank=0", "lora.alpha=16.0"),
        ("lora.rank=0", "parts.frozen=['!*norm*']"),
        ("parts.frozen=['head.*', '!head.norm.*']",),
        ("thermometers.sites=['updates']", "thermometers.every=0"),
        ("model.position=rotary", "model.rotary.scaling=linear", "model.rotary.factor=1"),
        ("model.position=rotary", *YARN, "model.rotary.beta_fast=3"),
        ("model.preset=llama3.1-8b", "model.num_heads=32", "model.rotary.scaling=none", "model.rotary.factor=1"),
        ("checkpoint.upload_to=file:///mnt/run", "checkpoint.upload_patience=5"),
        (*WHOLE, "curriculum.seq_length=[16, 16]", "model.seq_length=16"),
        (*WHOLE, "curriculum.seq_length=[8, 16]", "model.seq_length=16", "data.packing=best_fit"),
        ("train.init_from_resize=true",),
        ("model.vocab_size=100",),
        ("distillation.teacher=t", "distillation.top_k=3", "divergence.then=stop"),
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


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("patience=2", "train.patience = 2 counts evaluations, but data.split = "),
        ("evaluate_at_start=true", "train.evaluate_at_start = true asks for an evaluation, but data.split = "),
    ],
)
def test_what_files_leave_no_validation_sample_for(config: Path, key: str, said: str) -> None:
    """What data.split leaves of some documents, only those tell."""
    config.write_text(config.read_text().replace("evaluate_every = 3\n", "").replace("5:1", "1000:1"))
    told = here("train", config, "--dry-run")
    assert told.status == 0 and "there is no validation part" in told.out
    refused = here("train", config, f"train.{key}", "--dry-run")
    assert refused.status == 2 and "Traceback" not in refused.err
    assert f'{said}"1000:1" leaves no document, or too little text, for a validation sample. Set' in refused.err
    blend = config.read_text().replace("train = ", "blend = { ", 1).replace('tokens"\n', 'tokens" = 1.0 }\n', 1)
    config.write_text(blend)
    assert said in here("train", config, f"train.{key}", "--dry-run").err


def test_files_of_a_blend_that_are_one(config: Path, corpus: TinyCorpus, tmp_path: Path) -> None:
    """However their paths are written; of URLs nothing is known but their names."""
    config.write_text(config.read_text().replace(f'train = "{corpus.prefix}"\n', ""))
    for ending in (".bin", ".idx", ".json"):
        (tmp_path / f"linked{ending}").symlink_to(f"{corpus.prefix}{ending}")
    for other in (f"{corpus.folder}/./tokens", os.path.relpath(corpus.prefix), str(tmp_path / "linked")):
        refused = here("train", config, f'data.blend={{"{corpus.prefix}"=1.0, "{other}"=2.0}}', "--dry-run")
        assert refused.status == 2 and "1 problem" in refused.err
        assert f"data.blend has '{corpus.prefix}' and '{other}', which are one file: it would be" in refused.err
    several = load(config, ['data.blend={"a"=1.0, "b/a"=1.0, "s3://c/a"=1.0, "s3://c//a"=2.0}'])
    assert file_checks.problems_of_a_beginning(several, ()) == []


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
