"""Values that are fine alone and impossible together. Pure: a configuration in, problems out.

A check declares the keys that it reads. Where one of them already has a problem of its own (`load.py`), the check is
left out: its answer would only repeat or confuse.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from colonnade.config.check_beginning import BEGINNING_CHECKS, no_validation_part
from colonnade.config.check_data import DATA_CHECKS
from colonnade.config.check_distillation import DISTILLATION_CHECKS
from colonnade.config.check_divergence import DIVERGENCE_CHECKS
from colonnade.config.check_layout import LAYOUT_CHECKS
from colonnade.config.check_model import MODEL_CHECKS, possible_tp
from colonnade.config.check_uploads import UPLOAD_CHECKS
from colonnade.config.numbers import either, multiples_around, nearest_divisors, one_of
from colonnade.config.schema import Config
from colonnade.config.split import parse_split


class Problem(NamedTuple):
    """One thing that is wrong: what to tell the user, and the keys (`section.key`) whose values it makes uncertain."""

    message: str
    keys: tuple[str, ...]


class Check(NamedTuple):
    """A question to a configuration: the keys it reads, and a function that yields a message for each thing wrong."""

    keys: tuple[str, ...]
    messages: Callable[[Config], Iterator[str]]


def check(config: Config, uncertain: Collection[str] = ()) -> list[Problem]:
    """All checks that read none of the `uncertain` keys."""
    return _problems(CHECKS, config, uncertain)


def check_beginning(config: Config, uncertain: Collection[str] = ()) -> list[Problem]:
    """As `check`, of what a run may not begin with: one that has begun so may be read, and may go on."""
    return _problems(BEGINNING, config, uncertain)


def _problems(checks: Sequence[Check], config: Config, uncertain: Collection[str]) -> list[Problem]:
    settled = [each for each in checks if not set(each.keys) & set(uncertain)]
    return [Problem(message, each.keys) for each in settled for message in each.messages(config)]


def hidden_cut_in_heads(config: Config) -> Iterator[str]:
    hidden_size, num_heads = config.model.hidden_size, config.model.num_heads
    if config.model.head_dim is None and hidden_size % num_heads:
        below, above = multiples_around(hidden_size, num_heads)
        yield (
            f"model.num_heads = {num_heads} does not divide model.hidden_size = {hidden_size}: all heads have the same "
            f"width. Use a hidden_size of {either(below, above)}, or a num_heads of "
            f"{one_of(nearest_divisors(hidden_size, num_heads))}."
        )


def heads_cut_by_tp(config: Config) -> Iterator[str]:
    tp, num_heads = config.parallel.tp, config.model.num_heads
    if num_heads % tp:
        yield (
            f"parallel.tp = {tp} does not divide model.num_heads = {num_heads}: each tensor-parallel rank needs whole "
            f"heads. Use {one_of(possible_tp(config))}."
        )


def ffn_cut_by_tp(config: Config) -> Iterator[str]:
    tp, ffn = config.parallel.tp, config.model.ffn
    if ffn % tp:
        source = " (4 × hidden_size)" if config.model.ffn_hidden_size is None else ""
        yield (
            f"parallel.tp = {tp} does not divide model.ffn_hidden_size = {ffn}{source}: each tensor-parallel rank "
            f"needs the same number of the MLP's columns. Use {one_of(possible_tp(config))}."
        )


def batch_cut_by_ranks(config: Config) -> Iterator[str]:
    total, micro, dp = config.train.global_batch_size, config.train.micro_batch_size, config.parallel.dp
    if total % (micro * dp):
        below, above = multiples_around(total, micro * dp)
        yield (
            f"train.global_batch_size = {total} is not divisible by train.micro_batch_size × parallel.dp = {micro} × "
            f"{dp} = {micro * dp}: each data-parallel rank computes whole micro-batches. "
            f"{same_batch(config)}Use a global_batch_size of {either(below, above)} only in a new run: it changes what "
            "is computed."
        )


def same_batch(config: Config) -> str:
    """What else fits the global batch, so that the run stays the same; '' where nothing does."""
    total, micro, dp = config.train.global_batch_size, config.train.micro_batch_size, config.parallel.dp
    ways = []
    if total % dp == 0:
        ways.append(f"a micro_batch_size of {one_of(nearest_divisors(total // dp, micro))}")
    if total % micro == 0:
        ways.append(f"a dp of {one_of(nearest_divisors(total // micro, dp))}")
    return f"Use {', or '.join(ways)}, which keeps the batch. " if ways else ""


def floor_below_peak(config: Config) -> Iterator[str]:
    floor, peak = config.optim.min_learning_rate, config.optim.learning_rate
    if floor is not None and floor > peak:
        yield (
            f"optim.min_learning_rate = {floor} is above optim.learning_rate = {peak}: the decay goes down. "
            f"Use at most {peak}."
        )


def warmup_before_decay_end(config: Config) -> Iterator[str]:
    """A run that ends within its warm-up is the beginning of a longer one; a decay cannot end there."""
    warmup, end = config.optim.warmup_steps, config.optim.decay_steps
    if warmup is not None and end is not None and warmup > end:
        yield (
            f"optim.warmup_steps = {warmup} is more than optim.decay_steps = {end}, where the decay ends: the "
            f"learning rate would never get to its highest value. Use at most {end}."
        )


def learning_rate_in_steps_or_tokens(config: Config) -> Iterator[str]:
    optim = config.optim
    for steps, tokens in (
        ("warmup_steps", "warmup_tokens"),
        ("decay_start", "decay_start_tokens"),
        ("decay_steps", "decay_tokens"),
    ):
        if getattr(optim, steps) is not None and getattr(optim, tokens) is not None:
            yield (
                f"optim.{steps} = {getattr(optim, steps)} and optim.{tokens} = {getattr(optim, tokens)} say the same "
                "in two units. Leave one of them out."
            )


def epochs_where_read(config: Config) -> Iterator[str]:
    order, epochs = config.data.order, config.data.epochs
    if config.data.blend is not None:
        return
    if order == "all_epochs" and epochs is None:
        yield (
            'data.order = "all_epochs" shuffles the samples of all epochs as one, but data.epochs is not set. '
            'Set data.epochs, or use data.order = "epoch".'
        )
    if order == "epoch" and epochs is not None:
        yield (
            f'data.epochs = {epochs} has no effect with data.order = "epoch": there train.steps alone ends the run. '
            'Leave it out, or use data.order = "all_epochs".'
        )


def training_data_named(config: Config) -> Iterator[str]:
    if config.data.train is None and config.data.blend is None:
        yield (
            "data.train is not set: there is nothing to train on. "
            "Set it to the prefix that the .bin and .idx of a token file share, or set data.blend to several."
        )


def split_readable(config: Config) -> Iterator[str]:
    try:
        parse_split(config.data.split)
    except ValueError:
        yield (
            f'data.split = "{config.data.split}" is not a list of shares: two or three numbers with colons between, '
            'none negative and the first above 0, for train:validation:test. Use for instance "9:1".'
        )


def validation_part_exists(config: Config) -> Iterator[str]:
    every, missing = config.train.evaluate_every, no_validation_part(config)
    if every and missing:
        yield f"train.evaluate_every = {every} asks for evaluations, but {missing}evaluate_every = 0."


def something_is_measured(config: Config) -> Iterator[str]:
    if not config.thermometers.sites:
        yield (
            "thermometers.sites = [] leaves nothing to measure. Name some, or set thermometers.every = 0, which costs "
            "nothing."
        )


MASK_ELEMENTS = 1 << 32
"""Elements of a sample's dropout mask, two to a 32-bit word, whose number must fit in 31 bits."""


