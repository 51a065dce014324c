"""Every way to train gives the serial run: losses, gradients, norms, weights, moments of five float64 steps, to 1e-12.

All jobs of a layout are trained in one set of forked ranks. `make test` runs a handful, in which every value of every
factor occurs, and each axis and feature on its own, so that a failure says where to look; `make test-slow` a set with
every valid pair of values (`covering.py`); `make parity-full` what an hour allows of all combinations (`full.py`).
"""

from collections.abc import Sequence
from typing import Any

import pytest

from colonnade.architecture.adapters import LORA_A
from colonnade.mesh.layout import Layout
from tests.parity.compare import WHAT, Outcome, by_layout, compare, holders_of
from tests.parity.covering import covering, handful, job
from tests.parity.runs import Case, Job, Reference, Way, reference

ALONE: list[Job] = [
    (Case(), Way(tp=2, micro_batch_size=4)),
    (Case(vocab_size=3, tied=False, mask="none"), Way(tp=2, sequence_parallel=True, micro_batch_size=4)),
    (Case(), Way(pp=2, micro_batch_size=2)),
    (Case(), Way(dp=2, micro_batch_size=2)),
    (Case(mask="second_half", clipped=False), Way(dp=2, zero=1, micro_batch_size=2)),
    (Case(tied=False), Way(dp=2, zero=2, micro_batch_size=2)),
    (Case(optimizer="lamb"), Way(dp=2, zero=3, micro_batch_size=2)),
    (Case(num_layers=4), Way(micro_batch_size=2, recompute="full", recompute_every=2)),
    # what sizes of two and four do not reach
    (
        Case(num_heads=6, hidden_size=12, seq_length=9, position="alibi"),
        Way(tp=3, sequence_parallel=True, micro_batch_size=4, chunk_logits=100),
    ),
    (Case(block="llama"), Way(tp=2, sequence_parallel=True, micro_batch_size=4)),
    (Case(block="grouped"), Way(pp=2, micro_batch_size=2, schedule="zero_bubble", recompute="selective")),
    (Case(block="window", position="alibi"), Way(tp=2, dp=2, zero=2, micro_batch_size=2)),
    (Case(block="neox", documents="separate"), Way(tp=2, sequence_parallel=True, micro_batch_size=4)),
    (Case(block="bert"), Way(tp=2, sequence_parallel=True, micro_batch_size=4)),
    (Case(block="scores", norm_position="post", embedding_norm=True), Way(dp=2, zero=3, micro_batch_size=2)),
    (Case(block="t5"), Way(tp=2, sequence_parallel=True, micro_batch_size=4)),
    (Case(block="t5 relu"), Way(pp=2, micro_batch_size=2)),
    (
        Case(block="t5", num_layers=4),
        Way(pp=2, dp=2, micro_batch_size=2, schedule="interleaved", virtual_stages=3, zero=2, recompute="full"),
    ),
    (Case(block="t5", parts="lower"), Way(pp=2, tp=2, zero=1, micro_batch_size=2, schedule="zero_bubble")),
    (Case(parts="lora on some"), Way(tp=2, dp=2, zero=2, micro_batch_size=2, sequence_parallel=True)),
    (Case(parts="lora", num_layers=4), Way(pp=2, micro_batch_size=2, schedule="zero_bubble", recompute="full")),
    (Case(parts="upper", num_layers=4), Way(pp=2, micro_batch_size=2, schedule="interleaved", virtual_stages=2)),
    (Case(global_batch_size=12), Way(dp=3, zero=2, micro_batch_size=2)),
]
HEADS: list[Job] = [
    (Case(block="preferences"), Way(tp=2, micro_batch_size=4, sequence_parallel=True)),
    (Case(block="choice"), Way(pp=2, micro_batch_size=2)),
    (Case(block="spans"), Way(dp=2, zero=3, micro_batch_size=2)),
]
"""Heads for fine-tuning, each on one layout; the others of these are slow."""
MORE: list[Job] = [
    (
        Case(optimizer="lamb", num_layers=4),
        Way(
            tp=2,
            pp=2,
            dp=2,
            micro_batch_size=1,
            schedule="interleaved",
            virtual_stages=2,
            sequence_parallel=True,
            zero=2,
            recompute="full",
        ),
    ),
    (Case(block="t5"), Way(tp=2, micro_batch_size=4)),
    (Case(block="labels"), Way(tp=2, sequence_parallel=True, micro_batch_size=4)),
    (Case(vocab_size=2_100), Way(tp=2, micro_batch_size=4, chunk_logits=20_000)),  # 1,050 rows a rank: 1,152, in tiles
    (Case(block="grouped", documents="separate"), Way(tp=4, micro_batch_size=4)),
    (Case(block="neox"), Way(pp=2, dp=2, zero=3, micro_batch_size=2, recompute="full")),
    (Case(block="bert", vocab_size=2_100), Way(tp=2, micro_batch_size=4, chunk_logits=20_000)),  # in tiles, in chunks
    (Case(block="bert", vocab_size=3, tied=False), Way(tp=4, micro_batch_size=4)),  # the last rank has no token
    (Case(block="bert", norm_position="post", embedding_norm=True), Way(dp=2, zero=3, micro_batch_size=2)),
    (Case(block="bert", tied=False, mask="second_half"), Way(tp=2, pp=2, micro_batch_size=2, schedule="zero_bubble")),
    (Case(block="labels", mask="second_half"), Way(pp=2, micro_batch_size=2, recompute="full")),
    (Case(block="labels", tied=False), Way(tp=2, pp=2, micro_batch_size=2, schedule="zero_bubble")),
    (Case(block="t5", tied=False), Way(tp=2, sequence_parallel=True, micro_batch_size=4, recompute="selective")),
    (Case(block="t5"), Way(pp=4, micro_batch_size=2, cuts=(2, 2, 2, 2))),  # five of the tables' holders
    (Case(block="t5", optimizer="lamb"), Way(dp=2, zero=3, micro_batch_size=2, recompute="full")),
    (
        Case(block="t5 relu", vocab_size=3, mask="none"),
        Way(tp=2, pp=2, dp=2, micro_batch_size=1, schedule="zero_bubble", sequence_parallel=True, zero=3),
    ),
    (Case(block="t5", parts="upper"), Way(pp=4, micro_batch_size=2)),
    (Case(parts="lora"), Way(tp=2, micro_batch_size=4, sequence_parallel=True)),
    (Case(parts="lora", block="grouped"), Way(tp=4, micro_batch_size=4)),
    (Case(num_layers=4), Way(pp=2, micro_batch_size=2, schedule="interleaved", virtual_stages=3)),
    (Case(block="spans"), Way(tp=2, micro_batch_size=4, sequence_parallel=True)),
    (Case(block="choice"), Way(tp=2, micro_batch_size=4, sequence_parallel=True)),
    (Case(block="preferences"), Way(pp=2, micro_batch_size=2)),
    *(
        (Case(block=block, mask=mask), way)
        for block in ("spans", "choice", "preferences")
        for mask in ("differ", "second_half")
        for way in (
            Way(tp=2, micro_batch_size=2),
            Way(tp=2, micro_batch_size=4, sequence_parallel=True, recompute="full"),
            Way(pp=2, micro_batch_size=2, schedule="zero_bubble"),
            Way(pp=2, micro_batch_size=1, recompute="full"),
            Way(dp=2, zero=1, micro_batch_size=4),
            Way(dp=2, zero=2, micro_batch_size=2, recompute="selective"),
            Way(dp=2, zero=3, micro_batch_size=2),
            Way(tp=2, pp=2, dp=2, micro_batch_size=2, zero=3, sequence_parallel=True),
        )
    ),
]
"""More of what is above, and every head on every axis: slow."""
TOGETHER: list[Job] = [
    (Case(), Way(tp=2, pp=2, dp=2, micro_batch_size=1, schedule="zero_bubble", sequence_parallel=True, zero=3)),
]
HANDFUL = [job(combination) for combination in handful()]
COVERING = [job(combination) for combination in covering() if combination not in handful()]


