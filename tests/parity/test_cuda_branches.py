"""The program's CUDA branches on CPU numbers: whole steps, forward, backward and update, near fp32 and near the CPU's.

See `tests/emulated.py` for what is emulated; kernels and their order on a device are not.
"""

from dataclasses import replace

import pytest

from colonnade.mesh.mesh import build_mesh
from tests.distributed import run_on_ranks
from tests.emulated import emulated_cuda
from tests.parity.runs import Case, Reference, Run, Way, references_on_a_rank, train
from tests.parity.test_precision import UNIT, distance, precision_of
from tests.slow import first_fast

CASES = {
    "bf16": Case(precision="bf16"),
    "fp16": Case(precision="fp16"),
    "bf16 fp32_residual": Case(precision="bf16", fp32_residual=True),
    "bf16 no attention dropout": Case(precision="bf16", drop=0.0),
    "bf16 RMSNorm, gated": Case(precision="bf16", block="llama"),
    "fp16 RMSNorm, gated": Case(precision="fp16", block="llama"),
    "bf16 RMSNorm, gated, fp32_residual": Case(precision="bf16", block="llama", fp32_residual=True),
}
WAYS = {
    "serial": Way(micro_batch_size=4),
    "tp2 sequence parallel": Way(tp=2, micro_batch_size=4, sequence_parallel=True),
    "pp2 zero bubble": Way(pp=2, micro_batch_size=4, schedule="zero_bubble"),
}


def emulated_on_a_rank(rank: int, num_ranks: int, way: Way, cases: list[Case]) -> list[Run]:
    with emulated_cuda():
        return [train(case, way, build_mesh(way.layout, rank)) for case in cases]


@pytest.fixture(scope="module")
def fp32() -> dict[tuple[str, float], Reference]:
    """By block and dropout."""
    cases = [Case(precision="fp32"), Case(precision="fp32", drop=0.0), Case(precision="fp32", block="llama")]
    (found,) = run_on_ranks(references_on_a_rank, 1, cases)
    return {(case.block, case.drop): reference for case, reference in zip(cases, found, strict=True)}


@pytest.mark.parametrize("way", first_fast(sorted(WAYS, reverse=True)))
def test_16_bits_stay_near_fp32(way: str, fp32: dict[tuple[str, float], Reference]) -> None:
    """The bounds of `test_precision.py`."""
    ranks = run_on_ranks(emulated_on_a_rank, WAYS[way].layout.num_ranks, WAYS[way], list(CASES.values()))
    for number, (name, case) in enumerate(CASES.items()):
        unit, runs = UNIT[precision_of(name)], [found[number] for found in ranks]
        reference = fp32[case.block, case.drop]
        assert distance(runs, reference) <= 3 * 30**0.5 * unit, name
        for step, exact in zip(runs[0].steps, reference.results, strict=True):
            assert abs(step.result.loss - exact.loss) <= 10 * unit and not step.result.skipped, name


def test_fp32_differs_by_rounding_alone(fp32: dict[tuple[str, float], Reference]) -> None:
    (found,) = run_on_ranks(emulated_on_a_rank, 1, Way(micro_batch_size=4), [Case(precision="fp32")])
    assert distance(found, fp32[Case().block, Case().drop]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("emulated", [False, True], ids=["cpu", "emulated"])
@pytest.mark.parametrize("way", first_fast(["tp2 sequence parallel", "serial"]))
def test_a_masked_model_in_16_bits_stays_near_fp32(way: str, emulated: bool) -> None:
    """Two losses, an output layer with a bias, padding: on the branches of both devices.

    Weights by the same bounds; the loss relative to its size, for it is the sum of two, each over fewer labels (27 and
    8 in place of 64), and the head's LayerNorm stretches small numbers.
    """
    cases = [Case(block="bert", precision="bf16"), Case(block="bert", precision="fp16", norm_position="post")]
    exact = [replace(case, precision="fp32") for case in cases]
    (references,) = run_on_ranks(references_on_a_rank, 1, exact)
    ranks = run_on_ranks(emulated_on_a_rank if emulated else on_a_rank, WAYS[way].layout.num_ranks, WAYS[way], cases)
    for number, (case, reference) in enumerate(zip(cases, references, strict=True)):
        unit, runs = UNIT[case.precision], [found[number] for found in ranks]
        assert distance(runs, reference) <= 3 * 30**0.5 * unit, case
        for step, other in zip(runs[0].steps, reference.results, strict=True):
            assert abs(step.result.loss - other.loss) <= 10 * unit * other.loss and not step.result.skipped, case


def on_a_rank(rank: int, num_ranks: int, way: Way, cases: list[Case]) -> list[Run]:
    return [train(case, way, build_mesh(way.layout, rank)) for case in cases]
