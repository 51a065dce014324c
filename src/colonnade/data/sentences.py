"""Text to sentences, by rules: for token files with a sequence a sentence, which BERT samples are made of.

A sentence ends at a full stop, question or exclamation mark with its closing quotes, before white space and something
that begins a sentence; not behind an abbreviation, an initial or inside a number. A blank line ends one, too, and the
marks of Chinese and Japanese do without white space. Nothing is downloaded; the samples need cuts that are mostly
right, as the tasks that they are for learn from the order of texts, not from grammar.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_ABBREVIATIONS = frozenset(
    """
    mr mrs ms dr prof rev hon st sr jr gen col capt lt sgt maj adm gov sen rep pres supt messrs mme mlle
    vs etc al eg ie cf ca approx resp viz fig figs eq eqs no nos vol vols pp ch sec art ed eds trans
    inc ltd co corp dept univ assn bros jan feb mar apr jun jul aug sep sept oct nov dec
    mon tue tues wed thu thurs fri sat sun ave blvd rd mt ft
    """.split()  # noqa: SIM905 - a list of forty strings is no better to read
)
_CLOSING, _OPENING = "\"'”’»)\\]", "\"'“‘«(\\["
_END = re.compile(
    rf"(?P<wide>[。！？]+[」』）”’]*)|(?P<blank>\n\s*\n)"
    rf"|(?<![.!?…])(?P<mark>[.!?…]+)[{_CLOSING}]*(?=\s+[{_OPENING}]*(?P<following>[^\W_]))"
)
_WORD = re.compile(r"[^\s(\[\"'“‘«]+$")


def split_sentences(text: str) -> list[str]:
    """The sentences of a text, without white space around them; at least one where there is any text."""
    return [sentence for sentence in _pieces(text) if sentence]


def _pieces(text: str) -> Iterator[str]:
    begin = 0
    for end in _END.finditer(text):
        if end["mark"] is None or _ends(text, end):
            yield text[begin : end.end()].strip()
            begin = end.end()
    yield text[begin:].strip()


def _ends(text: str, end: re.Match[str]) -> bool:
    """Whether a mark with white space behind it ends a sentence."""
    if end["following"].islower():
        return False
    if end["mark"] != ".":
        return True
    word = _WORD.search(text, max(end.start() - 40, 0), end.start())
    if word is None:
        return True
    name = word[0].lower()
    is_initial = len(name) == 1 and word[0].isupper() and word[0] != "I"
    return not (is_initial or name in _ABBREVIATIONS or re.fullmatch(r"(?:\w\.)+\w", name))
