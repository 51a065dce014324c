"""Copies in the memory of several machines: what is sent to whom, what is whole, and a run that loses a machine."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.checkpoint.names import MANIFEST
from colonnade.config.load import load
from colonnade.errors import CheckpointError
from colonnade.launch import launch
from colonnade.mesh.files import Transfer, exchange
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import build_mesh
from colonnade.train import loop, memory_copies
from colonnade.train.memory_copies import START, Machine, MemoryCopies
from colonnade.train.memory_machines import (
    Held,
    Whole,
    bytes_of_machines,
    holders,
    machines_of,
    newest_whole,
    to_neighbours,
    to_those_that_lack,
)
from colonnade.train.run_folder import COPIES
from tests.commands import forked
from tests.distributed import run_on_ranks
from tests.runs import Finished, assert_same_end, events
from tests.told import Told
from tests.train.test_memory_copies import killed_after

assert loop, "imported once, here, and not by every forked rank"

MACHINES = ((0, 1), (2,), (3,))
SIZES = {"__0_0.distcp": 5, "__1_0.distcp": 6, "__2_0.distcp": 7, "__3_0.distcp": 8, ".metadata": 1, "config.toml": 2}
OWN = [{"__0_0.distcp", "__1_0.distcp"}, {"__2_0.distcp"}, {"__3_0.distcp"}]
SMALL = {".metadata", "config.toml"}


def kept(machines: Sequence[Sequence[int]], sent: Sequence[Transfer]) -> list[set[str]]:
    """What each machine has when a copy has been written and sent."""
    at = {rank: k for k, ranks in enumerate(machines) for rank in ranks}
    found = [{f"__{rank}_0.distcp" for rank in ranks} for ranks in machines]
    found[0] |= SMALL
    for each in sent:
        assert each.name in found[at[each.source]] and each.name not in found[at[each.target]], "sent for nothing"
        found[at[each.target]].add(each.name)
    return found


def test_each_machine_keeps_its_own_and_the_next_ones() -> None:
    found = kept(MACHINES, to_neighbours(SIZES, MACHINES))
    assert found == [SMALL | OWN[k] | OWN[(k + 1) % 3] for k in range(3)]
    assert bytes_of_machines([5, 6, 7, 8], MACHINES) == [18, 15, 19]
    assert to_neighbours(SIZES, [range(4)]) == [] and bytes_of_machines([5, 6, 7, 8], [range(4)]) == [26]
    assert bytes_of_machines([5, 6, 7, 8], [(0, 1), (2, 3)]) == [26, 26]


def held(machines: Sequence[set[str]], lost: Sequence[int] = (), *, digest: str = "d") -> list[dict[int, Held]]:
    return [
        {} if k in lost else {9: Held(digest, {name: SIZES[name] for name in names}, SIZES)}
        for k, names in enumerate(machines)
    ]


def test_any_machine_may_be_lost_and_not_two_neighbours() -> None:
    found = kept(MACHINES, to_neighbours(SIZES, MACHINES))
    for lost in range(3):
        whole, said = newest_whole(held(found, [lost]), after=8)
        assert whole is not None and not said and whole.wanted == SIZES and lost not in whole.manifests
    whole, said = newest_whole(held(found, [0, 1]), after=8)
    assert whole is None and said == ["The copy of step 9 in memory is not whole: 1 of its files are on no machine."]
    assert newest_whole(held(found), after=9) == (None, []), "not newer than the disk"


def test_what_is_damaged_or_of_another_copy_is_not_counted() -> None:
    found = held(kept(MACHINES, to_neighbours(SIZES, MACHINES)))
    found[1] = held([SMALL | OWN[1] | OWN[2]], digest="other")[0]
    whole, _ = newest_whole(found, after=0)
    assert whole is not None and whole.digest == "d" and whole.manifests == [0, 2]
    found[0][9].files["__2_0.distcp"] -= 1
    assert newest_whole(found, after=0)[0] is None, "cut short on the only other machine"
    found[1] = {9: found[1][9]._replace(digest="", wanted={})}
    whole, _ = newest_whole(found, after=0)
    assert whole is not None and whole.on["__2_0.distcp"] == [1], "its files are good without its manifest"
    assert newest_whole([{4: Held("", {}, {})}], after=0)[1][0].endswith("no machine has a manifest that can be read.")


def test_an_older_copy_that_is_whole_comes_before_the_disk() -> None:
    found = held(kept(MACHINES, to_neighbours(SIZES, MACHINES)))
    for each in found:
        each[10] = each[9]._replace(files={})
    whole, said = newest_whole(found, after=8)
    assert whole is not None and whole.step == 9 and len(said) == 1


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=4).flatmap(
        lambda sizes: st.tuples(
            st.just(sizes),
            st.lists(st.sets(st.integers(0, len(sizes) - 1), min_size=1), min_size=1, max_size=5),
            st.lists(st.sets(st.integers(0, 4)), min_size=len(sizes), max_size=len(sizes)),
        )
    )
)
def test_what_a_machine_needs_is_sent_by_one_that_has_it(
    drawn: tuple[list[int], list[set[int]], list[set[int]]],
) -> None:
    """And to one of its ranks, once; all its ranks see it then."""
    sizes, on, wants = drawn
    machines, first = [], 0
    for size in sizes:
        machines.append(range(first, first + size))
        first += size
    names = [f"__{number}_0.distcp" for number in range(len(on))]
    wanted = {name: number + 1 for number, name in enumerate(names)}
    whole = Whole(1, "d", wanted, {name: sorted(k) for name, k in zip(names, on, strict=True)}, [0])
    needed = [{names[number] for number in want if number < len(names)} for want in wants]
    sent = to_those_that_lack(whole, needed, machines)
    at = {rank: k for k, ranks in enumerate(machines) for rank in ranks}
    assert {(at[each.target], each.name) for each in sent} == {
        (k, name) for k, mine in enumerate(needed) for name in mine if k not in whole.on[name]
    }
    assert len({(at[each.target], each.name) for each in sent}) == len(sent)
    assert all(at[each.source] in whole.on[each.name] and each.size == wanted[each.name] for each in sent)
    there = {name: [k for k in range(len(machines)) if k in whole.on[name] or name in needed[k]] for name in names}
    assert holders(whole, sent, machines) == {name: [r for k in there[name] for r in machines[k]] for name in names}


def test_ranks_of_a_machine_share_what_is_sent() -> None:
    """Senders and receivers take turns, and of several machines that have a file the one that has sent the least."""
    names = [f"__{number}_0.distcp" for number in range(4)]
    wanted, machines = dict.fromkeys(names, 8), ((0, 1), (2, 3), (4, 5))
    whole = Whole(1, "d", wanted, {name: [0] for name in names}, [0])
    sent = to_those_that_lack(whole, [set(), set(names), set()], machines)
    assert sorted((each.source, each.target) for each in sent) == [(0, 2), (0, 2), (1, 3), (1, 3)]
    whole = whole._replace(on={name: [0, 1] for name in names})
    sent = to_those_that_lack(whole, [set(), set(), set(names)], machines)
    assert sorted(each.source for each in sent) == [0, 1, 2, 3]
    written = to_neighbours({**wanted, "__2_0.distcp": 9}, ((0, 1), (2, 3)))
    assert sorted((each.source, each.target, each.size) for each in written) == [
        (0, 2, 8),
        (1, 3, 8),
        (2, 0, 9),
        (3, 1, 8),
    ]


def test_small_files_go_to_every_machine_that_lacks_them() -> None:
    """Whoever needs them: each rank reads them."""
    whole = Whole(1, "d", SIZES, {name: [0] for name in SIZES}, [0])
    sent = to_those_that_lack(whole, [set(), {"__0_0.distcp"}, set()], MACHINES)
    assert {(each.target, each.name) for each in sent} == {
        (2, "__0_0.distcp"),
        *((rank, n) for rank in (2, 3) for n in SMALL),
    }


def test_who_sees_the_same_folder_is_on_one_machine(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()

    def found(rank: int, num_ranks: int) -> list[list[list[int]]]:
        world = build_mesh(Layout(dp=num_ranks), rank).world
        return [
            [list(ranks) for ranks in machines_of(tmp_path / names[rank], world)] for names in ("aaa", "aba", "abb")
        ]

    assert run_on_ranks(found, 3) == [[[[0, 1, 2]], [[0, 2], [1]], [[0], [1, 2]]]] * 3


def test_of_two_machines_either_has_a_whole_copy(config: Path, tmp_path: Path) -> None:
    """With its manifest, without which no file of it counts. That of before has gone then."""
    names = [MANIFEST, "__0_0.distcp", "__1_0.distcp"]

    def bring_together(rank: int, num_ranks: int) -> dict[str, list[str]]:
        folder = tmp_path / str(rank)
        partial, final = folder / ".step_00000002.partial", folder / "step_00000002"
        for each in (partial, folder / "step_00000001"):
            each.mkdir(parents=True)
        (partial / names[1 + rank]).write_text("weights")
        if rank == 0:
            (partial / MANIFEST).write_text(json.dumps({"files": {name: {"size": 7} for name in names[1:]}}))
        os.environ[launch.MEMORY] = str(folder)
        monitor = SimpleNamespace(check=lambda: None, say=print)
        mesh = build_mesh(Layout(dp=2), rank)
        copies = MemoryCopies(load(config, ["checkpoint.memory_every=1"]), mesh, monitor)  # type: ignore[arg-type]
        assert copies._machine is not None
        copies._bring_together(copies._machine, partial, final)
        return {each.name: sorted(path.name for path in each.iterdir()) for each in folder.iterdir()}

    assert run_on_ranks(bring_together, 2) == [{"step_00000002": sorted(names)}] * 2


@pytest.mark.parametrize("fails", ["lines wait for the disk", "publishing"])
def test_a_copy_that_one_machine_cannot_publish_takes_the_place_of_none(
    fails: str, config: Path, tmp_path: Path
) -> None:
    """On the others too that of before stays: it is the only one that is whole."""

    def refused(*_: object) -> None:
        raise CheckpointError(fails)

    def bring_together(rank: int, num_ranks: int) -> tuple[str, bool]:
        folder = tmp_path / str(rank)
        partial, final = folder / ".step_00000002.partial", folder / "step_00000002"
        for each in (partial, folder / "step_00000001"):
            each.mkdir(parents=True)
        if rank == 0:
            (partial / MANIFEST).write_text('{"files": {}}')
        copies, machine = copies_on(rank, config, folder, Told())
        copies._monitor.check = lambda: None if rank == 0 or fails == "publishing" else refused()  # type: ignore[method-assign]
        if rank == 1 and fails == "publishing":
            memory_copies.publish = refused
        with pytest.raises(CheckpointError) as told:
            copies._bring_together(machine, partial, final)
        return str(told.value), (folder / "step_00000001").is_dir()

    assert run_on_ranks(bring_together, 2) == [(f"Rank 1: {fails}", True)] * 2


def test_half_a_copy_of_before_is_in_nobodys_way(config: Path, tmp_path: Path) -> None:
    """On a machine whose ranks begin a copy beside that of rank 0."""

    def there(rank: int, num_ranks: int) -> dict[str, list[str]]:
        folder = tmp_path / str(rank)
        for step in (1, 2):
            (folder / f".step_0000000{step}.partial" / "left").mkdir(parents=True)
        copies, machine = copies_on(rank, config, folder, Told())
        copies._make(machine, folder / ".step_00000002.partial")
        return {each.name: [path.name for path in each.iterdir()] for each in sorted(folder.iterdir())}

    left = {f".step_0000000{step}.partial": ["left"] for step in (1, 2)}
    assert run_on_ranks(there, 2) == [left, {".step_00000002.partial": []}], "rank 0's are for who writes them"


def copies_on(rank: int, config: Path, folder: Path, told: Told) -> tuple[MemoryCopies, Machine]:
    """Those of one of two ranks, in a folder of its machine."""
    os.environ[launch.MEMORY] = str(folder)
    mesh = build_mesh(Layout(dp=2), rank)
    copies = MemoryCopies(load(config, ["checkpoint.memory_every=1"]), mesh, told)  # type: ignore[arg-type]
    assert copies._machine is not None
    return copies, copies._machine


def test_all_machines_know_the_start_of_the_run_and_keep_its_copies(config: Path, tmp_path: Path) -> None:
    """Rank 0 alone names it, and alone reads which start the run went on from."""
    named = tmp_path / "run" / COPIES
    (named.parent / "checkpoints" / "step_00000001").mkdir(parents=True)
    named.write_text("the start before")

    def taken(rank: int, num_ranks: int) -> tuple[list[str], str, bool]:
        folder, told = tmp_path / str(rank), Told()
        (folder / "step_00000002").mkdir(parents=True)
        (folder / START).write_text("the start before")
        copies, machine = copies_on(rank, config, folder, told)
        if rank != 0:
            copies._on_disk = lambda: pytest.fail("it reads")  # type: ignore[method-assign]
        assert copies._newest(machine) is None and copies._take_over(machine)
        return told.said, (folder / START).read_text(), (folder / "step_00000002").is_dir()

    first, second = run_on_ranks(taken, 2)
    why = "The copy of step 2 in memory is not whole: no machine has a manifest that can be read."
    assert first == second == ([f"{why} The run goes on from the disk."], named.read_text(), True)
    assert named.read_text() != "the start before"


@pytest.mark.parametrize("refused", ["", "No space left on device"])
def test_what_a_machine_lacks_of_a_copy_is_brought_to_it(
    refused: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the manifest; of the others' shares what its ranks read. A file that one cannot take is an error on all."""
    sizes, needs = {"__0_0.distcp": 7, "__1_0.distcp": 7, ".metadata": 4}, ({"__1_0.distcp"}, {"__1_0.distcp"})
    whole = Whole(1, "d", sizes, {"__0_0.distcp": [0], "__1_0.distcp": [1], ".metadata": [0]}, [0])
    monkeypatch.setattr(memory_copies, "read_manifest", lambda path: json.loads((path / MANIFEST).read_text()))
    monkeypatch.setattr(memory_copies, "files_needed", lambda contents, shards: needs[shards])
    monkeypatch.setattr(memory_copies.recovery, "shards_of", lambda state, base: {True: state}[base])

    def brought(rank: int, num_ranks: int) -> tuple[object, list[str]]:
        path, own = tmp_path / str(rank), ("__0_0.distcp", "__1_0.distcp")[rank]
        path.mkdir()
        (path / own).write_text("weights")
        if rank == 0:
            (path / MANIFEST).write_text('"manifest"')
            (path / ".metadata").write_text("none")
        copies, machine = copies_on(rank, config, path, Told())
        if refused and rank == 1:
            memory_copies.exchange = lambda *transfers: exchange(*transfers) or refused
        try:
            seen = copies._brought(machine, whole, path, rank)  # type: ignore[arg-type]
        except CheckpointError as error:
            return str(error), []
        return seen, sorted(each.name for each in path.iterdir())

    seen = {"__0_0.distcp": [0], "__1_0.distcp": [0, 1], ".metadata": [0, 1]}, "manifest"
    there = [sorted([*sizes, MANIFEST]), sorted(["__1_0.distcp", ".metadata", MANIFEST])]
    expected = [(f"Rank 1: {refused}", [])] * 2 if refused else [(seen, there[0]), (seen, there[1])]
    assert run_on_ranks(brought, 2) == expected


