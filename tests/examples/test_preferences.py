"""Pairs of answers: where their prompt ends, what is none, and what becomes of the others of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from colonnade.data.chat_template import ChatTemplate
from colonnade.data.indexed import TokenFile
from colonnade.data.sidecar import read_sidecar
from colonnade.errors import DataError
from colonnade.examples.chat import PreferencesFormat, Read
from colonnade.examples.conversations import NoConversation, preference_of
from colonnade.examples.format import Document
from colonnade.examples.make import make_examples
from colonnade.examples.rows import Row
from tests.examples.chats import CHATML, SYSTEM, TALK, jsonl, tokenizer

ASKED, PARIS = TALK[:2]
LYON = {"role": "assistant", "content": "Lyon."}
ROME = {"role": "assistant", "content": "Rome."}
CALL = {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "city"}}]}


@pytest.mark.parametrize(
    ("prompt", "shared"), [(False, [ASKED]), (False, SYSTEM[:-1]), (True, [ASKED]), (True, SYSTEM[:-1])]
)
def test_without_a_prompt_it_is_what_both_begin_with(prompt: bool, shared: list[dict[str, str]]) -> None:
    """However many messages: with and without a prompt of its own it is the same pair."""
    before = [] if prompt else shared
    record: dict[str, Any] = {"chosen": [*before, PARIS], "rejected": [*before, LYON]}
    found = preference_of({**record, "prompt": shared} if prompt else record)
    assert (found.prompt, found.chosen, found.rejected, found.tools) == (shared, "Paris.", "Lyon.", None)


@pytest.mark.parametrize("before", [[ASKED], SYSTEM[:-1]], ids=["a turn", "turns"])
def test_a_prompt_may_stand_in_both_lists_too(before: list[dict[str, Any]]) -> None:
    """As a text, the user's, or as messages; what both lists begin with is all that comes before the answers."""
    record: dict[str, Any] = {"chosen": [*before, PARIS], "rejected": [*before, LYON]}
    prompts = [before[-1]["content"], ASKED["content"], before, before[:2], before[-1:]]
    prompts += [[{**ASKED, "tool_calls": None}], []]
    assert [preference_of({**record, "prompt": prompt}) for prompt in prompts] == [preference_of(record)] * 7
    for other in (PARIS["content"], "another?", [*before, ASKED, LYON], [{"role": "system", "content": "a"}, *before]):
        with pytest.raises(NoConversation, match=r"prompt is not what chosen and rejected both begin or .* Remove one"):
            preference_of({**record, "prompt": other})


@pytest.mark.parametrize(
    ("prompt", "shared"),
    [
        ([ASKED], [LYON, ASKED]),
        ([ASKED], [TALK[2], LYON, ASKED, ROME, TALK[2]]),
        ([TALK[2], ASKED], SYSTEM[1:-1]),
        ([ASKED, CALL], [ASKED, {**CALL, "tool_calls": []}, TALK[2]]),
    ],
    ids=["goes before an answer", "is in the middle", "is in another order", "calls a tool"],
)
def test_a_prompt_that_is_said_elsewhere_in_both_lists_is_not_dropped(prompt: Any, shared: Any) -> None:
    record = {"prompt": prompt, "chosen": [*shared, PARIS], "rejected": [*shared, LYON]}
    with pytest.raises(NoConversation, match="prompt is not what chosen and rejected both begin or end with before"):
        preference_of(record)


