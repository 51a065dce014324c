"""What a format of examples has to say, and nothing of files that are written.

    file ──read──▶ examples, or why a row is none ──encode──▶ documents: a sequence of token ids a field, numbers last

A format is one entry of `formats.FORMATS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from colonnade.corpus.documents import Rejected
from colonnade.data.sidecar import ExampleFields
from colonnade.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Document:
    """An example, as it is stored."""

    sequences: Sequence[Sequence[int]]
    """Token ids of each field, then the numbers: labels, starts, ends. No numbers: an example without a label. Every
    number is below the vocabulary's size, as ids are.
    """
    text_bytes: int
    """Size of its text in UTF-8."""
    has_numbers: bool = True
    """Whether the last sequence is numbers; False: all of them are text."""
    unlabelled: str = ""
    """Why it has no label, where its file could have one, or has no place for it."""


class Format(Protocol):
    """One published way to write down examples of a task."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Endings of the files that a folder stands for; none: a folder is refused, files have to be named."""
        ...

    @property
    def fields(self) -> ExampleFields:
        """What the sidecar says of the documents: what they are for, and what their sequences are."""
        ...

    def read(self, path: Path) -> Iterator[Any]:
        """The examples of one file in their order; `Rejected` for a row that is none.

        DataError where the whole file is none, with its line where one is to blame.
        """
        ...

    def encode(self, examples: Sequence[Any], tokenizer: Tokenizer) -> Iterable[Document | Rejected]:
        """The documents of some examples of `read`, in order; `Rejected` for one that has none."""
        ...


@dataclass(frozen=True)
class Texts:
    """An example of some texts and numbers: all that most formats need."""

    texts: tuple[str, ...]
    numbers: tuple[int, ...]
    unlabelled: str = field(default="", compare=False)
    """As of the document."""


def encode_texts(examples: Sequence[Texts], tokenizer: Tokenizer) -> Iterator[Document]:
    """A sequence a text, then the numbers."""
    ids = iter(tokenizer.encode_batch([text for example in examples for text in example.texts]))
    for example in examples:
        sequences = [next(ids) for _ in example.texts]
        text_bytes = sum(len(text.encode()) for text in example.texts)
        yield Document([*sequences, example.numbers], text_bytes, unlabelled=example.unlabelled)
