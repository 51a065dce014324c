"""Counting live tensors, and the table of predicted beside measured bytes."""

import torch

from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import paper_mesh
from colonnade.planner.memory import Memory
from colonnade.train.state import build_state
from colonnade.verify.memory import LiveTensors, measure, memory_table
from tests.planner.test_memory import CPU, VOCAB, config


def test_storages_count_once_and_as_long_as_somebody_holds_them() -> None:
    before = torch.ones(100)
    with LiveTensors() as live:
        a = torch.zeros(10)
        views = a[2:5], a.view(2, 5), before[:50]
        assert live.bytes.total() == 40
        b = a + 1
        assert live.bytes.total() == 80
        b.add_(1)
        del b
        assert live.bytes.total() == 40
        del a
        assert live.bytes.total() == 40
        del views
        assert live.bytes.total() == 0


def test_what_autograd_holds_counts() -> None:
    x = torch.randn(10, requires_grad=True)
    with LiveTensors() as live:
        y = x.exp().exp().sum()  # each exp keeps its result
        assert live.bytes.total() == 84
        y.backward()
        assert live.bytes.total() == 44
        x.grad = None
        del y
        assert live.bytes.total() == 0


def test_bytes_have_the_label_of_their_making() -> None:
    with LiveTensors("a") as live:
        x = torch.zeros(10)
        live.label = "b"
        y = torch.zeros(20)
        live.label = "c"
        del x
        assert (live.bytes["a"], live.bytes["b"], live.bytes["c"]) == (0, 80, 0)
        del y


def test_a_step_that_fails_leaves_the_state_as_it_was() -> None:
    mesh = paper_mesh(Layout(), 0)
    state = build_state(config({}), mesh, VOCAB, CPU)
    runner, owners = state.runner, [chunk.owner for chunk in state.runner.chunks]

    def step() -> None:
        raise ArithmeticError

    try:
        measure(state, step)
    except ArithmeticError:
        assert state.runner is runner
        assert [chunk.owner for chunk in runner.chunks] == owners
    else:
        raise AssertionError("the step's error is lost")


def test_what_is_offloaded_is_in_cpu_memory_and_every_byte_counts_once() -> None:
    """Masters and moments of a slice, 12 bytes a weight."""
    found = {}
    for offload in (False, True):
        parallel = {"zero": 1, "dp": 2, "offload": offload}
        state = build_state(config(parallel, train={"precision": "bf16"}), paper_mesh(Layout(dp=2), 0), VOCAB, CPU)
        _, found[offload] = measure(state, lambda: None)
        weights = sum(bucket.master.numel() for bucket in state.buckets)
        assert (found[offload].host, found[offload].optimizer)[:: 1 if offload else -1] == (12 * weights, 0)
    assert found[True].parameters == found[False].parameters and found[True].gradients == found[False].gradients


def test_the_table() -> None:
    state = {"parameters": 1_000_000, "gradients": 2_000_000, "optimizer": 0}
    predicted = Memory(**state, buffers=500_000, activations=12_345_678, operators=250_000)
    measured = Memory(**state, buffers=400_000, activations=12_000_000, operators=240_000)
    assert memory_table(predicted, measured).splitlines() == [
        "MB                               predicted      measured",
        "parameters                           1.000         1.000",
        "gradients                            2.000         2.000",
        "master weights and moments           0.000         0.000",
        "whole for a while, or sent           0.500         0.400",
        "activations                         12.346        12.000",
        "operators while they run             0.250         0.240",
        "together, at most                   16.096        15.640",
    ]
    offloaded = Memory(parameters=1, gradients=1, optimizer=0, buffers=0, activations=1, host=3_000_000)
    assert memory_table(offloaded, offloaded).splitlines()[-1].split() == ["in", "CPU", "memory", "3.000", "3.000"]
    unforeseen = memory_table(Memory(parameters=1, gradients=1, optimizer=0, buffers=0, activations=1), offloaded)
    assert unforeseen.splitlines()[-1].split() == ["in", "CPU", "memory", "0.000", "3.000"]
