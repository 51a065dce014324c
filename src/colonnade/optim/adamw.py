"""AdamW with decoupled weight decay (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019).

The arithmetic is torch's fused kernel: one pass over weights, gradients and both moments (for 30M weights on two
cores 20 ms, where a loop over tensors takes 117 ms).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw


@dataclass(frozen=True)
class Moments:
    """Running means of the gradient and of its square, as long as the weights they belong to."""

    exp_avg: Tensor
    exp_avg_sq: Tensor

    @classmethod
    def zeros_like(cls, weights: Tensor) -> "Moments":
        return cls(torch.zeros_like(weights), torch.zeros_like(weights))

    def of(self, span: slice) -> "Moments":
        """The moments of a stretch of the weights: views."""
        return Moments(self.exp_avg[span], self.exp_avg_sq[span])


@dataclass(frozen=True)
class AdamW:
    """The rule and its constants. State is kept by the caller."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float

    @torch.no_grad()
    def update_(
        self,
        weights: Tensor,
        gradients: Tensor,
        moments: Moments,
        *,
        step: int,
        learning_rate: float,
        decayed: bool,
        factor: Tensor,
    ) -> None:
        """Step `step` (from 1) on flat slices, in place; gradients are multiplied by `factor` (clipping) first, in
        place.
        """
        inverse = torch.ones((), device=weights.device)
        if weights.dtype is torch.float32:
            inverse = factor.to(inverse).reciprocal()  # the kernel divides by this fp32 number in its own pass
        else:
            gradients.mul_(factor.to(gradients.device))
        adamw(
            [weights],
            [gradients],
            [moments.exp_avg],
            [moments.exp_avg_sq],
            [],
            [torch.tensor(float(step - 1), device=weights.device)],
            fused=True,
            grad_scale=inverse,
            found_inf=torch.zeros_like(inverse),
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=learning_rate,
            weight_decay=self.weight_decay if decayed else 0.0,
            eps=self.epsilon,
            maximize=False,
        )