def masks_within_a_stream(config: Config) -> Iterator[str]:
    model = config.model
    h, longest = model.hidden_size, math.isqrt(MASK_ELEMENTS)
    s, key = max((model.seq_length, "seq_length"), (model.decoder_length, "decoder_seq_length"))
    if model.attention_dropout and s > longest:
        yield (
            f"model.attention_dropout = {model.attention_dropout:g} draws a mask of {key}² = {s:,}² elements for "
            f"each head: a stream of random numbers has 2^32, enough for {longest:,} positions. "
            f"Set attention_dropout = 0, or use a {key} of at most {longest:,}."
        )
    if model.dropout and s * h > MASK_ELEMENTS:
        yield (
            f"model.dropout = {model.dropout:g} draws a mask of {key} × hidden_size = {s:,} × {h:,} elements for "
            f"each sample: a stream of random numbers has 2^32. Set dropout = 0, or use a {key} of at most "
            f"{MASK_ELEMENTS // h:,}."
        )


CHECKS: tuple[Check, ...] = (
    Check(("model.hidden_size", "model.num_heads", "model.head_dim"), hidden_cut_in_heads),
    Check(("parallel.tp", "model.num_heads"), heads_cut_by_tp),
    Check(("parallel.tp", "model.hidden_size", "model.ffn_hidden_size"), ffn_cut_by_tp),
    Check(
        (
            *("model.kind", "model.seq_length", "model.decoder_seq_length", "model.hidden_size"),
            *("model.attention_dropout", "model.dropout"),
        ),
        masks_within_a_stream,
    ),
    Check(("train.global_batch_size", "train.micro_batch_size", "parallel.dp"), batch_cut_by_ranks),
    Check(("optim.learning_rate", "optim.min_learning_rate"), floor_below_peak),
    Check(("optim.warmup_steps", "optim.decay_steps"), warmup_before_decay_end),
    Check(
        (
            *("optim.warmup_steps", "optim.warmup_tokens", "optim.decay_start", "optim.decay_start_tokens"),
            *("optim.decay_steps", "optim.decay_tokens"),
        ),
        learning_rate_in_steps_or_tokens,
    ),
    Check(("data.order", "data.epochs", "data.blend"), epochs_where_read),
    Check(("data.train", "data.blend"), training_data_named),
    Check(("data.split",), split_readable),
    Check(("train.evaluate_every", "data.split", "data.validation"), validation_part_exists),
    Check(("thermometers.sites",), something_is_measured),
    *(Check(keys, messages) for keys, messages in MODEL_CHECKS),
    *(Check(keys, messages) for keys, messages in UPLOAD_CHECKS),
    *(Check(keys, messages) for keys, messages in DATA_CHECKS),
    *(Check(keys, messages) for keys, messages in LAYOUT_CHECKS),
    *(Check(keys, messages) for keys, messages in DIVERGENCE_CHECKS),
    *(Check(keys, messages) for keys, messages in DISTILLATION_CHECKS),
)
BEGINNING = tuple(Check(keys, messages) for keys, messages in BEGINNING_CHECKS)
