"""State to disk and back: saving, and going on from what was saved.

A checkpoint holds the serial run's tensors under their logical names, what the optimizer's rule keeps of them
under `optimizer.<name>.<weight>` (AdamW: exp_avg, exp_avg_sq), and the metadata that a resumed run is held against.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colonnade import __version__
from colonnade.checkpoint.copies import Copies
from colonnade.checkpoint.load import load_found
from colonnade.checkpoint.manifest import Manifest
from colonnade.checkpoint.names import checkpoints_in
from colonnade.checkpoint.plan import Box, Shard, names_in_words, shards_of_range
from colonnade.checkpoint.save import Payload, Target
from colonnade.checkpoint.saver import Saved, Saver
from colonnade.checkpoint.schema import clip
from colonnade.config.compare import model_metadata
from colonnade.config.load import to_toml
from colonnade.config.numbers import counted
from colonnade.config.schema import Config
from colonnade.errors import CheckpointError, CopiesError
from colonnade.launch.agreement import on_all_ranks
from colonnade.mesh.background import Group
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.mesh import Mesh
from colonnade.tensor_parallel.placement import Placement
from colonnade.tokenizer_files import CONFIG
from colonnade.train import not_removed, rollbacks
from colonnade.train.base import check_base
from colonnade.train.best import BEST, Best, best_of, spared
from colonnade.train.change import as_it_began, behind, in_force
from colonnade.train.changes import changes, what_changed
from colonnade.train.corpus import Corpus, curriculum_of
from colonnade.train.data_record import check_data, data_metadata, what_to_say
from colonnade.train.divergence import LossWatch
from colonnade.train.metadata import RunMetadata, metadata_of
from colonnade.train.monitor import Monitor
from colonnade.train.newest import SAVED, find
from colonnade.train.published import end_behind
from colonnade.train.run_folder import checkpoints
from colonnade.train.save_retries import SaveRetries
from colonnade.train.state import TrainState, optimizer_of
from colonnade.train.uploads import Uploads

OPTIMIZER = "optimizer."
PATIENCE = 1800.0  # seconds, at least, that ranks wait for each other's writing: a slow disk is no hang


# --- what a rank holds ------------------------------------------------------------------------------------------------


def shards_of(state: TrainState, *, base: bool = False) -> list[Shard]:
    """Every box of weights and moments that this rank owns, as views: of its slices, under ZeRO. `base`: also of
    weights that are not saved, because they are those of the base.
    """
    elsewhere = frozenset[str]() if base or state.base is None else state.base.weights
    found: list[Shard] = []
    for bucket, kept in zip(state.buckets, state.optimizer_state, strict=True):
        flats = {"": bucket.master, **{f"{OPTIMIZER}{name}.": flat for name, flat in kept.items()}}
        for local in (each for each in bucket.local_ranges() if each.name not in elsewhere):
            for prefix, flat in flats.items():
                found += shards_within(prefix + local.name, local.placement, flat[local.at], local.first)
    return found


def shards_within(name: str, place: Placement, flat: Tensor, first: int) -> list[Shard]:
    """The real part of the elements of a weight, from `first` on, that `flat` [n] has: nothing of padding."""
    held = Box(place.offsets, tuple(place.parameter.shape))
    return shards_of_range(name, place.shape, held, flat, first)


def shard(name: str, place: Placement, values: Tensor) -> list[Shard]:
    """The real part of a weight, or nothing where this rank's shard is all padding."""
    return [Shard(name, place.shape, place.offsets, place.real(values))] if place.extent else []


