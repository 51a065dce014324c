"""What a teacher says, stored once: of every token that the run reads, its k likeliest tokens.

    STORE/about.json            whose word it is, of which tokens: content of the teacher and the data, k, temperature
    STORE/targets_00000003.npy  [positions, s, k] of (id, log-probability), of a block of the run's samples

Before the first step whatever is missing is computed by the teacher, which is given up then. A run that goes on finds
its blocks; one that is longer than before adds to them. What is stored once stays as it is, whoever else asks the same
teacher about the same tokens on another layout, whose numbers differ in their last bits: so that runs may share a store
while they go on.
"""

import json
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colonnade.atomic import written
from colonnade.checkpoint.schema import clip
from colonnade.config.compare import meaning_at
from colonnade.config.schema import Config, DataConfig
from colonnade.data.loader import evaluation_batches, evaluation_positions
from colonnade.errors import DataError, LockError, raise_passing
from colonnade.launch.agreement import on_all_ranks
from colonnade.lock import locked
from colonnade.mapped import mapped
from colonnade.mesh.agreement import broadcast_text
from colonnade.mesh.collectives import all_reduce
from colonnade.mesh.mesh import Mesh
from colonnade.model.inputs import Inputs
from colonnade.model.stack import Head
from colonnade.tasks.task import Microbatch
from colonnade.tasks.tasks import TASKS
from colonnade.tensor_parallel.distillation import likeliest
from colonnade.train.base import content_together, of_same_files
from colonnade.train.corpus import Corpus
from colonnade.train.init_from import origin_together
from colonnade.train.monitor import Monitor
from colonnade.train.run_folder import ABOUT, TEACHER
from colonnade.train.state import TrainState
from colonnade.train.teacher import (
    NAMED_BY,
    Teacher,
    open_teacher,
    teacher_together,
    with_soft_targets,
)
from colonnade.upload import upload

LOCK = "targets.lock"  # not that of a run, in whose folder they may be
BLOCK = 1 << 22  # entries of a file
PATIENCE = 600.0  # seconds, with another run that stores what its teacher says
_CHOICES = ("cache", "questions")
"""Keys of [data] that change nothing of which tokens are read."""
_UNSAID = {"revision": str(DataConfig().revision)}
"""Of keys of [data], what stores of earlier versions do not say."""


def attach(state: TrainState, config: Config, corpus: Corpus, mesh: Mesh, monitor: Monitor) -> None:
    """Give the run its teacher, where it has one; every rank calls this before the first step. ConfigError and
    DataError for a teacher that cannot teach, and for one that is another than the run began with.
    """
    chosen = config.distillation
    if chosen.teacher is None:
        return
    begins = not _has_taught(config, mesh)
    folder, about = store_of(config), _checked(config, corpus, mesh)
    device, products = next(state.model.parameters()).device, state.model.parallel.products
    if chosen.top_k is None:
        teacher = open_teacher(config, mesh, corpus, device, products, begins=begins)
        on_all_ranks(lambda: _write_down(folder, about) if mesh.rank == 0 else None, mesh.world)
        origin = teacher.origin
        monitor.say(f"Taught by {origin.path}, {origin.what}, which runs beside the student.{origin.note}")
        state.teacher = teacher
        return
    blocks = _blocks(config, corpus, state)
    missing = _missing(folder, blocks, mesh)
    if missing:
        teacher = open_teacher(config, mesh, corpus, device, products, begins=begins)
        on_all_ranks(lambda: _write_down(folder, about) if mesh.rank == 0 else None, mesh.world)
        samples, origin = sum(len(block.asked) for block in missing), teacher.origin
        monitor.say(f"Asking {origin.path}, {origin.what}, about {samples:,} samples, once.{origin.note}")
        _compute(teacher, missing, folder, config=config, corpus=corpus, mesh=mesh)
    state.teacher = Stored(folder, blocks[0].size, blocks[-1].stop, chosen.alpha, chosen.temperature)


