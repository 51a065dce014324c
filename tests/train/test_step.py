"""The whole step against plain torch: loss, clipping, AdamW and its schedule, and what must not change a step."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import count
from math import cos, pi
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from colonnade.config.schema import Config
from colonnade.data.loader import Batch
from colonnade.data_parallel.freed import Reduced
from colonnade.mesh.mesh import Mesh
from colonnade.optim.adamw import AdamW
from colonnade.train.state import TrainState, build_state
from colonnade.train.step import StepResult, train_step
from colonnade.train.thermometers import Thermometers
from tests.model.plain import Drops, leaves, plain_logits, plain_loss
from tests.parity.compare import relative
from tests.parity.runs import (
    CPU,
    GLOBAL_BATCH,
    SEQ_LENGTH,
    SERIAL,
    STEPS,
    Buffer,
    Case,
    Way,
    configured,
    global_batch,
    local_ranges,
    part,
    whole,
)

Tensors = dict[str, Tensor]
"""By logical name."""
CASES = [
    Case(drop=0.1, clipped=True, mask="differ", num_layers=4),
    Case(drop=0.0, clipped=False, tied=False, mask="second_half"),
]


def fresh(case: Case) -> tuple[Config, TrainState]:
    config = configured(case, SERIAL)
    return config, build_state(config, Mesh(), case.vocab_size, CPU)


def step(case: Case, state: TrainState, microbatches: list[Batch]) -> StepResult:
    way = replace(SERIAL, micro_batch_size=2)
    return train_step(state, microbatches, Mesh(), configured(case, way).train)


def in_microbatches(case: Case, number: int, size: int = 2) -> list[Batch]:
    """A step's samples, `size` at a time."""
    batch = global_batch(case, number)
    return [part(batch, slice(i, i + size)) for i in range(0, GLOBAL_BATCH, size)]


def tensors(state: TrainState, buffer: Buffer) -> Tensors:
    return whole(local_ranges(state, buffer))


def worst(mine: Tensors, expected: Tensors) -> tuple[float, str]:
    """The largest difference, relative to the largest element of its tensor, and where it is."""
    assert mine.keys() == expected.keys()
    return max(
        (relative((mine[name] - other).abs().max().item(), other.abs().max().item()), name)
        for name, other in expected.items()
    )


