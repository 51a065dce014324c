"""What an evaluation finds where ranks share it: the same on each of them, and as on one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from colonnade.config.model import ModelConfig
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, build_mesh
from colonnade.pipeline.inference import on_one_stage
from colonnade.tasks.tasks import TASKS
from colonnade.tensor_parallel.parallel import Parallel
from tests.distributed import run_on_ranks

COUNTS = {("gpt", "preferences"): "pairs", ("bert", "spans"): "samples", ("t5", "pretraining"): "tokens"}
"""What each evaluation counts."""
SIZES = {"num_layers": 1, "hidden_size": 8, "num_heads": 2, "seq_length": 12}


def evaluated(
    kind: str,
    head: str,
    numbers: Sequence[int],
    *,
    dp: Axis,
    pp: Axis,
    has_head: bool = True,
    broken: bool = False,
    **more: int,
) -> Any:
    """Of a made-up model and the batches of these numbers, of one sample more each. `broken`: its weights are NaN."""
    task = TASKS[kind, head]
    model = ModelConfig.model_validate({"kind": kind, "head": head, **SIZES, **more})
    built = task.build(model, 30, Parallel(Axis("tp")), None).double()
    draw = torch.Generator().manual_seed(1)
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, generator=draw)
        parameter.data.add_(math.nan if broken else 0.0)
    batches = []
    for number in numbers:
        torch.manual_seed(number)
        batches.append(task.random_batch(model, number + 1, 30, separate_documents=False))
    hidden = on_one_stage(built, built.architecture.units).hidden
    return task.evaluate(
        built,
        batches,
        dp=dp,
        pp=pp,
        hidden=hidden if has_head else lambda inputs: None,
        byte_lengths=None,
        tokenizer_checked=True,
    )


def _over(rank: int, num_ranks: int, kind: str, head: str, axis: str) -> Any:
    """Each rank has a batch or two (dp), or the last one the head (pp)."""
    mesh = build_mesh(Layout(**{axis: num_ranks}), rank)
    numbers = [0, 1, 2] if axis == "pp" else [0] if rank else [1, 2]
    return evaluated(kind, head, numbers, dp=mesh.dp, pp=mesh.pp, has_head=axis == "dp" or rank == num_ranks - 1)


@pytest.mark.parametrize("axis", ["dp", "pp"])
@pytest.mark.parametrize(("kind", "head"), COUNTS)
def test_an_evaluation_is_of_all_that_ranks_have_read(kind: str, head: str, axis: str) -> None:
    whole = evaluated(kind, head, [0, 1, 2], dp=Axis("dp"), pp=Axis("pp"))
    one, other = run_on_ranks(_over, 2, kind, head, axis)
    assert one == other and one.numbers() == pytest.approx(whole.numbers(), rel=1e-12)
    assert getattr(one, COUNTS[kind, head]) == getattr(whole, COUNTS[kind, head]) >= 6


@pytest.mark.parametrize(
    ("kind", "head", "labels"),
    [
        ("bert", "pretraining", {}),
        ("bert", "classification", {"num_labels": 1}),
        ("bert", "classification", {"num_labels": 2}),
        *((kind, head, {}) for kind, head in COUNTS),
    ],
)
def test_a_model_whose_logits_are_no_numbers_has_no_score(kind: str, head: str, labels: dict[str, int]) -> None:
    """The likeliest of them is no guess: by chance it would be right."""
    found = evaluated(kind, head, [1, 2], dp=Axis("dp"), pp=Axis("pp"), broken=True, **labels).numbers()
    assert len(found) > 1 and all(map(math.isnan, found.values())), found