def check(config: Config, corpus: Corpus, mesh: Mesh) -> None:
    """Raises what `attach` does of a teacher, as far as that is known before the run's state is made. Reads all of a
    published teacher where something is stored to hold it against. Every rank calls this.
    """
    if config.distillation.teacher is None:
        return
    is_stored = _has_taught(config, mesh)
    if is_stored:
        _checked(config, corpus, mesh)
    if config.distillation.top_k is None or not is_stored:
        teacher_together(config, corpus, mesh, begins=not is_stored)


def _has_taught(config: Config, mesh: Mesh) -> bool:
    """Whether it is written down whose word is stored, as the first rank sees it; every rank calls this."""
    return bool(broadcast_text("yes" if (store_of(config) / ABOUT).exists() else "", mesh.world))


def _checked(config: Config, corpus: Corpus, mesh: Mesh) -> dict[str, Any]:
    """What the stored targets depend on. DataError where another's are there."""
    folder, about = store_of(config), _about(config, corpus, mesh)
    on_all_ranks(lambda: _check(folder, about) if mesh.rank == 0 else None, mesh.world)
    return about


def store_of(config: Config) -> Path:
    """Where what a teacher says is."""
    return Path(config.distillation.store or Path(config.run.folder) / TEACHER)


@dataclass(frozen=True)
class Block:
    """Positions `start … stop` of the run."""

    number: int
    size: int
    """Positions of a full one."""
    stop: int
    done: int = 0
    """How many positions are stored, the first ones."""

    @property
    def start(self) -> int:
        return self.number * self.size

    @property
    def asked(self) -> range:
        """Positions of the run that are not stored."""
        return range(self.start + self.done, self.stop)

    def path(self, folder: Path) -> Path:
        return folder / f"targets_{self.number:08d}.npy"

    def sums(self, folder: Path) -> Path:
        """A CRC-32 of each position's part of the other file, which is there once this one is."""
        return folder / f"sums_{self.number:08d}.npy"


@dataclass(frozen=True)
class Stored:
    """A teacher's likeliest tokens, read (`teacher.Teaching`)."""

    folder: Path
    size: int
    stop: int
    alpha: float
    temperature: float

    def teach(self, batches: Sequence[Microbatch], inputs: Sequence[Inputs], scale: float) -> list[Inputs]:
        return [self._taught(batch, each) for batch, each in zip(batches, inputs, strict=True)]

    def _taught(self, batch: Microbatch, inputs: Inputs) -> Inputs:
        rows = np.stack([self._row(position) for position in batch.samples.tolist()], 1)  # [s, b, k]
        weights = inputs.loss_weights
        assert weights is not None, "a step weighs its tokens"
        ids = upload(torch.from_numpy(rows["id"].astype(np.int64)), weights.device)
        log_probs = upload(torch.from_numpy(np.ascontiguousarray(rows["log_prob"])), weights.device)
        return with_soft_targets(inputs, self.alpha, self.temperature, ids=ids, log_probs=log_probs)

    def _row(self, position: int) -> NDArray[Any]:
        """[s, k]"""
        if position >= self.stop:
            raise DataError(
                f"{self.folder} has what the teacher says of the run's first {self.stop:,} samples, and sample "
                f"{position + 1:,} is next, as a rollback has passed over some. Start the same command again: it adds "
                "what is missing."
            )
        number, within = divmod(position, self.size)
        block = Block(number, self.size, 0)
        row = cast(NDArray[Any], _stored(block.path(self.folder))[within])
        if _sum(row) != _stored(block.sums(self.folder))[within]:
            raise DataError(
                f"{block.path(self.folder)} is damaged: what the teacher said of sample {position + 1:,} is not what "
                "was written. Remove it and start the same command again: the teacher is asked anew."
            )
        return row


def _sum(row: NDArray[Any]) -> int:
    return zlib.crc32(row.tobytes())


