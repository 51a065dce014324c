"""Perplexity and bits per byte: how well a model predicts a text, token by token, without dropout.

    loss             mean cross entropy of the scored tokens, in nats
    perplexity       exp(loss); depends on the tokenizer
    bits_per_byte    sum of the losses / ln 2 / bytes of UTF-8 that the scored tokens stand for; compares tokenizers
    word_perplexity  exp(sum of the losses / words): the WikiText-103 protocol of the Megatron-LM paper (appendix E)

Tokens that stand for no text (end of document) have a loss and no bytes: predicting where documents end is paid for.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colonnade.data.loader import Batch, evaluation_positions
from colonnade.data.rows import Cut
from colonnade.data.whole_rows import WholeRows
from colonnade.errors import ConfigError, DataError
from colonnade.evaluation.progress import Progress
from colonnade.evaluation.rows import PackedText, ScoredRows, TokenText, WindowRows, batches_of
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.mesh import Axis
from colonnade.model.gpt import GPT
from colonnade.model.inputs import Inputs
from colonnade.pipeline.carry import Carry
from colonnade.pipeline.inference import on_one_stage

_LARGEST_EXPONENT = 709.0
"""Of what float64 can hold exp of."""
_ONE_STAGE = Axis("pp")
JOINED = Cut()
NO_STARTS = np.empty(0, dtype=np.int64)

Hidden = Callable[[Inputs], Carry | None]
"""Computes what goes into the loss; None on pipeline stages that do not have it."""


class NothingScored(DataError):
    """Of what is to be evaluated no label counts."""


def perplexity_in_words(perplexity: float) -> str:
    """1,234.56, and 1.23e+30 where nobody counts digits."""
    return f"{perplexity:,.2f}" if perplexity < 1e9 else f"{perplexity:.3g}"


@dataclass(frozen=True)
class Perplexity:
    """What an evaluation found, the same on every rank."""

    loss: float
    """[nats a token]"""
    perplexity: float
    bits_per_byte: float | None
    """None where the tokens' bytes are not known."""
    tokens: int
    """Scored tokens."""
    bytes: int | None
    """Text that the scored tokens stand for."""
    words: int | None = None
    word_perplexity: float | None = None
    """None where the number of words is not known, or not one to divide by (text without spaces overflows)."""
    tokenizer_checked: bool = True
    """False: the token file does not say which tokenizer made it, so that bytes and bits per byte hold only if it was
    the model's."""
    notes: tuple[str, ...] = ()
    """What could not be checked or is left out, and why."""

    def numbers(self) -> dict[str, float]:
        """For metrics."""
        known = {} if self.bits_per_byte is None else {"bits_per_byte": self.bits_per_byte}
        return {"loss": self.loss, "perplexity": self.perplexity, **known}

    def summary(self) -> str:
        """One line for people."""
        parts = [f"loss {self.loss:.4f}", f"perplexity {perplexity_in_words(self.perplexity)}"]
        if self.word_perplexity is not None:
            parts.append(f"{perplexity_in_words(self.word_perplexity)} a word ({self.words:,} words)")
        if self.bits_per_byte is not None:
            unchecked = "" if self.tokenizer_checked else ", tokenizer not checked"
            parts.append(f"{self.bits_per_byte:.4f} bits per byte ({self.bytes:,} bytes{unchecked})")
        return ", ".join([*parts, f"{self.tokens:,} tokens"])


@torch.no_grad()
def evaluate(
    model: GPT,
    batches: Iterable[Batch],
    *,
    dp: Axis,
    pp: Axis = _ONE_STAGE,
    hidden: Hidden | None = None,
    byte_lengths: Tensor | None = None,
    words: int | None = None,
) -> Perplexity:
    """Score every label that its batch's mask counts. Each dp rank brings its own batches, or none.

    `hidden`: how the model's stages compute what goes into the loss; None: this rank has all of them. `byte_lengths`
    [tokenizer's vocabulary]: bytes of text that each token stands for. `words`: of the whole text, over all ranks. Sums
    are float64; all-reduces 3 numbers over dp and over pp, at the end.
    """
    hidden = hidden or on_one_stage(model, model.architecture.units).hidden
    device = next(model.parameters()).device
    lengths = None if byte_lengths is None else _lengths_of_all(byte_lengths, model.vocab_size).to(device)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in batches:
        sums += _loss_tokens_bytes(model, batch.to(device), hidden, lengths)
    loss, tokens, num_bytes = all_reduce(all_reduce(sums, dp), pp).tolist()
    if tokens == 0:
        raise NothingScored(
            "the evaluation has no token to score: no batches, or every label is masked. Give it more text."
        )
    return _perplexity(loss, tokens, None if lengths is None else num_bytes, words)


