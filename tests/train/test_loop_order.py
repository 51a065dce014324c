"""In which order a run steps, evaluates, saves and asks its ranks, and what a step writes down: its parts stand in."""

import math
import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from colonnade.config.schema import DivergenceConfig
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.train import loop
from colonnade.train.divergence import Diverged, Divergence, LossWatch
from colonnade.train.held_out import Evaluation
from colonnade.train.interrupt import Interrupt, Request
from colonnade.train.step import StepResult
from tests.distributed import run_on_ranks
from tests.told import Told


class Standing:
    """A run whose parts write down what is asked of them, in place of one that trains."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, steps: int = 3, every: int = 0, compared: int = 0) -> None:
        self.done = list[str]()
        self.told = Told()
        self.asked: dict[int, Request] = {}
        self.news, self.copied, self.longer, self.over = set[int](), set[int](), set[int](), set[int]()
        """Steps behind which there are changes to read, a copy to make, a change that prolongs, or another config."""
        self.diverges = self.enough = self.differs = 0
        """Once in this step; at the evaluation of this one; once behind this one, so that its copies go back by one."""
        self.saved = set[int]()
        self.losses = {"loss": 2.0}
        """Of each step; none where no label counts."""
        self.state: Any = SimpleNamespace(step=0, rollbacks=[])
        for name in ("_step", "_kept", "_is_enough", "_evaluate_at_start"):
            monkeypatch.setattr(loop, name, getattr(self, name))
        monkeypatch.setattr(loop, "is_saved", lambda config, step, world: step in self.saved)
        monkeypatch.setattr(loop, "roll_back", self._roll_back)
        at, does = self.state, self.done.append
        train = SimpleNamespace(steps=steps, evaluate_at_start=False)
        saving = SimpleNamespace(every=every, compare_copies_every=compared)
        self.run: Any = SimpleNamespace(
            config=SimpleNamespace(checkpoint=saving, train=train),
            mesh=SimpleNamespace(
                rank=0, world=Mesh().world, ledger=SimpleNamespace(begin_step=lambda step: does(f"count {step}"))
            ),
            corpus=None,
            monitor=self.told,
            in_force=SimpleNamespace(
                is_over=lambda state: state.step in self.over,
                prolongs=lambda state: state.step in self.longer,
                has_news=lambda: at.step in self.news,
                read=lambda step, returns: does(f"read {step}{' behind a return' * len(returns)}"),
            ),
            checkpoints=SimpleNamespace(
                has_failed=False, is_due=False, wait=lambda: does("wait"), payload=lambda state: "payload"
            ),
            slow_ranks=SimpleNamespace(largest=lambda number, step: number),
            profile=SimpleNamespace(finish=lambda step, ends: does(f"profile {step}{' ends' * bool(ends)}")),
            copies=SimpleNamespace(
                are_due=lambda step: step in self.copied,
                save=lambda state, payload: does(f"copy {state.step} {payload}"),
                say_recovered=lambda step: does(f"recovered {step}"),
            ),
            uploads=SimpleNamespace(wake=lambda *, refresh=False: does(f"wake {refresh}")),
        )

    def _step(self, run: Any, state: Any) -> dict[str, float]:
        if state.step + 1 == self.diverges:
            self.diverges = 0
            raise Diverged(Divergence(state.step + 1, state.step + 1, "it rose"))
        state.step += 1
        return self.losses | ({loop.LOSS: 1.0} if state.step == self.enough else {})

    def _kept(self, run: Any, state: Any, *, saves: bool, must: bool, repair: Any) -> bool:
        self.done.append(f"{'save' if saves else 'compare'} {state.step}{' must' * bool(must)}")
        if state.step == self.differs:
            self.differs = self.enough = 0
            state.step -= 1
            return False
        self.saved |= {state.step} if saves else set()
        return True

    def _is_enough(self, run: Any) -> bool:
        return bool(self.enough) and self.state.step == self.enough

    def _evaluate_at_start(self, run: Any, state: Any) -> None:
        self.done.append("evaluate")

    def _roll_back(self, found: Any, state: Any, *_: Any, **more: Any) -> None:
        self.done.append(f"back from {found.step}")
        state.step = 0

    def train(self, asked: Any = None) -> bool:
        mine = SimpleNamespace(
            newest=lambda: self.asked.get(self.state.step, Request.NOTHING), reason=" (why)", exit_code=99
        )
        return loop._train(self.run, self.state, asked or mine, SimpleNamespace())  # type: ignore[arg-type]

    def of(self, *kinds: str) -> list[str]:
        """What was done of these kinds, in order."""
        return [each for each in self.done if each.split()[0] in kinds]


def test_a_run_saves_as_often_as_it_is_to_and_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Standing(monkeypatch, steps=5, every=2)
    assert not run.train()
    assert run.of("save", "compare") == ["save 2", "save 4", "save 5 must"]
    assert run.of("count") == [f"count {step}" for step in range(1, 6)], "what is sent belongs to the step under way"
    assert run.of("profile") == [*(f"profile {step}" for step in range(1, 5)), "profile 5 ends"]
    assert run.of("recovered", "read", "copy", "wake", "evaluate") == [f"recovered {step}" for step in range(1, 6)]
    run = Standing(monkeypatch, steps=2)
    assert not run.train() and run.of("save", "compare") == ["save 2 must"], "0: at the end alone"


def test_a_run_saves_when_it_is_asked_to_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Standing(monkeypatch)
    run.asked, run.news = {2: Request.SAVE}, {1, 2, 3}
    assert not run.train()
    assert run.of("save", "read") == ["read 1", "read 2", "save 2", "read 3", "save 3 must"]


@pytest.mark.parametrize("again", ["has_failed", "is_due"])
def test_a_save_that_has_failed_is_tried_behind_the_next_step(monkeypatch: pytest.MonkeyPatch, again: str) -> None:
    run = Standing(monkeypatch, steps=2)
    setattr(run.run.checkpoints, again, True)
    assert not run.train() and run.of("save") == ["save 1", "save 2 must"]
    if again == "is_due":
        run = Standing(monkeypatch, steps=2)
        run.run.checkpoints.is_due, run.run.mesh.rank = True, 1
        assert not run.train() and run.of("save") == ["save 2 must"], "rank 0's clock decides"


@pytest.mark.parametrize("losses", [{"loss": 2.0}, {}], ids=["labels", "no label counts"])
def test_a_run_that_is_to_stop_saves_and_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, losses: dict[str, float]
) -> None:
    run = Standing(monkeypatch)
    run.asked, run.news, run.losses = {2: Request.STOP}, {2}, losses
    with pytest.raises(SystemExit) as ended:
        run.train()
    assert ended.value.code == 99 and run.done[-4:] == ["profile 2 ends", "save 2 must", "recovered 2", "wait"]
    assert not run.of("read"), "whoever starts it again reads them"
    assert run.told.events == [("interrupted", {"step": 2, "loss": losses.get("loss")})]
    assert run.told.said[-1].startswith("Stopped after step 2 (why); everything is saved.")


@pytest.mark.parametrize(
    ("leaves", "signals", "status"),
    [(True, {}, 99), (True, {1: signal.SIGTERM}, 99), (False, {1: signal.SIGTERM}, 143), (False, {0: 2, 1: 15}, 143)],
)
def test_all_ranks_of_a_run_that_stops_end_with_one_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, leaves: bool, signals: dict[int, int], status: int
) -> None:
    """Though rank 0 alone sees the file `leave`, and a signal reaches some: a launcher on several machines takes a rank
    that ends with 0 for one that has finished.
    """
    run = Standing(monkeypatch)
    if leaves:
        (tmp_path / "leave").touch()

    def statuses(rank: int, num_ranks: int) -> object:
        run.run.mesh.world = world = build_mesh(Layout(dp=2), rank).world
        run.run.slow_ranks.largest = lambda number, step: int(all_reduce(torch.tensor(number), world, "max"))
        with Interrupt(tmp_path if rank == 0 else None) as interrupt, pytest.raises(SystemExit) as ended:
            if rank in signals:
                os.kill(os.getpid(), signals[rank])
            run.train(interrupt)
        return ended.value.code

    assert run_on_ranks(statuses, 2) == [status, status]


def test_a_run_that_is_to_stop_after_its_last_step_has_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Standing(monkeypatch)
    run.asked = {3: Request.STOP}
    assert not run.train() and run.told.events == [] and run.of("save") == ["save 3 must"]


def test_copies_are_compared_where_nothing_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save compares them itself, and a copy in memory is of state whose copies are equal."""
    run = Standing(monkeypatch, steps=6, every=4, compared=2)
    run.copied = {3, 4}
    assert not run.train()
    assert run.of("save", "compare", "copy") == [
        "compare 2",
        "compare 3",
        "copy 3 payload",
        "save 4",
        "save 6 must",
    ]


