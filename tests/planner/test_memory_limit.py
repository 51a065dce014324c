"""Memory that is not there: one message with bytes and remedies, and a folder that belongs to nobody."""

import errno
import resource
from pathlib import Path

import pytest
import torch

from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.errors import MemoryShortError
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import paper_mesh
from colonnade.planner import memory_limit
from colonnade.planner.memory import Memory
from colonnade.planner.memory_limit import message, remedies
from colonnade.train import refused_memory
from colonnade.train.refused_memory import asked_for, is_refusal, there
from tests.commands import forked, start

CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.11 GiB"
CPU = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "


def test_errors_that_say_so() -> None:
    for error, size in (
        (torch.OutOfMemoryError(CUDA), int(2.5 * 2**30)),
        (RuntimeError(f"{CPU}400000000 bytes. Error code 12 (Cannot allocate memory)"), 400_000_000),
        (RuntimeError("unable to mmap 4096 bytes from file <shared>: Cannot allocate memory (12)"), None),
        (MemoryError(), None),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), None),
    ):
        assert is_refusal(error) and asked_for(error) == size, error
    for size, unit in enumerate(("bytes", "KiB", "MiB", "GiB", "TiB")):
        assert asked_for(torch.OutOfMemoryError(f"Tried to allocate 3.00 {unit}. GPU 0")) == 3 * 1024**size
    assert not any(map(is_refusal, (RuntimeError("shape"), OSError(errno.ENOSPC, "full"), ValueError("memory"))))


def test_remedies_begin_with_what_helps_most(config: Path) -> None:
    settings = load(config)
    assert "micro_batch_size (now 2)" in remedies(settings, Memory(1, 1, 1, 1, activations=9))[0]
    assert "parallel.zero (now 0)" in remedies(settings, Memory(9, 9, 9, 1, activations=1))[0]
    half = load(
        config, ["parallel.recompute=selective", "parallel.zero=2", "parallel.dp=2", "train.micro_batch_size=1"]
    )
    told = remedies(half, Memory(3, 3, 3, 1, activations=11))
    assert ['"full" (now "selective")' in told[0], "zero (now 2) with parallel.dp (now 2)" in told[1]] == [True, True]
    assert "parallel.zero" in remedies(half, Memory(3, 3, 3, 2, activations=11))[0], (
        "half of it all is no more than half"
    )
    cut = load(config, ["parallel.tp=2", "train.micro_batch_size=4"])
    assert "parallel.tp (now 2) or parallel.pp (now 1)" in " ".join(remedies(cut, Memory(9, 9, 9, 1, 1)))
    sparing = load(config, ["train.micro_batch_size=1", "parallel.recompute=full", "parallel.zero=3"])
    assert [each.split()[0] for each in remedies(sparing, Memory(9, 9, 9, 1, 1))] == ["cut", "make"]


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")], ids=repr)
@pytest.mark.parametrize("step", [None, 3])
def test_what_is_refused_is_held_against_the_plan_of_this_stage(
    config: Path, monkeypatch: pytest.MonkeyPatch, step: int | None, error: Exception
) -> None:
    asked: list[tuple[int, int, torch.device]] = []

    def predict(config: Config, vocab_size: int, *, stage: int, device: torch.device) -> Memory:
        asked.append((vocab_size, stage, device))
        return Memory(9, 9, 9, 1, activations=1)

    monkeypatch.setattr(memory_limit, "predict", predict)
    mesh, device = paper_mesh(Layout(pp=4, tp=2), 5), torch.device("cpu")
    mesh.ledger.step = step
    when = "before step 1" if step is None else "in step 3"
    with (
        pytest.raises(MemoryShortError, match=f"^Rank 5 has run out of memory {when}: "),
        memory_limit.within_memory(load(config), 77, mesh, device),
    ):
        raise error
    assert mesh.pp.rank == 2 and asked == [(77, 2, device)]


def test_what_a_rank_is_expected_to_take_is_all_of_the_kinds_behind_it() -> None:
    """With the optimizer's state in CPU memory."""
    planned = Memory(1_000, 2_000, 3_000, 4_000, activations=5_000, operators=6_000, host=70_000)
    text = message("Rank 0 has run out of memory", MemoryError(), planned, ["use less"], torch.device("cpu"))
    assert (
        "is expected to take 91.0 kB (parameters 1.00 kB, gradients 2.00 kB, optimizer 73.0 kB, buffers 4.00 kB, "
        "activations 5.00 kB, operators 6.00 kB), beside what libraries need. To take less, use less."
    ) in text


