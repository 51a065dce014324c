"""A run from start to end: what it prints, what it writes, when it evaluates and saves, and what its numbers are."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.architecture.families import architecture_of
from colonnade.config.load import load
from colonnade.config.schema import Config, DivergenceConfig
from colonnade.errors import ColonnadeError, ConfigError, CopiesError
from colonnade.launch import launch
from colonnade.launch.agreement import settings
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh, build_mesh
from colonnade.optim.loss_scale import LossScale
from colonnade.train import loop
from colonnade.train.best import Best
from colonnade.train.divergence import Diverged, LossWatch
from colonnade.train.step import StepResult
from tests import tiny
from tests.commands import forked
from tests.distributed import run_on_ranks
from tests.runs import Finished, events, metrics, saved_steps
from tests.tiny import TinyCorpus, write_config
from tests.told import Told

EVALUATION = {"validation_loss", "validation_perplexity", "validation_bits_per_byte"}


def test_a_run_leaves_its_folder(finished: Finished) -> None:
    assert sorted(path.name for path in finished.folder.iterdir()) == [
        "checkpoints",
        "comparison.json",
        "config.toml",
        "events.jsonl",
        "metrics.jsonl",
        "prediction.json",
    ]
    assert load(finished.folder / "config.toml") == load(finished.config)
    assert load(finished.newest / "config.toml") == load(finished.config)
    assert (finished.newest / "tokenizer.json").is_file()
    assert [event["event"] for event in events(finished.folder)] == [
        "started",
        "setup",
        "saved",
        "saved",
        "saved",
        "best",
        "finished",
    ]


def test_metrics_have_every_step(finished: Finished) -> None:
    lines = metrics(finished.folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["tokens"] for line in lines] == [64 * step for step in range(1, 7)]
    assert lines[0]["loss"] == pytest.approx(math.log(275), rel=0.05), "an untrained model knows nothing"
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert [line["learning_rate"] for line in lines[:2]] == [0.005, 0.01]
    assert all(line["grad_norm"] > 0 for line in lines)


def test_what_is_set_of_the_machine_takes_effect(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is to be deterministic and is not would look the same."""
    told: dict[str, Any] = {}

    def joined(*given: Any, **more: Any) -> None:
        told.update(given=given, **more)
        raise ColonnadeError("far enough")

    monkeypatch.setattr(loop, "joined", joined)
    options = ["train.threads=3", "train.timeout=77", "train.deterministic=true", "parallel.dp=2"]
    config = tiny.config(corpus, tmp_path, *options)
    with pytest.raises(ColonnadeError, match="far enough"):
        loop.main(config, banner=lambda *_: pytest.fail("there are no ranks"))
    assert told.pop("given") == (Layout(dp=2), "cpu", 3)
    assert told == {"timeout": 77.0, "deterministic": True, "properties": settings(config)}


