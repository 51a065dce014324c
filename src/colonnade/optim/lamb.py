"""LAMB: Adam whose step on each weight is in proportion to the weight's length.

Source: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020 (arXiv
1904.00962), algorithm 2.

    m ← β₁ m + (1 − β₁) g        v ← β₂ v + (1 − β₂) g²              of every element
    r = (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε) + λ w               Adam's direction, with weight decay
    w ← w − η · ‖w‖ / ‖r‖ · r                                        norms of the whole weight: the trust ratio

φ of the paper is the identity, and the ratio is 1 where either norm is 0, as in the authors' program.

Biases and norms, which have no weight decay, have no trust ratio either (it is 1, so that they follow Adam). The paper
does not say; the authors' program leaves out of its layer adaptation whatever it leaves out of weight decay unless told
otherwise, and so does NVIDIA's FusedLAMB (`use_nvlamb=False`). A bias that starts at zero would otherwise be held near
it: no step of it could be longer than the rate times what it is.

A weight may be spread over ranks. So the update takes two passes, with one sum over ranks between them:

    pass 1, a slice at a time     moments; r, of which only ‖r‖² and ‖w‖² of each weight's range are kept
    total                        2 numbers a weight, summed over the ranks that share it
    pass 2, a slice at a time     r again, from the moments; w
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.optim.adamw import AdamW
from colonnade.optim.norm import squared_norm
from colonnade.optim.param_slice import ParamSlice, Total, Watch, copy_to_layers, unwatched


@dataclass(frozen=True)
class Lamb:
    """An `Optimizer`. Extra memory: one tensor of the longest slice's size."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float

    def init(self, weights: Tensor) -> dict[str, Tensor]:
        """Adam's."""
        return self._adam.init(weights)

    @torch.no_grad()
    def update_(
        self,
        slices: Sequence[ParamSlice],
        *,
        step: int,
        learning_rate: float,
        factor: Tensor,
        num_weights: int,
        total: Total,
        watch: Watch = unwatched,
    ) -> None:
        """As `Optimizer.update_`: `total` is called once, with squared norms [num_weights, 2] on `factor`'s device."""
        adapted = [params for params in slices if params.decayed]
        squares = torch.zeros(num_weights, 2, dtype=torch.float64, device=factor.device)
        for params in adapted:
            self._average_(params, factor)
            if params.counted:
                _add_squares_(squares, params, self._direction(params, step))
        rates = learning_rate * _trust_ratio(total(squares).sqrt())
        for params in adapted:
            with watch(params):
                _apply_step_(params, self._direction(params, step), rates * params.learning_rate)
        rest = [params for params in slices if not params.decayed]
        self._adam.update_(rest, step=step, learning_rate=learning_rate, factor=factor, watch=watch)

    @property
    def _adam(self) -> AdamW:
        """What biases and norms follow."""
        return AdamW(self.beta1, self.beta2, self.epsilon, 0.0)

    def _average_(self, params: ParamSlice, factor: Tensor) -> None:
        gradients = params.gradients.mul_(factor.to(params.gradients.device))
        params.state["exp_avg"].lerp_(gradients, 1.0 - self.beta1)
        params.state["exp_avg_sq"].mul_(self.beta2).addcmul_(gradients, gradients, value=1.0 - self.beta2)

    def _direction(self, params: ParamSlice, step: int) -> Tensor:
        """r, before the trust ratio: a new tensor, as long as the slice."""
        size = params.state["exp_avg_sq"].div(1.0 - self.beta2**step).sqrt_().add_(self.epsilon)
        size.mul_(1.0 - self.beta1**step)
        return torch.div(params.state["exp_avg"], size, out=size).add_(
            params.weights, alpha=self.weight_decay * params.weight_decay
        )


def _add_squares_(squares: Tensor, params: ParamSlice, direction: Tensor) -> None:
    """squares[number] += (‖w‖², ‖r‖²) of each range."""
    for number, at in params.ranges:
        mine = torch.stack([squared_norm(params.weights[at]), squared_norm(direction[at])])
        squares[number] += mine.to(squares.device)


def _trust_ratio(norms: Tensor) -> Tensor:
    """(‖w‖, ‖r‖) [num_weights, 2] -> ‖w‖ / ‖r‖ [num_weights], 1 where either is 0."""
    weight, direction = norms.unbind(1)
    known = (weight > 0) & (direction > 0)
    return torch.where(known, weight / direction.clamp(min=torch.finfo(norms.dtype).tiny), 1.0)


def _apply_step_(params: ParamSlice, direction: Tensor, rates: Tensor) -> None:
    """w −= rates[number] · r in each range; `direction` is used up."""
    mine = rates.to(direction)
    for number, at in params.ranges:
        direction[at].mul_(mine[number])
    params.weights.sub_(direction)
    copy_to_layers([params])
