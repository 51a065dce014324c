"""Lines of changes.jsonl: what each is known by, and what comes of it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from colonnade.config.load import load
from colonnade.errors import hidden
from colonnade.train import change
from colonnade.train.change import BLEND, Change, as_it_began, conflicts, earlier_blends, in_force
from colonnade.train.change_requests import Decided, Line, ask, from_now_on, lines_of, write_decided
from colonnade.train.corpus import curriculum_of
from colonnade.train.run_folder import CHANGES
from tests.commands import forked, here
from tests.runs import Finished, metrics
from tests.tiny import TinyCorpus


def write(run: Path, *lines: str, end: str = "\n") -> None:
    (run / CHANGES).write_text("\n".join(lines) + end)


def rate(value: float) -> str:
    return json.dumps({"change": {"optim.learning_rate": value}})


def test_equal_lines_are_requests_of_their_own(tmp_path: Path, config: Path) -> None:
    """Who sets a value, another one, and the first one again has the first one."""
    write(tmp_path, rate(1e-3), rate(2e-3), rate(1e-3))
    decided, began = Decided(), load(config)
    for line in lines_of(tmp_path):
        assert line.known_as not in decided.known
        decided = decided.with_line(line, began, 0)
    values: list[Any] = [change.values["optim.learning_rate"] for change in decided.changes]
    assert values == [1e-3, 2e-3, 1e-3] and not decided.refused


def test_each_change_to_come_is_made_once(tmp_path: Path, config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a run stands is asked often, by those that watch it too."""
    made, before = [], change._changed
    monkeypatch.setattr(change, "_changed", lambda config, each: made.append(each.at) or before(config, each))
    asked = [Change(at=at, values={"train.steps": 30 + at}, was={"train.steps": 6}, line=str(at)) for at in range(20)]
    write_decided(tmp_path, Decided(changes=tuple(reversed(asked))))
    found = from_now_on(load(config), 4, tmp_path)
    assert [each.train.steps for each in found] == [*range(34, 50)] and made == [*range(20)]


@pytest.mark.parametrize("tokens", [(), (0, 64)], ids=["one batch", "two batches"])
def test_behind_another_batch_a_run_knows_how_it_began(config: Path, tokens: tuple[int, ...]) -> None:
    """Such a change is a phase of the curriculum: a return to before it has the phases of before."""
    phases = {"tokens": tokens, "seq_length": (16,) * len(tokens), "global_batch_size": (2, 4)[: len(tokens)]}
    began = load(config, [f"curriculum.{name}={list(values)}" for name, values in phases.items() if tokens])
    line = Line("a", json.dumps({"change": {"train.global_batch_size": 8}}), is_whole=True)
    (change,) = Decided().with_line(line, began, 3).changes
    now = in_force(began, [change.model_copy(update={"position": 12})])
    assert now.train.global_batch_size == 8 and now.curriculum != began.curriculum
    assert as_it_began(now, [change]) == began


def test_before_the_last_phase_of_a_curriculum_its_batch_does_not_change(config: Path) -> None:
    """Pieces of the first samples, four a sample, go on behind step 2: what is asked for there would come behind 4."""
    phases = ["curriculum.tokens=[0, 20]", "curriculum.seq_length=[4, 16]", "curriculum.global_batch_size=[4, 4]"]
    decided, began = Decided(), load(config, phases)
    for step in (2, 4):
        line = Line(str(step), json.dumps({"change": {"train.global_batch_size": 8}, "at": step}), is_whole=True)
        decided = decided.with_line(line, began, 0)
    (refusal,), (change,) = decided.refused, decided.changes
    assert refusal.line == "2" and change.at == 4
    assert "does not change before the last phase of [curriculum]" in refusal.reason


@pytest.mark.parametrize(("key", "value"), [("train.global_batch_size", 8), ("train.steps", 9)])
def test_what_a_teacher_was_asked_about_before_the_run_does_not_change(config: Path, key: str, value: int) -> None:
    """And the reason is told by the key that was asked for, not by those that stand for it."""
    began = load(config, ["distillation.teacher=t", "distillation.top_k=4"])
    decided = Decided().with_line(Line("a", json.dumps({"change": {key: value}}), is_whole=True), began, 3)
    (refusal,) = decided.refused
    assert refusal.reason.startswith(f"{key} does not change in mid-run with distillation.top_k: stop the run"), refusal
    assert "curriculum" not in refusal.reason and not decided.changes


def test_behind_a_curriculum_a_blend_changes_at_the_sample_of_its_step(config: Path, corpus: TinyCorpus) -> None:
    """Positions count pieces: four a sample, behind sequences of a quarter of it."""
    blend = f'blend = {{"{corpus.prefix}" = 1.0, "more" = 3.0}}'
    config.write_text(config.read_text().replace(f'train = "{corpus.prefix}"', blend))
    phases = ["curriculum.tokens=[0, 64]", "curriculum.seq_length=[4, 16]", "curriculum.global_batch_size=[4, 4]"]
    began = load(config, phases)
    values, was = {BLEND: {str(corpus.prefix): 3.0, "more": 3.0}}, {BLEND: began.data.blend}
    change = Change(at=6, values=values, was=was, line="1", position=curriculum_of(began).steps(6))
    assert earlier_blends(began, [change]) == [(12, began.data.blend)], "4 + 2 × 4"


