"""Curricula: every token once an epoch, the same sequences on any layout and after any restart, mixed batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colonnade.data.blended_dataset import Mixture, open_blend
from colonnade.data.curriculum import Curriculum
from colonnade.data.curriculum_dataset import CurriculumDataset
from colonnade.data.datasets import Dataset, Passes, Positions, open_datasets
from colonnade.data.gpt_dataset import GPTDataset, TextSamples
from colonnade.data.indexed import TokenFile
from colonnade.data.phased_dataset import PhasedDataset
from colonnade.data.rows import Cut
from tests.data.batches import load_batch
from tests.data.positions import rank_positions

Write = Callable[..., str]
GROWING = Curriculum([0, 300, 900], [4, 8, 16], [2, 4, 8])


@st.composite
def curricula(draw: st.DrawFn) -> Curriculum:
    count = draw(st.integers(1, 4))
    tokens = sorted(draw(st.sets(st.integers(1, 2_000), min_size=count - 1, max_size=count - 1)))
    lengths = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=count - 1, max_size=count - 1))
    batches = draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=count, max_size=count))
    return Curriculum([0, *tokens], [*lengths, 12], batches)


def positions_of(curriculum: Curriculum, start: int, stop: int) -> list[list[int]]:
    """The positions of each step's sequences, on one rank."""
    steps, position = [], start
    while position < stop:
        chunks = curriculum.rank_positions(position, micro_batch_size=1, dp_rank=0, dp_size=1)
        steps.append([place for chunk in chunks for place in chunk])
        position = curriculum.next(position)
    return steps


def labels_of(dataset: Dataset, steps: list[list[int]]) -> list[int]:
    return [label for step in steps for label in dataset.rows(step).labels.reshape(-1).tolist()]


def test_phases() -> None:
    assert [(phase.begin * GROWING.unit, phase.seq_length, phase.global_batch_size) for phase in GROWING.phases] == [
        (0, 4, 2),
        (320, 8, 4),  # ten groups of 2 × 16 tokens
        (960, 16, 8),
    ]
    assert [GROWING.next(position) for position in (0, 78, 80, 240)] == [2, 80, 88, 272]
    assert GROWING.steps(41) == GROWING.next(80)


def test_a_phase_that_ends_late_does_not_delay_those_behind_the_next() -> None:
    """Groups of 4 × 16 tokens: the first phase has two, to 128, and the second the one from there to 192."""
    phases = Curriculum([0, 100, 192], [4, 8, 16], [4, 4, 4]).phases
    assert [phase.begin * 4 for phase in phases] == [0, 128, 192]


def test_a_phase_whose_end_lies_before_its_beginning_is_left_out() -> None:
    """The group of the phase before went beyond it."""
    curriculum = Curriculum([0, 4, 8], [2, 4, 4], [16, 2, 2])
    assert [(phase.begin, phase.sample) for phase in curriculum.phases] == [(0, 0), (32, 16), (32, 16)]
    assert curriculum.phase(32).global_batch_size == 2 and curriculum.steps(2) == 32


def test_phases_of_whole_samples_follow_each_other_at_any_sample(write_tokens: Write) -> None:
    """Of batches of 4, 6 and 10; the run may come to them from anywhere, behind batches that are passed over."""
    curriculum = Curriculum([0, 22 * 4, 33 * 4], [4, 4, 4], [4, 6, 10])
    for position, behind in ((0, [4, 8, 12, 16, 20, 24, 30, 36, 46]), (18, [22, 28, 34, 44]), (22, [28, 34, 44])):
        assert [curriculum.steps(count, position) for count in range(1, len(behind) + 1)] == behind
        assert [curriculum.next(each) for each in (position, *behind[:-1])] == behind
    plain = GPTDataset(TokenFile(write_tokens(161)), range(1), 4, vocab_size=60_000)
    step = CurriculumDataset(plain, curriculum).rows(range(20, 24))
    assert step.labels.tolist() == plain.rows(range(20, 24)).labels.tolist(), "it goes on behind the phase's end"


def test_phases_do_not_look_at_all_those_behind_them() -> None:
    """Each change of the batch in mid-run makes one, and each is looked at where another is asked for."""
    looks = list[int]()

    class Lengths(list[int]):
        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            looks.append(len(found) if isinstance(at, slice) else 1)
            return found

    lengths = Lengths([8] * 5 + [16] * 295)
    phases = Curriculum([160 * number for number in range(300)], lengths, [2] * 300).phases
    assert len(phases) == 300 and sum(looks) < 4 * 300


