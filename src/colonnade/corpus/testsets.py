"""Evaluation sets as word n-grams, and the titles of their articles.

    .jsonl          the text under a key (read.key)
    .json           SQuAD: contexts and questions
    .txt .tokens .raw   lines; WikiText's lines like " = Title = " are article titles; " @-@ " and the like are undone

An n-gram does not cross from one passage to the next, nor an `<unk>`.
"""

from __future__ import annotations

import json
import lzma
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from colonnade.corpus.streams import COMPRESSIONS, Damaged, HashedFile, blocks
from colonnade.corpus.words import Hashes, WordHashes, ngram_hashes, normal_form, spans_of, union
from colonnade.errors import DataError
from colonnade.storage import as_given, not_here

LEAST = 8
"""[words] Shorter passages are too common to be looked for."""
_TITLE = re.compile(r"^ ?= ([^=].*?[^=]|[^=]) = ?$")
_GAP = "<unk>"


class NGrams(NamedTuple):
    """The n-grams of one set: of the wanted length, and the shorter passages whole, by their length."""

    name: str
    by_length: dict[int, Hashes]


def read_tests(tests: Mapping[str, str], *, ngram: int, key: str) -> list[NGrams]:
    """All sets. Raises DataError for one that cannot be read or has nothing to look for."""
    hashes = WordHashes()
    found = []
    for name, path in tests.items():
        by_length: dict[int, list[Hashes]] = {}
        for words in passages(Path(path), key):
            length = min(ngram, len(words))
            if length >= min(LEAST, ngram):
                by_length.setdefault(length, []).append(ngram_hashes(hashes.of(words), length))
        if not by_length:
            raise DataError(f"{path} has no passage of {min(LEAST, ngram)} words or more: nothing to look for.")
        found.append(NGrams(name, {length: union(parts) for length, parts in sorted(by_length.items())}))
    return found


def passages(path: Path, key: str) -> Iterator[list[str]]:
    """The words of each passage of a set."""
    for text in texts(path, key):
        for part in text.split(_GAP):
            yield spans_of(part)[0]


def texts(path: Path, key: str) -> Iterator[str]:
    """The passages of a set, by the ending of its file."""
    if not path.exists():
        raise DataError(
            f"{as_given(path)} does not exist.{not_here(path)} Name an evaluation set: .jsonl, SQuAD's .json, .txt, "
            ".tokens or .raw."
        )
    ending = Path(path.name.removesuffix(path.suffix) if path.suffix in COMPRESSIONS else path.name).suffix
    try:
        with path.open("rb") as raw:
            content = blocks(HashedFile(raw), path.suffix if path.suffix in COMPRESSIONS else "")
            data = b"".join(content).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, Damaged, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path} cannot be read as an evaluation set: {error}. Copy it again.") from error
    if ending in (".jsonl", ".ndjson"):
        yield from _json_lines(path, data, key)
    elif ending == ".json":
        yield from _squad(path, data)
    else:
        yield from (line for line in data.splitlines() if line.strip() and not _TITLE.match(line))


def titles(path: Path) -> set[str]:
    """The article titles in a WikiText file; of any other file, its lines."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as a list of titles: {error}. It has to be UTF-8.") from error
    found = {match.group(1) for line in lines if (match := _TITLE.match(line))}
    return {normal_title(title) for title in found or lines} - {""}


def normal_title(title: str) -> str:
    """A title's words, however they are written: WikiText sets spaces around signs."""
    return " ".join(re.findall(r"\w+", normal_form(title).replace("_", " ").lower()))


def _json_lines(path: Path, data: str, key: str) -> Iterator[str]:
    for number, line in enumerate(data.split("\n"), 1):
        if line.strip():
            try:
                row: Any = json.loads(line)
                yield str(row[key])
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise DataError(
                    f"{path}, line {number}: not a JSON object with the key {key!r} ({error}). Evaluation sets have "
                    "to be whole; read.key names the key."
                ) from error


def _squad(path: Path, data: str) -> Iterator[str]:
    try:
        for article in json.loads(data)["data"]:
            for paragraph in article["paragraphs"]:
                found = [paragraph["context"], *(entry["question"] for entry in paragraph["qas"])]
                if not all(isinstance(text, str) for text in found):
                    raise TypeError("a context or question is no text")
                yield from found
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is not in SQuAD's format ({error}). Make it a .jsonl with the key `text`.") from error


def contained(values: Hashes, sorted_set: Hashes) -> Any:
    """For each value, whether it is in the sorted set."""
    if not len(sorted_set):
        return np.zeros(len(values), np.bool_)
    places = np.searchsorted(sorted_set, values)
    places[places == len(sorted_set)] = 0
    return sorted_set[places] == values