def test_ranks_that_have_come_together_read_the_configuration_again(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what rank 0 has fetched of the run until then. All see its folder before, in a dry run too."""
    given, before = list[tuple[str, Config]](), tiny.config(corpus, tmp_path)
    fetched = tiny.config(corpus, tmp_path, "train.steps=9")

    def open_together(config: Config, ranks: Any) -> None:
        given.append(("data", config))
        raise ColonnadeError("far enough")

    def check(config: Config, ranks: Any) -> None:
        assert ranks is mesh.world
        given.append(("folder", config))

    mesh = Mesh()
    monkeypatch.setattr(loop, "joined", lambda *_, **more: nullcontext((mesh, loop.torch.device("cpu"))))
    monkeypatch.setattr(loop, "open_together", open_together)
    monkeypatch.setattr(loop.shared_folder, "check", check)
    for again, dry_run in ((None, False), (lambda: fetched, True)):
        with pytest.raises(ColonnadeError, match="far enough"):
            loop.main(before, banner=lambda *_: pytest.fail("nothing is open"), again=again, dry_run=dry_run)
    assert given == [(what, config) for config in (before, fetched) for what in ("folder", "data")]


@pytest.mark.slow
def test_mfu_is_of_all_ranks_together(corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices compute twice as much at their best."""
    monkeypatch.setattr(loop, "peak_flops", lambda name, precision: 1e8)
    flops = architecture_of(tiny.config(corpus, tmp_path).model, tiny.VOCAB_SIZE).flops_per_token
    for ranks in (1, 2):
        run = tmp_path / str(ranks)
        options = (f"parallel.dp={ranks}", "train.steps=1", "train.evaluate_every=0", f"run.folder={run}")
        assert forked("train", write_config(corpus, tmp_path), *options, num_ranks=ranks).status == 0
        line = json.loads((run / "metrics.jsonl").read_text())
        assert 0 < line["mfu"] == pytest.approx(line["tokens_per_second"] * flops / (ranks * 1e8), rel=1e-2, abs=1e-4)


def test_evaluations_are_in_the_metrics(finished: Finished) -> None:
    lines = metrics(finished.folder)
    assert [line.keys() >= EVALUATION for line in lines] == [False, False, True, False, False, True]
    for line in (lines[2], lines[5]):
        assert line["validation_perplexity"] == pytest.approx(math.exp(line["validation_loss"]), rel=1e-12)
        assert 0 < line["validation_bits_per_byte"] < 10
    assert not EVALUATION & lines[0].keys()


@pytest.mark.slow
def test_where_a_run_starts_from_can_be_evaluated(config: Path, tmp_path: Path, finished: Finished) -> None:
    answer = forked("train", config, "train.evaluate_at_start=true")
    (found,) = (event for event in events(tmp_path / "run") if event["event"] == "evaluated")
    assert found["step"] == 0 and found["validation_loss"] == pytest.approx(math.log(275), rel=0.05)
    lines = answer.out.splitlines()
    (at,) = (number for number, line in enumerate(lines) if "validation before step 1: loss" in line)
    assert lines[at + 1].startswith("step 1/6")
    assert metrics(tmp_path / "run") == metrics(finished.folder), "the run is the same"
    assert "before step 1" not in forked("train", config, "train.evaluate_at_start=true", "train.steps=7").out


@pytest.mark.slow
def test_evaluation_is_on_by_default_where_there_is_a_validation_part(config: Path, tmp_path: Path) -> None:
    config.write_text(config.read_text().replace("evaluate_every = 3\n", ""))
    assert forked("train", config).status == 0
    assert [line.keys() >= EVALUATION for line in metrics(tmp_path / "run")] == [False] * 5 + [True]
    answer = forked("train", config, "data.split=1:0", f"run.folder={tmp_path}/other")
    assert answer.status == 0 and "there is no validation part, so that nothing is evaluated" in answer.out


def test_the_last_step_is_always_evaluated(config: Path, tmp_path: Path, finished: Finished) -> None:
    answer = forked("train", config, "train.evaluate_every=4", "train.evaluate_samples=1")
    assert [line.keys() >= EVALUATION for line in metrics(tmp_path / "run")] == [False, False, False, True, False, True]
    assert answer.out.count("validation at step") == 2
    few, more = (metrics(folder)[-1] for folder in (tmp_path / "run", finished.folder))
    assert few["loss"] == more["loss"] and few["validation_loss"] != more["validation_loss"], "of one sample, not four"


@pytest.mark.slow
def test_no_bits_per_byte_without_a_tokenizer(config: Path, corpus: TinyCorpus, tmp_path: Path) -> None:
    config.write_text(config.read_text().replace(f'tokenizer = "{corpus.tokenizer}"\n', ""))
    assert forked("train", config).status == 0
    last = metrics(tmp_path / "run")[-1]
    assert "validation_perplexity" in last and "validation_bits_per_byte" not in last
    assert not (tmp_path / "run/checkpoints/step_00000006/tokenizer.json").exists()


def test_what_is_printed(config: Path, tmp_path: Path) -> None:
    answer = forked("train", config, "train.log_every=2", "parallel.dp=2", num_ranks=2)
    assert (answer.status, answer.err) == (0, "")
    lines = answer.out.splitlines()
    begins = [line.split()[0] for line in lines[:10]]
    assert begins == ["model", "layout", "device", "precision", "products", "data", "steps", "memory", "free", "note"]
    assert [line.split("  ")[0] or line.strip()[:20] for line in lines[10:]] == [
        "step 1/6",
        "step 2/6",
        "validation at step 3",
        "step 4/6",
        "step 6/6",
        "validation at step 6",
        f"Finished 6 steps. The run is in {tmp_path}/run; its best checkpoint is step_00000006 (validation loss "
        f"{metrics(tmp_path / 'run')[-1]['validation_loss']:.4f}).",
    ]


def test_every_layout_trains_the_same(finished: Finished, config: Path, tmp_path: Path) -> None:
    """In fp32, where sums in another order differ a little."""
    assert forked("train", config, "parallel.tp=2", num_ranks=2).status == 0
    for ours, theirs in zip(metrics(tmp_path / "run"), metrics(finished.folder), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)


@pytest.mark.slow
def test_bf16_trains(config: Path, tmp_path: Path, finished: Finished) -> None:
    assert forked("train", config, "train.precision=bf16").status == 0
    ours, theirs = metrics(tmp_path / "run")[-1], metrics(finished.folder)[-1]
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.05)


