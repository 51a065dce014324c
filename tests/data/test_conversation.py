"""Where an answer ends, in chat templates as published models have them."""

from __future__ import annotations

import pytest

from colonnade.data.chat_template import BUILT_IN, ChatTemplate
from colonnade.data.conversation import Chat
from colonnade.data.tokenizer import Tokenizer, train_bpe
from tests.examples.chats import CHATML, CONTROL, LLAMA3, TEXT, UNMARKED

BEGIN_R1, END_R1 = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
MORE = ("<think>", "</think>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>")
ASKS, ANSWERS = {"role": "user", "content": "where?"}, {"role": "assistant", "content": "a city"}
ASKED = "{% for m in messages %}{% if m.role == 'user' %}"
AND_PROMPT = "{% endif %}{% endfor %}{% if add_generation_prompt %}"
TEMPLATES = {
    "Llama 3": (LLAMA3, "<|eot_id|>"),
    "ChatML": (CHATML, "<|im_end|>"),
    "Zephyr": (UNMARKED["zephyr"], "</s>"),
    "Mistral": (UNMARKED["mistral"], "</s>"),
    "Qwen 3, whose last turn alone has an empty thought": (
        ASKED + "{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{% else %}{{ '<|im_start|>assistant\n' }}"
        "{% if loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}"
        + AND_PROMPT + "{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_end|>",
    ),
    "Qwen 3, thinking": (
        ASKED + "{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{% else %}"
        "{{ '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}"
        + AND_PROMPT + "{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
        "<|im_end|>",
    ),
    "Qwen 3, thinking, with its answers marked": (
        ASKED + "{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}{% else %}{{ '<|im_start|>assistant\n' }}"
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        + AND_PROMPT + "{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
        "<|im_end|>",
    ),
    "DeepSeek R1, which begins to think and leaves thoughts out": (
        "{{ bos_token }}" + ASKED + "{{ '<｜User｜>' + m.content }}{% else %}"
        "{{ '<｜Assistant｜>' + m.content.split('</think>') | last + '<｜end▁of▁sentence｜>' }}"
        + AND_PROMPT + "{{ '<｜Assistant｜><think>\n' }}{% endif %}",
        END_R1,
    ),
    "Gemma": (
        "{{ bos_token }}" + ASKED + "{{ '<start_of_turn>user\n' + m.content | trim + '<end_of_turn>\n' }}{% else %}"
        "{{ '<start_of_turn>model\n' + m.content | trim + '<end_of_turn>\n' }}"
        + AND_PROMPT + "{{ '<start_of_turn>model\n' }}{% endif %}",
        "<end_of_turn>",
    ),
    "Phi 3, whose conversations have an end of their own": (
        ASKED + "{{ '<|user|>\n' + m.content + '<|end|>\n' }}{% else %}"
        "{{ '<|assistant|>\n' + m.content + '<|end|>\n' }}"
        + AND_PROMPT + "{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        "<|end|>",
    ),
    "plain": (BUILT_IN["plain"], "</s>"),
    "bare": (BUILT_IN["bare"], "</s>"),
    "no control token": (
        ASKED + "{{ 'User: ' + m.content + '\n' }}{% else %}{{ 'Assistant: ' + m.content + '\n' }}"
        + AND_PROMPT + "{{ 'Assistant:' }}{% endif %}",
        None,
    ),
    "no control token but one that begins": (
        "{{ bos_token }}" + ASKED + "{{ '[INST] ' + m.content }}{% else %}{{ ' [/INST] ' + m.content + '\n' }}"
        + AND_PROMPT + "{{ ' [/INST]' }}{% endif %}",
        None,
    ),
    "no Jinja": ("{% if %}", None),
    "no answer is written": (ASKED + "{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endif %}{% endfor %}", None),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    made = train_bpe([TEXT], 400)
    made._inner.add_special_tokens([*CONTROL, *MORE, BEGIN_R1, END_R1])
    return Tokenizer.from_json(made.to_json())


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_turn_ends_with_the_control_token_behind_its_answer(name: str, tokenizer: Tokenizer) -> None:
    """Whatever a prompt says more than a finished turn does; else with the end of the document."""
    text, end = TEMPLATES[name]
    names = (BEGIN_R1, END_R1) if "DeepSeek" in name else ("<s>", "</s>")
    chat = Chat(ChatTemplate(text, dict(zip(("bos_token", "eos_token"), names, strict=True))), tokenizer)
    assert chat.end_of_turn == (tokenizer.end_of_document if end is None else tokenizer.id_of(end)) is not None


@pytest.mark.parametrize("name", ["Llama 3", "ChatML", "Zephyr", "Gemma"])
def test_white_space_behind_the_token_that_ends_a_turn_is_not_learned(name: str) -> None:
    """Also where that is none of those which the tokenizer's configuration names."""
    text, end = TEMPLATES[name]
    found = ChatTemplate(text, {"bos_token": "<s>", "eos_token": "</s>"}).render([ASKS, ANSWERS, ASKS, ANSWERS])
    assert [found.text[start:stop].lstrip() for start, stop in found.answers] == [f"a city{end}"] * 2