def groups(jobs: Sequence[Job], time_limit: float, name: str = "", *marks: pytest.MarkDecorator) -> list[Any]:
    """A parameter for each layout."""
    return [
        pytest.param((together, time_limit), id=f"{layout}{name}", marks=marks)
        for layout, together in by_layout(jobs).items()
    ]


@pytest.fixture(scope="module")
def references() -> dict[Case, Reference]:
    """Serial runs made so far."""
    return {}


@pytest.fixture(
    scope="module",
    params=[
        *groups(ALONE + HEADS + TOGETHER + HANDFUL, 120.0),
        *groups(MORE, 300.0, " more", pytest.mark.slow),
        *groups(COVERING, 900.0, " covering", pytest.mark.slow),
    ],
)
def outcomes(request: Any, references: dict[Case, Reference]) -> list[Outcome]:
    jobs, time_limit = request.param
    return compare(jobs, references, time_limit=time_limit)


def near(outcomes: list[Outcome], *what: str) -> None:
    for outcome in outcomes:
        for each in what:
            difference, where = outcome.worst(each)
            assert difference <= WHAT[each], f"{outcome.way}, {outcome.job[0]}: {each} {where}"


def test_losses(outcomes: list[Outcome]) -> None:
    near(outcomes, "loss")


def test_gradients(outcomes: list[Outcome]) -> None:
    near(outcomes, "gradients")


