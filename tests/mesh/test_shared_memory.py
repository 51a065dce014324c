"""Collectives through shared memory give what gloo gives, bit for bit on all ranks, whatever the size and the type."""

import mmap
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from colonnade.mesh import shared_memory
from colonnade.mesh.collectives import (
    all_gather,
    all_gather_into_,
    all_reduce,
    all_reduce_,
    reduce_scatter,
    reduce_scatter_into_,
)
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, build_mesh
from colonnade.mesh.process import ProcessId, mine
from colonnade.mesh.shared_memory import SLOT_BYTES, Segment, SharedMemoryTransport
from colonnade.mesh.transport import TorchTransport
from tests.distributed import run_on_ranks
from tests.slow import first_fast

can_share = pytest.mark.skipif(
    not shared_memory.is_possible(),
    reason="shared memory needs Linux on x86; gloo carries everything here",
)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def _values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * 100).to(dtype)


def _reduce_and_gather(rank: int, num_ranks: int) -> list[Any]:
    axis = build_mesh(Layout(tp=num_ranks), rank).tp
    assert isinstance(axis.transport, SharedMemoryTransport)
    found = []
    for dtype in DTYPES:
        per_slot = SLOT_BYTES // dtype.itemsize
        for count in (1, 7, per_slot, 2 * per_slot + 5):
            x = _values(rank, count, dtype)
            every = [_values(other, count, dtype) for other in range(num_ranks)]
            total = every[0].to(torch.promote_types(dtype, torch.float32), copy=True)
            for other in every[1:]:
                total += other  # in the order of ranks; 16-bit numbers in fp32, rounded once
            found.append(torch.equal(all_reduce(x, axis), total.to(dtype)))
            found.append(torch.equal(all_reduce(x, axis, "max"), torch.stack(every).amax(0)))
            found.append(torch.equal(all_reduce(x, axis, "min"), torch.stack(every).amin(0)))
            found.append(torch.equal(all_gather(x, axis), torch.cat(every)))
    return found


@pytest.mark.slow
@can_share
@pytest.mark.parametrize("num_ranks", first_fast([2, 3]))
def test_all_reduce_and_all_gather_are_what_they_should_be(num_ranks: int) -> None:
    for rank in run_on_ranks(_reduce_and_gather, num_ranks):
        assert len(rank) == len(DTYPES) * 4 * 4 and all(rank)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_three_in_16_bits_are_rounded_once(dtype: torch.dtype) -> None:
    """Half of the last digit twice is a digit: lost where each sum is rounded, and where one of them is left out."""
    large = 2 / torch.finfo(dtype).eps
    parts = [torch.full((5,), each, dtype=dtype) for each in (large, 1.0, 1.0)]
    out = torch.empty(5, dtype=dtype)
    shared_memory._combine_(out, parts, op="sum")
    assert out.tolist() == [large + 2] * 5


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64])
@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_all_of_three_are_combined(op: str, dtype: torch.dtype) -> None:
    parts = [torch.tensor(each, dtype=dtype) for each in ([1, 5, -3, 2], [4, 2, -1, 2], [2, 3, -7, 2])]
    out = torch.empty(4, dtype=dtype)
    shared_memory._combine_(out, parts, op=op)
    expected = {"sum": [7, 10, -11, 6], "max": [4, 5, -1, 2], "min": [1, 2, -7, 2]}
    assert out.tolist() == expected[op] and parts[0].tolist() == [1, 5, -3, 2]


def _scatter(rank: int, num_ranks: int) -> list[bool]:
    """Whether a reduce-scatter has the bits of the all-reduce, and a gather those of every rank; in place too."""
    axis = build_mesh(Layout(tp=num_ranks), rank).tp
    found = []
    for dtype in DTYPES:
        columns = SLOT_BYTES // dtype.itemsize // num_ranks
        for count in (1, 7, columns, 2 * columns + 5):
            x = _values(rank, count * num_ranks, dtype)
            mine = slice(rank * count, (rank + 1) * count)
            total = all_reduce(x, axis)
            out, in_place = torch.empty(count, dtype=dtype), x.clone()
            reduce_scatter_into_(out, x, axis).wait()
            reduce_scatter_into_(in_place[mine], in_place, axis).wait()
            found += [torch.equal(out, total[mine]), torch.equal(in_place[mine], total[mine])]
            found.append(torch.equal(reduce_scatter(x.view(num_ranks, -1), axis), total[mine].view(1, -1)))

            gathered, own = torch.empty_like(x), torch.zeros_like(x)
            own[mine] = out
            all_gather_into_(gathered, out, axis).wait()
            all_gather_into_(own, own[mine], axis).wait()
            found += [torch.equal(gathered, total), torch.equal(own, total)]
    return found


