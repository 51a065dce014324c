"""What a run reads: its tokenizer, its vocabulary, and the datasets of its splits.

Opening it takes no torch, so that what is wrong is told before any rank starts (`start.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from colonnade.config.schema import Config, DataConfig, parse_split
from colonnade.data.blended_dataset import BlendedDataset, Mixture, open_blend
from colonnade.data.curriculum import Curriculum, CurriculumDataset
from colonnade.data.gpt_dataset import Dataset, Datasets, GPTDataset, open_datasets, open_tokens
from colonnade.data.identity import DataIdentity, identify
from colonnade.data.indexed import TokenFile
from colonnade.data.remote import open_token_file
from colonnade.data.rows import Cut
from colonnade.data.sidecar import read_sidecar
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from colonnade.data.loader import Batch
    from colonnade.mesh.mesh import Axis


@dataclass(frozen=True)
class Corpus:
    """Tokenizer (where the run has one), vocabulary and datasets."""

    tokenizer: Tokenizer | None
    vocab_size: int
    datasets: Datasets
    curriculum: Curriculum
    """Which positions are a step; a single stage where nothing grows."""

    @property
    def files(self) -> dict[str, TokenFile]:
        """Every token file that the run opens, by the key that names it (of a blend with a number), in their order."""
        train, *own = (_files_of(part) for part in (self.datasets.train, self.datasets.validation, self.datasets.test))
        named = {"data.train": train[0]} if isinstance(self.datasets.train, GPTDataset) else {}
        if not named:
            named = {f"data.blend, file {number}": file for number, file in enumerate(train, 1)}
        prefixes = {file.prefix for file in train}
        for key, files in zip(("data.validation", "data.test"), own, strict=True):
            for file in files:
                if file.prefix not in prefixes:  # one file of its own, or parts of those that are trained on
                    named[key] = file
        return named

    @cached_property
    def identities(self) -> dict[str, DataIdentity]:
        """What each of `files` is known by; reads some of them the first time."""
        files = self.files
        return {key: identify(file, num_files=len(files)) for key, file in files.items()}

    @cached_property
    def unchecked(self) -> list[str]:
        """Token files that do not say which tokenizer made them."""
        files = {file.prefix: file for file in self.files.values()}
        return [prefix for prefix, file in files.items() if read_sidecar(file) is None]

    @property
    def facts(self) -> dict[str, str]:
        """What ranks must have alike, in words."""
        tokenizer = self.tokenizer
        known = "none" if tokenizer is None else f"{tokenizer.vocab_size:,} ids, sha256 {tokenizer.sha256[:12]}"
        files = {key: str(identity) for key, identity in self.identities.items()}
        return {"data.tokenizer": known, "vocabulary": f"{self.vocab_size:,}", **files}

    @property
    def training(self) -> Dataset:
        """What the run trains on, by the positions of the curriculum."""
        return CurriculumDataset(self.datasets.train, self.curriculum)

    def batches(self, position: int, *, micro_batch_size: int, dp: Axis) -> list[Batch]:
        """A dp rank's micro-batches of the step that begins at `position`."""
        chunks = self.curriculum.rank_positions(
            position, micro_batch_size=micro_batch_size, dp_rank=dp.rank, dp_size=dp.size
        )
        from colonnade.data.loader import load_batch

        return [load_batch(self.training, chunk) for chunk in chunks]

    @property
    def byte_lengths(self) -> NDArray[np.int64] | None:
        """Bytes of text that each token stands for, where the tokenizer tells."""
        if self.tokenizer is None or not self.tokenizer.is_byte_level:
            return None
        return self.tokenizer.byte_lengths()


def open_corpus(config: Config) -> Corpus:
    """Open everything that [data] names and hold it against [model]; reads no more than headers."""
    data = config.data
    tokenizer = Tokenizer.load(data.tokenizer) if data.tokenizer is not None else None
    vocab_size = vocab_size_of(config, tokenizer)
    cut = cut_of(data)
    datasets = (
        _open(config, vocab_size, tokenizer, cut)
        if data.blend is None
        else _open_blend(config, vocab_size, tokenizer, cut)
    )
    curriculum = curriculum_of(config)
    _check_length(config, datasets, curriculum)
    return Corpus(tokenizer, vocab_size, datasets, curriculum)


def cut_of(data: DataConfig) -> Cut:
    """How [data] makes samples of documents: for training, for validation, and for measuring the trained model."""
    return Cut(data.documents == "separate", data.packing == "best_fit", data.no_loss_on)


