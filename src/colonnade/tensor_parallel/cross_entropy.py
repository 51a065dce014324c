"""Cross entropy fused with the output layer, cut along the vocabulary (Megatron-LM paper, section 3).

Logits are never gathered, nor ever whole: a chunk of tokens at a time is multiplied with this rank's rows of the output
weight, [c, h] -> [c, v/tp]; two numbers a token cross ranks (the local log-sum-exp, and the label's logit from the
rank that has it); from the same logits, turned into probabilities in place, the chunk's gradients are computed at
once, and the logits are dropped. So backward has nothing left to do but to hand on the gradient of the hidden state.

The gradient of a token's logits is slope·(fraction·p − one-hot), with p a softmax over this rank's rows and fraction
this rank's part of the whole. fp32 and fp64 take p over all rows, and the token's weight in the loss as the slope.
Where p of the label is near 1, that difference loses digits, and 16-bit operands would have none left: 16-bit weights,
and the compiled kernels of fp32, take p over all rows but the label's, and weight · (1 − p[label]) as the slope, which
is known to all its digits whatever the loss is (docs/design/15-digits-of-the-loss.md). On CPUs neither slope nor
one-hot touches a [c, v/tp] matrix:
    dx = slope·fraction·(p W) − slope·W[label]         dW = pᵀ (slope·fraction·x) − Σ slope·x into row [label]
On CUDA, where products read 16 bits, fraction·p − one-hot is rounded once, into the matrix that they read: no atomics,
no indices. The compiled kernels of CPUs turn logits into p while they multiply, round p to 16 bits at once, and
multiply p W while it lies in the cache: logits are in no memory at all.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from colonnade.kernels.choice import Kernel, Products, usual
from colonnade.kernels.compiled import output_blocks
from colonnade.kernels.products import (
    add_product_,
    add_products_,
    computed_by,
    exact,
    fp32_product_,
    gradient_of,
    output_exponentials_,
)
from colonnade.mesh.autograd import apply
from colonnade.mesh.collectives import all_gather
from colonnade.mesh.mesh import Axis
from colonnade.tensor_parallel.logits import CHUNK_LOGITS, CUDA_CHUNKS
from colonnade.tensor_parallel.parallel import Parallel


def output_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_weights: Tensor,
    *,
    bias: Tensor | None = None,
    tp: Axis,
    vocab_size: int,
    sequence_parallel: bool = False,
    products: Products | None = None,
) -> Tensor:
    """Σ loss_weights · cross entropy(hidden Wᵀ + bias, labels): hidden [s, b, h], W [v/tp, h], bias [v/tp], labels and
    loss_weights [s, b] -> [].

    Sends 2 numbers a token forward, [s, b, h] backward (all-reduce). Sequence parallel: hidden is [s/tp, b, h], and is
    all-gathered forward; its gradient is reduce-scattered. The gradients of W and bias are added to their `grad` in
    forward already, under no_grad too, so the result must be the whole loss: call `backward()` on it (or on a sum with
    others), never on a multiple of it. `products`: the kernels (None: the usual ones); so below.
    """
    rows = real_rows(weight, tp, vocab_size)
    whole = Parallel(tp, sequence_parallel).enter(hidden)
    loss: Tensor = apply(_OutputLoss, whole, weight, bias, labels, loss_weights, tp, rows, kernel_of(weight, products))
    return loss


@torch.no_grad()
def token_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, tp: Axis, vocab_size: int, products: Products | None = None
) -> Tensor:
    """Cross entropy of each token, no gradient: hidden [s, b, h], labels [s, b] -> [s, b] in fp32 (fp64 for fp64).
    Sends 2 numbers per token.
    """
    numbers = _token_numbers(hidden, weight, labels, None, tp, vocab_size, (log_sum_exp,), kernel_of(weight, products))
    losses = torch.logsumexp(numbers[:, 1], 0) - numbers[:, 0].sum(0)
    return losses.view(labels.shape)


@torch.no_grad()
def token_guesses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    tp: Axis,
    vocab_size: int,
    products: Products | None = None,
) -> tuple[Tensor, Tensor]:
    """As `token_losses`, and whether no other token is likelier than the label: [s, b] each. Sends 3 numbers per
    token.
    """
    numbers = _token_numbers(
        hidden, weight, labels, bias, tp, vocab_size, (log_sum_exp, _largest), kernel_of(weight, products)
    )
    target = numbers[:, 0].sum(0)
    losses, likeliest = torch.logsumexp(numbers[:, 1], 0) - target, target >= numbers[:, 2].amax(0)
    return losses.view(labels.shape), likeliest.view(labels.shape)


def _token_numbers(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    tp: Axis,
    vocab_size: int,
    summaries: Sequence[Callable[[Tensor], Tensor]],
    kernel: Kernel,
) -> Tensor:
    """Of each rank's logits of each token the label's (0 where it has not got it), and `summaries`: [tp, 1 + n, s·b]"""
    x, labels_1d = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    table = exact(weight[: real_rows(weight, tp, vocab_size)], kernel)
    found = []
    with computed_by(kernel):
        for chunk in chunks_of(len(x), weight):
            logits = logits_of_chunk(x[chunk], table, bias, kernel=kernel)
            label = local_labels(labels_1d[chunk], weight.shape[0], tp, table.shape[0])
            numbers = [label_logits(logits, label), *(summary(logits) for summary in summaries)]
            found.append(all_gather(torch.stack(numbers)[None], tp))
            del logits  # before the next chunk's are made
    return torch.cat(found, -1)


@torch.no_grad()
def local_logits(
    hidden: Tensor, weight: Tensor, *, tp: Axis, vocab_size: int, products: Products | None = None
) -> Tensor:
    """This rank's rows of the logits, without padding: [s, b, h] -> [s, b, ≤ v/tp] in fp32 (fp64 for fp64)."""
    kernel = kernel_of(weight, products)
    table = exact(weight[: real_rows(weight, tp, vocab_size)], kernel)
    with computed_by(kernel):
        return logits_of_chunk(hidden.reshape(-1, hidden.shape[-1]), table, kernel=kernel).view(*hidden.shape[:-1], -1)


