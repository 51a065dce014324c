"""Cross entropy and distillation from one output layer, cut along the vocabulary (Hinton et al., 2015).

    (1 − alpha) · cross entropy(z, label)  +  alpha · T² · KL(q ‖ softmax(z / T))          z: the student's logits

q is what a teacher says of the next token, at the same temperature: either the softmax of its own logits, which its
output layer makes here, a chunk of tokens at a time; or its k largest probabilities, and with them what is left for all
other tokens, which the student's probability of these others is compared with as that of one token. Neither logits are
gathered, nor ever whole: what crosses ranks are numbers a token,

    log-sum-exp of z, of z / T and of log q over this rank's rows, the label's logit, Σ q (log q − z / T) over them,
    and, of the k likeliest, log-sum-exp of z / T over the other rows.

As in `cross_entropy.py` gradients are computed in forward. That of the logits is one matrix here,
weight · (p − one-hot) + soft weight / T · (p at T − q), made in fp32 at least and rounded once. Of the others, which q
has a share r of and the student a share s, q is r / s · p: what the student believes of them among themselves stays.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colonnade.kernels.choice import Kernel, Products
from colonnade.kernels.products import add_product_, computed_by, exact, gradient_of
from colonnade.mesh.autograd import apply
from colonnade.mesh.collectives import all_gather
from colonnade.mesh.mesh import Axis
from colonnade.tensor_parallel.cross_entropy import (
    chunks_of,
    computed_in_forward,
    kernel_of,
    label_logits,
    local_labels,
    log_sum_exp,
    logits_of_chunk,
    product,
    real_rows,
)
from colonnade.tensor_parallel.parallel import Parallel


@dataclass(frozen=True)
class SoftTargets:
    """What a teacher says of every token of a micro-batch: by its output layer, or by its likeliest tokens."""

    weights: Tensor
    """[s, b]: what each token's KL counts in the result."""
    temperature: float
    hidden: Tensor | None = None
    """[s, b, g]: what the teacher's output layer reads."""
    table: Tensor | None = None
    """[v/tp, g]: the teacher's output weight."""
    bias: Tensor | None = None
    """[v/tp], of a teacher whose output layer has one."""
    ids: Tensor | None = None
    """int64 [s, b, k]: its likeliest tokens."""
    log_probs: Tensor | None = None
    """[s, b, k]: of these, at this temperature; what their probabilities lack of 1 is of all other tokens."""


def distilled_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    loss_weights: Tensor,
    soft: SoftTargets,
    *,
    bias: Tensor | None = None,
    tp: Axis,
    vocab_size: int,
    sequence_parallel: bool = False,
    products: Products | None = None,
) -> Tensor:
    """Σ loss_weights · cross entropy + Σ soft.weights · KL, []: shapes and communication are those of `output_loss`,
    but for 5 numbers a token in the place of 2 (6 where its likeliest tokens teach). Call `backward()` on the result
    alone, or on a sum with others.
    """
    rows, kernel = real_rows(weight, tp, vocab_size), kernel_of(weight, products)
    whole = Parallel(tp, sequence_parallel).enter(hidden)
    loss: Tensor = apply(_DistilledLoss, whole, weight, bias, labels, loss_weights, soft, tp, rows, kernel)
    return loss


