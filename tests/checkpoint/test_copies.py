"""What a rank says of its copies: every number of each is in its sum, and what differs is told in few lines."""

from typing import Any

import pytest
import torch

from colonnade.checkpoint import copies
from colonnade.checkpoint.copies import SHOWN, Copies
from colonnade.data_parallel.buckets import Bucket
from colonnade.errors import CopiesError
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, Mesh, build_mesh
from tests.data_parallel.flat import allocated, flat_model, storage, weights
from tests.distributed import run_on_ranks


def test_every_number_is_in_the_sum_and_each_name_has_its_own() -> None:
    first, second = torch.arange(13.0), torch.arange(13.0) + 1
    before = copies._Sums().of_all(lambda: iter([("a", first), ("b", second)]))
    assert int(before["a"]) != int(before["b"])
    for at in range(13):
        changed = first.clone()
        changed[at] += 1
        after = copies._Sums().of_all(lambda changed=changed: iter([("a", changed), ("b", second)]))  # type: ignore[misc]
        assert int(after["a"]) != int(before["a"]) and int(after["b"]) == int(before["b"])


def test_numbers_of_a_run_are_compared_to_the_bit() -> None:
    bits = [int(copies._bits(number)) for number in (0.0, -0.0, 1.0, 1.0 + 2**-52, 65536.0, -65536.0)]
    assert len(set(bits)) == 6


def test_one_rank_alone_has_no_copies() -> None:
    Copies([], [], Mesh()).check("Step 3", {"step": 3.0})


def message(gathered: list[dict[str, str]]) -> list[str]:
    return copies._message("Step 4", gathered).splitlines()


def test_ranks_with_the_same_sum_stand_together() -> None:
    name = "blocks.0.norm.weight over tp of 0,1,2"
    head, line, rest = message([{name: "aa"}, {name: "bb"}, {name: "aa"}, {}])
    assert head.startswith("Step 4: what several ranks hold as copies of each other is not equal any more")
    assert line == "  blocks.0.norm.weight over tp: ranks 0 and 2 aa, rank 1 bb" and rest.startswith("Nothing of this")
    of_slice = "blocks.0, group 0 of the slice over tp"
    assert (
        message([{f"{of_slice} of 0,1": "aa"}, {f"{of_slice} of 0,1": "bb"}])[1]
        == f"  {of_slice}: rank 0 aa, rank 1 bb"
    )


def test_groups_of_ranks_are_told_apart() -> None:
    """The same weight, over two groups of tp."""
    gathered = [
        {"x over tp of 0,1": "a"},
        {"x over tp of 0,1": "b"},
        {"x over tp of 2,3": "a"},
        {"x over tp of 2,3": "c"},
    ]
    _, first, second, _ = message(gathered)
    assert (first, second) == ("  x over tp: rank 0 a, rank 1 b", "  x over tp: rank 2 a, rank 3 c")


def test_few_of_many_are_listed() -> None:
    for more in (0, 1, 5):
        lines = message([{f"w{n} over dp of 0,1": sums for n in range(SHOWN + more)} for sums in "ab"])[1:-1]
        assert [line for line in lines if " over dp: " in line] == [
            f"  w{n} over dp: rank 0 a, rank 1 b" for n in range(SHOWN)
        ]
        assert lines[SHOWN:] == ([f"  and {more} more"] if more else [])


