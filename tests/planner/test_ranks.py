"""What `plan` says of each kind of rank: the sums of the planner's parts, and the paper's numbers where it has some."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import torch

from colonnade.architecture.parts import trained_architecture
from colonnade.config.distillation import DistillationConfig
from colonnade.config.load import load
from colonnade.config.numbers import amount
from colonnade.config.schema import Config
from colonnade.mesh.layout import Layout
from colonnade.planner import ranks, teacher
from colonnade.planner.memory import Memory, rank_memory
from colonnade.planner.paper import walk
from colonnade.planner.predict import predict
from colonnade.planner.ranks import (
    RankKind,
    RankPlan,
    _traffic,
    as_json,
    as_text,
    largest,
    plan_ranks,
    plan_run,
    table,
)
from colonnade.planner.stand_in import device_of
from colonnade.planner.step import Step
from colonnade.planner.traffic import totals, traffic
from tests.parity.runs import Case, Way, configured

EXAMPLES = Path(__file__).parents[2] / "examples"


def planned(config: Config, vocab_size: int) -> RankPlan:
    optimizer = config.optim.name
    return plan_ranks(config.model, config.parallel, config.train, optimizer=optimizer, vocab_size=vocab_size)


def test_the_paper_s_512_ranks() -> None:
    plan = planned(load(EXAMPLES / "gpt2-8.3b.toml"), 50_257)
    assert plan.layout.num_ranks == 512 and plan.parameters == pytest.approx(8.3e9, rel=0.01)
    (kind,) = plan.kinds
    assert (kind.num_ranks, kind.stages) == (512, (0,))
    held = kind.memory
    assert held.parameters == pytest.approx(2 * 8.3e9 / 8, rel=0.01)  # bf16
    assert (held.gradients, held.optimizer) == (2 * held.parameters, 6 * held.parameters)
    all_reduces, size = kind.traffic["all_reduce", "tp"]
    assert all_reduces == 8 * (4 * 72 + 2)  # each micro-batch: 2 forward and 2 backward a layer, embedding and head
    assert size == all_reduces * 1024 * 3072 * 2


@pytest.mark.parametrize("how", ["joined", "separate"])
def test_a_run_is_planned_with_its_own_optimizer_device_and_documents(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "plan_ranks", lambda *parts, **keys: (parts, keys))
    keys = [f"data.documents={how}", "train.device=cpu", "optim.name=lamb"]
    settings = load(EXAMPLES / "gpt2-355m.toml", keys)
    parts, told = plan_run(settings, 99)
    assert parts == (settings.model, settings.parallel, settings.train)
    assert (told["optimizer"], told["vocab_size"], told["device"]) == ("lamb", 99, "cpu")
    assert told["separate_documents"] == (how == "separate")


@pytest.mark.slow
def test_documents_that_are_kept_apart_take_memory_of_their_own() -> None:
    """Scores and masks of the plain attention, which a GPU's fused kernel does not keep for joined ones."""
    layers = ["model.num_layers=4", "parallel.recompute=none"]
    joined, apart = (
        largest(plan_run(load(EXAMPLES / "gpt2-355m.toml", [*layers, f"data.documents={how}"]), 50_257)).memory
        for how in ("joined", "separate")
    )
    assert apart.activations + apart.operators > joined.activations + joined.operators
    assert (apart.parameters, apart.optimizer) == (joined.parameters, joined.optimizer)


@pytest.mark.slow
def test_what_is_frozen_has_no_gradients() -> None:
    whole, partly = (
        plan_run(load(EXAMPLES / "laptop-3d.toml", more), 1024) for more in ([], ['parts.frozen=["blocks.*"]'])
    )
    assert partly.trained < partly.parameters == whole.parameters == whole.trained
    assert largest(partly).memory.gradients < largest(whole).memory.gradients


@pytest.mark.parametrize("top_k", [None, 3])
def test_a_run_is_planned_with_its_teacher_as_each_rank_predicts_it(
    monkeypatch: pytest.MonkeyPatch, top_k: int | None
) -> None:
    config = configured(Case(precision="bf16", num_layers=5), Way(pp=2, micro_batch_size=2))
    monkeypatch.setattr(teacher, "teacher_model", lambda path: config.model)
    layers = () if top_k else (0, 4)
    chosen = DistillationConfig(teacher="teacher", top_k=top_k, student_layers=layers, teacher_layers=layers)
    taught = config.model_copy(update={"distillation": chosen})
    plan, alone = plan_run(taught, 37), plan_run(config, 37)
    device = torch.device(device_of(config.train.device))
    assert {stage: kind.memory for kind in plan.kinds for stage in kind.stages} == {
        stage: predict(taught, 37, stage=stage, device=device) for stage in (0, 1)
    }
    assert largest(plan).memory.total > largest(alone).memory.total and not plan.without_teacher


