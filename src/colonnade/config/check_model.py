"""Options of [model] that do not go together, and what to write instead. Pure."""

from collections.abc import Iterator, Mapping
from math import gcd
from types import MappingProxyType

from colonnade.config.check_head import HEAD_CHECKS, TEXT_KEYS
from colonnade.config.check_t5 import T5_CHECKS
from colonnade.config.model import RotaryConfig
from colonnade.config.nature import Of
from colonnade.config.numbers import divisors, one_of
from colonnade.config.schema import Config, CorruptionConfig, MaskingConfig

Messages = Iterator[str]
NEEDS_LENGTH = ("yarn", "llama3")


def key_value_heads_are_shared_evenly(config: Config) -> Messages:
    """Every head of keys and values serves as many queries."""
    n, m = config.model.num_heads, config.model.key_value_heads
    if n % m:
        yield (
            f"model.num_key_value_heads = {m} does not divide model.num_heads = {n}: each of them is shared by as many "
            f"heads of queries. Use {one_of(divisors(n))}."
        )


def key_value_heads_cut_by_tp(config: Config) -> Messages:
    """Ranks have whole heads of keys and values, or copies of one."""
    m, tp = config.model.key_value_heads, config.parallel.tp
    if m != config.model.num_heads and m % tp and tp % m:
        yield (
            f"parallel.tp = {tp} goes neither with nor into model.num_key_value_heads = {m}: each rank needs whole "
            f"heads of keys and values, or one of which others have copies. Use {one_of(possible_tp(config))}."
        )


def possible_tp(config: Config) -> list[int]:
    """Every tp that cuts the heads, those of keys and values, and the MLP evenly."""
    model, groups = config.model, config.model.key_value_heads
    return [tp for tp in divisors(gcd(model.num_heads, model.ffn)) if groups % tp == 0 or tp % groups == 0]


def head_dim_is_even(config: Config) -> Messages:
    """Rotary positions turn pairs of features."""
    model = config.model
    if model.position != "rotary":
        return
    if model.head_width == 1 or (model.rotary.share == 1.0 and model.head_width % 2):
        yield (
            f'model.position = "rotary" turns pairs of features, and heads are {model.head_width} wide. Use an even '
            "head_dim."
        )
    elif model.rotary.share < 1.0 and model.head_width and (model.rotary_width % 2 or model.rotary_width == 0):
        yield (
            f"model.rotary.share = {model.rotary.share:g} of heads that are {model.head_width} wide is "
            f"{model.rotary_width} features, and rotary positions turn pairs of them. Use a share that gives an even "
            f"number, like {max(2, model.rotary_width // 2 * 2) / model.head_width:g}."
        )


def rotary_where_read(config: Config) -> Messages:
    """[model.rotary] is for rotary positions, and its scaling has what it needs."""
    model = config.model
    rotary = model.rotary
    changed = [name for name, field in type(rotary).model_fields.items() if getattr(rotary, name) != field.default]
    if model.position != "rotary" and changed:
        yield (
            f'model.rotary.{changed[0]} has no effect with model.position = "{model.position}". Set position = '
            f'"rotary", or leave {"it" if len(changed) == 1 else "these keys"} out: {", ".join(changed)}.'
        )
        return
    if rotary.scaling == "none" and rotary.factor != 1.0:
        yield (
            f'model.rotary.factor = {rotary.factor:g} has no effect with model.rotary.scaling = "none". Set scaling '
            'to "linear", "yarn" or "llama3", or leave factor out.'
        )
    if rotary.scaling in NEEDS_LENGTH and rotary.original_length is None:
        yield (
            f'model.rotary.scaling = "{rotary.scaling}" needs model.rotary.original_length: the number of positions '
            "that the unscaled model was trained on, 8192 for LLaMA 3."
        )
    if rotary.scaling == "llama3" and rotary.low_frequency_factor >= rotary.high_frequency_factor:
        yield (
            f"model.rotary.low_frequency_factor = {rotary.low_frequency_factor:g} is not below high_frequency_factor = "
            f"{rotary.high_frequency_factor:g}: angles between them are blended. LLaMA 3 has 1 and 4."
        )
    if rotary.scaling == "yarn" and rotary.base <= 1.0:
        yield (
            f'model.rotary.base = {rotary.base:g} does not go with model.rotary.scaling = "yarn", whose ramp needs '
            "angles that fall from plane to plane: with a base above 1 they do. Models have 10000 and more."
        )
    if rotary.scaling == "yarn" and rotary.beta_fast < rotary.beta_slow:
        yield (
            f"model.rotary.beta_fast = {rotary.beta_fast:g} is below beta_slow = {rotary.beta_slow:g}: angles between "
            "them are blended. YaRN has 32 and 1."
        )