def test_a_sound_copy_comes_from_its_place_on_the_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 1, 3 and 5 are 0, 1 and 2 of dp. Copies over tp, and of stages, are mended too."""
    sources: list[tuple[list[float], int]] = []
    monkeypatch.setattr(copies, "broadcast_", lambda x, axis, source: sources.append((x.tolist(), source)))
    dp, tp, ends = Axis("dp", 3, 0, (1, 3, 5)), Axis("tp", 2, 0, (1, 2)), Axis("ends", 2, 0, (1, 7))
    bucket = Bucket("blocks.0", weights({"a": (2,), "b": (1,)}), dp, storage())
    sound = {
        "blocks.0.b over dp of 1,3,5": 3,
        "blocks.0.a over dp of 0,2,4": 4,
        "blocks.0.a over tp of 1,2": 2,
        "blocks.0.b over ends of 1,7": 1,
    }
    Copies([bucket], [{}], Mesh(dp=dp, tp=tp), {"blocks.0": ends}).mend_(sound)
    assert sources == [([2.0], 1), ([0.0, 1.0], 1), ([2.0], 0)]


def test_what_is_of_a_slice_has_another_name_than_what_is_of_the_whole() -> None:
    """Sums are known by name: one of a rank's slice must not stand for one of the buffer."""
    groups = [(slice(0, 4), True), (slice(4, 9), False)]
    for zero, same in ((0, True), (1, False), (2, False)):
        bucket: Any = _Bucket(zero, groups)
        ranges = [name for name, *_ in copies._ranges(bucket, False)]
        slices = [name for name, *_ in copies._slices(bucket, False)]
        assert len(set(ranges)) == 2 and (ranges == slices) is same and set(ranges).isdisjoint(slices) is not same


class _Bucket:
    name = "blocks.0"

    def __init__(self, zero: int, groups: list[tuple[slice, bool]]) -> None:
        self.storage = _Storage(zero)
        self.groups = [_Group(at.start, at.stop, cut) for at, cut in groups]

    def local_groups(self) -> list[tuple["_Group", slice]]:
        return [(group, slice(0, 2)) for group in self.groups]


class _Storage:
    def __init__(self, zero: int) -> None:
        self.zero = zero


class _Group:
    def __init__(self, start: int, stop: int, cut: bool) -> None:
        self.start, self.stop, self.cut = start, stop, cut


# --- between ranks ----------------------------------------------------------------------------------------------------

NORM = "attention_norm.weight"  # not cut by tp
CHANGED: dict[str, tuple[str, str, str, int, list[str]]] = {
    "nothing": ("blocks.0", NORM, "master", 9, []),
    "a weight": ("blocks.0", NORM, "master", 3, [f"blocks.0.{NORM} over tp: rank 2 X, rank 3 X"]),
    "its moment": ("blocks.0", NORM, "exp_avg", 3, [f"optimizer.exp_avg.blocks.0.{NORM} over tp: rank 2 X, rank 3 X"]),
    "its 16-bit parameter": (
        "blocks.1",
        NORM,
        "parameters",
        1,
        [f"parameters (bfloat16) blocks.1.{NORM} over tp: rank 0 X, rank 1 X"],
    ),
    "a shard that tp cuts": ("blocks.0", "mlp.up.weight", "master", 1, []),
    "its parameter": ("blocks.0", "mlp.up.weight", "parameters", 1, []),
    "a table of two stages": (
        "embedding.tokens",
        "weight",
        "master",
        2,
        ["embedding.tokens.weight over ends: rank 0 X, rank 2 X"],
    ),
    "the table's moment": (
        "embedding.tokens",
        "weight",
        "exp_avg",
        3,
        ["optimizer.exp_avg.embedding.tokens.weight over ends: rank 1 X, rank 3 X"],
    ),
    "the table's parameter": (
        "embedding.tokens",
        "weight",
        "parameters",
        2,
        ["parameters (bfloat16) embedding.tokens.weight over ends: rank 0 X, rank 2 X"],
    ),
}