def plain_training(case: Case) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Five steps with torch's optimizer on the plain model: (loss, gradient norm) of each, and the weights."""
    config, state = fresh(case)
    weights = leaves(tensors(state, "master"))
    optim, rates = config.optim, [0.5, 1.0, *(0.1 + 0.9 * (1 + cos(pi * k / 3)) / 2 for k in (1, 2, 3))]
    groups = [
        {"params": [w for w in weights.values() if w.ndim == 2], "weight_decay": optim.weight_decay},
        {"params": [w for w in weights.values() if w.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(optim.beta1, optim.beta2), eps=optim.epsilon, foreach=False)
    told = []
    for number in range(STEPS):
        batch = global_batch(case, number)
        logits = plain_logits(config.model, weights, batch.tokens.t(), Drops(config.train.seed, batch.samples.tolist()))
        loss = plain_loss(logits, batch.labels.t(), batch.loss_mask.t().double(), batch.loss_mask.sum().item())
        optimizer.zero_grad()
        loss.backward()
        gradients = [w.grad for w in weights.values() if w.grad is not None]
        total = nn.utils.get_total_norm(gradients).item()
        for gradient in gradients:
            gradient.mul_(min(1.0, case.clip / total))
        for group in optimizer.param_groups:
            group["lr"] = optim.learning_rate * rates[number]
        optimizer.step()
        told.append((loss.item(), total))
    return told, {name: w.detach() for name, w in weights.items()}


@pytest.mark.parametrize("case", CASES, ids=["clipped", "not clipped"])
def test_five_steps_are_those_of_plain_torch(case: Case) -> None:
    told, weights = plain_training(case)
    _, state = fresh(case)
    results = [step(case, state, in_microbatches(case, number)) for number in range(STEPS)]
    for result, (loss, total) in zip(results, told, strict=True):
        assert result.loss == pytest.approx(loss, rel=1e-10)
        assert result.grad_norm == pytest.approx(total, rel=1e-10)
    difference, where = worst(tensors(state, "master"), weights)
    assert difference <= 1e-10, where


def test_a_step_tells_what_it_did() -> None:
    case = CASES[0]
    config, state = fresh(case)
    batches = in_microbatches(case, 0)
    first, second = step(case, state, batches), step(case, state, batches)
    assert first.counts[0] == sum(int(batch.loss_mask.sum()) for batch in batches)
    peak = config.optim.learning_rate
    assert [first.learning_rate, second.learning_rate] == pytest.approx([peak / 2, peak], rel=1e-14)
    assert (state.step, state.samples) == (2, 0), "the data position is moved on by who reads the data"
    assert second.loss != first.loss


def after(case: Case, microbatches: list[Batch]) -> tuple[StepResult, Tensors, Tensors]:
    """One step: (result, gradients, weights)"""
    _, state = fresh(case)
    result = step(case, state, microbatches)
    return result, tensors(state, "reduced"), tensors(state, "master")


PARTITIONS = {
    "one by one": [[i] for i in range(GLOBAL_BATCH)],
    "unequal": [[0, 1, 2], [3], [4, 5, 6, 7]],
    "another order": [[7, 0], [2, 5, 1], [6, 4, 3]],
}


@pytest.mark.parametrize("how", PARTITIONS)
def test_the_partition_into_microbatches_changes_nothing(how: str) -> None:
    case = Case(drop=0.1, mask="differ", clipped=False)
    batch = global_batch(case, 0)
    expected, gradients, weights = after(case, [batch])
    result, *others = after(case, [part(batch, samples) for samples in PARTITIONS[how]])
    assert result.loss == pytest.approx(expected.loss, rel=1e-12)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-12)
    for mine, reference in zip(others, (gradients, weights), strict=True):
        difference, where = worst(mine, reference)
        assert difference <= 1e-10, where


def test_micro_batches_may_come_one_by_one() -> None:
    case = CASES[1]
    config = configured(case, replace(SERIAL, micro_batch_size=2))
    listed, made = (fresh(case)[1] for _ in range(2))
    batches = in_microbatches(case, 0)
    expected = train_step(listed, batches, Mesh(), config.train)
    assert train_step(made, iter(batches), Mesh(), config.train) == expected


def test_a_step_of_no_micro_batch_is_refused() -> None:
    config, state = fresh(CASES[0])
    with pytest.raises(AssertionError, match=r"at least one micro-batch on each dp rank, and has been given none"):
        train_step(state, [], Mesh(), config.train)
    assert state.step == 0


def test_every_loss_token_counts_the_same() -> None:
    """The loss is the mean over tokens, not a mean of the samples' or micro-batches' means."""
    case = Case(drop=0.0, mask="differ")
    singles = [after(case, [part(global_batch(case, 0), [i])])[0] for i in range(GLOBAL_BATCH)]
    total = sum(single.loss * single.counts[0] for single in singles)
    tokens = sum(single.counts[0] for single in singles)
    assert len({single.counts[0] for single in singles}) > 2, "masks differ"
    assert after(case, in_microbatches(case, 0))[0].loss == pytest.approx(total / tokens, rel=1e-12)


def test_what_is_masked_does_not_matter() -> None:
    case = Case(mask="second_half")
    batch = global_batch(case, 0)
    _, gradients, _ = after(case, [batch])
    other = batch.tokens.clone(), batch.labels.clone()
    for tokens in other:
        tokens[:, GLOBAL_BATCH // 2 :] = 1
    _, same, _ = after(case, [replace(batch, tokens=other[0], labels=other[1])])
    difference, where = worst(same, gradients)
    assert difference <= 1e-12, where


@pytest.mark.parametrize("outside", [-1, 37])
@pytest.mark.parametrize("which", ["tokens", "labels"])
def test_ids_outside_of_the_vocabulary_are_refused_where_they_count(which: str, outside: int) -> None:
    """A data source of one's own may have them; they would count as no token, without a word."""
    case = Case(drop=0.0)
    batch = global_batch(case, 0)
    ids = getattr(batch, which).clone()
    ids[3] = outside
    with pytest.raises(AssertionError, match="outside of the vocabulary, 0 … 36"):
        after(case, [replace(batch, loss_mask=torch.ones_like(batch.loss_mask), **{which: ids})])


def test_a_label_that_does_not_count_may_be_any_number() -> None:
    case = Case(drop=0.0)
    batch = global_batch(case, 0)
    labels = batch.labels.where(batch.loss_mask > 0, -100)
    assert after(case, [replace(batch, labels=labels)])[0] == after(case, [batch])[0] and (labels == -100).any()


def test_labels_may_count_less_than_one_in_all() -> None:
    """Only their relative weights matter."""
    case = Case(drop=0.0)
    batch = global_batch(case, 0)
    few = after(case, [replace(batch, loss_mask=batch.loss_mask * 2.0**-12)])[0]
    assert few.loss == pytest.approx(after(case, [batch])[0].loss, rel=1e-12)


def test_labels_may_count_less_than_nothing_but_not_all_together() -> None:
    """A mean by weights of both signs is one; divided by a sum below 0 it would be learned backwards."""
    case = Case(drop=0.0, clipped=False)
    batch = global_batch(case, 0)
    negative = torch.arange(GLOBAL_BATCH) == 0
    first, others = (
        after(case, [replace(batch, loss_mask=batch.loss_mask * each)])[0] for each in (negative, ~negative)
    )
    total = others.counts[0] - first.counts[0]
    mean = (others.loss * others.counts[0] - first.loss * first.counts[0]) / total
    signed = batch.loss_mask * torch.where(negative, -1.0, 1.0)
    assert after(case, [replace(batch, loss_mask=signed)])[0].loss == pytest.approx(mean, rel=1e-12)
    with pytest.raises(AssertionError, match=rf"adds up to \[-{total}\.0\], and the loss is the mean by it"):
        after(case, [replace(batch, loss_mask=-signed)])


def test_a_batch_without_a_single_label_only_decays() -> None:
    case = Case(drop=0.1)
    config, state = fresh(case)
    before = tensors(state, "master")
    batches = [replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)) for batch in in_microbatches(case, 0)]
    result = step(case, state, batches)
    assert (result.loss, result.losses, result.grad_norm, result.counts) == (None, (None,), 0.0, (0,))
    shrunk = 1 - result.learning_rate * config.optim.weight_decay
    for name, weight in tensors(state, "master").items():
        expected = before[name] * (shrunk if weight.ndim == 2 else 1.0)
        torch.testing.assert_close(weight, expected, rtol=1e-14, atol=0)


