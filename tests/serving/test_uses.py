"""What a trained model can be used for, by its kind, and what else its checkpoint must have for it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colonnade.checkpoint.manifest import SavedFile
from colonnade.data.chat_template import ChatTemplate
from colonnade.data.conversation import Chat
from colonnade.errors import CheckpointError, ConfigError, DataError, LayoutError
from colonnade.examples.conversations import Conversation
from colonnade.generation.sampling import Sampling
from colonnade.generation.stream import TextDelta
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, paper_mesh
from colonnade.model.bert import BERT
from colonnade.model.gpt import GPT
from colonnade.model.t5 import T5
from colonnade.serving import trained
from colonnade.serving.trained import Trained, open_another, tokenizer_of
from tests.examples.chats import tokenizer
from tests.runs import Finished

NAMES = {"</s>": 1, "<pad>": 3, "<extra_id_0>": 9}
KINDS: dict[str, Any] = {"gpt": GPT, "bert": BERT, "t5": T5}


def model_of(kind: str, *, end_of_document: int | None = 2, **more: Any) -> Trained:
    """A model without weights, whose tokenizer has a token a letter."""
    tokenizer = SimpleNamespace(
        end_of_document=end_of_document,
        id_of=NAMES.get,
        encode=lambda text, *, control=False: [NAMES[text]] if control else [ord(letter) for letter in text],
        spelled=lambda text: [name for name in NAMES if name in text],
    )
    given: dict[str, Any] = {
        "path": Path("step_00000001"),
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
    assert [model_of("t5", start=said).stages.start for said in (0, 7)] == [0, 7], "what the checkpoint says"
    with pytest.raises(ConfigError, match='a model of kind "bert" does not go on with a text'):
        assert model_of("bert").stages


def test_a_text_ends_with_what_the_checkpoint_says_or_else_as_documents_do() -> None:
    assert [model_of(kind).stop for kind in ("gpt", "t5")] == [{2}, {1}]
    assert model_of("gpt", end_of_document=None).stop == frozenset(), "nothing ends it but its length"
    assert [model_of(kind, ends=frozenset((5, 6))).stop for kind in ("gpt", "t5")] == [{5, 6}] * 2


def test_any_text_of_a_run_that_knows_conversations_ends_where_an_answer_does_too() -> None:
    """Of weights that were converted it ends as was published with them."""

    def stop(kind: str, **more: Any) -> frozenset[int]:
        found = model_of(kind, template="template", **more)
        vars(found)["chat"] = SimpleNamespace(end_of_turn=8)
        return found.stop

    assert stop("gpt") == {2, 8} and stop("gpt", end_of_document=None) == {8}
    assert stop("gpt", ends=frozenset((5, 6))) == {5, 6, 8}
    assert stop("gpt", ends=frozenset((5, 6)), is_converted=True) == {5, 6} and stop("gpt", is_converted=True) == {2}
    assert stop("t5") == {1}, "it answers no questions of conversations"


def test_a_prompt_is_read_as_the_model_was_trained_to() -> None:
    """An encoder's text has its gaps, and an end; what goes on has none."""
    assert model_of("gpt").prompt("ab") == [97, 98] and model_of("gpt").prompt("") == [2]
    assert model_of("t5").prompt("a<extra_id_0>b") == [97, 9, 98, 1] and model_of("t5").prompt("") == [1]