def test_no_rank_looks_on_before_a_copy_that_is_passed_over_is_gone(config: Path, tmp_path: Path) -> None:
    """It would find the same copy again, and the ranks would go on from different ones."""

    def there(rank: int, num_ranks: int) -> tuple[bool, int]:
        told, path = Told(), tmp_path / "step_00000001"
        copies, _ = copies_on(rank, config, tmp_path, told)
        path.mkdir(exist_ok=True)
        remove = memory_copies.remove
        memory_copies.remove = lambda each: (time.sleep(0.3), remove(each))
        copies._pass_over(path, "It is damaged.")
        return path.exists(), len(told.said)

    assert run_on_ranks(there, 2) == [(False, 1)] * 2


# --- a run on three machines ------------------------------------------------------------------------------------------

KEYS = ("checkpoint.memory_every=1", "checkpoint.every=4", "checkpoint.keep=2", "parallel.tp=2", "parallel.dp=2")
KEYS = (*KEYS, "parallel.zero=1")


def on_three_machines(folder: Path, killed: int | None = None) -> Callable[[int], None]:
    """What a rank does first: it has the folder of its machine, and is killed behind a step."""

    def first(rank: int) -> None:
        machine = next(k for k, ranks in enumerate(MACHINES) if rank in ranks)
        (folder / str(machine)).mkdir(parents=True, exist_ok=True)
        os.environ[launch.MEMORY] = str(folder / str(machine))
        if killed is not None:
            killed_after(killed)(rank)

    return first


