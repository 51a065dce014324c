"""What is too short, comes from an unwanted place, or does not look like good text."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from datatrove.data import Document
from datatrove.pipeline.filters import C4QualityFilter, GopherQualityFilter

from colonnade.corpus.recipe import FilterStep
from colonnade.corpus.repetition import RepetitionFilter
from colonnade.corpus.step import Drop, MakeCounter, Setting, Step
from colonnade.corpus.tally import Account
from colonnade.corpus.words import PlainWords
from colonnade.errors import DataError

_WITH_HOST = re.compile("([a-z][a-z0-9+.-]*:)?//", re.IGNORECASE)
"""With a scheme or not, what urlsplit takes for a URL that has a host."""


class Filter(Step):
    """Removal lists first, which cost least; then the heuristics; then the length of what they left."""

    def __init__(self, filters: FilterStep, counter: MakeCounter | None, setting: Setting) -> None:
        self.filters, self.counter = filters, counter
        self._urls = frozenset[str]()
        self._ids: dict[str, frozenset[str]] = {}
        self._quality: list[Any] = []
        self._count: Callable[[str], int] | None = None
        super().__init__("filter", setting)

    def prepare(self, rank: int) -> None:
        """Reads lists and tokenizer."""
        self._urls = frozenset(url for path in self.filters.remove_urls for url in urls_of(path))
        self._ids = {source: frozenset(list_of(path)) for source, path in self.filters.remove_ids.items()}
        self._quality = [quality_filter(name) for name in self.filters.quality]
        self._count = self.counter() if self.counter else None

    def finish(self, account: Account) -> None:
        """Lets go of what cannot be pickled."""
        self._count, self._quality = None, []

    def examine(self, document: Document, account: Account) -> Drop | None:
        """The first reason to drop a document, if there is one."""
        return self._unwanted(document) or self._unlike_text(document) or self._of_wrong_length(document, account)

    def _unwanted(self, document: Document) -> Drop | None:
        url, ids = document.metadata["url"], self._ids.get(document.metadata["source"], frozenset())
        if document.id in ids or (url and url in ids):
            return Drop("on its source's removal list")
        listed = listed_as(url, self._urls) if url and self._urls else None
        return Drop("on a URL list", f"{url} by {listed}") if listed else None

    def _unlike_text(self, document: Document) -> Drop | None:
        for name, judge in zip(self.filters.quality, self._quality, strict=True):
            verdict = judge.filter(document)
            if verdict is not True:
                reason = verdict[1] if isinstance(verdict, tuple) else "refused"
                return Drop(f"{name}: {str(reason).removeprefix('gopher_').replace('_', ' ')}")
        return None

    def _of_wrong_length(self, document: Document, account: Account) -> Drop | None:
        if self._count is None:
            return None
        count = document.metadata["tokens"] = self._count(document.text)
        account.tally.count("tokens", str(1 << max(count, 1).bit_length() - 1))
        if count < self.filters.min_tokens:
            return Drop("too short", f"{count} tokens")
        if self.filters.max_tokens and count > self.filters.max_tokens:
            return Drop("too long", f"{count:,} tokens")
        return None


def quality_filter(name: str) -> Any:
    """One of datatrove's filters, with word and sentence splitting that needs no model."""
    if name == "repetition":
        return RepetitionFilter()
    return {"gopher": GopherQualityFilter, "c4": C4QualityFilter}[name](language=PlainWords())


def list_of(path: str) -> list[str]:
    """The lines of a list, without comments (#) and empty ones."""
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read as a list: {error}. It has to be UTF-8, an entry a line.") from error
    return [line for line in lines if line and not line.startswith("#")]


def urls_of(path: str) -> list[str]:
    """The entries of a list of URLs, as `listed_as` looks them up."""
    urls = list[str]()
    for line in list_of(path):
        try:
            urls.append(normal_url(line))
        except ValueError as error:
            raise DataError(f"{path} has an entry that is no URL, {line!r}: {error}. Mend it, or remove it.") from error
    return urls


def normal_url(url: str) -> str:
    """host/path in small letters' host, without scheme, www., query, fragment and the last slash."""
    url = url.strip()
    parts = urlsplit(url if _WITH_HOST.match(url) else f"//{url}")
    host = (parts.hostname or "").removeprefix("www.")
    return f"{host}{parts.path}".rstrip("/")


def listed_as(url: str, listed: frozenset[str]) -> str | None:
    """The entry of a list that covers a URL: itself, a folder above it, its host, or a domain above that."""
    try:
        normal = normal_url(url)
    except ValueError:  # brackets that are no IPv6 address
        return None
    host, *folders = normal.split("/")
    for count in range(len(folders), 0, -1):
        if (entry := "/".join([host, *folders[:count]])) in listed:
            return entry
    labels = host.split(".")
    return next((".".join(labels[i:]) for i in range(len(labels)) if ".".join(labels[i:]) in listed), None)
