"""Conversations to token files: ids and answers as transformers finds them, and what is refused."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers

from colonnade.data.chat_template import BUILT_IN, ChatTemplate, TemplateFault, chosen_template, template_beside
from colonnade.data.conversation import Chat, Marked, messages_problem
from colonnade.data.indexed import TokenFile
from colonnade.data.sidecar import read_sidecar
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError
from colonnade.examples.chat import ChatFormat, PreferencesFormat
from colonnade.examples.conversations import Conversation, NoConversation, conversation_of, preference_of, question_of
from colonnade.examples.make import make_examples
from tests.commands import here
from tests.examples.chats import CHATML, MARKED, SYSTEM, TALK, UNMARKED, folder_of, jsonl, tokenizer


def encoded(chat: Chat, messages: list[dict[str, Any]]) -> Marked:
    (found,) = chat.encode([(messages, None)])
    assert isinstance(found, Marked), found
    return found


def chat_of(folder: Path, named: str | None = None) -> Chat:
    made = Tokenizer.load(folder)
    return Chat(chosen_template(named, made, folder), made)


def theirs(folder: Path) -> transformers.PreTrainedTokenizerFast:
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("name", MARKED)
def test_ids_and_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / name, MARKED[name])
    published, chat = theirs(folder), chat_of(folder)
    for talk in (TALK, SYSTEM, TALK[:2]):
        expected = published.apply_chat_template(
            talk, return_assistant_tokens_mask=True, return_dict=True, add_generation_prompt=False
        )
        found = encoded(chat, talk)
        assert found.ids == expected["input_ids"] and sum(found.answered) > 3
        assert [int(each) for each in found.answered] == expected["assistant_masks"]


@pytest.mark.parametrize("name", UNMARKED)
def test_ids_are_those_of_transformers_where_answers_are_not_marked(name: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / name, UNMARKED[name])
    published, chat = theirs(folder), chat_of(folder)
    for talk in (TALK, TALK[:2]):
        found = encoded(chat, talk)
        assert found.ids == published.apply_chat_template(talk, return_dict=True)["input_ids"]
        answers = found.turns()[1::2]
        assert len(answers) == len(talk) // 2 and all("Paris" not in published.decode(turn) for turn in answers[1:])
        assert published.decode(answers[0]).strip().removeprefix("<|assistant|>\n").startswith("Paris.")
        assert answers[0][-1] in chat.tokenizer.special_ids, "the answer ends with its control token"
    prompt = published.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert chat.prompt(TALK[:1]) == prompt


@pytest.mark.parametrize("text", [*MARKED.values(), *UNMARKED.values()])
def test_an_answer_of_weight_0_is_given_and_not_learned(text: str, tmp_path: Path) -> None:
    chat = chat_of(folder_of(tmp_path / "t", text))
    whole = encoded(chat, TALK)
    first, second = whole.turns()[1], whole.turns()[3]
    for weights, learned in (((0, 1), [second]), ((1, 0), [first]), ((1, None), [first, second])):
        talk = [{**each, "weight": weights[number // 2]} for number, each in enumerate(TALK)]
        found = encoded(chat, conversation_of({"messages": talk}).messages)
        assert found.ids == whole.ids and found.turns()[1::2] == learned
    turns = [{"from": each["role"], "value": each["content"], "weight": 0} for each in TALK[:2]]
    turns += [{"from": each["role"], "value": each["content"]} for each in TALK[2:]]
    assert encoded(chat, conversation_of({"conversations": turns}).messages).turns()[1::2] == [second]


def test_a_template_that_marks_no_answer_a_message_takes_no_weight_of_0() -> None:
    mark = "{% generation %}{{ m.content }}{% endgeneration %}"
    template = ChatTemplate("{% for m in messages %}" + mark + "{% endfor %}")
    assert len(template.render(TALK).answers) == 4
    with pytest.raises(TemplateFault, match="marks 4 answers of 2 messages of the assistant: which one that is"):
        template.render([*TALK[:3], {**TALK[3], "weight": 0}])
    last = ChatTemplate("{% for m in messages %}{% if loop.last %}" + mark + "{% endif %}{% endfor %}")
    with pytest.raises(TemplateFault, match="marks 1 answers of 2 messages of the assistant: which one that is"):
        last.render([*TALK[:3], {**TALK[3], "weight": 0}])


@pytest.mark.parametrize(
    "text",
    [
        "{% for m in messages %}{{ m | tojson }}{% endfor %}",
        "{% for m in messages %}{{ {'z': m.content, 'a': '<b>'} | tojson(indent=2) }}{% endfor %}",
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n  {{ m.content }}\n    {% endif %}\n{% endfor %}",
        "{{ strftime_now('%Y') }}{{ messages[0].content }}",
    ],
)
def test_what_templates_may_use_is_what_transformers_gives_them(text: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", text)
    found = chat_of(folder).template.prompt(TALK)
    assert found == theirs(folder).apply_chat_template(TALK, add_generation_prompt=True, tokenize=False)


def test_of_several_templates_by_name_the_default_is_meant() -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain text"}]
    assert ChatTemplate.from_json({"chat_template": named[1:]}) == ChatTemplate("plain text")
    assert ChatTemplate.from_json({"chat_template": named[:1]}) is None


@pytest.mark.parametrize("tools", [None, [], [{"type": "function", "function": {"name": "city"}}]])
def test_of_several_templates_by_name_that_for_tools_writes_what_has_some(tools: Any, tmp_path: Path) -> None:
    """As transformers chooses, and again where it is read from what was written down of it."""
    named = [{"name": "default", "template": UNMARKED["qwen"]}]
    named += [{"name": "tool_use", "template": "{{- tools | tojson }}" + CHATML}]
    folder = folder_of(tmp_path / "t", named)
    template = chat_of(folder).template
    assert ChatTemplate.from_json(json.loads(json.dumps(template.to_json()))) == template
    found = template.render(TALK[:2], tools=tools)
    assert found.text == theirs(folder).apply_chat_template(TALK[:2], tools=tools or None, tokenize=False)
    assert [found.text[first:stop] for first, stop in found.answers] == ["Paris.<|im_end|>"]
    asked = {"tools": tools or None, "tokenize": False, "add_generation_prompt": True}
    assert template.prompt(TALK[:1], tools=tools) == theirs(folder).apply_chat_template(TALK[:1], **asked)


def test_a_template_for_tools_that_is_none_is_refused(tmp_path: Path) -> None:
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "{% for m in"}]
    with pytest.raises(DataError, match="the chat template is no Jinja"):
        chat_of(folder_of(tmp_path / "t", named))


def test_a_template_in_a_file_of_its_own_goes_before_the_one_in_the_configuration(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", "of the configuration")
    (folder / "chat_template.jinja").write_text("of the file")
    found = template_beside(folder)
    assert found is not None and (found.text, found.tokens["bos_token"]) == ("of the file", "<s>")


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "city"}}]])
def test_templates_by_name_in_files_of_their_own_are_those_of_transformers(tools: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", [{"name": "tool_use", "template": "of the configuration"}])
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson }}" + CHATML)
    assert template_beside(folder) is None, "there is no default"
    (folder / "additional_chat_templates" / "rag.jinja").write_text("for documents")
    assert template_beside(folder) is None
    (folder / "chat_template.jinja").write_text(CHATML)
    found = chat_of(folder).template.render(TALK, tools=tools)
    assert found.text == theirs(folder).apply_chat_template(TALK, tools=tools, tokenize=False)


def test_bare_text_is_written_as_it_stands_and_answers_without_white_space_around_them() -> None:
    found = ChatTemplate(BUILT_IN["bare"], {"eos_token": "</s>"}).render([{"role": "user", "content": " a "}, TALK[3]])
    assert found.text == " a It is a city 🙂</s>"


def test_the_token_that_ends_a_turn_is_found_where_a_prompt_is_written_in_another_way(tmp_path: Path) -> None:
    turn = "{% for m in messages %}{{ m.role }}: {% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    asked = (
        "{% endfor %}{% if add_generation_prompt %}It is the assistant's turn to write now, in a few words:{% endif %}"
    )
    chat = chat_of(folder_of(tmp_path / "t", turn + asked))
    assert chat.end_of_turn == chat.tokenizer.id_of("<|im_end|>")


def test_marking_an_answer_changes_nothing_but_the_mask(tmp_path: Path) -> None:
    one, other = (chat_of(folder_of(tmp_path / str(i), text)) for i, text in enumerate((CHATML, UNMARKED["qwen"])))
    assert encoded(one, SYSTEM) == encoded(other, SYSTEM)


def test_a_control_token_without_a_name_ends_no_answer() -> None:
    """White space behind an answer is a part of it, unless a control token stands before."""
    for end, answer in (("\n", "Paris.\n"), ("<end>\n", "Paris.<end>")):
        turns = "{% for m in messages %}{{ m.role + ': ' + m.content + '" + end + "' }}{% endfor %}"
        text = turns + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
        template = ChatTemplate.from_json({"chat_template": text, "bos_token": "", "eos_token": "<end>"})
        assert template is not None
        found = template.render(TALK[:2])
        assert [found.text[first:stop] for first, stop in found.answers] == [answer]


@pytest.mark.parametrize(
    "text",
    [
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{{ raise_exception('messages begin with one of the system') }}",
    ],
    ids=["writes no control token", "refuses the conversation"],
)
def test_a_turn_ends_with_the_end_of_the_document_where_a_template_tells_no_other(text: str, tmp_path: Path) -> None:
    chat = chat_of(folder_of(tmp_path / "t", text))
    assert chat.end_of_turn == chat.tokenizer.end_of_document is not None


def test_the_document_alternates_between_given_and_answered(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", CHATML)
    chat, file = chat_of(folder), jsonl(tmp_path / "a.jsonl", {"messages": SYSTEM}, {"messages": TALK[1:]})
    made = make_examples(ChatFormat(chat.template), [file], tmp_path / "out", chat.tokenizer)
    tokens = TokenFile(tmp_path / "out")
    assert made.examples == tokens.num_documents == 2 and made.unlabelled == 0
    assert "note:" not in made.summary(), "a decoder reads no [CLS]"
    marked = encoded(chat, SYSTEM)
    assert tokens.document(0).tolist() == marked.ids
    assert tokens.answered(0, len(marked.ids)).tolist() == marked.answered
    assert tokens.answered(0, tokens.num_tokens).tolist() == marked.answered + encoded(chat, TALK[1:]).answered
    for start in range(tokens.num_tokens):
        assert (
            tokens.answered(start, start + 1).tolist()
            == tokens.answered(0, tokens.num_tokens)[start : start + 1].tolist()
        )
    sidecar = read_sidecar(tokens)
    assert sidecar is not None and sidecar.examples is not None and sidecar.examples.head == "answers"
    assert ChatTemplate.from_json(sidecar.examples.options["chat"]) == chat.template
    said = [message["content"] for message in [*SYSTEM, *TALK[1:]]]
    assert sidecar.text_bytes == sum(len(text.encode()) for text in said) > sum(map(len, said))


def test_a_conversation_that_begins_with_an_answer_has_an_empty_first_sequence(tmp_path: Path) -> None:
    assert Marked([5, 6, 7], [True, False, True]).turns() == [[], [5], [6], [7]]
    bare = ChatTemplate("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}")
    file = jsonl(tmp_path / "a.jsonl", *[{"messages": TALK[1:2]}] * 3)
    make_examples(ChatFormat(bare), [file], tmp_path / "out", tokenizer())
    tokens = TokenFile(tmp_path / "out")
    assert tokens.num_sequences == 6 and tokens.answered(0, tokens.num_tokens).all()


CALL = "{% if message.tool_calls and KEPT %}{{ message.tool_calls | tojson }}{% endif %}"
EACH = "{% for message in messages %}{% generation %}{{ message.content }}CALL{% endgeneration %}{% endfor %}"


@pytest.mark.parametrize(
    ("kept", "texts", "left_out"),
    [
        ("true", 2, None),
        ("message.tool_calls[0].type == 'function'", 6, None),
        ("loop.last", 3, "message 2:"),
        ("false", 3, "message 2:"),
    ],
)
def test_the_calls_of_each_message_have_to_be_written(
    kept: str, texts: int, left_out: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One text more tells of all that are; those that seem not to be, as where marks change the way, are looked at."""
    template, made = ChatTemplate(EACH.replace("CALL", CALL.replace("KEPT", kept)), {}), list[int]()
    generate = ChatTemplate._generate

    def counted(*given: Any) -> Any:
        made.append(1)
        return generate(*given)

    monkeypatch.setattr(ChatTemplate, "_generate", counted)
    calls = [{"type": "function", "function": {"name": "city", "arguments": {"of": "France"}}}]
    turns = [TALK[0], *({"role": "assistant", "content": "I ask.", "tool_calls": calls} for _ in range(4))]
    with nullcontext() if left_out is None else pytest.raises(TemplateFault, match=left_out):
        assert template.render(turns).text.count('"of": "France"') == 4
    assert len(made) == texts


