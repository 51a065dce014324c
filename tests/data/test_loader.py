"""Batches: shapes, labels, and the same global batch on every layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.data import loader
from colonnade.data.gpt_dataset import GPTDataset
from colonnade.data.indexed import TokenFile
from colonnade.data.loader import evaluation_batches, evaluation_positions
from colonnade.data.rows import Cut
from colonnade.data.sampler import EpochOrder
from tests.data.batches import load_batch
from tests.data.positions import rank_positions

Write = Callable[..., str]
sizes = st.integers(1, 6)


def test_a_batch(write_tokens: Write) -> None:
    dataset = GPTDataset(TokenFile(write_tokens(101)), range(1), 5, vocab_size=60_000, order=EpochOrder(20, 3))
    batch = load_batch(dataset, range(7, 10))
    assert batch.tokens.shape == batch.labels.shape == batch.loss_mask.shape == (5, 3)
    assert (batch.tokens.dtype, batch.labels.dtype, batch.samples.dtype) == (torch.int64,) * 3
    assert batch.loss_mask.dtype == torch.float32
    assert batch.tokens.is_contiguous() and batch.labels.is_contiguous()
    assert bool((batch.labels == batch.tokens + 1).all()) and bool((batch.loss_mask == 1).all())
    assert batch.samples.tolist() == [7, 8, 9]
    assert batch.tokens[:, 1].tolist() == dataset.sample(8)[:-1].tolist()
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.tokens, batch.tokens) and torch.equal(moved.samples, batch.samples)


@given(st.integers(0, 10**15), sizes, sizes, sizes)
def test_the_global_batch_is_the_same_on_every_layout(
    start: int, dp_size: int, micro: int, num_microbatches: int
) -> None:
    global_batch_size = dp_size * micro * num_microbatches
    ranks = [
        rank_positions(
            start, global_batch_size=global_batch_size, micro_batch_size=micro, dp_rank=rank, dp_size=dp_size
        )
        for rank in range(dp_size)
    ]
    positions = [position for rank in ranks for microbatch in rank for position in microbatch]
    assert positions == list(range(start, start + global_batch_size))
    assert all(len(rank) == num_microbatches for rank in ranks)
    assert all(len(microbatch) == micro for rank in ranks for microbatch in rank)


def test_a_global_batch_that_cannot_be_shared() -> None:
    with pytest.raises(AssertionError):
        rank_positions(0, global_batch_size=6, micro_batch_size=2, dp_rank=0, dp_size=2)


@given(st.integers(0, 100), sizes, sizes)
def test_evaluation_sees_each_sample_once(num_samples: int, dp_size: int, micro: int) -> None:
    ranks = [
        evaluation_positions(num_samples, micro_batch_size=micro, dp_rank=rank, dp_size=dp_size)
        for rank in range(dp_size)
    ]
    assert [position for rank in ranks for microbatch in rank for position in microbatch] == list(range(num_samples))
    assert all(0 < len(microbatch) <= micro for rank in ranks for microbatch in rank)
    shares = [sum(map(len, rank)) for rank in ranks]
    assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("num_samples", [1, 3, 7])
def test_uneven_shares_are_filled_with_what_does_not_count(write_tokens: Write, dp_size: int, num_samples: int) -> None:
    """As many micro-batches on every rank, every label once."""
    dataset = GPTDataset(TokenFile(write_tokens(101)), range(1), 5, vocab_size=60_000)
    ranks = [
        list(
            evaluation_batches(
                partial(load_batch, dataset), num_samples, micro_batch_size=2, dp_rank=rank, dp_size=dp_size
            )
        )
        for rank in range(dp_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    counted = [label for batches in ranks for each in batches for label in each.labels[each.loss_mask > 0].tolist()]
    assert sorted(counted) == list(range(1, 5 * num_samples + 1))


def test_what_fills_a_share_is_of_samples_that_there_are() -> None:
    seen = list[range]()

    class Nothing:
        def uncounted(self) -> Nothing:
            return self

    def load(samples: range) -> Nothing:
        seen.append(samples)
        return Nothing()

    for rank in (0, 1):
        assert len(list(evaluation_batches(load, 1, micro_batch_size=4, dp_rank=rank, dp_size=2))) == 1
    assert seen == [range(1), range(1)]


def test_all_of_a_batch_but_its_samples_goes_to_the_device(
    write_tokens: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = GPTDataset(TokenFile(write_tokens(5, 36)), range(2), 8, vocab_size=60_000, cut=Cut(separate=True))
    batch = load_batch(data, range(2))
    monkeypatch.setattr(loader, "upload", lambda part, device: part.to(device) + 1)
    moved = batch.to(torch.device("cpu"))
    assert batch.documents is not None and batch.positions is not None
    for name in ("tokens", "labels", "loss_mask", "documents", "positions"):
        assert torch.equal(getattr(moved, name), getattr(batch, name) + 1), name
    assert moved.samples is batch.samples


def test_a_step(write_tokens: Write) -> None:
    dataset = GPTDataset(TokenFile(write_tokens(101)), range(1), 5, vocab_size=60_000)
    parts = rank_positions(4, global_batch_size=8, micro_batch_size=2, dp_rank=1, dp_size=2)
    batches = [load_batch(dataset, positions) for positions in parts]
    assert [batch.samples.tolist() for batch in batches] == [[8, 9], [10, 11]]
    assert batches[1].tokens[0].tolist() == [50, 55]