# --- saving -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoints:
    """Where a run saves its state: made by `saving`."""

    saver: Saver
    files: dict[str, bytes]
    """What lies beside the tensors: all that is needed to use the model."""
    config: Config
    mesh: Mesh
    corpus: Corpus
    monitor: Monitor
    products: Mapping[str, Any] | None = None
    """By what matrices are multiplied: see `ProductMetadata`."""
    retries: SaveRetries = field(default_factory=lambda: SaveRetries(0.0))

    def save(self, state: TrainState, *, must: bool = False) -> None:
        """Save `state` as it is now; every rank calls this, and `copied` before it changes what was saved.

        CopiesError where copies differ, and nothing is written. What makes this save or the one before it fail is said,
        and tried again when `is_due`, or with `must` at once and until it is good; raised when it has been too long.
        """
        told = False
        while True:
            try:
                self._save(state)
                if must:
                    self.saver.wait()
                return
            except CopiesError:
                raise
            except CheckpointError as error:
                wait = self._failed(error, state.step, must=must, told=told)
            if not must:
                return
            told = True
            time.sleep(wait)

    @property
    def is_due(self) -> bool:
        """On rank 0: whether a save that has failed is to be tried again."""
        return self.retries.is_due

    def _failed(self, error: CheckpointError, step: int, *, must: bool = False, told: bool = False) -> float:
        """Seconds until the next try; raises `error` on all ranks if there is none. `told`: of one before."""
        over = bool(all_reduce(torch.tensor(int(self.retries.is_over)), self.mesh.world, "max"))
        if over:
            raise error
        wait, tries, age = self.retries.failed(must=must), self.retries.failures, round(self.retries.age, 1)
        if not told and (must or not self.retries.is_early):
            self.monitor.event("save failed", step=step, reason=str(error), tries=tries, age=age)
            self.monitor.say(self.retries.in_words(step, error, wait, must=must))
        return wait

    def _save(self, state: TrainState) -> None:
        if self.saver.is_busy:
            self.monitor.say(
                f"Saving step {state.step} waits: the checkpoint before it is still being written. A larger "
                f"checkpoint.every (now {self.config.checkpoint.every}) or a faster disk saves this time."
            )
        self.saver.save(self.payload(state), partial(self._compared, state))

    def compare(self, state: TrainState) -> None:
        """CopiesError on all ranks unless all copies of `state` are equal; every rank calls this."""
        counts = {"step": state.step, "samples": state.samples, "skipped steps": state.skipped}
        self.copies(state).check(f"Step {state.step}", {**counts, "loss scale": state.loss_scale.value})

    def copies(self, state: TrainState) -> Copies:
        """What of `state` others hold too."""
        return Copies(state.buckets, state.optimizer_state, self.mesh, state.ownership.shared)

    def payload(self, state: TrainState) -> Payload:
        """What a checkpoint of `state` has besides its tensors."""
        metadata = {**_metadata(state, self.config, self.mesh, self.corpus), "products": self.products}
        return Payload(state.step, metadata, self.files)

    def _compared(self, state: TrainState) -> list[Shard]:
        self.compare(state)
        return shards_of(state)

    def copied(self) -> None:
        """Return when the state that was saved last may be changed: to be called before each optimizer step."""
        self.saver.copied()

    def wait(self) -> None:
        """Return when nothing is being written any more; raise what made the last save fail."""
        self.saver.wait()

    def wait_out(self, state: TrainState) -> None:
        """As `wait`, before the state becomes an earlier one: what made the last save fail is treated as in `save`, but
        nothing is saved in its place.
        """
        try:
            self.saver.wait()
        except CheckpointError as error:
            self._failed(error, state.step)

    def settle(self, state: TrainState) -> None:
        """As `wait`; where the last save has failed, `state` is saved in its place."""
        try:
            self.saver.wait()
        except CheckpointError:
            self.save(state, must=True)

    @property
    def has_failed(self) -> bool:
        """Whether a save in the background has failed. Ranks see it at different times."""
        return self.saver.has_failed


@contextmanager
def saving(
    state: TrainState,
    config: Config,
    mesh: Mesh,
    corpus: Corpus,
    monitor: Monitor,
    *,
    overlap: bool = False,
    products: Mapping[str, Any] | None = None,
    retries: SaveRetries | None = None,
    uploads: Uploads | None = None,
    group: Group | None = None,
) -> Iterator[Checkpoints]:
    """What the run is saved with, as its [checkpoint] section says; every rank enters this after `resume`.

    `overlap`: whoever changes the state calls `copied` before; otherwise `save` returns only when it may be changed.
    `group`: of the run, for asynchronous saving by several ranks; it waits for `PATIENCE` at least.
    Tidies what a killed run has left. `uploads` learn of each save, and what they are reading stays. However the block
    ends, a save under way is waited for first (but not when Ctrl-C asks a second time).
    """
    retries = retries or SaveRetries(config.checkpoint.retry_for)
    uploads = uploads or Uploads(config, monitor, None)
    make = partial(
        Saver,
        _target(config, monitor, uploads),
        shards_of(state),
        asynchronous=config.checkpoint.asynchronous,
        overlap=overlap,
        group=group,
        on_saved=partial(_tell, config, monitor, retries, uploads),
    )
    with on_all_ranks(make, mesh.world) as saver:  # one that is refused memory is missed by the others
        yield Checkpoints(saver, _files(config, corpus), config, mesh, corpus, monitor, products, retries)


def _files(config: Config, corpus: Corpus) -> dict[str, bytes]:
    files = {"config.toml": to_toml(config).encode()}
    if corpus.tokenizer is not None:
        files["tokenizer.json"] = corpus.tokenizer.to_json().encode()
        chat = corpus.chat
        if chat is not None:
            files[CONFIG] = (json.dumps(chat.to_json(), indent=2, ensure_ascii=False) + "\n").encode()
    return files