def test_dropout_is_the_steps_own() -> None:
    """Other samples of the run, other masks; the same samples, the same masks."""
    case = Case(drop=0.1)
    batch = global_batch(case, 0)
    moved = replace(batch, samples=batch.samples + GLOBAL_BATCH)
    losses = [after(case, [either])[0].loss for either in (batch, batch, moved)]
    assert losses[0] == losses[1] != losses[2]


def test_positions_beyond_a_short_sample_get_no_gradient() -> None:
    case = Case(drop=0.0)
    batch = global_batch(case, 0)
    short = Batch(batch.tokens[:5], batch.labels[:5], batch.loss_mask[:5], batch.samples)
    _, gradients, _ = after(case, [short])
    positions = gradients["embedding.positions.weight"]
    assert positions.shape[0] == SEQ_LENGTH and positions[:5].any(-1).all() and not positions[5:].any()


class BrokenOff(Exception):
    """By somebody who runs the next step all the same."""


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_that_was_broken_off_leaves_nothing_to_the_next(
    zero: Literal[0, 1, 2, 3], schedule: Literal["1f1b", "zero_bubble"], where: str
) -> None:
    case, way = Case(tied=False), Way(micro_batch_size=2, zero=zero, schedule=schedule)
    config = configured(case, way)
    state, undisturbed = (build_state(config, Mesh(), case.vocab_size, CPU) for _ in range(2))
    losses, calls = state.model.losses, count(1)

    def break_off(*_: object) -> None:
        raise BrokenOff

    def breaking_off(x: Tensor, inputs: object) -> tuple[Tensor, ...]:
        if next(calls) == 3:
            break_off() if where == "forward" else x.register_hook(break_off)
        return losses(x, inputs)

    for number in range(3):
        if number == 1:
            state.model.losses = breaking_off
            with pytest.raises(BrokenOff):
                train_step(state, in_microbatches(case, number), Mesh(), config.train)
            state.model.losses = losses
        told = [train_step(each, in_microbatches(case, number), Mesh(), config.train) for each in (state, undisturbed)]
        assert told[0] == told[1]
    mine, others = tensors(state, "master"), tensors(undisturbed, "master")
    assert all(torch.equal(mine[name], other) for name, other in others.items())


