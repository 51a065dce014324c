"""Choosing a token: filters against their definitions, frequencies against probabilities, draws at the edges."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from colonnade.errors import CheckpointError, ConfigError
from colonnade.generation.choose import choose, draw, nucleus_size, probabilities
from colonnade.generation.sampling import Sampling

# Few different values, so that ties happen.
LOGITS = st.lists(st.integers(-6, 6).map(lambda i: i / 2), min_size=1, max_size=9).map(np.array)
ANY_LOGITS = st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=9).map(np.array)
TEMPERATURES = st.sampled_from([1e-300, 0.1, 0.7, 1.0, 3.0])


def softmax(logits: NDArray[np.float64], temperature: float) -> list[float]:
    high = max(logits)
    weights = [math.exp(max((x - high) / temperature, -800.0)) for x in logits]
    return [weight / math.fsum(weights) for weight in weights]


def by_definition(logits: NDArray[np.float64], sampling: Sampling) -> list[float]:
    """Rank the tokens; keep k; then the shortest start of the ranking that has top_p of what k tokens have."""
    chances = softmax(logits, sampling.temperature)
    kept = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: sampling.top_k or None]
    if sampling.top_p < 1.0:
        total = math.fsum(chances[token] for token in kept)
        for size in range(1, len(kept) + 1):
            if math.fsum(chances[token] for token in kept[:size]) >= sampling.top_p * total:
                kept = kept[:size]
                break
    total = math.fsum(chances[token] for token in kept)
    return [chances[token] / total if token in kept else 0.0 for token in range(len(logits))]


@given(LOGITS, TEMPERATURES, st.integers(0, 10), st.sampled_from([0.01, 0.123, 0.456, 0.789, 0.987, 1.0]))
def test_filters_are_their_definition(
    logits: NDArray[np.float64], temperature: float, top_k: int, top_p: float
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    np.testing.assert_allclose(
        probabilities(logits, sampling), by_definition(logits, sampling), rtol=1e-12, atol=1e-300
    )


@given(ANY_LOGITS, TEMPERATURES, st.integers(0, 10), st.floats(0, 1, exclude_min=True))
def test_probabilities_sum_to_one_and_keep_the_likeliest(
    logits: NDArray[np.float64], temperature: float, top_k: int, top_p: float
) -> None:
    chances = probabilities(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    assert chances.sum() == pytest.approx(1.0, abs=1e-12)
    assert (chances >= 0).all() and chances[logits.argmax()] == chances.max() > 0
    assert top_k == 0 or np.count_nonzero(chances) <= top_k


@given(st.lists(st.floats(1e-6, 1), min_size=1, max_size=9), st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_the_nucleus_is_the_smallest_set(weights: list[float], top_p: float) -> None:
    falling = np.sort(weights)[::-1]
    size, total = nucleus_size(falling, top_p), falling.sum()
    assert 1 <= size <= len(falling)
    assert falling[:size].sum() >= top_p * total * (1 - 1e-12)
    assert falling[: size - 1].sum() <= top_p * total * (1 + 1e-12)


@pytest.mark.parametrize(("top_p", "size"), [(0.25, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (0.99, 3), (1.0, 3)])
def test_a_nucleus_ends_with_the_token_that_reaches_its_share(top_p: float, size: int) -> None:
    """Exactly too: here all shares are numbers of two bits."""
    assert nucleus_size(np.array([2.0, 1.0, 1.0]), top_p) == size


def test_the_nucleus_is_that_of_the_tokens_which_top_k_has_left() -> None:
    """The first has 4/10 of all, and 4/7 of the likeliest two."""
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert np.count_nonzero(probabilities(logits, Sampling(top_p=0.5))) == 2
    assert np.count_nonzero(probabilities(logits, Sampling(top_p=0.5, top_k=2))) == 1


def test_of_many_equals_those_with_the_lowest_ids_are_kept() -> None:
    logits = np.tile([1.0, 3.0, 2.0], 40)
    chances = probabilities(logits, Sampling(top_k=50))
    assert np.flatnonzero(chances).tolist() == sorted([*range(1, 120, 3), *range(2, 30, 3)])


def test_a_probability_of_one_keeps_every_token() -> None:
    logits = np.array([0.0, -50.0, -700.0])  # their sum is 1 after the first already, in float64
    assert np.count_nonzero(probabilities(logits, Sampling(top_p=1.0))) == 3
    assert np.count_nonzero(probabilities(logits, Sampling(top_p=1.0, top_k=2))) == 2


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert choose(np.array([1.0, 3.0, 3.0]), Sampling(temperature=0.0), prompt=0, position=0) == 1


@given(ANY_LOGITS, st.integers(0, 1 << 40), st.integers(0, 50), st.integers(0, 2000))
def test_one_candidate_is_greedy(logits: NDArray[np.float64], seed: int, prompt: int, position: int) -> None:
    greedy = choose(logits, Sampling(temperature=0.0), prompt=prompt, position=position)
    for sampling in (Sampling(top_k=1, seed=seed), Sampling(top_p=1e-9, seed=seed)):
        assert choose(logits, sampling, prompt=prompt, position=position) == greedy


@given(LOGITS, st.integers(1, 4), st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_what_is_ruled_out_is_never_drawn(logits: NDArray[np.float64], top_k: int, u: float) -> None:
    chances = probabilities(logits, Sampling(top_k=top_k))
    assert chances[draw(chances, u)] > 0


def test_draws_at_the_edges() -> None:
    chances = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [draw(chances, u) for u in (1e-300, 0.2499, 0.25, 1 - 2**-53)] == [1, 1, 3, 3]
    assert draw(np.array([0.3, 0.3, 0.3, 0.0]), 1 - 2**-53) == 2  # a sum below u


@pytest.mark.one_in(3)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_probabilities(temperature: float) -> None:
    logits, num_draws = np.array([0.3, -1.2, 2.0, 0.0, 1.1, -0.4]), 2400
    sampling = Sampling(temperature=temperature, seed=11)
    drawn = [choose(logits, sampling, prompt=i % 60, position=i // 60) for i in range(num_draws)]
    expected = num_draws * np.array(softmax(logits, temperature))
    chi_square = ((np.bincount(drawn, minlength=6) - expected) ** 2 / expected).sum()
    assert chi_square < 20.5  # 5 degrees of freedom: passed by chance 1 time in 1,000


def test_draws_depend_on_seed_prompt_and_position() -> None:
    logits = np.zeros(1 << 16)
    base = choose(logits, Sampling(seed=1), prompt=2, position=3)
    assert base == choose(logits, Sampling(seed=1), prompt=2, position=3)
    others = [
        choose(logits, Sampling(seed=5), prompt=2, position=3),
        choose(logits, Sampling(seed=1), prompt=3, position=3),
        choose(logits, Sampling(seed=1), prompt=2, position=4),
    ]
    assert len({base, *others}) == 4


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"temperature": -0.5}, "temperature = -0.5"),
        ({"temperature": math.inf}, "temperature = inf"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.5}, "top_p = 1.5"),
        ({"top_p": math.nan}, "top_p = nan"),
        ({"seed": -1}, "seed = -1"),
        ({"seed": 2**64 + 1234}, "seed = 18446744073709552850 has more than 64 bits"),
        ({"seed": 2**64}, "seed = 18446744073709551616 has more than 64 bits"),
    ],
)
def test_impossible_arguments(wrong: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_the_largest_seed_has_64_bits() -> None:
    assert Sampling(seed=2**64 - 1, top_p=1.0, temperature=0.0).seed == 2**64 - 1


def test_a_broken_model_is_told_from_a_choice() -> None:
    with pytest.raises(CheckpointError, match=r"position 5 are not finite: .* try --precision bf16"):
        choose(np.array([0.0, math.nan]), Sampling(temperature=0.0), prompt=0, position=5)