@pytest.mark.slow
def test_a_run_goes_on_from_the_memory_of_the_machines_that_are_left(finished: Finished, tmp_path: Path) -> None:
    """One of three is lost with its folder: the bits are those of a run that goes on from the disk, where two are."""
    run, memory = tmp_path / "run", tmp_path / "memory"
    command = ("train", finished.config, *KEYS)
    answer = forked(*command, f"run.folder={run}", num_ranks=4, first=on_three_machines(memory, killed=5))
    assert answer.status == -signal.SIGKILL, answer
    copies = [{each.name for each in (memory / str(k) / "step_00000005").iterdir()} for k in range(3)]
    assert [{name for name in each if name.startswith("__")} for each in copies] == [
        OWN[k] | OWN[(k + 1) % 3] for k in range(3)
    ]
    for name, lost in (("one lost", [1]), ("first lost", [0]), ("two lost", [1, 2])):
        shutil.copytree(run, tmp_path / name)
        shutil.copytree(memory, tmp_path / f"memory, {name}")
        for machine in lost:
            shutil.rmtree(tmp_path / f"memory, {name}" / str(machine))
        first = on_three_machines(tmp_path / f"memory, {name}")
        answer = forked(*command, f"run.folder={tmp_path / name}", num_ranks=4, first=first)
        assert answer.status == 0, answer
        (resumed,) = [event for event in events(tmp_path / name) if event["event"] == "resumed"]
        assert (resumed["step"], resumed["origin"]) == ((5, "memory") if len(lost) == 1 else (4, "disk"))
        assert ("is not whole: 1 of its files are on no machine. The run goes on from the disk." in answer.out) == (
            lost == [1, 2]
        )
    for name in ("one lost", "first lost"):
        assert_same_end(tmp_path / name, tmp_path / "two lost")


@pytest.mark.slow
def test_a_file_that_a_machine_cannot_take_ends_the_copies(finished: Finished, tmp_path: Path) -> None:
    """Without it the copy is not whole, though each machine has one of that step."""
    at = on_three_machines(tmp_path / "memory")

    def first(rank: int) -> None:
        at(rank)
        if rank == 3:
            memory_copies.exchange = lambda *transfers: exchange(*transfers) or "No space left on device"

    answer = forked("train", finished.config, *KEYS, f"run.folder={tmp_path / 'run'}", num_ranks=4, first=first)
    assert answer.status == 0 and answer.out.count("No more copies") == 1 and "No space left on device" in answer.out
    assert not list((tmp_path / "memory").rglob("step_*")), "none that is not whole"
