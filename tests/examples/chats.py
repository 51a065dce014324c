"""A small byte-level tokenizer with control tokens, and chat templates as published models have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from colonnade.data.tokenizer import Tokenizer, train_bpe

CONTROL = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>")
TEXT = "user assistant system What is the capital of France? Paris. It is a city on the river Seine. Thank you! " * 5

CHATML = (  # Qwen 2.5, with its answers marked
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'assistant' %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' }}\n"
    "        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}\n"
    "    {%- else %}\n"
    "        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\n"
    "    {%- endif %}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
)
LLAMA3 = (  # Llama 3, with its answers marked, the control token that ends them too
    "{{- bos_token }}{% for message in messages %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{- message['content'] | trim + '<|eot_id|>' }}"
    "{% endgeneration %}{% else %}{{- message['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
MARKED = {"chatml": CHATML, "llama3": LLAMA3}
UNMARKED = {
    "qwen": CHATML.replace("{%- generation %}", "").replace("{%- endgeneration %}", ""),
    "zephyr": (
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\\n' + message['content'] + "
        "eos_token }}\n{% elif message['role'] == 'system' %}\n{{ '<|system|>\\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\\n'  + message['content'] + eos_token }}\n"
        "{% endif %}\n{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
    ),
    "mistral": (
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% endif %}{% endfor %}"
    ),
}
TALK = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "Thank you!  Ünïcödé 🙂"},
    {"role": "assistant", "content": "  It is a city 🙂 "},
]
SYSTEM = [{"role": "system", "content": "You are a city."}, *TALK]


def tokenizer(*, control: bool = True) -> Tokenizer:
    made = train_bpe([TEXT], 400)
    if control:
        made._inner.add_special_tokens(list(CONTROL))
    return Tokenizer.from_json(made.to_json())


def folder_of(path: Path, template: str | list[dict[str, str]] | None, made: Tokenizer | None = None) -> Path:
    """A published tokenizer's folder."""
    path.mkdir(parents=True, exist_ok=True)
    (made or tokenizer()).save(path / "tokenizer.json")
    config: dict[str, Any] = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
    }
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in records))
    return path
