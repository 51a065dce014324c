"""Who waits for whom, in words: from reports alone, no process needed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from colonnade.launch.explanation import Operation, Picture, Report, awaited, explain, last_step, together
from colonnade.mesh.layout import Layout
from colonnade.mesh.process import ProcessId

LAYOUT = Layout(tp=2, pp=2, dp=2)


def operation(name: str = "all_reduce", axis: str = "tp", layer: str = "blocks.7.mlp", **more: object) -> Operation:
    given = {"backward": False, "bytes": 4096, "site": "tensor_parallel/linear.py:58", "number": 9, **more}
    return Operation(operation=name, axis=axis, layer=layer, **given)  # type: ignore[arg-type]


def ranks_of(rank: int, axis: str) -> tuple[int, ...]:
    if axis == "world":
        return tuple(range(LAYOUT.num_ranks))
    return next(ranks for ranks in LAYOUT.groups(axis) if rank in ranks)


def report(rank: int, waiting: Operation | None = None, *, step: int | None = 41, **more: object) -> Report:
    """A rank that has begun eight operations on every axis, and a ninth if it waits."""
    numbers = dict.fromkeys(("tp", "dp", "pp", "world"), 8)
    if waiting is not None and waiting.peer is None:
        numbers[waiting.axis] = waiting.number
    at = LAYOUT.coordinates(rank)
    done = operation(layer="blocks.7.attention", number=8, seconds=0.0012)
    basic = Report(
        rank=rank,
        coordinates=f"[pp{at['pp']} dp{at['dp']} tp{at['tp']}]",
        step=step,
        waiting=waiting,
        waiting_ranks=() if waiting is None else ranks_of(rank, waiting.axis),
        waited=5.04 if waiting is not None else 0.0,
        error="",
        numbers=numbers,
        step_numbers=dict.fromkeys(numbers, 5),
        recent=(done,) if waiting is None else (done, waiting),
        process=ProcessId("here", 100 + rank, "7"),
    )
    return replace(basic, **more)  # type: ignore[arg-type]


def picture(*reports: Report, **more: object) -> Picture:
    return Picture({each.rank: each for each in reports}, **more)  # type: ignore[arg-type]


def first_line(rank: int, known: Picture) -> str:
    return explain(rank, known).splitlines()[0]


def test_a_rank_that_died() -> None:
    known = picture(report(3, operation()), report(2), gone={2: "killed by signal 9 (SIGKILL)"})
    assert explain(3, known) == (
        "rank 3 [pp0 dp1 tp1] waits in all_reduce over tp for blocks.7.mlp (step 41, 5.0 s); "
        "rank 2 [pp0 dp1 tp0] left step 41 (killed by signal 9 (SIGKILL))\n"
        "\n"
        "The last operations of rank 3 [pp0 dp1 tp1], newest last:\n"
        "  all_reduce over tp for blocks.7.attention: 4,096 bytes, 1.2 ms, tensor_parallel/linear.py:58\n"
        "  all_reduce over tp for blocks.7.mlp: 4,096 bytes, under way, tensor_parallel/linear.py:58"
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (report(2), "rank 2 [pp0 dp1 tp0] is busy in step 41, after all_reduce over tp for blocks.7.attention"),
        (report(2, step=None, recent=()), "rank 2 [pp0 dp1 tp0] is busy in step 41"),
        (report(2, left="raised ValueError: odd"), "rank 2 [pp0 dp1 tp0] left step 41 (raised ValueError: odd)"),
        (report(2, operation(axis="dp")), "rank 2 [pp0 dp1 tp0] waits itself"),
    ],
)
def test_what_is_said_of_the_other(other: Report, said: str) -> None:
    assert first_line(3, picture(report(3, operation()), other)).partition("; ")[2] == said


def test_a_rank_that_is_silent_and_one_that_never_spoke() -> None:
    known = picture(report(3, operation()), report(2), silent={2})
    assert first_line(3, known).endswith(
        "rank 2 [pp0 dp1 tp0] stands still in step 41, after all_reduce over tp for blocks.7.attention and says "
        "nothing (stopped, or its machine is lost)"
    )
    assert first_line(3, picture(report(3, operation()))).endswith("; rank 2 has never reported")
    killed = {2: "killed by signal 9 (SIGKILL)"}
    assert first_line(3, picture(report(3, operation()), gone=killed)).endswith(
        "; rank 2 has never reported (killed by signal 9 (SIGKILL))"
    )


@pytest.mark.parametrize(
    ("said", "known"),
    [
        ("stands still in step 41", {"silent": {4}}),
        ("left step 41 (killed by signal 9 (SIGKILL))", {"gone": {4: "killed by signal 9 (SIGKILL)"}}),
        ("left step 41 (raised ValueError: odd)", {}),
    ],
    ids=["silent", "killed", "left"],
)
def test_a_rank_that_waited_when_it_was_last_heard_of_is_the_cause_if_it_is_no_longer_there(
    said: str, known: dict[str, object]
) -> None:
    """It waits for rank 0 itself, by its last report; but nobody waits there any more: that is no circle."""
    receive = {0: operation("receive", "pp", peer=4, number=1), 4: operation("receive", "pp", peer=0, number=1)}
    other = report(4, receive[4], left="" if known else "raised ValueError: odd")
    lines = explain(0, picture(report(0, receive[0]), other, **known)).splitlines()
    assert f"; rank 4 [pp1 dp0 tp0] {said}" in lines[0]
    assert lines[1] == "" and not any("disagree" in line for line in lines)


def test_a_rank_that_has_explained_and_ended_is_no_cause() -> None:
    """It waits for rank 0, has said so and is gone; its own peer still puts it in the right place."""
    known = picture(
        report(3, operation()), report(2, operation(axis="dp"), explained=True), report(0), gone={2: "ended"}
    )
    lines = explain(3, known).splitlines()
    assert lines[0].endswith("; rank 2 [pp0 dp1 tp0] waits itself")
    assert lines[1].startswith("rank 2 [pp0 dp1 tp0] waits in all_reduce over dp for blocks.7.mlp")
    assert lines[1].endswith(
        "; rank 0 [pp0 dp0 tp0] is busy in step 41, after all_reduce over tp for blocks.7.attention"
    )


def test_the_chain_leads_to_the_cause() -> None:
    """7 waits for 6, who waits to receive from 2, who waits for 0, who is dead; 3 waits too and does not matter."""
    receive = operation("receive", "pp", "blocks.9", peer=2, number=3)
    known = picture(
        report(7, operation()),
        report(6, receive),
        report(2, operation(axis="dp", backward=True)),
        report(3, operation(axis="dp")),
        report(0),
        report(4),
        gone={0: "killed by signal 9 (SIGKILL)"},
    )
    assert [line.split(" (")[0] for line in explain(7, known).splitlines()[:4]] == [
        "rank 7 [pp1 dp1 tp1] waits in all_reduce over tp for blocks.7.mlp",
        "rank 6 [pp1 dp1 tp0] waits in receive over pp from rank 2 for blocks.9",
        "rank 2 [pp0 dp1 tp0] waits in all_reduce over dp for blocks.7.mlp, backward",
        "",
    ]
    assert "rank 0 [pp0 dp0 tp0] left step 41" in explain(7, known).splitlines()[2]


def test_a_circle() -> None:
    receive = {0: operation("receive", "pp", peer=4, number=1), 4: operation("receive", "pp", peer=0, number=1)}
    lines = explain(0, picture(*(report(rank, each) for rank, each in receive.items()))).splitlines()
    assert lines[2] == "They wait for each other: their programs disagree about what comes next."


def test_who_waits_for_one_that_waits_for_the_cause_is_no_circle() -> None:
    """Rank 7 waits for all, of whom 0 is dead; 6 waits for 7. The last one's wait alone would look like one."""
    lines = explain(
        7,
        picture(
            report(7, operation(axis="world")),
            report(6, operation("receive", "tp", peer=7, number=1)),
            gone={0: "killed by signal 9 (SIGKILL)"},
        ),
    ).splitlines()
    assert lines[1].startswith("rank 6 [pp1 dp1 tp0] waits in receive over tp from rank 7 for blocks.7.mlp (step 41, ")
    assert lines[2] == ""


