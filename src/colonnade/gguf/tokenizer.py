"""The tokenizer within a GGUF file, where it is a byte-level BPE whose way to split text is known; its template."""

import json
from typing import Any, TypeGuard

from colonnade.data.byte_level import SPLITS
from colonnade.data.chat_template import ChatTemplate
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError
from colonnade.gguf.header import Header

_CONTROL, _USERS = 3, 4
"""Kinds of tokens that are kept whole: the first stand for no text, and no text becomes one; the second are text."""

_UNREADABLE = "left: it cannot be read. Name the original model's tokenizer.json with --tokenizer"


def tokenizer_in(header: Header) -> Tokenizer | str:
    """The file's tokenizer, or in words why it must be named with --tokenizer."""
    said = {key: header.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre", "tokens", "merges")}
    kinds = header.metadata.get("tokenizer.ggml.token_type", [])
    if said["model"] is None:
        return "none in the file"
    if said["model"] != "gpt2":
        what = "tokenizer.model (SentencePiece)" if said["model"] == "llama" else "tokenizer.json"
        return f"left: of kind {said['model']}. Name the original model's {what} with --tokenizer to have one"
    tokens, merges = said["tokens"], said["merges"]
    if not isinstance(said["pre"], str) or said["pre"] not in SPLITS:
        return f"left: it splits text as {said['pre']}. Name the original model's tokenizer.json with --tokenizer"
    if not (_are_texts(tokens) and _are_texts(merges) and isinstance(kinds, list)):
        return _UNREADABLE
    added = {id_: kind == _CONTROL for id_, kind in enumerate(kinds) if kind in (_CONTROL, _USERS)}
    try:
        return Tokenizer.from_json(json.dumps(_content(tokens, merges, added, said["pre"])))
    except DataError:
        return _UNREADABLE


def config_in(header: Header) -> dict[str, Any]:
    """The file's chat template with the tokens that it may write by name, as in a tokenizer_config.json; empty where
    there is none.
    """
    template, tool_use, tokens = (
        header.metadata.get(f"tokenizer.{key}") for key in ("chat_template", "chat_template.tool_use", "ggml.tokens")
    )
    if not isinstance(template, str):
        return {}
    known, found = dict(enumerate(tokens)) if _are_texts(tokens) else {}, {}
    for key in ("bos_token", "eos_token"):
        id_ = header.metadata.get(f"tokenizer.ggml.{key}_id")
        if type(id_) is int and id_ in known:
            found[key] = known[id_]
    return ChatTemplate(template, found, tool_use if isinstance(tool_use, str) else None).to_json()


def has_its_tokens(header: Header, tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer has the file's tokens, with their ids; it may have more."""
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    return _are_texts(tokens) and tokens != [] and tokenizer.names[: len(tokens)] == tokens


def _are_texts(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _content(tokens: list[str], merges: list[str], added: dict[int, bool], pre: str) -> dict[str, Any]:
    """Of a tokenizer.json. `added`: tokens beside those of merges, and whether they are control tokens. `pre`: of
    `SPLITS`; Qwen 2 brings text to NFC, and LLaMA 3 alone has words that no merges make.
    """
    split = SPLITS[pre]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": split is None}
    first = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": id_, "content": tokens[id_], **flags, "special": is_control}
            for id_, is_control in added.items()
            if id_ < len(tokens)
        ],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": level if split is None else {"type": "Sequence", "pretokenizers": [first, level]},
        "post_processor": None,
        "decoder": {**level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: id_ for id_, token in enumerate(tokens)},
            "merges": merges,
        },
    }
