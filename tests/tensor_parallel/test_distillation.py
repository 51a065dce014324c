"""The mixed loss of labels and a teacher against torch's own, whole: value and every gradient, on any cut."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, Mesh, build_mesh
from colonnade.tensor_parallel import cross_entropy
from colonnade.tensor_parallel.distillation import SoftTargets, distilled_loss, likeliest
from colonnade.tensor_parallel.embedding import VocabParallelEmbedding
from colonnade.tensor_parallel.parallel import Parallel
from tests.distributed import run_on_ranks
from tests.tensor_parallel.shards import drawn, load_shards_

S, B, HIDDEN, WIDER = 6, 5, 6, 9


@dataclass(frozen=True)
class Setting:
    """What is distilled, and what must not matter to the result."""

    vocab_size: int = 37
    temperature: float = 2.0
    k: int = 0
    """Of the teacher's likeliest tokens; 0: its logits."""
    alpha: float = 0.6
    bias: bool = False
    chunk: int = 1 << 24
    sequence_parallel: bool = False


def given(setting: Setting) -> dict[str, Tensor]:
    """Whole tensors, float64."""
    generator, v = torch.Generator().manual_seed(3), setting.vocab_size
    weights = torch.rand(S, B, dtype=torch.float64, generator=generator)
    weights[torch.rand(S, B, generator=generator) < 0.33] = 0.0
    found = {
        "hidden": drawn(S, B, HIDDEN, seed=1),
        "table": drawn(v, HIDDEN, seed=2),
        "read": drawn(S, B, WIDER, seed=4),
        "teacher": drawn(v, WIDER, seed=5),
        "labels": torch.randint(0, v, (S, B), generator=generator),
        "hard": weights * (1 - setting.alpha),
        "soft": weights * setting.alpha * setting.temperature**2,
    }
    return found | ({"bias": drawn(v, seed=6), "teacher_bias": drawn(v, seed=7)} if setting.bias else {})


def with_others(p: Tensor, named: Tensor) -> Tensor:
    """[..., v] -> [..., k + 1]: the probabilities of the named tokens, and that of all others together."""
    k = int(named.sum(-1)[0, 0])
    return torch.cat([p[named].view(*p.shape[:-1], k), p.masked_fill(named, 0.0).sum(-1, keepdim=True)], -1)


def torchs(setting: Setting) -> dict[str, Tensor]:
    """Loss and gradients by torch's cross_entropy and kl_div of whole logits."""
    whole, t = given(setting), setting.temperature
    hidden, table = (whole[name].clone().requires_grad_() for name in ("hidden", "table"))
    bias = whole["bias"].clone().requires_grad_() if setting.bias else torch.zeros(setting.vocab_size).double()
    logits = hidden @ table.t() + bias
    said = whole["read"] @ whole["teacher"].t() + whole.get("teacher_bias", 0.0)
    hard = nn.functional.cross_entropy(logits.flatten(0, 1), whole["labels"].flatten(), reduction="none").view(S, B)
    q = (said / t).softmax(-1)
    log_p = (logits / t).log_softmax(-1)
    if 0 < setting.k < setting.vocab_size:
        named = torch.zeros_like(q).scatter(-1, q.topk(setting.k, -1).indices, 1.0) > 0
        q, log_p = with_others(q, named), with_others(log_p.exp(), named).log()
    soft = nn.functional.kl_div(log_p, q, reduction="none").sum(-1)
    loss = (hard * whole["hard"] + soft * whole["soft"]).sum()
    loss.backward()
    assert hidden.grad is not None and table.grad is not None
    found = {"loss": loss.detach(), "hidden": hidden.grad, "table": table.grad}
    return found | ({"bias": bias.grad} if bias.grad is not None else {})


def ours(setting: Setting, tp: Axis) -> dict[str, Tensor]:
    """The same of this rank's rows; gradients of hidden states whole."""
    whole, v = given(setting), setting.vocab_size
    cross_entropy.CHUNK_LOGITS = setting.chunk

    def shard(name: str) -> VocabParallelEmbedding:
        layer = VocabParallelEmbedding(v, whole[name].shape[1], Parallel(tp)).double()
        load_shards_(layer, tp, {"weight": whole[name]})
        return layer

    def rows(name: str) -> Tensor | None:
        if name not in whole:
            return None
        length = len(student.weight)
        padded = nn.functional.pad(whole[name], (0, length * tp.size - v))
        return padded[tp.rank * length : (tp.rank + 1) * length].clone()

    student, teacher = shard("table"), shard("teacher")
    bias = rows("bias")
    bias = None if bias is None else nn.Parameter(bias)
    soft = SoftTargets(whole["soft"], setting.temperature, whole["read"], teacher.weight.detach(), rows("teacher_bias"))
    if setting.k:
        ids, log_probs = likeliest(
            whole["read"], teacher.weight.detach(), k=setting.k, temperature=setting.temperature, tp=tp, vocab_size=v,
            bias=rows("teacher_bias"),
        )  # fmt: skip
        soft = replace(soft, hidden=None, table=None, bias=None, ids=ids, log_probs=log_probs)
    mine = whole["hidden"].clone()
    if setting.sequence_parallel:
        mine = mine.chunk(tp.size)[tp.rank].clone()
    mine.requires_grad_()
    loss = distilled_loss(
        mine,
        student.weight,
        whole["labels"],
        whole["hard"],
        soft,
        bias=bias,
        tp=tp,
        vocab_size=v,
        sequence_parallel=setting.sequence_parallel,
    )
    loss.backward()
    assert mine.grad is not None and student.weight.grad is not None
    found = {"loss": loss.detach(), "hidden": mine.grad, "table": student.weight.grad}
    return found | ({} if bias is None or bias.grad is None else {"bias": bias.grad})


