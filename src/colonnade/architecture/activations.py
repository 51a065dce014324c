"""How many bytes a micro-batch leaves behind in each unit for its backward, on one rank. Pure.

Counted from what the operators of `model/` keep. A = s·b tokens where a tp rank computes its part of a layer, T of the
residual stream (A, or A/tp under sequence parallelism); c bytes of the compute type, r of the stream, e of norms'
statistics, w of what attention multiplies with (c, or 4 where a CPU widens bf16):

    block, pre-norm                                                 bytes
        2 norms      input of the second (its own type), statistics T·h·r + 4·T·e
        2 norms      results, which the linear layers after them keep 2·T·h·c
        attention    q, k, v, its result, a number a row            A·(3h·w + h·w)/tp + …     (see `_attention`)
        mlp          before and after GELU                          2·A·f·c/tp
        2 dropouts   masks, a byte an element                       2·T·h
        documents    what tokens see, a byte a pair: once a chunk   b·s²
        the stream   that it hands on                               T·h·r

A micro-batch's activations in "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al.,
2022, section 4) are the same count for another program: 34·s·b·h + 5·n·s²·b bytes a block for bf16 without tp.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from colonnade.config.schema import ModelConfig, ParallelConfig

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


class Handed(NamedTuple):
    """One tensor of what a unit hands on."""

    size: int
    """[bytes]"""
    source: int | None = None
    """Its place in what came in, where it is handed on as it is; None: the unit makes it."""
    has_gradient: bool = True


@dataclass(frozen=True)
class Kept:
    """Bytes that one micro-batch leaves in one unit."""

    inside: int
    """For the unit's backward, besides its input and output."""
    out: tuple[Handed, ...] = ()
    """The carry that it hands on, which is the next unit's input; () where it makes the loss."""
    deferred: int = 0
    """What deferred weight gradients (zero-bubble's W) hold on to: inputs and output gradients of linear layers."""
    shared: int = 0
    """What all units of a micro-batch share: made by the first that needs it, and alive while one of them keeps it."""
    unread: tuple[int, ...] = ()
    """Places in what comes in of tensors that it does not compute with: their gradients get nothing from it."""

    @property
    def made(self) -> int:
        """Of what the unit hands on: what it did not take."""
        return sum(handed.size for handed in self.out if handed.source is None)


@dataclass(frozen=True)
class Microbatch:
    """What activations depend on."""

    model: ModelConfig
    parallel: ParallelConfig
    size: int
    """[samples]"""
    precision: Precision
    widened: bool = False
    """Products are computed in fp32 (bf16 on a CPU without matrix units for it)."""
    separate_documents: bool = False
    """Documents in a sample do not see each other."""

    @property
    def tokens(self) -> int:
        """A: where each tp rank has part of every layer."""
        return self.model.seq_length * self.size

    @property
    def stream_tokens(self) -> int:
        """T: of the residual stream on one rank."""
        return self.tokens // self.parallel.tp if self.parallel.sequence_parallel else self.tokens

    @property
    def compute(self) -> int:
        """c"""
        return COMPUTE_BYTES[self.precision]

    @property
    def product(self) -> int:
        """w"""
        return max(self.compute, 4) if self.widened else self.compute

    @property
    def exact(self) -> int:
        """e: fp32, or fp64."""
        return max(self.compute, 4)

    @property
    def stream(self) -> int:
        """[bytes] The residual stream, as it passes from unit to unit and from stage to stage."""
        return self.stream_tokens * self.model.hidden_size * self._residual

    @property
    def visible(self) -> int:
        """[bytes] What tokens see of their documents."""
        return self.tokens * self.model.seq_length if self.separate_documents else 0

    @property
    def _residual(self) -> int:
        """r"""
        return self.exact if self.model.fp32_residual else self.compute


def embedding_kept(batch: Microbatch) -> Kept:
    """Of tokens, positions and the embedding norm, where there is one."""
    rows = 9 * batch.tokens  # int64 rows, and whether they are this rank's
    norm = batch.stream + _statistics(batch) if batch.model.embedding_norm else 0
    return Kept(rows + norm + _mask(batch), (Handed(batch.stream),))


def head_kept(batch: Microbatch) -> Kept:
    """Of the final norm, where there is one, and the output loss, which has its gradient after forward."""
    statistics = _statistics(batch) if batch.model.norm_position == "pre" else 0
    return Kept(statistics + batch.tokens * batch.model.hidden_size * batch.compute)


def block_kept(batch: Microbatch) -> Kept:
    """Of a transformer block."""
    return Kept(_block(batch), (Handed(batch.stream),), deferred=_deferred(batch), shared=batch.visible)


def _block(batch: Microbatch) -> int:
    model, tp = batch.model, batch.parallel.tp
    mlp = 2 * batch.tokens * model.ffn * batch.compute // tp
    inner = 2 * (_statistics(batch) + _mask(batch)) + _attention(batch) + mlp
    inputs = batch.stream_tokens * model.hidden_size * batch.compute  # of a linear layer that reads the stream
    if model.norm_position == "pre":
        return inner + 2 * inputs + batch.stream
    normed = 2 * inputs if inputs != batch.stream else batch.stream  # where the stream is rounded, both copies are kept
    return inner + normed + 2 * batch.stream  # and what the norms read


def _attention(batch: Microbatch) -> int:
    """Between the first linear layer and the last one's input, that included.

    Without dropout torch's kernel keeps q, k, v, its result and a log-sum-exp a row. With dropout the probabilities and
    the mask are kept, or computed again from q, k, v.
    """
    model, tp = batch.model, batch.parallel.tp
    hidden = batch.tokens * model.hidden_size // tp
    rows = batch.tokens * model.num_heads // tp
    result = hidden * batch.compute
    if model.attention_dropout == 0.0:
        rounded = result if batch.product != batch.compute else 0
        return 4 * hidden * batch.product + rows * batch.exact + rounded
    if batch.parallel.recompute == "selective":
        return 3 * hidden * batch.compute + result
    return 3 * hidden * batch.product + rows * model.seq_length * (batch.product + 1) + result


def _deferred(batch: Microbatch) -> int:
    model, tp = batch.model, batch.parallel.tp
    hidden, ffn = model.hidden_size, model.ffn
    inputs = (2 * batch.stream_tokens * hidden + batch.tokens * (hidden + ffn) // tp) * batch.compute
    gradients = (2 * batch.tokens * hidden + batch.tokens * (3 * hidden + ffn) // tp) * batch.product
    return inputs + gradients


def _statistics(batch: Microbatch) -> int:
    """A norm's mean and deviation of each token."""
    return 2 * batch.stream_tokens * batch.exact


def _mask(batch: Microbatch) -> int:
    """A dropout of the stream."""
    return batch.stream_tokens * batch.model.hidden_size if batch.model.dropout > 0.0 else 0