def _differing(rank: int, num_ranks: int) -> dict[str, list[str]]:
    """What this rank is told where one rank's copy has changed; of counts that one rank has otherwise, too."""
    mesh = build_mesh(Layout(tp=2, pp=2), rank)
    told: dict[str, list[str]] = {}
    for case, (unit, name, what, where, _) in CHANGED.items():
        _, buckets = flat_model(storage(torch.bfloat16), tp=mesh.tp)
        state = [{"exp_avg": torch.zeros_like(bucket.master)} for bucket in buckets]
        if rank == where:
            bucket, kept = next((b, k) for b, k in zip(buckets, state, strict=True) if b.name == unit)
            param = next(param for param in bucket.ranges if param.placement.name == name)
            flat = {"master": bucket.master, "parameters": bucket.parameters, **kept}[what]
            flat[param.start] += 1
        told[case] = _said(Copies(buckets, state, mesh, {"embedding.tokens": mesh.ends}), {"step": 3.0})
    bucket = Bucket("blocks.0", weights({"a": (3,), "b": (5,)}), mesh.tp, storage(torch.bfloat16))
    after = next(a.stop for a, b in zip(bucket.ranges, bucket.ranges[1:], strict=False) if a.stop < b.start)
    bucket.master[after] += rank == 3
    told["between weights"] = _said(Copies([bucket], [{}], mesh), {})
    told["a count"] = _said(Copies([], [], mesh), {"step": 3.0, "skipped": float(rank == 1)})
    return told


def _said(held: Copies, counts: dict[str, float]) -> list[str]:
    try:
        held.check("Step 3", counts)
    except CopiesError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:-1]]
        return [
            " ".join("X," if len(word) == 17 else "X" if len(word) == 16 else word for word in line.split())
            for line in lines
        ]
    return []


def test_what_differs_is_told_to_all_ranks_and_nothing_else_is() -> None:
    """Over tp what it does not cut, over stages what they share: weights, moments, and parameters of 16 bits."""
    expected = {case: lines for case, (*_, lines) in CHANGED.items()}
    expected["between weights"] = ["blocks.0, group 0 over tp: rank 2 X, rank 3 X"]
    expected["a count"] = ["skipped over world: ranks 0 and 2 and 3 X, rank 1 X"]
    assert run_on_ranks(_differing, 4, time_limit=20.0) == [expected] * 4


def _behind_a_step(rank: int, num_ranks: int) -> dict[str, list[list[str]]]:
    """What is told when weights have just been sent on their way; then when one has changed on rank 1."""
    mesh = build_mesh(Layout(dp=num_ranks), rank)
    told: dict[str, list[list[str]]] = {}
    for zero in (1, 2, 3):
        for dtype in (torch.float64, torch.bfloat16):
            _, buckets = flat_model(storage(dtype, zero), dp=mesh.dp)
            state = [{"exp_avg": torch.full_like(bucket.master, rank)} for bucket in buckets]
            held = Copies(buckets, state, mesh)
            for bucket in buckets:
                bucket.master.add_(1.0)
                bucket.publish()
            said = [_said(held, {"step": 3.0})]
            if zero == 3:
                assert allocated(buckets, "parameters") == set(), "a rank keeps its slice, and gathers nothing for this"
            else:
                changed = next(bucket for bucket in buckets if bucket.name == "blocks.1")
                changed.parameters[changed.ranges[0].start] += rank
                said.append(_said(held, {"step": 3.0}))
            told[f"{zero} {dtype}"] = said
    return told


def test_weights_that_still_arrive_are_compared_when_they_are_there() -> None:
    """Under ZeRO 1 and 2 a rank has all of them, and of what the optimizer keeps only its slice; under 3 no copies."""
    _, buckets = flat_model()
    name = next(bucket for bucket in buckets if bucket.name == "blocks.1").ranges[0].placement.name
    expected: dict[str, list[list[str]]] = {}
    for dtype in ("float64", "bfloat16"):
        differs = f"parameters ({dtype}) blocks.1.{name} over dp: rank 0 X, rank 1 X"
        expected |= {f"{zero} torch.{dtype}": [[], [differs]] for zero in (1, 2)} | {f"3 torch.{dtype}": [[]]}
    assert run_on_ranks(_behind_a_step, 2, time_limit=20.0) == [expected] * 2
