"""What is told of a run before its first step is what the run then does, whatever was changed on the way."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from colonnade.checkpoint.manifest import Manifest, read_manifest
from colonnade.config.load import load
from colonnade.data.writer import TokenFileWriter, merge
from colonnade.errors import ConfigError
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.planner import banner as banners
from colonnade.report.record import read_run
from colonnade.train import beginning, rollbacks, start
from colonnade.train.beginning import beginning_of, course_of
from colonnade.train.corpus import open_corpus
from colonnade.train.rollback import Rollback, write
from colonnade.train.run_folder import CHANGES
from tests.commands import colonnade, forked, here
from tests.distributed import run_on_ranks
from tests.runs import Finished, course, events, metrics, saved_steps, snapshot
from tests.tiny import TinyCorpus

LOWER = {"change": {"optim.learning_rate": 1e-3}, "at": 6}


@pytest.fixture
def run(finished: Finished, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished.folder, tmp_path / "run"))


def asked(run: Path, *lines: dict[str, Any]) -> None:
    (run / CHANGES).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("steps", "said"),
    [(9, "go on from .*step_00000006 with step 7"), (None, "do nothing: .*is at step 6 of train.steps = 6")],
)
def test_a_dry_run_knows_of_changes_that_the_run_has_not_seen(
    steps: int | None, said: str, finished: Finished, run: Path
) -> None:
    asked(run, LOWER, *([{"change": {"train.steps": steps}, "at": 6}] if steps else []))
    answer = forked("train", finished.config, f"run.folder={run}", "--dry-run")
    assert answer.status == 0 and re.search(f"The run would {said}", answer.out), answer
    assert f"  steps      {steps or 6} of 4 × 16 tokens, {(steps or 6) * 64} tokens in all" in answer.out


def test_the_end_of_a_run_is_the_one_in_force(finished: Finished, run: Path) -> None:
    """For steps to profile and for reports, before the run has seen the change, and when it has been made: then
    another one too that is to come.
    """
    asked(run, {"change": {"train.steps": 8}, "at": 6})
    profiled = ("train", finished.config, f"run.folder={run}", "--profile")
    refused = here(*profiled, 9)
    assert refused.status == 2 and "--profile 9: the run ends with step 8 (train.steps)" in refused.err, refused
    assert read_run(run).planned == 8
    done = forked(*profiled, 8)
    assert done.status == 0 and (run / "profile.json").exists() and metrics(run)[-1]["step"] == 8, done
    assert "  steps      8 of " in done.out and "step 8/8" in done.out
    assert load(run / "config.toml").train.steps == 6 and read_run(run).planned == 8
    assert here("change", run, "train.steps=11").status == 0
    assert read_run(run).planned == start.planned_end(load(run / "config.toml", [f"run.folder={run}"])) == 11
    (run / "config.toml").write_text("[train]\nsteps = 9\n")  # of another version, say
    assert read_run(run).planned == 9


def test_a_run_that_is_to_be_longer_goes_on_at_its_last_step(finished: Finished, run: Path, config: Path) -> None:
    """With the change known before, and with one that comes while the last step is computed."""
    from colonnade.train import loop

    shutil.rmtree(run)
    run.mkdir()
    asked(run, {"change": {"train.steps": 7}, "at": 6})

    def first(rank: int) -> None:
        before = loop.train_step

        def train_step(state: Any, *arguments: Any, **more: Any) -> Any:
            if state.step == 6:
                answer = here("change", run, "train.steps=8")
                assert answer.status == 0, answer
            return before(state, *arguments, **more)

        loop.train_step = train_step  # type: ignore[assignment]

    answer = forked("train", config, first=first)
    assert answer.status == 0 and "Finished 8 steps" in answer.out, answer
    assert [line["step"] for line in metrics(run)] == [*range(1, 9)]
    assert [each["step"] for each in events(run) if each["event"] == "changed"] == [6, 7]
    assert [each["step"] for each in events(run) if each["event"] == "finished"] == [8]
    assert [line["loss"] for line in metrics(run)][:2] == [line["loss"] for line in metrics(finished.folder)][:2]


def test_a_run_that_patience_has_ended_is_told_to_do_nothing(config: Path, run: Path) -> None:
    """And nothing is to change in steps that will not be: only with more patience."""
    shutil.rmtree(run)
    keys = ["train.steps=12", "train.evaluate_every=1", "train.patience=1", "optim.learning_rate=1e-30"]
    ended = forked("train", config, *keys)
    assert ended.status == 0 and (step := metrics(run)[-1]["step"]) < 12, ended
    why = "the last 1 evaluation found no lower loss (train.patience = 1)"
    answer = forked("train", config, *keys, "--dry-run")
    assert answer.status == 0 and f"is at step {step}, and {why}.\n" in answer.out, answer
    for given in (["optim.weight_decay=0.2"], ["optim.weight_decay=0.2", "--at", 8], ["train.patience=5", "--at", 8]):
        refused = here("change", run, *given)
        assert refused.status == 2 and f"it has ended with step {step}: {why}" in refused.err, refused
    assert not (run / CHANGES).exists()
    assert here("change", run, "train.patience=20").status == 0
    assert here("change", run, "optim.weight_decay=0.2", "--at", 8).status == 0
    answer = forked("train", config, *keys, "--dry-run")
    assert f"with step {step + 1}" in answer.out.splitlines()[-1], answer


def test_a_dry_run_tells_from_which_weights_a_run_would_begin(finished: Finished, config: Path) -> None:
    for more, said in (([f"train.init_from={finished.folder}"], f", from the weights of {finished.newest}"), ([], "")):
        answer = here("train", config, *more, "--dry-run")
        assert answer.status == 0 and answer.out.endswith(f"The run would begin with step 1{said}.\n"), answer


def test_a_dry_run_refuses_other_data_as_the_run_would(
    finished: Finished, corpus: TinyCorpus, run: Path, tmp_path: Path
) -> None:
    merge([corpus.prefix] * 2, tmp_path / "longer")
    keys = (f"run.folder={run}", f"data.train={tmp_path / 'longer'}", "train.steps=8")
    answer = here("train", finished.config, *keys, "--dry-run")
    assert answer.status == 2 and "was trained on other data than the run would go on with" in answer.err, answer
    assert here("train", finished.config, *keys, "checkpoint.allow_other_data=true", "--dry-run").status == 0


def test_a_dry_run_refuses_a_checkpoint_of_another_model_as_the_run_would(
    finished: Finished, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has put it into the folder."""

    def other(path: Path) -> Manifest:
        found = read_manifest(path)
        return replace(found, metadata={**found.metadata, "model": {**found.metadata["model"], "num_layers": 3}})

    monkeypatch.setattr(beginning, "read_manifest", other)
    answer = here("train", finished.config, f"run.folder={run}", "train.steps=8", "--dry-run")
    assert answer.status == 2 and "step_00000006 is of another model:\n  num_layers: 3" in answer.err, answer


