"""What one rank of a compared run writes down: every number of every step that means the same on any layout.

    before step 1       weights
    each step           loss · whether it was skipped · gradients, summed over all ranks, before clipping · their norm
    after the last      weights · both moments of the optimizer · parameters: the weights as the layers have them

Gradients come in the order of a backward pass, the head's first, so that the first one that differs is the one that
the others have it from. Of each tensor a rank has boxes: all of its shard, or under ZeRO those of its slice.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from colonnade.checkpoint.plan import Box, shards_of_range
from colonnade.config.schema import Config
from colonnade.data_parallel.buckets import Bucket, named_ranges
from colonnade.launch.join import joined
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Mesh
from colonnade.optim.param_slice import Optimizer, ParamSlice, Total, Watch, unwatched
from colonnade.tensor_parallel.placement import named_placements
from colonnade.train.corpus import Corpus, open_corpus
from colonnade.train.state import TrainState, build_state
from colonnade.train.step import StepResult, train_step
from colonnade.train.teacher import open_teacher
from colonnade.verify.compare import LocalShard, Number


def file_of(folder: Path, rank: int) -> Path:
    """Where a rank's numbers are written."""
    return folder / f"rank_{rank}.pt"


def read(folder: Path, rank: int) -> list[LocalShard]:
    """What `trace` has written for a rank."""
    rows = torch.load(file_of(folder, rank), mmap=True)
    return [LocalShard(Number(what, name, step), shape, offsets, x) for what, name, step, shape, offsets, x in rows]


def trace(config: Config, output: Path, steps: int) -> None:
    """Run `steps` steps as one rank of the configuration's layout, and write this rank's numbers to `output`."""
    parallel, train = config.parallel, config.train
    corpus = open_corpus(config)
    layout = Layout(tp=parallel.tp, pp=parallel.pp, dp=parallel.dp)
    with joined(layout, train.device, train.threads, timeout=train.timeout) as (mesh, device):
        shards = list(_run(config, corpus, mesh, device, steps))
        output.mkdir(parents=True, exist_ok=True)
        torch.save(
            [(*shard.number, shard.shape, shard.offsets, shard.values) for shard in shards], file_of(output, mesh.rank)
        )


def _run(config: Config, corpus: Corpus, mesh: Mesh, device: torch.device, steps: int) -> Iterator[LocalShard]:
    state = build_state(config, mesh, corpus.vocab_size, device)
    if config.distillation.teacher is not None:  # beside the student: nothing is stored for a few steps
        state.teacher = open_teacher(config, mesh, corpus, device, state.model.parallel.products)
    seen = SeenGradients(state.optimizer, state.trained)
    state.optimizer = seen
    order = _backward_order(state, mesh)
    yield from _boxes("weight", 0, state.buckets, [bucket.master for bucket in state.buckets])
    for step in range(1, steps + 1):
        mesh.ledger.begin_step(step)
        result = _step(state, config, corpus, mesh, device)
        loss = {} if result.loss is None else {"loss": result.loss}
        yield from _scalars(step, {**loss, "overflow": float(result.skipped)})
        yield from sorted(seen.taken(step, result.loss_scale), key=lambda shard: order[shard.number.name])
        yield from _scalars(step, {} if result.skipped else {"gradient norm": result.grad_norm})
    yield from _boxes("weight", steps, state.buckets, [bucket.master for bucket in state.buckets])
    moments = [kept for kept in state.optimizer_state if kept]
    for name in moments[0] if moments else ():
        yield from _boxes(f"optimizer {name}", steps, state.trained, [kept[name] for kept in moments])
    yield from _parameters(steps, state.buckets)


def _step(state: TrainState, config: Config, corpus: Corpus, mesh: Mesh, device: torch.device) -> StepResult:
    train = config.train
    position = state.samples
    loaded = corpus.batches(position, micro_batch_size=train.micro_batch_size, dp=mesh.data)
    result = train_step(state, [batch.to(device) for batch in loaded], mesh, train)
    state.samples = corpus.curriculum.next(position)
    return result


@dataclass
class SeenGradients:
    """An `Optimizer` that takes down the gradients before the one within uses them up: a rule may scale them in place,
    with a factor in which one wrong gradient would show in all of them.
    """

    optimizer: Optimizer
    buckets: Sequence[Bucket]
    _gradients: list[Tensor] = field(default_factory=list)

    def init(self, weights: Tensor) -> dict[str, Tensor]:
        """As `Optimizer.init`."""
        return self.optimizer.init(weights)

    def update_(
        self,
        slices: Sequence[ParamSlice],
        *,
        step: int,
        learning_rate: float,
        factor: Tensor,
        num_weights: int,
        total: Total,
        watch: Watch = unwatched,
    ) -> None:
        """As `Optimizer.update_`."""
        self._gradients = [bucket.optimizer_gradients.clone() for bucket in self.buckets]
        self.optimizer.update_(
            slices,
            step=step,
            learning_rate=learning_rate,
            factor=factor,
            num_weights=num_weights,
            total=total,
            watch=watch,
        )

    def taken(self, step: int, loss_scale: float) -> Iterator[LocalShard]:
        """This rank's boxes of the gradients of the last step, without the loss scale; none if it was skipped."""
        flats, self._gradients = self._gradients, []
        if flats:
            yield from _boxes("gradient", step, self.buckets, [flat / loss_scale for flat in flats])


def _boxes(what: str, step: int, buckets: Sequence[Bucket], flats: Sequence[Tensor]) -> Iterator[LocalShard]:
    """This rank's boxes of every tensor, where `flats` has a number for each element of the buckets' slices."""
    for bucket, flat in zip(buckets, flats, strict=True):
        for local in bucket.local_ranges():
            place = local.placement
            held = Box(place.offsets, tuple(place.parameter.shape))
            for box in shards_of_range(local.name, place.shape, held, flat[local.at], local.first):
                yield LocalShard(
                    Number(what, local.name, step), box.shape, box.offsets, box.data.detach().cpu().clone()
                )


def _parameters(step: int, buckets: Sequence[Bucket]) -> Iterator[LocalShard]:
    """What layers multiply with, after it was gathered: the shards of every weight."""
    for name, bucket, param in named_ranges(buckets):
        bucket.unshard()
        place, shard = param.placement, param.view(bucket.parameters)
        yield LocalShard(
            Number("parameter", name, step), place.shape, place.offsets, place.real(shard).detach().cpu().clone()
        )
    for bucket in buckets:
        bucket.reshard()


def _scalars(step: int, values: Mapping[str, float]) -> Iterator[LocalShard]:
    for what, value in values.items():
        yield LocalShard(Number(what, "", step), (), (), torch.tensor(value, dtype=torch.float64))


def _backward_order(state: TrainState, mesh: Mesh) -> dict[str, int]:
    """The weights of this rank by when a backward pass comes to them."""
    buckets = named_placements(state.model.bucket_modules(), mesh.tp)
    names = [f"{bucket}.{place.name}" for bucket, places in buckets.items() for place in places]
    return {name: place for place, name in enumerate(reversed(names))}
