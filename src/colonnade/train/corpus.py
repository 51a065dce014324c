"""What a run reads: its tokenizer, its vocabulary, and the datasets of its splits.

Opening it takes no torch, so that what is wrong is reported before any rank starts (`start.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from colonnade.config.check_beginning import asked_in_vain
from colonnade.config.schema import Config
from colonnade.config.split import parse_split
from colonnade.data.blended_dataset import BlendedDataset, Mixture, open_blend
from colonnade.data.chat_template import ChatTemplate, template_beside
from colonnade.data.curriculum import Curriculum
from colonnade.data.datasets import (
    Dataset,
    Datasets,
    SampleKind,
    SplitDataset,
    TrainingDataset,
    open_datasets,
    open_tokens,
)
from colonnade.data.example_dataset import fields_of
from colonnade.data.identity import DataIdentity, identify
from colonnade.data.indexed import TokenFile
from colonnade.data.kinds import samples_of
from colonnade.data.label_names import Comparison, compare_labels
from colonnade.data.remote import open_token_file
from colonnade.data.sidecar import read_sidecar
from colonnade.data.span_dataset import windows_of
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ColonnadeError, ConfigError, DataError
from colonnade.train.questions import ScoredQuestions, open_questions
from colonnade.train.score_names import data_set_names

if TYPE_CHECKING:
    from colonnade.mesh.mesh import Axis
    from colonnade.tasks.task import Microbatch
    from colonnade.train.rollback import Rollback

Earlier = Sequence[tuple[int, Mapping[str, float]]]


@dataclass(frozen=True)
class Corpus:
    """Tokenizer (where the run has one), vocabulary and datasets."""

    tokenizer: Tokenizer | None
    vocab_size: int
    kind: tuple[str, str]
    """Of the model, `model.kind` and `model.head`: it has batches of its own."""
    datasets: Datasets
    """Of samples of model.seq_length."""
    training: TrainingDataset
    """What the run trains on, by the positions of the curriculum."""
    curriculum: Curriculum
    """Which positions are a step; a single stage where nothing grows."""
    tokenizer_chat: ChatTemplate | None = None
    """The chat template beside data.tokenizer."""
    questions: ScoredQuestions | None = None
    """That are answered at each evaluation."""
    end_of_document: int | None = None
    """The token behind each document, as the first token file has it that says one."""

    @property
    def files(self) -> dict[str, TokenFile]:
        """Every token file that the run opens, by the key that names it (of a blend with a number), in their order."""
        train, *own = (_files_of(part) for part in (self.datasets.train, self.datasets.validation, self.datasets.test))
        named = {"data.train": train[0]}
        if isinstance(self.datasets.train, BlendedDataset):
            named = {f"data.blend, file {number}": file for number, file in enumerate(train, 1)}
        prefixes = {file.prefix for file in train}
        for key, files in zip(("data.validation", "data.test"), own, strict=True):
            for file in files:
                if file.prefix not in prefixes:  # one file of its own, or parts of those that are trained on
                    named[key] = file
        return named

    @property
    def set_names(self) -> dict[str, str]:
        """What scores call each file of a blend of several, by its prefix, whichever parts have samples of it."""
        files = [file.prefix for file in _files_of(self.datasets.train)]
        return dict(zip(files, data_set_names(files), strict=True)) if len(files) > 1 else {}

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
    def chat(self) -> ChatTemplate | None:
        """What its conversations were written down with; where there are none, the template beside the tokenizer."""
        for file in self.files.values():
            sidecar = read_sidecar(file)
            if sidecar is not None and sidecar.examples is not None and "chat" in sidecar.examples.options:
                return ChatTemplate.from_json(sidecar.examples.options["chat"])
        return self.tokenizer_chat

    @cached_property
    def labels(self) -> list[str]:
        """Names of what a classifier tells apart, where the token files say them."""
        if self.kind[1] != "classification":
            return []
        return list(fields_of(next(iter(self.files.values()))).labels)

    @cached_property
    def other_labels(self) -> list[str]:
        """What to say of token files whose labels have other names than those of the first."""
        found = (f"{both}: their numbers are taken to mean the same" for how, both in self.compared() if how == "other")
        return list(dict.fromkeys(found))

    def compared(self) -> Iterator[tuple[Comparison, str]]:
        """How the labels of each further token file compare with those of the first, and both in words."""
        first, *others = self.files.values()
        for file in others if self.labels else ():
            labels = fields_of(file).labels
            both = f"{file.prefix} has the labels {', '.join(labels)}, and {first.prefix} {', '.join(self.labels)}"
            yield compare_labels(self.labels, labels), both

    @property
    def properties(self) -> dict[str, str]:
        """What ranks must have alike, in words."""
        tokenizer = self.tokenizer
        known = "none" if tokenizer is None else f"{tokenizer.vocab_size:,} ids, sha256 {tokenizer.sha256[:12]}"
        files = {key: str(identity) for key, identity in self.identities.items()}
        asked = {} if self.questions is None else {"data.questions": f"sha256 {self.questions.content[:12]}"}
        return {"data.tokenizer": known, "vocabulary": f"{self.vocab_size:,}", **files, **asked}

    def batches(self, position: int, *, micro_batch_size: int, dp: Axis) -> list[Microbatch]:
        """A dp rank's micro-batches of the step that begins at `position`."""
        chunks = self.curriculum.rank_positions(
            position, micro_batch_size=micro_batch_size, dp_rank=dp.rank, dp_size=dp.size
        )
        return [self.load(self.training, chunk) for chunk in chunks]

    def load(self, dataset: Dataset, positions: Sequence[int]) -> Microbatch:
        """The samples at positions [b] of a dataset."""
        from colonnade.tasks.tasks import TASKS

        batch: Microbatch = TASKS[self.kind].batch(dataset.rows(positions), positions)
        return batch

    @property
    def byte_lengths(self) -> NDArray[np.int64] | None:
        """Bytes of text that each token stands for, where the tokenizer tells."""
        if self.tokenizer is None or not self.tokenizer.is_byte_level:
            return None
        return self.tokenizer.byte_lengths()


