"""What is settled before any rank starts, in tenths of a second and without torch.

    given            its file, as it was when the run was started
    load_for_run     the configuration, completed by the run that goes on and by the device, with what is wrong with
                     the files it names and the GPUs it wants: all at once
    load_for_plan    the configuration of a run that may start elsewhere
    owned            the run's folder, locked for as long as the run goes on
    fetch            what the run has in an object storage, where the folder has less
    run_point        a run with a share of this machine
    how_to_go_on     what to do after a rank was lost

Who locks the folder: the process that was started by hand, for itself and the ranks that it starts, which inherit the
lock; so it ends with the last of them, and a launcher that was killed gives it back when its ranks are gone. Under
torchrun rank 0 locks it.
"""

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from fractions import Fraction
from functools import partial
from pathlib import Path

from colonnade.checkpoint.names import checkpoints_in, newest_step
from colonnade.config.check import Problem
from colonnade.config.check_head import nothing_to_train
from colonnade.config.defaults import REVISION, TomlTable, has, in_words, kept_from_run, put
from colonnade.config.fitting import Fit
from colonnade.config.load import MoreChecks, TomlFile, build, load, read_with
from colonnade.config.numbers import counted
from colonnade.config.schema import Config
from colonnade.control_groups import num_cores_to_run_on
from colonnade.errors import ColonnadeError, ConfigError, DiskError
from colonnade.launch import launch
from colonnade.launch.devices import count_gpus
from colonnade.launch.process import ASK_TO_END, hear_no_more
from colonnade.lock import locked
from colonnade.train import run_folder, same_run
from colonnade.train.ending import ending
from colonnade.train.file_checks import problems_of_a_beginning, problems_of_a_score, problems_of_files
from colonnade.train.monitor import METRICS, last_step, write_event
from colonnade.train.restarts import Restarts, fitting_by_now, status_before_others
from colonnade.train.rollback_options import RollbackOptions
from colonnade.train.side_by_side import Share
from colonnade.train.sweep import Sweep

TURN_OF_RANK_0 = 10.0
"""[s] Under torchrun: a mistake in the configuration is told by another rank if by then rank 0 has not told it, with
what only rank 0 looks for."""


def given(path: Path) -> TomlFile:
    """The configuration file of a run. Ranks get what their supervisor has read: however often they are started again,
    and whatever has been written into the file since.
    """
    text = launch.file_of_start()
    return TomlFile.read(path) if text is None else TomlFile(path, text)


def load_for_run(path: Path | TomlFile, overrides: Sequence[str] = (), *, also: MoreChecks | None = None) -> Config:
    """The configuration of a run that is to start here. Raises ConfigError with every problem, of files and GPUs too.

    What the launcher has shown, its ranks do not show; what rank 0 shows, the others do not: torchrun ends them when
    it has. `also`: that of `load`.
    """
    launch.ask_for_queues()  # GPUs are counted here
    if launch.has_supervisor() or launch.rank_and_size()[0] != 0:
        try:
            return _as_begun(load(path, overrides, complete=complete))
        except ConfigError:
            if not launch.has_supervisor():
                time.sleep(TURN_OF_RANK_0)
            raise
    checks = [problems_of_a_beginning, problems_of_files, *([] if also is None else [also])]

    def all_checks(config: Config, uncertain: set[str]) -> list[Problem]:
        return [problem for check in checks for problem in check(config, uncertain)]

    return _as_begun(load(path, overrides, complete=complete, also=all_checks))


def _as_begun(config: Config, record: Path | None = None) -> Config:
    """Where the run has changed keys in mid-run, without these changes; else nothing is imported. `record`: the folder
    with what the run has written down, if not its own.
    """
    if ((record or Path(config.run.folder)) / run_folder.DECIDED).exists():
        from colonnade.train.change_requests import as_the_run_began

        return as_the_run_began(config, record)
    return config


def fetch(path: Path | TomlFile, overrides: Sequence[str], config: Config, *, dry_run: bool = False) -> None:
    """Have the folder of a run, which this process holds, get what its storage has beyond it (`fetched.py`). Nothing
    happens in a rank for which another process does that.
    """
    if config.checkpoint.upload_to is None or launch.has_supervisor() or launch.rank_and_size()[0] != 0:
        return
    from colonnade.train import fetched

    def as_began(record: Path) -> Config:
        return _as_begun(load(path, overrides, complete=partial(complete, record=record)), record)

    fetched.fetch(config, as_began, probe=not launch.attempt(), dry_run=dry_run)


def planned_end(config: Config) -> int:
    """The step that the run ends with, behind all changes."""
    return _from_now_on(config, lambda: _saved(config))[-1].train.steps


