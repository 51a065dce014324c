"""What a run may not begin with: keys that have no effect, or another than is meant. Pure.

Apart from the other checks, as these are of what has been stored too: runs of earlier versions may have begun so.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from colonnade.config.check_model import NEEDS_LENGTH
from colonnade.config.model import RotaryConfig
from colonnade.config.numbers import one_of
from colonnade.config.parts import NOT, LoraConfig
from colonnade.config.presets import with_preset
from colonnade.config.saving import CheckpointConfig
from colonnade.config.schema import Config
from colonnade.config.split import parse_split
from colonnade.config.thermometers import ALL_SITES

Messages = Iterator[str]


def warmup_tokens_before_decay_end(config: Config) -> Messages:
    warmup, end = config.optim.warmup_tokens, config.optim.decay_tokens
    if warmup is not None and end is not None and warmup > end:
        yield (
            f"optim.warmup_tokens = {warmup} is more than optim.decay_tokens = {end}, where the decay ends: the "
            f"learning rate would never get to its highest value. Use at most {end}."
        )


def decay_starts_before_its_end(config: Config) -> Messages:
    """A start may lie far away, until it is time for it; but then its end must not be set yet."""
    optim = config.optim
    for unit, key, start, end in (
        ("steps", "decay_start", optim.decay_start, optim.decay_steps),
        ("tokens", "decay_start_tokens", optim.decay_start_tokens, optim.decay_tokens),
    ):
        if start is not None and end is not None and start >= end:
            yield (
                f"optim.{key} = {start} is not below optim.decay_{unit} = {end}, where the decay ends: the learning "
                "rate would fall to its floor in a single step. Use a smaller one, or leave the end out: it is "
                "train.steps then."
            )


def rewarmed_before_decay_end(config: Config) -> Messages:
    optim, end = config.optim, config.optim.decay_steps
    if optim.rewarm_at is None or end is None or optim.decay == "constant":
        return
    top = optim.rewarm_at + optim.rewarm_steps
    if top >= end:
        yield (
            f"optim.rewarm_at = {optim.rewarm_at} with rewarm_steps = {optim.rewarm_steps} ends the second rise at "
            f"step {top}, which is not below optim.decay_steps = {end}, where the decay ends: the learning rate would "
            "fall to its floor in a single step. Use a later decay_steps, or leave it out: it is train.steps then."
        )


def evaluations_are_made(config: Config) -> Messages:
    train, missing = config.train, no_validation_part(config)
    if missing:
        yield from asked_in_vain(config, missing)
    elif train.patience and train.evaluate_every == 0:
        yield (
            f"train.patience = {train.patience} counts evaluations, and train.evaluate_every = 0 leaves them out. Set "
            "evaluate_every, or patience = 0."
        )


def asked_in_vain(config: Config, missing: str) -> Messages:
    """Of keys that need evaluations, where there are none; `missing`: why, and what to do besides what follows."""
    train = config.train
    if train.evaluate_at_start:
        yield f"train.evaluate_at_start = true asks for an evaluation, but {missing}evaluate_at_start = false."
    if train.patience:
        yield f"train.patience = {train.patience} counts evaluations, but {missing}patience = 0."


def no_validation_part(config: Config) -> str:
    """Why there is none, and what to do besides what follows; empty where there is one, or the split is none."""
    data = config.data
    try:
        share = parse_split(data.split)[1]
    except ValueError:
        return ""
    if share or data.validation is not None:
        return ""
    return (
        f'data.validation is not set and data.split = "{data.split}" leaves no validation part. Set data.validation, '
        'use a split like "29:1:0", or '
    )


def adapters_have_a_rank(config: Config) -> Messages:
    """Where it is 0 on purpose, as at a point of a sweep, the rest of the section may stay."""
    if "rank" not in config.lora.model_fields_set and config.lora != LoraConfig():
        yield (
            "[lora] has no effect without lora.rank: all weights would be trained. Set lora.rank, or leave the section "
            "out."
        )


def something_is_frozen_before(config: Config) -> Messages:
    """Where lora.rank is set, to 0 too, adapters leave the other weights frozen, or do at another point of a sweep."""
    first = next(iter(config.parts.frozen), "")
    if first.startswith(NOT) and "rank" not in config.lora.model_fields_set:
        yield (
            f'parts.frozen has "{first}" first, which has no effect: {NOT} takes out again what patterns before it '
            "have frozen. Put those before it, or leave it out."
        )


def sites_are_measured(config: Config) -> Messages:
    """Where every is 0 on purpose, the choice may stay."""
    thermometers = config.thermometers
    if thermometers.sites != ALL_SITES and "every" not in thermometers.model_fields_set:
        yield (
            "thermometers.sites has no effect without thermometers.every: nothing is measured. Set thermometers.every, "
            "like 10, or leave sites out."
        )


def an_upload_is_waited_for(config: Config) -> Messages:
    """Files that runs write have the default."""
    kept = config.checkpoint
    if kept.upload_patience != CheckpointConfig().upload_patience and kept.upload_to is None:
        yield (
            f"checkpoint.upload_patience = {kept.upload_patience:g} has no effect: checkpoint.upload_to is not set. "
            "Set it, or leave upload_patience out."
        )


def a_teacher_is_asked_about_what_is_read(config: Config) -> Messages:
    top_k, divergence = config.distillation.top_k, config.divergence
    if top_k is not None and divergence.then == "roll_back" and divergence.skip_batches:
        yield (
            f"distillation.top_k = {top_k} asks the teacher before the run about the samples that it will read, and "
            'divergence.then = "roll_back" passes over some and reads others. Set divergence.skip_batches = false, or '
            "leave top_k out, so that the teacher runs beside the student."
        )


def whole_documents_stay_whole(config: Config) -> Messages:
    length = config.model.seq_length
    shorter = config.curriculum.other_than(length)
    if config.data.packing == "whole" and shorter is not None:
        yield (
            f"curriculum.seq_length has {shorter} before model.seq_length = {length}: samples are cut in pieces in "
            'that phase, and data.packing = "whole" cuts no document that fits into a sample. Set all of '
            f"curriculum.seq_length to {length}, so that batches alone grow, or use another packing."
        )


def rotary_scaling_reads_its_keys(config: Config) -> Messages:
    """A published shape may keep its other numbers under another scaling, and a factor may be 1 on purpose."""
    rotary = config.model.rotary
    if config.model.position != "rotary":
        return
    published = with_preset({"preset": config.model.preset}).get("rotary", {})
    for key, scalings in READ_BY.items():
        value, default = getattr(rotary, key), published.get(key, type(rotary).model_fields[key].default)
        others = one_of(f'"{each}"' for each in scalings)
        if rotary.scaling not in scalings and value != default:
            yield (
                f'model.rotary.{key} = {value:g} has no effect with model.rotary.scaling = "{rotary.scaling}". Leave '
                f"it out, or set scaling = {others}."
            )
    if rotary.scaling != "none" and "factor" not in rotary.model_fields_set:
        yield (
            f'model.rotary.scaling = "{rotary.scaling}" has no effect without model.rotary.factor: 1 scales nothing. '
            "Set factor to how many times longer the texts are, or leave scaling out."
        )


READ_BY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "original_length": NEEDS_LENGTH,
        "low_frequency_factor": ("llama3",),
        "high_frequency_factor": ("llama3",),
        "beta_fast": ("yarn",),
        "beta_slow": ("yarn",),
    }
)
"""Scalings of rotary positions that read a key."""
BEGINNING_CHECKS = (
    (("optim.warmup_tokens", "optim.decay_tokens"), warmup_tokens_before_decay_end),
    (
        ("optim.decay_start", "optim.decay_start_tokens", "optim.decay_steps", "optim.decay_tokens"),
        decay_starts_before_its_end,
    ),
    (
        ("optim.rewarm_at", "optim.rewarm_steps", "optim.decay_steps", "optim.decay"),
        rewarmed_before_decay_end,
    ),
    (
        (
            *("train.evaluate_every", "train.evaluate_at_start", "train.patience"),
            *("data.split", "data.validation"),
        ),
        evaluations_are_made,
    ),
    (tuple(f"lora.{key}" for key in LoraConfig.model_fields), adapters_have_a_rank),
    (("parts.frozen", "lora.rank"), something_is_frozen_before),
    (("thermometers.sites", "thermometers.every"), sites_are_measured),
    (
        ("model.preset", "model.position", *(f"model.rotary.{key}" for key in RotaryConfig.model_fields)),
        rotary_scaling_reads_its_keys,
    ),
    (("checkpoint.upload_to", "checkpoint.upload_patience"), an_upload_is_waited_for),
    (
        ("distillation.top_k", "divergence.then", "divergence.skip_batches"),
        a_teacher_is_asked_about_what_is_read,
    ),
    (("data.packing", "curriculum.seq_length", "model.seq_length"), whole_documents_stay_whole),
)
