"""A sample's numbers: those of its own stream, from the first on, one after the other."""

from __future__ import annotations

import numpy as np

from colonnade.data.draws import Draws, SamplePurpose
from colonnade.randomness import stream_keys, uniform


def test_a_samples_numbers_are_its_streams_from_the_first_on_and_each_question_takes_one() -> None:
    """What a sample is made of never changes, or a run that goes on would see other samples than it began with."""
    stream = uniform(stream_keys(1, SamplePurpose.BERT, 2, last=[3]), 0, 3_000).numpy()[0]
    draws = Draws(1, SamplePurpose.BERT, 2, 3)
    assert [draws.chance(0.5) for _ in range(20)] == (stream[:20] < 0.5).tolist()
    assert [draws.integer(5, 9) for _ in range(20)] == (5 + np.floor(4 * stream[20:40])).tolist()
    assert draws.order(60).tolist() == np.argsort(stream[40:100]).tolist()
    assert draws.uniform(2_900).tolist() == stream[100:].tolist()


def test_what_a_samples_numbers_are_for_is_numbered_for_ever() -> None:
    """As part of the key they are drawn by."""
    assert {each.name: each.value for each in SamplePurpose} == {"BERT": 101, "BERT_GRID": 102, "T5": 103}


def test_a_number_for_all_samples_is_of_its_seed_its_purpose_and_its_own_number() -> None:
    asked = [(1, SamplePurpose.BERT_GRID, 0), (2, SamplePurpose.BERT_GRID, 0)]
    asked += [(1, SamplePurpose.BERT_GRID, 7), (1, SamplePurpose.T5, 0)]
    found = [Draws.key(*each) for each in asked]
    assert len(set(found)) == 4
    assert found == [int(stream_keys(seed, purpose, last=[number])[0]) for seed, purpose, number in asked]