def test_positions_count_the_lengths_common_divisor() -> None:
    curriculum = Curriculum([0, 24, 48, 96], [4, 6, 6, 12], [2, 2, 4, 2])
    assert curriculum.unit == 2 and curriculum.lengths == (4, 6, 12)
    assert curriculum.next(0) == 4, "two sequences of four tokens"


def test_each_length_has_its_own_samples_in_phases_that_are_made_anew() -> None:
    """Of 16 and of 32 tokens; the second begins behind four sequences of the first."""
    datasets: dict[int, Any] = {16: range(100), 32: range(50)}
    curriculum = Curriculum([0, 64], [16, 32], [2, 2])
    phased = PhasedDataset(datasets, curriculum)
    assert len(phased) == 100
    for end, used in ((3, [(16, 3)]), (4, [(16, 4)]), (6, [(16, 4), (32, 3)])):
        assert list(phased.used(end, curriculum)) == [(datasets[length], number) for length, number in used]


def test_the_pass_of_a_position_is_that_of_its_phases_own_dataset(write_tokens: Write) -> None:
    """Of 10 samples of four tokens, which 64 tokens read one and a half times, and of 5 of eight."""
    file, curriculum = TokenFile(write_tokens(41)), Curriculum([0, 64], [4, 8], [2, 2])
    phased = PhasedDataset(
        {length: GPTDataset(file, range(1), length, vocab_size=60_000) for length in (4, 8)}, curriculum
    )
    assert phased.passes([0, 9, 10, 15]).epochs.tolist() == [0, 0, 1, 1]
    assert phased.passes([16, 18, 20, 28, 30]).epochs.tolist() == [1, 1, 2, 2, 3], "two positions a sample"


def test_steps_may_be_counted_from_anywhere() -> None:
    positions = [0]
    for _ in range(60):
        positions.append(GROWING.next(positions[-1]))
    for first, position in enumerate(positions):
        assert [GROWING.steps(count, position) for count in range(61 - first)] == positions[first:]


def test_the_pass_of_a_position(write_tokens: Write) -> None:
    """A position counts pieces of four tokens, a pass ten samples of sixteen."""
    file = TokenFile(write_tokens(161))
    data = CurriculumDataset(GPTDataset(file, range(1), 16, vocab_size=60_000), GROWING)
    assert len(data) == 40
    assert data.passes([0, 39, 40, 79, 80]).epochs.tolist() == [0, 0, 1, 1, 2]


def test_without_a_curriculum_positions_are_samples(write_tokens: Write) -> None:
    curriculum = Curriculum.constant(4, 12)
    same = {"micro_batch_size": 2, "dp_rank": 1, "dp_size": 3}
    assert curriculum.rank_positions(24, **same) == rank_positions(24, global_batch_size=12, **same)
    assert (curriculum.next(24), curriculum.steps(3), curriculum.unit) == (36, 36, 4)
    plain = open_datasets(
        samples=TextSamples(), train=write_tokens(101), split=(1, 0, 0), seq_length=4, vocab_size=60_000, seed=1
    ).train
    batch, expected = load_batch(CurriculumDataset(plain, curriculum), range(90)), load_batch(plain, range(90))
    assert batch.tokens.tolist() == expected.tokens.tolist()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(curricula(), st.integers(1, 40), st.integers(0, 99))
def test_every_token_is_used_once_an_epoch(
    write_tokens: Write, curriculum: Curriculum, num_samples: int, seed: int
) -> None:
    prefix = write_tokens(12 * num_samples + 1, name=f"of-{num_samples}")
    plain = open_datasets(
        samples=TextSamples(), train=prefix, split=(1, 0, 0), seq_length=12, vocab_size=60_000, seed=seed
    ).train
    dataset = CurriculumDataset(plain, curriculum)
    labels = labels_of(dataset, positions_of(curriculum, 0, 3 * len(dataset)))
    for epoch in range(3):
        assert sorted(labels[12 * num_samples * epoch : 12 * num_samples * (epoch + 1)]) == list(
            range(1, 12 * num_samples + 1)
        )


