"""What was published with weights, as a checkpoint keeps it: which tokens end a text."""

import hashlib
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

from colonnade.checkpoint.manifest import Manifest, SavedFile, read_manifest, to_json
from colonnade.checkpoint.names import MANIFEST
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError
from colonnade.train.metadata import PublishedMetadata
from colonnade.train.published import end_behind, end_in, ends_of, object_of, published_at, unsaid_end, with_end_of

NAMED, OWN = 4, 7


def checkpoint(folder: Path, files: dict[str, Any] | None = None, **metadata: Any) -> Manifest:
    """With 10 tokens, and these files of JSON."""
    saved = {}
    for name, content in (files or {}).items():
        text = json.dumps(content).encode()
        (folder / name).write_bytes(text)
        saved[name] = SavedFile(len(text), hashlib.sha256(text).hexdigest())
    manifest = Manifest(3, {"step": 3, "samples": 9, "model": {"vocab_size": 10}, **metadata}, {}, saved)
    (folder / MANIFEST).write_text(to_json(manifest))
    return read_manifest(folder)


def tokenizer(own: int | None = OWN) -> Any:
    """Which has a token that ends documents, and one that is called <end>."""
    return SimpleNamespace(end_of_document=own, id_of={"<end>": NAMED}.get)


NAMES = {"tokenizer_config.json": {"eos_token": "<end>"}}


def test_a_run_ends_texts_as_its_weights_did_and_as_its_documents_do(tmp_path: Path) -> None:
    """Weights that were converted know no documents of a run."""
    run = checkpoint(tmp_path, published={"ends": [5]})
    assert ends_of(tmp_path, run, tokenizer()) == {5, OWN} and ends_of(tmp_path, run, tokenizer(None)) == {5}
    assert ends_of(tmp_path, checkpoint(tmp_path, converted_from={"eos_token_id": 5}), tokenizer()) == {5}


def with_ends(*names: str) -> Tokenizer:
    """With these names of control tokens, from 0 on."""
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.add_special_tokens(list(names))
    return Tokenizer(inner)


@pytest.mark.parametrize("later", ["<｜end▁of▁sentence｜>", "<EOS_TOKEN>", "[EOS]"])
def test_documents_end_as_those_did_that_a_run_was_trained_on(tmp_path: Path, later: str) -> None:
    """Where the checkpoint does not say how, as with the versions that did not write it down, and a note says so. A
    model that was converted has the one that was published with it.
    """
    both = with_ends("</s>", later)
    assert both.end_of_document == 1
    for metadata, end, noted in (
        ({"end_of_document": 0}, 0, False),
        ({"end_of_document": 1}, 1, False),
        ({"end_of_document": 2}, 1, False),
        ({"end_of_document": None}, 0, True),
        ({}, 0, True),
        ({"converted_from": {}}, 1, False),
        ({"converted_from": {"eos_token_id": 0}}, 0, False),
        ({"converted_from": {"eos_token_id": [0, 1]}}, 1, False),
    ):
        manifest = checkpoint(tmp_path, **metadata)
        found = with_end_of(both, tmp_path, manifest)
        note = unsaid_end(found, tmp_path, manifest)
        assert (found.end_of_document, note is not None) == (end, noted), metadata
        assert end_behind(tmp_path, manifest, both) == end
        assert end_behind(tmp_path, manifest, None) == metadata.get("end_of_document")
        assert note is None or f"</s> is taken, as by versions that did not write it down, and not {later}." in note
        assert found.sha256 == both.sha256 and both.end_of_document == 1


@pytest.mark.parametrize(("ends", "end"), [(0, 0), ([0, 1], None), (1, None), (None, None)])
def test_documents_end_as_a_folder_of_hugging_face_says_where_the_vocabulary_leaves_a_choice(
    tmp_path: Path, ends: object, end: int | None
) -> None:
    published: Any = SimpleNamespace(folder=tmp_path, facts={"eos_token_id": ends})
    assert (end_in(published, with_ends("</s>", "[EOS]")), end_in(published, None)) == (end, None)


@pytest.mark.parametrize(
    ("names", "end"), [(("[EOS]",), 0), (("[EOS]", "</s>", "<eos>"), 2), (("</s>",), 0), ((), None)]
)
def test_a_vocabulary_that_leaves_no_choice_needs_no_note(
    tmp_path: Path, names: tuple[str, ...], end: int | None
) -> None:
    found = with_end_of(with_ends(*names), tmp_path, checkpoint(tmp_path))
    assert found.end_of_document == end and unsaid_end(found, tmp_path, checkpoint(tmp_path)) is None


