"""Lines of changes.jsonl: what each is known by, and what comes of it."""

import json
import re
import shutil
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from colonnade.config.load import load, to_toml
from colonnade.config.schema import Config
from colonnade.errors import ConfigError, hidden
from colonnade.lock import Holder, locked
from colonnade.train import change, rollback
from colonnade.train.change import BLEND, Change, Expected, ahead, as_it_began, conflicts, earlier_blends, in_force
from colonnade.train.change_requests import (
    Decided,
    Line,
    Refusal,
    _check_not_ended_early,
    as_the_run_began,
    ask,
    decide,
    foreseen,
    from_now_on,
    lines_of,
    listed,
    read_decided,
    request_in,
    to_come,
    values_of,
    write_decided,
)
from colonnade.train.corpus import curriculum_of
from colonnade.train.rollback import Rollback
from colonnade.train.run_folder import CHANGES, DECIDED
from tests.commands import Answer, forked, here
from tests.disks import room_for
from tests.runs import Finished, metrics
from tests.tiny import TinyCorpus


def write(run: Path, *lines: str, end: str = "\n") -> None:
    (run / CHANGES).write_text("\n".join(lines) + end)


def rate(value: float) -> str:
    return json.dumps({"change": {"optim.learning_rate": value}})


def blended(config: Path, *files: str) -> None:
    """Give the configuration a blend of these files, a number of 1 each, in the place of its token file."""
    blend = ", ".join(f'"{file}" = 1.0' for file in files)
    config.write_text(re.sub('train = ".*"', f"blend = {{{blend}}}", config.read_text(), count=1))


def refused(began: Config, **request: Any) -> str:
    """Why a line is refused at a run that has done three steps."""
    (refusal,) = Decided().with_line(Line("a", json.dumps(request), is_whole=True), began, 3, []).refused
    return refusal.reason


def test_equal_lines_are_requests_of_their_own(tmp_path: Path, config: Path) -> None:
    """Who sets a value, another one, and the first one again has the first one."""
    write(tmp_path, rate(1e-3), rate(2e-3), rate(1e-3))
    decided, began = Decided(), load(config)
    for line in lines_of(tmp_path):
        assert line.known_as not in decided.known
        decided = decided.with_line(line, began, 0, [])
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
    (change,) = Decided().with_line(line, began, 3, []).changes
    now = in_force(began, [change.model_copy(update={"position": 12})])
    assert now.train.global_batch_size == 8 and now.curriculum != began.curriculum
    assert as_it_began(now, [change]) == began


def test_before_the_last_phase_of_a_curriculum_its_batch_does_not_change(config: Path) -> None:
    """Pieces of the first samples, four a sample, go on behind step 2: what is asked for there would come behind 4."""
    phases = ["curriculum.tokens=[0, 20]", "curriculum.seq_length=[4, 16]", "curriculum.global_batch_size=[4, 4]"]
    decided, began = Decided(), load(config, phases)
    for step in (2, 4):
        line = Line(str(step), json.dumps({"change": {"train.global_batch_size": 8}, "at": step}), is_whole=True)
        decided = decided.with_line(line, began, 0, [])
    (refusal,), (change,) = decided.refused, decided.changes
    assert refusal.line == "2" and change.at == 4
    assert "does not change before the last phase of [curriculum]" in refusal.reason


@pytest.mark.parametrize(("key", "value"), [("train.global_batch_size", 8), ("train.steps", 9)])
def test_what_a_teacher_was_asked_about_before_the_run_does_not_change(config: Path, key: str, value: int) -> None:
    """And the reason is told by the key that was asked for, not by those that stand for it."""
    began = load(config, ["distillation.teacher=t", "distillation.top_k=4"])
    decided = Decided().with_line(Line("a", json.dumps({"change": {key: value}}), is_whole=True), began, 3, [])
    (refusal,) = decided.refused
    assert refusal.reason.startswith(f"{key} does not change in mid-run with distillation.top_k: stop the run"), refusal
    assert "curriculum" not in refusal.reason and not decided.changes