@pytest.mark.parametrize("changed", [False, True])
def test_a_dry_run_knows_how_much_data_a_rollback_has_left(changed: bool, config: Path, run: Path) -> None:
    """A run that is to use all of it, and has passed over one batch, is one step shorter: counted in the batches that
    its checkpoint has come to.
    """
    shutil.rmtree(run)
    keys = ["data.order=all_epochs", "data.epochs=1", "train.evaluate_every=0"]
    most = len(open_corpus(load(config, keys)).datasets.train) // 4
    if changed:
        run.mkdir()
        asked(run, {"change": {"train.global_batch_size": 8}, "at": 1})
        most = 1 + (most - 1) // 2
    assert forked("train", config, *keys, "train.steps=2").status == 0
    assert here("rollback", run, 2, "--skip", 1).status == 0
    for steps, status in ((most - 1, 0), (most, 2)):
        answer = here("train", config, *keys, f"train.steps={steps}", "--dry-run")
        assert answer.status == status and (f"Set train.steps to {most - 1} or less" in answer.err) == bool(status), (
            answer
        )


@pytest.mark.parametrize("dp", [1, 2])
def test_a_dry_run_tells_of_a_rollback_that_was_killed_and_leaves_its_rest_to_the_run(
    dp: int, finished: Finished, run: Path
) -> None:
    """What follows is told from the step that it returns to, behind which a change is still to come."""
    write(run, [Rollback(to=4, id="it")])
    asked(run, {"change": {"train.steps": 8}, "at": 5})
    before, keys = snapshot(run), (f"run.folder={run}", f"parallel.dp={dp}")
    told = (
        colonnade("train", finished.config, *keys, "--dry-run")
        if dp > 1
        else forked("train", finished.config, *keys, "--dry-run")
    )
    assert told.status == 0 and told.out.count("would be finished first: the checkpoints of steps 6 would") == 1, told
    assert "  steps      8 of 4 × 16 tokens, 512 tokens in all" in told.out
    assert f"The run would go on from {run}/checkpoints/step_00000004 with step 5.\n" in told.out
    assert snapshot(run) == before
    config = load(finished.config, [f"run.folder={run}"])
    corpus, world = open_corpus(config), Mesh().world
    seen = beginning.seen_behind_rollback(config, world)
    assert course_of(config, corpus, world, seen).whole.train.steps == 8
    assert course_of(config, corpus, world).whole.train.steps == 6, "a run has finished the rollback before"