def test_the_name_of_an_end_counts_where_nothing_else_tells_one(tmp_path: Path) -> None:
    plain = checkpoint(tmp_path, NAMES)
    assert ends_of(tmp_path, plain, tokenizer()) == frozenset(), "documents have an end of their own"
    assert ends_of(tmp_path, plain, tokenizer(None)) == {NAMED}
    assert ends_of(tmp_path, checkpoint(tmp_path), tokenizer(None)) == frozenset()
    sampled = checkpoint(tmp_path, NAMES, published={"begin": 1, "sampling": {"top_k": 5}})
    assert ends_of(tmp_path, sampled, tokenizer()) == frozenset() and ends_of(tmp_path, sampled, tokenizer(None)) == {
        NAMED
    }
    assert ends_of(tmp_path, checkpoint(tmp_path, NAMES, converted_from={"eos_token_id": 5}), tokenizer()) == {5}
    assert ends_of(tmp_path, checkpoint(tmp_path, NAMES, converted_from={}), tokenizer()) == {NAMED}
    assert published_at(tmp_path, checkpoint(tmp_path, NAMES, converted_from={}), None, 10) is None


def test_the_first_token_is_one_and_the_one_behind_the_last_is_none(tmp_path: Path) -> None:
    ids = {"bos_token_id": 0, "eos_token_id": [0, 9, 10], "pad_token_id": 10}
    found = published_at(tmp_path, checkpoint(tmp_path, converted_from=ids), tokenizer(), 10)
    assert found == PublishedMetadata(begin=0, ends=(0, 9))
    kept = checkpoint(tmp_path, published={"begin": 9, "ends": [9, 10], "pad": 10})
    assert published_at(tmp_path, kept, tokenizer(), 10) == PublishedMetadata(begin=9, ends=(9,))


def test_each_token_is_what_the_generation_says_or_else_the_configuration(tmp_path: Path) -> None:
    """Each of several once, and only what can be a token."""
    generation = {"eos_token_id": [3, 5, 3, -1], "pad_token_id": -1}
    config = {"bos_token_id": [2, 1, 3], "eos_token_id": 6, "pad_token_id": 8}
    manifest = checkpoint(tmp_path, {"generation_config.json": generation, **NAMES}, converted_from=config)
    found = published_at(tmp_path, manifest, tokenizer(), 10)
    assert found == PublishedMetadata(begin=2, ends=(3, 5), pad=8)


def test_how_text_is_sampled_is_kept_in_full(tmp_path: Path) -> None:
    """Beams and lengths too; what is no number is not."""
    said = {"num_beams": 4, "repetition_penalty": 1.25, "max_new_tokens": 20, "do_sample": False, "top_k": None}
    said |= {"top_p": math.nan, "temperature": math.inf, "max_length": 10**400}
    manifest = checkpoint(tmp_path, {"generation_config.json": {**said, "cache": 1}}, converted_from={})
    found = published_at(tmp_path, manifest, tokenizer(), 10)
    kept = ("num_beams", "repetition_penalty", "max_new_tokens", "do_sample")
    assert found is not None and found.sampling == {key: said[key] for key in kept}


def test_a_file_of_it_that_is_damaged_is_told_and_one_of_another_kind_is_empty(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path, {"list.json": [1], "object.json": {"a": 1}})
    assert object_of(tmp_path, manifest, "list.json") == object_of(tmp_path, manifest, "nowhere.json") == {}
    assert object_of(tmp_path, manifest, "object.json") == {"a": 1}
    (tmp_path / "object.json").write_text('{"a": 2}')
    with pytest.raises(CheckpointError, match=r"object\.json is damaged: its bytes are not those that were written"):
        object_of(tmp_path, manifest, "object.json")


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "\xff"])
def test_a_file_of_it_that_is_no_json_is_damaged_however_deep_it_is(content: str, tmp_path: Path) -> None:
    """Though its bytes are those that were written."""
    text = content.encode("latin-1")
    (tmp_path / "deep.json").write_bytes(text)
    saved = {"deep.json": SavedFile(len(text), hashlib.sha256(text).hexdigest())}
    with pytest.raises(CheckpointError, match=r"deep\.json is damaged: it is no JSON"):
        object_of(tmp_path, Manifest(3, {}, {}, saved), "deep.json")