def test_what_was_asked_for_is_told_where_it_is_known() -> None:
    planned, cpu = Memory(1, 1, 1, 1, 1), torch.device("cpu")
    asked = message("Rank 0", torch.OutOfMemoryError(CUDA), planned, ["use less"], cpu)
    assert asked.startswith("Rank 0: 2,684,354,560 bytes (2.68 GB) more were refused. ")
    assert message("Rank 0", MemoryError(), planned, ["use less", "or none"], cpu).startswith(
        "Rank 0: memory was refused. "
    )


def test_what_is_no_refusal_stays_what_it_is(config: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="shapes differ"),
        memory_limit.within_memory(load(config), 77, paper_mesh(Layout(), 0), torch.device("cpu")),
    ):
        raise RuntimeError("shapes differ")


@pytest.mark.parametrize(("soft", "told"), [(4_000_000_000, True), (resource.RLIM_INFINITY, False)])
def test_the_limit_that_holds_is_told(soft: int, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `ulimit -Sv` sets it, whatever it may be raised to."""
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, 8_000_000_000))
    assert ("4.00 GB of address space" in " ".join(there(torch.device("cpu")))) == told


def test_what_is_free_is_told_of_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    status, meminfo = {"VmSize": 3_000_000_000}, {"MemAvailable": 5_000_000_000, "MemTotal": 9_000_000_000}
    monkeypatch.setattr(refused_memory, "_table", lambda path: status if "self" in str(path) else meminfo)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (4_000_000_000, 8_000_000_000))
    assert there(torch.device("cpu")) == [
        "This process may have 4.00 GB of address space (ulimit -v), and has 3.00 GB.",
        "This machine has 5.00 GB free of 9.00 GB.",
    ]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1_000_000_000, 80_000_000_000))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 70_000_000_000)
    assert there(torch.device("cuda")) == ["The GPU has 1.00 GB free of 80.0 GB; this process holds 70.0 GB."]


def limited(rank: int) -> None:
    """As `ulimit -v` does: 300 MB above what the process has when the run begins."""
    from colonnade.train import loop

    build = loop.build_state

    def build_state(*args, **more):  # type: ignore[no-untyped-def]
        size = refused_memory._table(Path("/proc/self/status"))["VmSize"] + 300_000_000
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
        return build(*args, **more)

    loop.build_state = build_state


@pytest.mark.slow
@pytest.mark.parametrize("dp", [1, 2])
def test_out_of_memory_at_the_start_is_one_message(config: Path, tmp_path: Path, dp: int) -> None:
    large = ["model.hidden_size=4096", "model.num_layers=8", f"parallel.dp={dp}"]
    large.append("train.products=blas")  # nothing to compile, which takes a busy machine most of a minute
    answers = start("train", config, *large, num_ranks=dp, first=limited).answers()
    assert all(each.status in (2, -9) for each in answers), "whoever is late is ended with the first"
    rank, answer = next((rank, each) for rank, each in enumerate(answers) if each.status == 2)
    assert "Traceback" not in answer.err, answer
    assert answer.err.startswith(f"colonnade: Rank {rank} has run out of memory before step 1: ")
    for said in ("bytes (", "of address space (ulimit -v)", "free of", "is expected to take", "parallel.zero (now 0)"):
        assert said in answer.err, answer.err
    answer = forked("train", config)
    assert answer.status == 0 and "Finished 6 steps" in answer.out, "nothing was trained, so a smaller model may be"


@pytest.mark.slow
def test_out_of_memory_in_a_step_names_it(config: Path) -> None:
    def short(rank: int) -> None:
        from colonnade.train import loop

        step = loop.train_step

        def train_step(state, *args, **more):  # type: ignore[no-untyped-def]
            if state.step == 2:
                torch.empty(1 << 60, dtype=torch.uint8)
            return step(state, *args, **more)

        loop.train_step = train_step

    answer = forked("train", config, first=short)
    assert (
        answer.status == 2 and "Rank 0 has run out of memory in step 3: 1,152,921,504,606,846,976 bytes" in answer.err
    )


def test_a_bug_stays_one(config: Path) -> None:
    def broken(rank: int) -> None:
        from colonnade.train import loop

        def train_step(*args, **more):  # type: ignore[no-untyped-def]
            raise RuntimeError("shapes differ")

        loop.train_step = train_step

    answer = forked("train", config, first=broken)
    assert answer.status not in (0, 2) and "RuntimeError: shapes differ" in answer.err