def none(weight: nn.Parameter) -> None:
    weight.grad = None


def ones(weight: nn.Parameter) -> None:
    weight.grad = torch.ones(weight.shape, dtype=weight.grad_dtype)


ELSEWHERE: dict[str, Callable[[nn.Module], object]] = {
    "zero_grad": nn.Module.zero_grad,
    "an optimizer's": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(),
    "none": lambda model: [none(each) for each in model.parameters()],
    "ones": lambda model: [ones(each) for each in model.parameters()],
}


@pytest.mark.parametrize("how", ELSEWHERE)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_finds_its_gradients_whatever_was_put_in_their_place(zero: Literal[0, 1, 2, 3], how: str) -> None:
    """As by habit, before each step: it would add to gradients that nobody reads."""
    case, way = Case(tied=False), Way(micro_batch_size=2, zero=zero)
    config = configured(case, way)
    state, undisturbed = (build_state(config, Mesh(), case.vocab_size, CPU) for _ in range(2))
    for number in range(3):
        ELSEWHERE[how](state.model)
        told = [train_step(each, in_microbatches(case, number), Mesh(), config.train) for each in (state, undisturbed)]
        assert told[0] == told[1] and told[0].grad_norm > 0
    mine, others = tensors(state, "master"), tensors(undisturbed, "master")
    assert all(torch.equal(mine[name], other) for name, other in others.items())


def weights_of(model: nn.Module, *, trained: bool) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """(layer, name, weight) of all of a kind."""
    named = ((layer, each) for layer in model.modules() for each in layer.named_parameters(recurse=False))
    return [(layer, *each) for layer, each in named if each[1].requires_grad == trained]


def assign(model: nn.Module) -> None:
    numbers = {name: each.detach().clone() for name, each in model.state_dict().items()}
    model.load_state_dict(numbers, assign=True)


def another(layer: nn.Module, name: str, weight: nn.Parameter) -> None:
    setattr(layer, name, nn.Parameter(torch.ones(weight.shape, dtype=weight.dtype), requires_grad=weight.requires_grad))


def elsewhere(layer: nn.Module, name: str, weight: nn.Parameter) -> None:
    weight.data = torch.ones(weight.shape, dtype=weight.dtype)


MOVED: dict[str, Callable[[nn.Module], object]] = {
    "to": lambda model: model.to(torch.float32),
    "assigned": assign,
    "the last parameter": lambda model: another(*weights_of(model, trained=True)[-1]),
    "the first one's data": lambda model: elsewhere(*weights_of(model, trained=True)[0]),
    "a frozen parameter": lambda model: another(*weights_of(model, trained=False)[-1]),
    "a frozen one's data": lambda model: elsewhere(*weights_of(model, trained=False)[0]),
}


