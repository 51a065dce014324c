"""GLUE's tasks: one text or two with a label, or with a score.

    .tsv                     GLUE's own columns (Wang et al., "GLUE", 2019; https://gluebenchmark.com/tasks)
    .json .jsonl .parquet    records with text_a, text_b and label, or with the columns of the .tsv

Labels are numbered as in the `glue` data set of Hugging Face, whose columns are read in all of them. Quotes in a .tsv
mean nothing; where it has that data set's column `idx`, they may be those of csv. A file without a column of labels, as
the test sets are, gives examples without labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colonnade.corpus.documents import Rejected
from colonnade.data.sidecar import ExampleFields
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError
from colonnade.examples.format import Document, Texts, encode_texts
from colonnade.examples.rows import OTHER_FORM, Row, json_rows, parquet_rows, tsv_rows

SCORES = 1000
"""Scores are stored in thousandths."""
_PLAIN = ("text_a", "text_b")
_NO_GOLD = "-"  # annotators did not agree


@dataclass(frozen=True)
class GlueFormat:
    """`Format` of one of GLUE's tasks."""

    name: str
    texts: tuple[str, ...]
    """Columns."""
    label: str
    """Column."""
    labels: tuple[str, ...] = ()
    """By their number; none: a score."""
    highest: float = 5.0
    """Scores go from 0 to this."""
    on_the_hub: tuple[str, ...] = ()
    """Columns of the texts in Hugging Face's data set, where they have other names there."""
    headless: tuple[str, ...] | None = None
    """Columns of a .tsv without a line that names them."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        return ()

    @property
    def fields(self) -> ExampleFields:
        texts = _PLAIN[: len(self.texts)]
        return ExampleFields(self.name, "classification", texts, self.labels, 1 if self.labels else SCORES)

    def read(self, path: Path) -> Iterator[Texts | Rejected]:
        match path.suffix:
            case ".tsv" | ".txt":
                rows = tsv_rows(path, self.headless)
            case ".json" | ".jsonl":
                rows = json_rows(path)
            case ".parquet":
                rows = parquet_rows(path)
            case _:
                kinds = ".tsv, .json, .jsonl and .parquet"
                raise DataError(f"{path}: examples of {self.name} are read from {kinds}. {OTHER_FORM}")
        return (row if isinstance(row, Rejected) else self._example(row) for row in rows)

    def encode(self, examples: Sequence[Texts], tokenizer: Tokenizer) -> Iterable[Document]:
        return encode_texts(examples, tokenizer)

    def _example(self, row: Row) -> Texts | Rejected:
        plain = _PLAIN[: len(self.texts)]
        columns = next((each for each in (plain, self.on_the_hub) if row.values.keys() & {*each[:1]}), self.texts)
        missing = [column for column in columns if not isinstance(row.values.get(column), str)]
        if missing:
            return row.rejected(f"no text in {' and '.join(missing)}; its columns are {', '.join(row.values)}")
        texts = tuple(row.values[column].strip() for column in columns)
        if not any(texts):
            return row.rejected("all its texts are empty")
        labels = list(dict.fromkeys(["label" if columns == plain else self.label, "label"]))
        numbers = self._numbers(next((row.values[label] for label in labels if label in row.values), None))
        if isinstance(numbers, str):
            return row.rejected(numbers)
        there = row.values.keys() & {*labels}
        told = "" if there else f"no column {' or '.join(labels)}; the columns are {', '.join(row.values)}"
        return Texts(texts, numbers, told)

    def _numbers(self, label: Any) -> tuple[int, ...] | str:
        """What is stored of a label or score, or why it is none."""
        if label is None or label in (-1, "-1", "-1.0"):
            return ()
        if label == _NO_GOLD:
            return f'no gold label ("{_NO_GOLD}"): its annotators did not agree'
        return self._label(str(label).strip()) if self.labels else self._score(label)

    def _label(self, label: str) -> tuple[int, ...] | str:
        if label in self.labels:
            return (self.labels.index(label),)
        if label.isdecimal() and len(label) < 10 and int(label) < len(self.labels):
            return (int(label),)
        return f'label "{label}": there are {", ".join(self.labels)} (0 to {len(self.labels) - 1})'

    def _score(self, label: Any) -> tuple[int, ...] | str:
        try:
            score = float(label)
        except (TypeError, ValueError, OverflowError):
            return f'score "{label}" is no number'
        if not 0 <= score <= self.highest:
            return f"score {score:g} is not within 0 to {self.highest:g}"
        return (round(score * SCORES),)


_NLI = ("entailment", "not_entailment")
_SENTENCES = ("sentence1", "sentence2")
GLUE = (
    GlueFormat(
        "cola", ("sentence",), "label", ("unacceptable", "acceptable"), headless=("source", "label", "star", "sentence")
    ),
    GlueFormat("sst2", ("sentence",), "label", ("negative", "positive")),
    GlueFormat("mrpc", ("#1 String", "#2 String"), "Quality", ("not_equivalent", "equivalent"), on_the_hub=_SENTENCES),
    GlueFormat("stsb", _SENTENCES, "score"),
    GlueFormat("qqp", ("question1", "question2"), "is_duplicate", ("not_duplicate", "duplicate")),
    GlueFormat(
        "mnli",
        _SENTENCES,
        "gold_label",
        ("entailment", "neutral", "contradiction"),
        on_the_hub=("premise", "hypothesis"),
    ),
    GlueFormat("qnli", ("question", "sentence"), "label", _NLI),
    GlueFormat("rte", _SENTENCES, "label", _NLI),
    GlueFormat("wnli", _SENTENCES, "label", ("not_entailment", "entailment")),
)
