"""A tokenizer from files of text, and what of them it was not trained on."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from colonnade.config.numbers import counted
from colonnade.corpus.documents import Rejected, look_at, read_documents
from colonnade.corpus.folders import told_aside
from colonnade.data.tokenizer import Tokenizer, train_bpe
from colonnade.data.wordpiece import train_wordpiece
from colonnade.errors import DataError, printable
from colonnade.outputs import check_output

_EXAMPLES = 10
LARGEST = 10_000_000
"""[tokens] Of a vocabulary: room for all of it is set aside at the beginning."""


@dataclass(frozen=True)
class TrainedTokenizer:
    """A tokenizer, and what of the inputs it was not trained on."""

    tokenizer: Tokenizer
    documents: int
    rejected: int
    """Lines, or files, that were no documents, left out."""
    examples: tuple[Rejected, ...]
    """The first of them."""
    left_aside: dict[str, int]
    """Files of other kinds in the input folders, by ending; fifos, broken links and the like, by what they are."""

    def summary(self, output: str | Path) -> str:
        """Some lines for people."""
        lines = [f"{output}: {self.tokenizer.vocab_size:,} tokens."]
        lines += told_aside(self.left_aside)
        if self.rejected:
            lines.append(f"left out: {counted(self.rejected, 'unusable document')}; the first:")
            lines += [f"  {example}" for example in self.examples]
        return printable("\n".join(lines))


def train_tokenizer(
    inputs: Iterable[str | Path],
    output: str | Path,
    vocab_size: int,
    *,
    kind: Literal["bpe", "wordpiece"] = "bpe",
    sentinels: int = 0,
    key: str = "text",
    min_frequency: int = 2,
    overwrite: bool = False,
    progress: bool = True,
) -> TrainedTokenizer:
    """Train a byte-level BPE, or a WordPiece vocabulary, on the documents of files and write its tokenizer.json.
    `sentinels`: so many tokens of a BPE mark the spans of T5 samples.
    """
    if sentinels < 0 or (sentinels and kind != "bpe"):
        raise DataError(
            f"--sentinels {sentinels} with --kind {kind}: a BPE can have sentinels, none or more. Use --kind bpe, or "
            "leave --sentinels out."
        )
    if vocab_size > LARGEST:
        raise DataError(
            f"--vocab-size {vocab_size}: there is room for {LARGEST:,} tokens at most, and no text fills as many. Ask "
            "for some tens of thousands."
        )
    inputs = list(inputs)
    found = look_at(inputs)
    check_output(output, (".json",), inputs=found.files)  # other names say another kind of tokenizer
    if Path(output).is_file() and not overwrite:
        raise DataError(f"{output} exists. Choose another output, or pass --overwrite.")
    seen, rejected = 0, list[Rejected]()

    def texts() -> Iterable[str]:
        nonlocal seen
        seen = 0
        rejected.clear()
        for text in read_documents(inputs, key=key, rejected=rejected):
            seen += bool(text)
            yield text

    shown = progress and sys.stderr.isatty()
    if kind == "bpe":
        made = train_bpe(texts(), vocab_size, sentinels=sentinels, min_frequency=min_frequency, progress=shown)
    else:
        made = Tokenizer(train_wordpiece(texts, vocab_size, min_frequency=min_frequency, progress=shown))
    if not seen:
        raise DataError(_nothing_to_train_on(rejected, key))
    try:
        made.save(output)
    except OSError as error:
        raise DataError(f"{output} cannot be written: {error}. Choose another output.") from error
    return TrainedTokenizer(made, seen, len(rejected), tuple(rejected[:_EXAMPLES]), found.left_aside)


def _nothing_to_train_on(rejected: Sequence[Rejected], key: str) -> str:
    if not rejected:
        return "the inputs hold no text at all: nothing to train a tokenizer on. Check the files."
    first = "".join(f"\n  {each}" for each in rejected[:_EXAMPLES])
    advice = (
        f"Check --key (it is {key!r})." if any("no key" in each.reason for each in rejected) else "Check the files."
    )
    return (
        f"no document of the inputs can be used: nothing to train a tokenizer on. {advice} Left out: "
        f"{counted(len(rejected), 'unusable document')}; the first:{first}"
    )
