"""What lies beside a vocabulary in a published folder and says how its text is treated, as transformers reads it
(tokenization_utils_base.py, `_from_pretrained`). A tokenizer.json says all of it itself, and has no need of this.

    tokenizer_config.json     the tokenizer's class and its settings; added_tokens_decoder: tokens beside the
                              vocabulary by their ids
    special_tokens_map.json   names of control tokens  } of folders from before added_tokens_decoder,
    added_tokens.json         ids by tokens            } and read where there is none
    config.json               the tokenizer's class, where tokenizer_config.json names none
    chat_template.jinja and additional_chat_templates/NAME.jinja: chat templates, the first one named default; they
                              replace those of tokenizer_config.json
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import AddedToken

from colonnade.architecture.huggingface.keys import shown
from colonnade.data.tokenizer_classes import OF_MODELS
from colonnade.errors import DataError, raise_passing
from colonnade.tokenizer_files import ADDED, BY_NAME, CONFIG, MODEL, files_beside

_COPY = "Copy it again from its source."
_MAKE = (
    "Make a tokenizer.json, which is read as it stands, with transformers: "
    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
)
_CLASS, _MODEL_TYPE = "tokenizer_class", "model_type"
_LISTED = "added_tokens_decoder"
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class TokenizerConfig:
    """The files beside a vocabulary; nothing where there are none."""

    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, Any] = field(default_factory=dict)
    added: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def beside(cls, vocabulary: Path) -> TokenizerConfig:
        """Those that are read with a vocabulary."""
        files = files_beside(vocabulary)
        return cls(vocabulary.parent, *((_read_model if file.name == MODEL else read_object)(file) for file in files))

    def class_of(self, *known: str, others: Collection[str]) -> str:
        """The tokenizer's class without the ending Fast: one of those known, the first where another or none is named.
        DataError for one of the `others`, which are known to give other ids.
        """
        file = CONFIG if self.settings.get(_CLASS) is not None else MODEL
        key, named = _CLASS, (self.settings if file == CONFIG else self.model).get(_CLASS)
        found = str(named).removesuffix("Fast")
        if named is None:
            key, named = _MODEL_TYPE, self.model.get(_MODEL_TYPE)
            found = OF_MODELS.get(str(named), "")
        if found in others:
            self.refuse(f"{key} = {shown(named)}, and {found} gives other ids than {', '.join(known)} do", file)
        return found if found in known else known[0]

    def flag(self, key: str, default: bool | None) -> bool | None:
        """A setting that is true or false; `default` where it is absent or null."""
        value = self.settings.get(key)
        if value is not None and type(value) is not bool:
            self.refuse(f"{key} = {shown(value)}, which is neither true nor false", remedy=_COPY)
        return default if value is None else value

    def fixed(self, key: str, *allowed: Any, why: str) -> None:
        """DataError for a setting that is neither absent, null nor one of these; `why` it cannot be obeyed."""
        value = self.settings.get(key)
        if value is not None and value not in allowed:
            self.refuse(f"{key} = {shown(value)}: {why}")

    def tokens(self) -> dict[str, tuple[int | None, AddedToken]]:
        """By name: the tokens that are added to the vocabulary, with the ids that they have to get, in the order of
        these; then the control tokens that are only named.
        """
        listed = self.settings.get(_LISTED)
        named = dict(self._named(self.settings if listed is not None else {**self.settings, **self.names}))
        found: dict[str, tuple[int | None, AddedToken]] = {}
        for id_, token in sorted(self._with_ids(listed, named), key=lambda each: each[0]):
            found[token.content] = (id_, token)
        return found | {name: (None, token) for name, token in named.items() if name not in found}

    def _with_ids(self, listed: Any, named: Mapping[str, AddedToken]) -> Iterator[tuple[int, AddedToken]]:
        if listed is None:
            for name, id_ in self.added.items():
                if type(id_) is not int or not name:
                    self.refuse(f"{shown(name)} = {shown(id_)}, which is no id of a token", ADDED, remedy=_COPY)
                yield id_, AddedToken(name, special=name in named)
            return
        for key, value in listed.items() if isinstance(listed, dict) else ((None, listed),):
            token = _token(value)
            if token is None or not isinstance(key, str) or not key.isdecimal():
                self.refuse(f"{_LISTED} = {shown(listed)}, which is no table of tokens by their ids", remedy=_COPY)
            token.special = token.special or token.content in named
            yield int(key), token

    def refuse(self, what: str, file: str = CONFIG, *, remedy: str = _MAKE) -> NoReturn:
        """DataError for what a file has."""
        raise DataError(f"{self.folder / file} has {what}. {remedy}")

    def _named(self, content: Mapping[str, Any]) -> Iterator[tuple[str, AddedToken]]:
        """The control tokens that CONFIG or NAMES names, one by one and in lists."""
        values: list[Any] = [content[key] for key in control_tokens(content)]
        for key in ("additional_special_tokens", "extra_special_tokens"):
            several = content.get(key) or []
            values += several.values() if isinstance(several, dict) else several if isinstance(several, list) else [0]
        for value in values:
            token = _token({"content": value} if isinstance(value, str) else value, special=True)
            if token is None and value != "":
                self.refuse(f"{shown(value)} among its control tokens, which names none", "", remedy=_COPY)
            if token is not None:
                yield token.content, token


def read_text(file: Path) -> str:
    """A file of a tokenizer. DataError where it cannot be read, DiskError where its disk may get over it."""
    try:
        return file.read_text(encoding="utf-8-sig")  # some editors begin with a mark
    except (UnicodeDecodeError, OSError) as error:
        raise_passing(file, error)
        raise DataError(f"{file} cannot be read as text: {error}. {_COPY}") from error


def read_object(file: Path) -> Mapping[str, Any]:
    """A file beside a tokenizer; empty where there is none. DataError if it is not one JSON object."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(read_text(file))
        json.dumps(content, ensure_ascii=False).encode()  # which half of a surrogate pair cannot be
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is no JSON ({error}). {_COPY}") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} holds no object. {_COPY}")
    return content


def read_templates(files: Iterable[Path]) -> dict[str, Any]:
    """Chat templates in files of their own, as a tokenizer_config.json has them: what of it they replace."""
    named = {file.stem if file.parent.name == BY_NAME else "default": read_text(file) for file in files}
    if not named:
        return {}
    several = [{"name": name, "template": text} for name, text in named.items()]
    return {"chat_template": named["default"] if named.keys() == {"default"} else several}


def _read_model(file: Path) -> Mapping[str, Any]:
    """A model's config.json; empty for a file of that name that is something else."""
    try:
        return read_object(file)
    except DataError:
        return {}


def control_tokens(content: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and its like: names, or objects that have them as content."""
    found = {key: _name(value) for key, value in content.items() if key.endswith("_token")}
    return {key: name for key, name in found.items() if name is not None}


def _name(value: Any) -> str | None:
    name = value.get("content") if isinstance(value, dict) else value
    return name if isinstance(name, str) else None


def _token(value: Any, *, special: bool = False) -> AddedToken | None:
    """A token as these files have it; None where it is none."""
    name = _name(value) if isinstance(value, dict) else None
    if not name:
        return None
    flags = {key: value[key] for key in _FLAGS if key in value}
    if any(type(flag) is not bool for flag in flags.values()):
        return None
    return AddedToken(name, **(flags | {"special": True} if special else flags))
