"""Unicode repair with ftfy (Speer 2019): mojibake, entities, broken surrogates, control characters, line ends."""

from __future__ import annotations

import re

import ftfy
from datatrove.data import Document

from colonnade.data.clean.recipe import RepairStep
from colonnade.data.clean.step import Setting, Step
from colonnade.data.clean.tally import Account

_SUSPECT = re.compile(r"[^\n\t\x20-\x7e]|&")
"""Text without any of these has nothing that ftfy would change, and most of English text is like that."""


class Repair(Step):
    """Changes text, drops nothing but what is empty afterwards."""

    def __init__(self, repair: RepairStep, setting: Setting) -> None:
        self.repair = repair
        super().__init__("repair", setting)

    def examine(self, document: Document, account: Account) -> None:
        """Repairs the text in place, and counts what that did."""
        text = document.text
        if _SUSPECT.search(text) is None:
            return
        repaired = repair_text(text, self.repair)
        if repaired != text:
            document.text = repaired
            account.tally.changed["repaired"] += 1
            if "\0" in text:
                account.tally.changed["NUL characters removed"] += 1


def repair_text(text: str, repair: RepairStep) -> str:
    """ftfy's answer to a text."""
    form = None if repair.normalization == "none" else repair.normalization
    config = ftfy.TextFixerConfig(
        unescape_html="auto" if repair.unescape_html else False,
        uncurl_quotes=repair.uncurl_quotes,
        normalization=form,
        explain=False,
    )
    return ftfy.fix_text(text, config)
