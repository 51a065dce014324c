"""What chat templates may do, and what is told of those that leave something out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from colonnade.data.byte_level import END_OF_DOCUMENT
from colonnade.data.chat_template import BUILT_IN, ChatTemplate, TemplateFault, chosen_template
from colonnade.data.tokenizer import Tokenizer
from tests.examples.chats import TALK, folder_of

CALLS = [{"type": "function", "function": {"name": "city", "arguments": {}}}]
CALLED = {"role": "assistant", "content": "I ask.", "tool_calls": CALLS}
PLAIN = (
    "{{ tools | tojson }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MARKED = "{{ tools | tojson }}{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}"
MARKED += "{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}{{ '\n' }}{% endfor %}"


@pytest.mark.parametrize("talk", [[TALK[0], CALLED, CALLED], [CALLED, TALK[0], CALLED]], ids=["second", "first"])
def test_behind_a_call_that_a_template_reads_others_have_to_be_written_too(talk: list[Any]) -> None:
    """The first one may not be missing, though no text of it is written."""
    first = 1 + talk.index(CALLED)
    template = ChatTemplate(
        "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}"
        f"{{% if loop.index == {first} and not message.tool_calls %}}{{{{ raise_exception('call it') }}}}{{% endif %}}"
        "{% endfor %}"
    )
    assert template.render(talk[:first]).text.endswith("I ask.")
    for ask in (template.render, template.prompt):
        with pytest.raises(TemplateFault, match="does not write the tool_calls of message 3:"):
            ask(talk)


@pytest.mark.parametrize(
    ("filtered", "expected"),
    [("trim", "xx a xx"), ("trim('x')", "  xx a xx "), ("trim(' x')", "a"), ("trim(chars=' ')", "xx a xx")],
)
def test_a_template_may_say_what_is_trimmed(filtered: str, expected: str) -> None:
    template = ChatTemplate("{% for message in messages %}[{{ message.content | " + filtered + " }}]{% endfor %}")
    assert template.prompt([{"role": "user", "content": "  xx a xx "}]) == f"[{expected}]"


@pytest.mark.parametrize(
    ("filtered", "expected"),
    [
        ("tojson", '{"b": "<é>", "a": [1, 2]}'),
        ("tojson(separators=(',', ':'))", '{"b":"<é>","a":[1,2]}'),
        ("tojson(sort_keys=true)", '{"a": [1, 2], "b": "<é>"}'),
        ("tojson(ensure_ascii=true)", '{"b": "<\\u00e9>", "a": [1, 2]}'),
        ("tojson(indent=1)", '{\n "b": "<é>",\n "a": [\n  1,\n  2\n ]\n}'),
    ],
)
def test_a_template_may_say_how_json_is_written(filtered: str, expected: str) -> None:
    template = ChatTemplate("{{ messages[0].arguments | " + filtered + " }}")
    assert template.prompt([{"role": "user", "content": "", "arguments": {"b": "<é>", "a": [1, 2]}}]) == expected


@pytest.mark.parametrize("tools", [None, [], ()])
def test_no_tools_are_no_matter_to_a_template_that_has_no_use_for_them(tools: Any) -> None:
    template = ChatTemplate(BUILT_IN["bare"], {"eos_token": "</s>"})
    assert template.render(TALK[:2], tools=tools) == template.render(TALK[:2])
    with pytest.raises(TemplateFault, match="writes no descriptions of tools"):
        template.render(TALK[:2], tools=[CALLS[0]["function"]])


@pytest.mark.parametrize(
    ("default", "tool_use", "answers"),
    [(PLAIN, MARKED, ("Paris.\n", "Paris.")), (MARKED, PLAIN, ("Paris.", "Paris.\n"))],
    ids=["of those for tools", "of the others"],
)
def test_marks_of_a_template_say_what_is_answered_where_it_is_the_one_that_writes(
    default: str, tool_use: str, answers: tuple[str, str]
) -> None:
    """Of another one, answers are found as what comes behind a prompt."""
    template = ChatTemplate(default, tool_use=tool_use)
    rendered = [template.render(TALK[:2], tools=tools) for tools in (None, [CALLS[0]["function"]])]
    assert [[each.text[slice(*span)] for span in each.answers] for each in rendered] == [[each] for each in answers]


@pytest.mark.parametrize("named", [None, "plain", "bare"])
def test_answers_end_with_the_end_of_document_where_a_folder_names_no_other(tmp_path: Path, named: str | None) -> None:
    folder = folder_of(tmp_path / "t", BUILT_IN["bare"])
    tokenizer, config = Tokenizer.load(folder), folder / "tokenizer_config.json"
    assert chosen_template(named, tokenizer, folder).tokens["eos_token"] == "</s>"
    config.write_text(config.read_text().replace('"eos_token":', '"other":'))
    found = chosen_template(named, tokenizer, folder)
    assert found.tokens["eos_token"] == END_OF_DOCUMENT and found.tokens["bos_token"] == "<s>"
    assert END_OF_DOCUMENT in found.render(TALK[:2]).text
