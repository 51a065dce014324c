"""What theory says that heads other than that of pre-training send in a step, beside what the ledger sees."""

from typing import Any

import pytest
import torch

from colonnade.architecture.parts import trained_architecture
from colonnade.config.schema import Config, PartsConfig
from colonnade.mesh.mesh import paper_mesh
from colonnade.planner.step import Step
from colonnade.planner.traffic import totals, traffic
from colonnade.tasks.tasks import TASKS
from colonnade.train.state import build_state
from colonnade.train.step import train_step
from tests.parity.runs import CPU, Case, Way, configured

VOCAB = 37
HEADS: dict[str, dict[str, Any]] = {
    "labels": {"head": "classification", "num_labels": 3},
    "score, post-norm": {"head": "classification", "num_labels": 1, "norm_position": "post"},
    "choice": {"head": "choice", "num_labels": 4},
    "spans": {"head": "spans"},
}
WAYS = [
    Way(),
    Way(tp=2, micro_batch_size=2),
    Way(tp=2, micro_batch_size=2, sequence_parallel=True, dp=2, zero=3),
    Way(tp=2, pp=2, micro_batch_size=2, sequence_parallel=True, recompute="full"),
]


def with_head(way: Way, head: dict[str, Any]) -> Config:
    config = configured(Case(drop=0.0, block="bert"), way)
    return config.model_copy(update={"model": config.model.model_copy(update=head)})


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("head", HEADS)
def test_theory_is_what_the_ledger_sees(head: str, way: Way) -> None:
    assert_agree(with_head(way, HEADS[head]), way, head)


@pytest.mark.parametrize("trained", ["head.*", "head.pooler.bias", "head.classifier.weight", "head.classifier.bias"])
def test_a_part_of_the_head_is_trained(trained: str) -> None:
    for way in WAYS[1:]:
        config = with_head(way, HEADS["labels"])
        config = config.model_copy(update={"parts": PartsConfig(frozen=("*", f"!{trained}"))})
        assert_agree(config, way, trained)


@pytest.mark.parametrize("trained", ["head.*", "head.spans.bias"])
def test_a_part_of_the_head_of_spans_is_trained(trained: str) -> None:
    for way in WAYS[1:]:
        config = with_head(way, HEADS["spans"])
        config = config.model_copy(update={"parts": PartsConfig(frozen=("*", f"!{trained}"))})
        assert_agree(config, way, trained)


def assert_agree(config: Config, way: Way, head: str) -> None:
    stated, task = trained_architecture(config, VOCAB), TASKS[config.model.kind_and_head]
    for rank in range(way.layout.num_ranks):
        mesh = paper_mesh(way.layout, rank)
        state = build_state(config, mesh, VOCAB, CPU)
        mesh.ledger.clear()
        with torch.no_grad():
            for bucket in state.buckets:
                bucket.master.fill_(0.01)
        size, number = way.micro_batch_size, config.train.num_microbatches(way.layout.dp)
        batches = [task.random_batch(config.model, size, VOCAB, separate_documents=False) for _ in range(number)]
        result = train_step(state, batches, mesh, config.train)
        step = Step(
            config.model,
            config.parallel,
            config.train,
            config.optim.name,
            VOCAB,
            rank,
            result.skipped,
            cuda=False,
            stated=stated,
        )
        ledger = mesh.ledger
        found = {key: (ledger.counts[key], ledger.bytes[key]) for key in ledger.counts}
        assert totals(traffic(step)) == found, f"rank {rank} of {way}, {head}"
