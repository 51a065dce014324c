"""A run whose configuration changes on the way: the same on every layout, after every stop, kill and return."""

import errno
import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from colonnade.config.load import load
from colonnade.data import remote
from colonnade.data.tokenizer_config import read_text
from colonnade.data.writer import TokenFileWriter
from colonnade.errors import DiskError
from colonnade.launch.agreement import on_all_ranks
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh, paper_mesh
from colonnade.train import in_force, loop
from colonnade.train.change import Change
from colonnade.train.change_requests import Decided, read_decided
from colonnade.train.corpus import open_corpus
from colonnade.train.in_force import InForce
from colonnade.train.rollback import Rollback
from colonnade.train.run_folder import CHANGES, DECIDED
from colonnade.train.state import learning_rate_of, optimizer_of
from tests import tiny
from tests.commands import forked, here
from tests.distributed import run_on_ranks
from tests.runs import assert_near, assert_same, assert_same_end, events, metrics
from tests.tiny import TinyCorpus, write_config
from tests.told import Told

assert loop, "imported once, here, and not by every forked rank"

RUN = ["train.precision=fp64", "train.steps=10", "train.evaluate_every=0", "optim.decay_steps=10", "checkpoint.keep=9"]
LAYOUTS = {"tp": ["parallel.tp=2"], "dp": ["parallel.dp=2", "parallel.zero=2"], "pp": ["parallel.pp=2"]}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, corpus: TinyCorpus) -> TinyCorpus:
    """More text, in the first corpus's tokens."""
    made = tiny.make(tmp_path_factory.mktemp("other"), num_documents=40, seed=1)
    done = here("data", "tokenize", made.text, "--output", made.prefix, "--tokenizer", corpus.tokenizer, "--overwrite")
    assert done.status == 0, done
    return made


@pytest.fixture
def blended(config: Path, corpus: TinyCorpus, other: TinyCorpus) -> Path:
    """The configuration of the first corpus, with both blended in its place."""
    table = f'blend = {{"{corpus.prefix}" = 0.25, "{other.prefix}" = 0.75}}'
    config.write_text(config.read_text().replace(f'train = "{corpus.prefix}"', table))
    return config


def test_what_is_opened_anew(config: Path) -> None:
    """A part to evaluate on, where none was asked for; not for another log, nor for more evaluations."""

    def reads(*keys: str) -> tuple[object, ...]:
        return in_force._reads(load(config, [*keys]))

    never, often = "train.evaluate_every=0", "train.evaluate_every=5"
    assert reads(never) != reads(often) == reads("train.evaluate_every=6")
    config.write_text(config.read_text().replace("evaluate_every = 3\n", ""))
    assert load(config).train.evaluate_every is None and reads() != reads(often), "by itself, where there is a part"
    assert reads(never, "train.log_every=3") == reads(never) != reads(never, "train.global_batch_size=8")


def changes(run: Path, *lines: dict[str, Any]) -> Path:
    """Written by somebody's editor."""
    run.mkdir(parents=True, exist_ok=True)
    with (run / CHANGES).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return run


def all_kinds(corpus: TinyCorpus) -> list[dict[str, Any]]:
    return [
        {"change": {"optim.learning_rate": 3e-3, "optim.weight_decay": 0.3, "train.gradient_clip": 0.1}, "at": 3},
        {"change": {"train.global_batch_size": 8}, "at": 5, "by": "Ada", "reason": "noise"},
        {"change": {"data.blend": {str(corpus.prefix): 0.75}}, "at": 7},
        {"change": {"train.global_batch_size": 4, "train.evaluate_every": 9}, "at": 8},
    ]


def train(config: Path, folder: Path, *more: str, num_ranks: int = 1, **first: Any) -> None:
    answer = forked("train", config, *RUN, f"run.folder={folder}", *more, num_ranks=num_ranks, **first)
    assert answer.status == 0, answer


@pytest.fixture
def serial(blended: Path, tmp_path: Path, corpus: TinyCorpus) -> Path:
    run = changes(tmp_path / "serial", *all_kinds(corpus))
    train(blended, run)
    return run


def killed_in(step: int) -> Any:
    def first(rank: int) -> None:
        before = loop.train_step

        def train_step(state: Any, *arguments: Any, **more: Any) -> Any:
            if state.step == step - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return before(state, *arguments, **more)

        loop.train_step = train_step  # type: ignore[assignment]

    return first