def test_a_run_that_becomes_longer_goes_on_behind_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the configuration that is in force from there on."""
    run = Standing(monkeypatch, steps=2)
    run.longer, run.over = {2}, {2}
    assert run.train(), "another configuration is in force"
    assert run.state.step == 2 and run.of("save", "profile") == ["profile 1", "profile 2", "save 2 must"]


def test_evaluations_that_are_enough_end_a_run_with_all_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was asked for meanwhile."""
    run = Standing(monkeypatch, steps=6)
    run.enough, run.news, run.longer = 2, {1, 2}, {2}
    assert not run.train() and run.state.step == 2
    assert run.of("profile", "save", "read") == ["read 1", "profile 1", "profile 2 ends", "save 2 must"]
    run = Standing(monkeypatch, steps=6)
    run.enough, run.asked = 2, {2: Request.STOP}
    assert not run.train() and run.told.events == [], "it has finished, and is not to be gone on with"
    assert not run.train() and run.state.step == 2, "nor does it go on where it is started again"


def test_evaluations_that_a_change_makes_enough_end_a_run_with_all_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less patience behind a step that was not saved; and where its copies differ, the run goes on from before it."""
    run = Standing(monkeypatch, steps=6)
    run.state.step = run.enough = 3
    assert not run.train() and not run.train() and run.state.step == 3
    assert run.done == ["save 3 must"], "once"
    run = Standing(monkeypatch, steps=4)
    run.state.step = run.enough = run.differs = 3
    assert not run.train() and run.of("count", "save") == ["save 3 must", "count 3", "count 4", "save 4 must"]


def test_a_change_that_is_due_comes_before_what_evaluations_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may raise the patience, and then the run goes on, as one does that was stopped there and started again."""
    run = Standing(monkeypatch, steps=6)
    run.enough, run.over = 2, {2}
    assert run.train(), "another configuration is in force"
    assert run.state.step == 2 and run.of("profile", "save") == ["profile 1", "profile 2"]


