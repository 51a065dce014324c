"""rollbacks.json, and a return by hand: what is read, measured and taken away."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.config.load import load, to_toml
from colonnade.config.schema import Config
from colonnade.errors import CheckpointError, ConfigError, DiskError
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.train import change, rollbacks
from colonnade.train.change import Change
from colonnade.train.change_requests import Decided, write_decided
from colonnade.train.corpus import curriculum_of
from colonnade.train.divergence import BY_HAND
from colonnade.train.monitor import write_event
from colonnade.train.rollback import Rollback, has_left
from colonnade.train.rollback_options import RollbackOptions
from colonnade.train.run_folder import CHANGES, COPIES, DECIDED, ROLLBACKS
from tests.distributed import run_on_ranks
from tests.runs import events, metrics, saved_steps
from tests.told import Told


@pytest.fixture
def run(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run with checkpoints of steps 2, 4 and 6, of which no more is there than metadata of four samples
    a step.
    """

    def metadata_of(path: Path, manifest: object) -> Any:
        if (path / "damaged").exists():
            raise CheckpointError(f"{path} is damaged")
        step = int(path.name.removeprefix("step_"))
        return SimpleNamespace(step=step, samples=4 * step, rollbacks=[], changes=[])

    for read in ("read_manifest", "looked_at", "verify"):
        monkeypatch.setattr(rollbacks, read, lambda path: None)
    monkeypatch.setattr(rollbacks, "metadata_of", metadata_of)
    for step in (2, 4, 6):
        (tmp_path / "run" / "checkpoints" / f"step_0000000{step}").mkdir(parents=True)
    (tmp_path / "run" / "config.toml").write_text(to_toml(load(config)))
    return tmp_path / "run"


def test_returns_that_a_run_was_killed_too_early_to_tell_are_told_by_the_next_start(run: Path) -> None:
    """Those of before there were names may have been told."""
    told: Any = Told()
    known, untold, nameless = Rollback(to=2, id="known"), Rollback(to=4, skip=1, id="untold"), Rollback(to=4)
    write_event(run, "rolled back", **known.model_dump())
    for made in ([known, untold, nameless], []):
        state: Any = SimpleNamespace(rollbacks=made, ownership=SimpleNamespace(mesh=Mesh()))
        rollbacks.tell_untold(state, run, told)
    assert told.events == [("rolled back", untold.model_dump())]


@pytest.mark.parametrize("damage", ["folder", "no list", "no rollback", "no text"])
def test_a_list_of_rollbacks_that_cannot_be_read_is_one_message(run: Path, damage: str) -> None:
    """Nobody knows then which batches are passed over."""
    file = run / ROLLBACKS
    content = {"no list": b"{}", "no rollback": b'[{"too": 4}]', "no text": b"\xff"}
    file.mkdir() if damage == "folder" else file.write_bytes(content[damage])
    with pytest.raises(ConfigError, match=rf"{ROLLBACKS} cannot be read: \w+Error\. It says which batches"):
        rollbacks.read(run)


def test_a_return_by_hand_leaves_no_copy_in_memory_that_counts(run: Path) -> None:
    (run / COPIES).write_text("the start before")
    _, gone = rollbacks.by_hand(run, 4, RollbackOptions())
    assert not (run / COPIES).exists() and gone == [6] and saved_steps(run) == [2, 4]