def real_rows(weight: Tensor, tp: Axis, vocab_size: int) -> int:
    """How many rows of this rank's shard are tokens and no padding."""
    return max(0, min(weight.shape[0], vocab_size - tp.rank * weight.shape[0]))


class _OutputLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        loss_weights: Tensor,
        tp: Axis,
        rows: int,
        kernel: Kernel,
    ) -> Tensor:
        x, dx = hidden.reshape(-1, hidden.shape[-1]), torch.empty_like(hidden).view(-1, hidden.shape[-1])
        used = _rows_to_multiply(weight, rows)
        table, gradient = exact(weight[:used], kernel), _gradient(weight, used)
        of_bias = None if bias is None else _gradient(bias, used)
        loss = torch.zeros((), dtype=torch.promote_types(weight.dtype, torch.float32), device=hidden.device)
        weights = loss_weights.reshape(-1).to(loss.dtype)
        chunks = chunks_of(len(x), weight)
        fused = _is_fused(kernel, bias)
        apart = fused or weight.dtype.itemsize == 2  # as all ranks do, on one without rows too
        fused = fused and used > 0
        # one memory for all chunks: what is fresh costs a page fault each 4 KB
        blocks = output_blocks(len(x[chunks[0]]), table) if fused else [_logits_buffer(x[chunks[0]], table)]
        with computed_by(kernel):
            for chunk in chunks:
                label = local_labels(labels.reshape(-1)[chunk], weight.shape[0], tp, rows)
                if fused:
                    found = _fused_softmax(blocks, x[chunk], table, label, weights[chunk], tp)
                else:
                    logits = logits_of_chunk(x[chunk], table, bias, kernel=kernel, out=blocks[0])
                    logits[:, rows:].fill_(-torch.inf)
                    found = _softmax(logits, label, weights[chunk], tp, apart=apart)
                loss += (found.losses * weights[chunk]).sum()
                if table.is_cuda or (table.dtype.itemsize == 2 and not fused):
                    _add_gradients_in_place(found, label, x[chunk], table, dx[chunk], gradient, kernel)
                else:
                    _add_gradients_apart(found, label, x[chunk], table, dx[chunk], gradient, kernel)
                if of_bias is not None:
                    _add_bias_gradient(found, label, of_bias)
                del found  # before the next chunk's are made
        ctx.save_for_backward(dx.view(hidden.shape))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return computed_in_forward(ctx, grad)


