"""Beginning a run from weights that are there already: of a checkpoint, or of a published model.

Weights alone: moments are zero, and step, samples and learning rate begin as in any run. What is read is held against
the run before its memory is taken.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colonnade.architecture.adapters import WEIGHT, is_adapter
from colonnade.architecture.bert import answers_alike, has_output_layer, taken_by_another_head
from colonnade.architecture.parts import trained_architecture
from colonnade.architecture.statement import Weight
from colonnade.checkpoint.load import load
from colonnade.checkpoint.manifest import Manifest, compare_metadata, looked_at, read_manifest
from colonnade.checkpoint.plan import Box, Shard, names_in_words, narrow, overlap, relative
from colonnade.config.compare import as_now, model_metadata
from colonnade.config.numbers import counted
from colonnade.config.schema import Config
from colonnade.data.label_names import compare_labels
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, ConfigError
from colonnade.huggingface.cache import not_the_snapshot
from colonnade.huggingface.folder import Published, is_published, open_published
from colonnade.huggingface.peft import is_peft
from colonnade.huggingface.tokenizer import tokenizer_in
from colonnade.launch.agreement import on_all_ranks
from colonnade.mesh.mesh import Axis
from colonnade.train.base import Base, content_together
from colonnade.train.corpus import Corpus
from colonnade.train.metadata import PublishedMetadata, config_of, metadata_of
from colonnade.train.monitor import Monitor
from colonnade.train.newest import INITIALIZED, as_rank_0, checkpoint_at
from colonnade.train.published import end_behind, end_in, published_at, published_in
from colonnade.train.recovery import OPTIMIZER, shards_of
from colonnade.train.state import TrainState
from colonnade.train.sweep import sweep_instead

MAY_DIFFER = ("num_layers", "window", "head", "num_labels")
"""Keys of [model], and those of [model.rotary], with which a model may go on otherwise than it was trained."""


@dataclass(frozen=True)
class Origin:
    """Weights to begin from."""

    path: Path
    """The folder that has them, and their tokenizer, if any has."""
    what: str
    """In words."""
    model: Mapping[str, Any]
    """As a checkpoint's metadata says it."""
    shapes: Mapping[str, tuple[int, ...]]
    """Of the weights, by name."""
    others: int
    """Tensors that are no weights."""
    tokenizer: Callable[[], str | None]
    """Its fingerprint; None: unknown. CheckpointError where it cannot be read: weights alone are used without it."""
    fill: Callable[[Sequence[Shard]], None]
    """Reads into shards; every rank calls it."""
    published_by: Callable[[Tokenizer | None, int], PublishedMetadata | None]
    """What was published with them, to a tokenizer and as many tokens as a run's model has."""
    labels: tuple[str, ...] = ()
    """Names of what its classifier tells apart, from 0 on; none where they are unknown."""
    unused: frozenset[str] = frozenset()
    """Weights that are there, and mean something else than those of these names here."""
    end_by: Callable[[Tokenizer | None], int | None] = lambda _: None
    """The token that ends documents for them, to a tokenizer; None where nothing tells."""

    note: str = ""
    """What to say behind its name of whether ids mean the same tokens to it and to a run (`compared`)."""

    def leaves_drawn(self, stated: Mapping[str, Weight]) -> bool:
        """Whether it lacks weights of a model, or rows of them: there the model keeps what was drawn."""
        return any(self.shapes.get(name, ()) < weight.shape for name, weight in stated.items())


def opened(config: Config, corpus: Corpus, ranks: Axis, *, begins: bool) -> Origin | None:
    """What train.init_from names, held against the run; None where it is unset. CheckpointError says what differs.
    `begins`: whether the run takes all of it, and not the base alone that it goes on beside. Every rank calls this.
    """
    path = config.train.init_from
    if path is None:
        return None
    origin = origin_together(Path(path), ranks)
    return on_all_ranks(lambda: _checked(origin, config, corpus, begins), ranks)


def _checked(origin: Origin, config: Config, corpus: Corpus, begins: bool) -> Origin:
    _check_model(origin, config, corpus)
    if begins:
        _check_adapters(origin, config, corpus)
    resize = config.train.init_from_resize
    told = compared(origin, corpus, lambda: _check_tokenizer(origin, corpus, resize=resize), begins=begins)
    return _without_other_answers(told, config, corpus)


