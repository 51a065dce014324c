"""What forked runs of a session are told of their memory and time is what each would have been told alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from colonnade.architecture.parts import trained_architecture
from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.planner import comparison, memory
from colonnade.planner.kept import Kept, kept_of
from colonnade.planner.predict import predict
from colonnade.train.products import Decision
from tests import predicted

CPU = torch.device("cpu")
DECIDED = Decision("fp32", None)


def planned(config: Config, decision: Decision = DECIDED) -> dict[str, Any]:
    own = predict(config, 275, stage=0, device=CPU, products=decision.products)
    return comparison.prediction(config, 275, CPU, decision, own)


def kept(config: Config) -> tuple[dict[str, Kept], object]:
    """What a micro-batch leaves in each unit, and what it is remembered by."""
    sections = (config.model, config.parallel, config.train)
    more: dict[str, Any] = {"vocab_size": 275, "device": "cpu", "architecture": trained_architecture(config, 275)}
    return kept_of(*sections, **more), predicted._key_of_units(*sections, **more)


OTHERS = {
    "model": ["model.init_std=0.7"],
    "run": ["run.folder=elsewhere"],
    "data": ["data.train=other", "data.validation=more", "data.test=most", "data.tokenizer=another"],
    "train": [
        *("train.steps=77", "train.seed=3", "train.patience=2", "train.evaluate_every=5", "train.evaluate_samples=9"),
    ],
    "optim": [
        *("optim.learning_rate=0.3", "optim.min_learning_rate=0.1", "optim.warmup_steps=9", "optim.decay=linear"),
        "optim.decay_steps=50",
    ],
    "divergence": [
        *("divergence.then=roll_back", "divergence.spike=4", "divergence.window=6", "divergence.patience=2"),
        *("divergence.healthy_for=2", "divergence.rate_factor=0.5", "divergence.rate_steps=3", "divergence.tries=1"),
    ],
    "checkpoint": [
        *("checkpoint.keep=12", "checkpoint.retry_for=0", "checkpoint.unequal_copies=stop"),
        "checkpoint.compare_copies_every=1",
    ],
    "restarts": ["restarts.limit=2"],
}
"""Another value of each key on which nothing depends."""


@pytest.mark.slow
def test_nothing_follows_from_the_keys_that_are_left_out(config: Path) -> None:
    named = {section: {each.partition("=")[0].partition(".")[2] for each in OTHERS[section]} for section in OTHERS}
    assert named == predicted.NOTHING_FOLLOWS
    alone, other = load(config), load(config, [each for section in OTHERS.values() for each in section])
    as_before = replace(DECIDED, how="kept", notes=("as before",))
    assert planned(alone) == planned(other, as_before)
    assert predicted._key(alone, 275, DECIDED) == predicted._key(other, 275, as_before)


@pytest.mark.slow
def test_what_is_left_in_units_follows_from_few_keys(config: Path) -> None:
    alone, known = kept(load(config))
    for layout in (
        ["parallel.pp=2", "parallel.schedule=zero_bubble", "parallel.cuts=[2,2]"],
        ["parallel.dp=2", "parallel.zero=3", "train.gradient_clip=0.5"],
        ["parallel.pp=2", "parallel.dp=2", "train.global_batch_size=16", "optim.name=lamb"],
    ):
        assert kept(load(config, layout)) == (alone, known), layout
    for other in (
        ["parallel.tp=2"],
        ["parallel.recompute=selective"],
        ["train.precision=fp64"],
        ["train.micro_batch_size=1"],
        ["model.dropout=0.0"],
    ):
        found, key = kept(load(config, other))
        assert found != alone and key != known, other


def test_what_one_asked_another_is_told(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def answer(config: object, *_: object, **__: object) -> int:
        asked.append(config)
        return len(asked)

    monkeypatch.setattr(comparison, "prediction", answer)
    monkeypatch.setattr(memory, "kept_of", answer)
    predicted.remember(tmp_path)
    one, same, wider = load(config), load(config, ["run.folder=b"]), load(config, ["model.hidden_size=32"])
    ask, ask_of_units = cast(Any, comparison.prediction), cast(Any, memory.kept_of)
    assert [ask(each, 275) for each in (one, same, wider, one)] == [1, 1, 2, 1]
    assert ask(one, 276) == 3 and asked == [one, wider, one]
    others = load(config, ["parallel.dp=2"])
    of = [ask_of_units(each.model, each.parallel, each.train, vocab_size=275) for each in (one, others, wider, one)]
    assert of == [4, 4, 5, 4], "another question than what is predicted"
    assert asked[3:] == [one.model, wider.model]
