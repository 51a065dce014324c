"""The checkpoint with the lowest validation loss stays, is named, and is the one that `--best` uses."""

import errno
import json
import math
import os
import re
import shutil
import tracemalloc
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from colonnade.checkpoint.folders import tidy
from colonnade.config.saving import CheckpointConfig
from colonnade.errors import CheckpointError
from colonnade.mesh.mesh import Mesh
from colonnade.train import best
from colonnade.train.best import (
    Best,
    best_checkpoint,
    best_of,
    evaluations,
    evaluations_since_best,
    none_better,
    spared,
)
from tests.commands import forked, here
from tests.runs import Finished, events, metrics, saved_steps
from tests.slow import first_fast
from tests.tiny import TinyCorpus, write_config

EACH = ["train.evaluate_every=2", "checkpoint.every=2", "checkpoint.keep=1", "optim.decay_steps=8"]
UNKNOWN = '{"step": 6, "validation_loss": null, "validation_spearman": null}\n'


def write_metrics(run: Path, losses: dict[int, float | None], end: str = "") -> None:
    lines = [{"step": step} | ({} if loss is None else {"validation_loss": loss}) for step, loss in losses.items()]
    run.mkdir(exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + end)


def set_loss(run: Path, step: int, loss: float) -> None:
    """Change what the run found in its evaluation after `step`."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (line,) = (line for line in lines if line["step"] == step)
    assert "validation_loss" in line
    line["validation_loss"] = loss
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_lowest_loss_of_the_checkpoints_that_are_there(tmp_path: Path) -> None:
    write_metrics(tmp_path, {1: None, 2: 3.0, 4: 1.0, 6: 2.0, 8: 2.0}, end='{"step": 9, "validation_loss": 0.')
    assert best_of(tmp_path, [2, 4, 6, 8]) == Best(4, 1.0)
    assert best_of(tmp_path, [2, 6, 8, 9]) == Best(6, 2.0), "of equal ones the earlier"
    assert best_of(tmp_path, [1, 5]) is None and best_of(tmp_path / "nowhere", [2]) is None


def test_where_numbers_are_lost_events_tell_what_was_the_best_when_it_was_saved(tmp_path: Path) -> None:
    """The best checkpoint stays. An event of a step that the run has made again otherwise tells nothing of it."""
    told = [("best", 4, 1.0), ("finished", 6, 1.0), ("best", 8, 0.5)]
    events = [{"event": kind, "step": step, "validation_loss": loss} for kind, step, loss in told]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    assert best_of(tmp_path, [2, 4, 6]) == Best(4, 1.0)
    write_metrics(tmp_path, {7: None, 8: None, 10: 2.0})
    assert best_of(tmp_path, [4, 6, 8, 10]) == Best(4, 1.0)
    assert spared(tmp_path, CheckpointConfig(), [4, 6, 8, 10]) == {4}
    assert best_of(tmp_path, [8, 10]) == Best(10, 2.0)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_while_numbers_cannot_be_read_no_checkpoint_goes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the best one went as one of an earlier step."""
    folder = tmp_path / "checkpoints"
    for step in (4, 6):
        (folder / f"step_{step:08}").mkdir(parents=True)
    (tmp_path / name).write_text('{"event": "best", "step": 4, "validation_loss": 1.0}\n')
    keeping_one = partial(tidy, folder, 1, partial(spared, tmp_path, CheckpointConfig()))
    honest = Path.open

    def away(path: Path, *how: Any) -> Any:
        if path.name == name:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return honest(path, *how)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", away)
        with pytest.raises(OSError, match="Stale file handle"):
            keeping_one()
    keeping_one()
    assert [path.name for path in sorted(folder.iterdir())] == ["step_00000004", "step_00000006"]


