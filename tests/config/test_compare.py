from collections.abc import Callable

from colonnade.config.compare import MAY_CHANGE, MAY_CHANGE_SECTIONS, difference, may_change_on_resume
from colonnade.config.describe import all_keys
from colonnade.config.schema import Config

Loaded = Callable[..., Config]


def test_a_line_for_each_key_that_differs(loaded: Loaded) -> None:
    other = loaded("train.steps=200", "data.validation=v", "optim.learning_rate=2e-3", "run.folder=elsewhere")
    assert difference(loaded(), other) == [
        'data.validation: (unset) -> "v"',
        "train.steps: 100 -> 200",
        "optim.learning_rate: 0.001 -> 0.002",
        'run.folder: "runs/small" -> "elsewhere"',
    ]
    assert difference(loaded(), other, only_what_forbids_resume=True) == [
        'data.validation: (unset) -> "v"',
        "optim.learning_rate: 0.001 -> 0.002",
    ]


def test_the_same_values_written_otherwise_are_no_difference(loaded: Loaded) -> None:
    assert difference(loaded(), loaded()) == []
    assert difference(loaded(), loaded("model.ffn_hidden_size=256")) == []
    tiny = ("model.num_layers=2", "model.hidden_size=64", "model.num_heads=4", "model.seq_length=64")
    assert difference(loaded(*tiny), loaded(*tiny, "model.preset=tiny")) == []


def test_layout_and_length_may_change_and_mathematics_may_not() -> None:
    may = {key for key in all_keys() if may_change_on_resume(key)}
    assert may >= {
        "train.steps",
        "train.micro_batch_size",
        "parallel.tp",
        "parallel.dp",
        "checkpoint.every",
        "run.folder",
    }
    assert may.isdisjoint({"train.seed", "train.global_batch_size", "train.precision", "model.dropout", "data.train"})
    assert set(all_keys()) >= MAY_CHANGE
    assert {key.split(".")[0] for key in all_keys()} >= MAY_CHANGE_SECTIONS
