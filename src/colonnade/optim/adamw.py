"""AdamW with decoupled weight decay (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019).

The arithmetic is one pass over weights, gradients and both moments: a compiled kernel's, which rounds the new weights
to 16 bits as it goes, or torch's fused one.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from colonnade.kernels import compiled
from colonnade.optim.param_slice import ParamSlice, Total, Watch, copy_to_layers, unwatched


@dataclass(frozen=True)
class AdamW:
    """An `Optimizer` that needs no sums over a weight: `num_weights` and `total` are not used."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float

    def init(self, weights: Tensor) -> dict[str, Tensor]:
        """Running means of the gradient and of its square."""
        return {"exp_avg": torch.zeros_like(weights), "exp_avg_sq": torch.zeros_like(weights)}

    @torch.no_grad()
    def update_(
        self,
        slices: Sequence[ParamSlice],
        *,
        step: int,
        learning_rate: float,
        factor: Tensor,
        num_weights: int = 0,
        total: Total | None = None,
        watch: Watch = unwatched,
    ) -> None:
        """As `Optimizer.update_`: one kernel call for all slices that are treated alike, or for each where watched."""
        factor = factor.to(slices[0].weights.device) if slices else factor  # once: to the CPU it has to be waited for
        alike = defaultdict[object, list[ParamSlice]](list)
        for number, params in enumerate(slices):
            where = params.weights.device, params.weights.dtype, params.compiled
            kind = (*where, params.learning_rate, self._decay(params))
            alike[kind if watch is unwatched else number].append(params)
        for together in alike.values():
            with watch(together[0]):
                is_compiled = together[0].compiled and not together[0].weights.is_meta  # a plan is of torch's operators
                update_ = self._update_by_compiled_ if is_compiled else self._update_alike_
                update_(together, step, learning_rate, factor)

    def _decay(self, params: ParamSlice) -> float:
        return self.weight_decay * params.weight_decay if params.decayed else 0.0

    def _update_alike_(self, slices: list[ParamSlice], step: int, learning_rate: float, factor: Tensor) -> None:
        weights, gradients = [each.weights for each in slices], [each.gradients for each in slices]
        device = weights[0].device
        inverse = torch.ones((), dtype=torch.float32, device=device)  # what the kernel takes, whatever is the default
        if weights[0].dtype is torch.float32:
            inverse = factor.to(inverse).reciprocal()  # the kernel divides by this fp32 number in its own pass
        else:
            torch._foreach_mul_(gradients, factor.to(device))
        adamw(
            weights,
            gradients,
            [each.state["exp_avg"] for each in slices],
            [each.state["exp_avg_sq"] for each in slices],
            [],
            list(inverse.new_full((len(slices),), step - 1).unbind()),  # written there, not copied
            fused=True,
            grad_scale=inverse,
            found_inf=torch.zeros_like(inverse),
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=learning_rate * slices[0].learning_rate,
            weight_decay=self._decay(slices[0]),
            eps=self.epsilon,
            maximize=False,
        )
        copy_to_layers(slices)

    def _update_by_compiled_(self, slices: list[ParamSlice], step: int, learning_rate: float, factor: Tensor) -> None:
        scale = float(factor)
        for each in slices:
            compiled.adamw_(
                each.weights,
                each.gradients,
                each.state["exp_avg"],
                each.state["exp_avg_sq"],
                each.copied_to,
                factor=scale,
                learning_rate=learning_rate * each.learning_rate,
                betas=(self.beta1, self.beta2),
                epsilon=self.epsilon,
                weight_decay=self._decay(each),
                step=step,
            )
