"""What records of chat and instructions look like, whoever wrote them down.

messages        [{"role": "user", "content": …}, {"role": "assistant", "content": …}, …]
conversations   [{"from": "human", "value": …}, {"from": "gpt", "value": …}, …]           ShareGPT
prompt, completion                                                                       one turn; or lists of messages
instruction, input, output                                                               Alpaca
prompt, chosen, rejected            preferences: texts, or lists of messages; what both lists begin with is the
                                    prompt, and may stand under prompt, too: all, or the first or last of it

Beside any of them: "system", a text that comes first, "history", earlier turns [[question, answer], …], and "tools".
A message of the assistant may have "weight": 0 if it is not to be learned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from colonnade.data.chat_template import is_trained
from colonnade.data.conversation import messages_problem

Messages = list[dict[str, Any]]
_SHAREGPT: Mapping[str, str] = MappingProxyType(
    {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
)


class NoConversation(Exception):
    """A record is none; the reason is its text."""


@dataclass(frozen=True)
class Conversation:
    """Messages, and the descriptions of tools that the assistant may call."""

    messages: Messages
    tools: Any = None


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt."""

    prompt: Messages
    chosen: str
    rejected: str
    tools: Any = None


def conversation_of(record: Mapping[str, Any]) -> Conversation:
    """The conversation of a record. NoConversation where there is none, or nothing in it is answered."""
    record = _read(record)
    messages = _messages(record)
    _check(messages)
    messages = _with_earlier(record, messages)
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise NoConversation("no message of the assistant: nothing is answered")
    unknown = [weight for weight in (message.get("weight") for message in answers) if not _is_weight(weight)]
    if unknown:
        raise NoConversation(
            f"a message of the assistant has the weight {unknown[0]!r}: there are 1, and 0 for what is not learned"
        )
    learned = [message for message in answers if is_trained(message)]
    if not learned:
        raise NoConversation("all messages of the assistant have weight 0: nothing is learned")
    if not any((message.get("content") or "").strip() or message.get("tool_calls") for message in learned):
        raise NoConversation("its answers are empty")
    return Conversation(messages, _tools(record))


def question_of(record: Mapping[str, Any]) -> Conversation:
    """The conversation of a record of messages, which ends before an answer. NoConversation where there is none."""
    record = _read(record)
    messages = record.get("messages")
    _check(messages)
    assert isinstance(messages, list), "checked"
    if messages[-1]["role"] == "assistant":
        raise NoConversation("its last message is the assistant's: there is nothing to answer")
    return Conversation(_with_earlier(record, messages), _tools(record))


def preference_of(record: Mapping[str, Any]) -> Preference:
    """The preference of a record. NoConversation where there is none."""
    record = _read(record)
    missing = [key for key in ("chosen", "rejected") if key not in record]
    if missing:
        raise NoConversation(f"no {' and no '.join(missing)}; its keys are {', '.join(record)}")
    chosen, rejected = (_answer_list(record[key], key) for key in ("chosen", "rejected"))
    shared = _num_shared(chosen, rejected)
    before, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if "prompt" in record and (record["prompt"] != "" or not before):
        before = _prompt_beside(before, _prompt(record["prompt"]))
    texts = [_one_answer(messages, key) for messages, key in ((chosen, "chosen"), (rejected, "rejected"))]
    if texts[0].strip() == texts[1].strip():
        raise NoConversation("chosen and rejected are the same: nothing is preferred")
    if not before:
        raise NoConversation("no prompt: chosen and rejected share no message")
    return Preference(_with_earlier(record, before), texts[0], texts[1], _tools(record))


def _read(record: Mapping[str, Any]) -> dict[str, Any]:
    """Without keys that are null. NoConversation where they cannot be looked for."""
    try:
        return _with_values(record)  # type: ignore[no-any-return]
    except RecursionError:
        raise NoConversation("it is nested too deeply") from None