def test_the_number_of_a_file_changes_that_is_named_with_credentials(config: Path, corpus: TinyCorpus) -> None:
    """A request has its name without them, and the run reads it with them."""
    url = "s3://me:s3cr3t@bucket/more"
    blend = f'blend = {{"{corpus.prefix}" = 1.0, "{url}" = 3.0}}'
    config.write_text(config.read_text().replace(f'train = "{corpus.prefix}"', blend))
    began = load(config)
    line = Line("a", json.dumps({"change": {BLEND: {hidden(url): 2.0}}}), is_whole=True)
    (change,) = Decided().with_line(line, began, 3).changes
    now = in_force(began, [change.model_copy(update={"position": 12})])
    assert now.data.blend == {str(corpus.prefix): 1.0, url: 2.0} and "s3cr3t" not in change.model_dump_json()
    assert as_it_began(now, [change]) == began


def test_a_line_names_a_file_of_the_blend_as_the_command_does(config: Path) -> None:
    config.write_text(re.sub('train = ".*"', 'blend = {"data/a" = 0.5, b = 0.5}', config.read_text(), count=1))
    began = load(config, ["train.steps=100"])
    for asked in ({f"{BLEND}.data/a": 0.2, "train.steps": 120}, {BLEND: {"data/a": 0.2}, "train.steps": 120}):
        (change,) = Decided().with_line(Line("a", json.dumps({"change": asked}), is_whole=True), began, 3).changes
        assert change.values == {BLEND: {"data/a": 0.2}, "train.steps": 120}


@pytest.mark.parametrize("first", [20, 40])
def test_a_file_that_a_change_does_not_name_keeps_the_number_of_an_earlier_one(config: Path, first: int) -> None:
    """Earlier by its step, in whichever order they were asked for; and the run may be started with each mixture."""
    config.write_text(re.sub('train = ".*"', "blend = {a = 0.5, b = 0.25, c = 0.25}", config.read_text(), count=1))
    began, decided = load(config, ["train.steps=100"]), Decided()
    for number, asked, at in ((1, {"a": 0.1}, first), (2, {"b": 0.8}, 60 - first)):
        line = Line(str(number), json.dumps({"change": {BLEND: asked}, "at": at}), is_whole=True)
        decided = decided.with_line(line, began, 0)
    changes = sorted(decided.changes, key=lambda each: each.at)
    made = [each.model_copy(update={"position": 4 * each.at}) for each in changes]
    between, now = (in_force(began, made[:count]) for count in (1, 2))
    assert now.data.blend == {"a": 0.1, "b": 0.8, "c": 0.25}
    assert between.data.blend == {**(began.data.blend or {}), **({"a": 0.1} if first == 20 else {"b": 0.8})}
    assert not [line for each in (began, between, now) for line in conflicts(each, decided.changes)]
    assert list(conflicts(load(config, ["data.blend.c=0.5"]), decided.changes))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["checkpoint.keep=1" + "0" * 24], "checkpoint.keep cannot be read: it has a whole number that 64 bits cannot"),
        (["train.steps=300", "train.steps=500"], "train.steps has two values"),
        (["data.blend=3", "data.blend.a=1"], "data.blend.a has two values"),
        (["data.blend.a=1", "data.blend={a = 1}"], "data.blend has two values"),
        (["data.blend.a=1", "data.blend.a=2"], "data.blend.a has two values"),
        (["data.blend.a"], "'data.blend.a' is not of the form"),
        (["optim.learning_rate=1970-01-01"], "no key takes a date or time"),
    ],
)
def test_values_that_cannot_be_read_or_come_twice_are_one_message(
    finished: Finished, keys: list[str], said: str
) -> None:
    answer = here("change", finished.folder, *keys)
    assert answer.status == 2 and said in answer.err and answer.err.count("\n") == 1, answer
    assert not (finished.folder / CHANGES).exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"change": {"checkpoint.every": 5, "checkpoint.every": 6}}', "it has 'checkpoint.every' more than once"),
        ('{"change": {"checkpoint.every": 5}, "at": 4, "at": 5}', "it has 'at' more than once"),
        ('{"change": {"checkpoint.every": 5}, "at": -1}', 'its "at" is -1, where a step stands: a whole number of at'),
        ('{"change": {"checkpoint.every": 5}, "at": true}', 'its "at" is true, where a step stands'),
        ('{"change": {"checkpoint.every": 5}, "at": 4.0}', 'its "at" is 4.0, where a step stands'),
        ('{"change": {"checkpoint.every": 5}, "by": "\\ud800"}', "it has half of a character"),
        ('{"change": {"train": {"steps": 60}}}', "train is a section. Name each key whole, like train.steps."),
        ('{"change": {"model.rotary": 3}}', "model.rotary is a section, of which no key changes while a run"),
        ('{"change": {"model": {"rotary": {"base": 2}}}}', "model is a section, of which no key changes while a run"),
        ('{"change": {"train": {"": 1}}}', "train is a section. Name each key whole, like train.steps."),
        ('{"change": {"train": 60}}', "train is a section. Name each key whole, like train.steps."),
        ('{"change": {"data": {"seed": 1}}}', "data is a section. Name each key whole, like data.blend."),
        ('{"change": {"steps": 60}}', "steps = 60 stands outside of any section. Write it as train.steps."),
        ('{"change": {"trian": {"steps": 60}}}', "[trian] is not a section. Did you mean [train]?"),
        ('{"change": {"data.blend": {"a": 1}, "data.blend.a": 2}}', "data.blend.a has two values"),
        ('{"change": {"checkpoint.every": null}}', "checkpoint.every = (unset) is no value, where a whole number of"),
    ],
)
def test_a_line_that_says_two_things_or_nothing_is_refused(config: Path, text: str, said: str) -> None:
    (refusal,) = Decided().with_line(Line("a", text, is_whole=True), load(config), 3).refused
    assert said in refusal.reason


