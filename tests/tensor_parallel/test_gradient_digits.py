"""How many digits the output layer's gradients keep in 16 bits, at any loss, on every kind of device.

For confident tokens p − one-hot is small, and rounding p before the subtraction would leave nothing of it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from colonnade.kernels.choice import WIDENED, Kernel, Kernels, Products, usual
from colonnade.kernels.compiled import output_blocks
from colonnade.kernels.products import add_product_
from colonnade.kernels.timing import is_exact
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, Mesh, build_mesh
from colonnade.tensor_parallel import cross_entropy
from colonnade.tensor_parallel.cross_entropy import local_logits, output_loss, token_guesses, token_losses
from tests.distributed import run_on_ranks
from tests.emulated import Noted, backward, emulated_amx, emulated_cuda
from tests.kernels.loaded import load, shared_folder
from tests.slow import first_fast

TOKENS, VOCAB, HIDDEN = 64, 500, 96
LOSSES = (10.0, 1.0, 0.1, 1e-2, 1e-3, 1e-4)
BOUND = {torch.bfloat16: 0.004, torch.float16: 0.001}
SCALE = {torch.bfloat16: 1.0, torch.float16: 2.0**14}
"""fp16 trains with a scaled loss: its gradients would be nothing otherwise."""

Branch = Callable[[], AbstractContextManager[Any]]
BRANCHES: dict[str, Branch] = {"widened": nullcontext, "AMX": emulated_amx, "CUDA": emulated_cuda}


class Problem(NamedTuple):
    hidden: Tensor
    table: Tensor
    labels: Tensor
    weights: Tensor


def exact_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.double(), labels)


def problem(loss: float, dtype: torch.dtype) -> Problem:
    """Tokens of about this mean loss: each hidden state leans towards its label's row, or away from it."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    noise = torch.randn(TOKENS, HIDDEN, generator=generator) * 0.1
    low, high = -1.0, 2.0
    for _ in range(40):
        lean = (low + high) / 2
        hidden = (lean * 0.3 * table[labels].float() + noise).to(dtype)
        above = exact_loss(hidden.double() @ table.double().t(), labels) > loss
        low, high = (lean, high) if above else (low, lean)
    return Problem(hidden, table, labels, torch.full((TOKENS,), 1.0 / TOKENS) * SCALE.get(dtype, 1.0))


