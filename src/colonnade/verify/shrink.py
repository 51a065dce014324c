"""A smaller model of the same structure: what is wrong with a layout of a large one is wrong with it too. Pure.

Depth and width shrink. Everything that is a choice (tied or not, positions, norms, dropout, activation) stays, and so
do vocabulary, sequence length, batch and data. Whatever cuts the large model evenly cuts the small one:

    layers    as many as the layouts' chunks need, 2 at least; all of them where a layout has explicit cuts; of both
              stacks, where there are two
    heads     a divisor of the heads, two for each tp rank where there are as many
    width     heads × at most 8 features
    MLP       as much wider than the residual stream as it was
"""

import math
from collections.abc import Sequence

from colonnade.config.load import build
from colonnade.config.model import ModelConfig
from colonnade.config.numbers import divisors
from colonnade.config.schema import Config, ParallelConfig

HEAD_DIM = 8
SHRUNK = ("num_layers", "num_decoder_layers", "hidden_size", "num_heads", "ffn_hidden_size")


def shrunk(base: Config, layouts: Sequence[ParallelConfig]) -> Config:
    """The configuration, serial, with a model that is small and still fits all the `layouts`, which fit `base`."""
    model = base.model
    cut = math.lcm(1, *(parallel.tp for parallel in layouts))
    heads = _fewest(model.num_heads, cut)
    hidden = heads * min(model.head_width, HEAD_DIM)
    named = 1 + max(base.distillation.student_layers, default=0)
    shape = {"num_layers": max(named, _layers(model.num_layers, layouts)), "hidden_size": hidden, "num_heads": heads}
    if model.num_decoder_layers is not None:
        shape["num_decoder_layers"] = _layers(model.num_decoder_layers, layouts)
    if model.ffn_hidden_size is not None:
        shape["ffn_hidden_size"] = _up(model.ffn_hidden_size * hidden // model.hidden_size, cut)
    content = base.model_dump(exclude_none=True, exclude={"model": {"preset"}, "parallel": True})
    content["model"] |= shape
    if base.distillation.student_layers and base.distillation.teacher_hidden_size is None:
        content["distillation"]["teacher_hidden_size"] = model.hidden_size
    return build(content, [], source="the shrunk configuration")


def sizes_changed(before: ModelConfig, after: ModelConfig) -> dict[str, list[int]]:
    """What has shrunk: {"num_layers": [24, 2], …}."""
    pairs = {key: [getattr(before, key), getattr(after, key)] for key in SHRUNK}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _layers(num_layers: int, layouts: Sequence[ParallelConfig]) -> int:
    """Blocks for every chunk, of which the embedding and the head fill two, and for groups to recompute."""
    if any(parallel.cuts is not None for parallel in layouts):
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