def test_of_numbers_only_the_lines_of_a_step_that_was_the_best_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be a million others."""
    parsed: list[bytes] = []
    monkeypatch.setattr(best, "object_in", lambda line: parsed.append(line) or json.loads(line))
    (tmp_path / "events.jsonl").write_text('{"event": "best", "step": 7, "validation_loss": 1.0}\n')
    write_metrics(tmp_path, dict.fromkeys((1, 6, 7, 8, 17, 71)))
    assert best_of(tmp_path, [7]) is None
    assert [json.loads(line).get("step") for line in parsed] == [7, 7], "the event's and that of the numbers"


def test_the_best_is_found_without_all_lines_in_memory(tmp_path: Path) -> None:
    """A run looks at each save: what that takes must not grow with the number of its steps."""
    write_metrics(tmp_path, {step: 2.0 if step % 100 == 0 else None for step in range(1, 1_001)})
    long = {"event": "best", "step": 301, "validation_loss": 1.0, "path": "x" * 2_000}
    for name, line in ("metrics", {"step": 301, "tokens": "x" * 2_000}), ("events", long):
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.writelines([json.dumps(line) + "\n"] * 500)
    tracemalloc.start()
    try:
        assert best_of(tmp_path, [200, 300, 301]) == Best(200, 2.0) and evaluations_since_best(tmp_path) == 9
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 500_000


def test_zero_is_a_number(tmp_path: Path) -> None:
    write_metrics(tmp_path, {2: 1.0}, '{"step": 4, "validation_loss": 0.0, "validation_f1": 0.0}\n')
    assert best_of(tmp_path, [2, 4]) == Best(4, 0.0) and evaluations_since_best(tmp_path) == 0
    assert evaluations(tmp_path)[4] == {"validation_loss": 0.0, "validation_f1": 0.0}


def test_what_was_told_last_of_a_step_counts_and_no_number_never_wins(tmp_path: Path) -> None:
    write_metrics(tmp_path, {2: 1.0, 4: 2.0, 5: math.nan}, UNKNOWN + '{"step": 2, "validation_loss": 3.0}\n[]\n"a"\n')
    assert best_of(tmp_path, [2, 4, 5, 6]) == Best(4, 2.0)
    assert best_of(tmp_path, [5, 6]) is None


def test_an_evaluation_without_a_finite_loss_is_one(tmp_path: Path) -> None:
    """Its numbers are null in the file, and of earlier versions NaN or Infinity."""
    write_metrics(tmp_path, {2: 1.0, 4: math.inf}, UNKNOWN)
    assert evaluations_since_best(tmp_path) == 2
    found = evaluations(tmp_path)
    assert {name: str(number) for name, number in found.pop(6).items()} == {
        "validation_loss": "nan",
        "validation_spearman": "nan",
    }
    assert found == {2: {"validation_loss": 1.0}, 4: {"validation_loss": math.inf}}


@pytest.mark.parametrize(
    ("losses", "since"),
    [
        ([], 0),
        ([2.0], 0),
        ([2.0, 2.0, 2.0], 2),
        ([2.0, 1.0, 3.0], 1),
        ([math.nan, 2.0, 1.0], 0),
        ([2.0, math.nan, 3.0], 2),
    ],
)
def test_evaluations_since_the_best(tmp_path: Path, losses: list[float], since: int) -> None:
    write_metrics(tmp_path, dict(enumerate(losses, 1)))
    assert evaluations_since_best(tmp_path) == since


def test_evaluations_are_counted_in_the_order_of_their_steps(tmp_path: Path) -> None:
    """Whatever the order in which their lines stand."""
    write_metrics(tmp_path, {4: 2.0, 2: 1.0, 6: 3.0, 3: 1.5})
    assert evaluations_since_best(tmp_path) == 3


@pytest.mark.parametrize(("until", "since"), [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (6, 2)])
def test_evaluations_behind_a_checkpoint_do_not_count_and_its_own_does(tmp_path: Path, until: int, since: int) -> None:
    write_metrics(tmp_path, {2: 1.0, 4: 2.0, 6: 3.0})
    assert evaluations_since_best(tmp_path, until=until) == since


def test_lines_that_tell_no_loss_are_passed_over(tmp_path: Path) -> None:
    """Of another version, by a hand, or cut off: none of them is an error."""
    odd = ['{"step": 2, "validation_loss": true}', '{"step": 2, "validation_loss": "0.1"}', '{"validation_loss": 0.1}']
    odd += ['{"step": "2", "validation_loss": 0.1}', '[2, "validation_loss"]', '{"step": 2, "validation_loss": 0.']
    write_metrics(tmp_path, {2: 3.0}, end="\n".join([*odd, '{"step": 4, "validation_loss": 2.5}']))
    assert best_of(tmp_path, [2, 4]) == Best(4, 2.5) and best_of(tmp_path, [2]) == Best(2, 3.0)
    (tmp_path / "metrics.jsonl").write_bytes(b'\xff validation_loss\n{"step": 2, "validation_loss": 1.5}\n')
    assert best_of(tmp_path, [2]) == Best(2, 1.5)
    assert str(Best(2, 1.5)) == "validation loss 1.5000"


@pytest.mark.slow
@pytest.mark.parametrize("more", first_fast([["checkpoint.asynchronous=true", "parallel.pp=2"], []]))
def test_the_best_checkpoint_is_never_rotated_away(corpus: TinyCorpus, tmp_path: Path, more: list[str]) -> None:
    """Also by a run that goes on, from which nothing but its folder is known."""
    config, run, ranks = write_config(corpus, tmp_path), tmp_path / "run", 2 if more else 1
    assert forked("train", config, *EACH, *more, "train.steps=2", num_ranks=ranks).status == 0
    set_loss(run, 2, 0.5)
    answer = forked("train", config, *EACH, *more, "train.steps=8", num_ranks=ranks)
    assert answer.status == 0 and saved_steps(run) == [2, 8], answer
    best = "its best checkpoint is step_00000002 (validation loss 0.5000)"
    assert answer.out.endswith(f"Finished 8 steps. The run is in {run}; {best}.\n")
    assert [event["step"] for event in events(run) if event["event"] == "best"] == [2]
    (end,) = (event for event in events(run) if event["event"] == "finished" and event["step"] == 8)
    assert (end["best"], end["validation_loss"]) == ("step_00000002", 0.5)


def test_a_better_one_takes_its_place(corpus: TinyCorpus, tmp_path: Path) -> None:
    config, run = write_config(corpus, tmp_path), tmp_path / "run"
    assert forked("train", config, *EACH, "train.steps=2").status == 0
    answer = forked("train", config, *EACH, "train.steps=8")
    losses = {line["step"]: line["validation_loss"] for line in metrics(run) if line["step"] % 2 == 0}
    assert min(losses, key=lambda step: losses[step]) == 8, f"losses fall: {losses}"
    assert saved_steps(run) == [8]
    assert f"step_00000008 (validation loss {losses[8]:.4f})" in answer.out
    assert [event["checkpoint"] for event in events(run) if event["event"] == "best"][-1] == "step_00000008"


@pytest.mark.slow
def test_without_keep_best_the_newest_alone_stay(corpus: TinyCorpus, tmp_path: Path) -> None:
    config, run = write_config(corpus, tmp_path), tmp_path / "run"
    assert forked("train", config, *EACH, "train.steps=2").status == 0
    set_loss(run, 2, 0.5)
    answer = forked("train", config, *EACH, "train.steps=8", "checkpoint.keep_best=false")
    assert saved_steps(run) == [8] and "its best" not in answer.out, answer


@pytest.mark.slow
def test_what_a_killed_run_left_is_tidied_without_the_best(finished: Finished, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished.folder, run)
    write_metrics(run, {step: 0.5 if step == 4 else 2.0 for step in range(1, 7)})
    answer = forked("train", finished.config, f"run.folder={run}", "checkpoint.keep=1")
    assert answer.status == 0 and saved_steps(run) == [4, 6], answer


@pytest.mark.slow
def test_saves_that_are_not_evaluated_are_noted_at_the_start(corpus: TinyCorpus, tmp_path: Path) -> None:
    config = write_config(corpus, tmp_path)
    out = re.sub(r"\s+", " ", forked("train", config, "train.steps=7", "optim.decay_steps=6").out)
    assert (
        "note checkpoints are saved every 2 steps and evaluated every 3 (train.evaluate_every): checkpoint.keep_best "
        "chooses among those at multiples of 6 and the last. With a checkpoint.every that is a multiple of "
        "train.evaluate_every, it chooses among all of them" in out
    ), out
    for number, meets in enumerate(("train.evaluate_every=2", "train.evaluate_every=0", "checkpoint.keep_best=false")):
        answer = forked(
            "train", config, meets, "train.steps=7", "optim.decay_steps=6", f"run.folder={tmp_path}/run{number}"
        )
        assert answer.status == 0 and "multiples of" not in answer.out, answer


# --- using it ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(finished: Finished, tmp_path: Path) -> Path:
    """Steps 4 and 6, of which the older is the better."""
    shutil.copytree(finished.folder, tmp_path / "run")
    write_metrics(tmp_path / "run", {4: 0.5, 6: 2.0})
    return tmp_path / "run"


@pytest.mark.slow
def test_the_best_is_measured_and_writes(run: Path, corpus: TinyCorpus) -> None:
    measure = ["perplexity", "--data", corpus.text, "--json"]
    newest, best = (forked("evaluate", run, *measure, *more) for more in ([], ["--best"]))
    assert [json.loads(answer.out)["step"] for answer in (newest, best)] == [6, 4]
    assert (
        best.err == f"{run}/checkpoints/step_00000004: validation loss 0.5000, the lowest of its run's checkpoints.\n"
    )
    assert forked("evaluate", run / "checkpoints", *measure, "--best").out == best.out
    one = forked("generate", run / "checkpoints/step_00000004", "--prompt", "the", "--temperature", 0)
    assert (
        forked("generate", run, "--best", "--prompt", "the", "--temperature", 0, "--tp", 2, num_ranks=2).out == one.out
    )


@pytest.mark.parametrize(
    "command",
    [("generate", "--prompt", "a"), ("fill-mask", "--text", "a"), ("embed", "--text", "a"), ("predict", "rows.tsv")],
    ids=lambda command: command[0],
)
def test_every_command_opens_the_best(command: tuple[str, ...], run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(path: Path, **_: object) -> None:
        raise CheckpointError(f"{path} is opened")

    monkeypatch.setattr("colonnade.serving.trained.opened", opened)
    name, *more = command
    answer = here(name, run, *more, "--best")
    assert answer.err.endswith(f"colonnade: {run}/checkpoints/step_00000004 is opened\n"), answer


@pytest.mark.parametrize(
    ("command", "opens"),
    [("merge", "colonnade.convert.merge.find"), ("convert", "colonnade.convert.convert.find")],
    ids=["merge", "convert"],
)
def test_the_best_is_merged_and_converted(
    command: str, opens: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(path: Path) -> None:
        raise CheckpointError(f"{path} is opened")

    monkeypatch.setattr(opens, found)
    answer = here(command, run, tmp_path / "made", "--best")
    assert answer.err.endswith(f"colonnade: {run}/checkpoints/step_00000004 is opened\n"), answer


def test_models_beside_it_are_the_best_of_their_runs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def predict_any(*_: object, others: list[Path], **__: object) -> None:
        raise CheckpointError(f"{[str(other) for other in others]} are beside it")

    monkeypatch.setattr("colonnade.serving.trained.opened", lambda *_, **__: nullcontext((None, Mesh())))
    monkeypatch.setattr("colonnade.serving.predict.predict_any", predict_any)
    for options, other in ((["--best"], run / "checkpoints" / "step_00000004"), ([], run)):
        answer = here("predict", run, "rows.tsv", "--with", run, *options)
        assert answer.err.endswith(f"colonnade: ['{other}'] are beside it\n"), answer


def test_the_best_of_a_run_is_that_of_its_folder_of_checkpoints(run: Path) -> None:
    found = (run / "checkpoints" / "step_00000004", Best(4, 0.5))
    assert best_checkpoint(run) == best_checkpoint(run / "checkpoints") == found


def test_what_evaluations_found_is_told_without_what_the_steps_had(tmp_path: Path) -> None:
    line = {"step": 2, "loss": 9.0, "seconds": 0.5, "validation_loss": 1.5, "validation_accuracy": 0.25}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + '\n{"step": 3, "loss": 8.0}\n')
    assert evaluations(tmp_path) == {2: {"validation_loss": 1.5, "validation_accuracy": 0.25}}
    assert none_better(2, 2) == "the last 2 evaluations found no lower loss (train.patience = 2)"


def test_where_there_is_no_best(run: Path) -> None:
    answer = here("generate", run / "checkpoints/step_00000004", "--prompt", "a", "--best")
    assert answer.status == 2 and "--best" in answer.err and f"Name {run}, or leave out --best" in answer.err, answer
    write_metrics(run, {4: None, 6: None})
    answer = here("generate", run, "--prompt", "a", "--best", "--top-p", 3)
    assert answer.status == 2 and answer.err.startswith("colonnade: 2 problems\n"), answer
    assert f"none of the checkpoints of {run} (step_00000004, step_00000006) was evaluated" in answer.err
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        best_checkpoint(run)
    answer = here("generate", run.parent / "nothing", "--prompt", "a", "--best")
    assert answer.status == 2 and answer.err.startswith(f"colonnade: {run.parent}/nothing is neither"), answer


def test_checkpoints_at_multiples_stay(tmp_path: Path) -> None:
    """Beside the newest and the best, whatever their age."""
    kept = CheckpointConfig(keep_every=4, keep_best=False)
    assert spared(tmp_path, kept, [2, 4, 6, 8, 10]) == {4, 8}
    assert spared(tmp_path, kept.model_copy(update={"keep_every": 0}), [2, 4]) == set()
    (tmp_path / "metrics.jsonl").write_text('{"step": 6, "validation_loss": 1.0}\n')
    assert spared(tmp_path, kept.model_copy(update={"keep_best": True}), [2, 4, 6, 8, 10]) == {4, 6, 8}


def test_the_best_of_the_checkpoints_stays_where_a_step_without_one_was_better(tmp_path: Path) -> None:
    """Where a run is evaluated more often than it is saved."""
    write_metrics(tmp_path, {2: 3.0, 3: 0.5, 4: 1.0, 5: 0.7, 6: 2.0})
    assert spared(tmp_path, CheckpointConfig(keep_best=True), [2, 4, 6]) == {4}


def test_a_run_that_goes_on_without_its_numbers_keeps_its_best_checkpoint(config: Path, tmp_path: Path) -> None:
    """And says that it has lost them."""
    run = tmp_path / "run"
    assert forked("train", config, *EACH, "train.steps=4").status == 0
    told = events(run)
    best = max(each["step"] for each in told if each["event"] == "best")
    lowered = [each | {"validation_loss": 0.5} if each["event"] == "best" else each for each in told]
    (run / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lowered))
    (run / "metrics.jsonl").unlink()
    answer = forked("train", config, *EACH, "train.steps=8")
    assert answer.status == 0 and "metrics.jsonl has no step, and the run goes on from step 4" in answer.out, answer
    assert [each["last"] for each in events(run) if each["event"] == "numbers lost"] == [0]
    assert saved_steps(run) == [best, 8]
