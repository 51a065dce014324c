"""Unicode repair with ftfy (Speer 2019): mojibake, entities, broken surrogates, control characters, line ends."""

from __future__ import annotations

import re

import ftfy
from datatrove.data import Document

from colonnade.corpus.recipe import RepairStep
from colonnade.corpus.rows import EMPTY
from colonnade.corpus.step import Drop, Setting, Step
from colonnade.corpus.tally import Account

_SUSPECT = re.compile(r"[^\n\t\x20-\x7e]|&")
"""A line without any of these has nothing that ftfy would change, and most lines of English text are like that."""


class Repair(Step):
    """Changes text, drops nothing but what is empty afterwards."""

    def __init__(self, repair: RepairStep, setting: Setting) -> None:
        self.repair = repair
        super().__init__("repair", setting)

    def examine(self, document: Document, account: Account) -> Drop | None:
        """Repairs the text in place, and counts what that did; drops what has no text then."""
        text = document.text
        repaired = repair_text(text, self.repair)
        if not repaired or repaired.isspace():
            return Drop(EMPTY)
        if repaired != text:
            document.text = repaired
            account.tally.changed["repaired"] += 1
            if "\0" in text:
                account.tally.changed["NUL characters removed"] += 1
        return None


def repair_text(text: str, repair: RepairStep) -> str:
    """ftfy's answer to a text. It works line by line; lines that it would leave alone are not shown to it."""
    if _SUSPECT.search(text) is None:
        return text
    config, parts = configuration(repair), list[str]()
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        parts.append(line if _SUSPECT.search(line) is None else str(ftfy.fix_text(line, config)))
        if repair.unescape_html and "<" in line:  # from here on, entities are meant to be there
            config = config._replace(unescape_html=False)
    return "".join(parts)


def configuration(repair: RepairStep) -> ftfy.TextFixerConfig:
    """The recipe's keys as ftfy has them."""
    return ftfy.TextFixerConfig(
        unescape_html="auto" if repair.unescape_html else False,
        uncurl_quotes=repair.uncurl_quotes,
        normalization=None if repair.normalization == "none" else repair.normalization,
        explain=False,
    )
