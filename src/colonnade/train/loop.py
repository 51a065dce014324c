"""One run from start to end: resume, step, report, evaluate, save.

main ─▶ join the ranks ─▶ folder, data, state, newest checkpoint ─▶ each step: train_step, evaluate, record, save
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from colonnade.architecture.devices import peak_flops
from colonnade.architecture.parts import trained_architecture
from colonnade.checkpoint.names import folder_name
from colonnade.config.numbers import counted
from colonnade.config.schema import Config
from colonnade.errors import ConfigError, CopiesError
from colonnade.launch import launch
from colonnade.launch.agreement import on_all_ranks, settings
from colonnade.launch.join import joined
from colonnade.launch.restart_policy import NO_RESTART
from colonnade.launch.supervisor import UNFINISHED
from colonnade.mesh.background import background_group
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, Mesh
from colonnade.train import damaged, init_from, recovery, reference, same_run, shared_folder, taught
from colonnade.train.beginning import Course, beginning_of, course_of, seen_behind_rollback
from colonnade.train.best import LOSS, evaluations_since_best, none_better
from colonnade.train.change import as_it_began
from colonnade.train.corpus import Corpus, check_evaluations, open_together
from colonnade.train.counted_labels import check_labels
from colonnade.train.divergence import Diverged
from colonnade.train.held_out import Evaluation, evaluate_part
from colonnade.train.in_force import InForce
from colonnade.train.interrupt import STOPPED, Interrupt, Request
from colonnade.train.memory_copies import MemoryCopies
from colonnade.train.monitor import Monitor
from colonnade.train.newest import begins, is_saved
from colonnade.train.products import Decision, settle
from colonnade.train.profile import Profile
from colonnade.train.read_ahead import ReadAhead, pays
from colonnade.train.repair import Repair
from colonnade.train.save_retries import SaveRetries
from colonnade.train.slow_ranks import SlowRanks
from colonnade.train.state import TrainState, build_state
from colonnade.train.step import DATA, StepResult, train_step
from colonnade.train.trackers import trackers
from colonnade.train.undo import roll_back
from colonnade.train.uploads import Uploads, uploads_of

STOPPED_EARLY = "stopped early"
"""The event of a run that train.patience has ended."""
DATA_SETS_TOLD = 16
"""Of so many data sets of a blend, at most, the terminal shows what an evaluation found."""


@dataclass(frozen=True)
class Banner:
    """A run in lines and in numbers, shown before its first step."""

    text: str
    fields: dict[str, Any]
    """For events.jsonl: sizes in bytes."""
    impossible: str = ""
    """Why this rank cannot have what it needs, whatever else is freed; "" where it may."""

    def check(self) -> None:
        """A ConfigError where it is impossible."""
        if self.impossible:
            raise ConfigError(self.impossible)


@dataclass(frozen=True)
class Run:
    """What stays the same from one change of the configuration to the next."""

    config: Config
    mesh: Mesh
    device: torch.device
    corpus: Corpus
    monitor: Monitor
    checkpoints: recovery.Checkpoints
    data: ReadAhead
    profile: Profile
    slow_ranks: SlowRanks
    copies: MemoryCopies
    uploads: Uploads
    in_force: InForce


def main(
    config: Config,
    banner: Callable[[Course, Mesh, torch.device, Corpus, Decision], Banner],
    within: Callable[[Config, int, Mesh, torch.device], AbstractContextManager[None]] = lambda *_: nullcontext(),
    *,
    dry_run: bool = False,
    profile: range = range(0),
    again: Callable[[], Config] | None = None,
) -> None:
    """Train as `config` says, as one rank of its layout; every rank calls this. `dry_run`: stop before the state is
    made; nothing is written. `profile`: steps to be timed in all their parts. `again`: reads the configuration once
    more when ranks are together, with what rank 0 has fetched by then. `banner`, which every rank calls, describes the
    run and predicts it, and `within` (`planner.memory_limit`) tells of memory: both are of higher floors.
    """
    layout = Layout(tp=config.parallel.tp, pp=config.parallel.pp, dp=config.parallel.dp)
    joining = joined(
        layout,
        config.train.device,
        config.train.threads,
        timeout=config.train.timeout,
        deterministic=config.train.deterministic,
        properties=settings(config),
    )
    with joining as (mesh, device):
        config = config if again is None else on_all_ranks(again, mesh.world)
        shared_folder.check(config, mesh.world)
        corpus = open_together(config, mesh.world)
        watched = within(config, corpus.vocab_size, mesh, device)
        with watched, closing(_monitor(config, mesh, corpus, device)) as monitor:
            seen = seen_behind_rollback(config, mesh.world) if dry_run else damaged.look(config, mesh.world, monitor)
            decision = settle(config, corpus.vocab_size, mesh.world, device, seen)
            drawn, products = begins(config, mesh.world, seen), decision.products
            if drawn:
                check_evaluations(config, corpus.datasets)
                check_labels(config, corpus, mesh.world)
            has_base = config.lora.rank > 0 and config.train.init_from is not None
            origin = init_from.opened(config, corpus, mesh.world, begins=drawn) if drawn or has_base else None
            if mesh.rank == 0 and not dry_run:
                same_run.occupy(config)
            course = course_of(config, corpus, mesh.world, seen)
            summary = banner(course, mesh, device, corpus, decision)
            monitor.say(summary.text)
            on_all_ranks(summary.check, mesh.world)
            if dry_run:
                begins_so = beginning_of(config, corpus, course, mesh, origin, seen)
                monitor.say("\n".join([f"Nothing was trained or saved. The run would {begins_so}.", *course.refused]))
                return
            state = build_state(config, mesh, corpus.vocab_size, device, draw=drawn, products=products)
            if has_base and origin is not None:
                state.base = init_from.based_on(origin, state, mesh.world)
            copies = MemoryCopies(config, mesh, monitor)
            recovery.resume(state, config, corpus, monitor, partial(copies.restored, known=seen))
            del seen  # large
            if origin is not None:
                (init_from.begin_from if drawn else init_from.read_base)(origin, state, corpus, monitor)
            reference.attach(state, config, corpus, mesh, monitor)
            taught.attach(state, config, corpus, mesh, monitor)
            monitor.event("setup", **summary.fields)
            timed = Profile(profile, state.step, config, mesh, device, monitor)
            _to_its_end(config, mesh, device, corpus, monitor, state, timed, copies, decision.metadata())


def _to_its_end(
    config: Config,
    mesh: Mesh,
    device: torch.device,
    corpus: Corpus,
    monitor: Monitor,
    state: TrainState,
    profile: Profile,
    copies: MemoryCopies,
    products: Mapping[str, Any] | None,
) -> None:
    """All steps that are left, with everything about them: saving, reading ahead, and who wants the run to stop."""
    following = InForce(as_it_began(config, state.changes), corpus, mesh, monitor)
    following.read(state.step, state.rollbacks)
    repair, retries = Repair(monitor), SaveRetries(config.checkpoint.retry_for)
    slow_ranks = SlowRanks(config.run, mesh, monitor)
    copies.begin(state)
    interrupt = Interrupt(Path(config.run.folder) if mesh.rank == 0 else None, config.run.time_limit, launch.began())
    uploads = uploads_of(config, monitor, active=mesh.rank == 0)
    group = background_group(max(config.train.timeout, recovery.PATIENCE)) if config.checkpoint.asynchronous else None
    saving = partial(recovery.saving, overlap=True, products=products, retries=retries, uploads=uploads, group=group)
    with interrupt, uploads, _failure_told(monitor):
        changed = True
        while changed:
            config, corpus = following.follow(state)
            retries.limit = config.checkpoint.retry_for
            uploads.follow(config.checkpoint)
            kept = saving(state, config, mesh, corpus, monitor)
            read = partial(corpus.batches, micro_batch_size=config.train.micro_batch_size, dp=mesh.data)
            with kept as checkpoints, ReadAhead(read, active=pays(device, corpus)) as data:
                run = Run(
                    config,
                    mesh,
                    device,
                    corpus,
                    monitor,
                    checkpoints,
                    data,
                    profile,
                    slow_ranks,
                    copies,
                    uploads,
                    following,
                )
                changed = _train(run, state, interrupt, repair)
                checkpoints.settle(state)
        _finish(config, state, monitor)


@contextmanager
def _failure_told(monitor: Monitor) -> Iterator[None]:
    """An error that ends a run of one rank is an event: it has no supervisor that would write down how it has ended."""
    try:
        yield
    except Exception as error:
        if not launch.is_rank():
            with suppress(ConfigError):  # the disk, of which the error may tell
                monitor.event(NO_RESTART, reason=f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")
        raise


def _train(run: Run, state: TrainState, interrupt: Interrupt, repair: Repair) -> bool:
    """Steps up to the last. True where they end before, because another configuration is in force from there on."""
    config, monitor = run.config, run.monitor
    every, compare_every = config.checkpoint.every, config.checkpoint.compare_copies_every
    if state.step >= config.train.steps:
        monitor.say(f"Nothing is left to do: train.steps = {config.train.steps:,}. To train on, raise it.")
    if state.step == 0 and config.train.evaluate_at_start:
        _evaluate_at_start(run, state)
    enough = _is_enough(run)
    if enough and not is_saved(config, state.step, run.mesh.world):  # a change has made them enough
        enough = _kept(run, state, saves=True, must=True, repair=repair)
    while not enough and (state.step < config.train.steps or run.in_force.prolongs(state)):
        if run.in_force.is_over(state):
            return True
        run.mesh.ledger.begin_step(state.step + 1)
        try:
            metrics = _step(run, state)
        except Diverged as diverged:
            roll_back(
                diverged.found,
                state,
                run.checkpoints,
                config=config,
                mesh=run.mesh,
                corpus=run.corpus,
                monitor=monitor,
                copies=run.copies,
            )
            run.uploads.wake(refresh=True)
            continue
        again = run.checkpoints.has_failed or (run.mesh.rank == 0 and run.checkpoints.is_due)
        mine = max(interrupt.newest(), Request.SAVE if again else Request.NOTHING)
        request, news = divmod(run.slow_ranks.largest(2 * int(mine) + run.in_force.has_news(), state.step), 2)
        enough = LOSS in metrics and not run.in_force.is_over(state) and _is_enough(run)
        stop, at_end = request == Request.STOP, state.step == config.train.steps
        if news and not (stop or enough):
            run.in_force.read(state.step, state.rollbacks)
        last = enough or (at_end and not run.in_force.prolongs(state))
        run.profile.finish(state.step, ends=last or stop)
        saves = request or last or at_end or (every and state.step % every == 0)
        copies = not saves and run.copies.are_due(state.step)
        compares = copies or (compare_every and state.step % compare_every == 0)
        must = last or at_end or stop  # at an end too behind which more is to come: that may be refused
        if (saves or compares) and not _kept(run, state, saves=bool(saves), must=must, repair=repair):
            enough = False  # the evaluation that said so is undone
            continue
        if copies:
            run.copies.save(state, run.checkpoints.payload(state))
        run.copies.say_recovered(state.step)
        if stop and not last:
            run.checkpoints.wait()
            monitor.event(STOPPED, step=state.step, loss=metrics.get("loss"))
            monitor.say(
                f"{after_ctrl_c(interrupt)}Stopped after step {state.step}{interrupt.reason}; everything is saved. "
                "Run the same command again to go on from here."
            )
            raise SystemExit(_status(interrupt, run.mesh.world))
    return False


def _status(interrupt: Interrupt, world: Axis) -> int:
    """The exit status of all ranks that stop: one that ends with 0 beside others has finished, to a launcher on several
    machines, which waits for ever for the rest. UNFINISHED where any rank has that: only such a run is queued again.
    """
    mine = interrupt.exit_code
    unfinished, signalled = all_reduce(torch.tensor([int(mine == UNFINISHED), mine]), world, "max").tolist()
    return UNFINISHED if unfinished else int(signalled)


def _kept(run: Run, state: TrainState, *, saves: bool, must: bool, repair: Repair) -> bool:
    """Save the state, or compare its copies alone. False where these differed and the state is an earlier one now."""
    while True:
        try:
            if saves:
                run.checkpoints.save(state, must=must)
            else:
                run.checkpoints.compare(state)
        except CopiesError as found:
            if repair(state, found, run.config, run.corpus, run.checkpoints, run.copies):
                return False
        else:
            return True


def _is_enough(run: Run) -> bool:
    """Whether train.patience evaluations in a row, as rank 0 has written them down, were none the better. Every rank
    calls this.
    """
    patience = run.config.train.patience
    if not patience:
        return False
    since = evaluations_since_best(Path(run.config.run.folder)) if run.mesh.rank == 0 else 0
    enough = bool(all_reduce(torch.tensor(int(since >= patience)), run.mesh.world, "max"))
    if enough:
        run.monitor.event(STOPPED_EARLY, evaluations=since)
        why = none_better(since, patience)
        run.monitor.say(f"{why[0].upper()}{why[1:]}.")
    return enough


def after_ctrl_c(interrupt: Interrupt) -> str:
    """A terminal shows ^C where it was typed: what follows begins on a line of its own."""
    return "\n" if interrupt.exit_code == 128 + signal.SIGINT and sys.stdout.isatty() else ""


def _step(run: Run, state: TrainState) -> dict[str, float | int]:
    """One step with its evaluation, recorded."""
    started = time.perf_counter()
    config, curriculum, position = run.config, run.corpus.curriculum, state.samples
    following = curriculum.next(position)
    with run.profile.step(state), run.slow_ranks.step():
        with run.mesh.ledger.part(DATA):
            loaded = run.data.take(position, following if state.step + 1 < config.train.steps else None)
            batches = [batch.to(run.device) for batch in loaded]
        result = train_step(state, batches, run.mesh, config.train, before_update=run.checkpoints.copied)
    state.samples = following
    seconds = time.perf_counter() - started
    _check_not_diverged(run, state, result)
    metrics: dict[str, float | int] = {
        "step": state.step,
        **_losses(state, result),
        "learning_rate": result.learning_rate,
        **({} if result.skipped else {"grad_norm": result.grad_norm}),
        "tokens": state.trained_on * curriculum.unit * config.model.sequences,
    }
    if state.loss_scale.is_dynamic:
        metrics |= {"loss_scale": result.loss_scale, "skipped_steps": state.skipped}
    every = config.train.evaluation_interval
    found = _evaluate(run, state) if every and (state.step % every == 0 or state.step == config.train.steps) else None
    metrics |= _numbers(found)
    run.monitor.beat(state.step, config.run.heartbeat)
    if result.reading is not None:
        run.monitor.thermometers(result.reading.to_json(), result.reading.summary())
    run.monitor.step(metrics, seconds, tokens=(state.samples - position) * curriculum.unit * config.model.sequences)
    if found is not None:
        run.monitor.say(_told(f"at step {state.step}", found, "metrics.jsonl"))
    return metrics


def _losses(state: TrainState, result: StepResult) -> dict[str, float]:
    """The loss and, of a task with several, each by its name; without those in which nothing counts."""
    names = state.model.architecture.losses
    each = {f"{name}_loss": loss for name, loss in zip(names, result.losses, strict=True)} if len(names) > 1 else {}
    return {name: loss for name, loss in {"loss": result.loss, **each}.items() if loss is not None}


def _check_not_diverged(run: Run, state: TrainState, result: StepResult) -> None:
    """Diverged where a step shows it: a non-finite loss or gradient has already corrupted the weights, and they must
    not be saved.
    """
    found = state.watch.sees(
        run.config.divergence, state.step, result.loss, result.grad_norm, skipped=result.skipped, reading=result.reading
    )
    if found is not None:
        raise Diverged(found)


def _evaluate(run: Run, state: TrainState) -> Evaluation | None:
    """Loss on the validation part, where there is one."""
    corpus, train = run.corpus, run.config.train
    if corpus.datasets.validation is None:
        return None
    run.data.settle()
    found = evaluate_part(
        state.model,
        corpus.datasets.validation,
        corpus,
        run.mesh,
        hidden=state.inference.hidden,
        samples=train.evaluate_samples,
        micro_batch_size=train.micro_batch_size,
    )
    if corpus.questions is not None:
        hidden, size = state.inference.hidden, train.micro_batch_size
        found = replace(found, questions=corpus.questions.score(state.model, run.mesh, hidden, batch_size=size))
    state.inference.close()
    return found


def _evaluate_at_start(run: Run, state: TrainState) -> None:
    run.mesh.ledger.begin_step(0)
    found = _evaluate(run, state)
    if found is not None:
        run.monitor.event("evaluated", step=0, **_numbers(found))
        run.monitor.say(_told("before step 1", found, "events.jsonl"))


def _told(when: str, found: Evaluation, file: str) -> str:
    """An evaluation for the terminal, in lines; `file` has all of its numbers."""
    lines = [f"  validation {when}: {found.found.summary()}", *found.of_each(DATA_SETS_TOLD)]
    if (more := len(found.each) - DATA_SETS_TOLD) > 0:
        lines.append(f"and {counted(more, 'more data set')}: {file} has all")
    return "\n    ".join(lines)


def _numbers(found: Evaluation | None) -> dict[str, float]:
    """An evaluation for metrics.jsonl."""
    return {} if found is None else {f"validation_{name}": number for name, number in found.numbers().items()}


def _finish(config: Config, state: TrainState, monitor: Monitor) -> None:
    """A last word."""
    best = recovery.best(config)
    found = {} if best is None else {"best": folder_name(best.step), LOSS: best.validation_loss}
    monitor.event("finished", step=state.step, **found)
    if state.skipped == state.step > 0:
        monitor.say(
            "No step has changed a weight: the fp16 gradients of each overflowed. The loss scale is halved each time, "
            f"and is {state.loss_scale.value:.2g} now. Raise train.steps, or begin in another run.folder with a lower "
            "train.loss_scale."
        )
    named = "" if best is None else f"; its best checkpoint is {folder_name(best.step)} ({best})"
    monitor.say(f"Finished {counted(state.step, 'step')}. The run is in {config.run.folder}{named}.")


def _monitor(config: Config, mesh: Mesh, corpus: Corpus, device: torch.device) -> Monitor:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = peak_flops(name, config.train.precision)
    return Monitor(
        Path(config.run.folder),
        active=mesh.rank == 0,
        steps=config.train.steps,
        log_every=config.train.log_every,
        tokens_per_step=config.train.global_batch_size * config.model.sample_length,
        flops_per_token=trained_architecture(config, corpus.vocab_size).flops_per_token,
        peak_flops=None if peak is None else peak * mesh.layout.num_ranks,
        patient=config.checkpoint.retry_for > 0,
        trackers=trackers(config) if mesh.rank == 0 else (),
        tracking_patience=config.tracking.patience,
    )