def open_corpus(config: Config, earlier: Earlier = (), *, lasts: bool = True) -> Corpus:
    """Open everything that [data] names and hold it against [model]; reads no more than headers. `earlier`: what
    data.blend was before it was changed, see `Mixture`. `lasts`: refuse data that end before the run, from its first
    step on; else they are checked from where the run is, with its changes (`change.Expected`).
    """
    data = config.data
    tokenizer = Tokenizer.load(data.tokenizer) if data.tokenizer is not None else None
    vocab_size = vocab_size_of(config, tokenizer)
    foreign = [token for token in data.no_loss_on if token >= vocab_size]
    if foreign:
        raise ConfigError(f"data.no_loss_on has token {foreign[0]}, and there are {vocab_size:,} of them, from 0 on.")
    samples, curriculum = samples_of(config, tokenizer), curriculum_of(config)

    @cache
    def of_length(seq_length: int) -> Datasets:
        opening = _open if data.blend is None else partial(_open_blend, earlier=earlier)
        return opening(config, vocab_size, tokenizer, samples, seq_length)

    datasets = of_length(config.model.seq_length)
    training = samples.training(lambda seq_length: of_length(seq_length).train, curriculum)
    if lasts:
        check_length(config, training, curriculum)
    beside = template_beside(data.tokenizer) if data.tokenizer is not None else None
    is_asked = data.questions is not None
    questions = open_questions(config, tokenizer, windows_of(_files_of(datasets.train)[0])) if is_asked else None
    kind = config.model.kind_and_head
    corpus = Corpus(tokenizer, vocab_size, kind, datasets, training, curriculum, beside, questions)
    _check_labels(corpus)
    return replace(corpus, end_of_document=_end_of_document(corpus))


def _end_of_document(corpus: Corpus) -> int | None:
    sidecars = map(read_sidecar, corpus.files.values())
    said = (sidecar.end_of_document for sidecar in sidecars if sidecar is not None)
    return next((end for end in said if end is not None), None)


def _check_labels(corpus: Corpus) -> None:
    """DataError for a token file that numbers the labels of the first in another order."""
    for how, both in corpus.compared():
        if how == "reordered":
            raise DataError(
                f"{both}: a label's number has to mean the same in all files of a run. Name files of one task."
            )


def open_together(config: Config, ranks: Axis, earlier: Earlier = ()) -> Corpus:
    """As `open_corpus`, on all ranks: ConfigError on all of them where one cannot, or where they read other data.
    Data may end before the run.
    """
    from colonnade.launch.agreement import agree_on_data, on_all_ranks

    corpus = on_all_ranks(lambda: _opened(config, earlier), ranks)
    agree_on_data(corpus.properties, ranks)
    return corpus


def _opened(config: Config, earlier: Earlier) -> Corpus:
    corpus = open_corpus(config, earlier, lasts=False)
    assert corpus.identities, "a run reads files"  # read here, where a failure is everyone's
    return corpus


def _files_of(dataset: SplitDataset | None) -> list[TokenFile]:
    return [] if dataset is None else [part.file for part in dataset.parts]


def tokens_of(config: Config, steps: int | None = None, rollbacks: Sequence[Rollback] = ()) -> int:
    """Tokens that so many steps use up, or the whole run; batches that its rollbacks pass over do not count."""
    curriculum, steps = curriculum_of(config), config.train.steps if steps is None else steps
    position, passed = position_at(curriculum, steps, rollbacks)
    return (position - passed) * curriculum.unit * config.model.sequences


def position_at(
    curriculum: Curriculum, steps: int, rollbacks: Sequence[Rollback], *, step: int = 0, position: int = 0
) -> tuple[int, int]:
    """Where in the data a run is that has done `steps` steps, returns behind the last of them included, and how much of
    it they have passed over. It goes on from `position`, behind `step`; `rollbacks`: those from there on.
    """
    passed = 0
    for each in rollbacks:
        if each.to <= steps:
            end = curriculum.steps(each.to - step, position)
            step, position = each.to, each.behind(end, curriculum)
            passed += position - end
    return curriculum.steps(steps - step, position), passed