def test_calls_that_are_left_out_are_told_whatever_else_a_template_does_with_them() -> None:
    calls = [{"type": "function", "function": {"name": "city", "arguments": {}}}]
    called = {"role": "assistant", "content": "I ask.", "tool_calls": calls}
    refusing = (
        "{% if message.tool_calls and message.tool_calls[0].function.name != 'city' %}"
        "{{ raise_exception('there is no such tool') }}{% endif %}"
    )
    with pytest.raises(TemplateFault, match="does not write the tool_calls of message 2"):
        ChatTemplate(EACH.replace("CALL", refusing)).render([TALK[0], called])
    eleventh = ChatTemplate(EACH.replace("CALL", CALL.replace("KEPT", "loop.index == 11")))
    talk = [TALK[0], called, *[TALK[0]] * 8, called]
    with pytest.raises(TemplateFault, match="does not write the tool_calls of message 2"):
        eleventh.render(talk)


def test_answers_are_found_behind_what_is_written_of_tools() -> None:
    tools = [{"type": "function", "function": {"name": "city"}}]
    template = ChatTemplate("{%- if tools %}{{- tools | tojson }}{%- endif %}" + UNMARKED["qwen"])
    found = template.render(TALK[:2], tools=tools)
    assert [found.text[first:stop] for first, stop in found.answers] == ["Paris.<|im_end|>"]


