"""The perplexity of a file: tokens on disk, or text that is tokenized first.

Documents stand behind one another with the end-of-document token between them, as in training. What ends the last one
is not scored: nothing has to follow it. So a text and the token file that `data tokenize` makes of it have the same
perplexity. A model that was trained on separate or packed documents is measured on such, in both.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from colonnade.corpus.documents import Rejected, chunks, expand, parse
from colonnade.data.datasets import check_text, open_tokens
from colonnade.data.indexed import bin_path, idx_path
from colonnade.data.rows import Cut
from colonnade.data.sidecar import ANSWERS, not_checked, read_sidecar
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError
from colonnade.evaluation.perplexity import JOINED, Hidden, Perplexity, evaluate_tokens
from colonnade.evaluation.progress import Progress
from colonnade.evaluation.wikitext import WikiText
from colonnade.mesh.mesh import Mesh
from colonnade.model.gpt import GPT

BATCH_SIZE = 8
"""[windows] That are read at once, where nothing else is asked for."""
NO_BYTES = "no bits per byte: the tokenizer is not byte-level, so that bytes of text cannot be counted from its tokens"


class Tokenized(NamedTuple):
    """A text as tokens."""

    tokens: NDArray[np.integer]
    starts: NDArray[np.int64]
    """Where documents begin."""
    words: int | None
    """What white space separates in the text, where that is at hand."""
    checked: bool = True
    """Whether the tokens are known to be this tokenizer's."""
    answers: NDArray[np.bool_] | None = None
    """Which of them are parts of answers; None: it is not marked."""


def perplexity_of_file(
    model: GPT,
    file: str,
    *,
    tokenizer: Tokenizer,
    mesh: Mesh,
    hidden: Hidden | None = None,
    seq_length: int | None = None,
    stride: int | None = None,
    batch_size: int = BATCH_SIZE,
    words: int | None = None,
    key: str = "text",
    cut: Cut = JOINED,
    progress: Progress | None = None,
) -> Perplexity:
    """Evaluate `file`: the prefix of a token file, a .txt or .jsonl (also compressed), or a folder of those.

    Windows and `cut` as in `evaluate_tokens`. `words` normalises the word perplexity; None: what white space separates
    in a text of joined documents, and no word perplexity else: separate documents begin with words of which a part is
    not scored. `key`: of the text in a .jsonl.
    """
    text = (
        tokens_of_file(file, tokenizer, model.vocab_size)
        if is_token_file(file)
        else tokens_of_text(file, tokenizer, key=key)
    )
    lengths = torch.from_numpy(tokenizer.byte_lengths()) if tokenizer.is_byte_level else None
    result = evaluate_tokens(
        model,
        text.tokens,
        starts=text.starts,
        answers=text.answers,
        cut=cut,
        dp=mesh.data,
        pp=mesh.pp,
        hidden=hidden,
        seq_length=seq_length,
        stride=stride,
        batch_size=batch_size,
        byte_lengths=lengths,
        words=text.words if words is None and cut == JOINED else words,
        progress=progress,
    )
    notes = tuple(_notes(file, text, tokenizer, cut))
    return replace(result, tokenizer_checked=text.checked, notes=notes)


def perplexity_of_wikitext(
    model: GPT,
    test: WikiText,
    *,
    tokenizer: Tokenizer,
    mesh: Mesh,
    hidden: Hidden | None = None,
    seq_length: int,
    stride: int,
    batch_size: int = BATCH_SIZE,
    progress: Progress | None = None,
) -> Perplexity:
    """Evaluate a test set of words as one text; its `word_perplexity` is the one that the paper gives."""
    lengths = torch.from_numpy(tokenizer.byte_lengths()) if tokenizer.is_byte_level else None
    result = evaluate_tokens(
        model,
        np.array(tokenizer.encode(test.text), dtype=np.int64),
        dp=mesh.data,
        pp=mesh.pp,
        hidden=hidden,
        seq_length=seq_length,
        stride=stride,
        batch_size=batch_size,
        byte_lengths=lengths,
        words=test.original_tokens,
        progress=progress,
    )
    return result if tokenizer.is_byte_level else replace(result, notes=(NO_BYTES,))


def _notes(file: str, text: Tokenized, tokenizer: Tokenizer, cut: Cut) -> Iterator[str]:
    if not text.checked:
        yield not_checked(file, "the checkpoint's tokenizer")
    if not tokenizer.is_byte_level:
        yield NO_BYTES
    if tokenizer.end_of_document is None and len(text.starts) > 1 and text.words is not None:
        yield (
            f"the tokenizer has no end-of-document token: the {len(text.starts):,} documents follow one another with "
            "nothing between them"
        )
    if cut.answers and text.answers is None:
        yield "no answers are marked in it: all of its tokens are scored, though the run counts answers alone"
    if text.words is not None and cut != JOINED:
        yield "no perplexity a word: the run's [data] leaves some tokens unscored, so that parts of words are missing"


def is_token_file(file: str) -> bool:
    """Whether a name is meant as the prefix of a token file, or is one of its two files (which has its own message)."""
    return idx_path(file).is_file() or bin_path(file).is_file() or Path(file).suffix in (".bin", ".idx")


def tokens_of_file(prefix: str, tokenizer: Tokenizer, vocab_size: int) -> Tokenized:
    """All tokens of a token file but an end of document at its very end."""
    file = open_tokens(prefix, vocab_size=vocab_size, tokenizer=tokenizer)
    file.check_index()
    check_text(file, trained=False)
    tokens = without_last_end(file.read(0, file.num_tokens), tokenizer)
    sidecar, starts = read_sidecar(file), file.document_starts(0, len(tokens))
    marked = sidecar is not None and sidecar.examples is not None and sidecar.examples.head == ANSWERS
    answers = file.answered(0, len(tokens)) if marked else None
    return Tokenized(tokens, starts, None, checked=sidecar is not None, answers=answers)


def tokens_of_text(file: str, tokenizer: Tokenizer, *, key: str = "text") -> Tokenized:
    """Tokens of all documents, an end of document between them. A bad line is an error."""
    if not Path(file).exists():
        raise DataError(
            f"{file} does not exist, and there is no {file}.bin with {file}.idx. Name a text (.txt, .jsonl, also "
            "compressed), or the prefix of a token file."
        )
    end = [] if tokenizer.end_of_document is None else [tokenizer.end_of_document]
    parts, words = [], 0
    for document in _documents(file, key):
        parts.append(np.array(tokenizer.encode(document) + end, dtype=np.int64))
        words += len(document.split())
    starts = np.cumsum([0, *map(len, parts)])[:-1]
    tokens = without_last_end(np.concatenate([np.empty(0, np.int64), *parts]), tokenizer)
    return Tokenized(tokens, starts, words)


def without_last_end(tokens: NDArray[np.integer], tokenizer: Tokenizer) -> NDArray[np.integer]:
    """All tokens but an end of document at the very end."""
    return tokens[:-1] if len(tokens) and tokens[-1] == tokenizer.end_of_document else tokens


def _documents(file: str, key: str) -> list[str]:
    documents = [document for chunk in chunks(expand([file])) for document in parse(chunk, key)]
    for document in documents:
        if isinstance(document, Rejected):
            raise DataError(
                f"{document}. The perplexity of the rest would not be the file's. Fix or remove the line; or run "
                "`colonnade data tokenize`, which leaves such lines out and lists them, and evaluate what it writes."
            )
    return [document for document in documents if isinstance(document, str) and document]