def _about(config: Config, corpus: Corpus, mesh: Mesh) -> dict[str, Any]:
    """What the stored targets depend on; of a teacher that runs beside the student, its content alone."""
    chosen = config.distillation
    assert chosen.teacher is not None, "there is a teacher"
    teacher = Path(chosen.teacher)
    origin = origin_together(teacher, mesh.world, NAMED_BY)
    content = {"teacher": content_together(origin.path, mesh.world)}
    if chosen.top_k is None:
        return content
    keys = [key for key in DataConfig.model_fields if key not in _CHOICES]
    return {
        **content,
        "top_k": chosen.top_k,
        "temperature": chosen.temperature,
        "data": {key: str(identity) for key, identity in corpus.identities.items()},
        "read": {key: str(meaning_at(config, f"data.{key}")) for key in keys},
        "seq_length": config.model.seq_length,
        "seed": config.train.seed,
        "precision": config.train.precision,
    }


def _write_down(folder: Path, about: dict[str, Any]) -> None:
    """Whose word it is. DataError where another's has come since it was last looked for."""
    with _in_turn(folder):
        _check(folder, about)
        with written(folder / ABOUT) as stream:
            stream.write(json.dumps(about, indent=2).encode())


def _check(folder: Path, about: dict[str, Any]) -> None:
    """DataError where another's word is there; DiskError where that cannot be told for a while."""
    file = folder / ABOUT
    if not file.exists():
        return
    try:
        before = dict(json.loads(file.read_text(encoding="utf-8")))
        before["teacher"] = of_same_files(before["teacher"], about["teacher"])
        if "read" in before:
            before["read"] = {**_UNSAID, **before["read"]}
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise_passing(file, error)
        raise DataError(f"{file} cannot be read ({error}). Remove {folder} to have the teacher asked again.") from None
    differing = sorted(key for key in {*before, *about} if before.get(key) != about.get(key))
    if differing:
        raise DataError(
            f"{folder} has what another teacher says, or of other tokens, than the run asks for: "
            f"{', '.join(map(clip, differing))} {'differs' if len(differing) == 1 else 'differ'}. Put the teacher back "
            "that the run began with, or remove the folder to have this one asked from here on."
        )