def compared(origin: Origin, corpus: Corpus, check: Callable[[], None], *, begins: bool) -> Origin:
    """With what to say of its tokenizer beside the run's. Where it is another, `check` raises ConfigError or
    CheckpointError; a run that has begun beside it, as earlier versions let it, goes on.
    """
    try:
        check()
        return replace(origin, note=_not_compared(origin, corpus.tokenizer))
    except (CheckpointError, ConfigError) as error:
        if begins:
            raise
        return replace(origin, note=f" The run goes on with it, and would not begin with it now: {error}")


def _not_compared(origin: Origin, ours: Tokenizer | None) -> str:
    if ours is not None and origin.tokenizer() is not None:
        return ""
    which = "the run has" if ours is None else "the weights have"
    return f" Whether ids mean the same tokens there and here is not known: {which} no tokenizer."


def _without_other_answers(origin: Origin, config: Config, corpus: Corpus) -> Origin:
    """Without what its head makes of the pooled vector, where that is for other labels than the run's."""
    alike = answers_alike(origin.model, model_metadata(config.model, corpus.vocab_size))
    if alike and compare_labels(origin.labels, corpus.labels) == "same":
        return origin
    kept = taken_by_another_head(origin.shapes)
    shapes = {name: shape for name, shape in origin.shapes.items() if name in kept}
    return replace(origin, shapes=shapes, unused=frozenset(origin.shapes.keys() - kept))


def origin_at(path: Path, named_by: str = "train.init_from") -> Origin:
    """The weights that a path has. CheckpointError where there are none, or adapters alone: it says what named them."""
    return _origin(path, checkpoint_at(path), named_by, looks=True)


def origin_together(path: Path, ranks: Axis, named_by: str = "train.init_from") -> Origin:
    """As `origin_at`, the same on all ranks beside a run that goes on; every rank calls this."""
    found = as_rank_0(on_all_ranks(lambda: checkpoint_at(path), ranks), ranks)
    return on_all_ranks(lambda: _origin(path, found, named_by, looks=ranks.rank == 0), ranks)


def _origin(path: Path, found: Path | None, named_by: str, *, looks: bool) -> Origin:
    """`looks`: whether the files of a checkpoint are looked at, and not its manifest alone."""
    whole = found is None and is_published(path) and not is_peft(path)
    return _of_published(path) if whole else _of_checkpoint(path, found, named_by, looks=looks)


def no_weights(path: Path, named_by: str) -> str:
    """What to say where a path leads to no weights."""
    named = f"{named_by} = {str(path)!r}"
    return sweep_instead(path, named) or (
        f"{named} is no checkpoint, no folder of a run that has one, and no folder of Hugging Face with config.json "
        f"and safetensors.{not_the_snapshot(path)} Name one of them."
    )


def based_on(origin: Origin, state: TrainState, ranks: Axis) -> Base:
    """What a run with adapters that begins takes from `origin` and does not save: frozen weights that are there as they
    are. One that goes on takes what its checkpoint lacks (`recovery.restore`). Every rank calls this.
    """
    stated = state.model.architecture.weights()
    kept = (name for name, w in stated.items() if w.is_frozen and origin.shapes.get(name) == w.shape)
    files = content_together(origin.path, ranks)
    return Base(origin.path, files, frozenset(kept), origin.model, origin.fill)


def read_base(origin: Origin, state: TrainState, corpus: Corpus, monitor: Monitor) -> None:
    """Put the weights of the base in the place of those that a run with adapters goes on without; every rank calls
    this. What was published with them was not always kept.
    """
    state.published = state.published or origin.published_by(corpus.tokenizer, corpus.vocab_size)
    fill_base_(state)
    monitor.say(f"Beside them the weights of {origin.path}, {origin.what}, as the run began with them.{origin.note}")


@torch.no_grad()
def fill_base_(state: TrainState) -> None:
    """Put the weights of the base, as they lie on the disk, in the place of those in memory; every rank calls this."""
    assert state.base is not None, "a run with adapters and a base"
    names = state.base.weights
    state.base.fill([shard for shard in shards_of(state, base=True) if shard.name in names])
    state.ownership.publish()