@pytest.mark.parametrize(("damaged", "status"), [(4, 2), (6, 0)])
def test_of_a_rollback_that_was_killed_a_dry_run_looks_at_the_checkpoint_that_the_run_would_read(
    damaged: int, status: int, finished: Finished, run: Path
) -> None:
    """For damage that is seen without reading all of it; what the run would delete first is nobody's concern."""
    write(run, [Rollback(to=4, id="it")])
    path = run / "checkpoints" / f"step_0000000{damaged}"
    os.truncate(path / "__0_0.distcp", 100)
    told = forked("train", finished.config, f"run.folder={run}", "train.steps=8", "--dry-run")
    assert told.status == status and ("go on from" in told.out) == (status == 0), told
    assert (f"{path}/__0_0.distcp is damaged: it has 100 bytes" in told.err) == (status == 2)


def test_a_dry_run_looks_for_a_rollback_that_was_killed_once_before_its_ranks_and_once_on_them(
    finished: Finished, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look reads manifests and all events, and later ones may see another folder."""
    looked, unfinished = list[Path](), rollbacks.unfinished
    monkeypatch.setattr(rollbacks, "unfinished", lambda run: looked.append(run) or unfinished(run))
    write(run, [Rollback(to=4, id="it")])
    told = here("train", finished.config, f"run.folder={run}", "train.steps=8", "--dry-run")
    assert told.status == 0 and looked == [run] * 2, told


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_run_whose_batch_is_made_smaller_may_take_all_steps_that_its_data_have(
    has_begun: bool, config: Path, run: Path
) -> None:
    shutil.rmtree(run)
    keys = ["data.order=all_epochs", "data.epochs=1", "train.evaluate_every=0"]
    samples = len(open_corpus(load(config, keys)).datasets.train)
    run.mkdir()
    asked(run, {"change": {"train.global_batch_size": 2}, "at": 1})
    if has_begun:
        assert forked("train", config, *keys, "train.steps=2").status == 0
    most = 1 + (samples - 4) // 2
    for steps, status in ((most, 0), (most + 1, 2)):
        answer = here("train", config, *keys, f"train.steps={steps}", "--dry-run")
        assert answer.status == status and ("or less, or raise data.epochs" in answer.err) == bool(status), answer


@pytest.mark.parametrize("at", [1, 2])
def test_a_dry_run_holds_evaluations_against_the_blend_in_force(
    at: int, config: Path, corpus: TinyCorpus, tmp_path: Path
) -> None:
    """Whether its change was made, or is to be made before the next step."""
    for token in (1, 2):
        with TokenFileWriter(tmp_path / str(token), np.dtype("<u2")) as writer:
            for _ in range(20):
                writer.add_document([token] * 40)
    files = [str(tmp_path / name) for name in "12"]
    blend = f'blend = {{"{files[0]}" = 0.9, "{files[1]}" = 0.1}}'
    config.write_text(config.read_text().replace(f'train = "{corpus.prefix}"', blend))
    keys, run = ["data.no_loss_on=[1]", "train.evaluate_samples=1"], tmp_path / "run"
    run.mkdir()
    asked(run, {"change": {"data.blend": dict(zip(files, (0.1, 0.9), strict=True))}, "at": at})
    assert forked("train", config, *keys, "train.evaluate_every=0", "train.steps=2").status == 0
    for first, status in ((files[1], 0), (files[0], 2)):
        asked(run, {"change": {f"data.blend.{first}": 100.0}, "at": 2})
        answer = forked("train", config, *keys, "train.evaluate_every=3", "train.steps=4", "--dry-run")
        assert answer.status == status and ("no label counts" in answer.err) == bool(status), answer


def test_evaluations_behind_the_checkpoint_do_not_end_a_run(config: Path, run: Path) -> None:
    """It goes on from there, and evaluates again."""
    step = saved_steps(run)[-1]
    lines = [
        {"step": step, "validation_loss": 1.0},
        *({"step": step + each, "validation_loss": 2.0} for each in (1, 2)),
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = here("train", config, f"train.steps={step + 4}", "train.patience=2", "--dry-run")
    assert answer.status == 0 and f"with step {step + 1}" in answer.out.splitlines()[-1], answer


def test_the_tokens_of_a_run_are_those_behind_its_rollbacks(config: Path, run: Path) -> None:
    """Four steps of four samples, then two of eight; with ten passed over behind the third, three."""
    phases = ["curriculum.tokens=[0, 256]", "curriculum.seq_length=[16, 16]", "curriculum.global_batch_size=[4, 8]"]
    began = load(config, [*phases, "train.global_batch_size=8", f"run.folder={run}"])
    told = banners._steps(course(began), open_corpus(began))
    assert "at the end, 512 tokens in all" in told
    write(run, [Rollback(to=3, skip=10)])
    corpus = open_corpus(began)
    assert "at the end, 576 tokens in all" in banners._steps(course_of(began, corpus, Mesh().world), corpus)


def test_ranks_know_what_rank_0_reads_of_changes(finished: Finished, run: Path) -> None:
    """The file may have grown before the others would read it."""

    def steps(rank: int, _: int) -> list[int]:
        config = load(finished.config, [f"run.folder={run if rank == 0 else run / 'elsewhere'}"])
        found = course_of(config, open_corpus(config), build_mesh(Layout(dp=2), rank).world)
        assert not found.refused
        return [found.now.train.steps, found.whole.train.steps]

    asked(run, LOWER | {"at": 7}, *({"change": {"train.steps": steps}, "at": steps - 2} for steps in (8, 9)))
    assert run_on_ranks(steps, 2) == [[8, 9]] * 2


def test_ranks_know_from_which_checkpoint_rank_0_would_go_on(finished: Finished, run: Path) -> None:
    """They may see an older one, or none. Where rank 0 sees that what was saved is gone all say so."""
    gone = Path(shutil.copytree(run, run.with_name("gone")))
    shutil.rmtree(gone / "checkpoints")

    def would(rank: int, _: int) -> list[str]:
        said = []
        world = build_mesh(Layout(dp=2), rank).world
        mesh: Any = SimpleNamespace(rank=rank, world=world)  # no axis but that of all ranks
        for folder in (run, gone):
            where = folder if rank == 0 else run / "elsewhere"
            config = load(finished.config, [f"run.folder={where}", "train.steps=8"])
            corpus = open_corpus(config)
            try:
                said.append(beginning_of(config, corpus, course_of(config, corpus, world), mesh, None))
            except ConfigError as error:
                said.append(str(error))
        return said

    first, other = run_on_ranks(would, 2, time_limit=20.0)
    assert first == other and first[0] == f"go on from {run}/checkpoints/{finished.newest.name} with step 7"
    assert first[1].startswith(f"rank 0: {gone}/checkpoints has no checkpoint, but this run has saved ")


def test_the_batch_that_is_running_is_predicted(finished: Finished, run: Path) -> None:
    """And told as much of beside what is measured of it; only the length of the run is that behind all changes."""
    (run / "prediction.json").unlink()
    asked(run, {"change": {"train.steps": 8}, "at": 6}, {"change": {"train.global_batch_size": 8}, "at": 7})
    answer = forked("train", finished.config, f"run.folder={run}")
    assert answer.status == 0 and "  steps      8 of 8 × 16 tokens at the end, 576 tokens" in answer.out, answer
    now, began = (json.loads((each / "prediction.json").read_text()) for each in (run, finished.folder))
    assert now["seconds_per_step"] == began["seconds_per_step"] > 0 and now["memory"] == began["memory"]


@pytest.mark.parametrize(("at", "said"), [(6, "do nothing: .* is at step 6"), (7, "go on from .* with step 7")])
def test_a_dry_run_tells_which_changes_the_run_will_refuse(at: int, said: str, finished: Finished, run: Path) -> None:
    """For want of data, as the run finds; what is asked for besides comes all the same."""
    shutil.rmtree(run)
    run.mkdir()
    long, keys = {"train.steps": 100_000}, (f"run.folder={run}", "data.order=all_epochs", "data.epochs=1")
    assert forked("train", finished.config, *keys).status == 0
    asked(run, *([{"change": {"train.steps": 8}, "at": 6}] if at > 6 else []), {"change": long, "at": at}, LOWER)
    answer = forked("train", finished.config, *keys, "--dry-run")
    assert answer.status == 0 and f"  steps      {8 if at > 6 else 6} of 4 × 16 tokens" in answer.out, answer
    *_, would, refused = answer.out.splitlines()
    assert re.search(f"The run would {said}", would), answer
    assert refused.startswith(f"Behind step {at} it would refuse train.steps = 100000: Up to train.steps = 100,000,")
    reason = refused.partition("100000: ")[2]
    assert forked("train", finished.config, *keys).status == 0
    assert [each["reason"] for each in events(run) if each["event"] == "change refused"] == [reason]
