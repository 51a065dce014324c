"""What several ranks hold alike is proven equal to the bit before it is saved; one bit on one rank is named."""

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from colonnade.checkpoint.copies import Verdict, verdict
from colonnade.checkpoint.names import newest_step
from colonnade.config.load import load
from colonnade.config.schema import Config
from colonnade.errors import CopiesError, DamagedError
from colonnade.launch import launch
from colonnade.mesh.collectives import where_unequal
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, Mesh, build_mesh
from colonnade.train import loop, undo
from colonnade.train import repair as repair_module
from colonnade.train.memory_copies import START, MemoryCopies
from colonnade.train.repair import Repair
from colonnade.train.run_folder import COPIES, checkpoints
from colonnade.train.state import TrainState
from tests.commands import forked, start
from tests.distributed import run_on_ranks
from tests.runs import assert_same, assert_same_end, events, metrics, saved_steps
from tests.slow import first_fast
from tests.told import Told

STOP = "checkpoint.unequal_copies=stop"
Corrupt = Callable[[TrainState], None]


def flip(x: torch.Tensor, at: int = 3) -> None:
    """Its lowest bit."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    x.view(bits)[at] ^= 1


def corrupted(rank: int, corrupt: Corrupt, step: int = 4) -> Callable[[int], None]:
    """Makes one rank do something to its state after a step."""

    def first(own: int) -> None:
        train_step = loop.train_step

        def and_corrupt(state: TrainState, *args: Any, **kwargs: Any) -> Any:
            result = train_step(state, *args, **kwargs)
            if own == rank and state.step == step:
                corrupt(state)
            return result

        loop.__dict__["train_step"] = and_corrupt

    return first


def alignment(state: TrainState) -> None:
    """A number of a group that belongs to none of its weights."""
    bucket, _ = unit_of(state, "blocks.0")
    after = zip(bucket.ranges, [*bucket.ranges[1:]], strict=False)
    flip(bucket.master, next(param.stop for param, following in after if param.stop < following.start))


def unit_of(state: TrainState, name: str) -> tuple[Any, Any]:
    return next((u, m) for u, m in zip(state.buckets, state.optimizer_state, strict=True) if u.name == name)


def weight(part: str, name: str, what: str = "master") -> Corrupt:
    def corrupt(state: TrainState) -> None:
        bucket, kept = unit_of(state, part)
        local = next(local for local in bucket.local_ranges() if local.name == f"{part}.{name}")
        flip(({"master": bucket.master} | kept)[what][local.at])

    return corrupt


def replicated(state: TrainState) -> None:
    """The first weight that tp does not cut, of a rank's slice."""
    bucket, _ = unit_of(state, "blocks.0")
    flip(bucket.master[next(local.at for local in bucket.local_ranges() if local.placement.dim is None)])


def parameters(state: TrainState, name: str = "blocks.0") -> None:
    bucket, _ = unit_of(state, name)
    bucket.unshard()
    flip(bucket.parameters, bucket.ranges[0].start)


def first_replicated_parameter(state: TrainState) -> None:
    """Of those that tp does not cut: which those are is known of the parameters too, not of a rank's slice alone."""
    bucket, _ = unit_of(state, "blocks.0")
    bucket.unshard()
    flip(bucket.parameters, next(each.start for each in bucket.ranges if each.placement.dim is None))


def one_step_skipped(state: TrainState) -> None:
    state.skipped += 1


def another_scale(state: TrainState) -> None:
    state.loss_scale = replace(state.loss_scale, value=state.loss_scale.value / 2)