@pytest.mark.parametrize(
    ("then", "more", "is_refused"),
    [
        ("roll_back", (), True),
        ("roll_back", ("divergence.skip_batches=false", "divergence.rewarm_steps=2"), False),
        ("stop", (), False),
    ],
)
def test_a_run_does_not_begin_to_pass_over_what_a_teacher_was_asked_about(
    then: str, more: tuple[str, ...], is_refused: bool, config: Path
) -> None:
    asked = ("distillation.teacher=t", "distillation.top_k=4", "checkpoint.every=1", "checkpoint.keep=99", *more)
    line = Line("a", json.dumps({"change": {"divergence.then": then}}), is_whole=True)
    decided = Decided().with_line(line, load(config, asked), 3, [])
    said = (
        'divergence.then does not become "roll_back" in mid-run with distillation.top_k: the teacher was asked about '
        "the samples that the run reads, and a rollback passes over some and reads others. Stop the run, and start it "
        "with divergence.skip_batches = false."
    )
    assert [each.reason for each in decided.refused] == ([said] if is_refused else [])


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
    for named in (hidden(url), url):
        line = Line("a", json.dumps({"change": {BLEND: {named: 2.0}}}), is_whole=True)
        (change,) = Decided().with_line(line, began, 3, []).changes
        assert change.values == {BLEND: {hidden(url): 2.0}}, "nor is it written down with them"
    now = in_force(began, [change.model_copy(update={"position": 12})])
    assert not list(conflicts(now, [change]))
    assert now.data.blend == {str(corpus.prefix): 1.0, url: 2.0} and "s3cr3t" not in change.model_dump_json()
    assert as_it_began(now, [change]) == began


def test_a_line_names_a_file_of_the_blend_as_the_command_does(config: Path) -> None:
    config.write_text(re.sub('train = ".*"', 'blend = {"data/a" = 0.5, b = 0.5}', config.read_text(), count=1))
    began = load(config, ["train.steps=100"])
    for asked in ({f"{BLEND}.data/a": 0.2, "train.steps": 120}, {BLEND: {"data/a": 0.2}, "train.steps": 120}):
        (change,) = Decided().with_line(Line("a", json.dumps({"change": asked}), is_whole=True), began, 3, []).changes
        assert change.values == {BLEND: {"data/a": 0.2}, "train.steps": 120}


@pytest.mark.parametrize("first", [20, 40])
def test_a_file_that_a_change_does_not_name_keeps_the_number_of_an_earlier_one(config: Path, first: int) -> None:
    """Earlier by its step, in whichever order they were asked for; and the run may be started with each mixture."""
    config.write_text(re.sub('train = ".*"', "blend = {a = 0.5, b = 0.25, c = 0.25}", config.read_text(), count=1))
    began, decided = load(config, ["train.steps=100"]), Decided()
    for number, asked, at in ((1, {"a": 0.1}, first), (2, {"b": 0.8}, 60 - first)):
        line = Line(str(number), json.dumps({"change": {BLEND: asked}, "at": at}), is_whole=True)
        decided = decided.with_line(line, began, 0, [])
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
        ('{"change": {"checkpoint.every": 5}, "reason": "\\udfff"}', "it has half of a character"),
        ('{"change": {"train": {"steps": 60}}}', "train is a section. Name each key whole, like train.steps."),
        ('{"change": {"model.rotary": 3}}', "model.rotary is a section, of which no key changes while a run"),
        ('{"change": {"model": {"rotary": {"base": 2}}}}', "model is a section, of which no key changes while a run"),
        ('{"change": {"train": {"": 1}}}', "train is a section. Name each key whole, like train.steps."),
        ('{"change": {"train": 60}}', "train is a section. Name each key whole, like train.steps."),
        ('{"change": {"data": {"seed": 1}}}', "data is a section. Name each key whole, like data.blend."),
        ('{"change": {"steps": 60}}', "steps = 60 stands outside of any section. Write it as train.steps."),
        ('{"change": {"trian": {"steps": 60}}}', "[trian] is not a section. Did you mean [train]?"),
        ('{"change": {"trian.steps": 60}}', "[trian] is not a section. Did you mean [train]?"),
        ('{"change": {"data.blend": {"a": 1}, "data.blend.a": 2}}', "data.blend.a has two values"),
        ('{"change": {}}', "it names no key"),
        ('{"change": {"checkpoint.every": 5}, "when": 4}', "it has 'when'; a line has change, at, by, reason, time."),
        ('{"change": {"checkpoint.every": 5}, "at": 2}', "step 2 is over: the run has done 3"),
        ('{"change": {"model.num_layers": 3}}', "it says what the model is. Train another in a run.folder of its own"),
        ('{"change": {"checkpoint.every": null}}', "checkpoint.every = (unset) is no value, where a whole number of"),
    ],
)
def test_a_line_that_says_two_things_or_nothing_is_refused(config: Path, text: str, said: str) -> None:
    (refusal,) = Decided().with_line(Line("a", text, is_whole=True), load(config), 3, []).refused
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
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    write(run, rate(1e-3), rate(2e-3), end="")
    ask(run, {"change": {"optim.learning_rate": 3e-3}})
    ask(run, {"change": {"optim.learning_rate": 4e-3}})
    assert [line.is_whole for line in lines_of(run)] == [True] * 4
    assert [line.text for line in lines_of(run)] == [rate(value) for value in (1e-3, 2e-3, 3e-3, 4e-3)]