def test_a_return_by_hand_says_what_was_asked_and_undoes_those_to_its_step_or_later(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of later steps are set aside."""
    known = [Rollback(to=to, skip=1, id=str(to)) for to in (2, 4, 6)]
    rollbacks.write(run, known)
    monkeypatch.setattr(rollbacks, "metadata_of", lambda *_: SimpleNamespace(rollbacks=known[:1]))
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 7)))
    asked = RollbackOptions(rate_factor=0.5, rate_steps=3, rewarm=5)
    rollback, gone = rollbacks.by_hand(run, 4, asked)
    wanted = {"to": 4, "rate_factor": 0.5, "rate_until": 7, "rewarm_steps": 5, "reason": BY_HAND, "id": rollback.id}
    assert rollback == Rollback(**wanted) and rollback.id and gone == [6]
    assert rollbacks.read(run) == [known[0], rollback]
    assert [line["step"] for line in metrics(run)] == [1, 2, 3, 4]
    assert (run / "undone.jsonl").read_text() == '{"step": 5}\n{"step": 6}\n'
    (told,) = events(run)
    assert told["event"] == "rolled back" and told.items() >= rollback.model_dump().items()


def test_a_return_to_a_checkpoint_of_a_course_that_was_left_goes_on_with_that(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it was put back. Else all that is saved behind it would look as if the run had left it. One of the
    other course that is deleted with it has nothing to say.
    """
    first, _ = rollbacks.by_hand(run, 4, RollbackOptions())
    metadata_of = rollbacks.metadata_of

    def later(path: Path, manifest: Any) -> Any:
        found: Any = metadata_of(path, manifest)
        found.rollbacks = [first] if found.step == 8 else []
        return found

    monkeypatch.setattr(rollbacks, "metadata_of", later)
    for step in (6, 8):
        (run / "checkpoints" / f"step_0000000{step}").mkdir()
    second, gone = rollbacks.by_hand(run, 6, RollbackOptions())
    assert rollbacks.read(run) == [second] and first.to < second.to and gone == [8]
    assert not has_left(rollbacks.read(run), 8, [second])


def test_such_a_return_passes_over_no_batches_of_the_rollback_that_had_left_it(run: Path) -> None:
    """They stand before its step: behind it batches of 10 come."""
    batch = "train.global_batch_size"
    write_decided(run, Decided(changes=(Change(at=6, values={batch: 10}, was={batch: 4}, line="1"),)))
    first, _ = rollbacks.by_hand(run, 4, RollbackOptions(skip=3))
    (run / "checkpoints" / "step_00000006").mkdir()
    second, _ = rollbacks.by_hand(run, 6, RollbackOptions(skip=2))
    assert (first.batches, second.batches) == ([[2, 4], [1, 10]], [[2, 10]])


def test_a_return_passes_over_batches_though_later_checkpoints_are_damaged(run: Path) -> None:
    """What the newest that can be read says is how the run went on."""
    for step in (4, 6):
        (run / "checkpoints" / f"step_0000000{step}" / "damaged").touch()
    rollback, _ = rollbacks.by_hand(run, 2, RollbackOptions(skip=2))
    assert rollback.passed == 2 * 4 and saved_steps(run) == [2]


def test_a_return_passes_over_batches_though_a_change_that_is_to_come_cannot_be(run: Path) -> None:
    """The run would refuse it, and makes the one behind it."""

    def change(at: int, values: dict[str, int]) -> Change:
        return Change(at=at, values=values, was=dict.fromkeys(values, 4), line=f"{at} {values}")

    impossible, possible = change(6, {"train.steps": 6}), change(6, {"train.global_batch_size": 8})
    write_decided(run, Decided(changes=(impossible, possible)))
    rollback, _ = rollbacks.by_hand(run, 6, RollbackOptions(skip=2))
    assert rollback.passed == 2 * 8


def test_a_return_that_no_checkpoint_knows_yet_counts_for_where_changes_come_behind_it(run: Path) -> None:
    """It passes over three batches of 4; two more of 4 are trained behind it, and then come batches of 8."""
    rollbacks.write(run, [Rollback(to=6, skip=3, passed=3 * 4, id="one")])
    batch = "train.global_batch_size"
    write_decided(run, Decided(changes=(Change(at=8, values={batch: 8}, was={batch: 4}, line="1"),)))
    rollback, _ = rollbacks.by_hand(run, 6, RollbackOptions(skip=6))
    assert rollback.passed == (3 + 2) * 4 + 8


@pytest.mark.parametrize("skip", [1, 3, 4, 5])
def test_a_second_return_takes_the_sizes_of_batches_that_the_first_has_passed_over(run: Path, skip: int) -> None:
    """Two of 10 samples were to come behind step 6, which is behind them now; a batch of 4 is the next."""
    batch, sizes = "train.global_batch_size", [4, 4, 10, 10, 4]
    write_decided(run, Decided(changes=(Change(at=6, values={batch: 10}, was={batch: 4}, line="1"),)))
    first, _ = rollbacks.by_hand(run, 4, RollbackOptions(skip=4))
    assert (first.passed, first.batches) == (28, [[2, 4], [2, 10]]) and rollbacks.read(run) == [first]
    second, _ = rollbacks.by_hand(run, 4, RollbackOptions(skip=skip))
    assert second.passed == sum(sizes[:skip]) == sum(count * size for count, size in second.batches)


def test_of_a_return_of_before_its_batches_were_written_down_the_sum_counts(run: Path) -> None:
    """Of a part of them their number, in batches as the run has them."""
    for skip, passed in ((2, 2 * 4), (3, 15), (4, 15 + 4)):
        rollbacks.write(run, [Rollback(to=4, skip=3, passed=15, id="of before")])
        assert rollbacks.by_hand(run, 4, RollbackOptions(skip=skip))[0].passed == passed


@pytest.mark.parametrize(
    ("said", "is_held"), [({"order": "all_epochs"}, True), ({"blend_by": "epochs"}, True), ({}, False)]
)
def test_data_that_end_are_held_against_a_return_by_hand(
    run: Path, monkeypatch: pytest.MonkeyPatch, said: dict[str, str], is_held: bool
) -> None:
    """However it is said how often they are read; those that begin again are enough for any run."""
    settings, held = load(run / "config.toml"), list[int]()
    data = settings.data.model_copy(update=said)
    monkeypatch.setattr(rollbacks, "began_with", lambda *_: settings.model_copy(update={"data": data}))
    monkeypatch.setattr(rollbacks, "open_corpus", lambda config, lasts: None)
    monkeypatch.setattr(rollbacks, "check_left", lambda config, corpus, metadata, *_: held.append(metadata.step))
    rollbacks.by_hand(run, 4, RollbackOptions(skip=1))
    assert held == [4] * is_held


def test_a_return_in_a_folder_that_was_moved_is_held_against_the_changes_that_are_to_come_there(
    run: Path, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the run was made shorter: its data last for that, and not for as many steps as it began with."""

    def short(config: Config, *_: object, **__: object) -> None:
        if config.train.steps > 8:
            raise ConfigError("Set train.steps to 8 or less")

    monkeypatch.setattr(change, "check_length", short)
    monkeypatch.setattr(rollbacks, "open_corpus", lambda config, lasts: SimpleNamespace(training=None))
    moved = run.rename(run.with_name("moved"))
    (moved / "config.toml").write_text(
        to_toml(load(config, ["train.steps=20", "data.order=all_epochs", "data.epochs=9"]))
    )
    with pytest.raises(ConfigError, match=r"Set train\.steps to 8"):
        rollbacks.by_hand(moved, 4, RollbackOptions(skip=1))
    shorter = Change(at=6, values={"train.steps": 8}, was={"train.steps": 20}, line="1")
    write_decided(moved, Decided(changes=(shorter,)))
    _, gone = rollbacks.by_hand(moved, 4, RollbackOptions(skip=1))
    assert gone == [6] and saved_steps(moved) == [2, 4]


def test_data_that_end_are_held_against_a_run_that_goes_on(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    """By what is left behind all batches that it has passed over, in the configuration that is in force."""
    settings, held = load(run / "config.toml"), list[tuple[int, int]]()
    monkeypatch.setattr(change, "check_length", lambda *_, step, position, **__: held.append((step, position)))
    corpus: Any = SimpleNamespace(training=None, curriculum=curriculum_of(settings))
    batch = settings.train.global_batch_size
    known, new = Rollback(to=2, skip=3, id="known"), Rollback(to=4, skip=2, id="new")
    owned = SimpleNamespace(mesh=Mesh())
    cases = (([], [], 0), ([new], [], 2), ([new], [new], 0), ([known], [known], 0), ([known, new], [known], 2))
    for recorded, done, passed in cases:
        state: Any = SimpleNamespace(step=4, samples=4 * batch, changes=[], ownership=owned)
        held.clear()
        rollbacks.apply(state, settings, corpus, recorded, done)
        assert state.rollbacks == recorded and state.samples == (4 + passed) * batch
        assert held == [(4, state.samples)]
        assert state.passed_over == sum(each.skip for each in recorded) * batch


def test_a_change_that_asks_for_more_data_than_there_are_keeps_no_run_from_returning(
    monkeypatch: pytest.MonkeyPatch, run: Path
) -> None:
    """The run will refuse it."""

    def short(config: Config, *_: object, **__: object) -> None:
        if config.train.steps > 8:
            raise ConfigError("Set train.steps to 8 or less")

    monkeypatch.setattr(change, "check_length", short)
    settings, new = load(run / "config.toml"), Rollback(to=4, skip=1, id="new")
    longer = Change(at=6, values={"train.steps": 9}, was={"train.steps": 6}, line="1")
    write_decided(run, Decided(changes=(longer,)))
    corpus: Any = SimpleNamespace(training=None, curriculum=curriculum_of(settings))
    state: Any = SimpleNamespace(step=4, samples=16, changes=[], ownership=SimpleNamespace(mesh=Mesh()))
    rollbacks.apply(state, settings, corpus, [new], [])
    assert state.rollbacks == [new]


@pytest.mark.parametrize(("to", "left"), [(4, [2, 4]), (6, [2, 4, 6])])
def test_a_return_that_was_killed_takes_away_what_is_behind_its_step_alone(
    run: Path, to: int, left: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    write_event(run, "rolled back", **Rollback(to=2, id="another").model_dump())
    rollbacks.write(run, [Rollback(to=to, skip=1, id="it")])
    rollbacks.finish(run)
    said = "The rollback to step 4 is finished: the checkpoints of steps 6 are deleted.\n"
    assert capsys.readouterr().out == said * (to == 4)
    assert saved_steps(run) == left and json.loads((run / ROLLBACKS).read_text())[0]["to"] == to
    (run / ROLLBACKS).unlink()
    rollbacks.finish(run)
    assert saved_steps(run) == left


@pytest.mark.parametrize("steps", [(2, 4, 6), (2,)])
def test_of_a_return_that_was_killed_a_dry_run_says_what_would_be_done(
    run: Path, steps: tuple[int, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollbacks, "verify", lambda path: pytest.fail("it reads tensors"))
    for gone in {2, 4, 6} - {*steps}:
        (run / "checkpoints" / f"step_0000000{gone}").rmdir()
    rollbacks.write(run, [Rollback(to=1, id="before"), Rollback(to=2, skip=1, id="it")])
    rollbacks.finish(run, dry_run=True)
    said = (
        "The rollback to step 2 would be finished first: the checkpoints of steps 4, 6 would be deleted. What follows "
        "is as behind that.\n"
    )
    assert capsys.readouterr().out == (said if len(steps) > 1 else "")
    assert tuple(saved_steps(run)) == steps
    rest = (2, run / "checkpoints" / "step_00000002", (4, 6))
    assert rollbacks.unfinished(run) == (None if len(steps) == 1 else rest)


def test_a_checkpoint_that_was_put_back_behind_a_return_is_not_deleted(run: Path) -> None:
    """Of the course before: whoever starts the run says which one goes on."""
    rollback, _ = rollbacks.by_hand(run, 4, RollbackOptions())
    rollbacks.finish(run)
    (run / "checkpoints" / "step_00000006").mkdir()
    with pytest.raises(CheckpointError, match=r"step_00000006 is of the course .* its rollback to step 4, and came"):
        rollbacks.finish(run)
    assert saved_steps(run) == [2, 4, 6] and rollbacks.read(run) == [rollback]


@pytest.mark.parametrize(
    ("to", "step", "left"), [([2, 4], 2, [2]), ([2, 4], 4, [2, 4]), ([6, 4], 2, []), ([6, 4], 4, [6, 4]), ([], 2, [])]
)
def test_a_return_is_forgotten_where_the_run_goes_on_from_before_its_step(
    run: Path, to: list[int], step: int, left: list[int]
) -> None:
    """What it returned to is damaged. Those that another return has left behind still count as tries."""
    rollbacks.write(run, [Rollback(to=each) for each in to])
    rollbacks.forget_behind(run, step)
    assert [each.to for each in rollbacks.read(run)] == left


def test_later_checkpoints_stay_where_the_one_that_a_run_returned_to_is_gone(run: Path) -> None:
    """The run went on from an older one, and they are of that course."""
    rollbacks.write(run, [Rollback(to=4, skip=1, id="it")])
    (run / "checkpoints" / "step_00000004").rename(run / "checkpoints" / "damaged_step_00000004")
    rollbacks.finish(run)
    assert saved_steps(run) == [2, 6]


@pytest.mark.parametrize(
    ("damaged", "known", "left"), [([6], True, [2, 4, 6]), ([6], False, [2]), ([4, 6], True, [2, 4, 6])]
)
def test_where_the_newest_checkpoint_is_damaged_the_one_before_says_whether_a_return_is_finished(
    run: Path, monkeypatch: pytest.MonkeyPatch, damaged: list[int], known: bool, left: list[int]
) -> None:
    """None that can be read says nothing: they stay, to be set aside."""
    metadata_of, it = rollbacks.metadata_of, Rollback(to=2, skip=1, id="it")

    def knowing(path: Path, manifest: Any) -> Any:
        found: Any = metadata_of(path, manifest)
        found.rollbacks = [it] * known
        return found

    monkeypatch.setattr(rollbacks, "metadata_of", knowing)
    for step in damaged:
        (run / "checkpoints" / f"step_0000000{step}" / "damaged").touch()
    rollbacks.write(run, [it])
    rollbacks.finish(run)
    assert saved_steps(run) == left


def test_a_checkpoint_that_the_disk_refuses_says_as_little_as_a_damaged_one(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(path: Path) -> None:
        if path.name != "step_00000002":
            raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(rollbacks, "read_manifest", read)
    rollbacks.write(run, [Rollback(to=2, skip=1, id="it")])
    rollbacks.finish(run)
    assert saved_steps(run) == [2, 4, 6]


def test_to_the_newest_checkpoint_there_is_nothing_to_finish(run: Path) -> None:
    """It is read when the run goes on, and not before: should it be damaged, an older one takes its place."""
    rollbacks.write(run, [Rollback(to=6, skip=1, id="it")])
    (run / "checkpoints" / "step_00000006" / "damaged").touch()
    rollbacks.finish(run)
    assert saved_steps(run) == [2, 4, 6]


@pytest.mark.parametrize(("known", "left"), [([0], [2, 4]), ([0, 1], [2, 4, 6])])
def test_of_two_returns_the_second_is_finished_where_it_was_killed(
    run: Path, monkeypatch: pytest.MonkeyPatch, known: list[int], left: list[int]
) -> None:
    """The checkpoints behind it know the first, and both where the run has gone on since."""
    both = [Rollback(to=2, skip=1, id="first"), Rollback(to=4, skip=1, id="second")]
    rollbacks.write(run, both)
    newest: Any = SimpleNamespace(rollbacks=[both[each] for each in known])
    monkeypatch.setattr(rollbacks, "metadata_of", lambda path, manifest: newest)
    rollbacks.finish(run)
    assert saved_steps(run) == left


def test_where_the_newest_checkpoint_is_damaged_the_one_before_says_how_the_run_went_on(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With batches of 8 from step 3 on."""
    change = Change(
        at=2, values={"train.global_batch_size": 8}, was={"train.global_batch_size": 4}, line="1", position=8
    )
    metadata_of = rollbacks.metadata_of

    def changed(path: Path, manifest: Any) -> Any:
        found: Any = metadata_of(path, manifest)
        found.changes = [change] if found.step > 2 else []
        return found

    monkeypatch.setattr(rollbacks, "metadata_of", changed)
    (run / "checkpoints" / "step_00000006" / "damaged").touch()
    rollback, _ = rollbacks.by_hand(run, 2, RollbackOptions(skip=2))
    assert rollback.passed == 2 * 8


@pytest.mark.parametrize("name", [CHANGES, DECIDED, ROLLBACKS])
def test_a_run_goes_on_only_where_the_changes_to_come_can_be_read(
    monkeypatch: pytest.MonkeyPatch, run: Path, name: str
) -> None:
    """Without the one that makes it shorter the data do not last. A run that is started again waits for the disk."""

    def away(honest: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *words: Any, **more: Any) -> Any:
            if path.name == name:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
            return honest(path, *words, **more)

        return call

    def too_short(*_: Any, **__: Any) -> None:
        raise ConfigError("too little data")

    settings = load(run / "config.toml")
    monkeypatch.setattr(change, "check_length", too_short)
    write_decided(run, Decided())
    for what in ("open", "read_bytes", "read_text"):
        monkeypatch.setattr(Path, what, away(getattr(Path, what)))
    corpus: Any = SimpleNamespace(training=None, curriculum=curriculum_of(settings))
    state: Any = SimpleNamespace(step=4, samples=16, changes=[], ownership=SimpleNamespace(mesh=Mesh()))
    with pytest.raises(DiskError, match=rf"{name} cannot be read"):
        rollbacks.apply(state, settings, corpus, [], [])


def test_ranks_know_what_rank_0_reads_of_rollbacks_and_of_changes_to_come(run: Path, config: Path) -> None:
    """Their folders may be older ones. What rank 0 cannot read is told on all."""
    it, coming = Rollback(to=4, skip=1, passed=4, id="it"), Change(at=5, values={"train.steps": 9}, was={}, line="1")
    rollbacks.write(run, [it])
    write_decided(run, Decided(changes=(coming,)))
    (damaged := run / "damaged").mkdir()
    (damaged / DECIDED).write_text("{")

    def told(rank: int, num_ranks: int) -> tuple[list[Rollback], list[Change], str]:
        world = build_mesh(Layout(dp=2), rank).world
        owned = SimpleNamespace(mesh=SimpleNamespace(world=world))
        state: Any = SimpleNamespace(step=4, changes=[], ownership=owned)
        whole, broken = (load(config, [f"run.folder={run / 'elsewhere' if rank else each}"]) for each in (run, damaged))
        found = rollbacks.read_together(Path(whole.run.folder), world), rollbacks._to_come_together(whole, state)
        with pytest.raises(ConfigError) as raised:
            rollbacks._to_come_together(broken, state)
        return *found, str(raised.value)

    first, other = run_on_ranks(told, 2, time_limit=20.0)
    assert first == other and first[:2] == ([it], [coming]) and first[2].startswith(f"rank 0: {damaged / DECIDED} can")


def test_rates_are_lowered_by_all_returns_that_a_run_has_made(monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    settings = load(run / "config.toml")
    monkeypatch.setattr(change, "check_length", lambda *_, **__: None)
    corpus: Any = SimpleNamespace(training=None, curriculum=curriculum_of(settings))
    known = Rollback(to=2, rate_factor=0.5, rate_until=6, id="known")
    new = Rollback(to=4, rate_factor=0.25, rate_until=5, id="new")
    plain = rollbacks.learning_rate_of(settings)
    owned = SimpleNamespace(mesh=Mesh())
    for recorded, factors in (([known], [0.5, 0.5, 1.0]), ([known, new], [0.125, 0.5, 1.0])):
        state: Any = SimpleNamespace(step=4, samples=16, changes=[], ownership=owned)
        rollbacks.apply(state, settings, corpus, recorded, [known])
        assert [state.learning_rate(step) for step in (5, 6, 7)] == [
            plain(step) * factor for step, factor in zip((5, 6, 7), factors, strict=True)
        ]