def _of_checkpoint(path: Path, found: Path | None, named_by: str, *, looks: bool) -> Origin:
    if is_peft(path):
        raise CheckpointError(
            f"{named_by} = {str(path)!r} has adapters of PEFT alone. `colonnade convert {path} TARGET --base "
            "BASE` makes a checkpoint of both, to begin from."
        )
    if found is None:
        raise CheckpointError(no_weights(path, named_by))
    manifest = looked_at(found) if looks else read_manifest(found)
    metadata = metadata_of(found, manifest)
    if metadata.base is not None:
        raise CheckpointError(
            f"{found} has adapters alone, beside the weights of {metadata.base.path!r}. `colonnade merge {found} "
            "TARGET` makes a checkpoint of both, to begin from."
        )
    weights = {name: x.shape for name, x in manifest.tensors.items() if not name.startswith(OPTIMIZER)}
    return Origin(
        path=found,
        what=f"the checkpoint of step {manifest.step:,}",
        model=as_now(manifest.metadata.get("model", {})),
        shapes=weights,
        others=len(manifest.tensors) - len(weights),
        tokenizer=lambda: metadata.tokenizer_sha256,
        fill=partial(_fill_from_checkpoint, found, manifest, tuple(weights)),
        published_by=partial(published_at, found, manifest),
        end_by=partial(end_behind, found, manifest),
        labels=metadata.labels,
    )


def _fill_from_checkpoint(path: Path, manifest: Manifest, weights: tuple[str, ...], shards: Sequence[Shard]) -> None:
    wanted = {shard.name for shard in shards}
    load(path, shards, unread=(OPTIMIZER, *(name for name in weights if name not in wanted)), known=manifest)


def _of_published(path: Path) -> Origin:
    published = open_published(path, whole=False)
    published.check_seconds()
    return Origin(
        path=path,
        what=f"a published {published.family.title}",
        model=model_metadata(published.model, published.vocab_size),
        shapes={name: source.weight.shape for name, source in published.sources.items()},
        others=0,
        tokenizer=cache(partial(_fingerprint_in, path)),
        fill=partial(_fill_from_published, published),
        published_by=partial(published_in, published),
        labels=published.labels,
        end_by=partial(end_in, published),
    )


def _fingerprint_in(path: Path) -> str | None:
    tokenizer = tokenizer_in(path)
    return None if tokenizer is None else tokenizer.sha256


def _fill_from_published(published: Published, shards: Sequence[Shard]) -> None:
    """Each tensor is read once, whole, by every rank that has a part of it."""
    of_name: dict[str, list[Shard]] = {}
    for shard in shards:
        of_name.setdefault(shard.name, []).append(shard)
    for name, parts in of_name.items():
        whole: Tensor = published.read(name)
        for shard in parts:
            shard.data.detach().copy_(narrow(whole, shard.box))


def _check_model(origin: Origin, config: Config, corpus: Corpus) -> None:
    """The model is the same but for what may differ: depth, and how far it reads."""
    wanted = model_metadata(config.model, corpus.vocab_size)
    free = {key for key in wanted if key in MAY_DIFFER or key.startswith("rotary.")}
    if not (has_output_layer(origin.model) and has_output_layer(wanted)):
        free.add("tie_embeddings")
    if config.model.position != "learned" or config.train.init_from_resize:
        free.add("seq_length")
    if config.train.init_from_resize:
        free.add("vocab_size")
    kept = [{key: value for key, value in each.items() if key not in free} for each in (origin.model, wanted)]
    differences = compare_metadata(*kept)
    if differences:
        resize = {line.split(":")[0].split(".")[-1] for line in differences} & {"vocab_size", "seq_length"}
        raise CheckpointError(
            f"train.init_from = {str(origin.path)!r} has the weights of another model:\n  "
            + "\n  ".join(differences[:40])
            + "\nSet these keys of [model] as they are there, or leave train.init_from out."
            + (" Rows that both have are taken with train.init_from_resize = true." if resize else "")
        )


def _check_adapters(origin: Origin, config: Config, corpus: Corpus) -> None:
    """Beside weights that the run takes it has the same adapters: without them these are another model's."""
    adapters = {name for name in origin.shapes if is_adapter(name)}
    if not adapters:
        return
    own = {name: weight.shape for name, weight in trained_architecture(config, corpus.vocab_size).weights().items()}
    beside = {name for name in adapters if f"{name.rpartition('.')[0]}{WEIGHT}" in own}
    if any(own.get(name) != origin.shapes[name] for name in beside) or (beside and _scale(origin) != config.lora.scale):
        raise CheckpointError(
            f"train.init_from = {str(origin.path)!r} has adapters beside its weights, and the run has not the same: "
            f"it would begin from another model. `colonnade merge {origin.path} TARGET` makes one model of both: name "
            "that, or set lora.rank, lora.alpha and lora.targets as they are there."
        )