def test_an_evaluation_that_is_undone_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of its step differ, and the state is the one before it again."""
    run = Standing(monkeypatch, steps=4)
    run.enough = run.differs = 3
    assert not run.train()
    assert run.of("count", "save") == [
        *("count 1", "count 2", "count 3", "save 3 must"),
        *("count 3", "count 4", "save 4 must"),
    ]


def test_a_step_that_diverges_is_taken_again_behind_the_return(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was uploaded of the steps in between is not the run's any more."""
    run = Standing(monkeypatch, steps=2)
    run.diverges = 2
    assert not run.train()
    assert run.of("count", "back", "wake") == ["count 1", "count 2", "back from 2", "wake True", "count 1", "count 2"]


@pytest.mark.parametrize(("at", "asked", "evaluates"), [(0, True, True), (0, False, False), (1, True, False)])
def test_only_where_a_run_starts_from_is_evaluated_before_a_step(
    monkeypatch: pytest.MonkeyPatch, at: int, asked: bool, evaluates: bool
) -> None:
    run = Standing(monkeypatch, steps=2)
    run.state.step, run.run.config.train.evaluate_at_start = at, asked
    assert not run.train()
    assert run.done[0] == ("evaluate" if evaluates else f"count {at + 1}") and run.told.said == []


def test_a_run_that_is_at_its_end_says_how_to_train_on(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Standing(monkeypatch)
    run.state.step = 3
    assert not run.train() and run.done == []
    assert run.told.said == ["Nothing is left to do: train.steps = 3. To train on, raise it."]


@pytest.mark.parametrize("rank", [0, 1])
def test_each_configuration_that_comes_into_force_reaches_all_that_is_about_the_steps(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """From the first step on, with what was asked for while the run was away; a save that failed in the background is
    made up for. Rank 0 alone looks for a file that stops the run, and uploads.
    """
    done, given = list[str](), dict[str, Any]()

    def configured(number: int) -> Any:
        saving = SimpleNamespace(retry_for=number, asynchronous=False)
        folder = SimpleNamespace(folder="run", time_limit=9.0)
        return SimpleNamespace(checkpoint=saving, run=folder, train=SimpleNamespace(micro_batch_size=2))

    coming = [configured(number) for number in (2, 3)]
    retries, uploads = SimpleNamespace(), cast(Any, nullcontext())
    uploads.follow = lambda kept: done.append(f"upload as {kept.retry_for}")
    in_force: Any = SimpleNamespace(read=lambda step, returns: done.append(f"read {step} behind {returns}"))
    corpus = SimpleNamespace(batches=list)
    in_force.follow = lambda state: (coming.pop(0), corpus)
    checkpoints = SimpleNamespace(settle=lambda state: done.append("settle"))

    def train(run: Any, *_: Any) -> bool:
        done.append(f"train by {run.config.checkpoint.retry_for}, {retries.limit}")
        return bool(coming)

    for name, part in (("as_it_began", lambda config, changes: config), ("InForce", lambda *_: in_force)):
        monkeypatch.setattr(loop, name, part)
    for name in ("Repair", "SlowRanks", "pays"):
        monkeypatch.setattr(loop, name, lambda *_: None)
    monkeypatch.setattr(loop, "SaveRetries", lambda limit: retries)
    monkeypatch.setattr(loop, "Interrupt", lambda folder, *_: given.update(folder=folder) or nullcontext())
    monkeypatch.setattr(loop, "uploads_of", lambda *_, active: given.update(active=active) or uploads)
    monkeypatch.setattr(loop.recovery, "saving", lambda *_, **more: nullcontext(checkpoints))
    monkeypatch.setattr(loop, "ReadAhead", lambda read, active: nullcontext())
    monkeypatch.setattr(loop, "_train", train)
    monkeypatch.setattr(loop, "_finish", lambda config, *_: done.append(f"finish {config.checkpoint.retry_for}"))
    state, mesh = SimpleNamespace(step=5, changes=[], rollbacks=["a return"]), SimpleNamespace(rank=rank, data=None)
    copies = SimpleNamespace(begin=lambda state: done.append(f"copy from {state.step}"))
    rest: Any = dict.fromkeys(("device", "corpus", "monitor", "profile", "products"))  # what others are only handed
    loop._to_its_end(configured(1), mesh=mesh, state=state, copies=copies, **rest)  # type: ignore[arg-type]
    each = [[f"upload as {number}", f"train by {number}, {number}", "settle"] for number in (2, 3)]
    assert done == ["read 5 behind ['a return']", "copy from 5", *each[0], *each[1], "finish 3"]
    assert given == {"folder": Path("run") if rank == 0 else None, "active": rank == 0}
    told = rest["monitor"] = Told()
    with pytest.raises(IndexError):  # no configuration is left to come
        loop._to_its_end(configured(1), mesh=mesh, state=state, copies=copies, **rest)  # type: ignore[arg-type]
    assert [kind for kind, _ in told.events] == ["no restart"], "an error ends a run of one rank in its record too"


# --- what a step writes down ------------------------------------------------------------------------------------------


class _State(SimpleNamespace):
    @property
    def trained_on(self) -> int:
        samples: int = self.samples
        return samples - 4


class Stepped:
    """One step of a run whose parts write down what they are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, every: int = 0, **found: Any) -> None:
        result = StepResult(2.5, 1.0, 0.1, (2.5,), (8,), 1.0, skipped=False)
        self.result = replace(result, **found)
        self.taken: list[tuple[int, int | None]] = []
        self.wrote: list[tuple[str, Any]] = []
        write: Any = self.wrote.append
        self.evaluation: Any = None
        monkeypatch.setattr(loop, "train_step", self._train_step)
        monkeypatch.setattr(loop, "_evaluate", lambda run, state: write(("evaluate", None)) or self.evaluation)
        ledger = SimpleNamespace(part=lambda name: nullcontext())
        config = SimpleNamespace(
            train=SimpleNamespace(steps=5, evaluation_interval=every),
            model=SimpleNamespace(sequences=2),
            divergence=DivergenceConfig(),
            run=SimpleNamespace(heartbeat="beat.json"),
        )
        monitor = SimpleNamespace(
            beat=lambda step, path: write(("beat", (step, path))),
            thermometers=lambda found, summary: write(("thermometers", (found, summary))),
            step=lambda metrics, seconds, tokens: write(("step", {**metrics, "of this step": tokens})),
            say=lambda text: write(("say", text)),
        )
        self.run: Any = SimpleNamespace(
            config=config,
            device="cpu",
            corpus=SimpleNamespace(curriculum=SimpleNamespace(next=lambda at: at + 8, unit=16)),
            mesh=SimpleNamespace(ledger=ledger),
            monitor=monitor,
            profile=SimpleNamespace(step=lambda state: nullcontext()),
            slow_ranks=SimpleNamespace(step=nullcontext),
            data=SimpleNamespace(take=lambda at, then: self.taken.append((at, then)) or []),
            checkpoints=SimpleNamespace(copied=lambda: write(("copied", None))),
        )
        self.state: Any = _State(
            step=3,
            samples=24,
            skipped=3,
            watch=LossWatch(),
            loss_scale=SimpleNamespace(is_dynamic=False),
            model=SimpleNamespace(architecture=SimpleNamespace(losses=("loss",))),
        )

    def _train_step(self, state: Any, *_: Any, before_update: Any) -> StepResult:
        before_update()
        state.step += 1
        return self.result

    def __call__(self) -> dict[str, float | int]:
        return loop._step(self.run, self.state)

    def of(self, kind: str) -> list[Any]:
        return [content for each, content in self.wrote if each == kind]


def test_a_step_writes_down_its_numbers_and_the_tokens_up_to_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of samples with two sequences each, without those that rollbacks have passed over."""
    step = Stepped(monkeypatch)
    found = step()
    assert found == {"step": 4, "loss": 2.5, "learning_rate": 0.1, "grad_norm": 1.0, "tokens": 28 * 16 * 2}
    assert step.of("step") == [found | {"of this step": 8 * 16 * 2}] and step.state.samples == 32
    assert step.of("beat") == [(4, "beat.json")] and not step.of("thermometers")
    assert len(step.of("copied")) == 1, "what is being saved is copied before the weights change"


def test_a_loss_in_which_nothing_counts_is_not_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Stepped(monkeypatch, loss=None, losses=(None, 0.5), counts=(0, 8))
    step.state.model.architecture.losses = ("masked", "order")
    found = step()
    assert found == {"step": 4, "order_loss": 0.5, "learning_rate": 0.1, "grad_norm": 1.0, "tokens": 28 * 16 * 2}
    assert step.state.watch == LossWatch()


def test_only_what_a_later_step_takes_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Stepped(monkeypatch)
    step(), step()
    assert step.taken == [(24, 32), (32, None)], "step 5 is the last"


def test_a_step_that_was_left_out_has_no_norm_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Stepped(monkeypatch, grad_norm=math.inf, skipped=True, loss_scale=1024.0)
    step.state.loss_scale.is_dynamic = True
    numbers = {"step": 4, "loss": 2.5, "learning_rate": 0.1, "tokens": 28 * 16 * 2}
    assert step() == numbers | {"loss_scale": 1024.0, "skipped_steps": 3}


@pytest.mark.parametrize(("every", "evaluated"), [(0, [False] * 2), (4, [True, True]), (3, [False, True])])
def test_a_step_is_evaluated_in_turn_and_at_the_end(
    monkeypatch: pytest.MonkeyPatch, every: int, evaluated: list[bool]
) -> None:
    step = Stepped(monkeypatch, every=every)
    summary = SimpleNamespace(summary=lambda: "loss 1.5")
    step.evaluation = SimpleNamespace(
        found=summary,
        each=dict.fromkeys("abcdefghijklmnopq"),
        of_each=lambda most: [f"at most {most}"],
        numbers=lambda: {"loss": 1},
    )
    found = [step(), step()]
    assert [each.get("validation_loss") for each in found] == [1 if told else None for told in evaluated]
    said = [
        f"  validation at step {n}: loss 1.5\n    at most 16\n    and 1 more data set: metrics.jsonl has all"
        for n, told in zip((4, 5), evaluated, strict=True)
        if told
    ]
    assert step.of("say") == said
    assert "say" not in (kind for kind, _ in step.wrote[:4]), "behind the line of the step"


def test_what_the_thermometers_of_a_step_show_is_written_down(monkeypatch: pytest.MonkeyPatch) -> None:
    reading = SimpleNamespace(
        to_json=lambda: {"step": 4}, summary=lambda: "all is well", step=4, largest=lambda *_: None
    )
    step = Stepped(monkeypatch, reading=reading)
    monkeypatch.setattr(loop, "_check_not_diverged", lambda *_: None)
    step()
    assert step.of("thermometers") == [({"step": 4}, "all is well")]


def test_an_evaluation_is_of_as_many_samples_as_set_and_of_the_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    calls = list[str]()

    def evaluate_part(model: str, part: str, *_: Any, **more: Any) -> Evaluation:
        calls.append("evaluate")
        given.update(more, part=part)
        return Evaluation(SimpleNamespace())  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "evaluate_part", evaluate_part)
    score = SimpleNamespace(score=lambda model, mesh, hidden, *, batch_size: (hidden, batch_size))
    corpus = SimpleNamespace(datasets=SimpleNamespace(validation="held out"), questions=None)
    run: Any = SimpleNamespace(
        corpus=corpus,
        mesh=None,
        config=SimpleNamespace(train=SimpleNamespace(evaluate_samples=7, micro_batch_size=2)),
        data=SimpleNamespace(settle=lambda: calls.append("settle")),
    )
    inference = SimpleNamespace(hidden="states", close=lambda: calls.append("close"))
    state: Any = SimpleNamespace(model="model", inference=inference)
    found = loop._evaluate(run, state)
    assert found is not None and found.questions is None
    assert given == {"part": "held out", "hidden": "states", "samples": 7, "micro_batch_size": 2}
    assert calls == ["settle", "evaluate", "close"]
    corpus.questions = score
    found = loop._evaluate(run, state)
    assert found is not None and found.questions == ("states", 2)
    corpus.datasets.validation = None
    assert loop._evaluate(run, state) is None and len(calls) == 6


def test_where_a_run_starts_from_is_told_as_step_0(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, told = list[int](), Told()
    run: Any = SimpleNamespace(mesh=SimpleNamespace(ledger=SimpleNamespace(begin_step=begun.append)), monitor=told)
    found = SimpleNamespace(
        found=SimpleNamespace(summary=lambda: "loss 5.6"),
        each=dict.fromkeys(map(str, range(1216))),
        of_each=lambda most: [f"at most {most}"],
        numbers=lambda: {"loss": 5.6},
    )
    for each in (None, found):
        monkeypatch.setattr(loop, "_evaluate", lambda run, state, each=each: each)
        loop._evaluate_at_start(run, SimpleNamespace())  # type: ignore[arg-type]
    assert begun == [0, 0] and told.events == [("evaluated", {"step": 0, "validation_loss": 5.6})]
    lines = ["  validation before step 1: loss 5.6", "at most 16", "and 1,200 more data sets: events.jsonl has all"]
    assert told.said == ["\n    ".join(lines)]
