"""WikiText's words back to natural text, and natural text back to WikiText's words, character for character.

WikiText comes cut into words: ` The band 's 3 @.@ 5 " hits " ( 1998 ) . `. A model has learned from text that reads
`The band's 3.5 "hits" (1998).`, and Megatron-LM's paper (appendix E) undoes the cut before it measures.

Each rule *toggles*: at a place that its context decides, it swaps the written form with the natural one, whichever of
them stands there, and leaves its context as it was. So a rule is its own inverse, on any text; all of them in reverse
order undo them all. Nothing is lost where the words had the natural form already: such a place is rare, comes out in
the written form, and returns.

    invertible     the rules of this file
    megatron       those that Megatron-LM published (tasks/zeroshot_gpt/detokenizer.py; the lm-evaluation-harness has
                   the same). With them GPT-2's vocabulary makes 270,329 scored tokens of the test set, the paper's
                   T. They cannot be undone: ` . ` and `. ` become the same, and ` N ` is lost.
    none           as it is
"""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

Rule = Callable[[str], str]

_ABBREVIATIONS = (
    "Adm|Ave|Bros|Brig|Capt|Cmdr|Co|Col|Corp|Dr|Fr|Ft|Gen|Gov|Inc|Jr|Lt|Ltd|Maj|Messrs|Mr|Mrs|Ms|Mt|No|Nos|Prof|Rep|"
    "Rev|Sen|Sgt|Sr|St|Ste|al|e.g|etc|i.e|p|pp|var|vol|vs"
)
_KEEPS_ITS_STOP = re.compile(rf"{_ABBREVIATIONS}|[^\W\d_]|\w(?:.*\.)+\w")
"""Words that WikiText leaves together with their full stop: abbreviations, letters, letters with stops between."""


def detokenize(text: str) -> str:
    """Natural text of WikiText's words."""
    for rule in _RULES:
        text = rule(text)
    return text


def retokenize(text: str) -> str:
    """The words of which `detokenize` has made a text: `retokenize(detokenize(x)) == x` for any x."""
    for rule in reversed(_RULES):
        text = rule(text)
    return text


def _toggle_space(before: str, after: str) -> Rule:
    """A space between two patterns goes where it is, and comes where it is not."""
    place = re.compile(f"{before}( ?){after}")
    return lambda text: place.sub(lambda found: "" if found[1] else " ", text)


def _toggle_between_words(written: str, natural: str, kind: str = r"[\w<>]") -> Rule:
    place = re.compile(rf"(?<={kind})({re.escape(written)}|{re.escape(natural)})(?={kind})")
    return lambda text: place.sub(lambda found: natural if found[1] == written else written, text)


def _stops(text: str) -> str:
    """Full stops behind words, but for those behind an abbreviation."""
    return _STOP.sub(_stop, text)


def _stop(found: re.Match[str]) -> str:
    word, space = found[1], found[2]
    bare = word.lstrip("\"'([“‘")
    if _KEEPS_ITS_STOP.fullmatch(bare):
        return found[0]
    return f"{word}." if space else f"{word} ."


def _quotes(text: str) -> str:
    """Within each line, what stands between the first and the second quotation mark, the third and the fourth, …"""
    return "\n".join(_quotes_of_line(line) for line in text.split("\n"))


def _quotes_of_line(line: str) -> str:
    parts = line.split('"')
    for number in range(1, len(parts), 2):
        if parts[number].strip():
            closed = number < len(parts) - 1
            parts[number] = _toggle_edge(parts[number])
            parts[number] = _toggle_edge(parts[number][::-1])[::-1] if closed else parts[number]
    return '"'.join(parts)


def _toggle_edge(part: str) -> str:
    """A space before the first character; where white space is more than that one, nothing changes."""
    if not part[0].isspace():
        return f" {part}"
    return part[1:] if part[0] == " " and not part[1].isspace() else part


def _headings(text: str) -> str:
    """` = = Title = = ` and ` == Title == `."""
    return _HEADING.sub(_heading, text)


def _heading(found: re.Match[str]) -> str:
    marks = found[1].replace(" ", "") if " " in found[1] else " ".join(found[1])
    return f" {marks} {found[2]} {marks} "


def _edges(text: str) -> str:
    """The space at both ends of a line. What stands behind the last line's end stays."""
    *lines, rest = text.split("\n")
    return "\n".join([*map(_edge, lines), rest])


def _edge(line: str) -> str:
    if line in ("", " "):
        return "" if line else " "
    inner = line[1:-1]
    if line[0] == line[-1] == " " and inner and not (inner[0].isspace() or inner[-1].isspace()):
        return inner
    return line if line[0].isspace() or line[-1].isspace() else f" {line} "


_STOP = re.compile(r"(?<!\S)(\S*[^\s.])( ?)\.(?=\s|$)")
_HEADING = re.compile(r"(?m)^ (==+|=(?: =)+) ([^=\s](?:[^\n]*[^=\s])?) \1 $")
_RULES: tuple[Rule, ...] = (
    _toggle_between_words(" @-@ ", "-"),
    _toggle_between_words(" @,@ ", ",", r"\d"),
    _toggle_between_words(" @.@ ", ".", r"\d"),
    _toggle_between_words(" / ", "/"),
    _toggle_between_words(" \u2011 ", "\u2011"),  # the hyphen that does not break
    _toggle_space(r"(?<=[\w>])", r"(?='\w)"),
    _toggle_space(r"(?<=s)", r"(?='(?:\s|$))"),
    _toggle_space(r"(?<=[$£€¥₱#])", r"(?=\d)"),
    _toggle_space(r"(?<=\d)", r"(?=[%°′″])"),
    _stops,
    _toggle_space(r"(?<=[^\s,;:!?])", r"(?=[,;:!?](?:\s|$))"),
    _toggle_space(r"(?<=[(\[“])", r"(?=[^\s(\[“)\]”])"),
    _toggle_space(r"(?<=[^\s(\[“)\]”])", r"(?=[)\]”])"),
    _quotes,
    _headings,
    _edges,
)


def _megatron(text: str) -> str:
    """Megatron-LM's rules, in its order, mistakes included (the slashes in the second)."""
    for pattern, made in _MEGATRON:
        text = re.sub(pattern, made, text)
    return text


_MEGATRON = (
    ("s '", "s'"),
    (r"/' [0-9]/", "/'[0-9]/"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (r" @\.@ ", "."),
    *((f" {re.escape(sign)} ", f"{sign} ") for sign in ":;.!?,"),
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r"\"\s*([^\"]*?)\s*\"", r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)

DETOKENIZERS: Mapping[str, Rule] = MappingProxyType(
    {"invertible": detokenize, "megatron": _megatron, "none": lambda text: text}
)