@pytest.mark.parametrize("how", MOVED)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_does_not_train_weights_that_layers_have_no_more(zero: Literal[0, 1, 2, 3], how: str) -> None:
    """It would change what nobody reads, without a word."""
    case, way = Case(parts="lora"), Way(micro_batch_size=2, zero=zero)
    config, mesh = configured(case, way), Mesh()
    state = build_state(config, mesh, case.vocab_size, CPU)
    train_step(state, in_microbatches(case, 0), mesh, config.train)
    before = tensors(state, "master")
    freed = how == "to" and zero == 2  # of the gradients, which it would move too
    said = "summed gradients alone" if freed else r"^\w.*\.\w+ does not lie in the memory that a step trains any more: "
    with pytest.raises(RuntimeError, match=said):
        with state.ownership.gathered():
            MOVED[how](state.model)
        train_step(state, in_microbatches(case, 1), mesh, config.train)
    assert state.step == 1 and all(torch.equal(x, before[name]) for name, x in tensors(state, "master").items())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_step_trains_on_where_weights_have_stayed(zero: Literal[0, 1, 2, 3]) -> None:
    """As behind what moves nothing."""
    case, way = Case(parts="lora"), Way(micro_batch_size=2, zero=zero)
    config, mesh = configured(case, way), Mesh()
    state, undisturbed = (build_state(config, mesh, case.vocab_size, CPU) for _ in range(2))
    for number in range(2):
        with state.ownership.gathered():
            assign(deepcopy(state.model))
            for weight in state.model.parameters():
                weight.data = weight.data
            if zero < 2:  # else gradients are not there to be moved
                state.model.double()
        told = [train_step(each, in_microbatches(case, number), mesh, config.train) for each in (state, undisturbed)]
        assert told[0] == told[1]


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_copy_of_the_state_goes_on_by_itself(zero: Literal[0, 1, 2, 3], precision: Literal["fp64", "bf16"]) -> None:
    """As in a notebook, to try something: the same steps as the state itself, which is none the wiser."""
    case = Case(tied=False, precision=precision)
    config = configured(case, Way(micro_batch_size=2, zero=zero))
    state = build_state(config, Mesh(), case.vocab_size, CPU)
    train_step(state, in_microbatches(case, 0), Mesh(), config.train)
    with state.ownership.gathered():
        copied = deepcopy(state)
    assert {type(each.grad) for each in copied.model.parameters()} == {Reduced if zero >= 2 else Tensor}
    told = [
        [train_step(each, in_microbatches(case, number), Mesh(), config.train) for number in range(1, 4)]
        for each in (copied, state)
    ]
    assert told[0] == told[1]
    mine, others = tensors(copied, "master"), tensors(state, "master")
    assert all(torch.equal(mine[name], other) for name, other in others.items())


def test_who_is_called_before_the_update_sees_what_it_will_change() -> None:
    """A save in the background has all copied by then: weights and moments are those of the step before."""
    config, state = fresh(CASES[0])
    seen: list[list[Tensor]] = []

    def numbers() -> list[Tensor]:
        moments = (moment for kept in state.optimizer_state for moment in kept.values())
        return [each.clone() for each in (*(bucket.master for bucket in state.buckets), *moments)]

    for number in range(2):
        before = numbers()
        train_step(
            state, in_microbatches(CASES[0], number), Mesh(), config.train, before_update=lambda: seen.append(numbers())
        )
        (called,) = seen
        assert all(map(torch.equal, called, before)) and not any(map(torch.equal, called, numbers()))
        seen.clear()


class Refusing(AdamW):
    """An optimizer of one's own that cannot take a step."""

    def update_(self, *_: object, **__: object) -> None:
        raise BrokenOff


def test_a_step_whose_update_is_refused_is_none() -> None:
    config, state = fresh(CASES[0])
    state.optimizer = Refusing(0.9, 0.95, 1e-8, 0.0)
    with pytest.raises(BrokenOff):
        step(CASES[0], state, in_microbatches(CASES[0], 0))
    assert (state.step, state.learning_rate(state.step + 1)) == (0, config.optim.learning_rate / 2)


def test_what_thermometers_and_an_evaluation_send_is_not_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step may have both. What is predicted of a step ends with its update."""
    _, state = fresh(CASES[1])
    mesh = Mesh()

    def finish(thermometers: Thermometers, mesh: Mesh) -> None:
        mesh.ledger.bytes["all_reduce", "world"] += 8

    monkeypatch.setattr(Thermometers, "finish", finish)
    mesh.ledger.begin_step(1)
    train_step(
        state, in_microbatches(CASES[1], 0), mesh, configured(CASES[1], replace(SERIAL, micro_batch_size=2)).train
    )
    mesh.ledger.bytes["all_reduce", "tp"] += 16
    assert mesh.ledger.least_of_steps() == {}
