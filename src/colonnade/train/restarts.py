"""A local run that comes back by itself: started, watched, and started again as `restart_policy.decide` says.

    start ─▶ ranks on all places ─▶ ended well, or as asked ─▶ done
      ▲                        └──▶ failed ─▶ decide ─▶ no ─▶ its exit status
      └── same layout, or the best for the places left ◀── yes

Everything is decided in the process that was started by hand, which imports no torch and has locked the run's folder.
Each failure and each decision is an event, written while no rank runs.
"""

import errno
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple, TypeVar

from colonnade.checkpoint.names import newest_step
from colonnade.config.fitting import Fit, fitting
from colonnade.config.schema import Config
from colonnade.errors import DiskError, LayoutError, MemoryShortError, name_of
from colonnade.launch import launch
from colonnade.launch.devices import count_gpus, gpus_now
from colonnade.launch.process import ASK_TO_END, hear_no_more
from colonnade.launch.restart_policy import ENDS, NO_RESTART, Attempt, Decision, Kind, decide
from colonnade.launch.supervisor import CRASH, EXCEPTION, MISTAKE, UNFINISHED, USER_MISTAKE, WAIT, At, Cause, Ended
from colonnade.lock import NAME as LOCK
from colonnade.train.interrupt import STOPPED, is_there
from colonnade.train.memory_folder import folder_for
from colonnade.train.monitor import METRICS, last_step, write_event
from colonnade.train.run_folder import LEAVE_FILE, STOP_FILE, checkpoints, was_asked_to_change
from colonnade.train.save_retries import SaveRetries

POLL = 2.0  # seconds between looks for GPUs that are missing, and into a folder that is lost for a while
TRIES = 30  # to look into it
RECALL_AGAIN = 60.0  # seconds until a recall that the disk has refused is tried again
DEVICE_WORDS = ("cuda", "nccl", "cublas", "cudnn", "distbackend", "distnetwork", "connection", "gloo", "timed out")
OUT_OF_MEMORY, DISK = MemoryShortError.__name__, DiskError.__name__
_Found = TypeVar("_Found")


def fitting_by_now(config: Config, num_ranks: int, step: int) -> Fit:
    """The best layout for at most `num_ranks` ranks, for what is in force in the run behind this step and will be.
    Where nothing was changed in mid-run, nothing is imported.
    """
    if num_ranks >= config.parallel.num_ranks or not was_asked_to_change(Path(config.run.folder)):
        return fitting(config, num_ranks)
    from colonnade.train.change_requests import from_now_on

    return fitting(config, num_ranks, from_now_on(config, step))


class Seen(NamedTuple):
    """Of a run's folder, when it could be looked into."""

    step: int = 0
    """The last that metrics.jsonl tells of."""
    saved: int = 0
    """That of the newest checkpoint."""
    written: int = 0
    """[ns] When metrics.jsonl was."""