@pytest.mark.one_in(2)
@can_share
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_reduce_scatter_has_the_bits_of_the_all_reduce(num_ranks: int) -> None:
    for rank in run_on_ranks(_scatter, num_ranks):
        assert len(rank) == len(DTYPES) * 4 * 5 and all(rank)


def _many_in_a_row(rank: int, num_ranks: int) -> float:
    axis = build_mesh(Layout(tp=num_ranks), rank).tp
    total = torch.zeros(3, dtype=torch.float64)
    for turn in range(400):  # halves of the segment are used again and again, at different speeds
        if (turn + rank) % 7 == 0:
            sum(range(2000))
        x = torch.full((3,), float(turn * (rank + 1)), dtype=torch.float64)
        if turn % 2:
            all_reduce_(x, axis).wait()
        else:
            reduce_scatter_into_(x[rank : rank + 1], x.clone(), axis).wait()
            all_gather_into_(x, x[rank : rank + 1], axis).wait()
        total += x
    return float(total[0])


@pytest.mark.slow
@can_share
def test_no_rank_overwrites_what_another_still_reads() -> None:
    wanted = float(sum(turn * (1 + 2 + 3) for turn in range(400)))
    assert run_on_ranks(_many_in_a_row, 3) == [wanted] * 3


def _shown_and_taken_later(rank: int, num_ranks: int) -> list[bool]:
    """Three operations under way at once, of more than two chunks together, which change behind their start."""
    axis = build_mesh(Layout(tp=num_ranks), rank).tp
    per_slot, found = SLOT_BYTES // 8, []
    for count in (5, per_slot + 3, 3 * per_slot + 1):
        x = _values(rank, num_ranks * count, torch.float64)
        total = torch.stack([_values(other, num_ranks * count, torch.float64) for other in range(num_ranks)]).sum(0)
        summed, scattered, given = x.clone(), torch.empty(count, dtype=x.dtype), x.clone()
        gathered, own = torch.empty_like(x), x[:count].clone()
        if rank:
            time.sleep(0.05 * rank)
        pending = [
            all_reduce_(summed, axis),
            reduce_scatter_into_(scattered, given, axis),
            all_gather_into_(gathered, own, axis),
        ]
        given.fill_(torch.nan), own.fill_(torch.nan)  # shown already
        for each in reversed(pending):
            each.wait()
        parts = [_values(other, num_ranks * count, torch.float64)[:count] for other in range(num_ranks)]
        found.append(bool((summed - total).abs().max() < 1e-9 * total.abs().max()))
        found.append(torch.equal(scattered, summed[rank * count : (rank + 1) * count]))
        found.append(torch.equal(gathered, torch.cat(parts)))
    return found


@pytest.mark.slow
@can_share
@pytest.mark.parametrize("num_ranks", first_fast([2, 3]))
def test_what_is_shown_may_be_taken_later_and_in_any_order(num_ranks: int) -> None:
    assert run_on_ranks(_shown_and_taken_later, num_ranks) == [[True] * 9] * num_ranks


