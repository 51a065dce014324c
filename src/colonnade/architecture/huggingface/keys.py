"""A config.json while it is read: whoever takes a key has understood it, and what nobody takes is refused by name.

So no key that changes what a model computes is passed over, also none that did not exist when this was written.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from colonnade.config.numbers import is_number

_REQUIRED = object()
SHOWN = 80  # characters of a value in a message

OF_NO_EFFECT = frozenset(
    [
        "architectures",
        "model_type",
        "_name_or_path",
        "name_or_path",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "tokenizer_class",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "cls_token_id",
        "mask_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "begin_suppress_tokens",
        "suppress_tokens",
        "prefix",
        "max_length",
        "min_length",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "diversity_penalty",
        "num_beams",
        "num_beam_groups",
        "early_stopping",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "exponential_decay_length_penalty",
        "remove_invalid_values",
        "output_scores",
        "return_dict_in_generate",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "torchscript",
        "use_bfloat16",
        "gradient_checkpointing",
        "task_specific_params",
        "finetuning_task",
        "problem_type",
        "id2label",
        "label2id",
        "num_labels",
        "classifier_dropout",
        "chunk_size_feed_forward",
        "pretraining_tp",
        "slow_but_exact",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_commit_hash",
        "tf_legacy_loss",
        "unsloth_version",
        "transformers.js_config",
        "tie_encoder_decoder",
        "cross_attention_hidden_size",
    ]
)
"""Keys of any config.json that say nothing of what a model computes from tokens to logits, but for rounding."""


class Refused(Exception):
    """What is wrong with a config.json, in words: a line each."""

    def __init__(self, lines: Collection[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = list(lines)


class Keys:
    """The keys of a config.json. `also`: other names of keys, by the one that they are taken by."""

    def __init__(self, content: Mapping[str, Any], also: Mapping[str, str] | None = None) -> None:
        self._content = {key: value for key, value in content.items() if value is not None}
        self._named = frozenset(content)
        self._also = also or {}
        self._taken: set[str] = set()
        self._problems: list[str] = []

    def take(self, name: str, kind: type, default: Any = _REQUIRED) -> Any:
        """The value of a key; `default` where it is absent or null. Of another kind, or required and absent: refused,
        and `kind`'s own zero is returned, so that all problems are found at once.
        """
        other = self._also.get(name)
        found = [key for key in (name, other) if key is not None and key in self._content]
        self._taken.update(found)
        if len(found) == 2 and self._content[found[0]] != self._content[found[1]]:
            both = " and ".join(f"{key} = {shown(self._content[key])}" for key in found)
            self._problems.append(f"{both} are two names of one number")
        if not found and default is _REQUIRED:
            self._problems.append(f"{name} is missing")
            return kind()
        value = self._content[found[0]] if found else default
        if kind is float and type(value) is int and is_number(value):
            value = float(value)
        if value is not None and type(value) is not kind:
            self._problems.append(f"{name} = {shown(value)} is no {_WORDS[kind]}")
            return kind()
        return value

    def fixed(self, name: str, *allowed: Any, why: str) -> None:
        """A key that may be absent, null, or one of these; `why` the model cannot be ours otherwise."""
        value = self.get(name)
        if value is not None and not any(value == each and type(value) is type(each) for each in allowed):
            self.refuse(f"{name} = {shown(value)}: {why}")

    def get(self, name: str) -> Any:
        """The value of a key as it is; None where it is absent or null."""
        self._taken.add(name)
        return self._content.get(name)

    def has(self, name: str) -> bool:
        """Whether the key stands there, be it as null."""
        return name in self._named

    def ignore(self, *names: str) -> None:
        """Keys of the family that change nothing between tokens and logits."""
        self._taken.update(names)

    def refuse(self, line: str) -> None:
        """One problem more."""
        self._problems.append(line)

    def take_problems(self, inner: "Keys", name: str) -> None:
        """Those of a table within, which was taken by this name."""
        try:
            inner.finish()
        except Refused as refused:
            self._problems += [f"{name}.{line}" for line in refused.lines]

    def finish(self, *, unknown: bool = True) -> None:
        """Refused with every problem and, if `unknown` ones count, every key that nobody has taken."""
        left = sorted(self._content.keys() - self._taken - OF_NO_EFFECT) if unknown else []
        others = [
            f"{key} = {shown(self._content[key])} is not known here: it may change what the model computes"
            for key in left
        ]
        if self._problems or others:
            raise Refused([*self._problems, *others])


def shown(value: object) -> str:
    """A stranger's value as a message may show it."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def lines_of(names: Iterator[str] | Collection[str]) -> str:
    """Problems under each other."""
    return "\n".join(f"  {name}" for name in names)


_WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text", dict: "table", list: "list"}
