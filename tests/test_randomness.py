"""The random numbers: the function itself is fixed for ever, its access random, its streams alike and strangers.

Statistics are computed on fixed seeds, so a test passes always or never. Bounds are five standard deviations, or six
where thousands of numbers are looked at; correct numbers would break one in a million.
"""

from collections.abc import Callable
from itertools import pairwise
from math import sqrt

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from colonnade import randomness
from colonnade.randomness import (
    Purpose,
    drop_probability,
    keep_mask,
    name_id,
    normal,
    stream_keys,
    uniform,
    uniform_16bit,
    words,
)

KEYS = stream_keys(1234, Purpose.EMBEDDING_DROPOUT, 3, last=[0, 1, 1 << 40])
Draw = Callable[[np.ndarray, int, int], Tensor]
DRAWS: list[Draw] = [words, uniform_16bit, uniform, normal, lambda k, start, n: keep_mask(k, start, n, 0.1)]
DRAW_NAMES = ["words", "uniform_16bit", "uniform", "normal", "keep_mask"]


# --- the function itself ---------------------------------------------------------------------------------------------


def test_golden_values() -> None:
    """Every run's weights and masks hang on these: they never change."""
    assert [int(key) for key in KEYS] == [0x8997018A0512B2E3, 0xA2E2ED0F5CEEABCD, 0x845E31EFDDEF7DC6]
    assert words(KEYS, 0, 4).tolist() == [
        [-1280438515, 1394023217, 1396473070, -397657776],
        [1085081998, 903768129, 1113875397, 1220822629],
        [2069956628, 1448096810, 73836561, 865305974],
    ]
    assert words(KEYS, (1 << 32) - 2, 2).tolist() == [
        [1115376919, 1544716874],
        [-1876238957, -1230716440],
        [1419183497, -916784567],
    ]
    assert uniform_16bit(KEYS, 1, 4)[0].tolist() == [-19538, 6961, 21271, 31982]
    assert [x.hex() for x in uniform(KEYS, 0, 2)[0].tolist()] == ["0x1.9d70786e98b8cp-3", "0x1.a678f9dcd0987p-1"]
    assert [x.hex() for x in normal(KEYS, 0, 3)[2].tolist()] == [
        "0x1.0c42a8c54f113p+1",
        "0x1.611f7a7bce321p-5",
        "-0x1.20a65614a3b92p+0",
    ]
    assert keep_mask(KEYS, 0, 24, 0.1).logical_not().nonzero().tolist() == [[0, 20], [2, 6]]
    assert name_id("blocks.0.attention.qkv.weight") == 640129523076242473


def test_purposes_keep_their_numbers() -> None:
    assert {purpose.name: int(purpose) for purpose in Purpose} == {
        "INITIAL_WEIGHT": 1,
        "EMBEDDING_DROPOUT": 2,
        "ATTENTION_DROPOUT": 3,
        "RESIDUAL_DROPOUT": 4,
        "SAMPLING": 5,
        "INNER_DROPOUT": 6,
        "FINAL_DROPOUT": 7,
        "ADAPTER_DROPOUT": 8,
        "POOLED_DROPOUT": 9,
    }


def word_by_hand(key: int, i: int) -> int:
    """Word `i` of a stream in Python's own integers: SplitMix with Wellons' finishing function."""
    mask = 0xFFFFFFFF
    gamma = key >> 32 | 1
    gamma ^= 0xAAAAAAAA if (gamma ^ gamma >> 1).bit_count() < 12 else 0
    x = (key + gamma * i) & mask
    x = ((x ^ x >> 16) * 0x21F0AAAD) & mask
    x = ((x ^ x >> 15) * 0x735A2D97) & mask
    x ^= x >> 15
    return x - (1 << 32) if x >> 31 else x


@given(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 32) - 3))
def test_words_are_splitmix(key: int, start: int) -> None:
    drawn = words(np.array([key], np.uint64), start, 3)[0].tolist()
    assert drawn == [word_by_hand(key, start + i) for i in range(3)]


@given(st.integers(0, 1 << 62), st.lists(st.integers(0, 1 << 62), min_size=1, max_size=4))
def test_keys_of_many_are_keys_of_one(seed: int, last: list[int]) -> None:
    together = stream_keys(seed, 7, last=last)
    assert [int(key) for key in together] == [int(stream_keys(seed, 7, last=[one])[0]) for one in last]


