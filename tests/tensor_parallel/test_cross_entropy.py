"""The fused output layer and loss against torch's two separate ones, and how little of the logits is ever alive."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import nan
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from colonnade.kernels.choice import BF16_UNITS, Products
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, Mesh, build_mesh, paper_mesh
from colonnade.tensor_parallel import cross_entropy
from colonnade.tensor_parallel.cross_entropy import output_loss, token_guesses, token_losses
from colonnade.tensor_parallel.embedding import VocabParallelEmbedding
from colonnade.tensor_parallel.parallel import Parallel
from tests.distributed import run_on_ranks
from tests.emulated import backward, emulated_cuda
from tests.tensor_parallel.shards import assert_gradients, drawn, load_shards_

S, B, HIDDEN = 4, 5, 6


def problem(vocab_size: int, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(hidden, whole output weight, labels, loss weights); a third of the tokens count for nothing"""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, vocab_size, (S, B), generator=generator)
    weights = torch.rand(S, B, dtype=torch.float64, generator=generator)
    weights[torch.rand(S, B, generator=generator) < 0.33] = 0.0
    return drawn(S, B, HIDDEN, seed=1) * scale, drawn(vocab_size, HIDDEN, seed=2), labels, weights


def torchs(hidden: Tensor, table: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, gradient of hidden, gradient of the table, each token's loss)"""
    hidden, table = hidden.clone().requires_grad_(), table.clone().requires_grad_()
    logits = hidden @ table.t()
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(S, B)
    loss = (losses * weights).sum()
    loss.backward()
    assert hidden.grad is not None and table.grad is not None
    return loss.detach(), hidden.grad, table.grad, losses.detach()


@dataclass(frozen=True)
class Setting:
    """What must not matter to the result."""

    vocab_size: int = 37
    scale: float = 1.0
    padding: float = 0.0
    chunk: int = 1 << 24
    sequence_parallel: bool = False

    def mine(self, stream: Tensor, tp: Axis) -> Tensor:
        """What a rank has of the residual stream."""
        return stream.chunk(tp.size)[tp.rank] if self.sequence_parallel else stream


def beside_torch(setting: Setting, tp: Axis) -> None:
    hidden, table, labels, weights = problem(setting.vocab_size, setting.scale)
    loss, hidden_gradient, table_gradient, losses = torchs(hidden, table, labels, weights)
    layer = VocabParallelEmbedding(setting.vocab_size, HIDDEN, Parallel(tp)).double()
    load_shards_(layer, tp, {"weight": table}, padding=setting.padding)
    x = setting.mine(hidden, tp).clone().requires_grad_()
    with chunks_of(setting.chunk):
        mine = output_loss(
            x,
            layer.weight,
            labels,
            weights,
            tp=tp,
            vocab_size=setting.vocab_size,
            sequence_parallel=setting.sequence_parallel,
        )
        mine.backward()
        each = token_losses(hidden, layer.weight, labels, tp=tp, vocab_size=setting.vocab_size)
    torch.testing.assert_close(mine.detach(), loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(each, losses, rtol=1e-12, atol=1e-12)
    assert x.grad is not None
    assert (x.grad - setting.mine(hidden_gradient, tp)).abs().max() <= 1e-12 * hidden_gradient.abs().max()
    assert not x.grad[setting.mine(weights, tp) == 0.0].any(), "a token that does not count has no gradient at all"
    assert_gradients(layer, tp, {"weight": table_gradient})


def all_beside_torch(rank: int, num_ranks: int, settings: list[Setting]) -> None:
    tp = build_mesh(Layout(tp=num_ranks), rank).tp
    for setting in settings:
        beside_torch(setting, tp)


@contextmanager
def chunks_of(logits: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "CHUNK_LOGITS", logits)
        yield


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_loss_and_gradients_are_torchs(tp_size: int) -> None:
    run_on_ranks(all_beside_torch, tp_size, [Setting(vocab_size) for vocab_size in (37, 40, 3)])


def guesses_beside_torch(rank: int, num_ranks: int, vocab_sizes: list[int]) -> None:
    tp = build_mesh(Layout(tp=num_ranks), rank).tp
    for vocab_size in vocab_sizes:
        hidden, table, labels, _ = problem(vocab_size)
        bias = drawn(vocab_size, seed=5) - 50.0  # all logits are far below 0
        logits = hidden @ table.t() + bias
        labels[::2] = logits.argmax(-1)[::2]
        layer = VocabParallelEmbedding(vocab_size, HIDDEN, Parallel(tp)).double()
        load_shards_(layer, tp, {"weight": table})
        rows = len(layer.weight)
        mine = nn.functional.pad(bias, (0, rows * num_ranks - vocab_size))[rank * rows : (rank + 1) * rows]
        losses, likeliest = token_guesses(hidden, layer.weight, labels, bias=mine, tp=tp, vocab_size=vocab_size)
        expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(S, B)
        torch.testing.assert_close(losses, expected, rtol=1e-12, atol=1e-12)
        assert torch.equal(likeliest, labels == logits.argmax(-1))
        alike = torch.ones_like(layer.weight)  # no token is likelier than another
        losses, likeliest = token_guesses(torch.ones_like(hidden), alike, labels, tp=tp, vocab_size=vocab_size)
        assert likeliest.all()


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_label_is_likeliest_among_the_tokens_of_all_ranks(tp_size: int) -> None:
    run_on_ranks(guesses_beside_torch, tp_size, [37, 3])  # of 3 tokens, the last of 4 ranks has none


def biased_beside_torch(
    tp: Axis,
    dtype: torch.dtype,
    products: Products,
    tolerance: float,
    device: Callable[[], AbstractContextManager[None]] = nullcontext,
    vocab_size: int = 37,
) -> None:
    """Loss and the three gradients with a bias on the logits, against torch's in float64 on the rounded numbers."""
    hidden, table, labels, weights = (t.to(dtype) if i < 2 else t for i, t in enumerate(problem(vocab_size)))
    bias = (3.0 * drawn(vocab_size, seed=5)).detach().to(dtype)
    exact = [t.detach().double().requires_grad_() for t in (hidden, table, bias)]
    logits = (exact[0] @ exact[1].t() + exact[2]).flatten(0, 1)
    losses = nn.functional.cross_entropy(logits, labels.flatten(), reduction="none").view(S, B)
    (losses * weights).sum().backward()
    layer = VocabParallelEmbedding(vocab_size, HIDDEN, Parallel(tp)).to(dtype)
    load_shards_(layer, tp, {"weight": table})
    rows = len(layer.weight)
    at = slice(tp.rank * rows, (tp.rank + 1) * rows)
    mine = nn.functional.pad(bias, (0, rows * tp.size - vocab_size))[at].clone().requires_grad_()
    x = hidden.detach().clone().requires_grad_()
    with device():
        loss = output_loss(x, layer.weight, labels, weights, bias=mine, tp=tp, vocab_size=vocab_size, products=products)
        backward(loss)
    assert x.grad is not None and mine.grad is not None and layer.weight.grad is not None
    real = max(0, min(rows, vocab_size - tp.rank * rows))
    assert not mine.grad[real:].any(), "padding has no gradient"
    found = (loss, x.grad, layer.weight.grad[:real], mine.grad[:real])
    gradients = [t.grad for t in exact]
    expected = ((losses * weights).sum(), gradients[0], gradients[1][at][:real], gradients[2][at][:real])
    scales = (expected[0], *gradients)
    for which, (a, b, scale) in enumerate(zip(found, expected, scales, strict=True)):
        assert (a.detach().double() - b.detach()).norm() <= tolerance * scale.detach().norm(), which


def all_biased_beside_torch(
    rank: int, num_ranks: int, dtype: torch.dtype, products: Products, tolerance: float
) -> None:
    tp = build_mesh(Layout(tp=num_ranks), rank).tp
    for vocab_size in (37, 2):
        biased_beside_torch(tp, dtype, products, tolerance, vocab_size=vocab_size)


@pytest.mark.parametrize("tp_size", [1, 3])
def test_a_bias_on_the_logits_is_torchs(tp_size: int) -> None:
    """Also where the last of three ranks has none of two tokens."""
    run_on_ranks(all_biased_beside_torch, tp_size, torch.float64, Products(), 1e-12)


@pytest.mark.parametrize("products", [Products(), Products(bf16=BF16_UNITS)], ids=["widened", "native"])
def test_a_bias_on_16_bit_logits_is_torchs(products: Products) -> None:
    biased_beside_torch(Mesh().tp, torch.bfloat16, products, 2.0**-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bias_on_a_gpu_is_torchs(dtype: torch.dtype) -> None:
    tolerance = 2.0**-7 if dtype is torch.bfloat16 else 1e-6
    biased_beside_torch(Mesh().tp, dtype, Products(), tolerance, emulated_cuda)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_padding_rows_that_a_gpu_multiplies_get_no_probability(dtype: torch.dtype) -> None:
    """A shard of 1,030 rows is filled up to 1,152."""
    tolerance = 2.0**-7 if dtype is torch.bfloat16 else 1e-6
    biased_beside_torch(Mesh().tp, dtype, Products(), tolerance, emulated_cuda, vocab_size=1030)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_stream_that_is_cut_along_the_sequence(tp_size: int) -> None:
    settings = [Setting(vocab_size, sequence_parallel=True) for vocab_size in (37, 3)]
    run_on_ranks(all_beside_torch, tp_size, [*settings, Setting(chunk=100, sequence_parallel=True)])


def test_padding_rows_get_no_probability() -> None:
    run_on_ranks(all_beside_torch, 4, [Setting(padding=padding) for padding in (1e4, -1e4, nan)])


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_chunks_change_nothing(tp_size: int) -> None:
    """Nor that some ranks have fewer real rows: all come to each chunk's gather."""
    settings = [Setting(chunk=chunk) for chunk in (1, 100, 37 * 20)] + [Setting(5, chunk=4)]
    run_on_ranks(all_beside_torch, tp_size, settings)


def test_chunks_of_logits_are_as_large_as_the_device_needs() -> None:
    """2^25 on a CPU; on CUDA 2^28, as products of a few hundred tokens would leave most of it idle."""
    weight = torch.empty(50_304, 0)  # GPT-2's rows
    counts = [len(cross_entropy.chunks_of(8_192, weight))]
    with emulated_cuda():
        counts.append(len(cross_entropy.chunks_of(8_192, weight)))
        padded, shard = cross_entropy._rows_to_multiply(weight, 50_257), cross_entropy._rows_to_multiply(weight, 0)
    assert counts == [13, 2]
    assert (padded, shard) == (50_304, 0), "aligned rows are multiplied; of a rank without tokens none"
    assert cross_entropy._rows_to_multiply(weight, 50_257) == 50_257


def test_large_and_small_logits() -> None:
    run_on_ranks(all_beside_torch, 2, [Setting(scale=scale) for scale in (300.0, 1e-6)])


def on_serial(vocab_size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, VocabParallelEmbedding, Any]:
    tp = Mesh().tp
    hidden, table, labels, weights = problem(vocab_size)
    layer = VocabParallelEmbedding(vocab_size, HIDDEN, Parallel(tp)).double()
    load_shards_(layer, tp, {"weight": table})
    layer.to(dtype)
    return hidden.to(dtype).requires_grad_(), layer, (labels, weights)


def test_gradients_add_up_over_microbatches() -> None:
    hidden, layer, (labels, weights) = on_serial(37)
    for _ in range(2):
        output_loss(hidden, layer.weight, labels, weights, tp=Mesh().tp, vocab_size=37).backward()
    _, _, expected, _ = torchs(*problem(37))
    assert_gradients(layer, Mesh().tp, {"weight": 2 * expected})


def test_the_loss_may_be_one_of_a_sum() -> None:
    hidden, layer, (labels, weights) = on_serial(37)
    loss = output_loss(hidden, layer.weight, labels, weights, tp=Mesh().tp, vocab_size=37)
    (loss + hidden.square().sum()).backward()
    _, expected, _, _ = torchs(*problem(37))
    torch.testing.assert_close(hidden.grad, expected + 2 * hidden.detach(), rtol=1e-12, atol=1e-12)


def test_a_multiple_of_the_loss_is_refused() -> None:
    hidden, layer, (labels, weights) = on_serial(37)
    loss = output_loss(hidden, layer.weight, labels, weights, tp=Mesh().tp, vocab_size=37)
    with pytest.raises(AssertionError, match="backward\\(\\) of the loss itself"):
        (2 * loss).backward()


def test_bf16_loses_no_more_than_its_operands() -> None:
    hidden, layer, (labels, weights) = on_serial(37, torch.bfloat16)
    loss = output_loss(hidden, layer.weight, labels, weights, tp=Mesh().tp, vocab_size=37)
    loss.backward()
    exact, hidden_gradient, table_gradient, _ = torchs(
        hidden.detach().double(), layer.weight.detach().double()[:37], labels, weights
    )
    assert loss.dtype is torch.float32 and layer.weight.grad is not None and layer.weight.grad.dtype is torch.float32
    # logits may have been rounded to bf16 (2⁻⁹ of up to ~8: 2⁻⁶ absolute each, of either sign)
    assert abs(loss - exact) <= 2.0**-6 * weights.sum()
    assert hidden.grad is not None
    assert (hidden.grad - hidden_gradient).norm() <= 2.0**-5 * hidden_gradient.norm()
    assert (layer.weight.grad[:37] - table_gradient).norm() <= 2.0**-5 * table_gradient.norm()


def test_two_numbers_a_token_cross_ranks() -> None:
    mesh = paper_mesh(Layout(tp=4), 1)
    layer = VocabParallelEmbedding(37, HIDDEN, Parallel(mesh.tp)).double()
    load_shards_(layer, mesh.tp, {"weight": drawn(37, HIDDEN, seed=2)})
    hidden, _, labels, weights = problem(37)
    output_loss(hidden.requires_grad_(), layer.weight, labels, weights, tp=mesh.tp, vocab_size=37).backward()
    forward = sum(entry.bytes for entry in mesh.ledger.entries if not entry.backward)
    assert forward == 2 * S * B * 8
    assert [(e.operation, e.shape) for e in mesh.ledger.entries if e.backward] == [("all_reduce", (S, B, HIDDEN))]


def test_what_a_cut_stream_sends() -> None:
    """It is gathered once forward; the gradient comes back by reduce-scatter."""
    mesh = paper_mesh(Layout(tp=4), 1)
    layer = VocabParallelEmbedding(37, HIDDEN, Parallel(mesh.tp)).double()
    load_shards_(layer, mesh.tp, {"weight": drawn(37, HIDDEN, seed=2)})
    hidden, _, labels, weights = problem(37)
    x = hidden[:1].requires_grad_()
    output_loss(x, layer.weight, labels, weights, tp=mesh.tp, vocab_size=37, sequence_parallel=True).backward()
    sent = [(e.operation, e.shape, e.backward) for e in mesh.ledger.entries]
    assert sent == [
        ("all_gather", (1, B, HIDDEN), False),
        ("all_gather", (1, 2, S * B), False),
        ("reduce_scatter", (S, B, HIDDEN), True),
    ]


def test_fp16_takes_a_loss_scale() -> None:
    """Gradients are those of the loss times the scale, to fp16's rounding; the loss too."""
    scale = 2.0**12
    hidden, layer, (labels, weights) = on_serial(37, torch.float16)
    loss = output_loss(hidden, layer.weight, labels, weights * scale, tp=Mesh().tp, vocab_size=37)
    loss.backward()
    exact, hidden_gradient, table_gradient, _ = torchs(
        hidden.detach().double(), layer.weight.detach().double()[:37], labels, weights
    )
    assert loss.dtype is torch.float32 and hidden.grad is not None and hidden.grad.dtype is torch.float16
    assert layer.weight.grad is not None and layer.weight.grad.dtype is torch.float32
    # products of 11-bit operands are summed in fp32; only the gradient of x is rounded to fp16, by 2⁻¹¹ at most
    assert abs(loss / scale - exact) <= 1e-5 * exact
    assert (hidden.grad.double() / scale - hidden_gradient).abs().max() <= 2.0**-10 * hidden_gradient.abs().max()
    assert (layer.weight.grad[:37] / scale - table_gradient).norm() <= 1e-5 * table_gradient.norm()


@pytest.mark.parametrize("where", ["weight", "hidden"])
def test_overflow_stays_visible(where: str) -> None:
    """No mask and no zero weight turns what fp16 cannot hold into a number."""
    hidden, layer, (labels, weights) = on_serial(37, torch.float16)
    if where == "weight":
        loss = output_loss(hidden, layer.weight, labels, weights * 2.0**30, tp=Mesh().tp, vocab_size=37)
    else:
        with torch.no_grad():
            hidden[weights == 0.0] = torch.inf  # of tokens that do not count
        loss = output_loss(hidden, layer.weight, labels, weights, tp=Mesh().tp, vocab_size=37)
        assert loss.isnan()
        assert layer.weight.grad is not None and not layer.weight.grad.isfinite().all()
    loss.backward()
    assert hidden.grad is not None and not hidden.grad.isfinite().all()


class Alive(TorchDispatchMode):
    """The largest tensor made, and the most numbers that lay in large tensors at one time."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.large, self.largest, self.most = large, 0, 0
        self._made: WeakSet[Tensor] = WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {place(t) for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)}
        out = function(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple | list) else [out]:
            if isinstance(t, Tensor) and numbers(t) >= self.large and place(t) not in given:
                self._made.add(t)
                self.largest = max(self.largest, numbers(t))
        self.most = max(self.most, sum({place(t): numbers(t) for t in self._made}.values()))
        return out


def place(t: Tensor) -> int:
    """Where a tensor's memory begins."""
    return t.untyped_storage().data_ptr()


def numbers(t: Tensor) -> int:
    """How many elements its memory holds."""
    return t.untyped_storage().nbytes() // t.element_size()


@pytest.mark.parametrize("evaluating", [False, True])
def test_no_more_than_a_chunk_of_logits_is_alive(evaluating: bool) -> None:
    """64 tokens × 1,000 rows in chunks of 4,000: h = 2 keeps everything else small."""
    tp: Axis = Mesh().tp
    hidden = drawn(16, 4, 2, seed=1).float().requires_grad_()
    weight = nn.Parameter(drawn(1000, 2, seed=2).float())
    weight.grad = torch.zeros_like(weight)
    labels, weights = torch.zeros(16, 4, dtype=torch.int64), torch.ones(16, 4)
    with chunks_of(4000), Alive(large=2500) as alive:
        if evaluating:
            token_losses(hidden, weight, labels, tp=tp, vocab_size=1000)
        else:
            output_loss(hidden, weight, labels, weights, tp=tp, vocab_size=1000).backward()
    assert alive.largest == 4000, "chunks are as large as they may be, and none is larger"
    assert alive.most == 4000, "one chunk is dropped before the next is made"


def test_a_rank_with_the_label_alone_has_no_part_of_the_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """However far below 0 the logits of the other ranks are: of none, the compiled kernels shift by 0."""
    nothing = torch.zeros(2), torch.tensor([0.0, 3.0]), torch.tensor([-150.0, 0.0])
    monkeypatch.setattr(cross_entropy, "output_exponentials_", lambda *_: nothing)
    monkeypatch.setattr(cross_entropy, "_across_ranks", lambda lse, target, tp: (lse.clamp(min=-200.0), target))
    label = torch.zeros(2, dtype=torch.int64), torch.tensor([True, False])
    x, table = torch.ones(2, HIDDEN), torch.ones(1, HIDDEN)
    found = cross_entropy._fused_softmax([torch.zeros(2, 1)], x, table, label, torch.ones(2), Mesh().tp)
    assert found.fraction.tolist() == pytest.approx([0.0, 1 / 3])


def test_a_rank_without_rows_has_no_part_of_a_token_whose_label_is_all_there_is() -> None:
    """A vocabulary of one entry: no rank has another, and the log-sum-exp of the others is -∞."""
    label = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool)
    found = cross_entropy._softmax(torch.zeros(2, 0), label, torch.ones(2), Mesh().tp, apart=True)
    assert found.fraction.tolist() == found.slope.tolist() == found.losses.tolist() == [0.0, 0.0]
