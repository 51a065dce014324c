"""Training on a GPU beside training on the CPU, number against number, in float64."""

from collections.abc import Mapping, Sequence

import pytest
import torch

from colonnade.mesh.mesh import build_mesh
from tests.distributed import run_on_ranks
from tests.gpu.staged import staged
from tests.gpus import on_gpu_ranks
from tests.parity.compare import Outcome, Verdict, judge
from tests.parity.runs import BLOCKS, LORA, PARTS, SERIAL, Case, Job, Reference, Run, Way, references_on_a_rank, train
from tests.parity.test_precision import UNIT, distance, precision_of

CASES = {
    **{block: Case(block=block) for block in BLOCKS},  # type: ignore[arg-type]
    **{parts: Case(parts=parts) for parts in (*PARTS, *LORA) if parts != "all"},  # type: ignore[arg-type]
    "ALiBi": Case(position="alibi", embedding_norm=True),
    "post-norm": Case(norm_position="post"),
    "documents": Case(documents="separate"),
    "llama, documents": Case(block="llama", documents="separate"),
    "no dropout": Case(drop=0.0),
    "documents, no dropout": Case(drop=0.0, documents="separate"),
    "ALiBi, no dropout": Case(drop=0.0, position="alibi"),
    "LAMB, untied": Case(optimizer="lamb", tied=False, clipped=False),
    "half of the labels": Case(mask="second_half"),
}
WAYS = {
    "micro-batches": Way(micro_batch_size=2),
    "recomputed in part": Way(micro_batch_size=4, recompute="selective"),
    "recomputed": Way(micro_batch_size=4, recompute="full"),
    "chunks of logits": Way(micro_batch_size=4, chunk_logits=64),
    "offloaded": Way(micro_batch_size=4, zero=3, offload=True),
}
LAYOUTS = {
    "tp 2": Way(tp=2, micro_batch_size=4),
    "tp 2, sequence parallel": Way(tp=2, micro_batch_size=4, sequence_parallel=True, recompute="selective"),
    "pp 2": Way(pp=2, micro_batch_size=2),
    "pp 2, interleaved": Way(pp=2, micro_batch_size=2, schedule="interleaved", virtual_stages=2, partition="layers"),
    "pp 2, zero bubble": Way(pp=2, micro_batch_size=2, schedule="zero_bubble"),
    **{f"dp 2, ZeRO {zero}": Way(dp=2, micro_batch_size=2, zero=zero) for zero in (0, 1, 2, 3)},
    "dp 2, ZeRO 3, offloaded": Way(dp=2, micro_batch_size=2, zero=3, offload=True),
    "BLOOM's": Way(tp=2, pp=2, dp=2, micro_batch_size=2, zero=1),
}
NARROW = {
    "bf16": Case(precision="bf16"),
    "bf16 fp32_residual": Case(precision="bf16", fp32_residual=True),
    "bf16 no dropout": Case(precision="bf16", drop=0.0),
    "bf16 no dropout, ALiBi": Case(precision="bf16", drop=0.0, position="alibi"),
    "fp16": Case(precision="fp16"),
}
GPU = torch.device("cuda", 0)


def verdicts(rank: int, num_ranks: int, jobs: Sequence[Job], references: dict[Case, Reference]) -> list[Verdict]:
    with staged():
        mesh = build_mesh(jobs[0][1].layout, rank)
        return [judge(train(case, way, mesh, GPU), references[case]) for case, way in jobs]


def problems(jobs: Mapping[str, Job]) -> dict[str, list[str]]:
    """What is different on the GPU, by the names of jobs of one layout."""
    cases = list(dict.fromkeys(case for case, _ in jobs.values()))
    (made,) = run_on_ranks(references_on_a_rank, 1, cases, time_limit=120.0)
    references = dict(zip(cases, made, strict=True))
    layout = next(iter(jobs.values()))[1].layout
    ranks = on_gpu_ranks(verdicts, layout.num_ranks, list(jobs.values()), references)
    outcomes = {
        name: Outcome(job, [found[number] for found in ranks], references[job[0]])
        for number, (name, job) in enumerate(jobs.items())
    }
    return {name: found for name, outcome in outcomes.items() if (found := outcome.problems())}


def test_a_gpu_computes_what_the_cpu_does() -> None:
    assert problems({name: (case, Way(micro_batch_size=4)) for name, case in CASES.items()}) == {}


def test_in_any_way() -> None:
    blocks = {"gpt": Case(), "grouped": Case(block="grouped")}
    assert problems({f"{name}, {block}": (blocks[block], way) for name, way in WAYS.items() for block in blocks}) == {}


@pytest.mark.parametrize("name", LAYOUTS)
def test_on_any_layout(name: str) -> None:
    way = LAYOUTS[name]
    assert problems({name: (Case(num_layers=4 if way.virtual_stages > 1 else 2), way)}) == {}


def runs(rank: int, num_ranks: int, cases: Sequence[Case], way: Way) -> list[Run]:
    with staged():
        mesh = build_mesh(way.layout, rank)
        return [train(case, way, mesh, GPU) for case in cases]


@pytest.mark.parametrize("name", ["serial", "tp 2, sequence parallel", "pp 2, zero bubble", "dp 2, ZeRO 2"])
def test_16_bits_stay_near_fp32(name: str) -> None:
    """By the bounds that hold on CPUs (`tests/parity/test_precision.py`)."""
    way = {"serial": Way(micro_batch_size=4), **LAYOUTS}[name]
    exact = [Case(precision="fp32", drop=case.drop, position=case.position) for case in NARROW.values()]
    (references,) = run_on_ranks(references_on_a_rank, 1, exact)
    ranks = on_gpu_ranks(runs, way.layout.num_ranks, list(NARROW.values()), way)
    far = []
    for number, (narrow, case) in enumerate(NARROW.items()):
        unit, found, reference = UNIT[precision_of(narrow)], [each[number] for each in ranks], references[number]
        far += [(narrow, off) for off in (distance(found, reference),) if off > 3 * 30**0.5 * unit]
        for step, other in zip(found[0].steps, reference.results, strict=True):
            off = abs(step.result.loss - other.loss)
            far += [(narrow, step.result)] if off > 10 * unit or step.result.skipped else []
        assert case.precision == precision_of(narrow)
    assert far == []


def test_fp32_differs_by_rounding_alone() -> None:
    case = Case(precision="fp32")
    (references,) = run_on_ranks(references_on_a_rank, 1, [case])
    (found,) = on_gpu_ranks(runs, 1, [case], SERIAL)
    assert distance(found, references[0]) < 1e-6