def test_an_error_of_the_connection_is_told_where_nothing_better_is_known() -> None:
    """Of a rank that has reported more is known than what its peers felt of its end."""
    waiting = report(3, operation(), error="Connection closed by peer")
    assert "(step 41, 5.0 s); rank 2 [pp0 dp1 tp0] left" in first_line(
        3, picture(waiting, report(2), gone={2: "ended"})
    )
    assert "(step 41, 5.0 s, Connection closed by peer); rank 2 has never" in first_line(3, picture(waiting))


def test_both_ends_of_a_transfer_do_not_disagree() -> None:
    """One sends what the other receives."""
    sender = report(0, operation("send", "pp", peer=4, number=1))
    receiver = report(4, operation("receive", "pp", peer=0, number=1))
    sender.numbers["pp send 1"] = receiver.numbers["pp receive 0"] = 1
    for rank in (0, 4):
        assert first_line(rank, picture(sender, receiver)).endswith("all that take part have come, but it does not end")


def test_of_many_that_disagree_some_are_named() -> None:
    others = [report(rank, operation("all_gather", axis="world")) for rank in range(1, 8)]
    line = first_line(0, picture(report(0, operation(axis="world")), *others))
    assert line.count("; rank") == line.count("instead of 4,096: their programs disagree") == 3


