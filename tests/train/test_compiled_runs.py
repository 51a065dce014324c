"""Runs whose products, and whose AdamW, are computed by the compiled kernels."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from colonnade.kernels.choice import Kernels, Products
from colonnade.mesh.mesh import Mesh
from colonnade.model.precision import DTYPES
from colonnade.train.state import build_state
from colonnade.train.step import train_step
from tests.commands import here
from tests.parity.runs import CPU, SERIAL, Case, configured, microbatches
from tests.runs import assert_same_end, metrics
from tests.slow import first_fast

SIXTEEN = Products(bf16=Kernels("native", "native", "compiled"), fp16=Kernels("native", "native", "compiled"))


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("precision", first_fast(["bf16", "fp32"]))
def test_a_run_by_compiled_kernels_learns_as_by_others_and_goes_on_with_the_same_bits(
    precision: str, config: Path, tmp_path: Path
) -> None:
    ours = ["train.products=compiled", f"train.precision={precision}"]
    for more in (["train.steps=3"], []):
        answer = here("train", config, *ours, "optim.decay_steps=6", *more)
        assert answer.status == 0, answer
    whole = tmp_path / "whole"
    assert here("train", config, *ours, "optim.decay_steps=6", f"run.folder={whole}").status == 0
    assert_same_end(tmp_path / "run", whole)
    usual = tmp_path / "usual"
    others = ("train.products=blas", f"train.precision={precision}", f"run.folder={usual}")
    assert here("train", config, "optim.decay_steps=6", *others).status == 0
    for mine, theirs in zip(metrics(whole), metrics(usual), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5 if precision == "fp32" else 3e-3)


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
@pytest.mark.parametrize("products", [None, SIXTEEN], ids=["usual", "compiled"])
def test_layers_read_the_rounded_masters_behind_every_step(
    precision: Literal["bf16", "fp16"], optimizer: Literal["adamw", "lamb"], products: Products | None
) -> None:
    """Whichever rule has changed them: it is the rule that copies them."""
    case = Case(precision=precision, optimizer=optimizer)
    run = configured(case, SERIAL)
    state = build_state(run, Mesh(), case.vocab_size, CPU, products=products)
    for number in range(2):
        before = [bucket.master.clone() for bucket in state.buckets]
        result = train_step(state, microbatches(case, SERIAL, number, Mesh()), Mesh(), run.train)
        for bucket, old in zip(state.buckets, before, strict=True):
            assert result.skipped or not torch.equal(bucket.master, old)
            assert torch.equal(bucket.parameters, bucket.master.to(DTYPES[precision]))
    assert state.skipped < 2
