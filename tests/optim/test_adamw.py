"""AdamW against torch.optim.AdamW, its loop and its fused kernel."""

import pytest
import torch
from torch import Tensor, nn

from colonnade.optim.adamw import AdamW
from colonnade.optim.param_slice import ParamSlice, state_at

COUNT, STEPS = 1000, 6
RATES = [1e-3, 2e-3, 3e-3, 2e-3, 1e-3, 0.0]


def gradients(dtype: torch.dtype) -> list[Tensor]:
    """Of sizes from 1e-12 to 1e2, and some zeros."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(COUNT, dtype=torch.float64, generator=generator) for _ in range(STEPS)]
    sizes = torch.logspace(-12, 2, COUNT, dtype=torch.float64)
    sizes[::50] = 0.0
    return [(g * sizes).to(dtype) for g in drawn]


def start(dtype: torch.dtype) -> Tensor:
    return torch.randn(COUNT, dtype=torch.float32, generator=torch.Generator().manual_seed(0)).to(dtype)


def torchs(dtype: torch.dtype, weight_decay: float, *, fused: bool, factor: float = 1.0) -> Tensor:
    weights = nn.Parameter(start(dtype))
    optimizer = torch.optim.AdamW(
        [weights], betas=(0.8, 0.95), eps=1e-6, weight_decay=weight_decay, fused=fused, foreach=False
    )
    for rate, gradient in zip(RATES, gradients(dtype), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        weights.grad = gradient * factor
        optimizer.step()
    return weights.detach()


def ours(
    dtype: torch.dtype, weight_decay: float, *, decayed: bool = True, factor: float = 1.0, cuts: int = 1
) -> Tensor:
    """The same steps on `cuts` slices of one buffer."""
    rule = AdamW(beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=weight_decay)
    weights = start(dtype)
    state = rule.init(weights)
    for step, (rate, gradient) in enumerate(zip(RATES, gradients(dtype), strict=True), start=1):
        ranges = [slice(first, first + COUNT // cuts) for first in range(0, COUNT, COUNT // cuts)]
        rule.update_(
            [ParamSlice(weights[at], gradient[at], state_at(state, at), decayed) for at in ranges],
            step=step,
            learning_rate=rate,
            factor=torch.tensor(factor, dtype=torch.float64),
        )
    return weights


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_default_dtype_of_the_process_is_nothing_to_it(dtype: torch.dtype, default: torch.dtype) -> None:
    expected, usual = ours(dtype, 0.1), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert torch.equal(ours(dtype, 0.1), expected)
    finally:
        torch.set_default_dtype(usual)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_float64_is_torchs(weight_decay: float, fused: bool) -> None:
    expected = torchs(torch.float64, weight_decay, fused=fused)
    torch.testing.assert_close(ours(torch.float64, weight_decay), expected, rtol=1e-13, atol=1e-15)


def test_float32_is_torchs_to_the_last_bits() -> None:
    expected = torchs(torch.float64, 0.1, fused=False)
    for result in (ours(torch.float32, 0.1), torchs(torch.float32, 0.1, fused=True)):
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours(torch.float32, 0.1), torchs(torch.float32, 0.1, fused=True), rtol=3e-7, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_clipping_factor_multiplies_gradients(dtype: torch.dtype) -> None:
    rtol, atol = (1e-13, 1e-15) if dtype is torch.float64 else (1e-6, 1e-7)
    torch.testing.assert_close(
        ours(dtype, 0.1, factor=0.037), torchs(dtype, 0.1, fused=False, factor=0.037), rtol=rtol, atol=atol
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slices_are_updated_as_the_whole(dtype: torch.dtype) -> None:
    torch.testing.assert_close(ours(dtype, 0.1, cuts=5), ours(dtype, 0.1), rtol=1e-6, atol=1e-12)


def test_slices_of_all_kinds_are_updated_as_each_alone() -> None:
    """What is treated alike goes to the kernel together: rates, decay and both factors stay those of each."""
    rule = AdamW(beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=0.1)
    kinds = [(decayed, rate, decay) for decayed in (True, False) for rate in (1.0, 0.5) for decay in (1.0, 3.0)] * 2

    def updated(together: bool) -> Tensor:
        weights = start(torch.float64)
        state = rule.init(weights)
        for step, gradient in enumerate(gradients(torch.float64), start=1):
            slices = [
                ParamSlice(
                    weights[at], gradient[at], state_at(state, at), decayed, learning_rate=rate, weight_decay=decay
                )
                for number, (decayed, rate, decay) in enumerate(kinds)
                for at in (slice(50 * number, 50 * (number + 1)),)
            ]
            for group in [slices] if together else [[each] for each in slices]:
                rule.update_(group, step=step, learning_rate=1e-2, factor=torch.tensor(0.3, dtype=torch.float64))
        return weights

    assert torch.equal(updated(together=True), updated(together=False))
    assert not torch.equal(updated(together=True), start(torch.float64))


def test_no_decay_where_it_is_not_wanted() -> None:
    assert torch.equal(ours(torch.float64, 0.1, decayed=False), ours(torch.float64, 0.0))
    assert not torch.equal(ours(torch.float64, 0.1, decayed=True), ours(torch.float64, 0.0))


def test_weights_decay_by_rate_times_decay_alone() -> None:
    """Decoupled: without a gradient a weight shrinks by exactly learning_rate · weight_decay."""
    weights, zeros = start(torch.float64), torch.zeros(COUNT, dtype=torch.float64)
    rule = AdamW(0.9, 0.999, 1e-8, 0.1)
    params = ParamSlice(weights, zeros, rule.init(weights), decayed=True)
    rule.update_([params], step=1, learning_rate=0.01, factor=torch.ones(()))
    torch.testing.assert_close(weights, start(torch.float64) * (1 - 0.001), rtol=1e-15, atol=0)


def test_state_of_some_weights_is_a_view() -> None:
    state = AdamW(0.9, 0.999, 1e-8, 0.1).init(torch.ones(10))
    state_at(state, slice(2, 5))["exp_avg"].fill_(1.0)
    state_at(state, slice(5, 7))["exp_avg_sq"].fill_(2.0)
    assert state["exp_avg"].tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0]
    assert state["exp_avg_sq"].tolist() == [0, 0, 0, 0, 0, 2, 2, 0, 0, 0]


@pytest.mark.parametrize(("beta2", "times"), [(0.95, 0.447), (0.999, 3.16)])
def test_moments_of_zero_in_the_middle_of_a_run_change_the_first_steps_length(beta2: float, times: float) -> None:
    """A weight that was frozen until then: no correction makes up for means that begin at zero."""
    rule, weights = AdamW(0.9, beta2, 1e-12, 0.0), torch.zeros(3, dtype=torch.float64)
    gradients = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    slices = [ParamSlice(weights, gradients, rule.init(weights), decayed=False)]
    rule.update_(slices, step=100_000, learning_rate=1.0, factor=torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(weights, -times * gradients.sign(), rtol=2e-3, atol=0.0)


# --- the compiled kernel, and 16 bits ---------------------------------------------------------------------------------

SIXTEEN = (torch.bfloat16, torch.float16)
KINDS = [(True, 1.0, 1.0), (False, 0.5, 1.0), (True, 2.0, 3.0)]
"""decayed, factor on the rate, factor on the decay"""


def stepped(
    cuts: list[int], dtype: torch.dtype = torch.float32, *, compiled: bool = True, narrow: torch.dtype | None = None
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """(weights, state, rounded weights) after steps on slices that end at `cuts`, each kind once around."""
    rule = AdamW(beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=0.1)
    weights = start(dtype)
    state, rounded = rule.init(weights), torch.full((COUNT,), -1.0, dtype=narrow)
    for step, (rate, gradient) in enumerate(zip(RATES[:5], gradients(dtype), strict=False), start=1):
        slices = [
            ParamSlice(
                weights[first:last],
                gradient[first:last],
                state_at(state, slice(first, last)),
                decayed,
                learning_rate=on_rate,
                weight_decay=on_decay,
                copied_to=None if narrow is None else rounded[first:last],
                compiled=compiled,
            )
            for first, last in zip([0, *cuts], [*cuts, COUNT], strict=True)
            for decayed, on_rate, on_decay in (KINDS[sum(first >= each for each in (300, 700))],)
        ]
        rule.update_(slices, step=step, learning_rate=rate, factor=torch.tensor(0.37, dtype=torch.float64))
    return weights, dict(state), rounded


WHOLE = [300, 700]


@pytest.mark.usefixtures("loaded")
def test_the_compiled_kernel_steps_as_torchs_in_float64() -> None:
    """Slices of three kinds, under a factor."""
    found, state, _ = stepped(WHOLE)
    right, exact, _ = stepped(WHOLE, torch.float64, compiled=False)
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-6)
    torchs_own, _, _ = stepped(WHOLE, compiled=False)
    torch.testing.assert_close(found, torchs_own, rtol=6e-7, atol=1e-8)  # ten roundings of five steps
    torch.testing.assert_close(state["exp_avg"].double(), exact["exp_avg"], rtol=1e-4, atol=0.0)  # it cancels
    torch.testing.assert_close(state["exp_avg_sq"].double(), exact["exp_avg_sq"], rtol=1e-6, atol=0.0)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("beta2", [0.9, 0.999, 0.99999])
def test_the_compiled_kernels_means_are_exact_whatever_the_betas(beta2: float) -> None:
    """1 − β, rounded once: from a rounded β it would have few digits."""
    rule, gradient = AdamW(beta2, beta2, 1e-8, 0.1), torch.linspace(0.5, 2.0, 40)

    def stepped_with(dtype: torch.dtype, *, compiled: bool) -> tuple[Tensor, dict[str, Tensor]]:
        weights = torch.ones(40, dtype=dtype)
        state = rule.init(weights)
        for step in range(1, 4):
            params = ParamSlice(weights, gradient.to(dtype), state, decayed=True, compiled=compiled)
            rule.update_([params], step=step, learning_rate=1e-2, factor=torch.ones(()))
        return weights, dict(state)

    (found, state), (right, exact) = (
        stepped_with(torch.float32, compiled=True),
        stepped_with(torch.float64, compiled=False),
    )
    torch.testing.assert_close(found.double(), right, rtol=1e-6, atol=0.0)
    for name in exact:
        torch.testing.assert_close(state[name].double(), exact[name], rtol=1e-6, atol=0.0)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("beta1", [0.0, 0.25, 0.5, 0.75])
def test_a_gradient_far_smaller_than_the_last_is_not_lost_in_the_compiled_kernels_mean(beta1: float) -> None:
    """With β₁ = 0 it is the mean: g, and not m + (g − m)."""
    rule, each = AdamW(beta1, 0.0, 1e-12, 0.0), {}
    for compiled, dtype in ((True, torch.float32), (False, torch.float32), (False, torch.float64)):
        weights = torch.zeros(40, dtype=dtype)
        state = rule.init(weights)
        for step, gradient in enumerate((torch.linspace(-3.0, 3.0, 40), torch.logspace(-9, -7, 40)), 1):
            params = ParamSlice(weights, gradient.to(dtype), state, decayed=False, compiled=compiled)
            rule.update_([params], step=step, learning_rate=1.0, factor=torch.ones((), dtype=torch.float64))
        each[compiled, dtype] = state["exp_avg"].double()
    exact = each[False, torch.float64]
    for found in (each[True, torch.float32], each[False, torch.float32]):
        torch.testing.assert_close(found, exact, rtol=3e-7, atol=0.0)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("threads", [1, 3])
def test_slices_cut_anywhere_have_the_same_bits_by_the_compiled_kernel(threads: int) -> None:
    """As ranks cut them, with any number of threads."""
    right = stepped(WHOLE, narrow=torch.bfloat16)
    torch.set_num_threads(threads)
    found = stepped([1, 20, 37, 300, 301, 317, 700, 999], narrow=torch.bfloat16)
    assert torch.equal(found[0], right[0]) and torch.equal(found[2], right[2])
    assert all(torch.equal(found[1][name], right[1][name]) for name in right[1])


@pytest.mark.usefixtures("loaded")
def test_a_large_slice_is_stepped_through_by_several_threads_with_the_same_bits() -> None:
    rule, count = AdamW(0.9, 0.95, 1e-8, 0.1), 3 * (1 << 15) + 7
    drawn = torch.randn(2, count, generator=torch.Generator().manual_seed(0))

    def updated(threads: int) -> tuple[Tensor, Tensor]:
        weights, rounded = drawn[0].clone(), drawn[0].bfloat16()
        torch.set_num_threads(threads)
        params = ParamSlice(weights, drawn[1], rule.init(weights), decayed=True, copied_to=rounded, compiled=True)
        rule.update_([params], step=1, learning_rate=1e-2, factor=torch.ones(()))
        return weights, rounded

    (one, rounded), (three, rounded_by_three) = updated(1), updated(3)
    assert torch.equal(one, three) and torch.equal(rounded, rounded_by_three)
    assert torch.equal(rounded, one.bfloat16()) and (one != drawn[0]).all()


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("narrow", SIXTEEN)
@pytest.mark.parametrize("compiled", [False, True])
def test_new_weights_are_rounded_where_layers_read_them(narrow: torch.dtype, compiled: bool) -> None:
    weights, _, rounded = stepped(WHOLE, compiled=compiled, narrow=narrow)
    assert torch.equal(rounded, weights.to(narrow))


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, -1, 0x7F800001])
def test_the_compiled_kernel_leaves_gradients_as_they_are_and_keeps_what_is_no_number(bits: int) -> None:
    rule, weights = AdamW(0.9, 0.95, 1e-8, 0.1), torch.ones(40)
    gradient, rounded = torch.arange(40.0), torch.zeros(40, dtype=torch.bfloat16)
    weights.view(torch.int32)[3] = bits
    params = ParamSlice(weights, gradient, rule.init(weights), decayed=True, copied_to=rounded, compiled=True)
    rule.update_([params], step=1, learning_rate=1e-2, factor=torch.tensor(0.5))
    assert gradient[4:].tolist() == list(range(4, 40))
    assert weights.isnan().nonzero().tolist() == rounded.isnan().nonzero().tolist() == [[3]]


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("narrow", SIXTEEN)
def test_the_compiled_kernel_rounds_halves_to_even(narrow: torch.dtype) -> None:
    rule, weights = AdamW(0.9, 0.95, 1e-8, 0.1), 1 + (torch.arange(64) + 0.5) * torch.finfo(narrow).eps
    rounded = torch.zeros(64, dtype=narrow)
    params = ParamSlice(weights, torch.ones(64), rule.init(weights), decayed=True, copied_to=rounded, compiled=True)
    rule.update_([params], step=1, learning_rate=0.0, factor=torch.ones(()))
    assert torch.equal(rounded, weights.to(narrow)) and len(rounded.unique()) == 33  # two halves each go to an even one