@pytest.mark.slow
def test_a_diverged_run_saves_nothing_of_it(config: Path, tmp_path: Path) -> None:
    answer = forked("train", config, "optim.learning_rate=1e30", "optim.warmup_steps=0", "checkpoint.every=1")
    assert answer.status == 2 and "the run has diverged" in answer.err, answer
    assert "Traceback" not in answer.err
    step = len(metrics(tmp_path / "run"))
    assert step < 6 and all(saved <= step for saved in saved_steps(tmp_path / "run"))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_ends_a_run_whose_loss_is(number: float) -> None:
    """A step that has left it out, as fp16's do, is none."""
    run: Any = SimpleNamespace(config=SimpleNamespace(divergence=DivergenceConfig()))
    state: Any = SimpleNamespace(step=7, watch=LossWatch())
    result = StepResult(2.5, number, 0.1, (2.5,), (8,), 1.0, skipped=False)
    with pytest.raises(Diverged, match=f"has loss 2.5 and gradient norm {number}") as caught:
        loop._check_not_diverged(run, state, result)
    assert caught.value.found.step == 7
    loop._check_not_diverged(run, state, replace(result, skipped=True))
    loop._check_not_diverged(run, state, replace(result, grad_norm=1.0))
    with pytest.raises(Diverged):
        loop._check_not_diverged(run, state, replace(result, loss=number, grad_norm=1.0))


def test_spikes_are_told_by_the_rules_of_the_configuration() -> None:
    rules = DivergenceConfig(spike=10.0, window=3, patience=1)
    run: Any = SimpleNamespace(config=SimpleNamespace(divergence=rules))
    state: Any = SimpleNamespace(step=7, watch=LossWatch())
    result = StepResult(2.5, 1.0, 0.1, (2.5,), (8,), 1.0, skipped=False)
    for loss in (2.5, 2.6, 2.4):
        loop._check_not_diverged(run, state, replace(result, loss=loss))
    with pytest.raises(Diverged, match="has loss 9"):
        loop._check_not_diverged(run, state, replace(result, loss=9.0))


def patient(folder: Path, patience: int, mesh: Mesh) -> Any:
    train, run = SimpleNamespace(patience=patience), SimpleNamespace(folder=str(folder))
    return SimpleNamespace(config=SimpleNamespace(train=train, run=run), mesh=mesh, monitor=Told())


