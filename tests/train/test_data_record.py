"""What differs between the data that a checkpoint knows and what a run reads."""

from dataclasses import replace
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


def test_what_was_and_what_is_are_told_in_this_order() -> None:
    saved: Any = SimpleNamespace(data={"data.train": SimpleNamespace(identity=lambda: IDENTITY)})
    now: Any = SimpleNamespace(
        identities={"data.train": replace(IDENTITY, tokens=91, documents=4)},
        files={"data.train": SimpleNamespace(prefix="data/file")},
    )
    assert other_data(saved, now) == ["data.train (data/file): 90 tokens, now 91; 3 documents, now 4"]