NORM, MATRIX = "attention_norm.weight", "mlp.up.weight"


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("layout", "rank", "corrupt", "said"),
    [
        (["tp=2"], 1, weight("blocks.0", NORM), "blocks.0.attention_norm.weight over tp: rank 0 "),
        (
            ["tp=2"],
            0,
            weight("blocks.1", NORM, "exp_avg_sq"),
            "optimizer.exp_avg_sq.blocks.1.attention_norm.weight over tp: ",
        ),
        (
            ["dp=2"],
            1,
            weight("blocks.1", MATRIX, "exp_avg"),
            "optimizer.exp_avg.blocks.1.mlp.up.weight over dp: rank 0 ",
        ),
        (["pp=2"], 1, weight("embedding.tokens", "weight"), "embedding.tokens.weight over ends: rank 0 "),
        (["dp=2", "zero=1"], 1, parameters, "parameters (float32) blocks.0."),
        (["tp=2", "dp=2", "zero=3"], 2, replicated, "over tp: rank 2 "),
        (["dp=2", "model.hidden_size=20"], 1, alignment, "blocks.0, group "),
        (["dp=2"], 1, one_step_skipped, "skipped steps over world: rank 0 "),
        (["dp=2", "train.precision=bf16"], 1, parameters, "parameters (bfloat16) blocks.0."),
        (
            ["tp=2", "train.precision=bf16"],
            1,
            first_replicated_parameter,
            "parameters (bfloat16) blocks.0.attention_norm.weight over tp: rank 0 ",
        ),
        (
            ["pp=2", "train.precision=bf16"],
            1,
            partial(parameters, name="embedding.tokens"),
            "parameters (bfloat16) embedding.tokens.weight over ends: rank 0 ",
        ),
        (["pp=2", "train.precision=fp16"], 1, another_scale, "loss scale over world: rank 0 "),
    ],
)
def test_one_bit_on_one_rank_is_named(
    config: Path, tmp_path: Path, layout: list[str], rank: int, corrupt: Corrupt, said: str
) -> None:
    keys = [STOP, *(key if "." in key else f"parallel.{key}" for key in layout)]
    ranks = 4 if len(layout) == 3 else 2
    answers = start("train", config, *keys, num_ranks=ranks, first=corrupted(rank, corrupt)).answers()
    assert [answer.status for answer in answers] == [2] * ranks, answers
    assert len({answer.err for answer in answers}) == 1 and "Traceback" not in answers[0].err
    assert "Step 4: " in answers[0].err and said in answers[0].err, answers[0].err
    assert len(re.findall(" over [a-z]+: rank", answers[0].err)) == 1, "nothing else is named"
    assert "the last checkpoint stays" in answers[0].err
    assert saved_steps(tmp_path / "run") == [2] and metrics(tmp_path / "run")[-1]["step"] == 4


@pytest.mark.slow
def test_copies_are_compared_every_so_many_steps(config: Path, tmp_path: Path) -> None:
    """Between saves, and not more often."""
    arguments = [
        "parallel.tp=2",
        "checkpoint.every=0",
        "checkpoint.unequal_copies=stop",
        "checkpoint.compare_copies_every=2",
    ]
    first = corrupted(1, weight("blocks.0", NORM), step=3)
    answers = start("train", config, *arguments, num_ranks=2, first=first).answers()
    assert [answer.status for answer in answers] == [2, 2] and "Step 4: " in answers[0].err, answers
    assert saved_steps(tmp_path / "run") == []