def _from_now_on(config: Config, step: Callable[[], int]) -> list[Config]:
    """What is in force behind a step, and will be; where nobody has asked for a change, nothing is imported or read."""
    if not run_folder.was_asked_to_change(Path(config.run.folder)):
        return [config]
    from colonnade.train.change_requests import from_now_on

    return from_now_on(config, step())


def again(path: Path | TomlFile, overrides: Sequence[str], config: Config) -> Callable[[], Config] | None:
    """How a rank reads its configuration once more when all ranks have come together, on the layout of `config`: by
    then rank 0 may have fetched a run that began with other defaults. None where that was before this rank started.
    """
    if config.checkpoint.upload_to is None or launch.has_supervisor():
        return None

    def read() -> Config:
        fresh = _as_begun(load(path, overrides, complete=complete))
        return fitting_by_now(fresh, config.parallel.num_ranks, _saved(fresh)).config

    return read


def load_for_plan(path: Path | TomlFile, overrides: Sequence[str] = (), *, length: bool = False) -> Config:
    """The configuration of a run that may start elsewhere: on GPUs, unless train.device is "cpu". `length`: ConfigError
    where train.steps is not known, as train.epochs takes data that are not here; else it is 1 then.
    """

    def completed(content: TomlTable) -> list[Problem]:
        unknown = complete(content, num_gpus=1)
        return [Problem(f"{each.message} {_SET_STEPS}", each.keys) for each in unknown if length]

    return load(path, overrides, complete=completed, also=problems_of_a_beginning)


_SET_STEPS = "How many steps train.epochs are, the data tell: plan where they are, or set train.steps."


def complete(content: TomlTable, *, num_gpus: int | None = None, record: Path | None = None) -> list[Problem]:
    """Add what a file leaves to the run that it goes on with, to the device, and to the data, with what keeps
    train.epochs from becoming steps. `num_gpus` None: this machine's. `record`: the folder with what the run has
    written down, if not its own.
    """
    problems: list[Problem] = []
    put(content, _kept(content, record))
    for message in nothing_to_train(content):
        raise ConfigError(message)
    if not has(content, "data.revision"):
        put(content, {"data.revision": REVISION})
    if has(content, "train.epochs") and not has(content, "train.steps"):
        steps, problems = _steps_of_epochs(content)
        put(content, {"train.steps": steps})
    if not has(content, "train.precision"):
        put(content, {"train.precision": _precision(content, count_gpus() if num_gpus is None else num_gpus)})
    return problems


def _steps_of_epochs(content: TomlTable) -> tuple[int, list[Problem]]:
    """The steps that train.epochs take; 1 where that is not known, with why, unless the rest of `content` is wrong.
    DiskError where the data cannot be read for a while: ranks are started again then.
    """
    from colonnade.train.corpus import lasts_for, open_corpus, step_by

    try:
        config = build({**content, "train": {**content["train"], "steps": 1}}, [], source="the configuration")
    except ConfigError:
        return 1, []
    try:
        corpus = open_corpus(config)
    except DiskError:
        raise
    except ColonnadeError as error:
        return 1, [Problem(str(error), ("train.steps",))]
    assert config.train.epochs is not None, "called where it is set"
    epochs = Fraction(str(config.train.epochs))  # the number as it is written
    wanted = math.ceil(epochs * len(corpus.datasets.train))
    steps = max(1, step_by(config, wanted * config.model.sample_length))
    group = max(phase.num_pieces for phase in corpus.curriculum.phases)  # in which the data may end
    fewer = range(steps, max(0, steps - group - 1), -1)
    return next((count for count in fewer if lasts_for(corpus, config, count)), steps), []


def lines(path: Path | TomlFile, overrides: Sequence[str] = ()) -> list[str]:
    """What `complete` decides that one would not expect, in words."""
    content, _ = read_with(path, overrides)
    kept, folder = _kept(content), content["run"]["folder"]
    shown = [in_words(kept, str(_recorded(Path(folder))))]
    if not has(content, "train.precision") and "train.precision" not in kept:
        bf16 = _precision(content, count_gpus()) == "bf16"
        shown += ["train.precision is not set: bf16, as this run computes on GPUs."] * bf16
    return [line for line in shown if line]


def precision_in_words(config: Config, path: Path | TomlFile, overrides: Sequence[str] = ()) -> str:
    """The number format that `load_for_plan` has found, `config`, and what has settled it."""
    precision, content = config.train.precision, read_with(path, overrides)[0]
    if has(content, "train.precision"):
        return precision
    if "train.precision" in _kept(content):
        return f"{precision}, as the run in {config.run.folder} has it (train.precision is not set)"
    where = "GPUs" if precision == "bf16" else "CPUs"
    other = "; with train.device=cpu: fp32" * (config.train.device == "auto")
    return f"{precision}, as on {where} (train.precision is not set{other})"