@pytest.mark.parametrize(("patience", "is_enough"), [(0, False), (1, True), (2, True), (3, False)])
def test_evaluations_in_a_row_that_were_none_the_better_are_enough(
    tmp_path: Path, patience: int, is_enough: bool
) -> None:
    """Two behind the best one."""
    losses = "".join(
        f'{{"step": {n}, "validation_loss": {loss}}}\n' for n, loss in ((1, 1.5), (2, 1.0), (3, 2.0), (4, 1.0))
    )
    (tmp_path / "metrics.jsonl").write_text(losses)
    run = patient(tmp_path, patience, Mesh())
    assert loop._is_enough(run) == is_enough
    assert run.monitor.of("stopped early") == [{"evaluations": 2}] * is_enough
    said = f"The last 2 evaluations found no lower loss (train.patience = {patience})."
    assert run.monitor.said == [said] * is_enough


def test_what_rank_0_has_written_down_ends_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "validation_loss": 1.0}\n{"step": 2, "validation_loss": 2.0}\n'
    )

    def decide(rank: int, num_ranks: int) -> bool:
        folder = tmp_path if rank == 0 else tmp_path / "of another machine"
        return loop._is_enough(patient(folder, 1, build_mesh(Layout(dp=2), rank)))

    assert run_on_ranks(decide, 2) == [True, True]


@pytest.mark.parametrize(
    ("code", "terminal", "said"), [(130, True, "\n"), (130, False, ""), (143, True, ""), (0, True, "")]
)
def test_what_is_said_behind_a_typed_ctrl_c_begins_a_line(
    monkeypatch: pytest.MonkeyPatch, code: int, terminal: bool, said: str
) -> None:
    monkeypatch.setattr("sys.stdout", SimpleNamespace(isatty=lambda: terminal))
    interrupt: Any = SimpleNamespace(exit_code=code)
    assert loop.after_ctrl_c(interrupt) == said


@pytest.mark.parametrize("is_rank", [False, True])
def test_an_error_that_ends_a_run_is_an_event_unless_a_supervisor_tells_of_it(
    monkeypatch: pytest.MonkeyPatch, is_rank: bool
) -> None:
    """Else whoever watches a run of one rank waits for ever."""
    told = Told()
    monkeypatch.setattr(launch, "is_rank", lambda: is_rank)
    with pytest.raises(ConfigError), loop._failure_told(told):  # type: ignore[arg-type]
        raise ConfigError("It is full.\nFree some space.")
    with pytest.raises(MemoryError), loop._failure_told(told):  # type: ignore[arg-type]
        raise MemoryError
    with pytest.raises(SystemExit), loop._failure_told(told):  # type: ignore[arg-type]
        raise SystemExit(99)
    reasons = [] if is_rank else ["ConfigError: It is full.", "MemoryError: "]
    assert told.events == [("no restart", {"reason": reason}) for reason in reasons]


def test_each_of_several_losses_is_told_by_its_name() -> None:
    def told(*names: str) -> dict[str, float]:
        state: Any = SimpleNamespace(model=SimpleNamespace(architecture=SimpleNamespace(losses=names)))
        losses = (1.5, 0.5)[: len(names)]
        result: Any = SimpleNamespace(loss=sum(losses), losses=losses)
        return loop._losses(state, result)

    assert told("masked", "order") == {"loss": 2.0, "masked_loss": 1.5, "order_loss": 0.5}
    assert told("loss") == {"loss": 1.5}