def test_the_state_is_copied_to_memory_only_where_its_copies_are_equal(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(launch.MEMORY, str(tmp_path / "memory"))
    (tmp_path / "memory").mkdir()
    keys = ["parallel.dp=2", STOP, "checkpoint.every=0", "checkpoint.memory_every=1"]
    first = corrupted(1, weight("blocks.0", MATRIX), step=2)
    answers = start("train", config, *keys, num_ranks=2, first=first).answers()
    assert [answer.status for answer in answers] == [2, 2] and "Step 2: " in answers[0].err, answers
    assert newest_step(tmp_path / "memory") == 1


@pytest.mark.slow
def test_a_save_in_the_background_is_refused_as_well(config: Path, tmp_path: Path) -> None:
    first = corrupted(0, weight("blocks.1", MATRIX))
    answers = start(
        "train",
        config,
        "parallel.dp=2",
        "checkpoint.asynchronous=true",
        "checkpoint.unequal_copies=stop",
        num_ranks=2,
        first=first,
    ).answers()
    assert [answer.status for answer in answers] == [2, 2] and "blocks.1.mlp.up.weight over dp" in answers[0].err
    assert saved_steps(tmp_path / "run") == [2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    first_fast(
        [
            ["tp=2", "dp=2", "zero=2", "train.precision=bf16"],
            ["pp=2", "dp=2", "train.precision=bf16", "train.reduce_precision=16-bit"],
            ["pp=3", "tp=2", "sequence_parallel=true", "zero=1"],
            ["tp=2", "dp=2", "zero=3", "optim.name=lamb"],
        ]
    ),
)
def test_sound_copies_are_equal_to_the_bit(config: Path, tmp_path: Path, layout: list[str]) -> None:
    """On layouts with every kind of copy, after each of six steps."""
    keys = [key if "." in key else f"parallel.{key}" for key in layout]
    ranks = 6 if "pp=3" in layout else 4
    answers = start("train", config, *keys, "checkpoint.compare_copies_every=1", num_ranks=ranks).answers()
    assert [answer.status for answer in answers] == [0] * ranks, answers


# --- and repaired -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "dp", "then"),
    [
        ("mend", 2, "returns to"),
        ("return", 2, "returns to step 2"),
        ("mend", 4, "goes on with the majority's state"),
    ],
)
@pytest.mark.slow
def test_the_run_ends_as_if_nothing_had_been(config: Path, tmp_path: Path, policy: str, dp: int, then: str) -> None:
    keys = [f"parallel.dp={dp}", "train.micro_batch_size=1", f"checkpoint.unequal_copies={policy}"]
    keys += ["checkpoint.compare_copies_every=1", "train.evaluate_every=0"]
    expected, run = tmp_path / "expected", tmp_path / "run"
    assert forked("train", config, *keys, f"run.folder={expected}", num_ranks=dp).status == 0
    first = corrupted(1, once(weight("blocks.0", MATRIX)))
    answers = start("train", config, *keys, f"run.folder={run}", num_ranks=dp, first=first).answers()
    assert [answer.status for answer in answers] == [0] * dp, answers
    assert_same(run, expected)
    (told,) = [event for event in events(run) if event["event"] == "copies differ"]
    assert told["step"] == 4 and then in told["then"] and then in answers[0].out
    assert told["ranks"] == ([1] if dp == 4 else []) and any("blocks.0.mlp.up" in what for what in told["what"])


@pytest.mark.slow
def test_before_the_first_checkpoint_there_is_nothing_to_return_to(config: Path, tmp_path: Path) -> None:
    keys = ["parallel.dp=2", "checkpoint.compare_copies_every=1", "train.evaluate_every=0"]
    first = corrupted(1, weight("blocks.0", MATRIX), step=1)
    answers = start("train", config, *keys, num_ranks=2, first=first).answers()
    assert [answer.status for answer in answers] == [2, 2] and "not equal any more" in answers[0].err, answers
    assert not metrics(tmp_path / "run") or metrics(tmp_path / "run")[-1]["step"] == 1


@pytest.mark.slow
def test_a_rank_that_is_wrong_again_and_again_ends_it(config: Path, tmp_path: Path) -> None:
    keys = ["parallel.dp=2", "restarts.limit=2", "train.evaluate_every=0"]
    answers = start("train", config, *keys, num_ranks=2, first=corrupted(1, weight("blocks.0", MATRIX))).answers()
    assert [answer.status for answer in answers] == [2, 2] and "not equal any more" in answers[0].err
    assert [event["event"] for event in events(tmp_path / "run")].count("copies differ") == 2


@pytest.mark.slow
def test_an_evaluation_that_is_undone_ends_nothing(config: Path, tmp_path: Path) -> None:
    """That of step 3 is none the better, and there copies differ: the run returns to step 2, and goes on to its end."""
    differ = corrupted(1, once(weight("blocks.0", MATRIX)), step=3)

    def first(rank: int) -> None:
        differ(rank)
        since = [0, 1]  # before the first step, and at step 3
        loop.__dict__["evaluations_since_best"] = lambda run: since.pop(0) if since else 0

    keys = ["parallel.dp=2", "train.evaluate_every=3", "train.patience=1", "checkpoint.every=2"]
    answers = start("train", config, *keys, num_ranks=2, first=first).answers()
    assert [answer.status for answer in answers] == [0, 0] and "Finished 6 steps" in answers[0].out, answers
    told = [event["event"] for event in events(tmp_path / "run")]
    assert told.index("stopped early") < told.index("copies differ") < told.index("finished")