def test_tools_and_calls_of_them_are_written_down_as_transformers_does(tmp_path: Path) -> None:
    """A message that calls a tool may have no text, and be the only answer."""
    text = CHATML.replace("message.content", "(message.content or message.tool_calls | tojson)")
    folder = folder_of(tmp_path / "t", "{%- if tools %}{{- tools | tojson + '\n' }}{%- endif %}" + text)
    tools = [{"type": "function", "function": {"name": "city", "description": "Tells which city it is."}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "city", "arguments": {}}}]}
    talk = [TALK[0], call, {"role": "tool", "content": "Paris"}, TALK[1]]
    talks = [(talk, tools), (talk, None), (talk[:2], None)]
    records = [{"messages": messages, "tools": known} for messages, known in talks]
    chat, file = chat_of(folder), jsonl(tmp_path / "a.jsonl", *records)
    make_examples(ChatFormat(chat.template), [file], tmp_path / "out", chat.tokenizer)
    tokens, published = TokenFile(tmp_path / "out"), theirs(folder)
    for number, (messages, known) in enumerate(talks):
        expected = published.apply_chat_template(messages, tools=known, return_dict=True)["input_ids"]
        assert tokens.document(number).tolist() == expected
    asked = published.apply_chat_template(talk[:3], tools=tools, add_generation_prompt=True, return_dict=True)
    assert chat.prompt(talk[:3], tools) == asked["input_ids"]


