"""A smaller model of the same structure: what is wrong with a layout of a large one is wrong with it too. Pure.

Depth and width shrink. Everything that is a choice (tied or not, positions, norms, dropout, activation) stays, and so
do vocabulary, sequence length, batch and data. Whatever cuts the large model evenly cuts the small one:

    layers    as many as the layouts' chunks need, 2 at least; all of them where a layout has explicit cuts, or where
              fewer have none of the weights that a pattern names; of both stacks, where there are two
    heads     a divisor of the heads, two for each tp rank where there are as many; those of keys and values likewise,
              each shared by several queries where it was
    width     heads × at most 8 features, or as many more as rotary positions need to turn pairs of their share; where
              head_dim says another width than the residual stream has, as much wider or narrower as it was
    MLP       as much wider than the residual stream as it was
"""

import math
from collections.abc import Mapping, Sequence

from colonnade.architecture.parts import trained_architecture
from colonnade.config.load import build
from colonnade.config.model import ModelConfig
from colonnade.config.numbers import divisors
from colonnade.config.schema import Config, ParallelConfig
from colonnade.errors import ConfigError

HEAD_DIM = 8
SHRUNK = (
    "num_layers",
    "num_decoder_layers",
    "hidden_size",
    "num_heads",
    "num_key_value_heads",
    "head_dim",
    "ffn_hidden_size",
)


def shrunk(base: Config, layouts: Sequence[ParallelConfig]) -> Config:
    """The configuration, serial, with a model that is small and still fits all the `layouts`, which fit `base`."""
    model = base.model
    cut = math.lcm(1, *(parallel.tp for parallel in layouts))
    shape = _heads(model, cut)
    shape |= _widths(model, shape["num_heads"], cut)
    named = 1 + max(base.distillation.student_layers, default=0)
    depth = {"num_layers": max(named, _layers(model.num_layers, layouts))}
    if model.num_decoder_layers is not None:
        depth["num_decoder_layers"] = _layers(model.num_decoder_layers, layouts)
    if model.ffn_hidden_size is not None:
        shape["ffn_hidden_size"] = _up(model.ffn_hidden_size * shape["hidden_size"] // model.hidden_size, cut)
    small = _built(base, shape | depth)
    if _why_not(small) is None:
        return small
    small = _built(base, shape | {key: getattr(model, key) for key in depth})  # patterns may name blocks by number
    if (why := _why_not(small)) is not None:
        raise ConfigError(f"of the smaller model of --shrink: {why}")
    return small


def _built(base: Config, shape: Mapping[str, int]) -> Config:
    content = base.model_dump(exclude_none=True, exclude={"model": {"preset"}, "parallel": True})
    content["model"] |= shape
    if base.distillation.student_layers and base.distillation.teacher_hidden_size is None:
        content["distillation"]["teacher_hidden_size"] = base.model.hidden_size
    return build(content, [], source="the shrunk configuration")


def _why_not(config: Config) -> ConfigError | None:
    """Why this model cannot be trained as [parts] and [lora] say."""
    try:
        trained_architecture(config, config.model.vocab_size or 1)
    except ConfigError as error:
        return error
    return None


def sizes_changed(before: ModelConfig, after: ModelConfig) -> dict[str, list[int]]:
    """What has shrunk: {"num_layers": [24, 2], …}."""
    pairs = {key: [getattr(before, key), getattr(after, key)] for key in SHRUNK}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _heads(model: ModelConfig, cut: int) -> dict[str, int]:
    """Of queries, and of keys and values where these are given. Where tp ranks have copies of these, all stay."""
    shared = model.key_value_heads
    if shared == model.num_heads:
        shared = heads = _fewest(shared, cut)
    else:
        shared = _fewest(shared, cut) if shared % cut == 0 else shared
        heads = _fewest(model.num_heads, math.lcm(shared, cut))
    return {"num_heads": heads} | ({} if model.num_key_value_heads is None else {"num_key_value_heads": shared})


def _head_width(model: ModelConfig) -> int:
    least = min(model.head_width, HEAD_DIM)
    if model.position != "rotary":
        return least
    turned = ((width, model.rotary.width_in(width)) for width in range(least, model.head_width))
    return next((width for width, features in turned if features and features % 2 == 0), model.head_width)


def _widths(model: ModelConfig, heads: int, cut: int) -> dict[str, int]:
    width = _head_width(model)
    if model.head_dim is None:
        return {"hidden_size": heads * width}
    hidden = heads * width * model.hidden_size // (model.num_heads * model.head_width)
    return {"hidden_size": min(model.hidden_size, _up(max(hidden, HEAD_DIM), cut)), "head_dim": width}


def _layers(num_layers: int, layouts: Sequence[ParallelConfig]) -> int:
    """Blocks for every chunk, of which the embedding and the head fill two, and for groups to recompute."""
    if any(parallel.cuts for parallel in layouts):
        return num_layers
    chunks = max((parallel.pp * parallel.virtual_stages for parallel in layouts), default=1)
    group = max((parallel.recompute_every for parallel in layouts), default=1)
    return min(num_layers, max(2, chunks - 2, 2 * (group > 1) * group))


def _fewest(num_heads: int, cut: int) -> int:
    """The smallest number of heads that divides `num_heads` and that `cut` divides, twice if it can be."""
    possible = [heads for heads in divisors(num_heads) if heads % cut == 0]
    return next((heads for heads in possible if heads >= 2 * cut), possible[-1])


def _up(number: int, multiple: int) -> int:
    return max(1, -(-number // multiple)) * multiple
