"""Dropout masks: the same element of the same sample has the same fate, however the work is cut."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from colonnade.kernels.dropout import Masks, dropout, dropout_of_columns
from colonnade.randomness import Purpose, drop_probability, keep_mask, stream_keys
from tests.tensor_parallel.shards import drawn

CPU = torch.device("cpu")
S, H, DROP = 5, 8, 0.3
samples = st.lists(st.integers(0, 1 << 40), min_size=1, max_size=6, unique=True)


def hidden(ids: list[int], seed: int = 1, layer: int = 0, purpose: Purpose = Purpose.RESIDUAL_DROPOUT) -> Tensor:
    return Masks(seed, np.array(ids)).hidden(purpose, layer, torch.Size((S, len(ids), H)), DROP, CPU)


def attention(ids: list[int], heads: range, layer: int = 0) -> Tensor:
    return Masks(1, np.array(ids)).attention(layer, heads, DROP).mask(S, S, CPU)


@given(samples)
def test_a_samples_masks_do_not_depend_on_the_batch(ids: list[int]) -> None:
    together, heads = hidden(ids), attention(ids, range(4))
    assert together.shape == (S, len(ids), H) and heads.shape == (len(ids), 4, S, S)
    for i, one in enumerate(ids):
        assert torch.equal(together[:, i], hidden([one])[:, 0])
        assert torch.equal(heads[i], attention([one], range(4))[0])


@given(st.integers(0, 7), st.integers(1, 8))
def test_a_heads_mask_does_not_depend_on_the_rank(first: int, count: int) -> None:
    assert torch.equal(
        attention([3, 9], range(first, first + count)), attention([3, 9], range(16))[:, first : first + count]
    )


@given(samples, st.integers(0, S), st.integers(0, S))
def test_a_part_of_the_sequence_has_its_part_of_the_mask(ids: list[int], start: int, stop: int) -> None:
    start, stop = min(start, stop), max(start, stop)
    shape = torch.Size((stop - start, len(ids), H))
    part = Masks(1, np.array(ids)).hidden(Purpose.RESIDUAL_DROPOUT, 0, shape, DROP, CPU, first=start)
    assert torch.equal(part, hidden(ids)[start:stop])


def test_masks_differ_between_everything_they_are_for() -> None:
    masks = [
        hidden([1]),
        hidden([2]),
        hidden([1], seed=2),
        hidden([1], layer=1),
        hidden([1], purpose=Purpose.EMBEDDING_DROPOUT),
    ]
    assert len({mask.flatten().numpy().tobytes() for mask in masks}) == len(masks)
    heads = attention([1, 2], range(4)).flatten(0, 1)
    assert len({mask.numpy().tobytes() for mask in heads}) == 8
    assert not torch.equal(attention([1], range(4)), attention([1], range(4), layer=1))


def test_each_adapter_drops_elements_of_its_own() -> None:
    """Whichever layer of a block it stands beside, and whichever block."""
    names = [f"blocks.{layer}.{module}" for layer in (0, 1) for module in ("attention.qkv", "mlp.up")]
    masks, shape = Masks(1, np.array([4, 5])), torch.Size((S, 2, H))
    for draw in (masks.adapter_positions, masks.adapter_features):
        drawn_by = {name: draw(name, shape, DROP, CPU) for name in names}
        assert len({mask.contiguous().numpy().tobytes() for mask in drawn_by.values()}) == len(names)
        assert torch.equal(draw(names[0], shape, DROP, CPU), drawn_by[names[0]]), "the same whenever it is asked for"


@pytest.mark.parametrize("cut", [1, 3])
def test_parts_of_what_an_adapter_reads_have_their_parts_of_its_mask(cut: int) -> None:
    """By positions, of the stream; by features, where these are cut. There are more features than positions."""
    s, b, i = 6, 2, 11
    masks = Masks(5, np.array([4, 9]))
    whole = masks.adapter_positions("a", torch.Size((s, b, i)), 0.5, CPU)
    parts = [
        masks.adapter_positions("a", torch.Size((stop - first, b, i)), 0.5, CPU, first)
        for first, stop in ((0, cut), (cut, s))
    ]
    assert torch.equal(torch.cat(parts), whole)
    whole = masks.adapter_features("a", torch.Size((s, b, i)), 0.5, CPU)
    parts = [
        masks.adapter_features("a", torch.Size((s, b, stop - first)), 0.5, CPU, first)
        for first, stop in ((0, cut), (cut, i))
    ]
    assert torch.equal(torch.cat(parts, -1), whole)


def test_columns_of_a_rank_are_dropped_as_in_the_whole() -> None:
    """Whichever samples are beside each other; each layer and each use drops others."""
    x, ids = drawn(S, 3, H, seed=0), [4, 5, 9]

    def dropped(columns: range, samples: list[int], layer: int = 3, purpose: Purpose = Purpose.INNER_DROPOUT) -> Tensor:
        chosen = x[:, [ids.index(each) for each in samples]][..., columns.start : columns.stop]
        return dropout_of_columns(chosen, columns, DROP, Masks(1, np.array(samples)), purpose, layer)

    whole = dropped(range(H), ids)
    assert bool(((whole == 0) | torch.isclose(whole, x / (1 - drop_probability(DROP)), rtol=1e-14)).all())
    for columns in (range(3), range(3, H)):
        assert torch.equal(dropped(columns, [9, 4]), whole[:, [2, 0]][..., columns.start : columns.stop])
    others = [dropped(range(H), ids, 4), dropped(range(H), ids, purpose=Purpose.POOLED_DROPOUT)]
    masks = [each[:, sample] != 0 for each in (whole, *others) for sample in range(3)]
    assert len({mask.numpy().tobytes() for mask in masks}) == 9 and whole.any()
    key = stream_keys(1, Purpose.INNER_DROPOUT, 3, 5, last=range(H))
    drawn_for_each = keep_mask(key, 0, S, DROP, CPU)
    assert torch.equal(whole[:, 1] != 0, drawn_for_each.T), (
        "a stream of the seed, the use, the layer, sample and column"
    )


def test_what_is_kept_is_scaled_up_and_so_is_its_gradient() -> None:
    masks = Masks(1, np.array([4, 5]))
    x = drawn(S, 2, H, seed=0).requires_grad_()
    y = dropout(x, DROP, masks, Purpose.RESIDUAL_DROPOUT, 3)
    scale = masks.hidden(Purpose.RESIDUAL_DROPOUT, 3, x.shape, DROP, CPU).double() / (1 - drop_probability(DROP))
    torch.testing.assert_close(y, x * scale, rtol=1e-15, atol=0)
    grad = drawn(S, 2, H, seed=1)
    y.backward(grad)
    torch.testing.assert_close(x.grad, grad * scale, rtol=1e-15, atol=0)


def test_the_mean_is_kept() -> None:
    x = torch.ones(64, 64, 64, dtype=torch.float64)
    y = dropout(x, 0.1, Masks(1, np.arange(64)), Purpose.RESIDUAL_DROPOUT, 0)
    assert abs(y.mean() - 1) < 5 * (0.1 / 0.9 / x.numel()) ** 0.5


@pytest.mark.parametrize(("drop", "masks"), [(0.0, Masks(1, np.array([0, 1]))), (0.5, None)])
def test_nothing_is_dropped_at_rate_0_and_without_masks(drop: float, masks: Masks | None) -> None:
    x = drawn(S, 2, H, seed=0)
    assert dropout(x, drop, masks, Purpose.RESIDUAL_DROPOUT, 0) is x
    assert dropout_of_columns(x, range(H), drop, masks, Purpose.INNER_DROPOUT, 0) is x


def test_a_part_of_the_stream_is_dropped_as_in_the_whole() -> None:
    x, masks = drawn(S, 2, H, seed=0), Masks(1, np.array([4, 5]))
    whole = dropout(x, DROP, masks, Purpose.RESIDUAL_DROPOUT, 3)
    assert torch.equal(dropout(x[2:4], DROP, masks, Purpose.RESIDUAL_DROPOUT, 3, first=2), whole[2:4])


def test_overflow_stays_visible() -> None:
    x = torch.ones(S, 2, H, dtype=torch.float16, requires_grad=True)
    dropout(x, DROP, Masks(1, np.array([4, 5])), Purpose.RESIDUAL_DROPOUT).backward(torch.full_like(x, torch.inf))
    assert x.grad is not None and not x.grad.isfinite().any(), "not even where it was dropped"