def test_transfers_meet_by_number() -> None:
    receiver = report(4, operation("receive", "pp", peer=0, number=3))
    sender = report(0)
    for sent, missing in ((2, [0]), (3, []), (4, [])):
        sender.numbers["pp send 1"] = sent  # rank 4 is rank 1 of its axis
        assert awaited(receiver, picture(receiver, sender)) == missing
    back = report(0, operation("send", "pp", peer=4, number=2))
    receiver.numbers["pp receive 0"] = 1
    assert awaited(back, picture(receiver, back)) == [4]


def test_all_have_come() -> None:
    error = "Read error: Connection reset by peer"
    known = picture(report(2, operation()), report(3, operation(), error=error))
    assert first_line(3, known) == (
        f"rank 3 [pp0 dp1 tp1] waits in all_reduce over tp for blocks.7.mlp (step 41, 5.0 s, {error}); "
        "all that take part have come, but it does not end"
    )


@pytest.mark.parametrize(("kind", "size"), [("all_gather", 512), ("all_reduce", 512), ("all_gather", 4096)])
def test_programs_that_disagree(kind: str, size: int) -> None:
    """About what they do, or how much of it."""
    other = operation(kind, bytes=size)
    assert first_line(3, picture(report(2, other), report(3, operation()))).endswith(
        f"; rank 2 [pp0 dp1 tp0] is in {kind} over tp for blocks.7.mlp of {size:,} bytes instead of 4,096: "
        "their programs disagree"
    )


@pytest.mark.parametrize("more", [{"number": 10}, {"axis": "dp"}, {"layer": "blocks.8.mlp"}, {"backward": True}])
def test_a_rank_in_another_operation_does_not_disagree(more: dict[str, Any]) -> None:
    """It has left this one, or waits elsewhere; the same operation may be named otherwise."""
    other = report(2, operation(**{"name": "all_gather", **more} if more.keys() <= {"number", "axis"} else more))
    other.numbers["tp"] = max(9, other.numbers["tp"])
    assert first_line(3, picture(other, report(3, operation()))).endswith(
        "all that take part have come, but it does not end"
    )


def test_many_are_not_all_named() -> None:
    waiting = operation(axis="world", layer="")
    known = picture(*(report(rank) for rank in range(7)), report(7, waiting))
    line = first_line(7, known)
    assert line.startswith("rank 7 [pp1 dp1 tp1] waits in all_reduce over world (step 41, 5.0 s); rank 0 ")
    assert line.count("; rank") == 3 and line.endswith("; 4 more have not come")


def test_a_long_chain_is_cut() -> None:
    waits = [operation("receive", "pp", peer=rank + 1, number=1) for rank in range(20)]
    reports = [replace(report(0, wait), rank=rank, waiting_ranks=tuple(range(21))) for rank, wait in enumerate(waits)]
    lines = explain(0, picture(*reports, replace(report(0), rank=20))).splitlines()
    assert lines[8] == "… and 12 more ranks wait." and lines[9] == ""


