"""Attention's logits, computed again in parts, against the whole matrix with the bias that hides pairs."""

import math

import pytest
import torch
from torch import Tensor, nn

from colonnade.kernels import visible
from colonnade.kernels.mask import Mask
from colonnade.kernels.relative import Ranges, RelativeBias
from colonnade.kernels.visible import visible_logits

B, N, S, D = 3, 2, 7, 4


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def documents() -> Tensor:
    """bool [b, 1, s, s]: two documents in each sample."""
    place = torch.arange(S)
    rows = torch.stack([place >= begin for begin in (2, 4, 5)])
    return (rows[:, :, None] == rows[:, None, :])[:, None]


MASKS = {
    "causal": Mask(),
    "bidirectional": Mask(causal=False),
    "window": Mask(window=3),
    "ALiBi": Mask(slopes=(0.3, 0.1)),
    "documents": Mask(pairs=documents()),
    "padding": Mask(causal=False, pairs=(torch.arange(S) < torch.tensor([[7], [4], [5]]))[:, None, None]),
}


@pytest.mark.parametrize("most", [1, B * N * S * 3, 10**6])
@pytest.mark.parametrize("name", MASKS)
def test_what_the_softmax_reads(name: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In parts of one query, of three, and in one."""
    monkeypatch.setattr(visible, "MOST", most)
    q, k, mask = drawn(B, N, S, D), drawn(B, N, S, D + 1)[..., 1:], MASKS[name]
    whole = q @ k.transpose(-1, -2) / math.sqrt(D) + mask.bias(S, S, torch.float64, q.device)
    expected = whole[whole.isfinite()].sort().values
    found = torch.cat([part.flatten() for part in visible_logits(q, k, mask)]).sort().values
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("causal", [True, False])
def test_relative_positions(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible, "MOST", B * N * S * 2)
    bias = RelativeBias(nn.Parameter(drawn(8, N)), Ranges(8, 5, both_sides=not causal))
    q, k, mask = drawn(B, N, S, D), drawn(B, N, S, D), Mask(causal=causal)
    whole = q @ k.transpose(-1, -2)
    bias.add_to_(whole)
    whole = whole + mask.bias(S, S, torch.float64, q.device)
    found = torch.cat([part.flatten() for part in visible_logits(q, k, mask, scaled=False, bias=bias)]).sort().values
    torch.testing.assert_close(found, whole[whole.isfinite()].sort().values, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("bias", [None, RelativeBias(nn.Parameter(drawn(8, N)), Ranges(8, 5))])
@pytest.mark.parametrize("name", ["causal", "bidirectional", "window", "ALiBi"])
def test_fewer_queries_are_the_last_of_the_keys(
    name: str, bias: RelativeBias | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visible, "MOST", B * N * S * 2)
    q, k, mask = drawn(B, N, 3, D), drawn(B, N, S, D), MASKS[name]
    whole = q @ k.transpose(-1, -2) / math.sqrt(D) + mask.bias(3, S, torch.float64, q.device)
    if bias is not None:
        bias.add_to_(whole)
    found = torch.cat([part.flatten() for part in visible_logits(q, k, mask, bias=bias)]).sort().values
    torch.testing.assert_close(found, whole[whole.isfinite()].sort().values, rtol=1e-13, atol=1e-13)


def test_no_part_is_larger_than_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible, "MOST", 2 * B * N * S)
    parts = list(visible_logits(drawn(B, N, S, D), drawn(B, N, S, D), Mask()))
    assert len(parts) == 4 and all(part.numel() <= 2 * B * N * S for part in parts)
