"""A machine measured: what is timed on how many ranks, and what is made of the times. Clocks are the tests' own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from colonnade.data.gpt_dataset import GPTDataset
from colonnade.errors import LayoutError
from colonnade.kernels.choice import Products
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, paper_mesh
from colonnade.planner import measure_hardware, measure_operators
from colonnade.planner.estimate import estimate
from colonnade.planner.hardware import hardware, parsed
from colonnade.planner.measure_operators import Roof, Timed, fastest, peak_of

RATIOS = {"together": [[1.6]], "crowded": [[9.0], [4.0], [5.0]], "collectives": [[3e-6, 5e-6, 5e-6 + 0.01]]}
"""What ranks tell: of those that are crowded, three times."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was started on which ranks, on a machine of forty cores."""
    calls: list[Any] = []
    left = {what: iter(each) for what, each in RATIOS.items()}

    def on_ranks(what: str, layout: Layout) -> list[float]:
        calls.append((what, layout))
        return next(left[what])

    @contextmanager
    def on_cores(count: int) -> Iterator[None]:
        calls.append(("cores", count))
        yield
        calls.append("all cores")

    for name, value in {
        "keep_freed_memory": lambda: calls.append("freed memory is kept"),
        "products_here": Products,
        "timed": lambda dtype, products, sizes: (dtype, sizes),
        "fitted": lambda times: Roof(1e11, 2_000.0, 16.0) if times[0] is torch.float32 else None,
        "peak_of": lambda times, roof: 1e9 * torch.finfo(times[0]).bits * (1 if times[0] is torch.float16 else 2),
        "attention_rate": lambda width: 1e9 * width,
        "attention_of": lambda narrow, wide, peak: (wide + narrow, 24.0),
        "_on_ranks": on_ranks,
        "_on_cores": on_cores,
        "_bandwidth": lambda: 2e10,
        "_reading": lambda: 5e-8,
        "fastest": lambda call, repeat: (call(), 7e-7)[1],
        "seconds_an_element": lambda: {"gelu": 1e-9, "exp": 2e-9},
        "_dispatch": lambda without, products: 3e-6 if parsed(without, "it")["device.dispatch_seconds"] == 0 else None,
        "device_name": lambda device: 'An "old" CPU \\ C:',
    }.items():
        monkeypatch.setattr(measure_hardware, name, value)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: calls.append(("threads", count)))
    monkeypatch.setattr(measure_hardware, "num_cores", lambda: 40)
    monkeypatch.setattr(measure_hardware, "memory_limits", lambda: [(7, 2**63 - 4096)])
    monkeypatch.setattr(
        measure_hardware.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 20_000_000}[name]
    )
    return calls


def test_a_file_of_this_machine_has_what_was_measured(asked: list[Any]) -> None:
    found = parsed(measure_hardware.measured_file(), "it")
    assert (found.name, found.kind, found.cores) == ('An "old" CPU \\ C:', "cpu", 40)
    assert found.operators == {"gelu": 1e-9, "exp": 2e-9}
    peaks = {"float32": 1e11, "bfloat16": 3.2e10, "float16": 1.6e10, "float64": 1.28e11}
    assert {name: found.peak(name) for name in peaks} == peaks
    expected = {
        "device.memory": 4096 * 20_000_000 / 40, "device.memory_bandwidth": 2e10, "host.memory_bandwidth": 2e10,
        "device.kernel_seconds": 7e-7, "device.dispatch_seconds": 3e-6, "host.token_seconds": 5e-8,
        "device.together": 1 / 1.6, "device.crowded": 2 / 5.0,
        "products.half_area": 2_000.0, "products.half_depth": 16.0, "products.half_head": 24.0,
        "products.attention": 80e9 / 1e11,
        "island.latency": 2e-6, "island.call": 1e-6, "island.bandwidth": 4 * (measure_hardware.LONG // 8) / 0.01,
    }  # fmt: skip
    assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-3)