def evaluate_tokens(
    model: GPT,
    tokens: NDArray[np.integer],
    *,
    dp: Axis,
    pp: Axis = _ONE_STAGE,
    hidden: Hidden | None = None,
    seq_length: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
    byte_lengths: Tensor | None = None,
    words: int | None = None,
    cut: Cut = JOINED,
    starts: NDArray[np.int64] = NO_STARTS,
    answers: NDArray[np.bool_] | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """Score tokens 1, 2, … of one long text by sliding windows (see `windows`), shared by the dp ranks.

    `seq_length` None: the length that the model was trained on; a model without learned positions reads longer ones.
    `stride` None: seq_length, so that windows do not overlap. The
    paper's WikiText-103 numbers: seq_length 1024, stride 32. Time grows as seq_length / stride.

    `cut`: how the model's training made samples of documents, which begin at the tokens `starts`. Packed documents are
    scored as packed where no stride is given, and in sliding windows of separate documents where one is. `answers`:
    which tokens are answers, where these alone are scored (`Cut.answers`); None: it is not known, and all are.
    """
    seq_length = model.seq_length if seq_length is None else seq_length
    _check(seq_length, seq_length if stride is None else stride, batch_size, model.longest)
    if len(tokens) < 2:
        raise DataError(
            f"the text has {len(tokens)} tokens, and the first one has nothing before it to be predicted from. Give 2 "
            "tokens or more."
        )
    text = TokenText(tokens, starts, model.vocab_size, seq_length, answers)
    rows: ScoredRows = WindowRows(text, stride or seq_length, cut)
    if stride is None and (cut.best_fit or cut.whole):
        rows = PackedText(text, cut) if cut.best_fit else WholeRows(text, replace(cut, too_long="cut"))
    microbatches = evaluation_positions(len(rows), micro_batch_size=batch_size, dp_rank=dp.rank, dp_size=dp.size)
    batches = _watched(batches_of(rows, microbatches), microbatches, seq_length, progress or Progress("", shown=False))
    return evaluate(model, batches, dp=dp, pp=pp, hidden=hidden, byte_lengths=byte_lengths, words=words)


def _watched(
    batches: Iterable[Batch], microbatches: Sequence[range], seq_length: int, progress: Progress
) -> Iterator[Batch]:
    """The batches, each counted when the next is asked for."""
    windows = sum(map(len, microbatches))
    progress.begin(windows, windows * seq_length)
    for numbers, batch in zip(microbatches, batches, strict=True):
        yield batch
        progress.advance(len(numbers), len(numbers) * seq_length)


def _loss_tokens_bytes(model: GPT, batch: Batch, hidden: Hidden, lengths: Tensor | None) -> Tensor:
    """Sums over a batch, float64 [3]; zeros on stages without the head."""
    scored = batch.loss_mask.any(1)  # the output layer skips positions that no sample counts: most, in sliding windows
    mask, labels = batch.loss_mask[scored].double(), batch.labels[scored]
    carry = hidden(Inputs(batch.tokens, documents=batch.documents, positions=batch.positions))
    if carry is None or not len(labels):
        return mask.new_zeros(3)
    losses = model.head.token_losses(model.residual(carry)[scored], labels)
    num_bytes = mask.new_zeros(()) if lengths is None else (lengths[labels] * mask).sum()
    return torch.stack([(losses.double() * mask).sum(), mask.sum(), num_bytes])


def _lengths_of_all(byte_lengths: Tensor, vocab_size: int) -> Tensor:
    """[tokenizer's vocabulary] -> [v]: a model may have more ids than its tokenizer, and those stand for no text."""
    lengths = torch.zeros(vocab_size, dtype=torch.int64)
    known = byte_lengths[:vocab_size]
    lengths[: len(known)] = known
    return lengths


def _perplexity(loss: float, tokens: float, num_bytes: float | None, words: int | None) -> Perplexity:
    """Of sums over the scored tokens: each counts as its mask says, which need not be 1."""
    return Perplexity(
        loss=loss / tokens,
        perplexity=exp_of(loss / tokens),
        bits_per_byte=loss / math.log(2.0) / num_bytes if num_bytes else None,
        tokens=round(tokens),
        bytes=None if num_bytes is None else round(num_bytes),
        words=words,
        word_perplexity=exp_of(loss / words) if words and loss / words < _LARGEST_EXPONENT else None,
    )


def exp_of(x: float) -> float:
    return math.inf if x > _LARGEST_EXPONENT else math.exp(x)


def _check(seq_length: int, stride: int, batch_size: int, longest: int | None) -> None:
    if longest is not None and not 1 <= seq_length <= longest:
        raise ConfigError(
            f"seq_length = {seq_length:,}, but the model has learned {longest:,} positions. Use 1 to {longest:,}."
        )
    if seq_length < 1:
        raise ConfigError(f"seq_length = {seq_length:,}: a window has tokens. Use 1 or more.")
    if not 1 <= stride <= seq_length:
        raise ConfigError(
            f"stride = {stride:,} does not go with seq_length = {seq_length:,}: windows have to move, and no further "
            f"than they are long, or tokens are left out. Use 1 to {seq_length:,}."
        )
    if batch_size < 1:
        raise ConfigError(f"batch_size = {batch_size}: at least one window has to be read at a time. Use 1 or more.")
