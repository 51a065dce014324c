"""Going on from an object storage: what a run has uploaded comes to a disk that has none of it, or less.

    the storage can be written ─▶ it is this run's ─▶ its newest whole checkpoint is newer than the disk's
        ─▶ fetched under a temporary name, every byte checked ─▶ the record of the run, then the checkpoint in place

Done before there are ranks, by the process that has locked the run's folder; from there on all is as if the run had
always been here. Imports torch only where there is something to fetch. Once there are ranks, rank 0 fetches what takes
the place of a checkpoint that turns out to be damaged (`damaged.py`).
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from colonnade.checkpoint.folders import damaged_name, publish, remove, set_aside_damaged, take_away
from colonnade.checkpoint.names import MANIFEST, checkpoints_in, folder_name, newest_step
from colonnade.checkpoint.stored import RECORD, Stored, unreadable
from colonnade.config.compare import difference
from colonnade.config.load import loads
from colonnade.config.schema import Config
from colonnade.errors import CheckpointError, ColonnadeError, ConfigError, DamagedError, without_credentials
from colonnade.pace import Pace
from colonnade.storage import reason
from colonnade.train.best import spared
from colonnade.train.monitor import write_event
from colonnade.train.not_removed import by_line
from colonnade.train.run_folder import COPIES, ROLLBACKS, checkpoints
from colonnade.train.run_record import unpack

if TYPE_CHECKING:
    from colonnade.train.rollback import Rollback

EVENT, DAMAGED = "fetched", "damaged upload"


def fetch(config: Config, as_began: Callable[[Path], Config], *, probe: bool, dry_run: bool) -> None:
    """Bring the run's folder, which this process has locked, to what checkpoint.upload_to has, where that is newer.

    `as_began`: the configuration of this run if it has begun as the record in a folder says. `probe`: see first that
    the storage can be written. `dry_run`: only say what would be fetched. ConfigError where the storage is not to be
    used, or has another run's checkpoints; CheckpointError where it cannot be read, or nothing in it is sound.
    """
    if config.checkpoint.upload_to is None:
        return
    stored, run = Stored(config.checkpoint.upload_to), Path(config.run.folder)
    _check_place(stored, run)
    if probe and not dry_run:
        stored.probe()
    try:
        whole = [step for step, sealed in stored.steps().items() if sealed]
        if whole:
            _check_same_run(stored, whole, config, as_began)
            _check_may_begin(stored, whole[-1], config)
            _fetch_newest(stored, whole, config, dry_run=dry_run)
    except ColonnadeError:
        raise
    except Exception as error:  # noqa: BLE001  each storage's package raises its own kinds
        raise unreadable(stored.url, error) from None


def _fetch_newest(stored: Stored, whole: Sequence[int], config: Config, *, dry_run: bool) -> None:
    run = Path(config.run.folder)
    here = newest_step(checkpoints(run))
    if here >= whole[-1]:
        _check_course(stored, whole, run)
    newer = (step for step in reversed(whole) if step > here and not is_undone(stored, step, run))
    if dry_run:
        if (step := next(newer, None)) is not None:
            _say(
                f"{folder_name(step)} of {stored.url} is newer than what {run} has: it would be fetched first. "
                "What follows is without it."
            )
        return
    if _fetch_first_sound(stored, newer, config):
        return
    if here == 0:
        raise CheckpointError(
            f"None of the checkpoints under checkpoint.upload_to = {stored.url!r} is sound, and {run} has none. Choose "
            "another run.folder and upload_to to start a new run."
        )
    _check_course(stored, whole, run)


def fetch_for_damaged(path: Path, config: Config) -> Path | None:
    """Fetch the newest sound checkpoint that checkpoint.upload_to has of the step of `path`, the run's newest, which is
    damaged, or of earlier ones that the disk has not. `path` is set aside when it is here: where that is then. None
    where there is none; what keeps one from being fetched is said. The run's record stays, which reaches further.
    """
    run, aside = Path(config.run.folder), list[Path]()
    if config.checkpoint.upload_to is None or damaged_name(path).exists():  # what is damaged again has a bad disk
        return None
    stored, (*older, newest) = Stored(config.checkpoint.upload_to), checkpoints_in(checkpoints(run))
    try:
        there = [step for step, sealed in stored.steps().items() if sealed and max(older, default=0) < step <= newest]
        wanted = (step for step in reversed(there) if not is_undone(stored, step, run))
        _fetch_first_sound(stored, wanted, config, replace=lambda: aside.append(set_aside_damaged(path)))
    except Exception as error:  # noqa: BLE001  each storage's package raises its own kinds
        _say(f"Nothing can be fetched in place of {path}: {reason(error, stored.url)}")
    return aside[0] if aside else None


def _fetch_first_sound(
    stored: Stored, steps: Iterable[int], config: Config, replace: Callable[[], object] | None = None
) -> bool:
    """Whether one of them could be fetched, or there was none to fetch. `replace`: see `_fetch_one`."""
    run, policy, damaged = Path(config.run.folder), config.restarts, dict[int, str]()
    is_here = False
    for step in steps:
        try:
            _fetch_one(stored, step, config, replace)
        except DamagedError as error:
            if not policy.limit or policy.damaged != "fall_back":
                raise
            damaged[step] = str(error)
            _say(f"{error} The one before it is looked for.")
        else:
            is_here = True
            break
    for step, why in damaged.items():  # only now: what is fetched brings its events
        write_event(run, DAMAGED, step=step, checkpoint=folder_name(step), url=stored.url, reason=why)
    return is_here or not damaged


def _check_place(stored: Stored, run: Path) -> None:
    folder = stored.folder
    if folder is not None and (folder == run.resolve() or run.resolve() in folder.parents):
        raise ConfigError(
            f"checkpoint.upload_to = {stored.url!r} is in the run's own folder, run.folder = {str(run)!r}: what is "
            "there is lost with it. Name another place."
        )


def _check_same_run(stored: Stored, steps: Sequence[int], config: Config, as_began: Callable[[Path], Config]) -> None:
    """ConfigError unless what is there was computed with this configuration, but for what a run may change.

    As of a run's folder: the newest checkpoint's configuration counts, and that which the run was last started with.
    """
    step, past = _newest_configuration(stored, steps)
    lines = difference(past, config, only_what_forbids_resume=True)
    if not lines:
        return
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder)
        if _has_record(stored, step, record):
            config = as_began(record)
            started = loads(
                (record / "config.toml").read_text(encoding="utf-8"), source=f"{stored.url}, its config.toml"
            )
            if not all(difference(each, config, only_what_forbids_resume=True) for each in (started, past)):
                return
    raise ConfigError(
        f"checkpoint.upload_to = {stored.url!r} has checkpoints of a run with another configuration:\n"
        + "\n".join(f"  {line}" for line in lines)
        + "\nThese change what is computed, so the run cannot go on from there, and would delete them. Set another "
        "checkpoint.upload_to, or change them back."
    )


def _newest_configuration(stored: Stored, steps: Sequence[int]) -> tuple[int, Config]:
    """Of the newest step whose configuration can be read: whether a newer one is sound is seen when it is fetched."""
    unread: list[Exception] = []
    for step in reversed(steps):
        try:
            text = stored.read(step, "config.toml").decode(errors="replace")
            return step, loads(text, source=f"{stored.url}, {folder_name(step)}/config.toml")
        except (FileNotFoundError, ConfigError) as error:
            unread.append(error)
    raise unread[0]


def _has_record(stored: Stored, step: int, folder: Path) -> bool:
    try:
        stored.get(step, [RECORD], folder)
        return "config.toml" in unpack(folder / RECORD, folder)
    except (FileNotFoundError, DamagedError):
        return False


def _check_may_begin(stored: Stored, step: int, config: Config) -> None:
    if not config.checkpoint.resume:
        raise ConfigError(
            f"checkpoint.upload_to = {stored.url!r} already has {folder_name(step)}, and checkpoint.resume = false. "
            "Set checkpoint.resume = true to go on from it, or choose another upload_to."
        )


def is_undone(stored: Stored, step: int, run: Path) -> bool:
    """Whether the run has returned to an earlier step since, here. Not where that cannot be read of the upload."""
    if not (run / ROLLBACKS).exists():
        return False
    from colonnade.train.rollback import has_left, read

    with tempfile.TemporaryDirectory() as folder:
        try:
            stored.get(step, [MANIFEST], Path(folder))
            known = _rollbacks_of(Path(folder))
        except (CheckpointError, FileNotFoundError):
            return False  # whoever fetches it says so
    return has_left(read(run), step, known)


def _check_course(stored: Stored, steps: Sequence[int], run: Path) -> None:
    """ConfigError where the newest upload that can be read is from behind a rollback that nothing here knows of, though
    the run would go on from what is here. A storage that fails now ends no run, as nothing of it is needed.
    """
    if not steps:
        return
    (*older, step), (*_, (here, newest)) = steps, checkpoints_in(checkpoints(run)).items()
    with tempfile.TemporaryDirectory() as name, suppress(CheckpointError):
        folder = Path(name)
        try:
            stored.get(step, [MANIFEST], folder)
        except Exception as error:  # noqa: BLE001  each storage's package raises its own kinds
            _say(f"Whether {folder_name(step)} there is of this run's course is not known: {reason(error, stored.url)}")
            return
        if step == here and (folder / MANIFEST).read_bytes() == (newest / MANIFEST).read_bytes():
            return  # without an import of torch: so it usually is
        from colonnade.train.rollback import read
        from colonnade.train.rollbacks import ids_told

        try:
            made = _rollbacks_of(folder)
        except CheckpointError:
            _check_course(stored, older, run)
            return
        known, told = [*read(run), *_rollbacks_of(newest)], ids_told(run)
        for each in made:
            if each not in known and each.id not in told:
                raise ConfigError(
                    f"checkpoint.upload_to = {stored.url!r} has {folder_name(step)} from behind a rollback to step "
                    f"{each.to:,}, and run.folder = {str(run)!r} has {folder_name(here)}, which knows nothing of it: "
                    "it is of the course that was left. To go on behind the rollback, move run.folder away: all is "
                    "fetched. To go on without it, choose another upload_to."
                )


def _rollbacks_of(checkpoint: Path) -> "list[Rollback]":
    """Those that a checkpoint is from behind. CheckpointError where that cannot be read."""
    from colonnade.checkpoint.manifest import read_manifest
    from colonnade.train.metadata import metadata_of

    return metadata_of(checkpoint, read_manifest(checkpoint)).rollbacks


def _fetch_one(stored: Stored, step: int, config: Config, replace: Callable[[], object] | None = None) -> None:
    """Fetch a checkpoint, and the record beside it. DamagedError where they are not what was uploaded. `replace`: what
    is called in place of fetching the record, when the checkpoint is here under a temporary name.
    """
    run, started = Path(config.run.folder), time.perf_counter()
    final = checkpoints(run) / folder_name(step)
    aside = final.with_name(f".{final.name}.partial")
    remove(aside)
    aside.mkdir(parents=True)
    try:
        num_bytes = _fetch_checked(stored, step, aside)
        if replace is None:
            _fetch_record(stored, step, aside, run)
            _discard_left(run)
        else:
            replace()
    except (DamagedError, FileNotFoundError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        told = str(error).replace(str(aside), f"{stored.url}/{final.name}")
        raise DamagedError(f"{final.name} of {stored.url} is damaged: {told}") from None
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    publish(aside, final, config.checkpoint.keep, partial(spared, run, config.checkpoint), by_line(run))
    seconds = time.perf_counter() - started
    write_event(
        run, EVENT, step=step, checkpoint=final.name, url=stored.url, bytes=num_bytes, seconds=round(seconds, 3)
    )
    _say(f"Fetched {final.name} of {stored.url} to {final} ({num_bytes / 1e6:,.1f} MB in {seconds:.1f} s).")


def _fetch_record(stored: Stored, step: int, aside: Path, run: Path) -> None:
    stored.get(step, [RECORD], aside)
    record = run / f".{RECORD}.partial"
    (aside / RECORD).replace(record)
    try:
        unpack(record, run)
    finally:
        record.unlink(missing_ok=True)


def _discard_left(run: Path) -> None:
    """Delete what this machine has of a course that the run has left elsewhere, as the record tells that has come."""
    (run / COPIES).unlink(missing_ok=True)
    if not (run / ROLLBACKS).exists():
        return
    from colonnade.train.rollback import has_left, read

    recorded = read(run)
    for step, path in reversed(checkpoints_in(checkpoints(run)).items()):
        with suppress(CheckpointError):  # who goes on from what cannot be read sets it aside
            if has_left(recorded, step, _rollbacks_of(path)):
                _say(f"{path} is of a course that a rollback elsewhere has left: it is deleted.")
                take_away(path)


def _fetch_checked(stored: Stored, step: int, folder: Path) -> int:
    """Fetch the files of a checkpoint, and check every byte; how many there were."""
    from colonnade.checkpoint.manifest import read_manifest, verify

    stored.get(step, [MANIFEST], folder)
    manifest = read_manifest(folder)
    if manifest.step != step:
        raise DamagedError(f"its manifest is that of step {manifest.step}.")
    total, free = sum(file.size for file in manifest.files.values()), shutil.disk_usage(folder).free
    if free < total:
        raise CheckpointError(
            f"The disk is too full to fetch {folder_name(step)} of {stored.url}: {folder.parent} has "
            f"{free / 1e6:,.1f} MB free, and it has {total / 1e6:,.1f} MB. Free some space, or choose another "
            "run.folder."
        )
    stored.get(step, manifest.files, folder, _progress(f"Fetching {folder_name(step)}", total))
    verify(folder)
    return total


def _progress(what: str, total: int) -> Callable[[int], None]:
    """Lines every few seconds, from several threads."""
    pace, lock = Pace(total), Lock()

    def advance(count: int) -> None:
        with lock:
            told = pace.advance(count)
        if told is not None:
            _say(
                f"{what}: {told.done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {told.rate / 1e6:,.0f} MB/s, "
                f"{told.left} left"
            )

    return advance


def _say(text: str) -> None:
    print(without_credentials(text), flush=True)
