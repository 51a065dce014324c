"""Epochs in steps: of a model whose samples are several sequences too."""

from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.data.curriculum import Curriculum
from colonnade.train import corpus
from colonnade.train import start as begin


@pytest.mark.parametrize(
    ("epochs", "there", "samples"), [(0.5, 5, 3), (1.0, 5, 5), (2.1, 5, 11), (1.1, 50, 55), (2.2, 100, 220)]
)
def test_epochs_count_all_sequences_of_a_sample(
    epochs: float, there: int, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of questions with four choices of 16 tokens; a part of a sample is read as a whole, one of rounding is none."""
    model, train = SimpleNamespace(seq_length=16, sample_length=64), SimpleNamespace(epochs=epochs)
    settings: Any = SimpleNamespace(model=model, train=train)
    monkeypatch.setattr(begin, "build", lambda *_, **__: settings)
    curriculum = Curriculum.constant(64, 1)
    datasets = SimpleNamespace(datasets=SimpleNamespace(train=range(there)), curriculum=curriculum)
    monkeypatch.setattr(corpus, "open_corpus", lambda config: datasets)
    monkeypatch.setattr(corpus, "lasts_for", lambda *_: True)
    monkeypatch.setattr(corpus, "step_by", lambda config, tokens: tokens)
    assert begin._steps_of_epochs({"train": {"epochs": epochs}}) == (samples * 64, [])


def test_epochs_are_of_the_samples_that_the_run_will_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which these are is known before they are counted."""
    content: dict[str, Any] = {"train": {"epochs": 2.0, "precision": "fp32"}, "data": {}}
    monkeypatch.setattr(begin, "_steps_of_epochs", lambda content: (content["data"].get("revision", 0), []))
    begin.complete(content)
    assert content["train"]["steps"] == content["data"]["revision"] == begin.REVISION