def test_the_last_word_of_a_run_names_its_best_checkpoint(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, state = tiny.config(corpus, tmp_path), SimpleNamespace(step=6, skipped=5)
    for best in (Best(4, 1.25), None):
        told, found = Told(), best
        monkeypatch.setattr(loop.recovery, "best", lambda config, found=found: found)
        loop._finish(config, state, told)  # type: ignore[arg-type]
        named = "; its best checkpoint is step_00000004 (validation loss 1.2500)" if best else ""
        assert told.said == [f"Finished 6 steps. The run is in {config.run.folder}{named}."]
        assert told.of("finished") == [
            {"step": 6, **({"best": "step_00000004", "validation_loss": 1.25} if best else {})}
        ]


def test_a_run_that_has_changed_no_weight_says_so(corpus: TinyCorpus, tmp_path: Path) -> None:
    told, state = Told(), SimpleNamespace(step=6, skipped=6, loss_scale=LossScale(2.0**26, window=1000))
    loop._finish(tiny.config(corpus, tmp_path), state, told)  # type: ignore[arg-type]
    assert told.said[0] == (
        "No step has changed a weight: the fp16 gradients of each overflowed. The loss scale is halved each time, and "
        "is 6.7e+07 now. Raise train.steps, or begin in another run.folder with a lower train.loss_scale."
    )
    assert told.said[1].startswith("Finished 6 steps.")


@pytest.mark.parametrize("saves", [True, False])
def test_copies_that_differ_are_compared_again_or_the_state_is_an_earlier_one(saves: bool) -> None:
    """Which of both, the repair says."""
    calls: list[str] = []

    def differ(what: str) -> None:
        calls.append(what)
        if calls.count(what) == 1:
            raise CopiesError("they differ")

    def kept(is_earlier: bool) -> bool:
        calls.clear()
        checkpoints = SimpleNamespace(
            save=lambda state, *, must: differ(f"save, must {must}"), compare=lambda state: differ("compare")
        )
        run: Any = SimpleNamespace(config=None, corpus=None, copies=None, checkpoints=checkpoints)
        state, repair = SimpleNamespace(), lambda *_: is_earlier
        return loop._kept(run, state, saves=saves, must=True, repair=repair)  # type: ignore[arg-type]

    what = "save, must True" if saves else "compare"
    assert kept(False) and calls == [what] * 2
    assert not kept(True) and calls == [what]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_tells_what_happens_as_the_configuration_says(
    corpus: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(loop, "Monitor", lambda folder, **more: given.update(more))
    monkeypatch.setattr(loop, "trackers", lambda config: ("a tracker",))
    monkeypatch.setattr(loop, "peak_flops", lambda name, precision: 1e8)
    mesh: Any = SimpleNamespace(rank=rank, layout=Layout(dp=2))
    data: Any = SimpleNamespace(vocab_size=275)
    for limit in (0, 60):
        keys = ("train.log_every=7", f"checkpoint.retry_for={limit}", "tracking.patience=3")
        config = tiny.config(corpus, tmp_path, *keys)
        loop._monitor(config, mesh, data, loop.torch.device("cpu"))
        assert (given["active"], given["trackers"]) == ((True, ("a tracker",)) if rank == 0 else (False, ()))
        assert (given["steps"], given["log_every"], given["tokens_per_step"]) == (6, 7, 64)
        assert given["patient"] == bool(limit) and given["tracking_patience"] == 3
        assert given["peak_flops"] == 2e8, "of all ranks together"
        assert given["flops_per_token"] == architecture_of(config.model, 275).flops_per_token


def test_resuming_can_be_refused(finished: Finished) -> None:
    answer = forked("train", finished.config, "checkpoint.resume=false")
    assert answer.status == 2 and "already has step_00000006, and checkpoint.resume = false" in answer.err


def test_tensorboard_that_is_not_there_is_told_before_anything_is_written(config: Path, tmp_path: Path) -> None:
    def without_tensorboard(rank: int) -> None:
        import sys

        sys.modules["torch.utils.tensorboard"] = None  # type: ignore[assignment]

    answer = forked("train", config, "run.tensorboard=true", first=without_tensorboard)
    assert answer.status == 2 and "pip install 'colonnade[track]'" in answer.err
    assert not (tmp_path / "run").exists()


def test_main_is_for_what_the_command_line_gives_it(corpus: TinyCorpus, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "nowhere.toml")