def exact_gradients(given: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, dx, dW) in float64, of the same 16-bit numbers."""
    hidden, table = (t.double().requires_grad_() for t in (given.hidden, given.table))
    losses = nn.functional.cross_entropy(hidden @ table.t(), given.labels, reduction="none")
    loss = (losses * given.weights).sum()
    return (loss.detach(), *torch.autograd.grad(loss, [hidden, table]))


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def errors(given: Problem, tp: Axis, branch: Branch, products: Products | None = None) -> tuple[float, float, float]:
    """Relative errors of the loss, dx and dW; of this rank's rows of W, if it has some."""
    loss, dx, dw = exact_gradients(given)
    vocab_size = len(given.table)
    size = -(-vocab_size // tp.size)
    mine = slice(tp.rank * size, min(vocab_size, (tp.rank + 1) * size))
    weight = nn.Parameter(nn.functional.pad(given.table[mine], (0, 0, 0, size - len(dw[mine]))))
    hidden = given.hidden[:, None].clone().requires_grad_()
    with branch():
        found = output_loss(
            hidden,
            weight,
            given.labels[:, None],
            given.weights[:, None],
            tp=tp,
            vocab_size=vocab_size,
            products=products,
        )
        backward(found)
    assert hidden.grad is not None and hidden.grad.dtype is given.hidden.dtype
    assert weight.grad is not None and weight.grad.dtype is torch.float32
    of_rows = error(weight.grad[: len(dw[mine])], dw[mine]) if len(dw[mine]) else 0.0
    return error(found.detach(), loss), error(hidden.grad[:, 0], dx), of_rows


def assert_digits(dtype: torch.dtype, tp: Axis, branch: Branch) -> None:
    for target in LOSSES:
        given = problem(target, dtype)
        loss, dx, dw = errors(given, tp, branch)
        assert loss < 1e-5, f"loss {target}: off by {loss:.1e}"
        assert max(dx, dw) < BOUND[dtype], f"loss {target}: dx off by {dx:.1e}, dW by {dw:.1e}"


COMPILED = Products(fp32=Kernels(output="compiled"), bf16=Kernels("native", "native", "compiled", "compiled", "native"))
OF_COMPILED = {torch.float32: 1e-5, torch.bfloat16: BOUND[torch.bfloat16]}
BY_COMPILED = pytest.mark.parametrize("dtype", OF_COMPILED, ids=str)


def load_for(dtype: torch.dtype, factory: pytest.TempPathFactory) -> Path:
    """The compiled kernels; skips where there are none for numbers of this type."""
    folder = shared_folder(factory)
    load(folder)
    if not is_exact("compiled", "output", dtype):
        pytest.skip(f"this processor has no units for products of {dtype} with an fp32 result")
    return folder


def assert_digits_compiled(dtype: torch.dtype, tp: Axis) -> None:
    for target in LOSSES:
        loss, dx, dw = errors(problem(target, dtype), tp, nullcontext, COMPILED)
        assert loss < 1e-5 and max(dx, dw) < OF_COMPILED[dtype], f"loss {target}: {loss:.1e}, {dx:.1e}, {dw:.1e}"


def digits_of_compiled_on_a_rank(rank: int, num_ranks: int, dtype: torch.dtype, folder: Path) -> None:
    load(folder)
    tp = build_mesh(Layout(tp=num_ranks), rank).tp
    assert_digits_compiled(dtype, tp)
    given = problem(1.0, dtype)
    few = given._replace(table=given.table[:2], labels=given.labels % 2)  # the last of three ranks has none of them
    loss, dx, dw = errors(few, tp, nullcontext, COMPILED)
    assert loss < 1e-5 and max(dx, dw) < OF_COMPILED[dtype], f"two rows: {loss:.1e}, {dx:.1e}, {dw:.1e}"


@BY_COMPILED
def test_they_keep_them_by_the_compiled_kernels(dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = load_for(dtype, tmp_path_factory)
    assert_digits_compiled(dtype, Mesh().tp)
    run_on_ranks(digits_of_compiled_on_a_rank, 3, dtype, folder)


@BY_COMPILED
@pytest.mark.parametrize("sizes", [(66, 1300), (64, 1300), (66, 400)], ids=str)
def test_compiled_kernels_with_several_chunks_of_tokens_and_blocks_of_columns(
    sizes: tuple[int, int],
    dtype: torch.dtype,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 66 tokens the last chunk has fewer; the last block has fewer columns, or there is one alone."""
    load_for(dtype, tmp_path_factory)
    tokens, vocab = sizes
    generator = torch.Generator().manual_seed(0)
    hidden, table = (torch.randn(n, HIDDEN, generator=generator).mul_(0.3).to(dtype) for n in (tokens, vocab))
    labels, weights = torch.randint(0, vocab, (tokens, 1), generator=generator), torch.full((tokens, 1), 1 / tokens)
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", 16 * vocab)
    weight, given = nn.Parameter(table.clone()), hidden[:, None].clone().requires_grad_()
    chunks = cross_entropy.chunks_of(tokens, weight)
    assert len(chunks) > 3 and (chunks[-1].stop - chunks[-1].start < chunks[0].stop) is (tokens == 66)
    assert (len(output_blocks(tokens, table)) > 1) is (vocab == 1300)
    loss = output_loss(given, weight, labels, weights, tp=Mesh().tp, vocab_size=vocab, products=COMPILED)
    loss.backward()
    wide = [t.double().requires_grad_() for t in (hidden, table)]
    right = nn.functional.cross_entropy(wide[0] @ wide[1].t(), labels[:, 0])
    right.backward()
    assert abs(loss.item() - right.item()) < 1e-5
    assert given.grad is not None and weight.grad is not None
    for found, expected in zip((given.grad[:, 0], weight.grad), wide, strict=True):
        assert expected.grad is not None and error(found, expected.grad) < OF_COMPILED[dtype]


@BY_COMPILED
def test_compiled_kernels_with_an_output_bias_and_without_gradients(
    dtype: torch.dtype, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """BERT's output layer, and what evaluation and generation take from one."""
    load_for(dtype, tmp_path_factory)
    given, tp = problem(1.0, dtype), Mesh().tp
    hidden = given.hidden[:, None].clone().requires_grad_()
    weight, bias = nn.Parameter(given.table.clone()), nn.Parameter(torch.linspace(-1, 1, VOCAB).to(dtype))
    labels, weights = given.labels[:, None], given.weights[:, None]
    output_loss(hidden, weight, labels, weights, bias=bias, tp=tp, vocab_size=VOCAB, products=COMPILED).backward()
    wide = [t.detach().double().requires_grad_() for t in (given.hidden, given.table, bias)]
    logits = wide[0] @ wide[1].t() + wide[2]
    losses = nn.functional.cross_entropy(logits, given.labels, reduction="none")
    (losses * given.weights).sum().backward()
    assert bias.grad is not None and hidden.grad is not None and weight.grad is not None
    for found, right in zip((hidden.grad[:, 0], weight.grad, bias.grad), wide, strict=True):
        assert right.grad is not None and error(found, right.grad) < OF_COMPILED[dtype]
    plain = given.hidden.double() @ given.table.double().t()
    each = token_losses(hidden, weight, labels, tp=tp, vocab_size=VOCAB, products=COMPILED)[:, 0]
    assert error(each, nn.functional.cross_entropy(plain, given.labels, reduction="none")) < 1e-5
    guessed = token_guesses(hidden, weight, labels, tp=tp, vocab_size=VOCAB, products=COMPILED)[1][:, 0]
    assert torch.equal(guessed, plain.argmax(-1) == given.labels)
    assert error(local_logits(hidden, weight, tp=tp, vocab_size=VOCAB, products=COMPILED)[:, 0], plain) < 1e-6


def digits_on_a_rank(rank: int, num_ranks: int, dtype: torch.dtype, name: str) -> None:
    assert_digits(dtype, build_mesh(Layout(tp=num_ranks), rank).tp, BRANCHES[name])


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("dtype", first_fast(list(BOUND)), ids=str)
def test_gradients_keep_their_digits_at_any_loss(dtype: torch.dtype, name: str) -> None:
    assert_digits(dtype, Mesh().tp, BRANCHES[name])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", BRANCHES)
def test_they_do_where_the_vocabulary_is_cut(name: str) -> None:
    run_on_ranks(digits_on_a_rank, 3, torch.bfloat16, name)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_a_rank_may_have_no_row_but_the_label(dtype: torch.dtype) -> None:
    """Of a vocabulary of one there is nothing to learn; without the label's row nothing is left of the softmax."""
    weight, hidden = nn.Parameter(torch.ones(1, 4, dtype=dtype)), torch.ones(3, 1, 4, dtype=dtype, requires_grad=True)
    labels, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    weight.grad_dtype = torch.float32
    weight.grad = torch.zeros(1, 4)
    loss = output_loss(hidden, weight, labels, weights, tp=Mesh().tp, vocab_size=1)
    backward(loss)
    assert loss == 0.0 and hidden.grad is not None and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
def test_a_weight_gradient_is_never_rounded_to_16_bits(dtype: torch.dtype, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(300, n, generator=generator).to(dtype) for n in (40, 24))
    total = torch.zeros(40, 24)
    with BRANCHES[name]():
        for _ in range(3):
            add_product_(total, a, b, usual().of(a).weight_gradient)
    assert error(total, 3 * a.double().t() @ b.double()) < 2e-6


@pytest.mark.parametrize("kernel", ["blas", "onednn"])
@pytest.mark.parametrize("dtype", [torch.float32, *BOUND], ids=str)
def test_they_keep_them_by_each_kernel(dtype: torch.dtype, kernel: Kernel) -> None:
    if not is_exact(kernel, "output", dtype):
        pytest.skip(f"on this processor {kernel} rounds {dtype} to bf16, and is never chosen")
    given = problem(1.0, torch.bfloat16)
    given = given._replace(hidden=given.hidden.to(dtype), table=given.table.to(dtype))
    kernels = Kernels(output=kernel)
    loss, dx, dw = errors(given, Mesh().tp, nullcontext, Products(kernels, kernels, kernels))
    assert loss < 1e-5 and max(dx, dw) < BOUND.get(dtype, 1e-5)


def test_a_cpu_with_bf16_units_multiplies_bf16_in_them() -> None:
    """An fp32 result from bf16 products, for bf16 alone."""
    with emulated_amx():
        found = {dtype: usual().of(torch.ones(1, dtype=dtype)) for dtype in (torch.float32, *BOUND)}
    assert found[torch.float32] == found[torch.float16] == WIDENED
    assert found[torch.bfloat16] == Kernels("native", "native", "onednn", "onednn", "native")


def test_all_three_products_of_the_output_layer_are_computed_by_its_kernel() -> None:
    given = problem(1.0, torch.bfloat16)
    plain = torch.backends.mkldnn.matmul.fp32_precision
    for kernel, setting in (("blas", plain), ("onednn", "bf16")):
        other: Kernel = "onednn" if kernel == "blas" else "blas"
        products = Products(bf16=Kernels(other, other, other, kernel))
        with Noted() as noted:
            errors(given, Mesh().tp, nullcontext, products)
        of_ours = [each for each in noted.seen if each[2] is torch.float32]
        assert of_ours == [(name, setting, torch.float32) for name in ("mm", "mm", "addmm_")]
    assert torch.backends.mkldnn.matmul.fp32_precision == plain
