"""A change of a run's configuration in mid-run, and the configuration that is in force behind it. Pure.

    config = in_force(began, changes)        what the run began with, and each change after the other
    began = as_it_began(config, changes)     the way back

A change stands behind a step: step `at` is the last that is computed without it. A checkpoint knows the changes that
came before it, and its configuration is the one in force.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import gcd
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, field_validator

from colonnade.config.compare import may_change_on_resume, value_at
from colonnade.config.defaults import TomlTable, has, put
from colonnade.config.describe import all_keys, as_toml, section_of, short
from colonnade.config.load import build
from colonnade.config.problems import unknown_key, unknown_section
from colonnade.config.schema import Config
from colonnade.data.curriculum import Curriculum
from colonnade.data.datasets import TrainingDataset
from colonnade.errors import ColonnadeError, ConfigError, hidden
from colonnade.train.corpus import check_length, curriculum_of, position_at
from colonnade.train.rollback import Rollback

BATCH, BLEND = "train.global_batch_size", "data.blend"
PHASES = ("curriculum.tokens", "curriculum.seq_length", "curriculum.global_batch_size")
"""What a change of the batch changes besides: the batches before it become phases."""
USES = frozenset({"train.steps", BATCH})
"""What decides how much data a run uses up, of the keys that change."""


class Change(BaseModel):
    """Keys that get other values behind a step."""

    model_config = ConfigDict(frozen=True)

    at: Annotated[int, Field(ge=0)]
    """The last step without it."""
    values: dict[str, Any]
    was: dict[str, Any]
    """Of the same keys, and of those that follow: what the run began with; None: unset."""
    line: str
    """What the line that asked for it is known by."""
    by: str = ""
    reason: str = ""
    position: Annotated[int, Field(ge=0)] | None = None
    """In the data, where it came into force; None: it is still to come."""

    @field_validator("values")
    @classmethod
    def _may_change(cls, values: dict[str, Any]) -> dict[str, Any]:
        for name in values:
            if name not in all_keys() or not all_keys()[name].while_running:
                raise ValueError(f"{name} is not changed while a run goes on")
        return values

    @property
    def asked(self) -> str:
        """Who asked for it, and why."""
        return (f" by {self.by}" if self.by else "") + (f" ({self.reason})" if self.reason else "")

    def __str__(self) -> str:
        return ", ".join(f"{name} = {as_toml(value)}" for name, value in self.values.items())


def in_force(began: Config, changes: Sequence[Change]) -> Config:
    """The configuration behind these changes. ConfigError where they do not go together."""
    config = began
    for change in changes:
        config = _changed(config, change)
    return config


def behind(config: Config, changes: Sequence[Change]) -> Config:
    """What is in force behind these changes, of a configuration that may have some of them."""
    return in_force(as_it_began(config, changes), changes)


def as_it_began(config: Config, changes: Sequence[Change]) -> Config:
    """The configuration without any of these changes, of which it may have some."""
    was = {name: value for change in changes for name, value in change.was.items()}
    if not was:
        return config
    content = _content(config)
    for name, value in was.items():
        if value is None:
            content[section_of(name)].pop(short(name), None)
        else:
            put(content, {name: _named_alike(config, value) if name == BLEND else value})
    return build(content, [], source="the configuration without its changes")


def earlier_blends(began: Config, changes: Sequence[Change]) -> list[tuple[int, Mapping[str, float]]]:
    """Up to which position, in samples, the run had which numbers of data.blend, before those in force."""
    found: list[tuple[int, Mapping[str, float]]] = []
    config = began
    for change in changes:
        if BLEND in change.values and config.data.blend is not None:
            samples = _position(change) * _unit(config) // config.model.seq_length
            if samples > (found[-1][0] if found else 0):
                found.append((samples, config.data.blend))
        config = _changed(config, change)
    return found


class Expected(NamedTuple):
    """Where a run is to be expected: what is in force, after how many steps, and at which position in the data."""

    config: Config
    step: int = 0
    position: int = 0
    rollbacks: Sequence[Rollback] = ()
    """That the run returns by from there on, in their order."""

    def behind(self, change: Change) -> "Expected":
        """Behind the change that comes next. ConfigError where it cannot be."""
        position = self._position_at(change.at)
        config = _changed(self.config, change.model_copy(update={"position": position}))
        if "train.steps" in change.values and config.train.steps <= change.at:
            raise ConfigError(f"train.steps = {config.train.steps:,} would be over at step {change.at:,}.")
        return Expected(config, change.at, position, [each for each in self.rollbacks if each.to > change.at])

    def _position_at(self, step: int) -> int:
        """Returns behind that step included."""
        curriculum = curriculum_of(self.config)
        return position_at(curriculum, step, self.rollbacks, step=self.step, position=self.position)[0]

    def check_lasts(self, training: TrainingDataset, coming: Sequence[Change] = ()) -> None:
        """ConfigError where the data end before the run does, whichever of the changes to come are made."""
        step = max((each.to for each in self.rollbacks), default=self.step)
        position = self._position_at(step)
        try:
            check_length(self.config, training, curriculum_of(self.config), step=step, position=position)
        except ColonnadeError:
            if not self._can_last(training, coming):
                raise

    def check_leads_to(
        self, then: "Expected", coming: Sequence[Change], training: TrainingDataset, read: TrainingDataset
    ) -> None:
        """ConfigError where a change, behind which the run is `then` and reads `read`, asks for more data than there
        are, and the run could do without it. Changes to come count where the data do not last as it is.
        """
        as_is = self._lasts(training)
        if as_is or self._can_last(training, coming):
            then.check_lasts(read, () if as_is else coming)

    def _can_last(self, training: TrainingDataset, coming: Sequence[Change]) -> bool:
        """Whether the data last with some of the changes to come made, and the others not."""
        courses = [self]
        for change in coming:
            if USES.isdisjoint(change.values):
                continue
            made = []
            for each in courses:
                with suppress(ColonnadeError):
                    made.append(each.behind(change))
            if any(each._lasts(training) for each in made):
                return True
            courses = _sparing([*courses, *made], change.at)
        return False

    def _lasts(self, training: TrainingDataset) -> bool:
        try:
            self.check_lasts(training)
        except ColonnadeError:
            return False
        return True


def _sparing(courses: Sequence[Expected], step: int) -> list[Expected]:
    """Of courses up to a step those that none uses less than: if data last for any of all, then for one of these."""
    found = {
        (each.config.train.steps, each.config.train.global_batch_size, each._position_at(step)): each
        for each in courses
    }

    def is_needless(uses: tuple[int, ...]) -> bool:
        return any(
            other != uses and all(less <= more for less, more in zip(other, uses, strict=True)) for other in found
        )

    return [each for uses, each in found.items() if not is_needless(uses)]


def by_step(changes: Iterable[Change]) -> list[Change]:
    """Changes in the order in which they come into force."""
    return sorted(changes, key=lambda each: each.at)


class Ahead(NamedTuple):
    """What becomes of changes of a run."""

    stages: list[Expected]
    """Where the run is to be expected before them, and behind each that can be made."""
    refused: list[tuple[Change, str]]
    """The others, each with the reason."""

    @property
    def config(self) -> Config:
        """What is in force behind all of them."""
        return self.stages[-1].config


def ahead(
    start: Expected,
    changes: Iterable[Change],
    check: Callable[[Expected, Expected, Sequence[Change]], None] = lambda *_: None,
) -> Ahead:
    """What becomes of changes, each in its step: the run refuses what cannot be, and goes on. `check`: of a change the
    stages before and behind it, and those to come; raises ColonnadeError where there is more against it.
    """
    stages, refused, coming = [start], list[tuple[Change, str]](), by_step(changes)
    for number, change in enumerate(coming, 1):
        try:
            then = stages[-1].behind(change)
            check(stages[-1], then, coming[number:])
        except ColonnadeError as error:
            refused.append((change, str(error)))
        else:
            stages.append(then)
    return Ahead(stages, refused)


def asked_values(began: Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a change asks for. ConfigError with the reason of each key that may not change."""
    problems = [problem for name, value in values.items() for problem in _problems(began, name, value)]
    if problems:
        raise ConfigError("\n".join(problems))
    if not values:
        raise ConfigError("it names no key.")
    if BLEND in values:
        _check_blend(began, values[BLEND])
    return {name: hidden(value) for name, value in values.items()}