def test_of_a_request_for_which_the_disk_has_no_room_nothing_stays(finished: Finished, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    with room_for(30), pytest.raises(ConfigError) as told:
        ask(run, json.loads(rate(1e-3)))
    assert str(told.value) == (
        f"{run / CHANGES} cannot be written: File too large. Fix that, and ask again, unless others have asked at the "
        f"same moment and `colonnade change {run} --list` has it."
    )
    assert (run / CHANGES).read_bytes() == b""
    ask(run, json.loads(rate(1e-3)))
    assert [line.text for line in lines_of(run)] == [rate(1e-3)]


def test_a_run_that_has_ended_is_prolonged_by_a_change_of_its_steps(finished: Finished, tmp_path: Path) -> None:
    """As often as one likes: once the key has changed, no value that the run has not had may be set at its start."""
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    for before, steps in ((6, 7), (7, 8)):
        for refused in (["optim.learning_rate=1e-3"], [f"train.steps={steps + 9}", "--at", before + 1]):
            answer = here("change", run, *refused)
            assert answer.status == 2 and f"the run ends with step {before} (train.steps)" in answer.err, answer
            assert "Raise train.steps first" in answer.err
        answer = here("change", run, f"train.steps={before}")
        assert answer.status == 2 and f"train.steps = {before} would be over at step {before}" in answer.err, answer
        assert here("change", run, f"train.steps={steps}").status == 0
        assert here("change", run, "optim.learning_rate=1e-3", "--at", before).status == 0, "behind the one that waits"
        answer = forked("train", finished.config, f"run.folder={run}")
        assert answer.status == 0 and metrics(run)[-1]["step"] == steps, answer


def test_a_run_whose_steps_were_set_below_what_it_had_done_is_prolonged_too(finished: Finished, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    words = ("train", finished.config, f"run.folder={run}", "train.steps=4")
    assert forked(*words).status == 0
    for values, why in (
        (
            ["train.patience=4"],
            "the run ends with step 6 (train.steps): nothing comes behind step 6. Raise train.steps "
            "first, or in the same change.",
        ),
        (
            ["train.steps=9", "--at=7"],
            "the run ends with step 6 (train.steps): nothing comes behind step 7. Raise train.steps first.",
        ),
        (["train.steps=5"], "train.steps = 5 would be over at step 6."),
    ):
        assert here("change", run, *values) == Answer(2, "", f"colonnade: {run} is not changed: {why}\n")
    assert here("change", run, "train.steps=7", "train.patience=4").status == 0
    assert forked(*words).status == 0 and metrics(run)[-1]["step"] == 7


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
    for step, rates in ((0, [1e-2, 2e-3, 3e-3]), (2, [2e-3, 3e-3]), (3, [2e-3, 3e-3]), (4, [3e-3])):
        assert [each.optim.learning_rate for each in from_now_on(began, step)] == rates, step


def test_a_line_of_brackets_alone_is_no_object() -> None:
    """However deep: it does not end the run."""
    for text in ("[" * 100_000, '{"change":' * 100_000):
        with pytest.raises(ConfigError, match="it is no JSON object"):
            request_in(text)


def test_what_keeps_a_blend_from_changing_is_told(config: Path) -> None:
    blended(config, "a", "b")
    began, asked = load(config), {BLEND: {"a": 0.5}}
    changed = Decided().with_line(Line("a", json.dumps({"change": asked}), is_whole=True), began, 3, [])
    assert changed.changes and not changed.refused

    def having(section: str, **values: Any) -> Config:
        return began.model_copy(update={section: getattr(began, section).model_copy(update=values)})

    assert refused(began, change={BLEND: {"c": 1}}) == (
        "data.blend has no c: its files are a, b, and only their numbers change."
    )
    assert "does not change with data.blend_by" in refused(having("data", blend_by="epochs"), change=asked)
    for other in (having("model", head="preferences"), having("distillation", top_k=4)):
        assert "was computed before the first step" in refused(other, change=asked)
    one_file = having("data", blend=None, train="a")
    assert "a run on one file: it has data.train, and no blend" in refused(one_file, change=asked)


def test_a_blend_does_not_change_between_the_pieces_of_its_samples(config: Path) -> None:
    """Sequences of a quarter go on up to step 4."""
    blended(config, "a", "b")
    phases = ["curriculum.tokens=[0, 64]", "curriculum.seq_length=[4, 16]", "curriculum.global_batch_size=[4, 4]"]
    began, asked = load(config, phases), {BLEND: {"a": 0.5}}
    assert "at no step whose samples are cut in pieces" in refused(began, change=asked, at=3)
    assert (
        not Decided().with_line(Line("a", json.dumps({"change": asked, "at": 4}), is_whole=True), began, 3, []).refused
    )


def test_each_blend_of_before_is_told_up_to_where_it_was_read(config: Path) -> None:
    """One that held from the first sample on stands in the place of what the run began with."""
    blended(config, "a", "b")
    began, was = load(config), {BLEND: {"a": 1.0, "b": 1.0}}

    def at(position: int, number: float) -> Change:
        return Change(at=position // 4, values={BLEND: {"a": number}}, was=was, line=str(position), position=position)

    found = earlier_blends(began, [at(8, 2.0), at(20, 3.0)])
    assert found == [(8, {"a": 1.0, "b": 1.0}), (20, {"a": 2.0, "b": 1.0})]
    assert earlier_blends(began, [at(0, 2.0), at(20, 3.0)]) == [(20, {"a": 2.0, "b": 1.0})]
    other = Change(at=3, values={"train.log_every": 3}, was={"train.log_every": 1}, line="other", position=12)
    assert earlier_blends(began, [other]) == []


def batch(at: int, size: int) -> Change:
    return Change(at=at, values={"train.global_batch_size": size}, was={}, line=f"{at} {size}")


def test_batches_that_change_one_after_another_are_phases_where_they_come(config: Path) -> None:
    """Two steps of four samples of 16 tokens, three of eight, then six a step."""
    began = load(config)
    found = ahead(Expected(began), [batch(5, 6), batch(2, 8)]).config
    assert found.curriculum.tokens == (0, 2 * 4 * 16, (2 * 4 + 3 * 8) * 16)
    assert found.curriculum.global_batch_size == (4, 8, 6) and found.curriculum.seq_length == (16, 16, 16)
    again = ahead(Expected(began), [batch(2, 8), batch(2, 6)]).config
    assert (again.curriculum.tokens, again.curriculum.global_batch_size) == ((0, 2 * 4 * 16), (4, 6)), "at one step"
    at_once = ahead(Expected(began), [batch(0, 8)]).config
    assert at_once.train.global_batch_size == 8 and at_once.curriculum == began.curriculum


def test_a_return_to_the_step_of_a_change_passes_over_its_batches_once(config: Path) -> None:
    """Before the change: of what comes behind it nothing is missed."""
    start = Expected(load(config), rollbacks=[Rollback(to=2, skip=2, passed=8)])
    found = ahead(start, [batch(2, 8), batch(5, 6)])
    assert [each.position for each in found.stages] == [0, 2 * 4 + 8, 2 * 4 + 8 + 3 * 8]
    assert found.config.curriculum.tokens == (0, 16 * 16, 40 * 16)


def test_behind_a_curriculum_another_batch_begins_at_the_tokens_of_its_step(config: Path) -> None:
    """Positions count pieces of four tokens."""
    phases = ["curriculum.tokens=[0, 64]", "curriculum.seq_length=[4, 16]", "curriculum.global_batch_size=[4, 4]"]
    found = ahead(Expected(load(config, phases)), [batch(6, 8)]).config
    assert found.curriculum.tokens == (0, 64, 4 * 4 * 4 + 2 * 4 * 16)
    assert found.curriculum.global_batch_size == (4, 4, 8)


def test_another_batch_takes_the_place_of_a_phase_whose_first_step_it_is(config: Path) -> None:
    """That begins in the midst of the step before. As in runs of before, whose configuration stays what it was."""
    phases = ["curriculum.tokens=[0, 150]", "curriculum.seq_length=[16, 16]", "curriculum.global_batch_size=[4, 6]"]
    began = load(config, [*phases, "train.global_batch_size=6"])
    found = ahead(Expected(began), [batch(3, 10), batch(3, 8)]).config.curriculum
    assert (found.tokens, found.global_batch_size) == ((0, 150), (4, 8))
    behind_a_step = ahead(Expected(began), [batch(4, 8)]).config.curriculum
    assert (behind_a_step.tokens, behind_a_step.global_batch_size) == ((0, 150, (12 + 6) * 16), (4, 6, 8))
    behind_others = in_force(began, [batch(2, 8).model_copy(update={"position": 12})]).curriculum
    assert (behind_others.tokens, behind_others.global_batch_size) == ((0, 150, 12 * 16), (4, 6, 8)), "passed over"


def growing(finished: Finished, tmp_path: Path) -> tuple[Path, Config]:
    """A copy of a run whose batch grows behind 25 samples, and its configuration."""
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    phases = ["curriculum.tokens=[0, 400]", "curriculum.seq_length=[16, 16]", "curriculum.global_batch_size=[4, 8]"]
    began = load(run / "config.toml", [*phases, "train.global_batch_size=8", f"run.folder={run}"])
    (run / "config.toml").write_text(to_toml(began))
    return run, began


def test_batches_that_were_passed_over_count_for_which_phase_a_batch_changes_in(
    finished: Finished, tmp_path: Path
) -> None:
    """Two steps of four samples, ten passed over, and one more are behind the 25 samples of the first phase."""
    run, began = growing(finished, tmp_path)
    asked = {"change": {"train.global_batch_size": 6}, "at": 7}
    line = Line("a", json.dumps(asked | {"at": 3}), is_whole=True)
    before = decide(line, began, Decided(), 2, [Rollback(to=2, skip=10), Rollback(to=6, skip=1)])
    assert before.at == 3
    with pytest.raises(ConfigError, match="before the last phase"):
        decide(line, began, Decided(), 2, [])
    with pytest.raises(ConfigError, match="does not change before the last phase"):
        ask(run, asked | {"at": 6})
    rollback.write(run, [Rollback(to=6, skip=10)])
    ask(run, asked | {"at": 6, "change": asked["change"] | {"train.steps": 9}})
    assert [each.train.global_batch_size for each in from_now_on(began, 6)] == [6]


def test_a_change_that_a_rollback_has_made_impossible_keeps_no_other_from_being_made(
    finished: Finished, tmp_path: Path
) -> None:
    """It was decided when more was passed over. The run refuses it in its step, and makes what comes behind it."""
    run, began = growing(finished, tmp_path)
    longer = Change(at=6, values={"train.steps": 9}, was={"train.steps": 6}, line="longer")
    write_decided(run, Decided(changes=(batch(3, 6), longer)))
    (now,) = from_now_on(began, 6)
    assert (now.train.steps, now.train.global_batch_size) == (9, 8)
    ask(run, {"change": {"optim.learning_rate": 5e-3}, "at": 7})
    assert foreseen(began, 6)[-1].values == {"optim.learning_rate": 5e-3}
    with pytest.raises(ConfigError, match="does not change before the last phase"):
        ask(run, {"change": {"train.global_batch_size": 6}, "at": 6})


def test_a_key_that_the_run_began_without_is_unset_before_its_change(config: Path) -> None:
    began = load(config)
    line = Line("a", json.dumps({"change": {"optim.min_learning_rate": 1e-4}}), is_whole=True)
    (change,) = Decided().with_line(line, began, 3, []).changes
    now = in_force(began, [change.model_copy(update={"position": 12})])
    assert change.was == {"optim.min_learning_rate": None} and now.optim.min_learning_rate == 1e-4
    assert as_it_began(now, [change]) == began


SECRET = "s3://me:s3cr3t@bucket/x"


def test_who_asked_and_why_is_kept_without_credentials(finished: Finished, tmp_path: Path) -> None:
    """Of a line that is refused too, and of the line that the command writes."""
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    request = {"change": {"train.steps": 9}, "by": f"Ada of {SECRET}", "reason": f"as in {SECRET}"}
    ask(run, request)
    (line,) = lines_of(run)
    (change,) = Decided().with_line(line._replace(text=json.dumps(request)), load(finished.config), 6, []).changes
    assert (change.by, change.reason) == ("Ada of s3://…@bucket/x", "as in s3://…@bucket/x")
    assert change.asked == " by Ada of s3://…@bucket/x (as in s3://…@bucket/x)"
    assert change.model_copy(update={"by": ""}).asked == " (as in s3://…@bucket/x)"
    late = line._replace(text=json.dumps({**request, "at": 1}))
    (refusal,) = Decided().with_line(late, load(finished.config), 6, []).refused
    assert "s3cr3t" not in line.text + refusal.model_dump_json() and "step 1 is over" in refusal.reason


def test_what_came_of_each_line_is_listed_in_their_order(finished: Finished, tmp_path: Path) -> None:
    """The run has ended with step 6: a change behind it is still to come."""
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    assert listed(run) == [f"Nobody has asked {run} to change."]
    late = json.dumps({"change": {"train.seed": 3}, "reason": SECRET})
    write(run, rate(1e-3), late, rate(2e-3), late)
    first, second, third, _ = lines_of(run)
    was, values = {"optim.learning_rate": 1e-2}, {"optim.learning_rate": 2e-3}
    changes = (
        Change(at=6, values=values, was=was, line=third.known_as, by="Ada"),
        Change(at=5, values={"optim.learning_rate": 1e-3}, was=was, line=first.known_as),
    )
    refusal = Refusal(line=second.known_as, text="", reason="it does not change.")
    write_decided(run, Decided(changes=changes, refused=(refusal,)))
    hidden_late = late.replace("me:s3cr3t", "…")
    assert listed(run) == [
        "changed behind step 5: optim.learning_rate = 0.001",
        f"refused: {hidden_late}: it does not change.",
        "changes behind step 6: optim.learning_rate = 0.002 by Ada",
        f"not seen yet: {hidden_late}",
    ]
    (run / DECIDED).write_text("{")
    with pytest.raises(ConfigError, match=rf"{DECIDED} cannot be read \(ValidationError\)"):
        listed(run)


def test_a_folder_with_a_configuration_alone_is_none_of_a_run(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not the folder of a run: it has no config\.toml and checkpoints/"):
        listed(config.parent)
    (config.parent / "checkpoints").mkdir()
    assert listed(config.parent) == [f"Nobody has asked {config.parent} to change."]
    config.unlink()
    with pytest.raises(ConfigError, match=r"is not the folder of a run: it has no config\.toml and checkpoints/"):
        listed(config.parent)


def test_a_run_that_its_patience_has_ended_goes_on_with_more_of_it(config: Path, tmp_path: Path) -> None:
    """Two evaluations behind the best, at step 4; a change behind a later step comes too late."""
    losses = "".join(f'{{"step": {n}, "validation_loss": {loss}}}\n' for n, loss in ((1, 1.0), (2, 2.0), (4, 1.5)))
    (tmp_path / "metrics.jsonl").write_text(losses)

    def more(at: int, patience: int = 3) -> Change:
        return Change(at=at, values={"train.patience": patience}, was={"train.patience": 2}, line="1")

    for given, changes, goes_on in (
        (0, [], True),
        (1, [], False),
        (2, [], False),
        (3, [], True),
        (2, [more(4)], True),
        (2, [more(5)], False),
        (2, [more(4, 2)], False),
    ):
        began = load(config, [f"train.patience={given}", "train.steps=9"])
        if goes_on:
            _check_not_ended_early(tmp_path, Expected(began), changes, 4)
        else:
            with pytest.raises(ConfigError, match=r"it has ended with step 4: .*Raise train\.patience above 2 first"):
                _check_not_ended_early(tmp_path, Expected(began), changes, 4)


def test_what_is_asked_of_a_run_that_its_patience_has_ended_is_refused(finished: Finished, tmp_path: Path) -> None:
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    (run / "config.toml").write_text((run / "config.toml").read_text().replace("\npatience = 0\n", "\npatience = 1\n"))
    (run / "metrics.jsonl").write_text(
        '{"step": 3, "validation_loss": 1.0}\n{"step": 4, "validation_loss": 2.0, "loss": 2.0}\n'
    )
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    assert load(run / "config.toml").train.patience == 1
    with pytest.raises(ConfigError, match="is not changed: it has ended with step 4"):
        ask(run, {"change": {"optim.learning_rate": 1e-3}})
    assert not (run / CHANGES).exists()
    ask(run, {"change": {"optim.learning_rate": 1e-3, "train.patience": 2}})
    assert len(lines_of(run)) == 1


def test_a_change_is_to_come_until_it_is_in_force_or_its_step_is_over() -> None:
    changes = {
        line: Change(at=at, values={"train.log_every": 3}, was={}, line=line)
        for line, at in (("late", 9), ("over", 2), ("done", 5), ("now", 5), ("next", 6))
    }
    found = to_come(Decided(changes=tuple(changes.values())), [changes["done"]], 5)
    assert [change.line for change in found] == ["now", "next", "late"]


def test_what_is_decided_is_foreseen_though_new_lines_cannot_be_read(config: Path, tmp_path: Path) -> None:
    began, run = load(config), tmp_path / "run"
    (run / CHANGES).mkdir(parents=True)
    change = Change(at=4, values={"train.log_every": 3}, was={"train.log_every": 1}, line="1")
    write_decided(run, Decided(changes=(change,)))
    assert foreseen(began, 0, run) == [change]
    (run / DECIDED).write_text("{")
    assert foreseen(began, 0, run) == []


def test_a_run_may_be_started_with_any_value_that_it_has_had(config: Path, tmp_path: Path) -> None:
    """As the record says that is named, here of another folder than the run's."""
    record = tmp_path / "record"
    record.mkdir()
    change = Change(at=4, values={"optim.learning_rate": 3e-3}, was={"optim.learning_rate": 1e-2}, line="1")
    write_decided(record, Decided(changes=(change,)))
    for value in (1e-2, 3e-3):
        assert as_the_run_began(load(config, [f"optim.learning_rate={value}"]), record) == load(config)
    other = load(config, ["optim.learning_rate=0.5"])
    with pytest.raises(ConfigError, match=r"optim\.learning_rate = 0\.5: the run has had 0\.01, 0\.003"):
        as_the_run_began(other, record)
    assert as_the_run_began(other) == other


def test_a_name_of_a_file_and_a_value_may_have_signs_of_equality() -> None:
    assert values_of([f"{BLEND}.a=b=0.5", f"{BLEND}.c.d=2"]) == {BLEND: {"a=b": 0.5, "c.d": 2}}
    assert values_of(["optim.decay = a=b"]) == {"optim.decay": "a=b"}


def test_bytes_that_are_no_text_spoil_their_line_alone(tmp_path: Path) -> None:
    (tmp_path / CHANGES).write_bytes(b"\xff\n" + rate(1e-3).encode() + b"\n")
    assert [line.text for line in lines_of(tmp_path)] == ["\ufffd", rate(1e-3)]


def test_decisions_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_decided(tmp_path) == Decided()
    change = Change(at=4, values={BLEND: {"a": 1.0}}, was={BLEND: None}, line="1", by="Ada", reason="why", position=9)
    decided = Decided(changes=(change,), refused=(Refusal(line="2", text="[1]", reason="no"),))
    write_decided(tmp_path, decided)
    assert read_decided(tmp_path) == decided
    text = (tmp_path / DECIDED).read_text()
    (tmp_path / DECIDED).write_text(text.replace(BLEND, "train.seed"))
    with pytest.raises(ConfigError, match=rf"{DECIDED} cannot be read"):  # no run has decided that
        read_decided(tmp_path)


def test_a_change_is_held_against_those_before_it(config: Path) -> None:
    """Each of these goes together with what the run began with."""
    decided, began = Decided(), load(config)
    for number, values in enumerate(({"optim.learning_rate": 1e-3}, {"optim.min_learning_rate": 5e-3})):
        line = Line(str(number), json.dumps({"change": values, "at": 4 + number}), is_whole=True)
        decided = decided.with_line(line, began, 3, [])
    (change,), (refusal,) = decided.changes, decided.refused
    assert change.line == "0" and "is above optim.learning_rate = 0.001" in refusal.reason


def test_what_a_run_that_stands_still_will_do_again_is_not_over(finished: Finished, tmp_path: Path) -> None:
    """It was killed, or has diverged, behind step 6, and goes on from step 4; one at work may have saved meanwhile."""
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    write(run, rate(1e-3))
    (line,) = lines_of(run)
    done = Change(at=5, values={"optim.learning_rate": 1e-3}, was={"optim.learning_rate": 1e-2}, line=line.known_as)
    write_decided(run, Decided(changes=(done,)))
    request = {"change": {"optim.learning_rate": 2e-3}, "at": 5}
    with locked(run, "colonnade train"), pytest.raises(ConfigError, match="step 5 is over: the run has done 6"):
        ask(run, request)
    with pytest.raises(ConfigError, match="step 3 is over: the run has done 4"):
        ask(run, {**request, "at": 3})
    ask(run, request)
    assert [json.loads(each.text)["change"] for each in lines_of(run)][1:] == [request["change"]]
    assert listed(run)[0] == "changes behind step 5: optim.learning_rate = 0.001"
    for host in (gethostname(), "elsewhere"):
        (run / "lock").write_text(json.dumps(Holder("colonnade train", host, 2**22 + 1, "", "")._asdict()))
        ask(run, request)


def test_what_a_checkpoint_has_is_over_though_its_lines_are_lost(finished: Finished, tmp_path: Path) -> None:
    """The run goes on from it."""
    run = Path(shutil.copytree(finished.folder, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints" / "step_00000006")
    (run / "metrics.jsonl").unlink()
    with pytest.raises(ConfigError, match="step 3 is over: the run has done 4"):
        ask(run, {**json.loads(rate(1e-3)), "at": 3})
