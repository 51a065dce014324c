"""What is published with weights (the tokens that begin and end a text, how text is drawn): kept by a run that begins
from them, by a merge, and on the way back.
"""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import transformers

from colonnade.checkpoint.manifest import read_manifest
from colonnade.data.tokenizer import Tokenizer
from colonnade.huggingface.folder import TOKEN_IDS
from colonnade.train.published import ends_of
from tests.commands import forked, here
from tests.runs import Finished
from tests.tiny import TinyCorpus, write_config

STEP = "step_0000000{}"


def published(finished: Finished, folder: Path, ends: object = (5, 3)) -> Path:
    """The run's weights as others publish them; `ends` are what its generation_config.json says."""
    assert here("convert", finished.folder, folder).status == 0
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "top_k": 7}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "bos_token_id": 2, "pad_token_id": 4}))
    return folder


def ends_at(path: Path) -> frozenset[int]:
    return ends_of(path, read_manifest(path), Tokenizer.load(path / "tokenizer.json"))


def check_published_again(folder: Path, ends: list[int]) -> None:
    """What is made of a run says what was published with the weights that the run began from."""
    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert (generation.eos_token_id, generation.top_k, generation.bos_token_id) == (ends, 7, 2)
    config = json.loads((folder / "config.json").read_text())
    assert {key: config[key] for key in TOKEN_IDS} == dict(zip(TOKEN_IDS, (2, ends, 4), strict=True))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id) == (2, 4) and tokenizer.eos_token_id in ends


@pytest.mark.parametrize("source", ["theirs", "ours"])
def test_a_run_from_published_weights_keeps_them(
    source: str, finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    """When it goes on, too; and a folder of Hugging Face that is made of it says them there."""
    theirs = published(finished, tmp_path / "theirs")
    assert here("convert", theirs, tmp_path / "ours").status == 0
    config, run = write_config(corpus, tmp_path), tmp_path / "run" / "checkpoints"
    options = ["train", config, f"train.init_from={tmp_path / source}", "checkpoint.every=1"]
    for step in (1, 2):
        assert forked(*options, f"train.steps={step}").status == 0
        assert ends_at(run / STEP.format(step)) == {3, 5}
    assert here("convert", tmp_path / "run", tmp_path / "back").status == 0
    check_published_again(tmp_path / "back", [3, 5])


def test_a_run_from_weights_of_a_run_says_nothing(finished: Finished, corpus: TinyCorpus, tmp_path: Path) -> None:
    """Its texts end where its documents do."""
    config = write_config(corpus, tmp_path)
    assert forked("train", config, f"train.init_from={finished.folder}", "train.steps=1").status == 0
    assert ends_at(tmp_path / "run" / "checkpoints" / STEP.format(1)) == frozenset()


@pytest.mark.parametrize("ends", [None, 4])
def test_a_folder_without_them_has_those_of_its_config(
    ends: int | None, finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    theirs = published(finished, tmp_path / "theirs", None)
    if ends is None:
        (theirs / "generation_config.json").unlink()
    content = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps({**content, "eos_token_id": ends or 6}))
    config = write_config(corpus, tmp_path)
    assert forked("train", config, f"train.init_from={theirs}", "train.steps=1").status == 0
    assert ends_at(tmp_path / "run" / "checkpoints" / STEP.format(1)) == {ends or 6}


def test_a_merge_keeps_them(finished: Finished, corpus: TinyCorpus, tmp_path: Path) -> None:
    theirs = published(finished, tmp_path / "theirs")
    options = ["lora.rank=2", "train.steps=1", f"train.init_from={theirs}"]
    assert forked("train", write_config(corpus, tmp_path), *options).status == 0
    assert here("merge", tmp_path / "run", tmp_path / "merged").status == 0
    assert ends_at(tmp_path / "merged") == {3, 5}
    assert here("convert", tmp_path / "merged", tmp_path / "back").status == 0
    check_published_again(tmp_path / "back", [3, 5])