def was(began: Config, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a run began with, of the keys that a change of these changes."""
    names = [*values, *(PHASES if BATCH in values else ())]
    content = hidden(_content(began))
    return {name: content[section_of(name)][short(name)] if has(content, name) else None for name in names}


def _problems(began: Config, name: str, value: object) -> Iterator[str]:
    """Why a key may not change while the run goes on."""
    key = all_keys().get(name)
    if key is None:
        yield from _no_key(name, value)
        return
    if not key.while_running:
        yield f"{name} does not change while a run goes on: {_why_not(name)}"
    if name == BLEND and began.data.blend_by == "epochs":
        yield (
            f'{name} does not change with data.blend_by = "epochs": its numbers are how often each file is read in the '
            "whole run, of which a part has gone by."
        )
    if name == BLEND and (began.model.head == "preferences" or began.distillation.top_k is not None):
        yield f"{name} does not change where what a model thinks of the data was computed before the first step."
    if name in ("train.steps", BATCH) and began.distillation.top_k is not None:
        others = ", and start it with others" if name == "train.steps" else " and train another with that batch"
        yield f"{name} does not change in mid-run with distillation.top_k: stop the run{others}."
    passes_over = (name, value) == ("divergence.then", "roll_back") and began.divergence.skip_batches
    if passes_over and began.distillation.top_k is not None:
        yield (
            f'{name} does not become "roll_back" in mid-run with distillation.top_k: the teacher was asked about the '
            "samples that the run reads, and a rollback passes over some and reads others. Stop the run, and start it "
            "with divergence.skip_batches = false."
        )


def _no_key(name: str, value: object) -> Iterator[str]:
    """What a name is that is none of a key."""
    section, inner = section_of(name), [key for each, key in all_keys().items() if each.startswith(f"{name}.")]
    if inner:
        changing = [key.name for key in inner if key.while_running]
        asked = value if isinstance(value, dict) else {}
        if changing:
            example = next((each for each in changing if each.removeprefix(f"{name}.") in asked), changing[0])
            yield f"{name} is a section. Name each key whole, like {example}."
        else:
            yield f"{name} is a section, of which no key changes while a run goes on. Train another run with them."
    elif any(section_of(each) == section for each in all_keys()):
        yield unknown_key(section, short(name)).message
    else:
        found = unknown_section(section or name, {} if section else value, Config)
        yield from (problem.message for problem in found)


def _why_not(name: str) -> str:
    if may_change_on_resume(name):
        return "it is used where the run starts. Stop the run, and start it again with another value."
    if name.startswith("model."):
        return "it says what the model is. Train another in a run.folder of its own."
    return "steps behind it would not follow from those before it. Train another run in a run.folder of its own."


def _check_blend(began: Config, asked: object) -> None:
    """ConfigError where numbers are asked for that the run's files do not have."""
    if began.data.blend is None:
        raise ConfigError(f"{BLEND} does not change in a run on one file: it has data.train, and no blend.")
    known = hidden(began.data.blend)
    for name in hidden(asked) if isinstance(asked, dict) else ():
        if name not in known:
            raise ConfigError(
                f"{BLEND} has no {name}: its files are {', '.join(known)}, and only their numbers change."
            )


def _changed(config: Config, change: Change) -> Config:
    content = _content(config)
    put(
        content,
        {name: _named_alike(config, value) if name == BLEND else value for name, value in change.values.items()},
    )
    if BLEND in change.values and curriculum_of(config).phase(_position(change)).num_pieces > 1:
        raise ConfigError(
            f"{BLEND} changes at no step whose samples are cut in pieces: when [curriculum] is at its end."
        )
    if BATCH in change.values:
        content["curriculum"] = _phases(config, change)
    return build(content, [], source="the configuration")


def _phases(config: Config, change: Change) -> TomlTable:
    """[curriculum] with another batch behind a change; it takes the place of a last phase that has had no step yet."""
    section, position, batch = config.curriculum, _position(change), change.values[BATCH]
    tokens, lengths, batches = list(section.tokens), list(section.seq_length), list(section.global_batch_size)
    if not tokens:
        tokens, lengths, batches = [0], [config.model.seq_length], [config.train.global_batch_size]
    curriculum = Curriculum(tokens, lengths, batches)
    begin = curriculum.phases[-1].begin
    if position < begin:
        raise ConfigError(f"{BATCH} does not change before the last phase of [curriculum], which is its batch.")
    was_passed_over = curriculum.steps(change.at) != position  # then steps may have begun anywhere
    if position == begin or (not was_passed_over and curriculum.steps(change.at - 1) < begin):
        batches[-1] = batch
    else:
        tokens, lengths = [*tokens, position * _unit(config)], [*lengths, config.model.seq_length]
        batches = [*batches, batch]
    single = len(tokens) == 1
    return {} if single else {"tokens": tokens, "seq_length": lengths, "global_batch_size": batches}


def _unit(config: Config) -> int:
    """[tokens] Of a position."""
    return gcd(config.model.seq_length, *config.curriculum.seq_length)


def _position(change: Change) -> int:
    assert change.position is not None, "it is in force"
    return change.position


def _named_alike(config: Config, asked: Any) -> Any:
    """Numbers of files by the names that the configuration has for them, credentials included, beside the numbers of
    those that were not asked for.
    """
    if config.data.blend is None or not isinstance(asked, dict):
        return asked
    return {name: asked.get(hidden(name), number) for name, number in config.data.blend.items()}


def _content(config: Config) -> TomlTable:
    content: TomlTable = config.model_dump(exclude_none=True)
    return content


def conflicts(config: Config, changes: Sequence[Change]) -> Iterator[str]:
    """A line for each changed key to which the configuration gives a value that the run has never had."""
    for name in dict.fromkeys(name for change in changes for name in change.values):
        had = [change.was[name] for change in changes if name in change.was]
        for change in by_step(changes):
            if name in change.values:
                had.append({**had[-1], **change.values[name]} if name == BLEND else change.values[name])
        own = hidden(_content(config)).get(section_of(name), {}).get(short(name))
        if own not in had:
            each = ", ".join(dict.fromkeys(map(as_toml, had)))
            yield f"{name} = {as_toml(hidden(value_at(config, name)))}: the run has had {each}"
