"""The loss of pairs of answers beside plain torch: TRL's formulas, values and gradients, the vocabulary cut or not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from colonnade.config.model import ModelConfig
from colonnade.kernels.choice import Kernels, Products
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, build_mesh
from colonnade.model.preferences import PreferenceHead, PreferenceInputs, margins, pair_losses
from colonnade.tensor_parallel.parallel import Parallel
from tests.distributed import run_on_ranks
from tests.emulated import emulated_amx

S, PAIRS, H, V = 6, 3, 8, 11
MODEL = ModelConfig(
    head="preferences",
    num_layers=1,
    hidden_size=H,
    num_heads=2,
    seq_length=S,
    norm_position="post",
    tie_embeddings=False,
)
OPTIONS = {"dpo": (0.3, 0.0, 0.0), "smoothed": (0.5, 0.2, 0.0), "ipo": (0.7, 0.0, 1.0)}


def numbers() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x [s, 2b, h], weight [v, h], labels and what counts [s, 2b], reference [b, 2]."""
    g = torch.Generator().manual_seed(5)
    x, weight = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((S, 2 * PAIRS, H), (V, H)))
    labels = torch.randint(0, V, (S, 2 * PAIRS), generator=g)
    counted = (torch.rand(S, 2 * PAIRS, generator=g) < 0.6).float()
    return x, weight, labels, counted, -6 * torch.rand(PAIRS, 2, generator=g, dtype=torch.float64)


def plain(how: tuple[float, float, float], weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dx, dW) as trl.DPOTrainer computes them (`dpo_loss`; ipo: log-probabilities a token)."""
    x, weight, labels, counted, reference = numbers()
    x.requires_grad_()
    weight.requires_grad_()
    beta, smoothing, ipo = how
    per_token = torch.log_softmax(x @ weight.t(), -1).gather(-1, labels[..., None])[..., 0]
    policy = (per_token * counted).sum(0).view(PAIRS, 2)
    if ipo:
        lengths = counted.sum(0).view(PAIRS, 2)
        policy, reference = policy / lengths, reference / lengths
    logits = (policy[:, 0] - policy[:, 1]) - (reference[:, 0] - reference[:, 1])
    if ipo:
        losses = (logits - 1 / (2 * beta)) ** 2
    else:
        up, down = nn.functional.logsigmoid(beta * logits), nn.functional.logsigmoid(-beta * logits)
        losses = -up * (1 - smoothing) - down * smoothing
    loss = (losses * weights).sum()
    loss.backward()
    assert x.grad is not None and weight.grad is not None
    return loss.detach(), x.grad, weight.grad


def beside_plain(tp: Axis, *, sequence_parallel: bool) -> bool:
    x, weight, labels, counted, reference = numbers()
    rows = -(-V // tp.size)
    mine = slice(tp.rank * rows, (tp.rank + 1) * rows)
    weights = torch.tensor([0.25, 1.0, 0.5], dtype=torch.float64)
    for how in OPTIONS.values():
        head = PreferenceHead(MODEL, V, Parallel(tp, sequence_parallel)).double()
        with torch.no_grad():
            head.output.weight.zero_()
            head.output.weight[: len(weight[mine])] = weight[mine]
        head.output.weight.grad = torch.zeros_like(head.output.weight)
        part = slice(tp.rank * S // tp.size, (tp.rank + 1) * S // tp.size) if sequence_parallel else slice(None)
        own = x[part].clone().requires_grad_()
        inputs = PreferenceInputs(
            labels=labels,
            counted=counted,
            reference=reference,
            options=torch.tensor([how] * PAIRS, dtype=torch.float64),
            pair_weights=weights,
        )
        loss = head.preference_loss(own, inputs)
        loss.backward()
        expected, dx, dw = plain(how, weights)
        assert own.grad is not None and head.output.weight.grad is not None
        torch.testing.assert_close(loss.detach(), expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(own.grad, dx[part], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(head.output.weight.grad[: len(dw[mine])], dw[mine], rtol=1e-10, atol=1e-12)
    return True


def test_loss_and_gradients_are_those_of_plain_torch() -> None:
    assert beside_plain(Axis("tp"), sequence_parallel=False)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_loss_and_gradients_with_the_vocabulary_cut(sequence_parallel: bool) -> None:
    def on_a_rank(rank: int, size: int) -> bool:
        return beside_plain(build_mesh(Layout(tp=size), rank).tp, sequence_parallel=sequence_parallel)

    assert run_on_ranks(on_a_rank, 2) == [True, True]


def test_where_the_loss_is_zero_and_where_it_is_steep() -> None:
    options = torch.tensor([OPTIONS["dpo"], OPTIONS["ipo"]], dtype=torch.float64)
    gains = margins(torch.tensor([[-1.0, -9.0]] * 2), torch.tensor([[2.0, 4.0]] * 2), torch.zeros(2, 2), options)
    assert gains.tolist() == [[-1.0, -9.0], [-0.5, -2.25]]
    nothing = margins(torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, 2), options)
    assert nothing.tolist() == [[0.0, 0.0]] * 2, "of answers without a token, as a batch is filled up with"
    even = pair_losses(torch.zeros(2, 2, dtype=torch.float64), options)
    assert even.tolist() == pytest.approx([0.6931471805599453, (0.5 / 0.7) ** 2])


def test_a_model_that_is_very_sure_has_a_finite_loss() -> None:
    options = torch.tensor([[0.1, 0.0, 0.0], [0.1, 0.25, 0.0]], dtype=torch.float64)
    gains = torch.tensor([[20_000.0, -20_000.0]] * 2, dtype=torch.float64)
    assert pair_losses(gains, options).tolist() == pytest.approx([0.0, 0.25 * 4_000])
    assert pair_losses(-gains, options).tolist() == pytest.approx([4_000, 0.75 * 4_000])


def test_answers_are_judged_by_the_kernel_that_was_decided() -> None:
    """As the run's other products: here one that rounds its operands to bf16."""
    x, weight, labels, counted, reference = numbers()
    found = []
    for kernels in (Kernels(output="onednn"), Kernels()):
        head = PreferenceHead(MODEL, V, Parallel(Axis("tp"), products=Products(fp32=kernels)))
        head.output.weight.data.copy_(weight)
        options = torch.tensor([OPTIONS["dpo"]] * PAIRS, dtype=torch.float64)
        inputs = PreferenceInputs(
            labels=labels,
            counted=counted,
            reference=reference,
            options=options,
            pair_weights=torch.ones(PAIRS, dtype=torch.float64),
        )
        with emulated_amx(), torch.no_grad():
            found.append(float(head.preference_loss(x.float(), inputs)))
    assert 1e-5 < abs(found[0] - found[1]) < 0.1
