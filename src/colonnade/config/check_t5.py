"""What model.kind = "t5" is made of, and what goes with nothing else. Pure."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from colonnade.config.schema import Config, CorruptionConfig

Messages = Iterator[str]
HAS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "position": ("relative",),
        "norm": ("rmsnorm",),
        "norm_position": ("pre",),
        "bias": (False,),
        "activation": ("relu", "geglu_tanh"),
        "embedding_norm": (False,),
        "query_key_norm": (False,),
        "window": (None,),
    }
)
"""The values that T5 knows of some keys of [model]."""


def options_of_t5(config: Config) -> Messages:
    """All options that T5 has not, at once."""
    model = config.model
    if model.kind != "t5":
        return
    other = {key: getattr(model, key) for key, known in HAS.items() if getattr(model, key) not in known}
    if model.key_value_heads != model.num_heads:
        other["num_key_value_heads"] = model.num_key_value_heads
    if other:
        given = ", ".join(f"model.{key} = {_shown(value)}" for key, value in other.items())
        remedies = [
            f"{key} = {' or '.join(map(_shown, HAS[key]))}" for key in other if key in HAS and HAS[key] != (None,)
        ]
        also = f", or write {', '.join(remedies)}" if remedies else ""
        yield (f'{given}: model.kind = "t5" has no such option. Leave {"it" if len(other) == 1 else "them"} out{also}.')


def relative_positions_of_t5(config: Config) -> Messages:
    """Only T5 has the table of ranges, and the table has a range for every distance."""
    model = config.model
    if model.kind != "t5":
        if model.position == "relative":
            yield (
                f'model.position = "relative" does not go with model.kind = "{model.kind}": it is for t5. Use '
                '"learned" or "rotary".'
            )
        return
    buckets, furthest = model.relative_buckets, model.relative_distance
    if buckets % 2:
        yield (
            f"model.relative_buckets = {buckets} is odd: the encoder has half of them for what is before a token and "
            f"half for what is behind it. Use {buckets - 1} or {buckets + 1}."
        )
    if furthest <= buckets // 2:
        yield (
            f"model.relative_distance = {furthest} is not beyond {buckets // 2}, up to which each of "
            f"model.relative_buckets = {buckets} is one distance: wider ranges follow. Use {buckets // 2 + 1} or more."
        )


def samples_of_t5(config: Config) -> Messages:
    """Some text is left to read, and some to write."""
    model, lengths = config.model, config.data.corruption.lengths
    if model.kind != "t5":
        return
    if model.seq_length < 3:
        yield f"model.seq_length = {model.seq_length} is too short for T5 samples. Set it to 3 or more."
        return
    if model.decoder_length < 3:
        yield f"model.decoder_seq_length = {model.decoder_length} is too short for T5 samples. Set it to 3 or more."
    wanted = lengths.widths(max(2, lengths.text(model.seq_length)))[1]
    if model.decoder_seq_length is None and wanted != model.decoder_length:
        yield (
            f"[data.corruption] makes decoder sequences of {wanted} tokens beside model.seq_length = "
            f"{model.seq_length}, and model.decoder_seq_length, unset, is {model.decoder_length}. Set "
            f"model.decoder_seq_length = {wanted}."
        )


def _shown(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


T5_CHECKS = (
    (("model.kind", *(f"model.{key}" for key in HAS), "model.num_key_value_heads", "model.num_heads"), options_of_t5),
    (("model.kind", "model.position", "model.relative_buckets", "model.relative_distance"), relative_positions_of_t5),
    (
        (
            "model.kind",
            "model.seq_length",
            "model.decoder_seq_length",
            *(f"data.corruption.{key}" for key in CorruptionConfig.model_fields),
        ),
        samples_of_t5,
    ),
)