def test_what_is_received_is_not_sent() -> None:
    traffic = {("send", "pp"): (2, 20), ("receive", "pp"): (3, 300), ("all_reduce", "tp"): (1, 4_000)}
    assert RankKind((0,), 1, Memory(0, 0, 0, 0, 0), traffic).sent == 4_020


@pytest.mark.slow
def test_every_stage_is_one_of_the_kinds() -> None:
    config = load(EXAMPLES / "laptop-3d.toml", ["parallel.pp=4", "parallel.schedule=1f1b", "parallel.virtual_stages=1"])
    plan = planned(config, 1024)
    assert sorted(stage for kind in plan.kinds for stage in kind.stages) == [0, 1, 2, 3]
    assert sum(kind.num_ranks for kind in plan.kinds) == config.parallel.num_ranks == 16
    layout = Layout(tp=2, pp=4, dp=2)
    for kind in plan.kinds:
        for stage in kind.stages:
            memory = rank_memory(config.model, config.parallel, config.train, vocab_size=1024, stage=stage)
            step = Step(
                config.model,
                config.parallel,
                config.train,
                "adamw",
                1024,
                layout.rank_at(pp=stage, dp=0, tp=0),
                cuda=True,
            )
            assert (kind.memory, dict(kind.traffic)) == (memory, totals(traffic(step)))
    assert largest(plan).memory.total == max(kind.memory.total for kind in plan.kinds)


@pytest.mark.slow
def test_stages_that_hold_or_send_the_same_are_told_once() -> None:
    overrides = ["parallel.sequence_parallel=false", "parallel.pp=8", "parallel.virtual_stages=1"]
    overrides.append("parallel.cuts=[1,1,1,1,1,1,1,1]")
    plan = planned(load(EXAMPLES / "laptop-3d.toml", [*overrides, "parallel.schedule=gpipe"]), 1024)
    assert [kind.stages for kind in plan.kinds] == [(0,), (1, 2, 3, 4, 5, 6), (7,)]
    assert [kind.num_ranks for kind in plan.kinds] == [4, 24, 4]
    lines = as_text(
        planned(load(EXAMPLES / "laptop-3d.toml", [*overrides, "parallel.schedule=1f1b"]), 1024)
    ).splitlines()
    assert len([line for line in lines if line.startswith("  1–6  tp ")]) == 1, "memory differs, traffic does not"


@pytest.mark.slow
def test_text_and_json() -> None:
    plan = planned(load(EXAMPLES / "gpt2-8.3b.toml"), 50_257)
    text, found = as_text(plan), as_json(plan)
    assert text.startswith("8,314,143,744 parameters on 512 ranks (pp1 dp64 tp8)")
    (kind,) = found["ranks"]
    assert kind["memory"]["total"] == sum(
        kind["memory"][part] for part in ("parameters", "gradients", "optimizer", "buffers", "activations", "operators")
    )
    assert amount(kind["memory"]["total"]) in text
    assert {"axis": "tp", "operation": "all_reduce", "count": 2320, "bytes": 2320 * 1024 * 3072 * 2} in kind["traffic"]
    assert kind["sent"] == sum(flow["bytes"] for flow in kind["traffic"])
    assert "in CPU memory" not in text and "CPU memory" in as_text(
        planned(load(EXAMPLES / "gpt2-8.3b.toml", ["parallel.offload=true", "parallel.zero=1"]), 50_257)
    )


@pytest.mark.slow
def test_one_rank_sends_nothing() -> None:
    plan = planned(load(EXAMPLES / "gpt2-8.3b.toml", ["parallel.tp=1", "parallel.dp=1"]), 50_257)
    assert plan.kinds[0].traffic == {} and as_text(plan).endswith("in a step: none") and " on 1 rank " in as_text(plan)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_600, "1.00 MB"),
        (2_087_153_664, "2.09 GB"),
        (4_174_307_328_000, "4.17 TB"),
    ],
)
def test_amounts(size: int, text: str) -> None:
    assert amount(size) == text


def test_traffic_is_told_by_its_bytes_however_often_it_is_sent() -> None:
    traffic = {("all_reduce", "tp"): (2, 5_000_000), ("all_gather", "dp"): (100_000, 8)}
    lines = _traffic(SimpleNamespace(kinds=[SimpleNamespace(traffic=traffic, stages=[0])]))  # type: ignore[arg-type]
    assert "all_reduce" in lines[-1] and "5.00 MB" in lines[-1] and not any("all_gather" in line for line in lines)


FIRST = Memory(1_000, 2_000, 3_000, 4_000, activations=5_000, operators=6_000)
SENT = {("all_reduce", "tp"): (3, 2_000), ("send", "pp"): (2, 1_000), ("receive", "pp"): (1, 999)}
TWO_KINDS = RankPlan(
    Layout(tp=2, pp=4),
    parameters=12_345,
    trained=12_345,
    kinds=(
        RankKind((0, 1, 3), 1_200, FIRST, SENT),
        RankKind((2,), 2, replace(FIRST, host=70_000, parameters=20_000), dict(reversed(SENT.items()))),
    ),
)
"""Which differ in memory alone."""