def _with_values(value: Any) -> Any:
    """Without keys that are null: a row of a table has all its columns, and all fields of their structs. A message's
    content stays, which templates ask for.
    """
    if isinstance(value, list):
        return [_with_values(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    kept = "content" if "role" in value else None
    return {key: _with_values(each) for key, each in value.items() if each is not None or key == kept}


def _num_shared(chosen: Messages, rejected: Messages) -> int:
    """Messages that both begin with, before the last one of either."""
    least = min(len(chosen), len(rejected)) - 1
    return next((n for n in range(least) if chosen[n] != rejected[n]), least)


def _prompt_beside(shared: Messages, prompt: Messages) -> Messages:
    """What comes before two answers: a prompt, or all that both lists begin with, where the prompt is what that begins
    with, behind the system's message, or ends with. NoConversation where it is not.
    """
    problem = messages_problem(prompt) if prompt else None
    if problem is not None:
        raise NoConversation(f"prompt: {problem}")
    if not shared:
        return prompt
    said, asked = (
        [(each["role"], each.get("content"), each.get("tool_calls") or None) for each in messages]
        for messages in (shared, prompt)
    )
    begin = int(said[0][0] == "system" and asked[:1] != said[:1])
    begins_so = asked == said[begin : begin + len(asked)]
    if not begins_so and (asked != said[-len(asked) :] or said[0][0] == "assistant"):
        raise NoConversation(
            "prompt is not what chosen and rejected both begin or end with before their answers: which of the two "
            "comes before these is not said. Remove one"
        )
    return shared


def _messages(record: Mapping[str, Any]) -> Messages:
    if "messages" in record:
        return record["messages"]  # type: ignore[no-any-return]
    if "conversations" in record:
        return _from_sharegpt(record["conversations"])
    if "prompt" in record and "completion" in record:
        return [*_prompt(record["prompt"]), *_answer_list(record["completion"], "completion")]
    if "instruction" in record and "output" in record:
        more = record.get("input") or ""
        asked = _text(record["instruction"], "instruction") + (f"\n\n{_text(more, 'input')}" if more else "")
        return [_said("user", asked), _said("assistant", _text(record["output"], "output"))]
    raise NoConversation(
        "none of messages, conversations, prompt with completion, and instruction with output; its keys are "
        f"{', '.join(record) or 'none'}"
    )


def _with_earlier(record: Mapping[str, Any], messages: Messages) -> Messages:
    """With what a record says beside its messages comes before them. NoConversation where that is not clear."""
    system, history = record.get("system") or "", record.get("history") or []
    if not isinstance(history, list) or any(not isinstance(turn, list) or len(turn) != 2 for turn in history):
        raise NoConversation("history is no list of pairs of question and answer")
    known = messages[0]["role"] == "system" and messages[0].get("content") == system  # said twice
    found = [_said("system", system)] if _text(system, "system").strip() and not (known and not history) else []
    for turn in history:
        found += [_said(role, _text(text, "history")) for role, text in zip(("user", "assistant"), turn, strict=True)]
    if found and messages[0]["role"] == "system":
        raise NoConversation(
            "it has system or history beside messages that begin with one of the system: which comes first is not said"
        )
    return [*found, *messages]


def _tools(record: Mapping[str, Any]) -> Any:
    """A list of objects, or the same as a text of JSON; None where there are none."""
    tools = record.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) or None
        except (ValueError, RecursionError):
            raise NoConversation("tools is a text that is no JSON") from None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise NoConversation("tools is no list of objects")
    return tools


def _from_sharegpt(turns: Any) -> Messages:
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        raise NoConversation("conversations is no list of objects with from and value")
    unknown = [turn.get("from") for turn in turns if turn.get("from") not in list(_SHAREGPT)]  # it may have no hash
    if unknown:
        raise NoConversation(f"a turn is from {unknown[0]!r}: there are {', '.join(_SHAREGPT)}")
    return [
        _said(_SHAREGPT[turn["from"]], turn.get("value")) | ({"weight": turn["weight"]} if "weight" in turn else {})
        for turn in turns
    ]


def _prompt(prompt: Any) -> Messages:
    if isinstance(prompt, list):
        return prompt
    return [_said("user", _text(prompt, "prompt"))]


def _answer_list(given: Any, key: str) -> Messages:
    if isinstance(given, list):
        _check(given)
        return given
    return [_said("assistant", _text(given, key))]


def _one_answer(messages: Messages, key: str) -> str:
    if len(messages) != 1 or messages[0]["role"] != "assistant" or not isinstance(messages[0].get("content"), str):
        raise NoConversation(f"{key} is not one message of the assistant behind what both begin with")
    if messages[0].get("tool_calls"):
        raise NoConversation(f"{key} calls tools, and the answers that are compared are texts")
    text: str = messages[0]["content"]
    if not text.strip():
        raise NoConversation(f"{key} is empty")
    return text


def _check(messages: Any) -> None:
    problem = messages_problem(messages)
    if problem is not None:
        raise NoConversation(problem)


def _is_weight(value: Any) -> bool:
    return value is None or (value in (0, 1) and not isinstance(value, bool))


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise NoConversation(f"{key} is {type(value).__name__}, where text belongs")
    return value


def _said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}