def test_a_stream_ends() -> None:
    with pytest.raises(AssertionError, match="a stream has 2\\^32 words"):
        words(KEYS, (1 << 32) - 1, 2)


# --- random access ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", DRAWS, ids=DRAW_NAMES)
@given(
    start=st.integers(0, 200), count=st.integers(0, 100), streams=st.lists(st.integers(0, 9), min_size=1, max_size=4)
)
def test_a_slice_is_the_slice_of_the_whole(draw: Draw, start: int, count: int, streams: list[int]) -> None:
    keys = stream_keys(5, last=range(10))
    assert torch.equal(draw(keys[streams], start, count), draw(keys, 0, 300)[streams, start : start + count])


def test_roots_are_rounded_correctly() -> None:
    """As IEEE 754 wants it of processors; MKL's, which torch takes for its own, are not."""
    x = torch.linspace(1.0, 40.0, 20_000, dtype=torch.float64)
    assert randomness._exact_root(x).tolist() == [sqrt(each) for each in x.tolist()]


@pytest.mark.parametrize("draw", DRAWS, ids=DRAW_NAMES)
def test_the_number_of_threads_changes_nothing(draw: Draw) -> None:
    threads, keys = torch.get_num_threads(), stream_keys(5, last=range(4))
    try:
        torch.set_num_threads(1)
        alone = draw(keys, 3, 1 << 16)
        torch.set_num_threads(2)
        assert torch.equal(draw(keys, 3, 1 << 16), alone)
    finally:
        torch.set_num_threads(threads)


# --- all values are alike likely -------------------------------------------------------------------------------------


def assert_uniform(counts: Tensor) -> None:
    """Chi-square of counts that should be equal, within five standard deviations of its own distribution."""
    expected = counts.sum() / counts.numel()
    chi_square = ((counts - expected).square() / expected).sum().item()
    freedom = counts.numel() - 1
    assert abs(chi_square - freedom) < 5 * sqrt(2 * freedom), (
        f"chi-square {chi_square} with {freedom} degrees of freedom"
    )


def pairs_of_bytes(one: Tensor, other: Tensor) -> Tensor:
    """How often each pair of byte values stands in the same places: [65536]."""
    return torch.bincount((one.to(torch.int64) << 8) + other.to(torch.int64), minlength=65536).double()


