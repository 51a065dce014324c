"""Questions about texts, answered by a model: its logits over every window, and the answers chosen of them.

Batches are cut before ranks share them, so that every layout reads the same windows side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colonnade.data.example_dataset import PairTokens
from colonnade.data.question_windows import CONTROL_TOKENS, Integers, Windows, most_context
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, DataError
from colonnade.evaluation.answers import Answers, Selection, WindowScores, answers_of
from colonnade.evaluation.perplexity import Hidden
from colonnade.evaluation.progress import Progress
from colonnade.examples.squad import Question
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.mesh import Mesh
from colonnade.model.bert_spans import SpanBERT, SpanInputs

Logits = NDArray[np.float64]


@dataclass(frozen=True)
class Prepared:
    """A question as a model reads it."""

    question: Question
    asked: Integers
    """Its tokens."""
    text: Integers
    """Those of its context."""
    places: Integers
    """[tokens of text, 2]: the characters that each stands for."""
    windows: Sequence[range]


def prepare(questions: Sequence[Question], tokenizer: Tokenizer, windows: Windows, length: int) -> list[Prepared]:
    """Tokens and windows of questions. DataError for one that cannot be read at this length."""
    asked = tokenizer.encode_batch([each.text for each in questions])
    contexts = list(dict.fromkeys(each.context for each in questions))
    encoded = dict(zip(contexts, tokenizer.encode_places(contexts), strict=True))
    found = []
    for question, ids in zip(questions, asked, strict=True):
        text, places = encoded[question.context]
        cut = ids[: windows.max_query_length]
        ranges = windows.ranges(len(cut), len(text), length)
        if not text or not ranges:
            why = (
                f"{len(cut):,} tokens, and a window of {length:,} leaves no room for text behind them. Shorten "
                "it, or with `evaluate` use a larger --window or a smaller --max-query-length"
                if text
                else "a context without a token, which nothing can be answered from. Remove it"
            )
            raise DataError(f'{question.file}: question "{question.name}" has {why}.')
        found.append(Prepared(question, np.array(cut, np.int64), np.array(text, np.int64), places, ranges))
    return found


def choose(
    questions: Sequence[Prepared], logits: Logits, selection: Selection, *, may_be_none: bool
) -> dict[str, Answers]:
    """The answers to all questions by id, of what `logits_of` gives, or of a mean of several models' logits.

    CheckpointError for logits that are not finite.
    """
    if not np.isfinite(logits).all():
        raise CheckpointError.of_broken_weights("logits of where answers begin and end")
    rows = iter(logits)
    return {
        each.question.name: answers_of(
            list(_scores(each, rows)), each.question.context, each.places, selection, may_be_none=may_be_none
        )
        for each in questions
    }


@torch.no_grad()
def logits_of(
    model: SpanBERT,
    questions: Sequence[Prepared],
    *,
    control: PairTokens,
    mesh: Mesh,
    hidden: Hidden,
    length: int,
    batch_size: int,
    progress: Progress,
) -> Logits:
    """[windows, length, 2] of the windows of all questions, the same on every rank; of padding 0. All-reduces them over
    dp and pp, at the end.
    """
    windows = [(each, window) for each in questions for window in each.windows]
    device, parallel = next(model.parameters()).device, model.parallel
    multiple = parallel.tp.size if parallel.sequence_parallel else 1
    found = torch.zeros(len(windows), length, 2, dtype=torch.float64)
    batches = [range(begin, min(begin + batch_size, len(windows))) for begin in range(0, len(windows), batch_size)]
    mine = batches[mesh.data.rank :: mesh.data.size]
    progress.begin(sum(map(len, mine)), sum(map(len, mine)) * length)
    rounds = -(-len(batches) // mesh.data.size)  # as many on each rank of dp: they may gather weights for each other
    for number in range(rounds):
        batch = mine[number] if number < len(mine) else batches[0]  # once more, for nothing
        carry = hidden(_inputs([windows[each] for each in batch], control, device, multiple))
        if number >= len(mine):
            break
        if carry is not None:
            ours: Tensor = model.head.predict(model.residual(carry)).double().cpu()  # [s, b, 2]
            found[batch.start : batch.stop, : len(ours)] = ours.transpose(0, 1)
        progress.advance(len(batch), len(batch) * length)
    result: Logits = all_reduce(all_reduce(found.to(device), mesh.data), mesh.pp).cpu().numpy()
    return result


def _inputs(
    windows: Sequence[tuple[Prepared, range]], control: PairTokens, device: torch.device, multiple: int
) -> SpanInputs:
    """Windows side by side, padded to the longest, and to a multiple of so many tokens."""
    longest = max(len(each.asked) + len(window) + CONTROL_TOKENS for each, window in windows)
    longest += -longest % multiple
    made = [control.sequence(each.asked, each.text[window.start : window.stop], longest) for each, window in windows]
    tokens, types, real = (torch.from_numpy(np.stack(parts, axis=1)).to(device) for parts in zip(*made, strict=True))
    return SpanInputs(tokens, types=types, real=real)


def _scores(each: Prepared, logits: Iterator[NDArray[np.float64]]) -> Iterator[WindowScores]:
    """Of the windows of one question, which are next among the logits."""
    first = len(each.asked) + 2
    for window, begins in zip(each.windows, most_context(each.windows), strict=True):
        whole = next(logits)
        inside = whole[first : first + len(window)]
        yield WindowScores(window.start, inside[:, 0], inside[:, 1], begins, (float(whole[0, 0]), float(whole[0, 1])))