def step_by(config: Config, tokens: int, rollbacks: Sequence[Rollback] = ()) -> int:
    """The first step by which so many tokens are used up, as `tokens_of` counts them."""
    counted, most = partial(tokens_of, config, rollbacks=rollbacks), 1
    while counted(most) < tokens:
        most *= 2
    return bisect_left(range(most + 1), tokens, key=counted)


def curriculum_of(config: Config) -> Curriculum:
    """The phases of [curriculum], or one for the whole run."""
    stages = config.curriculum
    if not stages.tokens:
        return Curriculum.constant(config.model.seq_length, config.train.global_batch_size)
    return Curriculum(stages.tokens, stages.seq_length, stages.global_batch_size)


def _open(
    config: Config, vocab_size: int, tokenizer: Tokenizer | None, samples: SampleKind, seq_length: int
) -> Datasets:
    data = config.data
    assert data.train is not None, "load() refuses a configuration with neither data.train nor data.blend"
    return open_datasets(
        samples=samples,
        train=data.train,
        validation=data.validation,
        test=data.test,
        split=parse_split(data.split),
        needed=frozenset({"train", "validation"} if config.train.evaluate_every else {"train"}),
        seq_length=seq_length,
        vocab_size=vocab_size,
        seed=config.train.seed,
        order=data.order,
        epochs=data.epochs,
        tokenizer=tokenizer,
        cache=data.cache,
    )


def _open_blend(
    config: Config,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    samples: SampleKind,
    seq_length: int,
    *,
    earlier: Earlier = (),
) -> Datasets:
    """The parts of all files of data.blend; a validation or test file of its own stands in place of their parts."""
    data = config.data
    assert data.blend is not None, "called for a blend"
    times = config.model.seq_length // seq_length  # as many samples in the same text
    before = tuple((count * times, numbers) for count, numbers in earlier)
    blended = open_blend(
        Mixture(data.blend, data.blend_by, data.temperature, before, data.revision),
        samples=samples,
        split=data.shares,
        seq_length=seq_length,
        vocab_size=vocab_size,
        seed=config.train.seed,
        order=data.order,
        tokenizer=tokenizer,
        cache=data.cache,
    )
    own: dict[str, SplitDataset] = {}
    for name, prefix in (("validation", data.validation), ("test", data.test)):
        if prefix is not None:
            file = open_tokens(prefix, vocab_size=vocab_size, tokenizer=tokenizer, cache=data.cache)
            own[name] = samples.dataset(file, range(file.num_documents), seq_length, vocab_size=vocab_size)
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


def check_evaluations(config: Config, datasets: Datasets) -> None:
    """A run does not begin with keys of evaluations for which its files, and not data.split alone, leave no sample."""
    if datasets.validation is not None:
        return
    missing = (
        f'data.split = "{config.data.split}" leaves no document, or too little text, for a validation sample. Set '
        "data.validation, give validation a larger share of data.split, or "
    )
    for message in asked_in_vain(config, missing):
        raise ConfigError(message)


def lasts_for(corpus: Corpus, config: Config, steps: int) -> bool:
    """Whether a run may take so many steps from the beginning of its data."""
    asked = config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})
    try:
        check_length(asked, corpus.training, corpus.curriculum)
    except ColonnadeError:
        return False
    return True


def check_length(
    config: Config, training: TrainingDataset, curriculum: Curriculum, *, step: int = 0, position: int = 0
) -> None:
    """With all epochs shuffled as one, and with epochs of each file, the run may not be longer than they are; it is at
    `step`, and at `position` in the data.
    """
    epochs = config.data.epochs if config.data.order == "all_epochs" else None

    def missing(steps: int) -> tuple[Dataset, int] | None:
        """A dataset that so many steps more use up, and the samples of it that they would read."""
        used = training.used(curriculum.steps(steps, position), curriculum)
        return next((each for each in used if epochs is not None and each[1] > len(each[0]) * epochs), None)

    steps = max(0, config.train.steps - step)
    for dataset, wanted in training.used(curriculum.steps(steps, position), curriculum):
        if isinstance(dataset, BlendedDataset):
            dataset.check_length(wanted)
    short = missing(steps)
    if epochs is None or short is None:
        return
    (dataset, wanted), a_sample = short, short[0].seq_length // curriculum.unit
    last = step + bisect_left(range(1, steps + 1), True, key=lambda count: missing(count) is not None)
    of_length = f" of {dataset.seq_length:,} tokens" if len(curriculum.lengths) > 1 else ""
    at = f", behind step {step:,} from sample {position // a_sample + 1:,} on," if step else ""
    shorter = f"Set train.steps to {last} or less" if last else "Lower train.global_batch_size: one step takes more"
    raise ConfigError(
        f"Up to train.steps = {config.train.steps:,}{at} the run takes {wanted:,} samples{of_length}, but data.epochs "
        f"= {epochs} epochs of {len(dataset):,} samples are {len(dataset) * epochs:,}. {shorter}, or "
        "raise data.epochs before the run begins."
    )
