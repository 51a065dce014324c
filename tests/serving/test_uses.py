"""What a trained model can be used for, by its kind, and what else its checkpoint must have for it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.checkpoint.manifest import Manifest
from colonnade.errors import CheckpointError, ConfigError, LayoutError
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, paper_mesh
from colonnade.model.bert import BERT
from colonnade.model.gpt import GPT
from colonnade.model.t5 import T5
from colonnade.serving import trained
from colonnade.serving.trained import Trained, open_another, tokenizer_of
from tests.runs import Finished

NAMES = {"</s>": 1, "<pad>": 3, "<extra_id_0>": 9}
KINDS: dict[str, Any] = {"gpt": GPT, "bert": BERT, "t5": T5}


def model_of(kind: str, *, end_of_document: int | None = 2, **more: Any) -> Trained:
    """A model without weights, whose tokenizer has a token a letter."""
    tokenizer = SimpleNamespace(
        end_of_document=end_of_document, id_of=NAMES.get, encode=lambda text: [ord(letter) for letter in text]
    )
    given: dict[str, Any] = {
        "model": KINDS[kind].__new__(KINDS[kind]),
        "mesh": Mesh(),
        "hidden": None,
        "tokenizer": tokenizer,
        "config": SimpleNamespace(model=SimpleNamespace(kind=kind)),
        "step": 1,
        "precision": "fp32",
    }
    return Trained(**given, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_reads_from_left_to_right_alone_gives_tokens_chances(kind: str) -> None:
    found = model_of(kind)
    if kind == "gpt":
        assert found.left_to_right is found.model
        return
    with pytest.raises(ConfigError, match=f'a model of kind "{kind}" gives the tokens of a text no chances'):
        assert found.left_to_right


def test_a_model_that_writes_is_told_what_comes_first() -> None:
    """Before what a decoder writes."""
    assert [model_of(kind).stages.start for kind in ("gpt", "t5")] == [0, 3]
    with pytest.raises(ConfigError, match='a model of kind "bert" does not go on with a text'):
        assert model_of("bert").stages


def test_a_text_ends_with_what_the_checkpoint_says_or_else_as_documents_do() -> None:
    assert [model_of(kind).stop for kind in ("gpt", "t5")] == [{2}, {1}]
    assert model_of("gpt", end_of_document=None).stop == frozenset(), "nothing ends it but its length"
    assert [model_of(kind, ends=frozenset((5, 6))).stop for kind in ("gpt", "t5")] == [{5, 6}] * 2


def test_a_prompt_is_read_as_the_model_was_trained_to() -> None:
    """An encoder's text has its gaps, and an end; what goes on has none."""
    assert model_of("gpt").prompt("ab") == [97, 98] and model_of("gpt").prompt("") == [2]
    assert model_of("t5").prompt("a<extra_id_0>b") == [97, 9, 98, 1] and model_of("t5").prompt("") == [1]


def test_who_answers_was_told_how_conversations_are_written_down() -> None:
    template: Any = "template"
    chat = model_of("gpt", template=template).chat
    assert chat.template == template
    for found in (model_of("gpt"), model_of("t5", template=template), model_of("bert", template=template)):
        with pytest.raises(ConfigError, match="with a chat template, as runs on conversations have"):
            assert found.chat


def test_a_tokenizer_is_asked_for_where_there_is_none(finished: Finished, tmp_path: Path) -> None:
    """One that was put beside the checkpoint's files is taken, if it is text."""
    contents = Manifest(1, {}, {}, {})
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json, because the run had no data\.tokenizer"):
        tokenizer_of(tmp_path, contents)
    (tmp_path / "tokenizer.json").write_bytes((finished.newest / "tokenizer.json").read_bytes())
    assert tokenizer_of(tmp_path, contents).vocab_size > 0
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged: it is not text \(invalid start byte\)"):
        tokenizer_of(tmp_path, contents)


def test_a_further_model_is_cut_as_the_first(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before it is read where it cannot be."""
    monkeypatch.setattr(trained, "open_trained", lambda *_: pytest.fail("it is read"))
    for layout, said in ((Layout(tp=3), "--tp 3"), (Layout(pp=9), "--pp 9")):
        with pytest.raises(LayoutError, match=f"{said} .*{finished.newest.name}"):
            open_another(finished.folder, paper_mesh(layout, 0), model_of("gpt"))