def many_words(count: int = 1 << 20) -> dict[str, Tensor]:
    """Words of one long stream, and the first words of many neighbouring streams."""
    return {
        "one stream": words(stream_keys(1234, Purpose.RESIDUAL_DROPOUT, 0, last=[0]), 0, count)[0],
        "many streams": words(stream_keys(1234, Purpose.RESIDUAL_DROPOUT, 0, last=range(count // 4)), 0, 4).flatten(),
    }


@pytest.mark.parametrize("source", ["one stream", "many streams"])
def test_bytes_and_16_bit_halves_are_uniform(source: str) -> None:
    drawn = many_words()[source]
    for place in range(4):
        assert_uniform(torch.bincount(drawn.view(torch.uint8).view(-1, 4)[:, place].long(), minlength=256).double())
    assert_uniform(torch.bincount(drawn.view(torch.int16).long() + 32768, minlength=65536).double())


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 8, 256, 1024])
def test_neighbouring_words_are_independent(lag: int) -> None:
    octets = many_words()["one stream"].view(torch.uint8).view(-1, 4)
    for place in range(4):
        assert_uniform(pairs_of_bytes(octets[lag:, place], octets[:-lag, place]))


def test_neighbouring_streams_are_independent() -> None:
    drawn = words(stream_keys(1234, Purpose.EMBEDDING_DROPOUT, 0, last=range(1 << 18)), 0, 4)
    octets = drawn.view(torch.uint8).view(-1, 4, 4)
    for place in range(4):
        assert_uniform(pairs_of_bytes(octets[1:, :, place].flatten(), octets[:-1, :, place].flatten()))


NEIGHBOURS = {
    "samples": [stream_keys(1234, 4, 6, last=[sample]) for sample in range(32)],
    "layers": [stream_keys(1234, 4, layer, last=[100]) for layer in range(32)],
    "purposes": [stream_keys(1234, purpose, 6, last=[100]) for purpose in range(1, 33)],
    "seeds": [stream_keys(seed, 4, 6, last=[100]) for seed in range(32)],
    "permuted names": [
        stream_keys(a, b, c, last=[d]) for a in (1, 2) for b in (1, 2, 3) for c in (1, 2, 3) for d in (1, 2)
    ],
}


@pytest.mark.parametrize("what", NEIGHBOURS)
def test_streams_with_neighbouring_names_are_not_correlated(what: str) -> None:
    count = 1 << 14
    drawn = torch.cat([uniform(keys, 0, count) for keys in NEIGHBOURS[what]])
    correlation = torch.corrcoef(drawn).fill_diagonal_(0.0)
    assert correlation.abs().max() < 6 / sqrt(count)
    shifted = torch.corrcoef(torch.cat([drawn[:, 1:], drawn[:, :-1]]))[: len(drawn), len(drawn) :]
    assert shifted.abs().max() < 6 / sqrt(count)


def assert_half_flip(before: Tensor, after: Tensor) -> None:
    """Each of 32 bits differs in half of the pairs."""
    bits = (before.flatten() ^ after.flatten())[:, None] >> torch.arange(32, dtype=torch.int32) & 1
    assert (bits.double().mean(0) - 0.5).abs().max() < 3 / sqrt(len(bits))  # 6 standard deviations


@pytest.mark.parametrize("place", range(4), ids=["seed", "purpose", "layer", "sample"])
def test_one_bit_of_a_name_moves_half_of_the_bits(place: int) -> None:
    names = np.random.default_rng(0).integers(0, 1 << 30, size=(300, 4))

    def drawn(flip: int) -> Tensor:
        changed = names.copy()
        changed[:, place] ^= flip
        return words(np.concatenate([stream_keys(*map(int, name[:3]), last=[int(name[3])]) for name in changed]), 7, 16)

    for bit in range(0, 62, 7):
        assert_half_flip(drawn(0), drawn(1 << bit))


@pytest.mark.parametrize("bit", range(0, 31, 3))
def test_one_bit_of_a_counter_moves_half_of_the_bits(bit: int) -> None:
    keys = stream_keys(3, last=range(1 << 13))
    assert_half_flip(words(keys, 5, 1), words(keys, 5 ^ 1 << bit, 1))


@pytest.mark.slow
def test_no_two_of_a_million_names_share_a_stream() -> None:
    keys = np.concatenate(
        [
            *(stream_keys(seed, purpose, last=range(75_000)) for seed in (0, 1, 1234) for purpose in (1, 2, 3)),
            *(stream_keys(1234, 3, layer, sample, last=range(16)) for layer in range(24) for sample in range(500)),
            *(stream_keys(1234, 1, name_id(f"blocks.{layer}.mlp.up.weight"), last=range(3072)) for layer in range(50)),
        ]
    )
    assert len(keys) > 1_000_000 and len(np.unique(keys)) == len(keys)
    beginnings = words(keys, 0, 2).numpy().view(np.int64)
    assert len(np.unique(beginnings)) == len(keys)


def test_names_are_told_apart() -> None:
    names = [
        f"blocks.{i}.{part}.{kind}"
        for i in range(200)
        for part in ("mlp.up", "mlp.down")
        for kind in ("weight", "bias")
    ]
    assert len({name_id(name) for name in names}) == len(names)


# --- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop", [0.0, 1e-4, 0.1, 0.25, 0.5, 0.9, 0.9999])
def test_the_share_of_dropped_elements(drop: float) -> None:
    keep = keep_mask(stream_keys(1234, 2, 0, last=range(64)), 0, 1 << 15, drop)
    chance, count = drop_probability(drop), keep.numel()
    assert abs(chance - drop) <= 2.0**-17
    spread = sqrt(max(chance * (1 - chance), 0.0) / count)
    assert abs(1 - keep.double().mean().item() - chance) <= 5 * spread
    # no sample, and no position over all samples, is treated worse than another
    for dim in (0, 1):
        shares = 1 - keep.double().mean(dim)
        assert (shares - chance).abs().max() <= max(
            6 * sqrt(chance * (1 - chance) / keep.shape[dim]), 16 / keep.shape[dim]
        )


@pytest.mark.parametrize("drop", [1 - 2.0**-17, 0.999999])
def test_what_is_kept_of_nearly_nothing_can_still_be_scaled(drop: float) -> None:
    assert drop_probability(drop) == 1 - 2.0**-16
    keep = keep_mask(stream_keys(1234, 2, 0, last=range(64)), 0, 1 << 15, drop)
    assert 0 < keep.sum() < 100


def test_dropping_is_a_threshold_on_the_same_numbers() -> None:
    """What a smaller rate drops, a larger one drops too."""
    masks = [keep_mask(KEYS, 0, 5000, drop) for drop in (0.0, 0.1, 0.2, 0.7)]
    assert masks[0].all()
    for smaller, larger in pairwise(masks):
        assert not (larger & ~smaller).any()


def test_neighbouring_elements_are_dropped_independently() -> None:
    keep = keep_mask(stream_keys(1234, 2, 0, last=range(64)), 0, 1 << 15, 0.1).double()
    for one, other in [(keep[:, 1:], keep[:, :-1]), (keep[:, 2:], keep[:, :-2]), (keep[1:], keep[:-1])]:
        both = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(both) < 5 / sqrt(one.numel())


# --- uniform and normal floats ---------------------------------------------------------------------------------------


def kolmogorov_smirnov(chances: Tensor) -> float:
    """√n times the largest distance between the empirical distribution function and the diagonal."""
    count = len(chances)
    ranks = torch.arange(count + 1, dtype=torch.float64) / count
    ordered = chances.sort().values
    return sqrt(count) * max((ranks[1:] - ordered).max().item(), (ordered - ranks[:-1]).max().item())


def test_uniform_floats() -> None:
    drawn = uniform(stream_keys(9, last=range(16)), 0, 1 << 15).flatten()
    assert kolmogorov_smirnov(drawn) < 2.7  # a chance of 1e-6
    low_bits = (drawn * 2.0**52).floor().to(torch.int64) & 0xFF
    assert_uniform(torch.bincount(low_bits, minlength=256).double())


def test_uniform_floats_are_never_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def extreme(keys: np.ndarray, start: int, count: int, device: str = "cpu") -> Tensor:
        return torch.tensor([[-(1 << 31)] * 2 + [(1 << 31) - 1] * 2], dtype=torch.int32)

    monkeypatch.setattr(randomness, "words", extreme)
    assert uniform(KEYS[:1], 0, 2).tolist() == [[2.0**-53, 1 - 2.0**-53]]


def test_normal_floats() -> None:
    z = normal(stream_keys(9, last=range(32)), 0, 1 << 15).flatten()
    count = len(z)
    assert kolmogorov_smirnov(torch.special.ndtr(z)) < 2.7
    for power, moment, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (5, 0, 945), (6, 15, 10170)]:
        assert abs(z.pow(power).mean().item() - moment) < 5 * sqrt(variance / count), f"moment {power}"
    for limit in (2.0, 3.0, 4.0):
        chance = 2 * torch.special.ndtr(torch.tensor(-limit, dtype=torch.float64)).item()
        assert abs((z.abs() > limit).sum().item() - chance * count) < 5 * sqrt(chance * count), f"beyond {limit}"


def test_normal_floats_are_the_quantiles_of_uniform_ones() -> None:
    keys = stream_keys(9, last=range(16))
    chances, z = uniform(keys, 0, 1 << 14), normal(keys, 0, 1 << 14)
    torch.testing.assert_close(z, torch.special.ndtri(chances), rtol=1e-13, atol=1e-15)


def test_the_farthest_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chances down to the smallest that can be drawn, where sampling never gets: 2⁻⁵³ lies 8.2 deviations out."""
    low = (torch.logspace(0, 51, 500, base=2, dtype=torch.float64).floor() - 0.5) * 2.0**-52  # as `uniform` draws them
    monkeypatch.setattr(randomness, "uniform", lambda *_: torch.cat([low, 1 - low])[None])
    z = normal(KEYS[:1], 0, 1000)[0]
    torch.testing.assert_close(z[:500], torch.special.ndtri(low), rtol=2e-13, atol=1e-15)
    assert z[0] < -8.2 and bool((z[:500].diff() >= 0).all())
    exact = 1 - (1 - low)  # what is left of a chance near 1
    torch.testing.assert_close(z[500:], -torch.special.ndtri(exact), rtol=2e-13, atol=1e-15)
