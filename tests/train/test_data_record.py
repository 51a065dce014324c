"""What differs between the data that a checkpoint knows and what a run reads."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.checkpoint.manifest import read_manifest
from colonnade.config.load import load
from colonnade.data.identity import DataIdentity
from colonnade.errors import CheckpointError
from colonnade.train import data_record
from colonnade.train.data_record import check_data, data_metadata, other_data, other_files, what_to_say
from colonnade.train.metadata import metadata_of
from tests.runs import Finished
from tests.tiny import TinyCorpus

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


CHECKPOINT = Path("step_00000008")


def other(allowed: bool) -> tuple[Any, Any, Any]:
    """Of a checkpoint at sample 1,200 that knows another file: metadata, configuration, corpus."""
    known = {"data.train": SimpleNamespace(identity=lambda: IDENTITY)}
    metadata = SimpleNamespace(data=known, samples=1200, step=8, questions="a" * 64)
    config = SimpleNamespace(checkpoint=SimpleNamespace(allow_other_data=allowed))
    now = {"data.train": replace(IDENTITY, tokens=91)}
    files, asked = {"data.train": SimpleNamespace(prefix="data/file")}, SimpleNamespace(content="a" * 64)
    return metadata, config, SimpleNamespace(identities=now, files=files, questions=asked)


def test_other_data_are_refused_unless_they_are_allowed() -> None:
    metadata, config, corpus = other(allowed=False)
    with pytest.raises(CheckpointError) as told:
        check_data(CHECKPOINT, metadata, config, corpus)
    assert "\n  data.train (data/file): 90 tokens, now 91\nSample 1,200 of it is another one" in str(told.value)
    metadata, config, corpus = other(allowed=True)
    check_data(CHECKPOINT, metadata, config, corpus)
    line, found = what_to_say(CHECKPOINT, metadata, corpus)
    assert line.endswith("allow_other_data = true allows:\n  data.train (data/file): 90 tokens, now 91")
    assert found == ["data.train (data/file): 90 tokens, now 91"]


def test_data_that_are_the_same_are_no_word_and_those_that_nobody_knows_are() -> None:
    metadata, config, corpus = other(allowed=False)
    corpus.identities = {"data.train": IDENTITY}
    check_data(CHECKPOINT, metadata, config, corpus)
    assert what_to_say(CHECKPOINT, metadata, corpus) == ("", [])
    metadata.data = None
    line, found = what_to_say(CHECKPOINT, metadata, corpus)
    assert line.startswith("step_00000008 was written before checkpoints knew their data") and found == []


def test_questions_with_other_content_are_told() -> None:
    """Nothing is trained on them, so that the run goes on. Checkpoints did not always know them."""
    metadata, config, corpus = other(allowed=False)
    corpus.identities = {"data.train": IDENTITY}
    said = (
        "data.questions has other content than before: exact match and F1 of evaluations up to step 8 and behind it do "
        "not compare"
    )
    corpus.questions.content, corpus.end_of_document, corpus.tokenizer = "b" * 64, 7, None
    data = {"data.train": IDENTITY.to_json()}
    assert data_metadata(corpus, None) == {"data": data, "questions": "b" * 64, "end_of_document": 7}
    check_data(CHECKPOINT, metadata, config, corpus)
    assert what_to_say(CHECKPOINT, metadata, corpus) == (said, [said])
    for metadata.questions, questions in ((None, corpus.questions), ("a" * 64, None)):
        corpus.questions = questions
        assert what_to_say(CHECKPOINT, metadata, corpus) == ("", [])


@pytest.mark.parametrize(
    ("file", "before", "own", "kept"), [(0, 1, 2, 0), (None, 0, 2, 0), (None, None, 2, 2), (None, None, None, None)]
)
def test_documents_end_as_the_files_say_else_as_the_weights_know_it_else_as_the_vocabulary_says(
    file: int | None, before: int | None, own: int | None, kept: int | None
) -> None:
    _, _, corpus = other(allowed=False)
    corpus.end_of_document, corpus.tokenizer = file, None if own is None else SimpleNamespace(end_of_document=own)
    assert data_metadata(corpus, before)["end_of_document"] == kept


def test_files_are_compared_with_what_a_checkpoint_knows(
    finished: Finished, corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are there."""
    assert other_files(finished.newest) == []
    shutil.copy(f"{corpus.prefix}.idx", tmp_path / "other.idx")
    tokens = bytearray(Path(f"{corpus.prefix}.bin").read_bytes())
    tokens[200] ^= 1
    (tmp_path / "other.bin").write_bytes(tokens)
    (tmp_path / "dev.json").write_text("{}")
    known = metadata_of(finished.newest, read_manifest(finished.newest)).model_copy(update={"questions": "a" * 64})
    config = load(finished.config)
    data = config.data.model_copy(update={"train": str(tmp_path / "other"), "questions": str(tmp_path / "dev.json")})
    monkeypatch.setattr(data_record, "metadata_of", lambda path, manifest: known)
    monkeypatch.setattr(data_record, "config_of", lambda path, manifest: config.model_copy(update={"data": data}))
    train, questions = other_files(finished.newest)
    assert train.startswith(f"data.train ({tmp_path / 'other'}): other tokens in ")
    assert questions == f"data.questions ({tmp_path / 'dev.json'}): other content"
    for name in ("other.bin", "other.idx", "dev.json"):
        (tmp_path / name).unlink()
    assert other_files(finished.newest) == []


@pytest.fixture
def unknown(config: Path, tmp_path: Path) -> tuple[Path, Any, Any]:
    """A checkpoint that knows no data, what is known of it, and its configuration."""
    checkpoint = tmp_path / "step_00000002"
    checkpoint.mkdir()
    return checkpoint, SimpleNamespace(data=None), load(config)


def test_of_a_checkpoint_that_knows_no_data_the_paths_count(
    unknown: tuple[Path, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may hold the same: nobody knows."""
    checkpoint, metadata, config = unknown
    moved = config.model_copy(update={"data": config.data.model_copy(update={"train": "elsewhere"})})
    monkeypatch.setattr(data_record, "read_manifest", lambda path: None)
    monkeypatch.setattr(data_record, "config_of", lambda path, manifest: config)
    nobody: Any = None
    check_data(checkpoint, metadata, config, nobody)
    with pytest.raises(CheckpointError, match=r"other files:\n  .*elsewhere.*\nWhether they hold the same is unknown"):
        check_data(checkpoint, metadata, moved, nobody)


def test_a_checkpoint_that_tells_neither_data_nor_paths_is_gone_on_from(unknown: tuple[Path, Any, Any]) -> None:
    """Without a manifest, and with one that cannot be read."""
    checkpoint, metadata, config = unknown
    nobody: Any = None
    check_data(checkpoint, metadata, config, nobody)
    (checkpoint / "manifest.json").write_text("{")
    check_data(checkpoint, metadata, config, nobody)