@pytest.mark.parametrize("named", ["plain", "chatml", "bare"])
def test_built_in_templates_leave_out_conversations_whose_calls_they_cannot_write(named: str, tmp_path: Path) -> None:
    calls = [{"function": {"name": "city", "arguments": {}}}]
    talks = [[TALK[0], {"role": "assistant", "content": text, "tool_calls": calls}] for text in (None, "", "I ask.")]
    folder = folder_of(tmp_path / "t", None)
    chat, file = chat_of(folder, named), jsonl(tmp_path / "a.jsonl", *({"messages": each} for each in [*talks, TALK]))
    made = make_examples(ChatFormat(chat.template), [file], tmp_path / "out", chat.tokenizer)
    assert (made.examples, made.rejected, [each.line for each in made.first]) == (1, 3, [1, 2, 3])
    reasons = [each.reason for each in made.first]
    assert "None" in reasons[0] and all("does not write the tool_calls of message 2" in each for each in reasons[1:])
    for talk in talks:
        with pytest.raises(TemplateFault, match="the chat template"):
            chat.prompt(talk)


@pytest.mark.parametrize("content", ["message.content", "message.content | trim"])
def test_no_template_writes_none_for_a_message_without_text(content: str, tmp_path: Path) -> None:
    text = CHATML.replace("message.content", f"{content} }}}}{{{{ message.tool_calls | default([]) | tojson")
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "city", "arguments": {}}}]}
    (found,) = chat_of(folder_of(tmp_path / "t", text)).encode([([TALK[0], call], None)])
    assert isinstance(found, TemplateFault) and 'it would write "None" where there is no text' in str(found)