def computed_in_forward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The backward of a function whose forward has saved the gradient of its first input alone, and added the others to
    their weights: no other input gets one. `grad` has to be 1.
    """
    assert grad.is_cuda or grad.is_meta or grad.item() == 1.0, (
        "the output weight's gradient was computed for backward() of the loss itself"
    )
    (of_first,) = ctx.saved_tensors
    return of_first, *(None for _ in ctx.needs_input_grad[1:])


def _gradient(weight: Tensor, rows: int) -> Tensor | None:
    """Of the first rows of a weight; None where it is frozen."""
    return gradient_of(weight)[:rows] if weight.requires_grad else None


def kernel_of(weight: Tensor, products: Products | None) -> Kernel:
    return (products or usual()).of(weight).output


def chunks_of(num_tokens: int, weight: Tensor) -> list[slice]:
    """Equal chunks of tokens with about CHUNK_LOGITS logits each, on CUDA CUDA_CHUNKS times as many.

    They count the padding rows of W: as many on every rank, so that all of them come to each chunk's all-gather.
    """
    limit = CHUNK_LOGITS * CUDA_CHUNKS if weight.is_cuda else CHUNK_LOGITS
    count = max(1, -(-num_tokens * len(weight) // limit))
    size = -(-num_tokens // count)
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def _rows_to_multiply(weight: Tensor, rows: int) -> int:
    """How many rows of W to multiply with: on CUDA the padding too, whose logits are −∞ (`vocab_rows_per_rank` fills up
    whole GEMM tiles, and 50,257 columns are aligned for no kernel).
    """
    return len(weight) if weight.is_cuda and rows else rows


def _logits_buffer(x: Tensor, table: Tensor) -> Tensor:
    """Memory for the logits of a chunk, [c, rows]."""
    return table.new_empty((len(x), len(table)), dtype=torch.promote_types(table.dtype, torch.float32))


def logits_of_chunk(
    x: Tensor, table: Tensor, bias: Tensor | None = None, *, kernel: Kernel, out: Tensor | None = None
) -> Tensor:
    """[c, h] · [rows, h] + bias [≥ rows] -> [c, rows] in fp32 (fp64 for fp64); in the memory of `out` [≥ c, rows] where
    given.
    """
    out = _logits_buffer(x, table) if out is None else out[: len(x)]
    if table.dtype != out.dtype or kernel == "compiled":
        fp32_product_(out, x.to(table.dtype), table.t())
        return out if bias is None else out.add_(bias[: len(table)])
    if bias is None:
        return torch.mm(x.to(table.dtype), table.t(), out=out)
    return torch.addmm(exact(bias[: len(table)]), x.to(table.dtype), table.t(), out=out)


def log_sum_exp(logits: Tensor) -> Tensor:
    """[c, rows] -> [c]; −inf where a rank has no rows."""
    if logits.shape[-1] == 0:
        return logits.new_full((len(logits),), float("-inf"))
    return torch.logsumexp(logits, -1)


def _largest(logits: Tensor) -> Tensor:
    """[c, rows] -> [c]; −inf where a rank has no rows."""
    return logits.amax(-1) if logits.shape[-1] else logits.new_full((len(logits),), float("-inf"))


def _softmax_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """[c, rows] -> (log-sum-exp [c], softmax [c, rows] in the logits' own memory).

    The softmax is one pass over the logits; its largest element is exp(max − lse), which gives lse without another exp.
    """
    if logits.shape[-1] == 0:
        return log_sum_exp(logits), logits
    largest = logits.amax(-1)
    probabilities = torch.softmax(logits, -1, out=logits)
    return largest - probabilities.amax(-1).log(), probabilities


def local_labels(labels: Tensor, shard: int, tp: Axis, rows: int) -> tuple[Tensor, Tensor]:
    """(row, mine): the label's row in this rank's shard, and whether this rank has it."""
    local = labels - tp.rank * shard
    mine = (local >= 0) & (local < rows)
    return local * mine, mine


def label_logits(logits: Tensor, label: tuple[Tensor, Tensor]) -> Tensor:
    """The labels' logits where this rank has them, else 0: [c]."""
    row, mine = label
    if logits.shape[-1] == 0:
        return logits.new_zeros(len(logits))
    return logits.gather(-1, row[:, None])[:, 0] * mine


def _across_ranks(local_lse: Tensor, local_target: Tensor, tp: Axis) -> tuple[Tensor, Tensor]:
    """(log-sum-exp over the whole vocabulary, the label's logit), both [c]: sends 2 numbers a token."""
    every = all_gather(torch.stack([local_lse, local_target])[None], tp)  # [tp, 2, c]
    return torch.logsumexp(every[:, 0], 0), every[:, 1].sum(0)


class _Softmax(NamedTuple):
    """What gradients are made of: that of the logits is slope·(fraction·probabilities − one-hot of the label)."""

    losses: Tensor
    """[c]"""
    probabilities: Sequence[Tensor]
    """Of this rank alone, up to a factor of each token: [c, rows], or blocks of its columns, side by side."""
    fraction: Tensor
    """[c]: that factor, with which those of all ranks sum to 1."""
    slope: Tensor
    """[c]"""
    times_table: Tensor | None = None
    """[c, h]: probabilities W, where they were multiplied as they were made."""


def _is_fused(kernel: Kernel, bias: Tensor | None) -> bool:
    """Whether exponentials are computed with their product: the compiled kernels can, without a bias."""
    return kernel == "compiled" and bias is None


def _fused_softmax(
    blocks: Sequence[Tensor], x: Tensor, table: Tensor, label: tuple[Tensor, Tensor], weights: Tensor, tp: Axis
) -> _Softmax:
    """Of x tableᵀ without the labels, whose fp32 logits are nowhere whole: exponentials in `blocks` [≥ c, w]."""
    row, mine = label
    made = blocks if len(x) == len(blocks[0]) else [block[: len(x)] for block in blocks]
    times_table = x.new_empty(x.shape, dtype=torch.float32)
    narrow = x.to(table.dtype)
    shift, total, local_target = output_exponentials_(made, times_table, narrow, table, row.where(mine, -1))
    lse, target = _across_ranks(shift + total.log(), local_target, tp)
    fraction = (shift - lse).exp().where(total > 0, 0.0)  # of no rows but the label's the shift is 0, far above lse
    return _apart(lse, target, made, fraction, weights)._replace(times_table=times_table)


def _softmax(logits: Tensor, label: tuple[Tensor, Tensor], weights: Tensor, tp: Axis, *, apart: bool) -> _Softmax:
    """In the memory of `logits` [c, rows]. `apart`: without the label, whose row gets no probability."""
    local_target = label_logits(logits, label)
    if apart:
        _hide_labels_(logits, label)
    local_lse, probabilities = _softmax_(logits)
    lse, target = _across_ranks(local_lse, local_target, tp)
    fraction = (local_lse - lse).exp().masked_fill_(local_lse == -torch.inf, 0.0)  # without rows, lse may be -∞ too
    if apart:
        return _apart(lse, target, [probabilities], fraction, weights)
    return _Softmax(lse - target, [probabilities], fraction, weights)


def _apart(lse: Tensor, target: Tensor, probabilities: Sequence[Tensor], fraction: Tensor, weights: Tensor) -> _Softmax:
    """`lse` and `probabilities` are those of all rows but the label's."""
    behind = lse - target  # log of the odds against the label
    return _Softmax(nn.functional.softplus(behind), probabilities, fraction, weights * behind.sigmoid())


def _hide_labels_(logits: Tensor, label: tuple[Tensor, Tensor]) -> None:
    """Give each token's label the lowest finite logit, on the rank that has it: [c, rows]."""
    row, mine = label[0][:, None], label[1][:, None]
    if logits.shape[-1]:
        _write_(logits, row, logits.gather(-1, row).masked_fill_(mine, torch.finfo(logits.dtype).min))


def _subtract_one_hot_(matrix: Tensor, label: tuple[Tensor, Tensor]) -> None:
    """Subtract 1 from each token's label, on the rank that has it: [c, rows]."""
    row, mine = label[0][:, None], label[1][:, None]
    if matrix.shape[-1]:
        _write_(matrix, row, matrix.gather(-1, row).sub_(mine.to(matrix.dtype)))


def _write_(matrix: Tensor, column: Tensor, values: Tensor) -> None:
    """One element a row: matrix [c, rows], column and values [c, 1]. On CPUs `scatter_` copies the whole matrix."""
    matrix.index_put_((torch.arange(len(matrix), device=matrix.device), column[:, 0]), values[:, 0])


def _add_gradients_apart(
    found: _Softmax,
    label: tuple[Tensor, Tensor],
    x: Tensor,
    table: Tensor,
    dx: Tensor,
    gradient: Tensor | None,
    kernel: Kernel,
) -> None:
    """Write this rank's part of dx [c, h] and add to dW [rows, h] (None: it is frozen): the label's part apart from the
    probabilities'.
    """
    (row, mine), scale = label, found.fraction * found.slope
    d = product(found.probabilities[0], table, kernel) if found.times_table is None else found.times_table
    d.mul_(scale[:, None])
    if len(table):
        d -= table[row] * (found.slope * mine)[:, None]
    dx.copy_(d)
    if gradient is None:
        return
    wide = x.to(gradient.dtype)
    scaled = (wide * scale[:, None]).to(table.dtype)
    add_products_(gradient, found.probabilities, scaled, kernel)
    gradient.index_add_(0, row[mine], wide[mine] * -found.slope[mine][:, None])


def _add_gradients_in_place(
    found: _Softmax,
    label: tuple[Tensor, Tensor],
    x: Tensor,
    table: Tensor,
    dx: Tensor,
    gradient: Tensor | None,
    kernel: Kernel,
) -> None:
    """The same by two products alone, whose operand is rounded once, with the label's −1 in its place."""
    (probabilities,) = found.probabilities
    difference = probabilities
    if difference.dtype.itemsize > 2:
        difference = torch.empty_like(probabilities, dtype=table.dtype)
        torch.mul(probabilities, found.fraction[:, None], out=difference)
    _subtract_one_hot_(difference, label)
    slope = found.slope[:, None]
    torch.mul(product(difference, table, kernel), slope, out=dx)
    if gradient is not None:
        add_product_(gradient, difference, (x.to(gradient.dtype) * slope).to(table.dtype), kernel)


def _add_bias_gradient(found: _Softmax, label: tuple[Tensor, Tensor], gradient: Tensor) -> None:
    """Add to the bias's gradient [rows]: that of the logits, summed over tokens."""
    row, mine = label
    if len(gradient):
        gradient.addmv_(found.probabilities[0].t(), found.fraction * found.slope)
        gradient.index_put_((row,), -(found.slope * mine), accumulate=True)


def product(a: Tensor, b: Tensor, kernel: Kernel) -> Tensor:
    """a b, in fp32 for 16-bit operands."""
    if a.dtype.itemsize == 2 or kernel == "compiled":
        return fp32_product_(a.new_empty((len(a), b.shape[1]), dtype=torch.float32), a, b)
    return a @ b