def test_a_table_of_ranks_has_a_line_of_each_kind() -> None:
    lines = as_text(TWO_KINDS).splitlines()
    assert lines[0] == "12,345 parameters on 8 ranks (pp4 dp1 tp2)"
    memory = [re.split(r"  +", line.strip()) for line in lines if re.match(r" *(stage|0–1, 3|2) ", line)]
    parts = ["2.00 kB", "3.00 kB", "4.00 kB", "5.00 kB", "6.00 kB"]
    assert memory[0][1:3] == ["ranks", "parameters"] and memory[0][-2:] == ["in all", "CPU memory"]
    assert memory[1] == ["0–1, 3", "1,200", "1.00 kB", *parts, "21.0 kB", "0 B"]
    assert memory[2] == ["2", "2", "20.0 kB", *parts, "40.0 kB", "70.0 kB"]
    assert "CPU memory" not in as_text(replace(TWO_KINDS, kinds=TWO_KINDS.kinds[:1]))
    assert as_text(replace(TWO_KINDS, trained=45)).startswith("12,345 parameters, 45 of them trained, on 8 ranks")


def test_words_of_a_table_stand_to_the_left_and_numbers_to_the_right() -> None:
    assert table([["a", "b", "c"], ["dd", "ee", "ff"]], left=(1, 2)) == [" a  b   c", "dd  ee  ff"]
    sent = {("all_reduce", "world"): (12, 2_000), ("send", "pp"): (1, 1_000)}
    lines = _traffic(replace(TWO_KINDS, kinds=(RankKind((0,), 1, FIRST, sent),)))
    assert lines[2:] == [
        "stage  axis   operation   times   in all",
        "    0  pp     send            1  1.00 kB",
        "    0  world  all_reduce     12  2.00 kB",
    ]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_sent_is_what_a_step_on_that_device_sends(device: str) -> None:
    """A GPU computes more of the loss at once, in fewer collectives."""
    keys = ["num_layers=1", "hidden_size=64", "num_heads=2", "seq_length=4096"]
    more = ["parallel.tp=2", "parallel.dp=1", "train.micro_batch_size=4", "train.global_batch_size=4"]
    settings = load(EXAMPLES / "gpt2-355m.toml", [*(f"model.{each}" for each in keys), *more, f"train.device={device}"])
    (kind,) = plan_run(settings, 65_536).kinds
    sent = Counter((entry.operation, entry.axis) for entry in walk(settings, 65_536, 0).entries)
    assert {key: times for key, (times, _) in kind.traffic.items()} == sent and sent["all_gather", "tp"] > 0


@pytest.mark.parametrize("parts", ["all", "upper"])
def test_what_is_frozen_of_a_run_is_planned_as_frozen(parts: Literal["all", "upper"]) -> None:
    config = configured(Case(parts=parts, precision="bf16"), Way(dp=2, micro_batch_size=2))
    plan, stated = plan_run(config, 37), trained_architecture(config, 37)
    assert (plan.parameters, plan.trained) == (stated.num_parameters, stated.num_trained)
    (kind,) = plan.kinds
    assert (kind.memory.gradients < 2 * kind.memory.parameters) is (parts == "upper")
    assert kind.traffic["all_reduce", "dp"][1] == pytest.approx(4 * plan.trained, rel=0.1), "gradients in fp32"


def test_stages_that_send_the_same_are_on_one_line_though_their_memory_differs() -> None:
    """What is below a thousand bytes in a step is in the JSON alone."""
    lines = [line.split() for line in _traffic(TWO_KINDS) if line.startswith("  ") or "kB" in line]
    assert [line for line in lines if line[-1] == "kB"] == [
        ["0–3", "pp", "send", "2", "1.00", "kB"], ["0–3", "tp", "all_reduce", "3", "2.00", "kB"]
    ]  # fmt: skip
    nothing = RankKind((0,), 1, FIRST, {("all_reduce", "pp"): (1, 999)})
    assert _traffic(replace(TWO_KINDS, kinds=(nothing,))) == ["traffic of a rank in a step: none"]


def test_json_of_ranks_has_every_number_by_its_name() -> None:
    found = as_json(replace(TWO_KINDS, trained=45))
    assert (found["num_ranks"], found["parameters"], found["trained_parameters"]) == (8, 12_345, 45)
    kind = found["ranks"][1]
    assert (kind["stages"], kind["num_ranks"], kind["sent"]) == ([2], 2, 3_000)
    assert kind["memory"]["total"] == 40_000 and kind["memory"]["host"] == 70_000, "CPU memory is apart"
    assert {"axis": "pp", "operation": "receive", "count": 1, "bytes": 999} in kind["traffic"]
    assert largest(TWO_KINDS) is TWO_KINDS.kinds[1]
