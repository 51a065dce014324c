"""What differs between the data that a checkpoint knows and what a run reads."""

from types import SimpleNamespace
from typing import Any

from colonnade.data.identity import DataIdentity
from colonnade.train.data_record import other_data

IDENTITY = DataIdentity(90, 3, 3, "uint16", 100, "0" * 64, ("0" * 16, "1" * 16))


def differing(saved: list[str], now: list[str]) -> list[str]:
    written = SimpleNamespace(identity=lambda: IDENTITY)
    metadata: Any = SimpleNamespace(data=dict.fromkeys(saved, written))
    files = {key: SimpleNamespace(prefix="data/file") for key in now}
    corpus: Any = SimpleNamespace(identities=dict.fromkeys(now, IDENTITY), files=files)
    return other_data(metadata, corpus)


def test_files_that_come_and_go_are_told() -> None:
    both, train = ["data.train", "data.validation"], ["data.train"]
    assert differing(both, both) == [] and differing(train, train) == []
    assert differing(both, train) == ["data.validation: not read any more"]
    assert differing(train, both) == ["data.validation: not read before"]
    assert differing([], both) == [], "a checkpoint that knows nothing cannot tell"
