"""What goes to a GPU goes from pinned memory, and is not waited for: each part of a batch of every kind."""

import pytest
import torch

from colonnade.upload import upload
from tests.emulated import Copies
from tests.parity.runs import Block, Case, global_batch

CUDA = torch.device("cuda", 1)


def test_a_copy_to_a_gpu_is_from_pinned_memory_and_not_waited_for() -> None:
    x = torch.arange(3)
    with Copies() as copies:
        found = [upload(x, CUDA), upload(x, "cuda")]
        assert upload(x, "cpu") is x
    assert copies.uploads == [(True, True)] * 2 and all(torch.equal(each, x) for each in found)


@pytest.mark.parametrize("block", ["gpt", "bert", "labels", "spans", "preferences", "t5"])
def test_each_part_of_a_batch_is_uploaded_so(block: Block) -> None:
    """But the numbers of its samples, which the program itself reads."""
    batch = global_batch(Case(block=block, documents="separate" if block == "gpt" else "joined"), 0)
    with Copies() as copies:
        moved = batch.to(CUDA)
    parts = {name: part for name, part in vars(batch).items() if part is not None}
    assert moved.samples is batch.samples and len(parts) > 4
    assert copies.uploads == [(True, True)] * (len(parts) - 1)
    assert all(torch.equal(getattr(moved, name), part) for name, part in parts.items())
