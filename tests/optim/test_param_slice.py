"""What becomes of slices whichever rule steps through them."""

import torch

from colonnade.optim.param_slice import ParamSlice, copy_to_layers


def test_layers_read_the_new_weights_of_every_slice_rounded_where_theirs_are() -> None:
    """Of slices whose weights they read themselves, nothing is copied."""
    weights, read = torch.tensor([1.0, 1.0 + 2**-20, 3.0, 4.0, 5.0]), torch.zeros(5, dtype=torch.bfloat16)
    slices = [
        ParamSlice(weights[at], torch.zeros_like(weights[at]), {}, decayed=True, copied_to=target)
        for at, target in ((slice(0, 2), read[:2]), (slice(2, 3), None), (slice(3, 5), read[3:]))
    ]
    copy_to_layers(slices)
    assert read.tolist() == [1.0, 1.0, 0.0, 4.0, 5.0]
    copy_to_layers(slices[1:2])
    assert read.tolist() == [1.0, 1.0, 0.0, 4.0, 5.0]