def test_a_save_under_way_is_waited_for_before_the_run_returns(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sound, and a restart would go on from it."""
    settings, returned = load(config), list[int]()
    folder = checkpoints(Path(settings.run.folder))
    monkeypatch.setattr(undo, "return_to_newest", lambda *_: returned.append(newest_step(folder)))
    (folder / "step_00000002").mkdir(parents=True)

    class Saving:
        def wait_out(self, state: Any) -> None:
            (folder / "step_00000004").mkdir()

    state = SimpleNamespace(step=5, base=None, ownership=SimpleNamespace(mesh=Mesh()))
    found, quiet = CopiesError("copies differ", [{"a over dp of 0,1": "x"}, {"a over dp of 0,1": "y"}]), _Quiet()
    repair = Repair(quiet)  # type: ignore[arg-type]
    assert repair(state, found, settings, None, Saving(), in_memory(settings))  # type: ignore[arg-type]
    assert returned == [4] and repair._tries == [4]


@pytest.mark.parametrize("policy", ["return", "mend"])
def test_repairs_are_counted_from_one_checkpoint(policy: str, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run that saves between rare faults is repaired each time; one that gets no further is not."""
    settings = load(config, ["restarts.limit=2", f"checkpoint.unequal_copies={policy}"])
    monkeypatch.setattr(repair_module, "_mend", lambda *_: True)
    folder = checkpoints(Path(settings.run.folder))
    monkeypatch.setattr(undo, "return_to_newest", lambda *_: None)
    saving = SimpleNamespace(wait_out=lambda state: None)
    state = SimpleNamespace(step=5, base=None, ownership=SimpleNamespace(mesh=Mesh()))
    found, repair = CopiesError("differ", [{"a over dp of 0,1,2": sum} for sum in "xxy"]), Repair(_Quiet())  # type: ignore[arg-type]
    for step in (2, 4, 6, 6):
        (folder / f"step_{step:08}").mkdir(parents=True, exist_ok=True)
        returned = repair(state, found, settings, None, saving, in_memory(settings))  # type: ignore[arg-type]
        assert returned is (policy == "return")
    with pytest.raises(CopiesError):
        repair(state, found, settings, None, saving, in_memory(settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_count_repairs_from_the_checkpoint_that_rank_0_sees(
    config: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Another may not see it yet, and would end where the others return."""
    settings, told = load(config), list[str]()
    (checkpoints(Path(settings.run.folder)) / "step_00000004").mkdir(parents=True)

    def broadcast_text(text: str, ranks: Axis) -> str:
        assert ranks is world
        told.append(text)
        return "2"

    world = Axis("world", 2, rank, (0, 1))
    monkeypatch.setattr(repair_module, "broadcast_text", broadcast_text)
    state: Any = SimpleNamespace(ownership=SimpleNamespace(mesh=SimpleNamespace(world=world)))
    assert repair_module._newest(state, settings) == 2
    assert rank > 0 or told == ["4"]


def test_before_the_run_returns_it_forgets_the_copies_in_memory(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart would go on from behind the checkpoint, and the lines of the steps that were undone be missing."""
    memory, run, returned = tmp_path / "memory", tmp_path / "run", list[int]()
    for folder in (memory / "step_00000005", run / "checkpoints" / "step_00000004"):
        folder.mkdir(parents=True)
    for file in (run / COPIES, memory / START):
        file.write_text("this start")
    monkeypatch.setenv(launch.MEMORY, str(memory))
    monkeypatch.setattr(undo, "return_to_newest", lambda *_: returned.append(newest_step(memory)))
    settings, state = load(config, ["checkpoint.memory_every=1"]), SimpleNamespace(step=6, base=None)
    state.ownership = SimpleNamespace(mesh=Mesh())
    saving = SimpleNamespace(wait_out=lambda state: None)
    found, repair = CopiesError("differ", [{"a over dp of 0,1": "x"}, {"a over dp of 0,1": "y"}]), Repair(_Quiet())  # type: ignore[arg-type]
    assert repair(state, found, settings, None, saving, in_memory(settings))  # type: ignore[arg-type]
    assert returned == [0]


@pytest.mark.slow
def test_a_run_that_has_returned_does_not_go_on_from_memory_behind_it(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies differ at step 6, the run returns to step 4 and is killed: in memory there is step 5, whose line of
    metrics.jsonl was undone.
    """
    memory, run, expected = tmp_path / "memory", tmp_path / "run", tmp_path / "expected"
    memory.mkdir()
    monkeypatch.setenv(launch.MEMORY, str(memory))
    keys = ["parallel.dp=2", "checkpoint.every=4", "train.steps=8", "train.evaluate_every=0"]
    assert forked("train", config, *keys, f"run.folder={expected}", num_ranks=2).status == 0
    differ = corrupted(1, weight("blocks.0", MATRIX), step=6)

    def first(rank: int) -> None:
        differ(rank)
        begin, begun = loop.train_step, list[int]()

        def or_end(state: TrainState, *args: Any, **kwargs: Any) -> Any:
            begun.append(state.step)
            if begun.count(4) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return begin(state, *args, **kwargs)

        loop.__dict__["train_step"] = or_end

    command = ("train", config, *keys, "checkpoint.memory_every=1", f"run.folder={run}")
    answers = start(*command, num_ranks=2, first=first).answers()
    assert -signal.SIGKILL in [answer.status for answer in answers], answers
    assert forked(*command, num_ranks=2).status == 0
    assert_same_end(run, expected)


def in_memory(config: Config) -> MemoryCopies:
    return MemoryCopies(config, Mesh(), _Quiet())  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["return", "mend"])
def test_what_differed_is_told_by_its_name_and_each_once(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Ranks 0 to 2 have copies of one shard, ranks 3 to 5 of the other: 2 and 5 stand against the others."""
    settings, told = load(config, [f"checkpoint.unequal_copies={policy}"]), Told()
    (checkpoints(Path(settings.run.folder)) / "step_00000002").mkdir(parents=True)
    state = SimpleNamespace(step=5, base=None, ownership=SimpleNamespace(mesh=Mesh()))
    monkeypatch.setattr(undo, "return_to_newest", lambda state, *_: setattr(state, "step", 2))
    mended = SimpleNamespace(mend_=lambda sound: None)
    saving = SimpleNamespace(wait_out=lambda state: None, copies=lambda state: mended, compare=lambda state: None)
    seen = [
        {f"w{number} over dp of {group}": value for number in range(9)}
        for group in ("0,1,2", "3,4,5")
        for value in ("a", "a", "b")
    ]
    repair = Repair(told)  # type: ignore[arg-type]
    found = CopiesError("differ", seen)
    returned = repair(state, found, settings, None, saving, in_memory(settings))  # type: ignore[arg-type]
    does = "returns to step 2" if policy == "return" else "goes on with the majority's state"
    assert returned is (policy == "return") and told.of("copies differ") == [
        {
            "step": 5,
            "ranks": [2, 5],
            "what": [f"w{number} over dp" for number in range(8)],
            "then": does,
            "reason": "ranks 2 and 5 against the majority",
        }
    ]
    assert told.said == [f"differ\nAt step 5: ranks 2 and 5 against the majority. The run {does}."]


def test_whose_copies_differ_is_told_also_where_the_run_cannot_return(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, told, damaged = load(config), Told(), DamagedError("The only checkpoint is damaged.")
    (checkpoints(Path(settings.run.folder)) / "step_00000002").mkdir(parents=True)

    def refuse(*_: object) -> None:
        raise damaged

    monkeypatch.setattr(undo, "return_to_newest", refuse)
    state: Any = SimpleNamespace(step=5, base=None, ownership=SimpleNamespace(mesh=Mesh()))
    saving, corpus = cast(Any, SimpleNamespace(wait_out=lambda state: None)), cast(Any, None)
    found = CopiesError("differ", [{"w over dp of 0,1,2": value} for value in "aab"])
    with pytest.raises(DamagedError) as raised:
        Repair(cast(Any, told))(state, found, settings, corpus, saving, in_memory(settings))
    why = "rank 2 against the majority"
    assert raised.value is damaged and told.of("copies differ") == [
        {"step": 5, "ranks": [2], "what": ["w over dp"], "then": "cannot return to step 2", "reason": why}
    ]
    assert told.said == [f"differ\nAt step 5: {why}. The run cannot return to step 2."]


@pytest.mark.parametrize(
    ("policy", "seen", "differs_again", "done"),
    [
        ("return", "aab", False, ["return"]),
        ("mend", "aab", False, ["mend {'w over dp of 0,1,2': 0}", "compare"]),
        ("mend", "aab", True, ["mend {'w over dp of 0,1,2': 0}", "compare", "return"]),
        ("mend", "abc", False, ["return"]),
        ("stop", "aab", False, []),
    ],
)
def test_copies_are_mended_where_that_is_wanted_and_can_be(
    config: Path, monkeypatch: pytest.MonkeyPatch, policy: str, seen: str, differs_again: bool, done: list[str]
) -> None:
    """What still differs behind it, and what no majority has alike, sends the run back."""
    settings, does = load(config, [f"checkpoint.unequal_copies={policy}"]), list[str]()
    (checkpoints(Path(settings.run.folder)) / "step_00000002").mkdir(parents=True)
    found = CopiesError("differ", [{"w over dp of 0,1,2": value} for value in seen])

    def compare(state: Any) -> None:
        does.append("compare")
        if differs_again:
            raise found

    monkeypatch.setattr(undo, "return_to_newest", lambda *_: does.append("return"))
    mended = SimpleNamespace(mend_=lambda sound: does.append(f"mend {sound}"))
    saving: Any = SimpleNamespace(wait_out=lambda state: None, copies=lambda state: mended, compare=compare)
    state: Any = SimpleNamespace(step=5, base=None, ownership=SimpleNamespace(mesh=Mesh()))
    corpus, repair = cast(Any, None), Repair(cast(Any, Told()))
    if policy == "stop":
        with pytest.raises(CopiesError):
            repair(state, found, settings, corpus, saving, in_memory(settings))
    else:
        assert repair(state, found, settings, corpus, saving, in_memory(settings)) is ("return" in done)
    assert does == done


class _Quiet:
    """A monitor that says nothing."""

    def say(self, text: str) -> None: ...

    def event(self, kind: str, **details: Any) -> None: ...


def once(corrupt: Corrupt) -> Corrupt:
    done: list[int] = []

    def first_time(state: TrainState) -> None:
        if not done:
            done.append(1)
            corrupt(state)

    return first_time


def test_a_majority_is_needed_to_name_a_rank() -> None:
    def seen(*values: str) -> list[dict[str, str]]:
        return [{"w over dp of 0,1,2": value} if value else {} for value in values]

    assert verdict(seen("a", "b", "a")) == Verdict({"w over dp of 0,1,2": 0}, (1,), False)
    assert verdict(seen("a", "b", "c")) == Verdict({}, (), True)
    assert verdict([{"w over dp of 0,1": "a"}, {"w over dp of 0,1": "b"}]).undecided
    assert verdict([{"step over world of 0,1,2": value} for value in "aba"]).undecided


# --- the comparison ---------------------------------------------------------------------------------------------------

ROWS = ([1, -(1 << 63), 5, 0], [1, (1 << 63) - 1, 5, 0], [1, 0, 6, 0])


def _where(rank: int, num_ranks: int) -> list[bool] | None:
    axis = build_mesh(Layout(dp=num_ranks), rank).dp
    unequal = where_unequal(lambda: torch.tensor(ROWS[rank]), axis)
    return None if unequal is None else unequal.tolist()


def test_where_integers_differ() -> None:
    """At the ends of the range, too."""
    assert run_on_ranks(_where, 3) == [[False, True, True, False]] * 3


def test_one_rank_alone_computes_nothing() -> None:
    assert where_unequal(lambda: pytest.fail("made"), build_mesh(Layout(), 0).dp) is None
