"""Histories of runs, drawn: changes of keys, rollbacks, restarts on other layouts in any order, with faults between.

A history is a list of sittings. What each asks for (keys that change, a rollback, other frozen weights) belongs to the
run; on how many ranks, cut how, saved how, and what happens to it (a killed rank, a damaged or lost checkpoint, a
flipped bit) does not. So the same sittings on one rank, left alone, must end in the same numbers, in float64. Where
batches grow, behind rollbacks too, each step's batch and learning rate are counted from what was asked for besides.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from colonnade.checkpoint.manifest import read_manifest
from colonnade.checkpoint.names import checkpoints_in
from colonnade.train.divergence import lowered
from colonnade.train.metadata import config_of, metadata_of
from colonnade.train.state import learning_rate_of
from tests import tiny
from tests.commands import Answer, here, start
from tests.drills.faults import flip_a_bit, flipped
from tests.drills.runs import TIME_LIMIT, TIMEOUT, Place, said
from tests.examples import pairs
from tests.runs import assert_near, events, metrics

STEPS = 10
DECAY_TOKENS = 480
BY_TOKENS = f"optim.decay_tokens={DECAY_TOKENS}"
BATCH = "train.global_batch_size"
ADAPTERS, PREFERENCES = "adapters", "preferences"
BESIDE = "adapters beside a base"
COPIES = ("parallel.dp=2",)
"""Where a flipped bit is noticed; it needs a checkpoint to return to."""
LAYOUTS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (1, ()),
    (1, ("parallel.recompute=full",)),
    (2, ("parallel.tp=2",)),
    (2, ("parallel.tp=2", "parallel.sequence_parallel=true")),
    (2, ("parallel.pp=2",)),
    (2, ("parallel.pp=2", "parallel.schedule=zero_bubble")),
    *[(2, COPIES)] * 3,
    (2, ("parallel.dp=2", "parallel.zero=1")),
    (2, ("parallel.dp=2", "parallel.zero=2")),
    (2, ("parallel.dp=2", "parallel.zero=3")),
    (4, ("parallel.tp=2", "parallel.dp=2", "parallel.zero=1")),
    (4, ("parallel.pp=2", "parallel.dp=2")),
)
"""Ranks, and how they share the model."""
KINDS: dict[str, tuple[str, ...]] = {
    "GPT": (),
    "GPT, curriculum": (
        "curriculum.tokens=[0,96]",
        "curriculum.seq_length=[8,16]",
        "curriculum.global_batch_size=[8,4]",
    ),
    "GPT, LAMB, separate documents": ("optim.name=lamb", "data.documents=separate"),
    "LLaMA": (
        "model.position=rotary",
        "model.norm=rmsnorm",
        "model.activation=swiglu",
        "model.bias=false",
        "model.tie_embeddings=false",
    ),
    ADAPTERS: ("lora.rank=2", "lora.dropout=0.1"),
    PREFERENCES: (),
}
FROZEN: tuple[tuple[str, ...], ...] = ((), (), ("blocks.0.*",), ("embedding.*", "blocks.1.mlp*"), ("head.*", "*norm*"))
CHANGED: dict[str, tuple[object, ...]] = {
    "optim.learning_rate": (5e-3, 2e-3),
    "optim.weight_decay": (0.0, 0.3),
    "optim.decay": ("linear", "constant"),
    "train.gradient_clip": (0.0, 0.5),
    BATCH: (8,),
    "train.evaluate_every": (0, 1, 2),
    "train.evaluate_samples": (2, 6),
    "checkpoint.every": (1, 2),
}
"""Keys that a run takes while it goes on, and values for them."""
FIXED = {"GPT, curriculum": {BATCH}}
"""Those that a kind does not take."""
BATCHES = (4, 6, 10, 12)
"""Where they grow: not all are multiples of each other."""


@dataclass(frozen=True)
class Sitting:
    """From one start of a run to its end at step `until`."""

    until: int
    since: int = 0
    """Where the one before began."""
    num_ranks: int = 1
    layout: tuple[str, ...] = ()
    fault: str = ""
    frozen: tuple[str, ...] = ()
    changes: tuple[tuple[int, str, object], ...] = ()
    """(behind which step, key, value), handed in before it starts."""
    rollback: tuple[str, ...] = ()
    """What `colonnade rollback` is told before it starts."""
    decay: str = f"optim.decay_steps={STEPS}"

    def __str__(self) -> str:
        ways = f"to {self.until} on {self.num_ranks} ({' '.join(self.layout)})"
        asked = [
            *(f"{key}={value} at {at}" for at, key, value in self.changes),
            "rollback " * bool(self.rollback) + " ".join(self.rollback),
        ]
        frozen = f"frozen {','.join(self.frozen)}" if self.frozen else ""
        return ", ".join(filter(None, [ways, frozen, *asked, self.fault]))

    def alone(self) -> Sitting:
        """On one rank, and left alone."""
        return replace(self, num_ranks=1, layout=(), fault="")


def drawn(seed: int) -> tuple[str, list[Sitting]]:
    """A kind of model, and a history of it. In some the batch changes often, also behind rollbacks that pass over a few
    of them, and the learning rate decays by tokens.
    """
    draws, own = Random(f"history {seed}"), Random(f"growing {seed}")
    kind = draws.choice(list(KINDS))
    growing = own.random() < 0.5 and kind not in (*FIXED, PREFERENCES)
    ends = sorted({*draws.sample(range(2, STEPS), draws.randint(1, 3)), STEPS})
    frozen: tuple[str, ...] = ()
    found: list[Sitting] = []
    since = step = 0
    for end in ends:
        num_ranks, layout = draws.choice(LAYOUTS)
        micro = draws.choice((1, 2)) if num_ranks < 4 else 1
        ways = [f"train.micro_batch_size={1 if growing else micro}"]
        ways.append(f"checkpoint.asynchronous={draws.choice(('true', 'false'))}")
        changed = kind != ADAPTERS and draws.random() < 0.6
        frozen = draws.choice(FROZEN) if changed else frozen
        rollback = _rollback(draws, step) if found and draws.random() < 0.25 else ()
        if growing and found and own.random() < 0.7:
            rollback = (str(own.randint(1, step - 1)), "--skip", str(own.randint(1, 3)))
        keys = draws.sample(sorted(CHANGED.keys() - FIXED.get(kind, set())), draws.choice((0, 0, 1, 2)))
        behind = int(rollback[0]) if rollback else step
        changes = [(_behind(draws, behind, end), key, draws.choice(CHANGED[key])) for key in keys if end > behind]
        if growing:
            changes = [each for each in changes if each[1] not in (BATCH, "checkpoint.every")]
            changes += [(own.randint(behind, end - 1), BATCH, own.choice(BATCHES)) for _ in range(2) if end > behind]
        goes_on = bool(found) and found[-1].frozen == frozen and not rollback
        fault = draws.choice(("", "", "killed", *(("damaged", "deleted") if goes_on else ("killed",))))
        if goes_on and [each.frozen for each in found[-2:-1]] not in ([], [frozen]) and draws.random() < 0.7:
            fault = "damaged"  # it returns to where other weights were trained
        if found and end > step + 1 and layout == COPIES and draws.random() < 0.7:
            fault = "flipped"
        sitting = Sitting(end, since, num_ranks, (*layout, *ways), fault, frozen, tuple(sorted(changes)), rollback)
        found.append(replace(sitting, decay=BY_TOKENS) if growing else sitting)
        since, step = behind, end
    return BESIDE if kind == ADAPTERS and draws.random() < 0.5 else kind, found


def _rollback(draws: Random, step: int) -> tuple[str, ...]:
    options = draws.choice(((), ("--skip", "2"), ("--rate-factor", "0.5", "--rate-steps", "3"), ("--rewarm", "2")))
    return (str(draws.randint(1, step - 1)), *options)


def _behind(draws: Random, step: int, end: int) -> int:
    """Any step of a sitting, and often the one to which a flipped bit lets it return."""
    return max(step, end - 2) if draws.random() < 0.5 else draws.randint(step, end - 1)


def history_drill(place: Place, *, seed: int) -> dict[str, Any]:
    """A history with its faults, and left alone on one rank."""
    kind, sittings = drawn(seed)
    run, alone = (place.folder / f"history_{seed}" / name / "run" for name in ("disturbed", "alone"))
    shutil.rmtree(run.parents[1], ignore_errors=True)
    problems: list[str] = []
    for number, sitting in enumerate(sittings, 1):
        for folder, one in ((alone, sitting.alone()), (run, sitting)):
            problems += [f"sitting {number} of {folder.parent.name}: {each}" for each in _sit(place, folder, kind, one)]
        if problems:
            break
    try:
        if not problems:
            assert_near(run, alone, ended_with=[each.until for each in sittings])
            problems += _not_as_asked(run, sittings) if sittings[0].decay == BY_TOKENS else ()
    except AssertionError as error:
        problems.append(f"it ended elsewhere: {str(error)[:300]}")
    told = [f"{kind}: " + "; ".join(map(str, sittings))] if problems else []
    found = {"sittings": len(sittings), "injected": sum(bool(each.fault) for each in sittings)}
    if not problems:
        shutil.rmtree(run.parents[1])
    return {**found, "problems": [*problems, *told]}


def _not_as_asked(run: Path, sittings: Sequence[Sitting]) -> Iterator[str]:
    """Steps whose batch or learning rate is another than was asked for. The decay ends with the step by which so many
    tokens are used up, of what comes with the batch of the step.
    """
    saved = {step: (path, read_manifest(path)) for step, path in checkpoints_in(run / "checkpoints").items()}
    asked = [each for sitting in sittings for each in sitting.changes if each[1] == BATCH]
    asked.sort(key=lambda each: each[0])
    used = [0]
    for step, line in enumerate(metrics(run), 1):
        config, by = config_of(*saved[step]), metadata_of(*saved[step]).rollbacks
        (batch,) = [4, *(value for at, _, value in asked if at < step)][-1:]
        tokens = int(str(batch)) * config.model.sample_length
        used.append(line["tokens"])
        if used[-1] - used[-2] != tokens:
            yield f"step {step} uses {used[-1] - used[-2]} tokens, and not {tokens}"
        ahead = step - 1 - (used[-2] - DECAY_TOKENS) // tokens
        end = next((at for at, count in enumerate(used) if count >= DECAY_TOKENS), ahead)
        optim = config.optim.model_copy(update={"decay_tokens": None, "decay_steps": end})
        rate = lowered(learning_rate_of(config.model_copy(update={"optim": optim})), by)(step)
        if abs(line["learning_rate"] - rate) > 1e-12:
            yield f"step {step} has the learning rate {line['learning_rate']}, and not {rate}"


def _sit(place: Place, run: Path, kind: str, sitting: Sitting) -> list[str]:
    """Make a sitting; what went wrong."""
    if sitting.fault in ("damaged", "deleted"):
        _lose(sitting.fault, run, sitting.since)
    if sitting.changes:
        lines = [json.dumps({"change": {key: value}, "at": at}) + "\n" for at, key, value in sitting.changes]
        run.mkdir(parents=True, exist_ok=True)
        with (run / "changes.jsonl").open("a") as file:
            file.writelines(lines)
    if sitting.rollback and (answer := here("rollback", run, *sitting.rollback)).status:
        return [f"no rollback: {answer.err}"]
    fault = sitting.fault if sitting.fault in ("killed", "flipped") else ""
    answers = _started(place, run, kind, sitting, _first(sitting, fault))
    if fault == "killed" and any(answer.status for answer in answers):
        answers = _started(place, run, kind, sitting, lambda rank: None)
    problems = [f"it does not end well: {said(answers)}"] if any(answer.status for answer in answers) else []
    if fault == "flipped" and not [event for event in events(run) if event["event"] == "copies differ"]:
        problems.append("the flipped bit was not detected")
    return problems


def _lose(fault: str, run: Path, since: int) -> None:
    """All checkpoints behind a step, which were made as what is to come will be."""
    kept = checkpoints_in(run / "checkpoints")
    first = min((step for step in kept if step >= since), default=0)
    for step, path in kept.items():
        if step > first:
            if fault == "deleted":
                shutil.rmtree(path)
            else:
                flip_a_bit(path, Random(step))


def _started(place: Place, run: Path, kind: str, sitting: Sitting, first: Callable[[int], None]) -> Sequence[Answer]:
    if kind == PREFERENCES:
        config = pairs.write_config(_pairs(place), run.parent)
    else:
        config = tiny.write_config(place.corpus, run.parent)
    keys = [
        *("train.precision=fp64", f"train.steps={sitting.until}", sitting.decay, f"run.folder={run}"),
        "optim.epsilon=1e-5",  # a gradient that is nothing but rounding is no step
        *("checkpoint.every=1", "checkpoint.keep=100", "checkpoint.compare_copies_every=1", TIMEOUT),
        *KINDS[ADAPTERS if kind == BESIDE else kind],
        *sitting.layout,
        *([f"parts.frozen={json.dumps(sitting.frozen)}"] if kind not in (ADAPTERS, BESIDE) else []),
        *([f"train.init_from={_base(place)}"] if kind == BESIDE else []),
    ]
    return start("train", config, *keys, num_ranks=sitting.num_ranks, first=first).answers(TIME_LIMIT)


def _pairs(place: Place) -> Path:
    folder = place.folder / "pairs"
    if not folder.exists():
        folder.mkdir()
        pairs.make(folder)
    return folder


def _base(place: Place) -> Path:
    """A run of one step; its weights are those that a flipped bit is in."""
    folder = place.folder / "base"
    if not folder.exists():
        folder.mkdir()
        here("train", tiny.write_config(place.corpus, folder), "train.steps=1", "train.precision=fp64")
    return folder / "run"


def _first(sitting: Sitting, fault: str) -> Callable[[int], None]:
    """What a rank does before it starts."""
    at, rank = max(1, sitting.until - 1), sitting.until % sitting.num_ranks
    if fault == "flipped":
        return flipped(at, rank, 1000 * sitting.until + 7)
    return _killed(at, rank) if fault == "killed" else lambda rank: None


def _killed(step: int, rank: int) -> Callable[[int], None]:
    def first(own: int) -> None:
        from colonnade.train import loop

        train_step = loop.train_step

        def and_end(state: Any, *args: Any, **more: Any) -> Any:
            result = train_step(state, *args, **more)
            if own == rank and state.step == step:
                os._exit(70)
            return result

        loop.__dict__["train_step"] = and_end

    return first