def test_the_limit_and_a_lost_board_are_told() -> None:
    known = picture(report(3, operation(), error="Connection closed by peer"), limit=5.0, unread="Broken pipe")
    lines = explain(3, known).splitlines()
    assert lines[0].endswith("(step 41, 5.0 s, Connection closed by peer); rank 2 has not come")
    assert lines[1:3] == [
        "The other ranks' reports cannot be read (Broken pipe): this is what is known.",
        "The limit is train.timeout = 5 seconds.",
    ]
    assert "train.timeout" not in explain(3, replace(known, limit=6.0))


@pytest.mark.parametrize(("number", "step"), [(9, 41), (7, 41), (6, 40)])
def test_the_step_that_a_rank_left_is_what_its_peers_know(number: int, step: int) -> None:
    """Its own report is of step 30. Rank 3 began step 41 after number 5 of the axis, so that number 6 was its first."""
    waiting = report(3, operation(number=number))
    dead = report(2, step=30)
    known = picture(waiting, dead, gone={2: "ended without a word"})
    assert last_step(dead, known) == step
    assert f"left step {step} (ended without a word)" in first_line(3, known)


def test_the_step_that_a_rank_left_is_the_latest_that_is_known_of_it() -> None:
    """By its own report, which may be newer than its peer's, or another peer's."""
    newer = report(2, step=43)
    assert last_step(newer, picture(newer, report(3, operation(number=9)), report(0, operation(axis="dp")))) == 43


@pytest.mark.parametrize("silent", [(), (2,)])
def test_what_a_rank_did_in_an_earlier_step_is_not_told_of_this_one(silent: tuple[int, ...]) -> None:
    """It has met rank 3 in step 41 since it reported last."""
    known = picture(report(3, operation()), report(2, step=30), silent=silent)
    said = first_line(3, known).partition("; ")[2]
    assert said.startswith(f"rank 2 [pp0 dp1 tp0] {'stands still' if silent else 'is busy'} in step 41")
    assert ", after " not in said


def test_before_the_first_step() -> None:
    known = picture(report(3, operation(), step=None), report(2, step=None), gone={2: "ended with exit status 1"})
    assert "waits in all_reduce over tp for blocks.7.mlp (5.0 s); " in first_line(3, known)
    assert first_line(3, known).endswith("left before its first step (ended with exit status 1)")


def test_reports_travel_as_text() -> None:
    for each in (report(3, operation("receive", "pp", peer=7)), report(0, left="raised ValueError: a\nb", step=None)):
        assert Report.from_json(each.to_json()) == each


def test_several_explanations_as_one() -> None:
    """Each rank in its own words once, in order; then notes once; then what each did last."""
    known = picture(
        report(3, operation()), report(2, operation(axis="dp")), report(0), report(1, operation()), limit=5.0
    )
    texts = {rank: explain(rank, known) for rank in (3, 2)}
    later = {**texts, 2: texts[2].replace("5.0 s", "5.4 s")}
    lines = together(later).splitlines()
    assert [line[:6] for line in lines[:2]] == ["rank 2", "rank 3"] and "5.4 s" in lines[0]
    assert lines[2] == "The limit is train.timeout = 5 seconds." and lines.count(lines[2]) == 1
    assert [line for line in lines if line.startswith("The last")] == [
        "The last operations of rank 3 [pp0 dp1 tp1], newest last:",
        "The last operations of rank 2 [pp0 dp1 tp0], newest last:",
    ]
    assert [line[:6] for line in together({3: texts[3]}).splitlines()[:2]] == ["rank 2", "rank 3"]


def explained(known: Picture) -> list[str]:
    """What is shown of all ranks that are left."""
    return together({rank: explain(rank, known) for rank in sorted(known.reports.keys() - known.gone)}).splitlines()


def copies(num_ranks: int, *, dead: int, waited: Sequence[float] = (5.0,)) -> Picture:
    """Ranks that all wait for one."""
    waiting, ranks = operation(axis="dp"), tuple(range(num_ranks))
    reports = [
        replace(
            report(0, waiting),
            rank=rank,
            coordinates=f"[pp0 dp{rank} tp0]",
            waiting_ranks=ranks,
            waited=waited[rank % len(waited)],
            recent=(operation(layer="blocks.6.mlp", number=8, seconds=(1 + rank) / 1000), waiting),
        )
        for rank in ranks
    ]
    return picture(*reports, gone={dead: "killed by signal 9 (SIGKILL)"})