def parallel_residual_is_pre_norm(config: Config) -> Messages:
    """With the norm behind the addition, there is one addition too few."""
    if config.model.parallel_residual and config.model.norm_position == "post":
        yield (
            'model.parallel_residual = true does not go with model.norm_position = "post": attention and MLP add to '
            'the stream at once, and a norm stands behind each addition there. Use norm_position = "pre".'
        )


def window_where_it_means_something(config: Config) -> Messages:
    """Distance has a direction only where attention is causal."""
    model = config.model
    if model.is_causal or model.kind == "t5":  # which has neither
        return
    if model.window is not None:
        yield (
            f'model.window = {model.window} does not go with model.kind = "{model.kind}": a token sees all others, '
            "before and after it. Leave window out."
        )
    if model.position == "alibi":
        yield (
            f'model.position = "alibi" does not go with model.kind = "{model.kind}": it lowers scores by the '
            'distance to what is before. Use position = "learned" or "rotary".'
        )


def keys_of_other_kinds(config: Config) -> Messages:
    """A key that a kind of model has none of is not set."""
    model = config.model
    for name, field in type(model).model_fields.items():
        kinds = [kind for mark in field.metadata if isinstance(mark, Of) for kind in mark.families]
        if kinds and model.kind not in kinds and getattr(model, name) != field.default:
            yield (
                f'model.{name} = {getattr(model, name)} has no effect with model.kind = "{model.kind}": it is for '
                f"{' and '.join(kinds)}. Leave it out."
            )


def samples_of_this_kind(config: Config) -> Messages:
    """[data] says nothing about samples that the kind of model does not read."""
    data, kind = config.data, config.model.kind
    if kind in SAMPLES:
        what, section = SAMPLES[kind]
        for key in TEXT_KEYS:
            if getattr(data, key) != type(data).model_fields[key].default:
                yield (
                    f'data.{key} = {getattr(data, key)!r} has no effect with model.kind = "{kind}", whose samples are '
                    f"{what}. Leave it out; [data.{section}] says how they are made."
                )
    for other, (_, section) in SAMPLES.items():
        if kind != other and getattr(data, section) != type(data).model_fields[section].default:
            reads = f", whose samples are {SAMPLES[kind][0]}" if kind in SAMPLES else ", which reads text as it is"
            yield (
                f'[data.{section}] has no effect with model.kind = "{kind}"{reads}. Leave it out, or set '
                f'model.kind = "{other}".'
            )


SAMPLES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {"bert": ("two texts of one document", "masking"), "t5": ("texts with spans cut out", "corruption")}
)
"""What samples are that are not text as it stands, and the section of [data] about them, by kind of model."""
MODEL_CHECKS = (
    (
        (
            "model.kind",
            "model.head",
            "model.num_labels",
            "model.token_types",
            "model.num_decoder_layers",
            "model.decoder_seq_length",
            "model.relative_buckets",
            "model.relative_distance",
        ),
        keys_of_other_kinds,
    ),
    (
        (
            "model.kind",
            *(f"data.{key}" for key in TEXT_KEYS),
            *(f"data.masking.{key}" for key in MaskingConfig.model_fields),
            *(f"data.corruption.{key}" for key in CorruptionConfig.model_fields),
        ),
        samples_of_this_kind,
    ),
    (("model.num_heads", "model.num_key_value_heads"), key_value_heads_are_shared_evenly),
    (("model.num_heads", "model.num_key_value_heads", "parallel.tp"), key_value_heads_cut_by_tp),
    (
        ("model.position", "model.rotary.share", "model.head_dim", "model.hidden_size", "model.num_heads"),
        head_dim_is_even,
    ),
    (("model.parallel_residual", "model.norm_position"), parallel_residual_is_pre_norm),
    (("model.position", *(f"model.rotary.{key}" for key in RotaryConfig.model_fields)), rotary_where_read),
    (("model.kind", "model.window", "model.position"), window_where_it_means_something),
    *T5_CHECKS,
    *HEAD_CHECKS,
)