def _target(config: Config, monitor: Monitor, uploads: Uploads) -> Target:
    run, kept, refused = Path(config.run.folder), config.checkpoint, not_removed.by_monitor(monitor)
    target = Target(checkpoints(run), kept.keep, refused=refused, before_publishing=monitor.sync)
    return replace(target, spared=lambda steps: {*spared(run, kept, steps), *uploads.in_use()})


def best(config: Config) -> Best | None:
    """The best of the run's checkpoints that are there; None where none was evaluated, or it is not to be kept."""
    run = Path(config.run.folder)
    return best_of(run, checkpoints_in(checkpoints(run))) if config.checkpoint.keep_best else None


def _tell(config: Config, monitor: Monitor, retries: SaveRetries, uploads: Uploads, saved: Saved) -> None:
    retries.saved()
    monitor.event(
        SAVED,
        step=saved.step,
        checkpoint=saved.path.name,
        blocked_seconds=round(saved.blocked_seconds, 3),
        seconds=round(saved.seconds, 3),
    )
    with suppress(OSError):  # lost since it was saved
        lowest = best(config)
        if lowest is not None and lowest.step == saved.step:
            monitor.event(BEST, step=saved.step, checkpoint=saved.path.name, validation_loss=lowest.validation_loss)
    uploads.wake()


def _metadata(state: TrainState, config: Config, mesh: Mesh, corpus: Corpus) -> dict[str, Any]:
    return {
        "step": state.step,
        "skipped_steps": state.skipped,
        "samples": state.samples,
        "global_batch_size": config.train.global_batch_size,
        "optimizer": config.optim.name,
        "frozen": _frozen(state),
        **({} if state.base is None else {"base": state.base.metadata()}),
        "loss_scale": state.loss_scale.metadata(),
        "model": model_metadata(config.model, corpus.vocab_size),
        "tokenizer_sha256": None if corpus.tokenizer is None else corpus.tokenizer.sha256,
        "labels": corpus.labels,
        "published": None if state.published is None else state.published.model_dump(),
        **data_metadata(corpus, state.end_of_document),
        "layout": str(mesh.layout),
        "versions": {"colonnade": __version__, "torch": torch.__version__},
        "rollbacks": [each.model_dump() for each in state.rollbacks],
        "changes": [each.model_dump() for each in state.changes],
        "watch": asdict(state.watch),
    }


# --- going on ---------------------------------------------------------------------------------------------------------


def resume(
    state: TrainState,
    config: Config,
    corpus: Corpus,
    monitor: Monitor,
    read: Callable[[TrainState, Config, Corpus], tuple[Path, RunMetadata] | None] | None = None,
) -> None:
    """Go on from the run's newest whole checkpoint, where there is one; every rank calls this. `read`: `restore`, or
    what stands in its place.
    """
    found = (read or restore)(state, config, corpus)
    if found is None:
        if not state.drawn:
            raise CheckpointError(
                f"{config.run.folder} had a checkpoint when this rank started, and has none now: something removes it "
                "while the run starts. Start again when that has ended."
            )
        monitor.resume(0)
        monitor.event("started", version=__version__)
        return
    path, metadata = found
    config = behind(config, state.changes)
    monitor.resume(state.step)
    monitor.tell_lost()
    rollbacks.tell_untold(state, Path(config.run.folder), monitor)
    changed = changes(path, config)
    origin = "disk" if path.parent == checkpoints(Path(config.run.folder)) else "memory"
    told = {"changed": changed} if changed else {}
    monitor.event("resumed", step=state.step, checkpoint=path.name, origin=origin, **told)
    monitor.say(f"Resumed from {path} (step {state.step}, sample {state.samples:,}).")
    for said in (*what_changed(path, config, state.step, state.rollbacks), *_thawed(state, metadata)):
        monitor.say(said)
    line, others = what_to_say(path, metadata, corpus)
    if line:
        monitor.say(line)
    if others:
        monitor.event("other data", step=state.step, differences=others)


def _check_all(state: TrainState, config: Config, corpus: Corpus, path: Path, manifest: Manifest) -> None:
    """`check_metadata`, and that the base is the one that the run began with."""
    check_metadata(config, corpus, path, manifest)
    wanted, base = metadata_of(path, manifest).base, state.base
    if wanted is not None and base is not None:
        check_base(path, wanted, base.path, base.files)
    if (wanted is None) != (base is None):
        raise CheckpointError(
            f"{path} has {'adapters alone' if base is None else 'all weights'}, and the run would go on with "
            f"{'all weights' if base is None else 'adapters alone'}: leave lora.rank and train.init_from as they were."
        )