def test_ranks_that_wait_alike_for_one_that_is_gone_are_told_together() -> None:
    """In as many lines whether there are 4 or 399 of them, though each has waited for a time of its own."""
    for num_ranks, last in ((5, "4"), (400, "4-399")):
        assert explained(copies(num_ranks, dead=3, waited=(5.0, 10.2, 5.5))) == [
            f"ranks 0-2 and {last} wait in all_reduce over dp for blocks.7.mlp (step 41, 5.0-10.2 s); "
            "rank 3 [pp0 dp3 tp0] left step 41 (killed by signal 9 (SIGKILL))",
            "The last operations of rank 0 [pp0 dp0 tp0], newest last:",
            "  all_reduce over tp for blocks.6.mlp: 4,096 bytes, 1.0 ms, tensor_parallel/linear.py:58",
            "  all_reduce over dp for blocks.7.mlp: 4,096 bytes, under way, tensor_parallel/linear.py:58",
            f"  The same but for times: ranks 1, 2 and {last}.",
        ]
    (together, *_) = explained(copies(3, dead=0))
    assert together.startswith("ranks 1 and 2 wait in all_reduce over dp for blocks.7.mlp (step 41, 5.0 s); rank 0 ")


def test_ranks_that_wait_in_something_else_or_for_others_are_told_apart() -> None:
    """For another rank, though in the same; in another operation, though for the same rank."""

    def told_apart(*waiting: Report) -> bool:
        lines = explained(picture(*waiting, gone={0: "ended"}))
        return sum(line.startswith(f"{each.name} waits in ") for line in lines for each in waiting) == len(waiting)

    assert told_apart(report(1, operation()), report(3, operation()))
    assert told_apart(report(2, operation(axis="dp")), report(4, operation("receive", "pp", peer=0, number=1)))
    assert not told_apart(*(report(rank, operation(axis="world")) for rank in (1, 5)))


def test_ranks_that_have_heard_of_a_lost_connection_are_told_together() -> None:
    lost = "Connection closed by peer"
    waits = [report(rank, operation(axis="world"), error=lost, recent=()) for rank in (1, 5)]
    assert explained(picture(*waits)) == [
        f"ranks 1 and 5 wait in all_reduce over world for blocks.7.mlp (step 41, 5.0 s, {lost}); rank 0 has never "
        "reported; rank 2 has never reported; rank 3 has never reported; 3 more have not come",
        "The last operations of rank 1 [pp0 dp0 tp1], newest last:",
        "The last operations of rank 5 [pp1 dp0 tp1], newest last:",
    ]


def test_of_much_that_differs_what_leads_to_the_cause_is_told() -> None:
    """Of 40 ranks on a second stage each two wait to receive from another on the first: two of them from the dead one.
    Another waits for that one beside one that waits itself.
    """
    first = copies(40, dead=30).reports
    second = {
        40 + rank: replace(
            report(4, operation("receive", "pp", f"blocks.{peer}", peer=peer, number=1)),
            rank=40 + rank,
            coordinates=f"[pp1 dp{rank} tp0]",
            waiting_ranks=(peer, 40 + rank),
        )
        for rank in range(40)
        for peer in [rank // 2 * 2]
    }
    both = replace(report(0, operation()), rank=80, coordinates="[pp2 dp0 tp0]", waiting_ranks=(0, 30, 80))
    lines = explained(Picture({**first, **second, 80: both}, gone={30: "killed by signal 9 (SIGKILL)"}))
    waits = [line for line in lines if " wait" in line]
    assert len(waits) == 9 and waits[0].startswith("ranks 0-29 and 31-39 wait in all_reduce over dp")
    assert waits[6].startswith("ranks 70 and 71 wait in receive over pp from rank 30 for blocks.30 (")
    assert waits[7].startswith("rank 80 [pp2 dp0 tp0] waits in ") and "; rank 0 [pp0 dp0 tp0] waits itself;" in waits[7]
    assert waits[8] == "… and 28 more ranks wait."
    last = [line for line in lines if line.startswith("The last operations of ")]
    assert len(last) == 8 and last[0].startswith("The last operations of rank 0 ")
    assert "rank 70 " in last[6] and "rank 80 " in last[7]
    assert lines[-1] == "… and the last operations of 28 more ranks."
