"""What a token file cannot say about itself: `prefix.json`, written beside `.bin` and `.idx` by `data tokenize`.

It is optional, so that files of other programs work; where it is there, it is held against the tokenizer and the model.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from colonnade.data.indexed import TokenFile, bin_path, idx_path
from colonnade.errors import DataError

ANSWERS, PREFERENCES, SPANS = "answers", "preferences", "spans"
"""`ExampleFields.head` of conversations, of pairs of answers of which one is preferred, and of questions that a run of
their text answers.
"""


_AS_WRITTEN = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class ExampleFields:
    """What the documents of a token file of examples are: a sequence a field, and a last one of numbers."""

    format: str
    """Name of the format that they were read from, like mnli."""
    head: str
    """What is trained on them: the model.head that fits, or another kind of training."""
    fields: tuple[str, ...]
    """Names of the sequences of text, in order; the numbers come behind them."""
    labels: tuple[str, ...] = ()
    """Names of the numbers from 0 on, where these are labels."""
    scale: int = 1
    """Numbers are stored times this: 1000 where they are scores."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What else its readers have to know."""

    __pydantic_config__ = _AS_WRITTEN


@dataclass(frozen=True)
class Sidecar:
    """Which tokenizer made a token file, and from what."""

    tokenizer_sha256: str
    vocab_size: int
    end_of_document: int | None
    """Token id behind each document; None: nothing was appended."""
    documents: int
    tokens: int
    text_bytes: int
    """Size of the text in UTF-8."""
    sources: tuple[str, ...]
    sentences: bool | None = None
    """Whether sequences are sentences, or else whole documents. None: not known."""
    index_sha256: str | None = field(default=None, compare=False)
    """Of the .idx, which is held against it when a run starts. None: written before, or by hand."""
    examples: ExampleFields | None = None
    """Of a file whose documents are examples of a task. None: they are text."""

    __pydantic_config__ = _AS_WRITTEN

    def as_json(self) -> bytes:
        """The content of its file. What of a name is not UTF-8 is told as a question mark."""
        sources = tuple(source.encode(errors="replace").decode() for source in self.sources)
        own = dataclasses.asdict(dataclasses.replace(self, sources=sources))
        known = {name: value for name, value in own.items() if name != "examples" or value}
        return (json.dumps(known, indent=2) + "\n").encode()


def sidecar_path(prefix: str | Path) -> Path:
    """Where the sidecar of a prefix is."""
    return Path(f"{prefix}.json")


_SIDECAR = TypeAdapter(Sidecar)


def files_of(prefix: str | Path) -> tuple[Path, Path, Path]:
    """All that a prefix names."""
    return bin_path(prefix), idx_path(prefix), sidecar_path(prefix)


def read_sidecar(file: TokenFile) -> Sidecar | None:
    """The sidecar of a token file, None where there is none; it must agree with the file's counts."""
    path = sidecar_path(file.local_prefix)
    if not path.is_file():
        return None
    try:
        sidecar = _SIDECAR.validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        why = f"{first['msg']} (at {'.'.join(map(str, first['loc'])) or 'the beginning'})"
        raise DataError(
            f"{path} does not describe a token file ({why}). Remove it to use the tokens without what it says about "
            "their tokenizer, or tokenize again."
        ) from error
    if (sidecar.documents, sidecar.tokens) != (file.num_documents, file.num_tokens):
        raise DataError(
            f"{path} speaks of {sidecar.documents:,} documents and {sidecar.tokens:,} tokens, but {file.prefix}.bin "
            f"has {file.num_documents:,} and {file.num_tokens:,}: they were not written together. Copy all three "
            "files from one source, or tokenize again."
        )
    return sidecar


def not_checked(prefix: str | Path, tokenizer: str) -> str:
    """What to say of a token file without a sidecar that is used with a tokenizer."""
    return (
        f"{prefix} has no {sidecar_path(Path(prefix).name)} beside it: that {tokenizer} made it cannot be checked, and "
        "bits per byte hold only if it did"
    )


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def merge_sidecars(parts: Sequence[tuple[str, Sidecar | None]]) -> Sidecar | None:
    """The sidecar of joined token files, given each one's prefix; None where one has none."""
    known = [(prefix, sidecar) for prefix, sidecar in parts if sidecar is not None]
    for prefix, sidecar in known:
        if sidecar.tokenizer_sha256 != known[0][1].tokenizer_sha256:
            raise DataError(
                f"{prefix} was made with another tokenizer (sha256 {sidecar.tokenizer_sha256[:12]}…) than "
                f"{known[0][0]} ({known[0][1].tokenizer_sha256[:12]}…): their token ids mean different text. "
                "Tokenize both with one."
            )
        if sidecar.examples != known[0][1].examples:
            raise DataError(
                f"{prefix} holds {_content(sidecar)}, {known[0][0]} {_content(known[0][1])}: their documents mean "
                "different things. Join files of one format."
            )
    _check_documents(known)
    if len(known) < len(parts):
        return None
    sidecars = [sidecar for _, sidecar in known]
    return dataclasses.replace(
        sidecars[0],
        documents=sum(sidecar.documents for sidecar in sidecars),
        tokens=sum(sidecar.tokens for sidecar in sidecars),
        text_bytes=sum(sidecar.text_bytes for sidecar in sidecars),
        sources=tuple(source for sidecar in sidecars for source in sidecar.sources),
        sentences=None if any(sidecar.sentences is None for sidecar in sidecars) else sidecars[0].sentences,
    )


def _content(sidecar: Sidecar) -> str:
    return "text" if sidecar.examples is None else f"examples of {sidecar.examples.format}"


def _check_documents(known: Sequence[tuple[str, Sidecar]]) -> None:
    """DataError where sequences are sentences in one file and whole documents in another, or documents end in another
    way.
    """
    told = [(prefix, sidecar.sentences) for prefix, sidecar in known if sidecar.sentences is not None]
    for prefix, sentences in told:
        if sentences != told[0][1]:
            apart, whole = (prefix, told[0][0]) if sentences else (told[0][0], prefix)
            raise DataError(
                f"{apart} keeps sentences apart, {whole} has a single sequence in each document: samples of sentences "
                "cannot be made of both. Tokenize both with --sentences, or both without."
            )
    for prefix, sidecar in known:
        end, first = sidecar.end_of_document, known[0][1].end_of_document
        if end is not None and first is not None and end != first:
            raise DataError(
                f"{prefix} has the end-of-document token {end} behind each document, {known[0][0]} {first}: where "
                "documents end in what is joined could not be told. Tokenize both again."
            )
        if end != first:
            ends, bare = (known[0][0], prefix) if end is None else (prefix, known[0][0])
            raise DataError(
                f"{ends} has the end-of-document token {first if end is None else end} behind each document, {bare} "
                "does not: where documents end in what is joined could not be told. Tokenize both with --append-end, "
                "or both with --no-append-end."
            )