def test_a_conversation_may_have_an_answer_without_text_beside_others(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    chat = chat_of(folder_of(tmp_path / "t", template))
    silent = {"role": "assistant", "content": ""}
    found = encoded(chat, [TALK[0], silent, TALK[2], TALK[1]])
    answer = [token for token, answered in zip(found.ids, found.answered, strict=True) if answered]
    assert answer == chat.tokenizer.encode(TALK[1]["content"])
    (refused,) = chat.encode([([TALK[0], silent], None)])
    assert isinstance(refused, TemplateFault) and "writes nothing where the assistant answers" in str(refused)


RECORDS = {
    "prompt": {"prompt": "a city?", "completion": "Paris."},
    "alpaca": {"instruction": "a city?", "input": "", "output": "Paris."},
    "sharegpt": {"conversations": [{"from": "human", "value": "a city?"}, {"from": "gpt", "value": "Paris."}]},
    "lists": {
        "prompt": [{"role": "user", "content": "a city?"}],
        "completion": [{"role": "assistant", "content": "Paris."}],
    },
}


@pytest.mark.parametrize("named", ["plain", "chatml", "bare"])
def test_records_of_every_kind_become_the_same_conversation(named: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", None)
    chat, file = chat_of(folder, named), jsonl(tmp_path / "a.jsonl", *RECORDS.values())
    make_examples(ChatFormat(chat.template), [file], tmp_path / "out", chat.tokenizer)
    tokens = TokenFile(tmp_path / "out")
    documents = [tokens.document(number).tolist() for number in range(4)]
    assert tokens.num_documents == 4 and all(each == documents[0] for each in documents)
    text, answered = chat.tokenizer.decode(documents[0], skip_special=False), tokens.answered(0, len(documents[0]))
    expected = {
        "plain": "<|user|>\na city?\n<|assistant|>\nParis.</s>\n",
        "chatml": "<|im_start|>user\na city?<|im_end|>\n<|im_start|>assistant\nParis.<|im_end|>\n",
        "bare": "a city?Paris.</s>",
    }[named]
    end = "<|im_end|>" if named == "chatml" else "</s>"
    answer = [token for token, flag in zip(documents[0], answered, strict=True) if flag]
    assert (text, chat.tokenizer.decode(answer, skip_special=False)) == (expected, f"Paris.{end}")
    assert chat.end_of_turn == chat.tokenizer.id_of(end)


BAD = {
    '{"messages": [': "no JSON",
    '["a"]': "list in the place of an object",
    json.dumps({"messages": []}): "no list of messages",
    json.dumps({"messages": [{"role": "user", "content": "a"}]}): "no message of the assistant: nothing is answered",
    json.dumps({"messages": [TALK[0], "Paris."]}): "message 2 is str, where an object with role and content belongs",
    json.dumps({"messages": [{"role": "boss", "content": "a"}]}): "message 1 has the role 'boss': there are system, ",
    json.dumps({"messages": [{"role": "user", "content": 3}]}): "message 1 (user) has no text in content",
    json.dumps({"messages": [{"role": "user", "content": None}, TALK[1]]}): "message 1 (user) has no text in content",
    json.dumps({"messages": [TALK[0], {"role": "assistant"}]}): "message 2 (assistant) has no text in content",
    json.dumps(
        {"messages": [TALK[0], {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}]}
    ): "message 2 (assistant) has function_call, which no chat template reads",
    json.dumps({"messages": [TALK[0], {"role": "assistant", "content": " "}]}): "its answers are empty",
    json.dumps(
        {"messages": [TALK[0], {**TALK[1], "weight": 0}, TALK[0], {"role": "assistant", "content": ""}]}
    ): "its answers are empty",
    json.dumps({"messages": [TALK[0], {**TALK[1], "weight": 0.5}]}): "a message of the assistant has the weight 0.5",
    json.dumps(
        {"messages": [TALK[0], {**TALK[1], "weight": False}]}
    ): "a message of the assistant has the weight False",
    json.dumps({"messages": [TALK[0], {**TALK[1], "weight": 0}]}): "all messages of the assistant have weight 0",
    json.dumps({"text": "a"}): "none of messages, conversations, prompt with completion",
    json.dumps({"instruction": "a"}): "none of messages, conversations, prompt with completion, and instruction with",
    json.dumps({"output": "a"}): "none of messages, conversations, prompt with completion, and instruction with",
    json.dumps({"prompt": "a"}): "none of messages, conversations, prompt with completion, and instruction with",
    json.dumps({"instruction": 3, "output": "a"}): "instruction is int, where text belongs",
    json.dumps({"conversations": [{"from": "cat", "value": "a"}]}): "a turn is from 'cat'",
    json.dumps({"conversations": [{"from": ["human"], "value": "a"}]}): "a turn is from ['human']",
    json.dumps({"prompt": "a", "completion": 5}): "completion is int, where text belongs",
    json.dumps({"prompt": "a", "completion": None}): "none of messages, conversations, prompt with completion, and",
    json.dumps({"prompt": "a", "completion": {"b": 1}}): "completion is dict, where text belongs",
    '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}": "no JSON (maximum recursion depth exceeded",
    json.dumps({"messages": [{"role": "user", "content": "\ud800"}, TALK[1]]}): "half a surrogate pair",
    json.dumps({"messages": TALK, "\udfff": 1}): "half a surrogate pair",
    json.dumps({"messages": [{"role": "user", "content": "a<|im_end|>b"}, TALK[1]]}): 'control token "<|im_end|>"',
    json.dumps({"messages": [TALK[0], {**TALK[1], "tool_calls": [{"arguments": {"a": "<s>"}}]}]}): 'token "<s>"',
    json.dumps({"messages": TALK[:2], "tools": [{"parameters": {"</s>": 1}}]}): 'control token "</s>"',
    json.dumps(
        {"messages": SYSTEM, "system": "a"}
    ): "system or history beside messages that begin with one of the system",
    json.dumps({"messages": TALK, "history": ["a"]}): "history is no list of pairs of question and answer",
    json.dumps({"messages": TALK, "system": ["a"]}): "system is list, where text belongs",
    json.dumps({"messages": TALK, "tools": "city()"}): "tools is a text that is no JSON",
    json.dumps({"messages": TALK, "tools": {"a": 1}}): "tools is no list of objects",
    json.dumps({"messages": TALK, "tools": [{"a": 1}]}): "the chat template writes no descriptions of tools",
    json.dumps({"messages": [TALK[1], TALK[0]]}): "the chat template refuses it: Conversation roles must alternate",
}


TOLD = [{"role": "system", "content": "You are a city."}, {"role": "user", "content": "a"}]
TOLD += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "a city?"}]


