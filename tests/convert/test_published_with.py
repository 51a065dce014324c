"""What is published with weights (the tokens that begin and end a text, how text is sampled): kept by a run that begins
from them, by a merge, and on the way back.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest

pytest.importorskip("transformers")

import tokenizers
import transformers

from colonnade.checkpoint.manifest import read_manifest
from colonnade.convert.to_huggingface import _ids, _tokenizer_config
from colonnade.data.tokenizer import Tokenizer
from colonnade.huggingface.folder import TOKEN_IDS
from colonnade.train import init_from
from colonnade.train import published as published_module
from colonnade.train.metadata import PublishedMetadata
from colonnade.train.published import ends_of
from tests.commands import forked, here
from tests.runs import Finished
from tests.tiny import TinyCorpus, write_config

STEP = "step_0000000{}"
END = 274
"""The token that ends a document of the tiny corpus."""


def published(finished: Finished, folder: Path, config: Mapping[str, object], generation: object = None) -> Path:
    """The run's weights as others publish them; `config` and `generation` are what their configurations say."""
    assert here("convert", finished.folder, folder).status == 0
    (folder / "generation_config.json").write_text(json.dumps(generation or {}))
    (folder / "tokenizer_config.json").unlink()
    kept = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**kept, **dict.fromkeys(TOKEN_IDS), **config}))
    return folder


IDS = {"bos_token_id": 2, "eos_token_id": 9, "pad_token_id": 4}
SAMPLED: dict[str, object] = {"eos_token_id": [5, 3], "top_k": 7, "temperature": 0.5, "do_sample": True}


def ends_at(path: Path) -> frozenset[int]:
    return ends_of(path, read_manifest(path), Tokenizer.load(path / "tokenizer.json"))


def one_step(corpus: TinyCorpus, folder: Path, source: Path, *more: str) -> Path:
    """The checkpoint of a run that begins from weights."""
    answer = forked("train", write_config(corpus, folder), f"train.init_from={source}", "train.steps=1", *more)
    assert answer.status == 0, answer
    return folder / "run" / "checkpoints" / STEP.format(1)


def said_by(folder: Path) -> list[object]:
    """bos, eos and pad of config.json; those of generation_config.json, which must be the same, are checked."""
    config, generation = (json.loads((folder / f"{name}.json").read_text()) for name in ("config", "generation_config"))
    assert [generation[key] for key in TOKEN_IDS] == [config[key] for key in TOKEN_IDS]
    return [config[key] for key in TOKEN_IDS]


def check_published_again(folder: Path) -> None:
    """What is made of a run says what was published with the weights that the run began from."""
    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert (generation.top_k, generation.temperature, generation.do_sample) == (7, 0.5, True)
    assert generation.do_sample is True
    assert said_by(folder) == [2, [5, 3, END], 4]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 5, 4)