@pytest.mark.slow
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(curricula(), st.integers(0, 99))
def test_epochs_of_blended_files_do_not_mix_either(write_tokens: Write, curriculum: Curriculum, seed: int) -> None:
    files = {write_tokens(12 * 5 + 1, name="a"): 2.0, write_tokens(12 * 9 + 1, name="b", vocab_size=1_000): 1.0}
    plain = open_blend(
        Mixture(files), samples=TextSamples(), split=(1, 0, 0), seq_length=12, vocab_size=60_000, seed=seed
    ).train
    dataset = CurriculumDataset(plain, curriculum)
    seen: dict[tuple[int, int], Counter[int]] = {}
    for step in positions_of(curriculum, 0, 60 * 12 // curriculum.unit):
        phase = curriculum.phase(step[0])
        numbers = (np.array(step) - phase.begin) * curriculum.unit // phase.seq_length
        passes = plain.passes(dataset._cut(phase, numbers)[0])
        for s, e, labels in zip(passes.sets.tolist(), passes.epochs.tolist(), dataset.rows(step).labels, strict=True):
            assert e == 0 or len(seen[s, e - 1]) == (60, 108)[s], "the pass before is complete"
            seen.setdefault((s, e), Counter()).update(labels.tolist())
    assert all(set(counts.values()) == {1} for counts in seen.values())


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, 100), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_a_restart_on_another_layout_goes_on_with_the_same_sequences(
    write_tokens: Write, stop: int, dp_size: int, micro: int
) -> None:
    curriculum = Curriculum([0, 300, 900], [4, 8, 16], [4, 4, 8])
    plain = open_datasets(
        samples=TextSamples(), train=write_tokens(701), split=(1, 0, 0), seq_length=16, vocab_size=60_000, seed=1
    ).train
    dataset = CurriculumDataset(plain, curriculum)
    whole = positions_of(curriculum, 0, curriculum.steps(120))
    resumed: list[list[int]] = []
    position = curriculum.steps(stop)
    while len(resumed) < 20:
        ranks = [
            curriculum.rank_positions(position, micro_batch_size=micro, dp_rank=rank, dp_size=dp_size)
            for rank in range(dp_size)
        ]
        assert all(len(chunk) == micro for chunks in ranks for chunk in chunks)
        resumed.append([place for chunks in ranks for chunk in chunks for place in chunk])
        position = curriculum.next(position)
    assert resumed == whole[stop : stop + 20]
    assert labels_of(dataset, resumed) == labels_of(dataset, whole[stop : stop + 20])


def test_a_batch_is_of_as_many_texts_as_it_has_sequences(write_tokens: Write) -> None:
    plain = GPTDataset(TokenFile(write_tokens(1_601)), range(1), 16, vocab_size=60_000)
    dataset = CurriculumDataset(plain, Curriculum([0, 1_000], [4, 16], [8, 8]))
    rows = dataset.rows(range(8))
    assert rows.tokens.tolist() == [list(range(16 * sample, 16 * sample + 4)) for sample in range(8)]
    assert dataset.rows(range(8, 16)).tokens[0].tolist() == [4, 5, 6, 7]


def test_documents_are_known_in_pieces_too(write_tokens: Write) -> None:
    plain = GPTDataset(TokenFile(write_tokens(6, 95)), range(2), 16, vocab_size=60_000, cut=Cut(separate=True))
    batch = load_batch(CurriculumDataset(plain, Curriculum([0, 1_000], [8, 16], [1, 1])), [0])
    assert batch.positions is not None
    assert batch.positions[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    assert batch.loss_mask[:, 0].tolist() == [1, 1, 1, 1, 1, 0, 1, 1]


def test_sequences_of_two_stages_are_not_of_one_length(write_tokens: Write) -> None:
    plain = GPTDataset(TokenFile(write_tokens(1_601)), range(1), 16, vocab_size=60_000)
    with pytest.raises(AssertionError, match="one length"):
        CurriculumDataset(plain, GROWING).rows([79, 80])


def test_files_of_a_blend_that_are_in_other_passes_stay_side_by_side() -> None:
    class Blend:
        seq_length = 8

        def passes(self, samples: Positions) -> Passes:
            return Passes(np.array([0, 0, 1, 1]), np.array([3, 4, 0, 0]))

    blend: Any = Blend()
    order = CurriculumDataset(blend, Curriculum([0, 64], [4, 8], [4, 4]))._group(np.arange(4), 2)
    assert order.tolist() == [0, 4, 6, 1, 5, 7, 2, 3]  # file 0 begins a new pass with its second sample