def _kept(content: TomlTable, record: Path | None = None) -> dict[str, object]:
    """What the run keeps that `content` goes on with; nothing from a folder in which nothing was trained."""
    run = content.get("run")
    folder = run.get("folder") if isinstance(run, dict) else None
    if not isinstance(folder, str) or not folder:
        return {}
    written = record or Path(folder)
    return kept_from_run(content, _recorded(written)) if run_folder.was_trained(written) else {}


def _recorded(folder: Path) -> Path:
    """Where a run's config.toml is: beside its newest checkpoint, where its folder has none any more."""
    saved = {} if (folder / "config.toml").exists() else checkpoints_in(run_folder.checkpoints(folder))
    return saved[max(saved)] if saved else folder


def _precision(content: TomlTable, num_gpus: int | None) -> str:
    train = content.get("train")
    device = train.get("device", "auto") if isinstance(train, dict) else "auto"
    return "bf16" if device == "cuda" or (device == "auto" and num_gpus) else "fp32"


@contextmanager
def owned(config: Config, *, returns: bool = False, dry_run: bool = False) -> Iterator[tuple[int, ...]]:
    """Hold the run's folder while the block runs, whose end is noted there under torchrun; yields descriptors for ranks
    to inherit. A rollback that was killed is finished, unless the run `returns` by hand now. `dry_run`: nothing is
    noted, and of such a rollback it is said what would be done.

    LockError if another run holds it, ConfigError if another run lives there, LayoutError before it is made if torchrun
    has started another number of ranks. Of ranks for which the launcher holds it, rank 0 finishes a rollback in which
    they were killed; no more than noting happens in a rank for which another process holds it.
    """
    if launch.is_rank():
        launch.check_size(config.parallel.num_ranks)
    is_first = launch.rank_and_size()[0] == 0
    if launch.has_supervisor() or not is_first:
        if is_first and not dry_run:
            _finish_rollback(config)
        with ending(config):
            yield ()
        return
    folder = Path(config.run.folder)
    with ExitStack() as stack:
        if not folder.exists():
            stack.callback(_remove_if_empty, folder)
        try:
            lock = stack.enter_context(locked(folder, "colonnade train", instead="set another run.folder"))
            stack.enter_context(ending(config, notes=not dry_run))
            same_run.check(config)
            if not returns:
                _finish_rollback(config, dry_run=dry_run)
        except OSError as error:
            raise run_folder.unwritable(config, error) from error
        yield (lock.fileno(),)


def _finish_rollback(config: Config, *, dry_run: bool = False) -> None:
    """Where the run has made rollbacks, and may have been killed in one; else nothing is imported."""
    run = Path(config.run.folder)
    if (run / run_folder.ROLLBACKS).exists():
        from colonnade.train.rollbacks import finish

        try:
            finish(run, dry_run=dry_run)
        except OSError as error:
            raise run_folder.unwritable(config, error) from error


def roll_back(config: Config, step: int, asked: RollbackOptions) -> str:
    """Return the run to one of its checkpoints, in words; to be called while its folder is held."""
    if launch.is_rank():
        raise ConfigError(
            "--rollback changes the run's folder, and a launcher of ranks may start them several times. Use it once, "
            f"before: `{' '.join(filter(None, ('colonnade rollback', config.run.folder, str(step), str(asked))))}`."
        )
    return _rolled_back(Path(config.run.folder), step, asked)


def roll_back_folder(run: Path, step: int, asked: RollbackOptions) -> str:
    """As `roll_back`, of a run that nobody holds."""
    if not run_folder.checkpoints(run).is_dir():
        raise ConfigError(f"{run} is not the folder of a run: it has no {run_folder.checkpoints(run).name}/. Name one.")
    asked.check(step)
    with locked(run, "colonnade rollback", instead=None):
        return _rolled_back(run, step, asked)


def _rolled_back(run: Path, step: int, asked: RollbackOptions) -> str:
    from colonnade.train.rollbacks import by_hand

    rollback, deleted = by_hand(run, step, asked)
    gone = f" The checkpoints of steps {', '.join(map(str, deleted))} are deleted." if deleted else ""
    return f"{run} returns to step {step}, to {rollback}.{gone}"


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # there is something in it, or it was never made
        folder.rmdir()


def fitted(config: Config) -> Fit | None:
    """The configuration with the layout that is to run, as torchrun may have come back with fewer ranks, and the reason
    if it has. None in a rank that this layout leaves idle, when the others have ended.
    """
    size = launch.rank_and_size()[1]
    policy = config.restarts
    if launch.elastic_run() is None or not (policy.limit and policy.fewer_ranks) or size >= config.parallel.num_ranks:
        return Fit(config, "")
    fit = fitting_by_now(config, size, _saved(config))
    if launch.speaks_first():
        print(f"Going on with fewer ranks: {fit.reason}.", flush=True)
    if launch.use_first(fit.num_ranks):
        return fit
    launch.be_idle()
    return None