def _returns_before_the_others_come(rank: int, num_ranks: int) -> tuple[float, float, int, float]:
    axis = build_mesh(Layout(tp=num_ranks), rank).tp
    assert axis.transport is not None
    dist.barrier()
    if rank == 1:
        time.sleep(1.0)
    x, began = torch.full((SLOT_BYTES // 4 + 1,), 2.0), time.monotonic()  # two chunks
    pending = all_reduce_(x, axis)
    started = time.monotonic() - began
    open_yet = sum(entry.seconds is None for entry in axis.transport.ledger.entries)
    pending.wait()
    return started, time.monotonic() - began, open_yet, float(x.sum())


@can_share
def test_a_collective_starts_without_the_others_and_is_over_when_it_is_waited_for() -> None:
    first, late = run_on_ranks(_returns_before_the_others_come, 2)
    assert first[0] < 0.5 < first[1], "what fits the segment waits in it, not the rank"
    assert first[2:] == late[2:] == (1, 4.0 * (SLOT_BYTES // 4 + 1))


def _third_chunk(rank: int, num_ranks: int) -> list[float]:
    """A rank that is ahead waits before it writes over what another has not read."""
    axis = build_mesh(Layout(tp=num_ranks), rank).tp
    dist.barrier()
    tensors = [torch.full((4,), float(10 * turn + rank)) for turn in range(6)]
    pending = []
    for turn, x in enumerate(tensors):
        if rank == 1 and turn % 2:
            time.sleep(0.02)
        pending.append(all_reduce_(x, axis))
    for each in pending:
        each.wait()
    return [float(x[0]) for x in tensors]


@can_share
def test_many_collectives_may_be_under_way() -> None:
    assert run_on_ranks(_third_chunk, 2) == [[1.0, 21.0, 41.0, 61.0, 81.0, 101.0]] * 2


def _where_stores_are_seen_in_another_order(rank: int, num_ranks: int) -> tuple[bool, float]:
    shared_memory.platform.machine = lambda: "aarch64"  # this process ends with the program
    axis = build_mesh(Layout(tp=num_ranks), rank).tp
    return type(axis.transport) is TorchTransport, float(all_reduce(torch.tensor(float(rank)), axis))


def _exchange_unequal(rank: int, num_ranks: int, sizes: list[int]) -> str:
    axis = build_mesh(Layout(dp=num_ranks), rank).dp
    all_reduce(torch.ones(3), axis)
    try:
        return str(all_reduce(torch.ones(sizes[rank]), axis).tolist())
    except RuntimeError as error:
        return str(error)


@can_share
def test_ranks_at_different_operations_are_told_so() -> None:
    """They would read what lies behind the others' numbers: each of them hears it, and none goes on."""
    for said in run_on_ranks(_exchange_unequal, 3, [4, 4, 1]):
        floats = [f"{size} bytes of float32 (all_reduce sum)" for size in (16, 16, 4)]
        assert f"exchange {', '.join(floats)} at once" in said and "as many micro-batches" in said
    assert run_on_ranks(_exchange_unequal, 2, [2, 2]) == ["[2.0, 2.0]"] * 2


OPERATIONS: dict[str, Callable[[Axis], object]] = {
    "24 bytes of float32 (all_reduce sum)": lambda axis: all_reduce(torch.ones(6), axis),
    "24 bytes of float32 (all_reduce max)": lambda axis: all_reduce(torch.ones(6), axis, "max"),
    "24 bytes of int32 (all_reduce sum)": lambda axis: all_reduce(torch.ones(6, dtype=torch.int32), axis),
    "24 bytes of float32 (all_gather)": lambda axis: all_gather(torch.ones(6), axis),
    "24 bytes of float32 (reduce_scatter)": lambda axis: reduce_scatter(torch.ones(6), axis),
}


def _exchange_others(rank: int, num_ranks: int, operations: list[str]) -> str:
    axis = build_mesh(Layout(dp=num_ranks), rank).dp
    try:
        return str(OPERATIONS[operations[rank]](axis))
    except RuntimeError as error:
        return str(error)


@can_share
@pytest.mark.parametrize("other", list(OPERATIONS)[1:])
def test_ranks_at_different_operations_on_as_many_bytes_are_told_so(other: str) -> None:
    """They would take others' numbers for what these are not."""
    first = next(iter(OPERATIONS))
    for said in run_on_ranks(_exchange_others, 2, [first, other]):
        assert f"exchange {first}, {other} at once: they are not at the same operation" in said


@can_share
@pytest.mark.parametrize("other", ["all_reduce sum", "all_gather"])
def test_of_ranks_at_different_operations_none_takes_a_number_of_another(other: str) -> None:
    """Of chunks as large as there are."""
    memory, here = mmap.mmap(-1, 1 << 25), mine()
    chunks, operations = (torch.ones(SLOT_BYTES // 4), torch.ones(SLOT_BYTES // 8 - 1)), ("all_gather", other)
    segments = [Segment(memory, rank, [here, here], timeout=60.0) for rank in range(2)]
    for segment, chunk, operation in zip(segments, chunks, operations, strict=True):
        segment.show(chunk, lambda _: pytest.fail("these are others' numbers"), operation)
    told = f"4194304 bytes of float32 (all_gather), 2097148 bytes of float32 ({other}) at once"
    for segment in segments:
        with pytest.raises(RuntimeError, match=re.escape(told)):
            segment.take(1)


@can_share
def test_what_a_rank_shows_and_what_it_is_are_there_before_it_says_so() -> None:
    """Whoever sees the counter raised reads both."""
    memory, here, seen = mmap.mmap(-1, 1 << 25), mine(), list[tuple[int, int, list[float]]]()
    mine_, other = (Segment(memory, rank, [here, here], timeout=60.0) for rank in range(2))
    words = mine_._written

    class Watched:
        def __setitem__(self, at: int, value: int) -> None:
            words[at] = value
            if at == 8 * mine_.rank:  # its counter
                seen.append(
                    (value, words[at + 1 + value % 2], mine_._halves[value % 2][0][:8].view(torch.float32).tolist())
                )

    mine_._written = Watched()  # type: ignore[assignment]
    for number in (1, 2):
        mine_.show(torch.full((2,), float(number)), lambda _: None, "all_gather")
        other.show(torch.full((2,), 7.0), lambda _: None, "all_gather")
    assert [(number, shown) for number, _, shown in seen] == [(1, [1.0] * 2), (2, [2.0] * 2)]
    assert [word for _, word, _ in seen] == [words[8 + 1 + number % 2] for number in (1, 2)]


def test_operations_and_types_have_the_same_numbers_on_all_ranks() -> None:
    """Which need not be forked from one process: a set of types has another order in each."""
    names = [str(dtype) for dtype in shared_memory._DTYPES]
    assert names == sorted(names) and {str(dtype) for dtype in DTYPES} < {*names}


def test_on_arm_gloo_carries_everything() -> None:
    assert run_on_ranks(_where_stores_are_seen_in_another_order, 2) == [(True, 1.0)] * 2


def _refused(rank: int, num_ranks: int, name: str) -> tuple[bool, float]:
    def refuse(*_: Any) -> int:
        raise PermissionError(1, "Operation not permitted")

    shared_memory.os.__dict__[name] = refuse  # this process ends with the program
    axis = build_mesh(Layout(tp=num_ranks), rank).tp
    return type(axis.transport) is TorchTransport, float(all_reduce(torch.tensor(float(rank)), axis))


@can_share
@pytest.mark.parametrize("name", ["memfd_create", "ftruncate"])
def test_where_the_system_refuses_memory_to_share_gloo_carries_everything(name: str) -> None:
    assert run_on_ranks(_refused, 2, name) == [(True, 1.0)] * 2


@pytest.mark.parametrize(
    ("machine", "possible"), [("x86_64", True), ("AMD64", True), ("aarch64", False), ("ppc64le", False)]
)
def test_shared_memory_is_for_processors_that_order_stores(
    machine: str, possible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory.platform, "machine", lambda: machine)
    assert shared_memory.is_possible() == (possible and hasattr(os, "memfd_create"))


@can_share
def test_a_wait_ends_when_the_other_is_gone_or_too_late() -> None:
    here = mine()
    for other, error, said in (
        (replace(here, born="0"), ConnectionError, "rank 1 of the axis has ended"),
        (here, TimeoutError, "rank 1 of the axis has not come in 1 s"),
    ):
        segment = Segment(mmap.mmap(-1, 1 << 25), 0, [here, other], timeout=1.0)
        begin = time.monotonic()
        number = segment.show(torch.ones(3), lambda parts: None, "all_gather")
        with pytest.raises(error, match=said):
            segment.take(number)
        assert time.monotonic() - begin < 20


@can_share
def test_a_rank_that_ends_behind_its_last_word_has_said_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has shown its tensor and gone, between two looks of the one that waits."""
    memory, here, found = mmap.mmap(-1, 1 << 25), mine(), list[list[float]]()
    waiting, other = (Segment(memory, rank, [here, here], timeout=60.0) for rank in range(2))

    def ends(process: ProcessId) -> bool:
        other.show(torch.full((3,), 2.0), lambda parts: None, "all_gather")
        return True

    monkeypatch.setattr(shared_memory, "has_ended", ends)
    monkeypatch.setattr(shared_memory, "_offer_core", lambda: None)
    waiting.take(waiting.show(torch.ones(3), lambda parts: found.extend(part.tolist() for part in parts), "all_gather"))
    assert found == [[1.0] * 3, [2.0] * 3]


@can_share
@pytest.mark.parametrize("late", [0, 1, 2])
def test_nobody_writes_over_what_any_other_has_not_read(late: int) -> None:
    """There is room for two chunks; for a third when all have taken the first."""
    memory, found = mmap.mmap(-1, 1 << 25), list[list[float]]()
    segments = [Segment(memory, rank, [mine()] * 3, timeout=60.0) for rank in range(3)]
    ahead = segments[0 if late else 1]
    ahead.timeout = 0.0
    for number in range(2):
        for rank, segment in enumerate(segments):
            segment.make_room()
            x = torch.tensor([10.0 * number + rank])
            segment.show(x, lambda parts: found.append([float(part) for part in parts]), "all_gather")
    for rank, segment in enumerate(segments):
        if rank != late:
            segment.take(1)
    with pytest.raises(TimeoutError, match=f"rank {late} of the axis"):
        ahead.make_room()
    segments[late].take(1)
    ahead.make_room()
    assert found == [[0.0, 1.0, 2.0]] * 3


@can_share
def test_time_in_which_a_waiting_process_is_suspended_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks at the clock hours go by; then the other rank, suspended with it, comes."""
    memory, here = mmap.mmap(-1, 1 << 25), mine()
    waiting, other = (Segment(memory, rank, [here, here], timeout=60.0) for rank in range(2))
    looks, found = list[float](), list[torch.Tensor]()

    def leaping() -> float:
        looks.append(100.0 + 3600.0 * len(looks))
        if len(looks) == 3:
            other.show(torch.full((3,), 2.0), lambda parts: None, "all_gather")
        return looks[-1]

    monkeypatch.setattr(shared_memory, "time", SimpleNamespace(monotonic=leaping, sleep=time.sleep))
    monkeypatch.setattr(shared_memory, "_offer_core", lambda: None)
    number = waiting.show(torch.ones(3), lambda parts: found.extend(part.clone() for part in parts), "all_gather")
    waiting.take(number)
    assert len(looks) == 3 and [part.tolist() for part in found] == [[1.0] * 3, [2.0] * 3]


def _names(rank: int, num_ranks: int) -> list[str]:
    mesh = build_mesh(Layout(tp=num_ranks), rank)
    dist.barrier()
    assert isinstance(mesh.tp.transport, SharedMemoryTransport)
    return [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "colonnade" in line and "memfd" in line
    ]


@can_share
def test_the_memory_has_no_name_that_could_outlive_the_ranks() -> None:
    for names in run_on_ranks(_names, 2):
        assert names and all(name.endswith("(deleted)") for name in names)


def _another_machine(rank: int, num_ranks: int) -> bool:
    if rank == 1:  # the path of rank 0 leads to something else here
        other = tempfile.NamedTemporaryFile()  # noqa: SIM115  (lives as long as this rank)
        other.truncate(1 << 10)
        shared_memory.open = lambda path, mode: open(other.name, mode)  # type: ignore[attr-defined]  # noqa: SIM115
    axis = build_mesh(Layout(tp=num_ranks), rank).tp
    return type(axis.transport) is TorchTransport and float(all_reduce(torch.tensor(1.0), axis)) == 2.0


def _another_file(rank: int, num_ranks: int) -> bool:
    if rank == 1:  # a file of the right size without the signature
        descriptor = os.memfd_create("other")
        os.ftruncate(descriptor, 1 << 26)
        path = f"/proc/self/fd/{descriptor}"
        shared_memory.open = lambda _, mode: open(path, mode)  # type: ignore[attr-defined]  # noqa: SIM115
    axis = build_mesh(Layout(tp=num_ranks), rank).tp
    return type(axis.transport) is TorchTransport and float(all_reduce(torch.tensor(1.0), axis)) == 2.0


@can_share
@pytest.mark.parametrize("function", [_another_machine, _another_file])
def test_ranks_that_cannot_reach_the_memory_use_gloo_all_of_them(function: Any) -> None:
    assert run_on_ranks(function, 2) == [True, True]


def _descriptors_of_memory(rank: int, num_ranks: int) -> list[str]:
    axis = build_mesh(Layout(tp=num_ranks), rank).tp
    assert isinstance(axis.transport, SharedMemoryTransport)
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the list itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [each for each in found if "memfd" in each]


@can_share
def test_who_has_made_the_memory_keeps_no_other_descriptor_of_it_than_who_has_mapped_it() -> None:
    """Each mapping has one; and memory that nobody has mapped any more goes."""
    made, mapped = run_on_ranks(_descriptors_of_memory, 2)
    assert made == mapped and len(set(mapped)) == 1