def _frozen(state: TrainState) -> list[str]:
    """The names of all weights of the model that are frozen."""
    return [name for name, weight in state.model.architecture.weights().items() if weight.is_frozen]


def _lacks(state: TrainState, manifest: Manifest) -> set[str]:
    """What a checkpoint has none of: moments, because their weights were frozen, and the weights that its base has."""
    frozen, base = (manifest.metadata.get(key) for key in ("frozen", "base"))
    kept = {name for each in state.optimizer_state for name in each}
    moments = {f"{OPTIMIZER}{moment}.{name}" for moment in kept for name in frozen or ()}
    return moments | {*(base or {}).get("weights", ())}


def _thawed(state: TrainState, metadata: RunMetadata) -> Iterator[str]:
    """What to say of weights that are trained from now on."""
    names = set(metadata.frozen) - set(_frozen(state))
    if names:
        yield (
            f"Trained from now on: {counted(len(names), 'weight')} that {'was' if len(names) == 1 else 'were'} frozen "
            f"({names_in_words(names)}). Their moments begin at zero."
        )


def restore(
    state: TrainState,
    config: Config,
    corpus: Corpus,
    path: Path | None = None,
    holders: Mapping[str, Sequence[int]] | None = None,
    known: Manifest | None = None,
) -> tuple[Path, RunMetadata] | None:
    """Put `state` to where the run's newest checkpoint is, or `path`; which that was, if any. All ranks call this.
    `config` may have changes of its own, those of `state`. `holders`, `known`: `load_found`. Moments it lacks: zero."""
    run, began = Path(config.run.folder), as_it_began(config, state.changes)
    _clear_moments_(state)
    found = load_found(
        partial(find, run) if path is None else lambda: path,
        shards_of(state, base=True),
        model=model_metadata(config.model, corpus.vocab_size),
        check=partial(_check_all, state, began, corpus),
        unread=(OPTIMIZER,),  # of weights that are frozen now
        lacks=partial(_lacks, state),
        holders=holders,
        known=known,
    )
    if found is None:
        return None
    path, metadata = found[0], metadata_of(*found)
    state.ownership.publish()
    if state.base is not None and metadata.base is not None:  # as the run began, whichever weights it would take today
        state.base = replace(state.base, weights=frozenset(metadata.base.weights))
    state.step, state.samples, state.skipped = metadata.step, metadata.samples, metadata.skipped_steps
    state.published = metadata.published
    state.end_of_document = end_behind(*found, corpus.tokenizer)
    if metadata.loss_scale is not None:
        state.loss_scale = state.loss_scale.resumed(metadata.loss_scale.model_dump())
    state.watch = LossWatch(**metadata.watch.model_dump())
    world = state.ownership.mesh.world
    if world.rank == 0:
        rollbacks.forget_behind(run, metadata.step)
    recorded = rollbacks.read_together(run, world)
    config, state.changes = in_force(began, metadata.changes), metadata.changes
    corpus, state.optimizer = replace(corpus, curriculum=curriculum_of(config)), optimizer_of(config)
    rollbacks.apply(state, config, corpus, recorded, metadata.rollbacks)
    return path, metadata


def _clear_moments_(state: TrainState) -> None:
    for kept in state.optimizer_state:
        for moment in kept.values():
            moment.zero_()


def check_metadata(config: Config, corpus: Corpus, path: Path, manifest: Manifest) -> None:
    """CheckpointError if what a checkpoint's metadata tells of its run cannot be gone on from. `config`: as begun."""
    metadata = metadata_of(path, manifest)
    config = in_force(config, metadata.changes)
    check_data(path, metadata, config, corpus)
    tokenizer = metadata.tokenizer_sha256
    if tokenizer is not None and corpus.tokenizer is not None and not corpus.tokenizer.is_of(tokenizer):
        raise CheckpointError(
            f"{path} was trained with another tokenizer (sha256 {clip(tokenizer, 12)}) than data.tokenizer "
            f"({corpus.tokenizer.sha256[:12]}…): the same id would mean different text. Set data.tokenizer to "
            f"{path / 'tokenizer.json'}."
        )
    for key, saved, wanted, why in (
        ("optim.name", metadata.optimizer, config.optim.name, "its moments are those of another rule"),
        (
            "train.global_batch_size",
            config.train.global_batch_size if metadata.global_batch_size is None else metadata.global_batch_size,
            config.train.global_batch_size,
            "its steps counted other samples",
        ),
    ):
        if saved != wanted:
            raise CheckpointError(
                f"{path} was written with {key} = {clip(repr(saved))}, and the run is to go on with {wanted!r}: "
                f"{why}. Set {key} = {clip(json.dumps(saved))}, or choose another run.folder to start a new run."
            )