@dataclass
class Restarts:
    """One run under supervision: `run` once."""

    config: Config
    command: list[str]
    file: str
    """The text of the configuration file, which ranks are given each time."""
    keep: Sequence[int]
    after_a_loss: Callable[[], str]
    imports: Sequence[str] = ()
    """Modules that ranks import."""
    last: bool = True
    """Whether this process ends with the run, and so hears no signal behind the run's end."""
    attempts: list[Attempt] = field(default_factory=list)
    lost: frozenset[int] = frozenset()
    """Places that are not used."""
    once_lost: frozenset[int] = frozenset()
    """Places that were lost before: one more failure loses them again, until they have held up."""
    return_after: float = 0.0
    tried_since: int = 0
    """[ns] When metrics.jsonl was written last before they were given ranks again."""
    on_gpus: bool = False
    """Whether the run has begun on GPUs."""
    memory: Path | None = None
    """Where copies of the state are kept in memory."""
    began: float | None = None
    """When ranks were started for the first time."""
    seen: Seen = field(default_factory=Seen)
    recalled: bool = False
    """Ranks were asked to leave so that all can be tried."""
    has_ended: bool = False
    """As it should: its ranks have told how."""
    retries: SaveRetries = field(init=False)
    """Starts in a row that the disk has refused, which is waited out as long as for saves."""

    def run(self) -> int:
        """The exit status of the run. LayoutError if it was on GPUs, and all of them are gone."""
        self.return_after = self.config.restarts.return_after
        self.retries = SaveRetries(self.config.checkpoint.retry_for)
        device = self.config.train.device
        self.on_gpus = device == "cuda" or (device == "auto" and bool(count_gpus()))
        with folder_for(self.config) as self.memory, _asked_by_signals():
            try:
                return self._run()
            except KeyboardInterrupt as asked:  # while no rank runs: ranks are told of it, and save
                return self._end(signal.Signals(*asked.args or (signal.SIGINT,)))
            finally:
                self._hear_no_more()

    def _run(self) -> int:
        while True:
            fit, places = self._layout()
            oom_kills = _oom_kills()
            ended = self._start(fit, places)
            if self.recalled and ended.asked and ended.status == UNFINISHED:
                ended = replace(ended, status=128 + ended.asked)  # its ranks left already, as they were recalled
            self.has_ended = ended.status == 0 or (ended.status == UNFINISHED and not self.recalled)
            if self.has_ended:
                self._hear_no_more()  # who asks now is too late
            for number in ended.unheard:
                signal.raise_signal(number)
            attempt = self._attempt(ended, places, oom_kills)
            self.attempts.append(attempt)
            self._trust()
            one_left = self.config.parallel.num_ranks - len(self.lost) == 1
            wait = self._disk_wait()
            decision = decide(self.config.restarts, self.attempts, self.once_lost, one_left=one_left, disk_wait=wait)
            if attempt.cause:
                self._tell(attempt, decision, fit)
            if not decision.again:
                return ended.status if self.last else status_before_others(ended)
            self._lose(decision)
            time.sleep(decision.wait)
            if is_there(self._folder / STOP_FILE):
                self._event(STOPPED, step=self.attempts[-1].step, reason=f"there is a file {self._folder / STOP_FILE}")
                _say(f"Not started again: there is a file {self._folder / STOP_FILE}. Remove it to train on.")
                return UNFINISHED

    def _hear_no_more(self) -> None:
        if self.last:
            hear_no_more()

    def _end(self, asked: signal.Signals) -> int:
        """What a signal between two starts leads to; its exit status."""
        hear_no_more()  # once is enough
        if self.attempts and not self.has_ended:
            self._event(STOPPED, step=self.attempts[-1].step, reason=asked.name)
            _say(f"Not started again: {asked.name} has asked this process to end.")
        return 128 + asked

    def _start(self, fit: Fit, places: Sequence[int]) -> Ended:
        reduced = fit.num_ranks < self.config.parallel.num_ranks
        began, self.began = self.began, self.began or time.monotonic()
        try:
            if self.attempts:
                self._check_folder()
            return launch.run_on(
                places,
                [*self.command, *fit.overrides(self.config)],
                file=self.file,
                keep=self.keep,
                imports=self.imports,
                at=(self.return_after, partial(self._recall, self.return_after)) if reduced else None,
                choose_gpus=bool(self.lost) and self.on_gpus,
                memory=self.memory,
                fault=self._fault(),
                began=began,
            )
        except OSError as error:  # of the run's folder, or of that for temporary files
            if not self.attempts or name_of(error) != DISK:
                raise
            return Ended(USER_MISTAKE, 0, Cause(None, MISTAKE, f"{DISK}: {error}", time.monotonic()))

    def _check_folder(self) -> None:
        """OSError where what this process has locked is not there: ranks would make it, and begin anew."""
        lock = self._folder / LOCK
        if not lock.exists():
            gone = "gone, though the run holds it: its folder was moved, or the disk is not mounted"
            raise OSError(errno.ESTALE, gone, str(lock))

    def _fault(self) -> tuple[float, int] | None:
        """When the fault that the next start comes after was noticed, and the last step before it."""
        last = self.attempts[-1] if self.attempts else None
        return (last.noticed, last.step) if last is not None and last.noticed else None

    def _layout(self) -> tuple[Fit, list[int]]:
        """The layout to start, and the places of its ranks."""
        wanted = self.config.parallel.num_ranks
        there = self._await_gpus(wanted) if self.attempts and self.on_gpus else wanted
        places = [place for place in range(wanted) if place not in self.lost][: max(1, there)]
        if not self.attempts:
            saved = self._saved()
            self.seen = _patiently(self._look, lambda: Seen(saved, saved), tries=1)
        by_now = partial(fitting_by_now, self.config, len(places), self.seen.saved)
        fit = _patiently(by_now, partial(fitting, self.config, len(places)))
        if fit.num_ranks < wanted:
            self._event("fewer ranks", reason=fit.reason, lost=sorted(self.lost))
            _say(f"Going on with fewer ranks: {fit.reason}.")
        elif self.attempts and self.attempts[-1].kind == Kind.RECALLED:
            self._event("all ranks", reason="the whole layout is tried again")
        return fit, places[: fit.num_ranks]

    def _await_gpus(self, wanted: int) -> int:
        """GPUs that are there, when all are or the limit is over. LayoutError if none is there then."""
        limit = self.config.restarts.wait_for_ranks
        end = time.monotonic() + limit
        while (there := self._gpus_now(wanted)) < wanted and time.monotonic() < end:
            time.sleep(POLL)
        if there == 0:
            self._event(NO_RESTART, reason="no GPU is there any more")
            raise LayoutError(
                f"The run was on GPUs, and none has come back within restarts.wait_for_ranks = {limit:g} seconds: on "
                "the CPU it would go on many times more slowly, and is not started there by itself. Run the same "
                'command again when they are back, or set train.device = "cpu".'
            )
        return there if self.config.restarts.fewer_ranks else wanted

    def _gpus_now(self, wanted: int) -> int:
        found = gpus_now()
        return wanted if found is None else found

    def _recall(self, seconds: float) -> At | None:
        """Ask a run with fewer ranks to save and leave, so that the whole layout can be tried: so many seconds behind
        its start; or later, where the disk refuses now.
        """
        try:
            (self._folder / LEAVE_FILE).touch()
        except OSError:
            return seconds + RECALL_AGAIN, partial(self._recall, seconds + RECALL_AGAIN)
        self.recalled = True
        return None

    def _attempt(self, ended: Ended, places: Sequence[int], oom_kills: int) -> Attempt:
        cause, before, killed = ended.cause, self.seen, _oom_kills() > oom_kills
        kind = kind_of(ended, killed_for_memory=killed, again=True)
        stop = self._left(patiently=kind not in ENDS or self.recalled)
        has_trained = self.seen.step != before.saved and self.seen != before
        if not self.attempts and stop is not None and not has_trained:
            kind = kind_of(ended, killed_for_memory=killed)
        if self.recalled and ended.status == UNFINISHED and not stop:
            kind = Kind.RECALLED
        self.recalled = False
        return Attempt(
            kind,
            "" if cause is None else cause.said,
            self.seen.step,
            self.seen.saved,
            None if cause is None or cause.rank is None else places[cause.rank],
            0.0 if cause is None else cause.noticed,
        )

    def _left(self, *, patiently: bool) -> bool | None:
        """Whether the run is to stop; `seen` is what the last start has left. Where its folder cannot be looked into,
        also after a while: None, and `seen` stays.
        """

        def look() -> bool | None:
            self._check_folder()
            stop, leave = (self._folder / STOP_FILE).exists(), self._folder / LEAVE_FILE
            self.seen = self._look()
            if leave.exists():  # a file system that is read-only refuses to remove what is not there, too
                leave.unlink(missing_ok=True)
            return stop

        return _patiently(look, lambda: None, tries=TRIES if patiently else 1)

    def _look(self) -> Seen:
        metrics = self._folder / METRICS
        step = last_step(metrics)
        return Seen(step, self._saved(), metrics.stat().st_mtime_ns if step else 0)

    def _saved(self) -> int:
        saved = newest_step(checkpoints(self._folder))
        return max(saved, newest_step(self.memory)) if saved and self.memory is not None else saved

    def _disk_wait(self) -> float | None:
        """[seconds] Until a start that the disk has refused is tried again; None where that has been too long, or
        nothing was refused.
        """
        before, last = self.attempts[-2:][0], self.attempts[-1]
        if last.kind != Kind.DISK or last.saved > before.saved:
            self.retries.saved()
        return None if last.kind != Kind.DISK or self.retries.is_over else self.retries.failed()

    def _trust(self) -> None:
        """Places that have made steps for as long as they were left out are as others again. Time in which one hangs
        does not count: train.timeout may be as long.
        """
        held_up = (self.seen.written - self.tried_since) / 1e9 if self.tried_since else 0.0
        if self.once_lost and not self.lost and held_up >= self.return_after:
            self.once_lost, self.return_after = frozenset(), self.config.restarts.return_after

    def _lose(self, decision: Decision) -> None:
        """Places that come and go."""
        if self.attempts[-1].kind == Kind.RECALLED:
            self.once_lost, self.lost = self.once_lost | self.lost, frozenset()
            self.tried_since = self.seen.written
        if decision.lost is not None:
            if decision.lost in self.once_lost:
                self.return_after *= 2
            self.lost |= {decision.lost}

    def _tell(self, attempt: Attempt, decision: Decision, fit: Fit) -> None:
        self._event("fault", what=str(attempt.kind), cause=attempt.cause, place=attempt.place, step=attempt.step)
        if decision.again:
            self._event("restart", reason=decision.reason, wait=decision.wait, saved=attempt.saved)
            when = f", in {decision.wait:.3g} s" if decision.wait else ""
            so, until = "", ""
            if attempt.kind == Kind.DISK:
                so, until = "\nIt is started again by itself", f" {self.retries.until}"  # the cause asks somebody to
            _say(f"{attempt.cause}{so}: {decision.reason}{when}.{until}")
            return
        self._event(NO_RESTART, reason=decision.reason)
        if attempt.kind != Kind.MISTAKE:
            remedy = "" if attempt.kind in (Kind.RAISED, Kind.DEVICE) else self.after_a_loss()
            _say(f"Not started again: {decision.reason}.\n{remedy}")

    def _event(self, kind: str, **details: object) -> None:
        write_event(self._folder, kind, **details)

    @property
    def _folder(self) -> Path:
        return Path(self.config.run.folder)