def test_thermometers(outcomes: list[Outcome]) -> None:
    """Of every site and part, each sample, head, shard and slice once."""
    near(outcomes, "thermometers")


def test_gradient_norms(outcomes: list[Outcome]) -> None:
    near(outcomes, "grad_norm")


def test_final_weights(outcomes: list[Outcome]) -> None:
    """The optimizer's, and what the layers multiply with."""
    near(outcomes, "master", "parameters", "key_biases")


def test_final_moments(outcomes: list[Outcome]) -> None:
    near(outcomes, "exp_avg", "exp_avg_sq")


def test_copies_are_equal_to_the_bit(outcomes: list[Outcome]) -> None:
    """Over dp, of weights that tp ranks have alike, of the tied table on both ends of the pipeline; and all ranks tell
    the same results.
    """
    for outcome in outcomes:
        assert outcome.unequal_copies() == [], str(outcome.job)
        shared = max(len(ranks) for ranks in outcome.holders().values())
        assert shared == expected_holders(*outcome.job), str(outcome.job)


def expected_holders(case: Case, way: Way) -> int:
    """Ranks that have the most widely held share: parameters of a replicated weight, or a tied table over both ends."""
    stages = max(map(len, holders_of(case, way).values()), default=1)
    return way.dp * max(way.tp, stages)


def test_every_element_is_kept_as_often_as_the_layout_says(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.miscounted() == [], str(outcome.job)


def test_padding_stays_zero(outcomes: list[Outcome]) -> None:
    assert all(verdict.outside == 0.0 for outcome in outcomes for verdict in outcome.ranks)


def test_the_cases_are_what_they_say(outcomes: list[Outcome]) -> None:
    """Clipping bites where it should, every weight has a gradient: A of adapters when B is no longer zero."""
    for outcome in outcomes:
        case, reference = outcome.job[0], outcome.reference
        for step, (result, gradients) in enumerate(zip(reference.results, reference.gradients, strict=True)):
            assert (result.grad_norm > 1.5 * case.clip) == case.clipped, str(case)
            some = [gradient for name, gradient in gradients.items() if step or not name.endswith(LORA_A)]
            assert all(gradient.abs().max() > 1e-6 for gradient in some), str(case)
        assert any("positions" in name for name in reference.kept["master"]) == (
            case.model.position in ("learned", "relative")
        )
        assert ("head.output.weight" in reference.kept["master"]) == (
            not case.tied and case.model.head == "pretraining"
        )


def test_documents_that_are_kept_apart_change_the_loss() -> None:
    cases = [Case(documents=documents) for documents in ("joined", "separate")]
    (joined, separate) = (reference(case).results[0].loss for case in cases)
    assert abs(joined - separate) > 1e-3


def test_every_layout_is_here() -> None:
    layouts = {way.layout for _, way in ALONE + TOGETHER + HANDFUL}
    assert {Layout(tp=2), Layout(pp=2), Layout(dp=2), Layout(tp=2, pp=2, dp=2)} <= layouts
    layouts |= {way.layout for _, way in COVERING}
    assert {Layout(tp=4), Layout(pp=4), Layout(dp=4)} <= layouts