def test_a_prompt_that_spells_control_tokens_is_read_as_text_and_told_unless_it_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names of sentinels are these in whatever a T5 reads."""
    assert model_of("gpt").prompt("</s>", control=True) == [1] and model_of("t5").prompt("</s>", control=True) == [1, 1]
    asked = dict[str, Any]()
    monkeypatch.setattr(trained, "generate", lambda stages, ids, **how: asked.update(how, ids=ids))
    monkeypatch.setattr(trained, "stream_text", lambda *made, **how: ())
    monkeypatch.setattr(Trained, "stages", None)
    told = dict[tuple[str, bool], str]()
    for kind in ("gpt", "t5"):
        for control in (False, True):
            prompts = ["</s>"] if control else ["<extra_id_0>", "a", "</s><pad>"]
            trained.print_continuations(
                *(model_of(kind), Mesh(), prompts),
                max_new_tokens=5, sampling=Sampling(), as_json=True, control_tokens=control,
            )  # fmt: skip
            told[kind, control] = capsys.readouterr().err
    as_text = "read as text like any other: --control-tokens reads names of control tokens as these.\n"
    assert told == {
        ("gpt", False): f"prompt 1 (and 1 more) spells <extra_id_0>, {as_text}",
        ("t5", False): f"prompt 3 spells </s>, <pad>, {as_text}",
        ("gpt", True): "",
        ("t5", True): "",
    }


def test_who_answers_was_told_how_conversations_are_written_down() -> None:
    template: Any = "template"
    chat = model_of("gpt", template=template).chat
    assert chat.template == template
    for found in (model_of("gpt"), model_of("t5", template=template), model_of("bert", template=template)):
        with pytest.raises(ConfigError, match="with a chat template, as runs on conversations have"):
            assert found.chat


def test_a_conversation_that_cannot_be_written_down_is_told_by_its_number() -> None:
    """Where its template has no use for tools, or is none."""
    model, asked = model_of("gpt"), [{"role": "user", "content": "a"}]
    without, using = Conversation(asked), Conversation(asked, [{"name": "weather"}])
    no_jinja = r"1 .* is no Jinja: Expected an expression, got 'end of statement block' \(line 2\)"
    for text, chats, said in (
        ("{{ messages[0].content }}", [without, using], "2 .*: the chat template writes no"),
        ("\n{% if %}", [without], no_jinja),
        ("\n{% if %}", [using], no_jinja),
        ("{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", [using], "1 .* is nested too deeply"),
    ):
        vars(model)["chat"] = Chat(ChatTemplate(text), tokenizer())
        with pytest.raises(DataError, match=f"conversation {said}"):
            trained.print_continuations(
                model, Mesh(), [], max_new_tokens=5, sampling=Sampling(), as_json=False, chats=chats
            )


@pytest.mark.parametrize(
    ("kind", "turn", "shown", "read", "stop", "control_tokens"),
    [
        ("gpt", None, "a b\n\na b\n", [97], {2}, False),  # a text goes on
        ("t5", None, "a\n b\n\na\n b\n", [97, 1], {1}, True),  # its gaps have names
        ("gpt", 8, "a\n b\n\na\n b\n", [7], {2, 8}, False),  # a conversation
    ],
)
def test_a_text_goes_on_in_its_line_and_an_answer_stands_below_its_question(
    kind: str,
    turn: int | None,
    shown: str,
    read: list[int],
    stop: set[int],
    control_tokens: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two prompts, of which each is told " b"."""
    model, asked = model_of(kind), dict[str, Any]()
    model.config.model.seq_length = 16
    vars(model)["chat"] = SimpleNamespace(prompt=lambda messages, tools: [7], end_of_turn=turn)

    def deltas(made: object, tokenizer: object, **how: Any) -> list[TextDelta]:
        asked.update(how)
        return [TextDelta(0, " b", "stop"), TextDelta(1, " b", "length")]

    monkeypatch.setattr(trained, "generate", lambda stages, ids, **how: asked.update(how, ids=ids))
    monkeypatch.setattr(trained, "stream_text", deltas)
    chats = None if turn is None else [Conversation([{"role": "user", "content": "a"}])] * 2
    trained.print_continuations(
        model, Mesh(), ["a", "a"], max_new_tokens=5, sampling=Sampling(seed=3), as_json=False, chats=chats
    )
    assert capsys.readouterr().out == shown
    assert (asked["ids"], asked["stop"], asked["skip_special"]) == ([read] * 2, stop, not control_tokens)
    assert asked["prompts"] == ([read] * 2 if kind == "gpt" and turn is None else None), "answers begin anew"
    assert (asked["max_new_tokens"], asked["seed"]) == (5, 3)


def test_a_tokenizer_is_asked_for_where_there_is_none(finished: Finished, tmp_path: Path) -> None:
    """One that was put beside the checkpoint's files is taken, if it is text."""
    contents = replace(trained.described(finished.newest)[0], files={})
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json, because the run had no data\.tokenizer"):
        tokenizer_of(tmp_path, contents)
    for name in ("tokenizer.json", "manifest.json"):
        (tmp_path / name).write_bytes((finished.newest / name).read_bytes())
    assert tokenizer_of(tmp_path, contents).vocab_size > 0
    of_another = {"tokenizer.json": SavedFile((tmp_path / "tokenizer.json").stat().st_size, 64 * "0")}
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged: its bytes are not those that were written"):
        tokenizer_of(tmp_path, replace(contents, files=of_another))
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged: it is not text \(invalid start byte\)"):
        tokenizer_of(tmp_path, contents)


@pytest.mark.parametrize("is_converted", [True, False])
def test_what_a_checkpoint_says_of_its_model_is_known(
    is_converted: bool, finished: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, config, metadata = trained.described(finished.newest)
    origin: dict[str, Any] = {"converted_from": {}} if is_converted else {}
    manifest = replace(manifest, metadata={**manifest.metadata, **origin})
    metadata = metadata.model_copy(update={"labels": ("no", "yes"), "step": 3})
    monkeypatch.setattr(trained, "described", lambda path, *_, **__: trained.Described(manifest, config, metadata))
    template = ChatTemplate("{{ messages[1].content }}")
    monkeypatch.setattr(trained, "template_of", lambda path, manifest: template)
    monkeypatch.setattr(trained, "ends_of", lambda path, manifest, tokenizer: frozenset((5, 6)))
    found = trained.open_trained(finished.newest, Mesh(), torch.device("cpu"))
    assert (found.is_converted, found.labels, found.template) == (is_converted, ("no", "yes"), template)
    assert (found.ends, found.step, found.base, found.config) == ({5, 6}, 3, None, config)
    assert not found.model.training and not any(weight.requires_grad for weight in found.model.parameters())


def test_a_further_model_is_cut_as_the_first(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before it is read where it cannot be."""
    monkeypatch.setattr(trained, "open_trained", lambda *_: pytest.fail("it is read"))
    for layout, said in ((Layout(tp=3), "--tp 3"), (Layout(pp=9), "--pp 9")):
        with pytest.raises(LayoutError, match=f"{said} .*{finished.newest.name}"):
            open_another(finished.folder, paper_mesh(layout, 0), model_of("gpt"))