def _patiently(look: Callable[[], _Found], otherwise: Callable[[], _Found], *, tries: int = TRIES) -> _Found:
    """What `look` finds; what `otherwise` says where the disk refuses, after a while too."""
    for again in range(tries):
        if again:
            time.sleep(POLL)
        with suppress(OSError):
            return look()
    return otherwise()


@contextmanager
def _asked_by_signals() -> Iterator[None]:
    """Signals that ask a process to end raise KeyboardInterrupt, as Ctrl-C does: nothing is left behind."""

    def ask(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    heard = [number for number, handler in before.items() if handler != signal.SIG_IGN]
    try:
        for number in heard:
            signal.signal(number, ask)
        yield
    finally:
        for number in heard:
            if signal.getsignal(number) is ask:
                signal.signal(number, before[number])


def status_before_others(ended: Ended) -> int:
    """The exit status of a run that others follow: where it was asked to end none does, though it could still finish,
    or has failed, or no rank was left to hear it.
    """
    asked = next((number for number in (ended.asked, *ended.unheard) if number in ASK_TO_END), 0)
    return 128 + asked if asked and ended.status != UNFINISHED else ended.status


def kind_of(ended: Ended, *, killed_for_memory: bool = False, again: bool = False) -> Kind:
    """How a local run has ended, for the decision what comes next. `again`: it had been started before, or has made a
    step; of what refuses the first start, whoever is there is told.
    """
    cause = ended.cause
    if ended.asked or ended.status == UNFINISHED:
        return Kind.ASKED
    if ended.status == 0:
        return Kind.DONE
    if cause is None:
        return Kind.MISTAKE if ended.status == USER_MISTAKE else Kind.RAISED
    if again and cause.order in (MISTAKE, EXCEPTION) and DISK in cause.said:
        return Kind.DISK
    if cause.order == MISTAKE:
        return Kind.OUT_OF_MEMORY if OUT_OF_MEMORY in cause.said else Kind.MISTAKE
    if cause.order == CRASH:
        return Kind.OUT_OF_MEMORY if killed_for_memory else Kind.KILLED
    return Kind.HUNG if cause.order == WAIT else _raised(cause)


def _raised(cause: Cause) -> Kind:
    said = cause.said.lower()
    return Kind.DEVICE if any(word in said for word in DEVICE_WORDS) else Kind.RAISED


def _oom_kills() -> int:
    """Processes that Linux has killed for their memory since this machine was started; 0 where that is unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def _say(text: str) -> None:
    sys.stdout.flush()
    print(text.rstrip(), file=sys.stderr, flush=True)