@pytest.mark.parametrize("source", ["theirs", "ours"])
def test_a_run_from_published_weights_keeps_them(
    source: str, finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    """When it goes on, too; its own documents have an end besides. A folder of Hugging Face that is made of it says
    them there.
    """
    theirs = published(finished, tmp_path / "theirs", IDS, SAMPLED)
    assert here("convert", theirs, tmp_path / "ours").status == 0
    assert ends_at(tmp_path / "ours") == {3, 5}
    assert ends_at(one_step(corpus, tmp_path, tmp_path / source)) == {3, 5, END}
    options = ["train", tmp_path / "config.toml", f"train.init_from={tmp_path / source}", "train.steps=2"]
    assert forked(*options).status == 0
    assert ends_at(tmp_path / "run" / "checkpoints" / STEP.format(2)) == {3, 5, END}
    assert here("convert", tmp_path / "run", tmp_path / "back").status == 0
    check_published_again(tmp_path / "back")


def test_a_merge_keeps_them_and_a_run_that_begins_from_it(
    finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    theirs = published(finished, tmp_path / "theirs", IDS, SAMPLED)
    one_step(corpus, tmp_path, theirs, "lora.rank=2")
    assert here("merge", tmp_path / "run", tmp_path / "merged").status == 0
    assert ends_at(tmp_path / "merged") == {3, 5, END}
    again = tmp_path / "again"
    again.mkdir()
    assert ends_at(one_step(corpus, again, tmp_path / "merged")) == {3, 5, END}
    assert here("convert", again / "run", tmp_path / "back").status == 0
    check_published_again(tmp_path / "back")


def test_adapters_of_before_get_them_when_they_go_on(finished: Finished, tmp_path: Path) -> None:
    """Whose checkpoints say nothing of it. What a run has kept stays."""
    theirs = published(finished, tmp_path / "theirs", IDS)
    state: Any = SimpleNamespace(published=None, base=Mock(weights=()), ownership=Mock())
    origin, told = init_from.origin_at(theirs), SimpleNamespace(say=lambda _: None)
    with patch.object(init_from, "shards_of", lambda state, base: []):
        init_from.read_base(origin, state, SimpleNamespace(tokenizer=None, vocab_size=275), told)  # type: ignore[arg-type]
        assert state.published == PublishedMetadata(begin=2, ends=(9,), pad=4)
        state.published = PublishedMetadata(begin=1)
        init_from.read_base(origin, state, SimpleNamespace(tokenizer=None, vocab_size=275), told)  # type: ignore[arg-type]
    assert state.published == PublishedMetadata(begin=1)


def test_where_nothing_was_published_the_end_of_a_document_is_all(
    finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    for number, source in enumerate((finished.folder, published(finished, tmp_path / "theirs", {}))):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert ends_at(one_step(corpus, folder, source)) == frozenset()
        assert here("convert", folder / "run", folder / "back").status == 0
        assert said_by(folder / "back") == [END, END, None]


def _said(config: Mapping[str, object], generation: object, vocab_size: int = 275) -> PublishedMetadata | None:
    return published_module._within(
        published_module._published(config, generation, []),  # type: ignore[arg-type]
        vocab_size,
    )


@pytest.mark.parametrize(
    ("config", "generation", "found"),
    [
        ({"eos_token_id": 6}, {}, {"ends": (6,)}),
        ({"eos_token_id": 6}, {"eos_token_id": None}, {"ends": (6,)}),
        (
            {"eos_token_id": 6, "bos_token_id": 1},
            {"eos_token_id": [9, 3, 9], "bos_token_id": 2},
            {"ends": (9, 3), "begin": 2},
        ),
        ({"eos_token_id": [6, 275], "pad_token_id": 275, "bos_token_id": -1}, {}, {"ends": (6,)}),
        ({"eos_token_id": 10**30, "pad_token_id": "x"}, {"bos_token_id": True}, None),
        ({}, {"temperature": math.nan, "top_k": 10**30, "top_p": "0.5", "auto_map": {"a": "b"}, "x": [[[]]]}, None),
        ({}, {"temperature": 1, "do_sample": False}, {"sampling": {"temperature": 1, "do_sample": False}}),
    ],
)
def test_of_a_strangers_files_what_can_be_meant_is_kept(
    config: dict[str, object], generation: object, found: dict[str, Any] | None
) -> None:
    assert _said(config, generation) == (None if found is None else PublishedMetadata(**found))


def test_a_file_of_any_depth_leaves_checkpoints_that_can_be_read(
    finished: Finished, corpus: TinyCorpus, tmp_path: Path
) -> None:
    theirs = published(finished, tmp_path / "theirs", IDS)
    (theirs / "generation_config.json").write_text('{"eos_token_id": 5, "x": ' + "[" * 300 + "]" * 300 + "}")
    assert ends_at(one_step(corpus, tmp_path, theirs)) == {5, END}


def test_a_published_tokenizer_names_the_end(finished: Finished, corpus: TinyCorpus, tmp_path: Path) -> None:
    theirs = published(finished, tmp_path / "theirs", {})
    name = Tokenizer.load(theirs / "tokenizer.json").names[7]
    (theirs / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": name}}))
    assert ends_at(one_step(corpus, tmp_path, theirs)) == {7, END}


def named(tokenizer: Tokenizer, *, published: PublishedMetadata | None, **ids: int) -> dict[str, Any]:
    """What tokenizer_config.json says of a language model with these control tokens."""
    it: Any = SimpleNamespace(
        config=SimpleNamespace(model=SimpleNamespace(seq_length=8, kind="gpt")),
        family=SimpleNamespace(has_decoder=False),
        metadata=SimpleNamespace(published=published),
    )
    return _tokenizer_config(it, tokenizer, {f"{name}_token_id": ids.get(name) for name in ("bos", "eos", "pad")})


@pytest.mark.parametrize("first", [275, 300], ids=["right behind the tokenizer's", "far behind them"])
def test_tokens_that_only_the_model_has_are_not_named(first: int, corpus: TinyCorpus) -> None:
    """A table of tokens may be longer than the vocabulary, so that it can be cut evenly."""
    tokenizer = Tokenizer.load(corpus.tokenizer)
    assert len(tokenizer.names) == 275
    said = PublishedMetadata(begin=first, ends=(first + 1,), pad=7)
    found = named(tokenizer, published=said, bos=first, eos=first + 1, pad=7)
    assert found["pad_token"] == tokenizer.names[7] and not {"bos_token", "eos_token"} & found.keys()


def of_words(*words: str) -> Tokenizer:
    vocabulary = {word: number for number, word in enumerate(words)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=words[0]))
    return Tokenizer.from_json(made.to_str())


def test_the_padding_that_was_published_goes_before_what_a_tokenizer_has() -> None:
    tokenizer = of_words("<unk>", "<pad>", "a", "b")
    found = named(tokenizer, published=PublishedMetadata(begin=2, ends=(2,), pad=3), bos=2, eos=2, pad=3)
    assert (found["pad_token"], found["bos_token"], found["eos_token"]) == ("b", "a", "a")
    assert found["unk_token"] == "<unk>", "of which nothing was said"
    assert named(tokenizer, published=None)["pad_token"] == "<pad>"


def test_an_encoder_is_padded_as_its_tokenizer_says_and_others_as_was_published() -> None:
    def padding(tokenizer: Tokenizer | None, published: PublishedMetadata | None) -> object:
        it: Any = SimpleNamespace(
            manifest=SimpleNamespace(metadata={}),
            tokenizer=tokenizer,
            config=SimpleNamespace(model=SimpleNamespace(is_causal=tokenizer is None)),
            family=SimpleNamespace(has_decoder=False),
            metadata=SimpleNamespace(published=published),
        )
        return _ids(it)["pad_token_id"]

    with_padding, without = of_words("[UNK]", "a", "[PAD]"), of_words("[UNK]", "a")
    assert padding(with_padding, None) == padding(with_padding, PublishedMetadata(begin=1)) == 2
    assert padding(without, PublishedMetadata(pad=1)) == padding(None, PublishedMetadata(pad=1)) == 1
    assert padding(without, None) is None
