"""An output layer that is frozen: the stream gets its gradient, and no memory is taken for one that nobody reads."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from colonnade.mesh.mesh import Mesh
from colonnade.tensor_parallel.cross_entropy import output_loss
from colonnade.tensor_parallel.distillation import SoftTargets, distilled_loss
from tests.emulated import backward, emulated_cuda
from tests.tensor_parallel.shards import drawn

S, B, HIDDEN, VOCAB = 4, 3, 6, 37
LABELS = torch.arange(S * B).view(S, B) * 3
SOFT = SoftTargets(torch.full((S, B), 0.5), 2.0, ids=LABELS[..., None] + 1, log_probs=torch.full((S, B, 1), -0.5))
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Device = Callable[[], AbstractContextManager[None]]


def of_labels(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return output_loss(hidden, weight, LABELS, torch.ones(S, B), bias=bias, tp=Mesh().tp, vocab_size=VOCAB)


def of_a_teacher(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return distilled_loss(hidden, weight, LABELS, torch.ones(S, B), SOFT, bias=bias, tp=Mesh().tp, vocab_size=VOCAB)


def gradients(loss: Loss, dtype: torch.dtype, device: Device, *frozen: str) -> dict[str, Tensor | None]:
    numbers = {
        "hidden": drawn(S, B, HIDDEN, seed=1),
        "weight": drawn(VOCAB, HIDDEN, seed=2),
        "bias": drawn(VOCAB, seed=3),
    }
    given = {name: nn.Parameter(x.to(dtype), requires_grad=name not in frozen) for name, x in numbers.items()}
    with device():
        backward(loss(*given.values()))
    return {name: x.grad for name, x in given.items()}


@pytest.mark.parametrize("frozen", [("weight",), ("bias",), ("weight", "bias")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loss", [of_labels, of_a_teacher])
@pytest.mark.parametrize("device", [nullcontext, emulated_cuda], ids=["CPU", "GPU"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(
    device: Device, loss: Loss, dtype: torch.dtype, frozen: tuple[str, ...]
) -> None:
    whole, found = gradients(loss, dtype, device), gradients(loss, dtype, device, *frozen)
    for name, expected in whole.items():
        gradient = found[name]
        assert expected is not None and expected.any() and (gradient is None) == (name in frozen), name
        assert gradient is None or torch.equal(gradient, expected), name
