"""What forked runs of a session are told of their memory and time is what each would have been told alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.planner import comparison
from colonnade.planner.predict import predict
from colonnade.train.products import Decision
from tests import predicted

CPU = torch.device("cpu")
DECIDED = Decision("fp32", None)


def planned(config: Config) -> dict[str, Any]:
    memory = predict(config, 275, stage=0, device=CPU, products=DECIDED.products)
    return comparison.prediction(config, 275, CPU, DECIDED, memory)


OTHERS = {
    "run": ["run.folder=elsewhere"],
    "data": ["data.train=other", "data.validation=more", "data.test=most", "data.tokenizer=another"],
    "train": ["train.steps=77", "train.evaluate_every=5", "train.evaluate_samples=9"],
}
"""Another value of each key on which nothing depends."""


@pytest.mark.slow
def test_nothing_follows_from_the_keys_that_are_left_out(config: Path) -> None:
    named = {section: {each.partition("=")[0].partition(".")[2] for each in OTHERS[section]} for section in OTHERS}
    assert named == predicted.NOTHING_FOLLOWS
    alone, other = load(config), load(config, [each for section in OTHERS.values() for each in section])
    assert planned(alone) == planned(other) and predicted._key(alone) == predicted._key(other)


def test_what_one_asked_another_is_told(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Config] = []

    def answer(config: Config, *_: object, **__: object) -> int:
        asked.append(config)
        return len(asked)

    for name in ("predict", "prediction"):
        monkeypatch.setattr(comparison, name, answer)
    predicted.remember(tmp_path)
    one, same, wider = load(config), load(config, ["run.folder=b"]), load(config, ["model.hidden_size=32"])
    assert [comparison.predict(each, 275) for each in (one, same, wider, one)] == [1, 1, 2, 1]  # type: ignore[call-arg]
    assert comparison.predict(one, 276) == 3 and asked == [one, wider, one]  # type: ignore[call-arg]
    assert comparison.prediction(one, 275) == 4, "another question"  # type: ignore[call-arg]
