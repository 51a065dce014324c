"""`colonnade data examples`: files of a benchmark to a token file with a sidecar that says what its documents are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import numpy as np

from colonnade.config.numbers import counted
from colonnade.corpus.documents import Rejected
from colonnade.data.example_dataset import missing_control
from colonnade.data.indexed import smallest_dtype
from colonnade.data.rejected import RejectedList, check_inputs, rejected_path
from colonnade.data.sidecar import ANSWERS, PREFERENCES, Sidecar
from colonnade.data.tokenizer import Tokenizer
from colonnade.data.writer import TokenFileWriter, check_prefix, held
from colonnade.errors import DataError, printable
from colonnade.examples.format import Document, Format
from colonnade.storage import as_given, not_here

_AT_ONCE = 1024  # examples that are tokenized together
_WRITTEN_BY_TEMPLATE = (ANSWERS, PREFERENCES)
"""For decoders, with the control tokens of their chat template. All other examples are read by a BERT alone."""


@dataclass(frozen=True)
class ExamplesReport:
    """What was made, and what was left out."""

    prefix: str
    format: str
    examples: int
    unlabelled: int
    why: str
    """Why the first of these has no label, where its file has no place for one."""
    tokens: int
    longest: int
    """[tokens] Of the texts of one example."""
    rejected: int
    first: tuple[Rejected, ...]
    """The first rows that were left out."""
    labels: dict[str, int]
    """Examples of each label, where there are labels."""
    missing: tuple[str, ...]
    """Control tokens that a model reads around these texts, and the tokenizer does not have."""

    def summary(self) -> str:
        """Some lines for people."""
        lines = [
            f"{counted(self.examples, 'example')} of {self.format} -> {self.tokens:,} tokens in {self.prefix}.bin and "
            f".idx; the longest has {counted(self.longest, 'token')} of text"
        ]
        if self.labels and self.unlabelled < self.examples:
            lines.append("labels: " + ", ".join(f"{name} {count:,}" for name, count in self.labels.items()))
        if self.unlabelled:
            why = f" ({self.why})" if self.why else ""
            lines.append(
                f"{counted(self.unlabelled, 'example')} without a label{why}: nothing can be trained or scored on them"
            )
        if self.missing:
            lines.append(
                f"note: the tokenizer has no {', '.join(self.missing)}, which stand around the texts of an example: no "
                "model can be trained on this file. Make it with the vocabulary of the BERT that is fine-tuned"
            )
        if self.rejected:
            where = rejected_path(self.prefix)
            lines.append(f"left out: {counted(self.rejected, 'row')}, listed in {where}; the first:")
            lines += [f"  {row}" for row in self.first]
        return printable("\n".join(lines))


def make_examples(
    format: Format, files: Sequence[str | Path], output: str | Path, tokenizer: Tokenizer, *, overwrite: bool = False
) -> ExamplesReport:
    """Write the examples of files as a token file. A row that is no example is left out, listed and counted.

    Raises DataError, with nothing written, for inputs that are missing or hold no example.
    """
    prefix = str(output)
    check_prefix(prefix)
    paths = _inputs(format, [Path(file) for file in files])
    check_inputs(prefix, paths)
    with held(prefix, "colonnade data examples", overwrite=overwrite):
        return _write(format, paths, prefix, tokenizer)


def _inputs(format: Format, files: Sequence[Path]) -> list[Path]:
    """The files that are meant: a folder stands for every file in it, at any depth, by name."""
    found: list[Path] = []
    for path in files:
        if path.is_dir() and format.suffixes:
            inside = sorted(each for each in path.rglob("*") if each.suffix in format.suffixes and each.is_file())
            if not inside:
                raise DataError(f"{path} is a folder without {' or '.join(format.suffixes)} in it. Name another.")
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            what = "is a folder: name its files." if path.is_dir() else f"does not exist.{not_here(path)}"
            examples = f"Examples of {format.fields.format}"
            raise DataError(f"{as_given(path)} {what} {examples} are read from files that are named.")
    return found


def _write(format: Format, paths: Sequence[Path], prefix: str, tokenizer: Tokenizer) -> ExamplesReport:
    counts = _Counts(tokenizer.vocab_size, len(format.fields.labels))
    with TokenFileWriter(prefix, smallest_dtype(tokenizer.vocab_size)) as writer, RejectedList(prefix) as rejected:
        for document in _documents(format, paths, tokenizer, rejected):
            counts.add(document)
            lengths = [len(sequence) for sequence in document.sequences]
            tokens = np.fromiter(chain.from_iterable(document.sequences), dtype=np.int64, count=sum(lengths))
            writer.add_document(tokens, lengths=lengths)
        if not counts.examples:
            first = f" The first: {rejected.examples[0]}." if rejected.examples else " The files have no rows."
            raise DataError(
                f"{', '.join(map(str, paths))}: no example of {format.fields.format}, and "
                f"{counted(rejected.count, 'row')} that {'is' if rejected.count == 1 else 'are'} none.{first} Check "
                "the files, and the format."
            )
        rejected.put_on_disk()
        writer.close(_sidecar(format, paths, tokenizer, writer, counts))
    labels = dict(zip(format.fields.labels, counts.labels.tolist(), strict=True))
    return ExamplesReport(
        prefix,
        format.fields.format,
        counts.examples,
        counts.unlabelled,
        counts.why,
        writer.num_tokens,
        counts.longest,
        rejected.count,
        tuple(rejected.examples),
        labels,
        () if format.fields.head in _WRITTEN_BY_TEMPLATE else tuple(missing_control(tokenizer)),
    )


def _documents(
    format: Format, paths: Sequence[Path], tokenizer: Tokenizer, rejected: RejectedList
) -> Iterator[Document]:
    rows = chain.from_iterable(format.read(path) for path in paths)
    while some := list(islice(rows, _AT_ONCE)):
        rejected.add(row for row in some if isinstance(row, Rejected))
        for document in format.encode([row for row in some if not isinstance(row, Rejected)], tokenizer):
            if isinstance(document, Rejected):
                rejected.add([document])
            else:
                yield document


class _Counts:
    """What has gone by."""

    def __init__(self, vocab_size: int, num_labels: int) -> None:
        self.examples = self.unlabelled = self.longest = self.text_bytes = 0
        self.labels, self.why = np.zeros(num_labels, dtype=np.int64), ""
        self._vocab_size = vocab_size

    def add(self, document: Document) -> None:
        """One more. DataError for a number that cannot be stored."""
        if not document.has_numbers:
            self.examples += 1
            self.longest = max(self.longest, sum(map(len, document.sequences)))
            self.text_bytes += document.text_bytes
            return
        *texts, numbers = document.sequences
        wrong = [number for number in numbers if not 0 <= number < self._vocab_size]
        if wrong:
            raise DataError(
                f"example {self.examples + 1:,} has the number {wrong[0]:,}, and a token file of {self._vocab_size:,} "
                "ids stores numbers below that. Use a larger vocabulary."
            )
        self.examples += 1
        self.unlabelled += not numbers
        self.why = self.why or document.unlabelled
        self.longest = max(self.longest, sum(map(len, texts)))
        self.text_bytes += document.text_bytes
        if len(self.labels) and numbers:
            self.labels[numbers[0]] += 1


def _sidecar(
    format: Format, paths: Sequence[Path], tokenizer: Tokenizer, writer: TokenFileWriter, counts: _Counts
) -> Sidecar:
    return Sidecar(
        tokenizer_sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        end_of_document=None,
        documents=writer.num_documents,
        tokens=writer.num_tokens,
        text_bytes=counts.text_bytes,
        sources=tuple(map(str, paths)),
        examples=format.fields,
    )