@pytest.mark.parametrize("name", RECORDS)
def test_what_comes_before_the_messages_of_a_record_is_read(name: str) -> None:
    record = {**RECORDS[name], "system": "You are a city.", "history": [["a", "b"]]}
    assert conversation_of(record).messages == [*TOLD, {"role": "assistant", "content": "Paris."}]
    twice = {"messages": [TOLD[0], *TALK[:2]], "system": TOLD[0]["content"]}
    assert conversation_of(twice).messages == twice["messages"]
    empty = {**RECORDS[name], "system": "", "history": [], "tools": "[]"}
    assert conversation_of(empty) == conversation_of(RECORDS[name])


@pytest.mark.parametrize("name", RECORDS)
def test_a_key_that_is_null_is_absent(name: str) -> None:
    """As in rows of tables that were put together of several."""
    keys = ("messages", "conversations", "prompt", "completion", "instruction", "input", "output", "history", "tools")
    assert conversation_of({**dict.fromkeys(keys), **RECORDS[name]}) == conversation_of(RECORDS[name])
    pair = {"chosen": TALK[:2], "rejected": [TALK[0], TALK[3]]}
    assert preference_of({"prompt": None, "system": None, **pair}) == preference_of(pair)
    with pytest.raises(NoConversation, match=r"no rejected; its keys are prompt, chosen$"):
        preference_of({"prompt": "a", "chosen": "b", "rejected": None})