def _scale(origin: Origin) -> float:
    """What the adapters of a checkpoint are multiplied with."""
    return config_of(origin.path, read_manifest(origin.path)).lora.scale


def _check_tokenizer(origin: Origin, corpus: Corpus, *, resize: bool) -> None:
    ours = corpus.tokenizer
    theirs = None if ours is None else origin.tokenizer()
    if ours is None or theirs is None or ours.is_of(theirs):
        return
    if resize:
        check_common_tokens(origin, ours)
    else:
        raise CheckpointError(
            f"train.init_from = {str(origin.path)!r} has another tokenizer than data.tokenizer: the same id would mean "
            f"different text. Set data.tokenizer = {str(origin.path)!r}, and make the token files with it."
        )


def check_common_tokens(origin: Origin, ours: Tokenizer) -> None:
    """CheckpointError if an id means one token to the weights, and another to the run."""
    before, after = Tokenizer.load(origin.path).names, ours.names
    differing = [number for number, (a, b) in enumerate(zip(before, after, strict=False)) if a != b]
    if differing:
        first = differing[0]
        raise CheckpointError(
            f"train.init_from = {str(origin.path)!r} has another tokenizer than data.tokenizer, and they differ in "
            f"{counted(len(differing), 'id')} that both have: {first} is {before[first]!r} there and {after[first]!r} "
            f"here. Use a tokenizer that only adds tokens behind those of the weights."
        )


def _clipped(shard: Shard, shape: tuple[int, ...]) -> list[Shard]:
    """What of a shard a tensor of another number of rows has; nothing where it ends before."""
    if shard.shape == shape:
        return [shard]
    both = overlap(shard.box, Box((0,) * len(shape), shape))
    if both is None:
        return []
    return [Shard(shard.name, shape, both.offsets, narrow(shard.data, relative(both, shard.box)))]


@torch.no_grad()
def begin_from(origin: Origin, state: TrainState, corpus: Corpus, monitor: Monitor) -> None:
    """Put the weights of `origin` in the place of those that were drawn, and have the run keep what was published with
    them, and what ended their documents; every rank calls this, before step 1.
    """
    state.published = origin.published_by(corpus.tokenizer, corpus.vocab_size)
    state.end_of_document = origin.end_by(corpus.tokenizer)
    stated = state.model.architecture.weights()
    mine = [shard for shard in shards_of(state, base=True) if not shard.name.startswith(OPTIMIZER)]
    common = [shard for shard in mine if shard.name in origin.shapes]
    origin.fill([part for shard in common for part in _clipped(shard, origin.shapes[shard.name])])
    state.ownership.publish()
    taken, left, new = (
        stated.keys() & origin.shapes.keys(),
        (origin.shapes.keys() - stated.keys()) | origin.unused,
        stated.keys() - origin.shapes.keys(),
    )
    resized = {name for name in taken if origin.shapes[name] != stated[name].shape}
    monitor.event(
        INITIALIZED,
        source=str(origin.path),
        taken=len(taken),
        left=sorted(left),
        new=sorted(new),
        resized=sorted(resized),
    )
    monitor.say(
        f"Begun from {origin.path}, {origin.what}: {counted(len(taken), 'tensor')} taken; "
        f"left {_named(left)}{f' and {origin.others:,} of the optimizer' if origin.others else ''}; "
        f"drawn anew {_named(new)}{_rows(origin, stated, resized)}.{origin.note}"
    )


def _rows(origin: Origin, stated: Mapping[str, Weight], resized: set[str]) -> str:
    """Which tensors have another number of rows."""
    told = [
        f"of {name} {min(origin.shapes[name][0], stated[name].shape[0]):,} rows taken, "
        f"{max(0, stated[name].shape[0] - origin.shapes[name][0]):,} drawn and "
        f"{max(0, origin.shapes[name][0] - stated[name].shape[0]):,} left"
        for name in sorted(resized)
    ]
    return "".join(f"; {each}" for each in told)


def _named(names: set[str]) -> str:
    return f"{len(names):,} ({names_in_words(names)})" if names else "none"
