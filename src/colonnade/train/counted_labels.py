"""Whether samples of text have labels that count: asked before a run trains or evaluates on them."""

from itertools import starmap

from colonnade.config.numbers import counted
from colonnade.config.schema import Config
from colonnade.data.datasets import Dataset
from colonnade.data.gpt_dataset import GPTDataset
from colonnade.data.rows import Rows
from colonnade.errors import ConfigError
from colonnade.launch.agreement import on_all_ranks
from colonnade.mesh.mesh import Axis
from colonnade.train.corpus import Corpus

LOOKED_AT = 10_000
"""Training samples of a token file that are read before it is taken to have no label that counts."""


def check_labels(config: Config, corpus: Corpus, ranks: Axis) -> None:
    """ConfigError on all ranks where a run that begins would train on samples in which no label counts, or evaluate
    such; every rank calls this. Reads of each up to the first that has one.
    """
    parts = corpus.datasets.train.parts
    read = ((part, number) for number in range(LOOKED_AT) for part in parts if number < len(part))
    if not isinstance(parts[0], GPTDataset) or on_all_ranks(lambda: any(starmap(_counts, read)), ranks):
        return check_scored(config, corpus, ranks, step=0)
    first, there = sum(min(len(part), LOOKED_AT) for part in parts), sum(map(len, parts))
    raise ConfigError(
        f"no label counts in the first {first:,} of {counted(there, 'training sample')}: "
        "nothing would be learned. Raise model.seq_length, so that answers fit behind what they answer "
        "(data.loss_on), take tokens out of data.no_loss_on, or train on other text (data.train, data.blend)."
    )


def is_scored(config: Config, corpus: Corpus, ranks: Axis, *, step: int) -> bool:
    """Whether there is something to measure where the run, behind `step`, evaluates: of samples of text a label that
    counts. Every rank calls this. Reads up to the first that has one.
    """
    train, part = config.train, corpus.datasets.validation
    if part is None or not isinstance(part.parts[0], GPTDataset):
        return True
    if not ((train.evaluation_interval and step < train.steps) or (train.evaluate_at_start and step == 0)):
        return True
    read = range(min(len(part), train.evaluate_samples))
    return on_all_ranks(lambda: any(_counts(part, number) for number in read), ranks)


def check_scored(config: Config, corpus: Corpus, ranks: Axis, *, step: int) -> None:
    """ConfigError on all ranks unless `is_scored`; every rank calls this."""
    if is_scored(config, corpus, ranks, step=step):
        return
    assert corpus.datasets.validation is not None, "it is what is read"
    there, read = len(corpus.datasets.validation), config.train.evaluate_samples
    more = "Set train.evaluate_samples higher, or give" if read < there else "Give"
    raise ConfigError(
        f"no label counts in the first {min(there, read):,} of {counted(there, 'validation sample')}, which an "
        f"evaluation reads: there would be nothing to measure. {more} validation other text (data.validation, "
        "data.split), or leave evaluations out: train.evaluate_every = 0 and evaluate_at_start = false."
    )


def _counts(part: Dataset, number: int) -> bool:
    """Whether a sample of text has a label that counts."""
    rows = part.rows([number])
    assert isinstance(rows, Rows), "samples of text"
    return bool(rows.counted.any())