def note_fewer_ranks(fit: Fit) -> None:
    """Record that there are fewer; to be called while the run's folder is held."""
    if fit.reason and launch.speaks_first():
        write_event(Path(fit.config.run.folder), "fewer ranks", reason=fit.reason)


def _saved(config: Config) -> int:
    """The step of the run's newest checkpoint; 0 for none."""
    return newest_step(run_folder.checkpoints(Path(config.run.folder)))


def is_supervised(config: Config) -> bool:
    """Whether this process is to start the run's ranks and watch over them."""
    alone = config.parallel.num_ranks == 1 and not (config.restarts.one_rank and config.restarts.limit)
    return not (launch.is_rank() or alone)


def supervise(
    config: Config,
    file: TomlFile,
    arguments: Sequence[str],
    keep: Sequence[int],
    imports: Sequence[str],
    *,
    dry_run: bool = False,
    last: bool = True,
) -> int:
    """The exit status of `colonnade arguments` on local ranks, which `file` is `given`, started again as [restarts]
    says. `imports`: modules that they import. `last`: this process ends with the run, and no signal behind the run's
    good end changes how.
    """
    command = [sys.executable, "-m", "colonnade", *arguments]
    go_on = partial(how_to_go_on, config)
    if dry_run or not config.restarts.limit:
        ranks = range(config.parallel.num_ranks)
        ended = launch.run_on(ranks, command, file=file.text, keep=keep, imports=imports, after_a_loss=go_on)
        if last:
            hear_no_more()
        for number in {*ended.unheard} - {*ASK_TO_END}:
            signal.raise_signal(number)
        return ended.status if last else status_before_others(ended)
    return Restarts(config, command, file.text, keep, go_on, imports, last).run()


def run_point(config: Path, share: Share, *, imports: Sequence[str] = ()) -> int:
    """The exit status of a run on local ranks, which import these modules and which this process watches over; it uses
    this share of the machine.
    """
    file = TomlFile.read(config)
    settings = load_for_run(file)
    own: list[str] = []
    if share.of > 1:
        threads = launch.num_threads(share.of * settings.parallel.num_ranks)
        own = [f"train.threads={threads}"] if settings.train.threads == 0 else []
        if settings.train.device != "cpu" and count_gpus():
            first = share.number * settings.parallel.num_ranks
            launch.hide_other_gpus(range(first, first + settings.parallel.num_ranks))
    with owned(settings) as keep:
        fetch(file, [], settings)
        alone = share.of > 1  # in a process of its own, which ends with it
        return supervise(settings, file, ["train", str(config), *own], keep, imports, last=alone)


def check_point(path: Path, sweep: Sweep) -> None:
    """ConfigError unless the configuration of one of its points can run here, as many at once, and has its score."""

    def check_score(config: Config, uncertain: set[str]) -> list[Problem]:
        return [] if sweep.score is None else problems_of_a_score(sweep.score, config, uncertain)

    check_shares(load_for_run(path, also=check_score), sweep.at_once)


def check_shares(config: Config, shares: int) -> None:
    """ConfigError unless this machine has a core, or GPUs, for each of so many runs side by side."""
    gpus = None if config.train.device == "cpu" else count_gpus()
    if not gpus:
        if shares > (cores := num_cores_to_run_on()):
            raise ConfigError(
                f"sweep.at_once = {shares} runs would share {counted(cores, 'core')}: each needs one. "
                f"Use {cores} or less."
            )
    elif shares > 1 and shares * config.parallel.num_ranks > gpus:
        raise ConfigError(
            f"sweep.at_once = {shares} runs of {counted(config.parallel.num_ranks, 'rank')} need "
            f"{shares * config.parallel.num_ranks} GPUs, and this machine has {gpus}. Use "
            f"{max(1, gpus // config.parallel.num_ranks)} or less."
        )


def how_to_go_on(config: Config) -> str:
    """What to do when a rank was killed, or has never come: nothing is lost but the steps since the last checkpoint."""
    run = Path(config.run.folder)
    try:
        saved = sorted(run_folder.checkpoints(run).glob("step_*"))
        if saved:
            return f"Run the same command again: it goes on from {saved[-1]}."
        every = _from_now_on(config, lambda: last_step(run / METRICS))[0].checkpoint.every
    except OSError as error:
        return f"Run the same command again when {run} can be read ({error.strerror})."
    why = f"checkpoint.every = {every} steps had not passed" if every else "checkpoint.every = 0 saves at the end only"
    return f"Nothing was saved yet ({why}): the same command starts again from the beginning."