@pytest.mark.slow
def test_stopped_between_changes_and_resumed_on_other_layouts(serial: Path, blended: Path, corpus: TinyCorpus) -> None:
    assert [b["tokens"] - a["tokens"] for a, b in zip(metrics(serial), metrics(serial)[1:], strict=False)] == [
        *[4 * 16] * 4,
        *[8 * 16] * 3,
        *[4 * 16] * 2,
    ]
    elsewhere = changes(serial.with_name("elsewhere"), *all_kinds(corpus))
    for steps, layout in ((4, "tp"), (5, "dp"), (10, "pp")):
        train(blended, elsewhere, *LAYOUTS[layout], f"train.steps={steps}", num_ranks=2)
    losses = [[line["loss"] for line in metrics(run)] for run in (elsewhere, serial)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    assert_near(elsewhere, serial)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_go_on_another_layout(layout: str, serial: Path, blended: Path, corpus: TinyCorpus) -> None:
    run = changes(serial.with_name(layout), *all_kinds(corpus))
    train(blended, run, *LAYOUTS[layout], num_ranks=2)
    assert_near(run, serial)
    told = [(event["step"], event["changed"]) for event in events(run) if event["event"] == "changed"]
    assert [step for step, _ in told] == [3, 5, 7, 8]
    assert "optim.learning_rate: 0.01 -> 0.003" in told[0][1]


@pytest.mark.slow
def test_killed_behind_a_change_and_returned_to_before_it(serial: Path, blended: Path, corpus: TinyCorpus) -> None:
    run = changes(serial.with_name("killed"), *all_kinds(corpus))
    answer = forked("train", blended, *RUN, f"run.folder={run}", first=killed_in(7))
    assert answer.status == -signal.SIGKILL
    (run / CHANGES).unlink()  # what was decided is kept by the run itself
    train(blended, run)
    assert_same(run, serial)
    assert here("rollback", run, "2").status == 0
    train(blended, run)
    assert_same_end(run, serial)
    assert [e["step"] for e in events(run) if e["event"] == "changed"] == [3, 5, 7, 8, 3, 5, 7, 8]


def test_behind_a_change_a_run_saves_in_the_background_with_the_group_that_it_has(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each group has connections to all ranks, which stay open as long as the run. Ranks wait in it for a slow disk,
    however short a time they wait for a step.
    """
    made = list[float]()
    monkeypatch.setattr(loop, "background_group", made.append)
    changes(tmp_path / "run", {"change": {"optim.learning_rate": 3e-3}, "at": 1})
    keys = ("checkpoint.asynchronous=true", "train.timeout=60", "train.steps=2", "train.evaluate_every=0")
    answer = here("train", config, *keys)
    assert answer.status == 0 and "Changed behind step 1" in answer.out, answer
    assert made == [1800.0]


@pytest.mark.slow
def test_a_batch_that_changes_is_a_phase_of_a_curriculum(config: Path, tmp_path: Path) -> None:
    run = changes(tmp_path / "changed", {"change": {"train.global_batch_size": 8}, "at": 3})
    train(config, run)
    phases = ["curriculum.tokens=[0, 192]", "curriculum.seq_length=[16, 16]", "curriculum.global_batch_size=[4, 8]"]
    train(config, tmp_path / "phases", *phases, "train.global_batch_size=8")
    assert_same(run, tmp_path / "phases")
    for each, keys in ((run, ()), (tmp_path / "phases", (*phases, "train.global_batch_size=8"))):
        before = metrics(each)
        assert here("rollback", each, "6", "--skip", "2").status == 0
        train(config, each, *keys)
        assert metrics(each)[6:] != before[6:]
    assert_same_end(run, tmp_path / "phases")  # batches of the size that holds there are passed over


@pytest.mark.slow
def test_behind_a_change_all_is_as_if_the_run_had_been_stopped_and_edited(config: Path, tmp_path: Path) -> None:
    changed = {
        "optim.learning_rate": 3e-3,
        "optim.decay": "linear",
        "optim.weight_decay": 0.3,
        "train.gradient_clip": 0.1,
    }
    run = changes(tmp_path / "changed", {"change": changed, "at": 4})
    train(config, run)
    edited = tmp_path / "edited"
    train(config, edited, "train.steps=4")
    values = [f"{key}={value}" for key, value in changed.items()]
    folder = (edited / "config.toml").read_text()
    for old, new in (("0.01", "0.003"), ('"cosine"', '"linear"'), ("weight_decay = 0.1", "weight_decay = 0.3")):
        assert folder.count(f" {old}") == 1 or old.startswith("weight")
        folder = folder.replace(old, new)
    (edited / "config.toml").write_text(folder.replace("gradient_clip = 1.0", "gradient_clip = 0.1"))
    train(config, edited, *values)
    assert_same(run, edited)


@pytest.mark.slow
def test_a_mixture_asked_for_at_a_standing_run_is_one_changed_on_the_way(
    serial: Path, blended: Path, corpus: TinyCorpus, tmp_path: Path
) -> None:
    run = tmp_path / "standing"
    lines = all_kinds(corpus)
    changes(run, *lines[:2])
    train(blended, run, "train.steps=7")
    name = str(corpus.prefix)
    answer = here("change", run, f"data.blend.{name}=0.75", "--by", "Ada", "--at", "7")
    assert answer.status == 2 and "the run ends with step 7" in answer.err
    changes(run, {"change": lines[2]["change"]}, lines[3])
    train(blended, run)
    assert_same_end(run, serial)


@pytest.mark.slow
def test_what_a_checkpoint_and_the_folder_say(serial: Path, blended: Path) -> None:
    stored = load(serial / "checkpoints" / "step_00000006" / "config.toml")
    assert stored.train.global_batch_size == 8 and stored.optim.learning_rate == 3e-3
    assert load(serial / "config.toml").train.global_batch_size == 4
    said = here("change", serial, "--list").out
    assert said.splitlines()[1] == "changed behind step 5: train.global_batch_size = 8 by Ada (noise)"
    answer = forked("train", blended, *RUN, f"run.folder={serial}", "optim.learning_rate=0.5")
    assert answer.status == 2 and "the run has had 0.01, 0.003" in answer.err
    train(blended, serial, "optim.learning_rate=3e-3", "train.steps=11")
    assert metrics(serial)[-1]["step"] == 11


def test_bad_lines_are_refused_once_and_the_run_goes_on(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "refused"
    run.mkdir()
    (run / CHANGES).write_text(
        '{"change": {"optim.learning_rate": 1e-3}, "at": 4}\n'
        "[1]\n"
        '{"change": {"train.seed": 5}}\n'
        '{"change": {"train.micro_batch_size": 1}}\n'
        '{"change": {"optim.lr": 5}}\n'
        '{"change": {"train.global_batch_size": 3}}\n'
        '{"change": {"optim.learning_rate": "much"}}\n'
        '{"change": {"checkpoint.every": 5}, "at": -1}\n'
        '{"change": {"data.blend": {"a": 1}}}\n'
        '{"change": {"checkpoint.every": 3}, "at'
    )
    answer = forked("train", config, *RUN, f"run.folder={run}", "train.steps=3")
    assert answer.status == 0, answer
    assert 'changes.jsonl: [1] is refused, and the run goes on as it is: it has no "change"' in answer.out
    answer = forked("train", config, *RUN, f"run.folder={run}", "train.steps=6")
    assert answer.status == 0, answer
    reasons = [event["reason"] for event in events(run) if event["event"] == "change refused"]
    expected = [
        'it has no "change"',
        "train.seed does not change while a run goes on: steps behind it would not follow",
        "Stop the run, and start it again with another value",
        "optim.lr is not a key: did you mean optim.learning_rate",
        "train.global_batch_size = 3 is not divisible",
        'optim.learning_rate = "much" is text',
        'its "at" is -1',
        "data.train, and no blend",
        "it is no JSON object",
    ]
    assert len(reasons) == len(expected)
    for reason, part in zip(reasons, expected, strict=True):
        assert part in reason
    assert "is refused" not in answer.out
    assert [event["step"] for event in events(run) if event["event"] == "changed"] == [4]


@pytest.mark.slow
def test_the_command_writes_whole_lines_and_refuses_what_the_run_would(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "asked"
    train(config, run, "train.steps=4")
    (run / CHANGES).write_text('{"change": {"che')
    for arguments, said in (
        (["train.seed=4"], "train.seed does not change"),
        (["optim.learning_rate=-1"], "optim.learning_rate = -1"),
        (["checkpoint.every=3", "--at", "3"], "step 3 is over"),
        (["checkpoint.every=3", "--at", "0"], "step 0 is over"),
        (["checkpoint.every"], "is not of the form"),
        ([], "Give keys"),
    ):
        answer = here("change", run, *arguments)
        assert answer.status == 2 and said in answer.err, answer
    assert (run / CHANGES).read_text() == '{"change": {"che'
    assert here("change", tmp_path, "checkpoint.every=3").status == 2  # it has the configuration of a run alone
    train(config, run, "train.steps=5")  # refuses the torn line
    answer = here("change", run, "train.steps=8", "--at", "4")
    assert answer.status == 2 and "step 4 is over" in answer.err


def test_what_is_asked_for_while_the_disk_is_full_is_looked_at_again(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step, though changes.jsonl is the same; that it waits is said once."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run, told = changes(tmp_path / "run", {"change": {"optim.learning_rate": 3e-3}}), Told()
    following = InForce(load(config), None, Mesh(), told)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(in_force, "write_decided", full)
        for step in (2, 3):
            assert following.has_news()
            following.read(step, [])
    assert len([each for each in told.said if each.startswith("Changes of the run wait: ")]) == 1
    assert following.has_news() and not read_decided(run).changes
    following.read(4, [])
    assert [change.at for change in read_decided(run).changes] == [4] and not following.has_news()


def test_a_request_without_the_end_of_its_line_holds_behind_the_step_under_way(config: Path, tmp_path: Path) -> None:
    """As `echo -n` writes it. What is no request yet may still be being written, and has until the next step."""
    run, following = changes(tmp_path / "run"), InForce(load(config), None, Mesh(), Told())  # type: ignore[arg-type]
    (run / CHANGES).write_text('{"change": {"optim.learning_rate": 3e-3}')
    following.read(2, [])
    assert not read_decided(run).known
    (run / CHANGES).write_text('{"change": {"optim.learning_rate": 3e-3}}')
    following.read(3, [])
    assert [change.at for change in read_decided(run).changes] == [3] and not read_decided(run).refused


def test_of_a_long_line_that_is_refused_the_beginning_is_told(config: Path, tmp_path: Path) -> None:
    run, told = changes(tmp_path / "run"), Told()
    (run / CHANGES).write_text("x" * 10_000 + "\n")
    InForce(load(config), None, Mesh(), told).read(2, [])  # type: ignore[arg-type]
    (event,), shown = told.of("change refused"), "x" * in_force.MOST_SHOWN
    assert (event["asked"], event["step"]) == (shown, 2) and told.said[0].startswith(f"{CHANGES}: {shown} is refused, ")


def test_a_change_that_the_data_do_not_allow_is_refused_when_its_step_has_come(config: Path, tmp_path: Path) -> None:
    """Said, and noted with its reason, so that it is not tried again; the run goes on as it is."""
    began, told = load(config, ["data.order=all_epochs", "data.epochs=1"]), Told()
    run = changes(tmp_path / "run", {"change": {"train.steps": 10_000}, "at": 2})
    state: Any = SimpleNamespace(step=2, samples=8, changes=[], rollbacks=[])
    following = InForce(began, open_corpus(began), Mesh(), told)  # type: ignore[arg-type]
    following.read(1, [])
    assert following.follow(state)[0] == began and not state.changes
    (refusal,) = read_decided(run).refused
    assert "but data.epochs = 1" in refusal.reason
    assert told.of("change refused") == [{"step": 2, "asked": "train.steps = 10000", "reason": refusal.reason}]
    assert not read_decided(run).changes and not following.is_over(state)
    for each in (following, InForce(began, None, Mesh(), told)):  # type: ignore[arg-type]
        each.read(2, [])  # the line is still there, and a run that is started again sees it too
        assert read_decided(run) == Decided(refused=(refusal,)) and len(told.of("change refused")) == 1


@pytest.mark.parametrize(("batch", "taken"), [(8, False), (2, True)])
def test_a_change_between_a_return_and_what_makes_the_run_shorter_leaves_data_for_all_of_it(
    batch: int, taken: bool, config: Path, tmp_path: Path
) -> None:
    """Of 12 samples that are left at step 3 the run takes 4 a step, and will end with step 6."""
    began = load(config, ["data.order=all_epochs", "data.epochs=1", "train.steps=7"])
    shorter = {"change": {"train.steps": 6}, "at": 4}
    run = changes(tmp_path / "run", {"change": {"train.global_batch_size": batch}, "at": 3}, shorter)
    corpus = open_corpus(began)
    left = len(corpus.datasets.train) - 12
    state: Any = SimpleNamespace(step=3, samples=left, changes=[], rollbacks=[])
    following = InForce(began, corpus, Mesh(), Told())  # type: ignore[arg-type]
    following.read(3, [])
    assert following.follow(state)[0].train.global_batch_size == (batch if taken else 4)
    told = f"Up to train.steps = 7, behind step 3 from sample {left + 1:,} on, the run takes "
    refused = read_decided(run).refused
    assert [each.reason.startswith(told) for each in refused] == [True] * (not taken)


def test_data_that_would_not_have_lasted_from_the_first_step_are_enough_for_what_is_left(
    config: Path, tmp_path: Path
) -> None:
    """With larger batches, and fewer steps of them by what comes behind."""
    began = load(config, ["data.order=all_epochs", "data.epochs=1", "train.steps=21"])
    larger, shorter = {"train.global_batch_size": 8}, {"train.steps": 9}
    run = changes(tmp_path / "run", {"change": larger, "at": 4}, {"change": shorter, "at": 6})
    corpus = open_corpus(began)
    assert (21 - 1) * 4 < len(corpus.datasets.train) < 21 * 4 + 4
    state: Any = SimpleNamespace(
        step=4, samples=(4 + 1) * 4, changes=[], rollbacks=[]
    )  # a rollback has passed over one
    following = InForce(began, corpus, Mesh(), Told())  # type: ignore[arg-type]
    following.read(4, [])
    assert following.follow(state)[0].train.global_batch_size == 8
    state.step, state.samples = 6, state.samples + 2 * 8
    assert following.follow(state)[0].train.steps == 9 and read_decided(run).refused == ()


def test_a_change_to_evaluations_that_have_no_label_that_counts_is_refused(config: Path, tmp_path: Path) -> None:
    began, told = load(config, ["train.evaluate_every=0", f"data.no_loss_on={list(range(tiny.VOCAB_SIZE))}"]), Told()
    run = changes(tmp_path / "run", {"change": {"train.evaluate_every": 2}, "at": 2})
    state: Any = SimpleNamespace(step=2, samples=8, changes=[], rollbacks=[])
    following = InForce(began, open_corpus(began), Mesh(), told)  # type: ignore[arg-type]
    following.read(1, [])
    assert following.follow(state)[0] == began and not state.changes
    (refusal,) = read_decided(run).refused
    assert refusal.reason.startswith("no label counts in the first 4 of ")


def test_a_change_beside_the_one_that_mends_evaluations_is_made_too(config: Path, tmp_path: Path) -> None:
    """It has nothing to do with them, whichever comes first."""
    began = load(config, [f"data.no_loss_on={list(range(tiny.VOCAB_SIZE))}"])
    made: dict[str, float] = {"optim.learning_rate": 2e-3, "train.evaluate_every": 0, "train.gradient_clip": 0.5}
    run = changes(tmp_path / "run", *({"change": {name: value}, "at": 2} for name, value in made.items()))
    state: Any = SimpleNamespace(step=2, samples=8, changes=[], rollbacks=[])
    following = InForce(began, open_corpus(began), Mesh(), Told())  # type: ignore[arg-type]
    following.read(1, [])
    now, _ = following.follow(state)
    assert [{**change.values} for change in state.changes] == [{name: value} for name, value in made.items()]
    assert now.optim.learning_rate == 2e-3 and read_decided(run).refused == ()


@pytest.mark.parametrize(("keys", "said"), [([], True), (["optim.decay_steps=6"], False)])
def test_a_run_that_is_made_longer_says_what_that_makes_of_its_learning_rate(
    config: Path, tmp_path: Path, keys: list[str], said: bool
) -> None:
    """As one that is started again with more steps. A curve with an end of its own stays."""
    began, told, rates = load(config, ["train.steps=6", *keys]), Told(), list[float]()
    changes(tmp_path / "run", {"change": {"train.steps": 40}, "at": 6})
    returned = [Rollback(to=2, rate_factor=0.5, rate_until=8)]
    state: Any = SimpleNamespace(step=6, samples=24, changes=[], rollbacks=returned)
    following = InForce(began, open_corpus(began), Mesh(), told)  # type: ignore[arg-type]
    following.read(5, returned)
    for each in (learning_rate_of(began, returned), following.follow(state) and state.learning_rate):
        rates.append(each(7))
    expected = (
        f"The learning rate follows another curve from step 7 on: its decay ends at step 40 instead of 6, so that step "
        f"7 has {rates[1]:.3g} and not {rates[0]:.3g}. Set optim.decay_steps = 6 to keep the curve."
    )
    assert told.said[1:] == [told.said[1], *[expected] * said] and "train.steps: 6 -> 40" in told.said[1]
    assert (rates[1] > 5 * rates[0]) == said


def test_of_two_changes_of_a_step_the_second_is_told_beside_the_first(config: Path, tmp_path: Path) -> None:
    """And what it makes of the learning rate."""
    began, told = load(config), Told()
    changes(tmp_path / "run", *({"change": {"train.steps": steps}, "at": 6} for steps in (40, 80)))
    state: Any = SimpleNamespace(step=6, samples=24, changes=[], rollbacks=[])
    following = InForce(began, open_corpus(began), Mesh(), told)  # type: ignore[arg-type]
    following.read(5, [])
    assert following.follow(state)[0].train.steps == 80
    assert [each["changed"][0] for each in told.of("changed")] == ["train.steps: 6 -> 40", "train.steps: 40 -> 80"]
    curves = [line for line in told.said if line.startswith("The learning rate follows another curve")]
    ends = [line.partition("its decay ends at ")[2].partition(",")[0] for line in curves]
    assert ends == ["step 40 instead of 6", "step 80 instead of 40"]


@pytest.mark.parametrize("at_start", ["true", "false"])
def test_an_evaluation_at_the_start_is_none_behind_it(at_start: str, config: Path, tmp_path: Path) -> None:
    """No label counts, and nothing is measured any more: a change has nothing to do with it."""
    keys = ["train.evaluate_every=0", f"train.evaluate_at_start={at_start}"]
    began = load(config, [*keys, f"data.no_loss_on={list(range(tiny.VOCAB_SIZE))}"])
    changes(tmp_path / "run", {"change": {"optim.learning_rate": 0.002}, "at": 2})
    state: Any = SimpleNamespace(step=2, samples=8, changes=[], rollbacks=[])
    following = InForce(began, open_corpus(began), Mesh(), Told())  # type: ignore[arg-type]
    following.read(1, [])
    assert following.follow(state)[0].optim.learning_rate == 0.002


def test_a_run_goes_on_with_evaluations_only_where_a_label_counts(corpus: TinyCorpus, tmp_path: Path) -> None:
    """Told before its next step, and not at the first evaluation."""
    with TokenFileWriter(tmp_path / "held", np.dtype("<u2")) as writer:
        writer.add_document([1] * 33 + [2] * 16)
    file = write_config(corpus, tmp_path)
    keys = ["data.no_loss_on=[1]", f"data.validation={tmp_path / 'held'}", "train.evaluate_samples=2"]
    assert here("train", file, *keys, "train.evaluate_every=0", "train.steps=2").status == 0
    for dry_run in (["--dry-run"], []):
        answer = here("train", file, *keys, "train.evaluate_every=3", "train.steps=6", *dry_run)
        assert answer.status == 2 and "no label counts in the first 2 of 3 validation samples" in answer.err, answer
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2]


def test_behind_a_return_to_before_a_change_another_configuration_is_in_force(config: Path) -> None:
    """Until the change's step has come again."""
    began, monitor = load(config), Told()
    change = Change(
        at=7, values={"optim.learning_rate": 3e-3}, was={"optim.learning_rate": 1e-2}, line="1", position=28
    )
    state: Any = SimpleNamespace(step=9, changes=[change], rollbacks=[])
    following = InForce(began, open_corpus(began), Mesh(), monitor)  # type: ignore[arg-type]
    assert following.follow(state)[0].optim.learning_rate == 3e-3 and not following.is_over(state)
    state.step, state.changes = 5, []
    assert following.is_over(state)
    assert following.follow(state)[0].optim.learning_rate == 1e-2 and not following.is_over(state)


def test_behind_a_return_to_the_step_of_a_change_it_is_made_again(config: Path, tmp_path: Path) -> None:
    """A checkpoint of that step is from before it, and what is read from it has the rate and the optimizer of then."""
    began, values = load(config), {"optim.learning_rate": 3e-3, "optim.weight_decay": 0.3}
    changes(tmp_path / "run", {"change": values, "at": 4})
    following = InForce(began, open_corpus(began), Mesh(), Told())  # type: ignore[arg-type]
    following.read(3, [])
    state: Any = SimpleNamespace(step=4, samples=16, rollbacks=[])
    for _ in range(2):
        state.changes, state.learning_rate, state.optimizer = [], learning_rate_of(began), optimizer_of(began)
        assert following.is_over(state)
        now, _ = following.follow(state)
        assert (now.optim.learning_rate, now.optim.weight_decay, len(state.changes)) == (3e-3, 0.3, 1)
        assert state.optimizer == optimizer_of(now) != optimizer_of(began)
        assert state.learning_rate(5) == learning_rate_of(now)(5) != learning_rate_of(began)(5)


@pytest.mark.parametrize(
    ("read", "why"),
    [(read_text, errno.ESTALE), (lambda file: remote._keep(file, b""), errno.ENOSPC)],
    ids=["a tokenizer on a disk that is away", "a copy for which there is no room"],
)
def test_a_change_whose_data_a_disk_does_not_give_for_a_while_is_not_refused_for_good(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], Any], why: int
) -> None:
    """The run ends, is started again, and makes it then."""

    def refused(file: Path, *words: Any, **more: Any) -> Any:
        raise OSError(why, os.strerror(why), str(file))

    def away(*words: Any, **more: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(remote, "write_whole", refused)
            patched.setattr(Path, "read_text", refused)
            return on_all_ranks(lambda: read(tmp_path / "file"), Mesh().world)

    run = changes(tmp_path / "run", {"change": {"train.global_batch_size": 8}, "at": 2})
    state: Any = SimpleNamespace(step=2, samples=8, changes=[], rollbacks=[])
    following = InForce(load(config), open_corpus(load(config)), Mesh(), Told())  # type: ignore[arg-type]
    following.read(1, [])
    with monkeypatch.context() as patched:
        patched.setattr(in_force, "open_together", away)
        with pytest.raises(DiskError, match=re.escape(os.strerror(why))):
            following.follow(state)
    assert (state.changes, read_decided(run).refused) == ([], ())
    assert following.follow(state)[0].train.global_batch_size == 8


def test_a_change_is_made_in_its_step_and_told_with_who_asked_for_it(config: Path, tmp_path: Path) -> None:
    """The optimizer and what is told of steps follow it, and the state knows where in the data it was made."""
    began, told, paces = load(config), Told(), list[dict[str, Any]]()
    values = {"optim.learning_rate": 3e-3, "optim.weight_decay": 0.3, "train.steps": 9, "train.log_every": 7}
    values["checkpoint.retry_for"] = 0
    changes(tmp_path / "run", {"change": values, "at": 2, "by": "Ada", "reason": "noise"})
    state: Any = SimpleNamespace(step=1, samples=4, changes=[], rollbacks=[], optimizer=None)
    monitor = SimpleNamespace(event=told.event, say=told.say, follow=lambda **how: paces.append(how))
    following = InForce(began, open_corpus(began), Mesh(), monitor)  # type: ignore[arg-type]
    following.read(1, [])
    assert not following.is_over(state) and following.follow(state)[0] == began
    assert state.optimizer == optimizer_of(began)
    state.step, state.samples = 2, 8
    assert following.is_over(state)
    now, _ = following.follow(state)
    assert not following.is_over(state) and [each.position for each in state.changes] == [8]
    assert state.optimizer == optimizer_of(now) != optimizer_of(began)
    assert paces == [
        {"steps": 6, "log_every": began.train.log_every, "patient": True},
        {"steps": 9, "log_every": 7, "patient": False},
    ]
    (event,) = told.of("changed")
    assert (event["step"], event["by"], event["reason"]) == (2, "Ada", "noise")
    assert "optim.weight_decay: 0.1 -> 0.3" in event["changed"] and "train.steps: 6 -> 9" in event["changed"]


@pytest.mark.parametrize(("steps", "at", "longer"), [(9, 6, True), (9, 5, False), (7, 6, True), (None, 6, False)])
def test_a_run_at_its_end_knows_whether_a_change_makes_it_longer(
    steps: int | None, at: int, longer: bool, config: Path, tmp_path: Path
) -> None:
    asked = {"optim.learning_rate": 3e-3} if steps is None else {"train.steps": steps}
    changes(tmp_path / "run", {"change": asked, "at": at})
    following = InForce(load(config), None, Mesh(), Told())  # type: ignore[arg-type]
    following.read(4, [])
    state: Any = SimpleNamespace(step=6, changes=[])
    assert following.prolongs(state) is longer


def test_a_file_of_changes_that_took_the_place_of_another_is_news(config: Path, tmp_path: Path) -> None:
    """Of the same length and of the same moment: editors write a new file. Rank 0 alone looks."""
    run = changes(tmp_path / "run", {"change": {"optim.learning_rate": 3e-3}})
    first, second = (InForce(load(config), None, paper_mesh(Layout(dp=2), rank), Told()) for rank in (0, 1))  # type: ignore[arg-type]
    assert first.has_news() and not second.has_news()
    first._look(2, [])
    assert not first.has_news()
    before = (run / CHANGES).stat()
    (run / "edited").write_text((run / CHANGES).read_text().replace("0.003", "0.004"))
    os.utime(run / "edited", ns=(before.st_atime_ns, before.st_mtime_ns))
    (run / "edited").replace(run / CHANGES)
    assert (run / CHANGES).stat().st_size == before.st_size and first.has_news()


def test_what_was_decided_is_read_by_rank_0_alone(config: Path, tmp_path: Path) -> None:
    """The folder of another rank may be an older one, or none that can be read. It decides nothing there."""
    began, change = load(config), Change(at=2, values={"optim.learning_rate": 3e-3}, was={}, line="1")

    def to_come(rank: int, num_ranks: int) -> tuple[bool, int]:
        folder, told = tmp_path / str(rank), Told()
        folder.mkdir()
        (folder / DECIDED).write_text(Decided(changes=(change,)).model_dump_json() if rank == 0 else "{")
        (folder / CHANGES).write_text("[1]\n")
        mine = began.model_copy(update={"run": began.run.model_copy(update={"folder": str(folder)})})
        world = build_mesh(Layout(dp=2), rank).world
        following = InForce(mine, None, SimpleNamespace(rank=rank, world=world), told)  # type: ignore[arg-type]
        following.read(1, [])
        state: Any = SimpleNamespace(step=2, changes=[])
        return following.is_over(state), len(told.of("change refused"))

    assert run_on_ranks(to_come, 2) == [(True, 1), (True, 0)]
    assert (tmp_path / "1" / DECIDED).read_text() == "{"


def test_a_change_leaves_the_learning_rate_as_low_as_a_rollback_has_made_it(config: Path) -> None:
    began, monitor = load(config), Told()
    values, was = {"optim.learning_rate": 3e-3}, {"optim.learning_rate": 1e-2}
    change = Change(at=2, values=values, was=was, line="1", position=8)
    state: Any = SimpleNamespace(step=3, changes=[change], rollbacks=[Rollback(to=1, rate_factor=0.25, rate_until=4)])
    now, _ = InForce(began, open_corpus(began), Mesh(), monitor).follow(state)  # type: ignore[arg-type]
    rate = learning_rate_of(now)
    assert [state.learning_rate(step) for step in (4, 5)] == [rate(4) / 4, rate(5)] != [rate(4), rate(5)]
    assert rate(4) != learning_rate_of(began)(4)


@pytest.mark.slow
def test_a_line_that_comes_in_mid_run_holds_behind_the_step_under_way_on_all_ranks(
    config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "asked"

    def first(rank: int) -> None:
        before = loop.train_step

        def train_step(state: Any, *arguments: Any, **more: Any) -> Any:
            if rank == 0 and state.step == 3:
                answer = here("change", run, "optim.learning_rate=3e-3", "checkpoint.every=3", "--by", "Ada")
                assert answer.status == 0, answer
                with (run / CHANGES).open("a") as file:
                    file.write('{"change": {"train.log_every": 1}, "reason')
            if rank == 0 and state.step == 4:
                with (run / CHANGES).open("a") as file:
                    file.write('": "more", "at": 6}')  # without an end, as some editors leave it
            return before(state, *arguments, **more)

        loop.train_step = train_step  # type: ignore[assignment]

    train(config, run, "parallel.tp=2", num_ranks=2, first=first)
    told = [(e["step"], e.get("by"), e.get("reason")) for e in events(run) if e["event"] == "changed"]
    assert told == [(4, "Ada", None), (6, None, "more")]
    assert [e for e in events(run) if e["event"] == "change refused"] == []
    assert [e["step"] for e in events(run) if e["event"] == "saved"] == [2, 4, 6, 9, 10]
    same = changes(tmp_path / "same", {"change": {"optim.learning_rate": 3e-3}, "at": 4})
    train(config, same)
    assert [m["loss"] for m in metrics(run)] == pytest.approx([m["loss"] for m in metrics(same)], rel=1e-10)