def test_a_field_that_is_null_is_absent_as_in_structs_of_a_table() -> None:
    """All have the fields of all others. The content of a message that only calls tools is none, and a text of JSON
    says what it says.
    """
    call = {"function": {"name": "city", "arguments": {"of": "France"}}}
    tools = [{"name": "city", "parameters": {"of": {"type": "string", "enum": ["a", None]}}}]
    said = [TALK[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    filled = [
        {**TALK[0], "tool_calls": None},
        {**said[1], "tool_calls": [{"function": {"name": "city", "arguments": {"of": "France", "unit": None}}}]},
    ]
    more = [{**tools[0], "strict": None, "parameters": {**tools[0]["parameters"], "unit": None}}]
    for given, found in ((more, tools), (json.dumps(more), more)):
        assert conversation_of({"messages": filled, "tools": given}) == Conversation(said, found)
    asked = {"messages": [filled[0]], "tools": more}
    assert question_of(asked) == Conversation([TALK[0]], tools)
    pair = preference_of({"prompt": filled[:1], "chosen": "a", "rejected": "b", "tools": more})
    assert (pair.prompt, pair.tools) == ([TALK[0]], tools)
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(NoConversation, match="it is nested too deeply"):
        conversation_of({"messages": TALK, "tools": deep})


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_messages_are_of_these_roles(role: str) -> None:
    assert messages_problem([{"role": role, "content": "a"}]) is None
    assert messages_problem([{"role": role.upper(), "content": "a"}]) is not None


def test_what_comes_before_a_preference_is_read() -> None:
    record = {
        "prompt": "a city?",
        "chosen": "Paris.",
        "rejected": "a",
        "system": "You are a city.",
        "tools": '[{"a": 1}]',
    }
    found = preference_of({**record, "history": [["a", "b"]]})
    assert (found.prompt, found.tools) == (TOLD, [{"a": 1}])


def test_rows_that_are_none_are_left_out_and_listed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "t", UNMARKED["mistral"])
    file = jsonl(tmp_path / "a.jsonl", *BAD, {"messages": TALK})
    answer = here("data", "examples", "chat", file, "--output", tmp_path / "out", "--tokenizer", folder)
    assert answer.status == 0 and "1 example of chat" in answer.out and f"left out: {len(BAD)} rows" in answer.out
    rows = [json.loads(line) for line in (tmp_path / "out.rejected.jsonl").read_text().splitlines()]
    by_line = {row["line"]: row["reason"] for row in rows}
    for number, reason in enumerate(BAD.values(), 1):
        assert reason in by_line[number], (number, by_line[number])


def test_preferences_are_between_texts(tmp_path: Path) -> None:
    pair = {"prompt": "a city?", "chosen": "Paris.", "rejected": "a dog."}
    called = {"role": "assistant", "content": "Paris.", "tool_calls": [{"function": {"name": "city"}}]}
    bad = {
        "chosen calls tools, and the answers that are compared are texts": {**pair, "chosen": [called]},
        "half a surrogate pair": {**pair, "rejected": "\ud800"},
    }
    folder = folder_of(tmp_path / "t", CHATML)
    chat, file = chat_of(folder), jsonl(tmp_path / "a.jsonl", *bad.values(), pair)
    made = make_examples(PreferencesFormat(chat.template), [file], tmp_path / "out", chat.tokenizer)
    assert made.examples == 1 and [each.reason for each in made.first] == list(bad)
    tokens, sidecar = TokenFile(tmp_path / "out"), read_sidecar(TokenFile(tmp_path / "out"))
    assert sidecar is not None and sidecar.text_bytes == len("a city?Paris.") + len("a city?a dog.")
    assert sidecar.examples is not None
    by_field = zip(sidecar.examples.fields, tokens.sequences(0), strict=True)
    said = [(field, chat.tokenizer.decode(ids.tolist())) for field, ids in by_field]
    assert [field for field, text in said if "Paris." in text] == ["chosen"]
    assert [field for field, text in said if "a dog." in text] == ["rejected"]


def test_answers_that_differ_in_white_space_alone_are_no_preference() -> None:
    with pytest.raises(NoConversation, match="chosen and rejected are the same: nothing is preferred"):
        preference_of({"prompt": "a city?", "chosen": "Paris.", "rejected": "Paris.\n"})


def test_an_input_stands_behind_its_instruction_and_a_blank_line() -> None:
    """As in the records that Stanford's Alpaca was trained on."""
    found = conversation_of({"instruction": "Name it.", "input": "a city", "output": "Paris."})
    assert [each["content"] for each in found.messages] == ["Name it.\n\na city", "Paris."]


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if loop.last %}now {% endif %}{{ m.role }}: {{ m.content }} {% endfor %}"
    folder, file = folder_of(tmp_path / "t", template), jsonl(tmp_path / "a.jsonl", {"messages": TALK})
    answer = here("data", "examples", "chat", file, "--output", tmp_path / "out", "--tokenizer", folder)
    assert answer.status == 2 and "a.jsonl, line 1" in answer.err and "{% generation %}" in answer.err
    assert not (tmp_path / "out.idx").exists()


def test_a_template_that_ends_the_last_turn_in_another_way_is_refused() -> None:
    """Each turn goes on behind its prompt, but the conversation does not go on behind the turn."""
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    end = "{% if loop.last and not add_generation_prompt %}!{% endif %} {% endfor %}"
    template = ChatTemplate(turns + end + "{% if add_generation_prompt %}assistant: {% endif %}")
    assert template.render(TALK[:2]).text.endswith("assistant: Paris.! ")
    with pytest.raises(TemplateFault, match="writes earlier turns in another way where turn 2 is the last"):
        template.render(TALK)


def test_a_template_whose_prompt_is_more_than_stands_before_an_answer_is_refused() -> None:
    """As one that opens a thought: the beginnings of answers would not be trained on."""
    turns = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    template = ChatTemplate(turns + "{% if add_generation_prompt %}assistant: <think>{% endif %}")
    with pytest.raises(TemplateFault, match="writes earlier turns in another way where turn 2 is the last"):
        template.render(TALK)


