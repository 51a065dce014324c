"""Files that ranks send each other: in rounds, whole, and without anybody waiting for one that cannot write."""

import resource
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from colonnade.mesh import files
from colonnade.mesh.files import Transfer, broadcast, exchange, rounds
from tests.distributed import run_on_ranks

RANKS = st.integers(0, 4)


@given(st.lists(st.builds(Transfer, RANKS, RANKS, st.text(max_size=3), st.integers(0, 9))))
def test_in_a_round_a_rank_sends_one_and_receives_one(transfers: list[Transfer]) -> None:
    found = rounds(transfers)
    assert Counter(each for one in found for each in one) == Counter(transfers) and all(found)
    for one in found:
        assert len({each.source for each in one}) == len({each.target for each in one}) == len(one)
    sends = Counter(each.source for each in transfers) + Counter()
    receives = Counter(each.target for each in transfers)
    most = max([0, *sends.values(), *receives.values()])
    assert most <= len(found) <= max(0, 2 * most - 1), "greedy, and never twice as many as are needed"


def test_ranks_send_files_to_each_other(tmp_path: Path) -> None:
    """Of several blocks, of none, around a ring, two to one. What cannot be read or written is told."""
    sizes = {"a": 10, "b": 3, "c": 0, "d": 7}
    sent = [Transfer(0, 1, "a", 10), Transfer(1, 2, "b", 3), Transfer(2, 0, "c", 0), Transfer(2, 1, "d", 7)]
    lost = [Transfer(0, 1, "gone", 9), Transfer(2, 1, "d", 7), Transfer(1, 2, "a", 10)]

    def rank_of(rank: int, num_ranks: int) -> tuple[str, str, str, bytes]:
        files.BLOCK = 4
        folder = tmp_path / str(rank)
        folder.mkdir()
        for each in sent:
            if each.source == rank:
                (folder / each.name).write_bytes(each.name.encode() * each.size)
        group = dist.new_group(backend="gloo")
        first, second = exchange(sent, folder, rank, group), exchange(lost, folder, rank, group)
        away = folder / "away" if rank == 1 else folder
        third = exchange([Transfer(0, 1, "a", 10)], away, rank, group)
        return first, second, third, broadcast(b"all" if rank == 2 else b"", 2, group)

    answers = run_on_ranks(rank_of, 3)
    for each in sent:
        assert (tmp_path / str(each.target) / each.name).read_bytes() == each.name.encode() * sizes[each.name]
    assert [answer[0] for answer in answers] == ["", "", ""]
    assert [bool(answer[1]) for answer in answers] == [True, False, False] and "gone" in answers[0][1]
    assert (tmp_path / "2" / "a").read_bytes() == b"a" * 10, "what can be sent is sent"
    assert [bool(answer[2]) for answer in answers] == [False, True, False]
    assert [answer[3] for answer in answers] == [b"all"] * 3
    assert not list(tmp_path.rglob("*.received"))


def test_a_rank_alone_has_what_it_has() -> None:
    assert broadcast(b"own", 0, None) == b"own"


def test_the_first_refusal_is_told(tmp_path: Path) -> None:
    """What follows from it is less telling."""
    sent = [Transfer(0, 1, "a", 3), Transfer(0, 1, "b", 3)]
    told, _ = run_on_ranks(lambda rank, _: exchange(sent, tmp_path, rank, dist.new_group(backend="gloo")), 2)
    assert told.endswith(f"{tmp_path / 'a'}'")


def test_a_rank_that_was_refused_something_still_sends_to_the_others(tmp_path: Path) -> None:
    """In the rounds that follow: nobody waits for it."""
    (tmp_path / "0").mkdir()
    for name in ("a", "b"):
        (tmp_path / "0" / name).write_bytes(b"abc")
    (tmp_path / "2").mkdir()
    sent = [Transfer(0, 1, "gone", 3), Transfer(0, 1, "a", 3), Transfer(0, 2, "b", 3)]

    def rank_of(rank: int, num_ranks: int) -> str:
        return exchange(sent, tmp_path / str(rank), rank, dist.new_group(backend="gloo"))

    told = run_on_ranks(rank_of, 3, time_limit=20.0)
    assert "gone" in told[0] and str(tmp_path / "1") in told[1] and told[2] == ""
    assert (tmp_path / "2" / "b").read_bytes() == b"abc"


def test_what_one_rank_has_is_sent_within_its_group_alone() -> None:
    """A thread that works beside training has a group of its own: on another its operations would meet training's."""

    def rank_of(rank: int, num_ranks: int) -> bytes:
        group = dist.new_group([1, 2], backend="gloo")
        return broadcast(b"own" if rank == 2 else b"", 2, group) if rank else b""

    assert run_on_ranks(rank_of, 3, time_limit=20.0) == [b"", b"own", b"own"]


@pytest.mark.parametrize("size", [4, 5, 9], ids=["between blocks", "within a block", "within the last"])
def test_a_file_that_was_cut_off_is_told(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "BLOCK", 4)
    (tmp_path / "a").write_bytes(b"a" * size)
    problems: list[OSError] = []
    sent = list(files._blocks(tmp_path, Transfer(0, 1, "a", 10), problems))
    assert [len(block) for block in sent] == [4, 4, 2], "nobody waits"
    assert [str(problem) for problem in problems] == [f"{tmp_path / 'a'} is shorter than 10 bytes"]


@pytest.mark.parametrize("sizes", [(1 << 15, 1 << 15, 1 << 15), (1 << 15, 1 << 15, 100)], ids=["block", "last bytes"])
def test_of_a_file_that_cannot_be_written_nothing_stays(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """Neither on the disk, whose space it would take, nor open. The last bytes are written when it is closed."""
    problems: list[OSError] = []
    received = files._Received(tmp_path / "a", problems)
    file, (soft, hard) = received._file, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        for size in sizes:
            received.write(torch.ones(size, dtype=torch.uint8))
        received.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file is not None and file.closed and len(problems) == 1
    assert not list(tmp_path.iterdir())