def test_a_line_is_known_by_the_same_name_when_others_have_come(tmp_path: Path) -> None:
    write(tmp_path, rate(1e-3), "", rate(1e-3))
    before = lines_of(tmp_path)
    write(tmp_path, rate(1e-3), rate(1e-3), rate(2e-3))
    now = lines_of(tmp_path)
    assert [line.known_as for line in now[:2]] == [line.known_as for line in before]
    assert len({line.known_as for line in now}) == 3


def test_the_last_line_is_whole_when_it_has_its_end(tmp_path: Path) -> None:
    write(tmp_path, rate(1e-3), rate(2e-3), end="")
    assert [line.is_whole for line in lines_of(tmp_path)] == [True, False]
    write(tmp_path, rate(1e-3), rate(2e-3))
    assert [line.is_whole for line in lines_of(tmp_path)] == [True, True]
    (tmp_path / CHANGES).unlink()
    assert lines_of(tmp_path) == []


def test_a_request_behind_a_line_without_an_end_is_a_line_of_its_own(finished: Finished, tmp_path: Path) -> None:
    """As some editors leave a file: both are read."""
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:4]))  # two steps are left
    write(run, rate(1e-3), rate(2e-3), end="")
    ask(run, {"change": {"optim.learning_rate": 3e-3}})
    ask(run, {"change": {"optim.learning_rate": 4e-3}})
    assert [line.is_whole for line in lines_of(run)] == [True] * 4
    assert [line.text for line in lines_of(run)] == [rate(value) for value in (1e-3, 2e-3, 3e-3, 4e-3)]


def test_a_run_that_has_ended_is_prolonged_by_a_change_of_its_steps(finished: Finished, tmp_path: Path) -> None:
    """As often as one likes: once the key has changed, no value that the run has not had may be set at its start."""
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    for before, steps in ((6, 7), (7, 8)):
        for refused in (["optim.learning_rate=1e-3"], [f"train.steps={steps + 9}", "--at", before + 1]):
            answer = here("change", run, *refused)
            assert answer.status == 2 and f"the run ends with step {before} (train.steps)" in answer.err, answer
        answer = here("change", run, f"train.steps={before}")
        assert answer.status == 2 and f"train.steps = {before} would be over at step {before}" in answer.err, answer
        assert here("change", run, f"train.steps={steps}").status == 0
        assert here("change", run, "optim.learning_rate=1e-3", "--at", before).status == 0, "behind the one that waits"
        answer = forked("train", finished.config, f"run.folder={run}")
        assert answer.status == 0 and metrics(run)[-1]["step"] == steps, answer


def test_a_file_of_the_run_that_cannot_be_read_is_one_message(finished: Finished, tmp_path: Path) -> None:
    for name in (CHANGES, "metrics.jsonl"):
        run = Path(shutil.copytree(finished.folder, tmp_path / name / "run"))
        (run / name).unlink(missing_ok=True)
        (run / name).mkdir()
        for arguments in (["optim.learning_rate=1e-3"], ["--list"]):
            answer = here("change", run, *arguments)
            assert answer.status == 2 and f"{run / name} cannot be read: Is a directory" in answer.err, answer


def test_what_is_in_force_from_now_on_is_in_the_order_of_steps(config: Path, tmp_path: Path) -> None:
    """Not in that in which it was asked for."""
    began, run = load(config, [f"run.folder={tmp_path / 'run'}"]), tmp_path / "run"
    run.mkdir()
    (later, sooner), key = ((4, 3e-3), (2, 2e-3)), "optim.learning_rate"
    changes = [
        Change(at=at, values={key: rate}, was={key: began.optim.learning_rate}, line=str(at))
        for at, rate in (later, sooner)
    ]
    write_decided(run, Decided(changes=tuple(changes)))
    for step, expected in ((0, [1e-2, 2e-3, 3e-3]), (2, [2e-3, 3e-3]), (3, [2e-3, 3e-3]), (4, [3e-3])):
        assert [each.optim.learning_rate for each in from_now_on(began, step)] == expected, step