def _blocks(config: Config, corpus: Corpus, state: TrainState) -> list[Block]:
    """Of all samples from the run's first to its last."""
    assert config.distillation.top_k is not None, "something is stored"
    size = max(1, BLOCK // (config.model.seq_length * config.distillation.top_k))
    rest = max(0, config.train.steps - state.step)
    stop = state.samples + rest * config.train.global_batch_size
    return [Block(number, size, min(stop, (number + 1) * size)) for number in range(-(-max(stop, 1) // size))]


def _missing(folder: Path, blocks: Sequence[Block], mesh: Mesh) -> list[Block]:
    """Those that are not there, or end too early, with how much of them is there, as the first rank sees it. DiskError
    on all ranks where its disk does not give them for a while.
    """

    def there(block: Block) -> int:
        rows, sums = _files(block, folder)
        count = min(len(rows), len(sums))
        return count if count >= len(block.asked) else len(_kept(rows, sums))

    lines = on_all_ranks(lambda: "" if mesh.rank else " ".join(str(there(block)) for block in blocks), mesh.world)
    counts = map(int, broadcast_text(lines, mesh.world).split())
    found = [replace(block, done=count) for block, count in zip(blocks, counts, strict=True)]
    return [block for block in found if block.asked]


def _files(block: Block, folder: Path) -> tuple[Sequence[NDArray[Any]], Sequence[int]]:
    """What is stored of a block, and the sums of it; nothing where a file is not there, or is none. DiskError where a
    disk does not give them for a while: the teacher is not asked again for that.
    """
    try:
        return _stored(block.path(folder)), _stored(block.sums(folder))
    except (OSError, ValueError, EOFError):
        return (), ()


def _stored(file: Path) -> Any:
    """What a file has, mapped. DiskError where its disk does not give it for a while, DataError where its file system
    maps no files.
    """
    try:
        return np.load(file, mmap_mode="r")
    except OSError as error:
        with suppress(OSError):
            mapped(file, f"Copy {file.parent} to another, and set distillation.store to it there.")
        raise_passing(file, error)
        raise


def _kept(rows: Sequence[NDArray[Any]], sums: Sequence[int]) -> list[NDArray[Any]]:
    """The first rows, as far as they are as they were written."""
    return [row for row, _ in takewhile(lambda each: _sum(each[0]) == each[1], zip(rows, sums, strict=False))]


def _compute(
    teacher: Teacher, blocks: Sequence[Block], folder: Path, *, config: Config, corpus: Corpus, mesh: Mesh
) -> None:
    """Ask the teacher, on the run's own layout; the first rank writes."""
    kind = np.float64 if config.train.precision == "fp64" else np.float32
    for block in blocks:
        table = _computed(teacher, block, config, corpus, mesh)

        def write(block: Block = block, table: Tensor = table) -> None:
            rows = np.empty(table.shape[:-1], dtype=[("id", "<u4"), ("log_prob", kind)])
            rows["id"], rows["log_prob"] = table[..., 0].numpy(), table[..., 1].numpy()
            with _in_turn(folder):
                _add(block, rows, folder)

        on_all_ranks(write if mesh.rank == 0 else lambda: None, mesh.world)


def _add(block: Block, rows: NDArray[Any], folder: Path) -> None:
    """Store what a block lacks. What is there stays, also what another run has added meanwhile: it is being read."""
    kept = _kept(*_files(block, folder))
    if len(kept) < block.done:
        raise DataError(f"{block.path(folder)} has changed meanwhile. Start the same command again.")
    whole = [*kept, *rows[len(kept) - block.done :]]
    for file, content in (
        (block.sums(folder), np.array([_sum(row) for row in whole], np.uint32)),
        (block.path(folder), np.stack(whole)),
    ):
        with written(file) as stream:
            np.save(stream, content)


@contextmanager
def _in_turn(folder: Path) -> Iterator[None]:
    """One run writes at a time; others wait. LockError for one that waits for a run that does not go on."""
    end = time.monotonic() + PATIENCE
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(folder, "colonnade train", name=LOCK))
                break
            except LockError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)
        yield


def _computed(teacher: Teacher, block: Block, config: Config, corpus: Corpus, mesh: Mesh) -> Tensor:
    """Ids and log-probabilities, float64 [positions, s, k, 2], on every rank: shared by the dp ranks, and summed over
    dp and pp.
    """
    k, device = config.distillation.top_k, next(teacher.model.parameters()).device
    assert k is not None, "something is stored"
    count = len(block.asked)
    table = torch.zeros(count, config.model.seq_length, k, 2, dtype=torch.float64)
    for positions, batch in _asked(block, config, corpus, mesh):
        inputs = TASKS[corpus.kind].inputs(batch.to(device), None, None)
        carry = teacher.inference.hidden(inputs)
        if carry is None or positions is None:
            continue
        head = cast(Head, teacher.model.head)
        read = head.read_by_output(teacher.model.residual(carry))
        parallel = head.parallel
        ids, log_probs = likeliest(
            read, head.output.weight, k=k, temperature=teacher.temperature, bias=head.output_bias, tp=parallel.tp,
            vocab_size=head.vocab_size, products=parallel.products,
        )  # fmt: skip
        table[list(positions)] = torch.stack([ids.double(), log_probs.double()], -1).transpose(0, 1).cpu()
    teacher.inference.close()
    return all_reduce(all_reduce(table.to(device), mesh.data), mesh.pp).cpu()


def _asked(block: Block, config: Config, corpus: Corpus, mesh: Mesh) -> Iterator[tuple[range | None, Microbatch]]:
    """This dp rank's micro-batches of what is asked about a block, with their places in that; None: only to come along
    with the others.
    """
    shape = {"micro_batch_size": config.train.micro_batch_size, "dp_rank": mesh.data.rank, "dp_size": mesh.data.size}

    def load(places: range) -> Microbatch:
        return corpus.load(corpus.training, block.asked[places.start : places.stop])

    count = len(block.asked)
    mine: list[range | None] = [*evaluation_positions(count, **shape)]
    for number, batch in enumerate(evaluation_batches(load, count, **shape)):
        yield mine[number] if number < len(mine) else None, batch