def test_a_prompt_that_is_empty_is_none_beside_whole_conversations() -> None:
    record: dict[str, Any] = {"chosen": [ASKED, PARIS], "rejected": [ASKED, LYON]}
    assert preference_of({**record, "prompt": ""}) == preference_of(record)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "a", "rejected": "b"}, "no chosen; its keys are prompt, rejected"),
        ({"prompt": "a", "chosen": "b"}, "no rejected; its keys are prompt, chosen"),
        ({"prompt": "a"}, "no chosen and no rejected; its keys are prompt"),
        ({"chosen": "b", "rejected": "c"}, "no prompt: chosen and rejected share no message"),
        ({"prompt": [], "chosen": "b", "rejected": "c"}, "no prompt: chosen and rejected share no message"),
        ({"chosen": [ASKED, PARIS], "rejected": [ASKED, PARIS]}, "chosen and rejected are the same"),
        ({"chosen": [ASKED, PARIS], "rejected": [ASKED, LYON, ASKED, ROME]}, "rejected is not one message of the ass"),
        ({"chosen": [ASKED, PARIS], "rejected": [ASKED, PARIS, ASKED, ROME]}, "rejected is not one message of the as"),
        ({"chosen": [ASKED, PARIS, ASKED, ROME], "rejected": [ASKED, LYON]}, "chosen is not one message of the assis"),
        ({"prompt": "a", "chosen": [ASKED], "rejected": "c"}, "chosen is not one message of the assistant"),
        ({"prompt": "a", "chosen": "b", "rejected": [{**PARIS, "content": None}]}, "message 1 (assistant) has no text"),
        ({"prompt": "a", "chosen": "b", "rejected": " \n"}, "rejected is empty"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "chosen is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": [CALL]}, "rejected calls tools"),
        ({"prompt": [{"role": "boss", "content": "a"}], "chosen": "b", "rejected": "c"}, "prompt: message 1 has the r"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "history": [["d", "e", "f"]]}, "history is no list of pairs"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "history": [["d"]]}, "history is no list of pairs"),
    ],
)
def test_what_is_no_preference_is_told(record: dict[str, Any], said: str) -> None:
    with pytest.raises(NoConversation) as told:
        preference_of(record)
    assert str(told.value).startswith(said)


def test_a_pair_that_cannot_be_written_down_costs_no_other(tmp_path: Path) -> None:
    """And each other keeps its own answers, wherever it stands."""
    pairs = [{"prompt": f"of {n}?", "chosen": f"the {n} one", "rejected": f"a dog {n}"} for n in range(4)]
    pairs[1]["rejected"] = "<|im_end|>"
    chat = ChatTemplate(CHATML)
    made = make_examples(PreferencesFormat(chat), [jsonl(tmp_path / "a.jsonl", *pairs)], tmp_path / "out", tokenizer())
    assert (made.examples, made.rejected, made.first[0].line) == (3, 1, 2)
    tokens = TokenFile(tmp_path / "out")
    for document, number in enumerate((0, 2, 3)):
        texts = [tokenizer().decode(ids.tolist(), skip_special=False) for ids in tokens.sequences(document)]
        prompt = f"<|im_start|>user\nof {number}?<|im_end|>\n<|im_start|>assistant\n"
        assert texts == [prompt, f"the {number} one<|im_end|>", prompt, f"a dog {number}<|im_end|>"]
    sidecar = read_sidecar(tokens)
    assert sidecar is not None and sidecar.end_of_document is None, "a turn ends as the template says"


def test_tools_of_a_preference_are_written_into_both_prompts(tmp_path: Path) -> None:
    chat = ChatTemplate("{%- if tools %}{{- tools | tojson }}{%- endif %}" + CHATML)
    pair = {"prompt": "a city?", "chosen": "Paris.", "rejected": "a dog."}
    file = jsonl(tmp_path / "a.jsonl", pair, {**pair, "tools": [{"name": "map"}]})
    make_examples(PreferencesFormat(chat), [file], tmp_path / "out", tokenizer())
    texts = [
        [tokenizer().decode(ids.tolist()) for ids in TokenFile(tmp_path / "out").sequences(document)]
        for document in range(2)
    ]
    assert ['"map"' in text for pair in texts for text in pair] == [False] * 4 + [True, False, True, False]


def test_an_answer_before_which_a_template_writes_nothing_has_an_empty_prompt() -> None:
    marked = "{% generation %}{{ m.content }}{% endgeneration %}"
    chat = ChatTemplate("{% for m in messages if m.role == 'assistant' %}" + marked + "{% endfor %}")
    pair = {"prompt": "a city?", "chosen": "Paris.", "rejected": "Lyon."}
    read = Read(Row(Path("a.jsonl"), 1, pair), preference_of(pair))
    (document,) = PreferencesFormat(chat).encode([read], tokenizer())
    assert isinstance(document, Document)
    paris, lyon = (tokenizer().encode(pair[side]) for side in ("chosen", "rejected"))
    assert [list(ids) for ids in document.sequences] == [[], paris, [], lyon]


@pytest.mark.parametrize("name", ["a.tsv", "a.txt"])
def test_preferences_are_read_of_json_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=rf"{name}: examples of preferences are read from \.jsonl and \.json"):
        make_examples(PreferencesFormat(ChatTemplate(CHATML)), [tmp_path / name], tmp_path / "out", tokenizer())
