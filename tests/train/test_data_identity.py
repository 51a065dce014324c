"""A run goes on over the data that it began with, wherever that lies, or not at all."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from colonnade.data.indexed import TokenFile
from colonnade.data.writer import TokenFileWriter, merge
from colonnade.train import loop
from tests.commands import Answer, forked
from tests.runs import Finished, assert_same, events, saved_steps
from tests.tiny import TinyCorpus
from tests.train.test_recovery import rewritten

assert loop, "imported once, here, and not by every forked rank"
Change = Callable[[Path], None]


def copy_tokens(prefix: Path, to: Path) -> Path:
    for ending in (".bin", ".idx"):
        shutil.copy(f"{prefix}{ending}", f"{to}{ending}")
    return to


def longer(prefix: Path) -> None:
    copy_tokens(prefix, prefix.with_name("once"))
    merge([prefix.with_name("once")] * 2, prefix)


def one_bit(prefix: Path) -> None:
    tokens = bytearray(Path(f"{prefix}.bin").read_bytes())
    tokens[200] ^= 1
    Path(f"{prefix}.bin").write_bytes(tokens)


def other_lengths(prefix: Path) -> None:
    """The same tokens, cut into documents in other places."""
    file = TokenFile(prefix)
    documents = [file.document(number).copy() for number in range(file.num_documents)]
    first, second = documents[:2]
    documents[:2] = [first[:-1], [*first[-1:], *second]]
    del file
    with TokenFileWriter(prefix, documents[2].dtype) as writer:
        for document in documents:
            writer.add_document(document)


@pytest.fixture
def stopped(config: Path, corpus: TinyCorpus, tmp_path: Path) -> Path:
    """A configuration whose run, on token files of its own, has ended at step 4 of 6. Blend, validation and test."""
    text = config.read_text().replace(f'train = "{corpus.prefix}"\n', "")
    for name in ("one", "two", "val", "test"):
        copy_tokens(Path(corpus.prefix), tmp_path / name)
    one_bit(tmp_path / "two")
    blend = f'[data.blend]\n"{tmp_path}/one" = 1.0\n"{tmp_path}/two" = 2.0\n\n[train]'
    own = f'validation = "{tmp_path}/val"\ntest = "{tmp_path}/test"\n'
    text = text.replace('split = "5:1"\n', own).replace("[train]", blend).replace("steps = 6", "steps = 4")
    config.write_text(text)
    answer = forked("train", config, "optim.decay_steps=6")
    assert answer.status == 0, answer
    return config


def go_on(config: Path, *more: str) -> Answer:
    return forked("train", config, "train.steps=6", "optim.decay_steps=6", *more)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "key", "change", "said"),
    [
        ("one", "data.blend, file 1", longer, "tokens, now"),
        ("two", "data.blend, file 2", one_bit, "other tokens in "),
        ("val", "data.validation", other_lengths, "its documents have other lengths"),
        ("test", "data.test", one_bit, "the first at token "),
    ],
)
def test_data_that_has_changed_is_refused(
    stopped: Path, tmp_path: Path, name: str, key: str, change: Change, said: str
) -> None:
    change(tmp_path / name)
    answer = go_on(stopped)
    assert answer.status == 2 and "Traceback" not in answer.err, answer
    assert f"\n  {key} ({tmp_path / name}): " in answer.err and said in answer.err
    assert "Restore" in answer.err and "another run.folder" in answer.err
    assert saved_steps(tmp_path / "run")[-1] == 4


@pytest.mark.slow
def test_the_same_files_elsewhere_are_the_same_data(stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    assert go_on(stopped, f"run.folder={tmp_path / 'whole'}").status == 0
    (tmp_path / "moved").mkdir()
    for name in ("one", "two", "val", "test"):
        for ending in (".bin", ".idx"):
            (tmp_path / f"{name}{ending}").rename(tmp_path / "moved" / f"{name}{ending}")
    stopped.write_text(stopped.read_text().replace(f"{tmp_path}/", f"{tmp_path}/moved/").replace("/moved/run", "/run"))
    answer = go_on(stopped)
    assert answer.status == 0, answer
    assert_same(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_files_of_a_blend_in_another_order_are_another_run(stopped: Path, tmp_path: Path) -> None:
    text = stopped.read_text()
    text = text.replace("/one", "/three").replace("/two", "/one").replace("/three", "/two")
    stopped.write_text(text)
    answer = go_on(stopped)
    assert answer.status == 2 and "data.blend, file 1" in answer.err and "data.blend, file 2" in answer.err, answer


@pytest.mark.slow
def test_other_data_on_purpose(stopped: Path, tmp_path: Path) -> None:
    longer(tmp_path / "one")
    answer = go_on(stopped, "checkpoint.allow_other_data=true", "checkpoint.every=1", "checkpoint.keep=3")
    assert answer.status == 0, answer
    assert "checkpoint.allow_other_data = true" in answer.out and "data.blend, file 1" in answer.out
    (told,) = [event for event in events(tmp_path / "run") if event["event"] == "other data"]
    assert told["step"] == 4 and len(told["differences"]) == 1
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000006")
    assert go_on(stopped).status == 0, "from then on this is the run's data"


def without_data(metadata: dict[str, Any]) -> None:
    del metadata["data"]


def test_a_checkpoint_from_before_says_that_it_cannot_tell(finished: Finished, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.folder, run)
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    rewritten(run / "checkpoints" / "step_00000004", without_data)
    answer = forked("train", finished.config, f"run.folder={run}")
    assert answer.status == 0 and answer.out.count("cannot be checked") == 1, answer
    assert_same(run, finished.folder)


def test_a_checkpoint_from_before_goes_on_with_its_own_paths_alone(
    finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.folder, run)
    rewritten(run / "checkpoints" / "step_00000006", without_data)
    copy_tokens(Path(corpus.prefix), tmp_path / "tokens")
    answer = forked("train", finished.config, f"run.folder={run}", f"data.train={tmp_path / 'tokens'}")
    assert answer.status == 2 and f'data.train: "{corpus.prefix}" -> "{tmp_path / "tokens"}"' in answer.err, answer


def test_a_record_that_nobody_wrote(finished: Finished, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.folder, run)
    rewritten(run / "checkpoints" / "step_00000006", lambda metadata: metadata["data"].update({"data.train": [1]}))
    answer = forked("train", finished.config, f"run.folder={run}")
    assert answer.status == 2 and "Traceback" not in answer.err and "data.train" in answer.err, answer