def check(setting: Setting, tp: Axis) -> None:
    found, expected = ours(setting, tp), torchs(setting)
    length = len(found["table"])
    assert found.keys() == expected.keys()
    for name, whole in expected.items():
        part = whole
        if name in ("table", "bias"):
            part = whole[tp.rank * length : (tp.rank + 1) * length]
            assert not found[name][len(part) :].any(), "padding has no gradient"
        elif name == "hidden" and setting.sequence_parallel:
            part = whole.chunk(tp.size)[tp.rank]
        torch.testing.assert_close(found[name][: len(part)] if part.ndim else found[name], part, rtol=1e-11, atol=1e-12)


SETTINGS = {
    "a teacher's logits": Setting(),
    "of one temperature": Setting(temperature=1.0),
    "its likeliest tokens": Setting(k=5),
    "all of its tokens": Setting(k=37),
    "biases": Setting(bias=True, k=0),
    "biases, likeliest": Setting(bias=True, k=4),
    "a token at a time": Setting(chunk=1),
    "biases, likeliest, a token at a time": Setting(bias=True, k=4, chunk=1),
    "the teacher alone": Setting(alpha=1.0),
    "the labels alone": Setting(alpha=0.0, k=3),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradients_are_torchs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", cross_entropy.CHUNK_LOGITS)
    check(SETTINGS[name], Mesh().tp)


def on_ranks(rank: int, tp: int, settings: list[Setting]) -> None:
    mesh = build_mesh(Layout(tp=tp), rank)
    for setting in settings:
        check(setting, mesh.tp)


@pytest.mark.parametrize("tp", [2, 3])
def test_the_same_where_the_vocabulary_is_cut(tp: int) -> None:
    """Of 3 tokens on two ranks, one has padding."""
    few = Setting(vocab_size=3, k=2)
    whole = [*SETTINGS.values(), replace(few, k=0), few, replace(few, k=3)]
    cut = [replace(each, sequence_parallel=True) for each in (Setting(), Setting(k=4))]
    run_on_ranks(on_ranks, tp, whole + cut)


def test_a_student_that_says_what_its_teacher_says_has_nothing_to_learn() -> None:
    whole = given(Setting())
    hidden, table = whole["hidden"].clone().requires_grad_(), nn.Parameter(whole["table"].clone())
    soft = SoftTargets(whole["soft"], 2.0, whole["hidden"], whole["table"])
    loss = distilled_loss(hidden, table, whole["labels"], torch.zeros(S, B), soft, tp=Mesh().tp, vocab_size=37)
    loss.backward()
    assert hidden.grad is not None and table.grad is not None
    assert abs(loss.item()) < 1e-13 and hidden.grad.abs().max() < 1e-14 and table.grad.abs().max() < 1e-14


def test_few_tokens_teach_no_certainty_that_the_teacher_lacks() -> None:
    """A student that is its teacher has nothing to learn from its likeliest tokens either, few as they may be."""
    whole = given(Setting())
    hidden, table = whole["hidden"].clone().requires_grad_(), nn.Parameter(whole["table"].clone())
    ids, log_probs = likeliest(whole["hidden"], whole["table"], k=2, temperature=2.0, tp=Mesh().tp, vocab_size=37)
    assert log_probs.exp().sum(-1).max() < 0.9
    soft = SoftTargets(whole["soft"], 2.0, ids=ids, log_probs=log_probs)
    loss = distilled_loss(hidden, table, whole["labels"], torch.zeros(S, B), soft, tp=Mesh().tp, vocab_size=37)
    loss.backward()
    assert hidden.grad is not None and table.grad is not None
    assert abs(loss.item()) < 1e-12 and hidden.grad.abs().max() < 1e-13 and table.grad.abs().max() < 1e-13


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_near(dtype: torch.dtype) -> None:
    whole, expected = given(Setting()), torchs(Setting())
    hidden, table = whole["hidden"].to(dtype).requires_grad_(), nn.Parameter(whole["table"].to(dtype))
    table.grad = None
    soft = SoftTargets(whole["soft"], 2.0, whole["read"].to(dtype), whole["teacher"].to(dtype))
    loss = distilled_loss(hidden, table, whole["labels"], whole["hard"], soft, tp=Mesh().tp, vocab_size=37)
    loss.backward()
    assert hidden.grad is not None
    assert loss.dtype == torch.float32 and abs(loss.item() / float(expected["loss"]) - 1) < 0.02
    assert (hidden.grad.double() - expected["hidden"]).norm() < 0.03 * expected["hidden"].norm()


def test_likeliest_tokens_that_sum_to_a_little_more_than_1_leave_nothing_to_others() -> None:
    """As rounding to 16 bits leaves them: the loss is that of tokens that sum to 1, and not NaN."""
    hidden, table = drawn(S, B, HIDDEN, seed=1), drawn(37, HIDDEN, seed=2)
    ids = torch.arange(3).expand(S, B, 3).contiguous()
    losses = []
    for sum_of_them in (1.0, 1.0 + 2.0**-10):
        mine, weight = hidden.clone().requires_grad_(), nn.Parameter(table.clone())
        said = torch.full((S, B, 3), sum_of_them / 3).double().log()
        soft = SoftTargets(torch.ones(S, B).double(), 2.0, ids=ids, log_probs=said)
        nothing = torch.zeros(S, B).double()
        labels = torch.zeros(S, B, dtype=torch.int64)
        loss = distilled_loss(mine, weight, labels, nothing, soft, tp=Mesh().tp, vocab_size=37)
        loss.backward()
        assert mine.grad is not None and mine.grad.isfinite().all()
        losses.append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