def test_memory_is_what_control_groups_leave_of_it(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As cores are: of a container's few each would have a large share of its host."""
    monkeypatch.setattr(measure_hardware, "memory_limits", lambda: [(7, 9_000_000_000), (5, 8_000_000_000)])
    found = parsed(measure_hardware.measured_file(), "it")
    assert (found["device.memory"], found.cores) == (8_000_000_000 / 40, 40)


def test_one_thread_is_timed_and_ranks_on_some_of_many_cores(asked: list[Any]) -> None:
    """Crowded ones three times, twice as many as cores; collectives on two ranks."""
    measure_hardware.measured_file()
    assert asked == [
        ("threads", 1),
        "freed memory is kept",
        ("cores", 16),
        ("together", Layout(dp=16)),
        *[("crowded", Layout(tp=2, dp=16))] * 3,
        "all cores",
        ("collectives", Layout(tp=2)),
    ]


def test_a_small_machine_is_timed_on_all_of_its_cores(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be less than nothing is nothing, and no more than all."""
    monkeypatch.setattr(measure_hardware, "num_cores", lambda: 2)
    strange = {"together": [0.5], "crowded": [1.0], "collectives": [5e-6, 3e-6, 1e-2]}
    monkeypatch.setattr(measure_hardware, "_on_ranks", lambda what, layout: strange[what])
    monkeypatch.setattr(measure_hardware, "attention_of", lambda *_: (5e11, 0.0))
    found = parsed(measure_hardware.measured_file(), "it")
    assert ("cores", 2) in asked and found.cores == 2
    assert (found["device.together"], found["device.crowded"], found["products.attention"]) == (1.0, 1.0, 1.0)
    assert (found["island.latency"], found["island.call"]) == (0.0, 5e-6)
    strange.update(together=[100.0], crowded=[100.0], collectives=[5e-6, 2e-2, 1e-2])
    found = parsed(measure_hardware.measured_file(), "it")
    assert (found["device.together"], found["device.crowded"]) == (0.05, 0.05), "the least that a file may say"
    assert found["island.bandwidth"] == pytest.approx(4 * (measure_hardware.LONG // 8) / 5e-3, rel=1e-3)


@pytest.mark.parametrize(("more", "dispatch"), [(2e-3, 2e-3), (-1e-3, 0.0)])
def test_asking_for_an_operator_takes_what_a_step_takes_beside_its_operators(
    monkeypatch: pytest.MonkeyPatch, more: float, dispatch: float
) -> None:
    """For each of them; no less than nothing."""
    machine = hardware("cpu").having(device__dispatch_seconds=0)
    monkeypatch.setattr(measure_hardware, "parsed", lambda text, source: machine)
    planned = estimate(measure_hardware._small(), measure_hardware.VOCAB, machine, every_rank=False)
    launches = len(list(planned.walks[0].operators))
    seconds = planned.played[0].total + more * launches
    monkeypatch.setattr(measure_hardware, "fastest", lambda call, repeat: seconds)
    assert measure_hardware._dispatch("", Products()) == pytest.approx(dispatch)


def test_a_step_of_the_small_model_has_all_of_its_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains: the second is another."""
    steps: list[tuple[int, set[torch.Size], int]] = []
    real = measure_hardware.train_step

    def step(state: Any, batches: Any, *rest: Any) -> Any:
        steps.append((len(batches), {batch.tokens.shape for batch in batches}, state.step))
        return real(state, batches, *rest)

    monkeypatch.setattr(measure_hardware, "train_step", step)
    call = measure_hardware._step()
    call()
    call()
    small = measure_hardware._small()
    shape = torch.Size((small.model.seq_length, small.train.micro_batch_size))
    assert steps == [
        (small.train.global_batch_size // small.train.micro_batch_size, {shape}, number) for number in (0, 1)
    ]


def timed_on(
    monkeypatch: pytest.MonkeyPatch, measured: str, layout: Layout, rank: int
) -> tuple[bool, list[int], list[Any]]:
    """Whether a rank is one of the few, and how often both calls make a step; and the axes that they talk over."""
    steps, axes = [0], list[Any]()
    found: list[Any] = []

    def step() -> None:
        steps[0] += 1

    def times(mesh: Mesh, of_few: Callable[[], object], of_all: Callable[[], object], *, few: bool) -> float:
        counts = []
        for call in (of_few, of_all):
            steps[0] = 0
            call()
            counts.append(steps[0])
        found.extend((few, counts))
        return 1.5

    monkeypatch.setattr(measure_hardware, "_step", lambda: step)
    monkeypatch.setattr(measure_hardware, "_times_as_long", times)
    monkeypatch.setattr(measure_hardware, "all_reduce", lambda x, axis: axes.append(axis))
    mesh = paper_mesh(layout, rank)
    assert measure_hardware._MEASURED[measured](mesh) == [1.5]
    assert all(axis is mesh.tp for axis in axes)
    return found[0], found[1], axes


def test_beside_all_others_rank_0_is_compared_with_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(3):
        few, counts, axes = timed_on(monkeypatch, "together", Layout(dp=3), rank)
        assert (few, counts, axes) == (rank == 0, [1, 1], [])


def test_crowded_ranks_wait_for_each_other_behind_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And are compared with one of each pair, alone with its core."""
    layout = Layout(tp=2, dp=2)
    for rank in range(4):
        few, counts, axes = timed_on(monkeypatch, "crowded", layout, rank)
        assert (few, counts, len(axes)) == (layout.coordinates(rank)["tp"] == 0, [1, 1], 1)


def test_what_rank_0_has_measured_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """By ranks of one core each, which are started with what they are to measure."""
    started: list[Any] = []

    @contextmanager
    def joined(layout: Layout, device: str, threads: int) -> Iterator[tuple[Mesh, torch.device]]:
        started.append((device, threads))
        yield paper_mesh(layout, started[0]), torch.device("cpu")

    def run_ranks(num_ranks: int, command: list[str]) -> int:
        what, tp, dp, folder = command[-4:]
        assert (num_ranks, tp, dp) == (6, "2", "3")
        for rank in range(num_ranks):
            started[:] = [rank]
            measure_hardware.time_on_a_rank(what, Layout(tp=int(tp), dp=int(dp)), Path(folder))
        return 0

    told = {"known": lambda mesh: [1.5e-6 + mesh.rank, 2.0]}
    monkeypatch.setattr(measure_hardware, "_MEASURED", told)
    monkeypatch.setattr(measure_hardware, "joined", joined)
    monkeypatch.setattr(measure_hardware.launch, "run_ranks", run_ranks)
    assert measure_hardware._on_ranks("known", Layout(tp=2, dp=3)) == [1.5e-6, 2.0]
    assert started == [5, ("cpu", 1)]
    monkeypatch.setattr(measure_hardware.launch, "run_ranks", lambda *_: 3)
    with pytest.raises(LayoutError, match=r"6 ranks could not be started here to be timed \(exit status 3\)"):
        measure_hardware._on_ranks("known", Layout(tp=2, dp=3))


def test_of_calls_by_the_clock_the_median_behind_a_first_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now, left = [0.0], iter([90.0, 3.0, 80.0, 1.0, 5.0, 2.0])

    def call() -> None:
        now[0] += next(left)

    monkeypatch.setattr(measure_hardware, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert measure_hardware._median(call) == 3.0 and not list(left)


def test_the_fastest_of_several_turns_counts_for_one_call() -> None:
    now, calls = [0.0], [0]
    pace = iter([9.0, 4.0, 2.0, 8.0, 3.0, 7.0, 6.0])

    def clock() -> float:
        return now[0]

    def call() -> None:
        if calls[0] % 5 == 0:
            now[0] += 5 * next(pace)
        calls[0] += 1

    assert fastest(call, repeat=5, clock=clock) == 2.0 and calls[0] == 5 * measure_operators.TIMES


def test_the_median_of_products_is_the_peak() -> None:
    roof = Roof(1e11, 0.0, 0.0)
    exact = Timed("forward", (64, 64, 64), roof.seconds(Timed("forward", (64, 64, 64), 0.0)))
    every = [exact._replace(seconds=exact.seconds / factor) for factor in (4.0, 1.0, 2.0)]
    assert peak_of(every, roof) == pytest.approx(2e11)


def test_operands_of_an_addition_are_long_and_nothing_is_made_by_it() -> None:
    call = measure_hardware._adding(1000)
    first = call()
    assert isinstance(first, torch.Tensor) and first.numel() == 1000 and call() is first


def test_text_that_is_read_lies_scattered_over_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample is a document, and they are read in another order than they lie in."""
    read: list[list[int]] = []
    rows = GPTDataset.rows

    def seen(self: GPTDataset, positions: Any) -> Any:
        read.append(self.order.samples(np.asarray(positions)).tolist())
        return rows(self, positions)

    monkeypatch.setattr(GPTDataset, "rows", seen)
    monkeypatch.setattr(measure_hardware, "fastest", lambda call: (call(), 1.0)[1])
    measure_hardware._reading()
    (places,) = read
    assert len(places) == measure_hardware.SAMPLES and places != sorted(places)
