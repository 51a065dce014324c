"""The checksum sees every bit, and where it is; and it sees the same bits alike, however they lie."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.checkpoint import checksum
from colonnade.checkpoint.checksum import Checksum

CPU = torch.device("cpu")


def of(x: torch.Tensor) -> int:
    return int(Checksum(CPU).of(x))


@pytest.fixture
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "CHUNK", 16)


@pytest.mark.slow
@given(
    st.integers(1, 200),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.uint8]),
    st.integers(0, 3),
    st.data(),
)
def test_one_bit_anywhere_changes_it(count: int, dtype: torch.dtype, offset: int, data: st.DataObject) -> None:
    bits = torch.arange((offset + count) * dtype.itemsize, dtype=torch.uint8) * 37
    x = bits.view(dtype)[offset:]
    before = of(x)
    bit = data.draw(st.integers(0, count * dtype.itemsize * 8 - 1))
    bits[offset * dtype.itemsize + bit // 8] ^= 1 << (bit % 8)
    assert of(x) != before
    assert of(x) == of(x.clone()), "where it lies in memory plays no part"


@pytest.mark.usefixtures("short_chunks")
def test_order_counts_within_chunks_and_between() -> None:
    x = torch.arange(100, dtype=torch.float32)
    sums = {of(x)}
    for i, j in itertools.combinations(range(0, 100, 7), 2):
        y = x.clone()
        y[i], y[j] = x[j], x[i]
        sums.add(of(y))
    assert len(sums) == 1 + 15 * 14 // 2


@pytest.mark.slow
@pytest.mark.usefixtures("short_chunks")
def test_two_bits_do_not_cancel() -> None:
    """Signs of zeros above all: products modulo 2^64 alone would lose any two of them in upper halves."""
    x = torch.zeros(64)
    sums = {of(x)}
    for i, j in itertools.combinations(range(64), 2):
        y = x.clone()
        y[[i, j]] = -0.0
        sums.add(of(y))
    assert len(sums) == 1 + 64 * 63 // 2


class OnDevice(torch.Tensor):
    """Says that it is not in CPU memory."""

    is_cpu = False  # type: ignore[assignment]


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("count", [1, 40, 101])
def test_a_device_without_a_dot_product_of_integers_has_the_same(count: int) -> None:
    """Copies on devices of two kinds are held against each other."""
    x = torch.randn(count, generator=torch.Generator().manual_seed(count))
    assert of(x.as_subclass(OnDevice)) == of(x)


def test_its_definition() -> None:
    """Of one word and a half, by Python's integers."""
    x = torch.tensor([1.5, -2.0, 3.0])
    ours, upper = (checksum._odd_numbers(2, stream).tolist() for stream in (1, 2))
    first, second = (0xC0000000_3FC00000 - (1 << 64)), 0x40400000
    one = first * ours[0] + (first >> 32) * upper[0]
    expected = one * checksum._FACTOR + second * ours[0] + (second >> 32) * upper[0]
    assert of(x) % (1 << 64) == expected % (1 << 64)
    assert all(number % 2 for number in ours + upper)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_a_range_that_begins_within_a_word_has_the_sum_of_its_numbers(dtype: torch.dtype, offset: int) -> None:
    """As weights of 16 bits lie in a buffer; the bits around it play no part, and the last one does."""
    bits = torch.arange(64 * dtype.itemsize, dtype=torch.uint8)
    part = bits.view(dtype)[offset:-3]
    sum_of_it = of(part.clone())
    assert of(part) == sum_of_it
    bits[: offset * dtype.itemsize] = 99
    bits[-3 * dtype.itemsize :] = 99
    assert of(part) == sum_of_it
    bits[-3 * dtype.itemsize - 1] ^= 64
    assert of(part) == of(part.clone()) != sum_of_it


def test_nothing_has_a_sum_too() -> None:
    assert of(torch.zeros(0)) == 0