def open_together(config: Config, ranks: Axis) -> Corpus:
    """As `open_corpus`, on all ranks: ConfigError on all of them where one cannot, or where they read other data."""
    from colonnade.launch.agreement import agree_on_data, on_all_ranks

    corpus = on_all_ranks(lambda: _opened(config), ranks)
    agree_on_data(corpus.facts, ranks)
    return corpus


def _opened(config: Config) -> Corpus:
    corpus = open_corpus(config)
    assert corpus.identities, "a run reads files"  # read here, where a failure is everyone's
    return corpus


def _files_of(dataset: Dataset | None) -> list[TokenFile]:
    if isinstance(dataset, BlendedDataset):
        return [part.file for part in dataset.parts]
    return [dataset.file] if isinstance(dataset, GPTDataset) else []


def curriculum_of(config: Config) -> Curriculum:
    """The phases of [curriculum], or one for the whole run."""
    stages = config.curriculum
    if not stages.tokens:
        return Curriculum.constant(config.model.seq_length, config.train.global_batch_size)
    return Curriculum(stages.tokens, stages.seq_length, stages.global_batch_size)


def _open(config: Config, vocab_size: int, tokenizer: Tokenizer | None, cut: Cut) -> Datasets:
    data = config.data
    assert data.train is not None, "load() refuses a configuration with neither data.train nor data.blend"
    return open_datasets(
        train=data.train,
        validation=data.validation,
        test=data.test,
        split=parse_split(data.split),
        needed=frozenset({"train", "validation"} if config.train.evaluate_every else {"train"}),
        seq_length=config.model.seq_length,
        vocab_size=vocab_size,
        seed=config.train.seed,
        order=data.order,
        epochs=data.epochs,
        tokenizer=tokenizer,
        cut=cut,
        cache=data.cache,
    )


def _open_blend(config: Config, vocab_size: int, tokenizer: Tokenizer | None, cut: Cut) -> Datasets:
    """The parts of all files of data.blend; a validation or test file of its own stands in place of their parts."""
    data, seq_length = config.data, config.model.seq_length
    assert data.blend is not None, "called for a blend"
    blended = open_blend(
        Mixture(data.blend, data.blend_by, data.temperature),
        split=data.shares,
        seq_length=seq_length,
        vocab_size=vocab_size,
        seed=config.train.seed,
        order=data.order,
        tokenizer=tokenizer,
        cut=cut,
        cache=data.cache,
    )
    own: dict[str, Dataset] = {}
    for name, prefix in (("validation", data.validation), ("test", data.test)):
        if prefix is not None:
            file = open_tokens(prefix, vocab_size=vocab_size, tokenizer=tokenizer, cache=data.cache)
            own[name] = GPTDataset(file, range(file.num_documents), seq_length, vocab_size=vocab_size, cut=cut)
    return replace(blended, **own)


def vocab_size_of(config: Config, tokenizer: Tokenizer | None) -> int:
    """model.vocab_size, or the tokenizer's, or what `data tokenize` wrote beside the token file."""
    wanted = config.model.vocab_size
    if tokenizer is not None and wanted is not None and wanted < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size = {wanted:,} is less than the {tokenizer.vocab_size:,} ids of data.tokenizer = "
            f"{config.data.tokenizer!r}. Leave model.vocab_size out, or set it to {tokenizer.vocab_size} or more."
        )
    if wanted is not None:
        return wanted
    if tokenizer is not None:
        return tokenizer.vocab_size
    files = list(config.data.blend or [config.data.train or ""])
    sidecars = [read_sidecar(open_token_file(file, config.data.cache)) for file in files]
    known = [sidecar.vocab_size for sidecar in sidecars if sidecar is not None]
    if len(known) == len(files):
        return max(known)
    silent = files[sidecars.index(None)]
    raise ConfigError(
        f"The vocabulary's size is unknown: {silent} does not tell it, and neither data.tokenizer nor model.vocab_size "
        "is set. Set data.tokenizer to the tokenizer that made the file, or model.vocab_size."
    )


def _check_length(config: Config, datasets: Datasets, curriculum: Curriculum) -> None:
    """With all epochs shuffled as one, and with epochs of each file, the run may not be longer than they are."""
    wanted = -(-curriculum.steps(config.train.steps) * curriculum.unit // curriculum.seq_length)
    if isinstance(datasets.train, BlendedDataset):
        datasets.train.check_length(wanted)
    if config.data.order != "all_epochs" or config.data.epochs is None:
        return
    there = len(datasets.train) * config.data.epochs
    if wanted > there:
        raise ConfigError(
            f"train.steps × train.global_batch_size = {wanted:,} samples, but data.epochs = {config.data.epochs} "
            f"epochs of {len(datasets.train):,} samples are {there:,}. Set train.steps to "
            f"{there // config.train.global_batch_size} or less, or raise data.epochs before the run begins."
        )