SAID = "{% generation %}{{ m.content }}{% endgeneration %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% macro said(m) %}" + SAID + "{% endmacro %}{% for m in messages %}{{ said(m) }}{% endfor %}",
        "{% for m in messages %}{% set text %}Answer: " + SAID + "{% endset %}{{ text }}{% endfor %}",
        "{% for m in messages %}{% filter trim %}" + SAID + "{% endfilter %}{% endfor %}",
        "{% macro as() %}{{ caller() }}{% endmacro %}{% for m in messages %}{% call as() %}"
        + SAID
        + "{% endcall %}{% endfor %}",
        "{% for m in messages recursive %}" + SAID + "{% endfor %}",
    ],
)
def test_marks_whose_text_is_put_together_apart_are_refused(template: str, tmp_path: Path) -> None:
    folder, file = folder_of(tmp_path / "t", "\n" + template), jsonl(tmp_path / "a.jsonl", {"messages": TALK})
    answer = here("data", "examples", "chat", file, "--output", tmp_path / "out", "--tokenizer", folder)
    assert answer.status == 2 and "the chat template has {% generation %} in line 2, inside of a macro" in answer.err


def test_the_first_of_several_marks_that_are_put_together_apart_is_told() -> None:
    macro = "\n{% macro NAME(m) %}" + SAID + "{% endmacro %}"
    template = ChatTemplate(macro.replace("NAME", "one") + macro.replace("NAME", "other"))
    with pytest.raises(DataError, match="in line 2, inside of a macro"):
        template.check()


def test_a_macro_and_a_block_of_set_are_no_matter_where_their_text_is_marked_as_it_is_written() -> None:
    macro = (
        "{% macro said(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}{% set text %}{{ said(m) }}{% endset %}"
    )
    template = ChatTemplate(
        macro
        + "{{ m.role }}{% if m.role == 'assistant' %}{% generation %}{{ text }}{% endgeneration %}{% endif %}"
        + "{% endfor %}"
    )
    template.check()
    found = template.render(TALK)
    assert [found.text[first:stop] for first, stop in found.answers] == [TALK[1]["content"], TALK[3]["content"]]


@pytest.mark.parametrize(
    ("template", "options", "message"),
    [
        (None, (), "has no chat template"),
        ("{% for m in", (), "the chat template is no Jinja"),
        (None, ("--template", "other"), "there is no such template and no such file"),
        ("{{ messages.append(1) }}", (), "the chat template refuses it"),
        ("{{ ''.__class__.__mro__ }}", (), "the chat template refuses it"),
        ("{{ 1 // 0 }}", (), "the chat template fails on it"),
        ('{{ "{}".format() }}', (), "the chat template fails on it"),
        ('{{ "a".encode("xx") }}', (), "the chat template fails on it: unknown encoding"),
        ("{{ cycler() }}", (), "the chat template fails on it"),
        ('{{ "a" * 10 ** 17 }}', (), "the chat template fails on it: MemoryError"),
        ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, (), "the chat template is nested too deeply"),
        ("{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", (), "the chat template is nested too deeply"),
        ("nothing", (), "the chat template writes nothing where the assistant answers"),
    ],
)
def test_templates_that_cannot_be_used(
    template: str | None, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    folder, file = folder_of(tmp_path / "t", template), jsonl(tmp_path / "a.jsonl", {"messages": TALK})
    answer = here("data", "examples", "chat", file, "--output", tmp_path / "out", "--tokenizer", folder, *options)
    assert answer.status == 2 and message in answer.err and "Traceback" not in answer.err


def test_templates_need_their_control_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    tokenizer(control=False).save(folder / "tokenizer.json")
    file = jsonl(tmp_path / "a.jsonl", {"messages": TALK})
    answer = here(
        "data", "examples", "chat", file, "--output", tmp_path / "o", "--tokenizer", folder, "--template", "chatml"
    )
    assert answer.status == 2 and "<|im_start|> and <|im_end|>" in answer.err
    made = tokenizer(control=False)
    made._inner.add_tokens(["<|im_start|>", "<|im_end|>"])  # which text becomes, too
    with pytest.raises(DataError, match="has not got as control tokens"):
        chosen_template("chatml", made, folder)
    words = Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")))
    for named in ("plain", "bare"):
        with pytest.raises(DataError, match=f"the template {named} ends an answer with the end-of-document token"):
            chosen_template(named, words, folder)
    answer = here(
        "data", "examples", "mnli", file, "--output", tmp_path / "o", "--tokenizer", folder, "--template", "a"
    )
    assert answer.status == 2 and "is for conversations (chat, preferences)" in answer.err
