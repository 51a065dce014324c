"""Every format of examples by its name, as `colonnade data examples` takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from colonnade.data.chat_template import ChatTemplate, chosen_template
from colonnade.data.question_windows import Windows
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError
from colonnade.examples.chat import ChatFormat, PreferencesFormat
from colonnade.examples.format import Format
from colonnade.examples.glue import GLUE
from colonnade.examples.race import RaceFormat
from colonnade.examples.squad import SquadFormat

FORMATS: Mapping[str, Format] = MappingProxyType(
    {**{task.name: task for task in GLUE}, "race": RaceFormat(), "squad": SquadFormat()}
)

WITH_TEMPLATE: Mapping[str, Callable[[ChatTemplate], Format]] = MappingProxyType(
    {"chat": ChatFormat, "preferences": PreferencesFormat}
)
"""Formats of conversations, which a chat template writes down."""


def format_of(
    name: str,
    tokenizer: Tokenizer | None = None,
    path: str | Path = "",
    template: str | None = None,
    windows: Mapping[str, int] = MappingProxyType({}),
) -> Format:
    """The format of a name. DataError for none.

    Conversations are written down for the `tokenizer` at `path`, by the chat template that is named; None: its own.
    `windows`: of questions about texts, what differs from `Windows`.
    """
    if windows and name != "squad":
        given = " and ".join("--" + key.replace("_", "-") for key in windows)
        raise DataError(f"{given}: for questions about texts (squad), not for {name}. Leave it out.")
    if name in WITH_TEMPLATE:
        assert tokenizer is not None, "a template writes the tokenizer's control tokens"
        return WITH_TEMPLATE[name](chosen_template(template, tokenizer, path))
    if name not in FORMATS:
        raise DataError(f'"{name}" is no format of examples. There are: {", ".join([*FORMATS, *WITH_TEMPLATE])}.')
    if template is not None:
        raise DataError(
            f'--template "{template}" is for conversations ({", ".join(WITH_TEMPLATE)}), not for {name}. Leave it out.'
        )
    if windows:
        Windows(**windows).check()
        return SquadFormat(Windows(**windows))
    return FORMATS[name]