@torch.no_grad()
def likeliest(
    hidden: Tensor,
    weight: Tensor,
    *,
    k: int,
    temperature: float,
    bias: Tensor | None = None,
    tp: Axis,
    vocab_size: int,
    products: Products | None = None,
) -> tuple[Tensor, Tensor]:
    """The k likeliest tokens of each position, and their log-probabilities at this temperature: [s, b, h] -> [s, b, k]
    both, the same on every rank. All-gathers 2k + 1 numbers a token.
    """
    x, shape, kernel = hidden.reshape(-1, hidden.shape[-1]), (*hidden.shape[:-1], k), kernel_of(weight, products)
    rows = real_rows(weight, tp, vocab_size)
    table, found = exact(weight[:rows], kernel), []
    with computed_by(kernel):
        for chunk in chunks_of(len(x), weight):
            logits = logits_of_chunk(x[chunk], table, bias, kernel=kernel)
            values, places = logits.topk(min(k, rows), -1)
            missing = (0, k - values.shape[1])
            values = torch.nn.functional.pad(values, missing, value=-torch.inf)
            ids = torch.nn.functional.pad(places + tp.rank * len(weight), missing)
            every_value, every_id = (all_gather(each[None], tp).transpose(0, 1).flatten(1) for each in (values, ids))
            best = every_value.topk(k, -1)
            total = torch.logsumexp(all_gather(log_sum_exp(logits / temperature)[None], tp), 0)
            found.append((every_id.gather(-1, best.indices), best.values / temperature - total[:, None]))
    ids, log_probs = (torch.cat(each).view(shape) for each in zip(*found, strict=True))
    return ids, log_probs


class _DistilledLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        loss_weights: Tensor,
        soft: SoftTargets,
        tp: Axis,
        rows: int,
        kernel: Kernel,
    ) -> Tensor:
        x, dx = hidden.reshape(-1, hidden.shape[-1]), torch.empty_like(hidden).view(-1, hidden.shape[-1])
        table = exact(weight[:rows], kernel)
        gradient = gradient_of(weight)[:rows] if weight.requires_grad else None
        of_bias = gradient_of(bias)[:rows] if bias is not None and bias.requires_grad else None
        loss = torch.zeros((), dtype=torch.promote_types(weight.dtype, torch.float32), device=hidden.device)
        hard, soft_weights = (each.reshape(-1).to(loss.dtype) for each in (loss_weights, soft.weights))
        with computed_by(kernel):
            for chunk in chunks_of(len(x), weight):
                logits = logits_of_chunk(x[chunk], table, bias, kernel=kernel)
                label = local_labels(labels.reshape(-1)[chunk], weight.shape[0], tp, rows)
                said = _Said.of(soft, chunk, len(weight), tp, rows, kernel)
                weights = hard[chunk], soft_weights[chunk]
                value, slope = _losses(logits, label, said, weights, soft.temperature, tp)
                loss += value
                narrow = slope.to(table.dtype)
                dx[chunk] = product(narrow, table, kernel).to(dx.dtype)
                if gradient is not None:
                    add_product_(gradient, narrow, x[chunk].to(table.dtype), kernel)
                if of_bias is not None:
                    of_bias.add_(slope.sum(0))
                del logits, slope, narrow, said  # before the next chunk's are made
        ctx.save_for_backward(dx.view(hidden.shape))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return computed_in_forward(ctx, grad)


