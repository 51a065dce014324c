"""LAMBADA: passages whose last word is to be predicted, and how they are cut into context and target.

The Megatron-LM paper (appendix E) takes the raw text, gives the model the right tokens of the word one after the other
(teacher forcing), and counts a passage as right only when every token of the word is the likeliest. Programs differ in
what the word's tokens are:

    whole-word   the context without its last white space, and " word", tokenized apart: the paper's; `--strict-lambada`
                 of Megatron-LM
    last-token   the passage tokenized as a whole, of which the last token counts: Megatron-LM without that option.
                 Where the word is several tokens, its first ones are given away: a higher accuracy
    lm-eval      cut at the last space and tokenized as a whole: the task `lambada_openai` of the lm-evaluation-harness.
                 It differs where the last word follows a line end

Imports no torch.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError
from colonnade.evaluation.raw import compression_of, lines_of

Cut = Callable[[str, Tokenizer], tuple[list[int], list[int]]]


class Passage(NamedTuple):
    """One of a file."""

    line: int
    """From 1."""
    text: str


class Example(NamedTuple):
    """A passage as tokens."""

    line: int
    context: Sequence[int]
    target: Sequence[int]


def read_passages(path: Path, *, key: str = "text") -> list[Passage]:
    """Those of a .jsonl, under `key`, or the lines of any other text. Blank lines are none.

    DataError for a line that is no passage of two words.
    """
    name = path.name.removesuffix(compression_of(path))
    of_line = _of_json if name.endswith((".jsonl", ".ndjson", ".json")) else _of_text
    found = [
        Passage(number, of_line(f"{path}, line {number}", line, key))
        for number, line in enumerate(lines_of(path), 1)
        if line.strip()
    ]
    if not found:
        raise DataError(f'{path} has no passage. Name a .jsonl with {{"{key}": …}}, or a text with one passage a line.')
    return found


def _of_text(where: str, line: str, key: str) -> str:
    text = line.removesuffix("\r")
    if len(text.split()) < 2:
        raise DataError(
            f"{where}: {text[:40]!r} is one word, with nothing before it to predict it from. Remove the line."
        )
    return text


def _of_json(where: str, line: str, key: str) -> str:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}). Every line has to be an object with {key!r}.") from None
    text = row.get(key) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{where}: no text under {key!r}. Every line has to be an object like {{{key!r}: …}}.")
    return _of_text(where, text, key)


def examples(
    path: Path, passages: Sequence[Passage], tokenizer: Tokenizer, *, variant: str, longest: int | None
) -> list[Example]:
    """Passages cut as `VARIANTS` has it. DataError for one that the model cannot read whole (`longest`; None: any)."""
    found = [Example(each.line, *VARIANTS[variant](each.text, tokenizer)) for each in passages]
    for each in found:
        _check(path, each, longest)
    return found


def _check(path: Path, example: Example, longest: int | None) -> None:
    where = f"{path}, line {example.line}"
    if not example.context or not example.target:
        part = "context" if example.target else "last word"
        raise DataError(
            f"{where}: the checkpoint's tokenizer makes no token of the passage's {part}. Remove the line, or measure "
            "a model whose tokenizer knows its characters."
        )
    read = len(example.context) + len(example.target) - 1
    if longest is not None and read > longest:
        raise DataError(
            f"{where}: the passage has {read + 1:,} tokens, of which {read:,} are read, and the model has learned "
            f"{longest:,} positions. Remove or shorten it, or measure a model with a larger model.seq_length."
        )


def _whole_word(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    word = text.split()[-1]
    return tokenizer.encode(text[: text.rfind(word)].strip()), _behind_text(word, tokenizer)


def _behind_text(word: str, tokenizer: Tokenizer) -> list[int]:
    """Tokens of a word behind a space: those that it has behind itself. A tokenizer may put a space of its own before
    a text, as LLaMA 2's does, and make a token of the second, which no text has; or drop the one there.
    """
    alone, twice = tokenizer.encode(word), tokenizer.encode(f"{word} {word}")
    return twice[len(alone) :] if twice[: len(alone)] == alone else tokenizer.encode(f" {word}")


def _last_token(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    tokens = tokenizer.encode(text)
    return tokens[:-1], tokens[-1:]


def _lm_eval(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    context, _, word = text.rpartition(" ")
    return cut_pair(tokenizer, context, f" {word}")


def cut_pair(tokenizer: Tokenizer, context: str, target: str) -> tuple[list[int], list[int]]:
    """A context and what follows it, tokenized together and cut where the context's own tokens end, as the
    lm-evaluation-harness does. White space at the context's end belongs to what follows.
    """
    bare = context.rstrip()
    whole, first = tokenizer.encode(context + target), tokenizer.encode(bare)
    return first, whole[len(first) :]


VARIANTS: Mapping[str, Cut] = MappingProxyType(
    {"whole-word": _whole_word, "last-token": _last_token, "lm-eval": _lm_eval}
)