@dataclass(frozen=True)
class _Said:
    """Of a chunk of tokens, what the teacher says of this rank's rows: log q; by its logits up to a number a token."""

    scores: Tensor | None = None
    """[c, rows]: the teacher's logits divided by the temperature."""
    row: Tensor | None = None
    """int64 [c, k]: rows of its likeliest tokens, 0 where another rank has them."""
    log_probs: Tensor | None = None
    """[c, k]: −inf where another rank has them."""

    @classmethod
    def of(cls, soft: SoftTargets, chunk: slice, shard: int, tp: Axis, rows: int, kernel: Kernel) -> "_Said":
        """`shard`: rows of a rank with padding, on every rank."""
        if soft.table is not None:
            assert soft.hidden is not None, "a teacher's output layer reads something"
            read = soft.hidden.reshape(-1, soft.hidden.shape[-1])[chunk]
            scores = logits_of_chunk(read, exact(soft.table[:rows], kernel), soft.bias, kernel=kernel)
            return cls(scores=scores.div_(soft.temperature))
        assert soft.ids is not None and soft.log_probs is not None, "a teacher's likeliest tokens"
        k = soft.ids.shape[-1]
        row, mine = local_labels(soft.ids.reshape(-1, k)[chunk], shard, tp, rows)
        return cls(row=row, log_probs=soft.log_probs.reshape(-1, k)[chunk].masked_fill(~mine, -torch.inf))

    def sums(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Of the student's logits divided by the temperature, [c, rows]: the log-sum-exp of what is said, and the mean
        of log q − z under q, with q over this rank's rows: [c] both.
        """
        if self.scores is not None:
            return log_sum_exp(self.scores), (self.scores.softmax(-1) * (self.scores - z)).sum(-1)
        assert self.row is not None and self.log_probs is not None, "a teacher's likeliest tokens"
        total = log_sum_exp(self.log_probs)
        if not z.shape[-1]:
            return total, torch.zeros_like(total)
        share = torch.where(total[:, None].isinf(), 0.0, (self.log_probs - total[:, None]).exp())
        known = self.log_probs.masked_fill(self.log_probs.isinf(), 0.0)
        return total, (share * (known - z.gather(-1, self.row))).sum(-1)

    def others(self, z: Tensor) -> Tensor | None:
        """z [c, rows] with −∞ in the likeliest tokens' places; None where the teacher speaks of all."""
        if self.row is None or self.log_probs is None:
            return None
        if not z.shape[-1]:
            return z
        hidden = torch.where(self.log_probs.isinf(), torch.inf, -torch.inf).to(z.dtype)  # +∞ changes nothing below
        return z.scatter_reduce(-1, self.row, hidden, "amin")

    def subtract_(self, slope: Tensor, log_total: Tensor, factor: Tensor) -> None:
        """slope −= factor · q, where q is told of single tokens: the number a token that log q lacks [c], and a factor
        a token [c]: [c, rows].
        """
        if self.scores is not None:
            slope -= (self.scores - log_total[:, None]).exp_() * factor[:, None]
        elif slope.shape[-1]:
            assert self.row is not None and self.log_probs is not None, "a teacher's likeliest tokens"
            slope.scatter_add_(-1, self.row, (-factor[:, None] * self.log_probs.exp()).to(slope.dtype))


def _losses(
    logits: Tensor,
    label: tuple[Tensor, Tensor],
    said: _Said,
    weights: tuple[Tensor, Tensor],
    temperature: float,
    tp: Axis,
) -> tuple[Tensor, Tensor]:
    """The chunk's loss, [], and the gradient of this rank's logits, [c, rows]. Sends 5 or 6 numbers a token."""
    hard, soft = weights
    z = logits / temperature
    said_total, mean = said.sums(z)
    others = said.others(z)
    local = [log_sum_exp(logits), log_sum_exp(z), label_logits(logits, label), said_total, mean]
    local += [] if others is None else [log_sum_exp(others)]
    every = all_gather(torch.stack([each.to(logits.dtype) for each in local])[None], tp)  # [tp, 5 or 6, c]
    lse, lse_soft, of_said = (torch.logsumexp(every[:, place], 0) for place in (0, 1, 3))
    target = every[:, 2].sum(0)
    lacking = of_said if others is None else torch.zeros_like(of_said)
    divergence = ((every[:, 3] - lacking).exp() * every[:, 4]).sum(0) - lacking + lse_soft
    slope = (logits - lse[:, None]).exp_().mul_(hard[:, None])
    slope += (z - lse_soft[:, None]).exp_().mul_((soft / temperature)[:, None])
    said.subtract_(slope, lacking, soft / temperature)
    if others is not None:
        lse_others = torch.logsumexp(every[:, 5], 0)  # −∞ where there are no others
        rest = torch.where(lse_others.isinf(), 0.0, -torch.expm1(of_said)).clamp_(min=0.0)
        known = lse_others.masked_fill(lse_others.isinf(), 0.0)
        divergence = divergence + torch.xlogy(rest, rest) - rest * known
        slope -= (others - known[:, None]).exp_().mul_((rest * soft / temperature)[:, None])
    loss = ((lse - target) * hard).sum() + (divergence * soft).sum()
    if slope.shape[-1]:
        slope.scatter_add_(-1, label[0][:, None], -(hard * label[1])[:, None])
    return loss, slope
