"""A smaller model fits whatever the large one fits, and is as it was but for depth and width."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config.check import check
from colonnade.config.schema import Config, ParallelConfig
from colonnade.errors import ConfigError
from colonnade.verify.layouts import Capacity, default_set, under
from colonnade.verify.shrink import SHRUNK, shrunk, sizes_changed
from tests.verify.test_layouts import config

LARGE = {
    "num_layers": 24,
    "hidden_size": 1024,
    "num_heads": 16,
    "vocab_size": 50257,
    "tie_embeddings": False,
    "position": "alibi",
    "norm_position": "post",
    "dropout": 0.2,
    "embedding_norm": True,
}


def large(**more: Any) -> Config:
    return config(model=LARGE | more)


def test_depth_and_width_shrink_and_nothing_else() -> None:
    base = large(preset="gpt2-355m", ffn_hidden_size=3000)
    small = shrunk(base, [ParallelConfig(tp=2)])
    assert sizes_changed(base.model, small.model) == {
        "num_layers": [24, 2],
        "hidden_size": [1024, 32],
        "num_heads": [16, 4],
        "ffn_hidden_size": [3000, 94],
    }
    kept = set(type(base.model).model_fields) - {*SHRUNK, "preset"}
    assert all(getattr(small.model, key) == getattr(base.model, key) for key in kept)
    assert (small.train, small.data, small.optim) == (base.train, base.data, base.optim)


def test_layouts_keep_what_they_need() -> None:
    assert shrunk(large(), [ParallelConfig(tp=8)]).model.num_heads == 16, "two heads a rank"
    assert shrunk(large(), [ParallelConfig(tp=16)]).model.num_heads == 16, "as many as there are"
    both = [ParallelConfig(tp=2), ParallelConfig(tp=3)]
    assert shrunk(large(num_heads=24, hidden_size=960), both).model.num_heads == 12, "whole heads for either"
    assert shrunk(large(), [ParallelConfig(pp=8)]).model.num_layers == 6, "8 chunks: 6 blocks, embedding, head"
    interleaved = ParallelConfig(pp=4, schedule="interleaved", virtual_stages=3)
    assert shrunk(large(), [interleaved]).model.num_layers == 10
    assert shrunk(large(), [ParallelConfig(recompute="full", recompute_every=3)]).model.num_layers == 6
    assert shrunk(large(), [ParallelConfig(pp=2, cuts=(20, 6))]).model.num_layers == 24, "explicit cuts name all units"


@pytest.mark.parametrize(
    ("shape", "tp", "expected"),
    [
        ((32, 8), 2, (8, 4)),
        ((32, 8), 1, (4, 2)),
        ((16, 1), 1, (2, 1)),
        ((16, 2), 8, (16, 2)),  # ranks have copies
        ((14, 2), 2, (14, 2)),
        ((16, 16), 2, (4, 4)),
    ],
)
def test_heads_of_keys_and_values_shrink_along_and_stay_shared(
    shape: tuple[int, int], tp: int, expected: tuple[int, int]
) -> None:
    base = large(num_heads=shape[0], num_key_value_heads=shape[1], hidden_size=16 * shape[0])
    small = shrunk(base, [ParallelConfig(tp=tp), ParallelConfig()])
    assert (small.model.num_heads, small.model.num_key_value_heads) == expected
    assert check(small.model_copy(update={"parallel": ParallelConfig(tp=tp)})) == []


def test_heads_of_their_own_width_shrink_and_keep_their_share_of_the_stream() -> None:
    """Of Qwen 3's 0.6 billion: 16 heads of 128 features beside a stream of 1,024."""
    small = shrunk(large(head_dim=128), [ParallelConfig(tp=2)]).model
    assert (small.num_heads, small.head_dim, small.hidden_size) == (4, 8, 16)
    wide = shrunk(large(head_dim=128, num_heads=128), [ParallelConfig(tp=2)]).model
    assert (wide.num_heads, wide.head_dim, wide.hidden_size) == (4, 8, 8), "T5's of 11 billion: no narrower than a head"
    narrow = shrunk(config(model={"hidden_size": 4, "head_dim": 8}), [ParallelConfig()]).model
    assert (narrow.head_dim, narrow.hidden_size) == (8, 4), "and no wider than it was"


def test_a_stream_of_its_own_width_is_one_that_tp_cuts_evenly() -> None:
    """As the MLP is, which is so many times as wide."""
    base, layout = large(head_dim=128, num_heads=12, hidden_size=96), ParallelConfig(tp=3)
    small = shrunk(base, [layout])
    assert (small.model.num_heads, small.model.head_dim, small.model.hidden_size) == (6, 8, 9)
    assert check(small.model_copy(update={"parallel": layout})) == []


@pytest.mark.parametrize(("width", "share", "expected"), [(40, 0.4, 10), (64, 0.25, 8), (80, 0.05, 40), (6, 1.0, 6)])
def test_of_smaller_heads_rotary_positions_turn_pairs_too(width: int, share: float, expected: int) -> None:
    shape = {"num_heads": 4, "hidden_size": 4 * width, "position": "rotary", "rotary": {"share": share}}
    assert shrunk(config(model=shape), [ParallelConfig(tp=2)]).model.head_width == expected


@pytest.mark.parametrize(
    "more",
    [
        {"parts": {"frozen": ["blocks.5.*"]}},
        {"parts": {"frozen": ["embedding.*", "blocks.[01].*", "head.*"]}},
        {"parts": {"learning_rate": {"blocks.5.mlp.*": 0.1}}},
        {"lora": {"rank": 4, "targets": ["blocks.4.*"]}},
    ],
    ids=["frozen", "all of two", "factors", "adapters"],
)
def test_a_block_that_a_pattern_names_stays(more: dict[str, Any]) -> None:
    model = {"num_layers": 6, "num_heads": 4, "hidden_size": 64}
    assert shrunk(config(model=model, **more), [ParallelConfig()]).model.num_layers == 6
    assert shrunk(config(model=model, parts={"frozen": ["blocks.1.*"]}), [ParallelConfig()]).model.num_layers == 2


def test_what_the_smaller_model_has_no_room_for_is_told() -> None:
    with pytest.raises(ConfigError, match=r"of the smaller model of --shrink: lora\.rank = 40 is larger than blocks"):
        shrunk(config(model={"num_heads": 4, "hidden_size": 64}, lora={"rank": 40}), [ParallelConfig()])


@pytest.mark.parametrize(("layers", "expected"), [(12, 2), (1, 1)])
def test_both_stacks_of_a_t5_shrink(layers: int, expected: int) -> None:
    shape = {"num_layers": 24, "num_decoder_layers": layers, "hidden_size": 64, "num_heads": 8}
    kind = {"kind": "t5", "position": "relative", "norm": "rmsnorm", "bias": False, "activation": "relu"}
    base = config(model={**kind, **shape})
    small = shrunk(base, [ParallelConfig(tp=2)])
    assert (small.model.num_layers, small.model.num_decoder_layers) == (2, expected)
    told = {"num_layers": [24, 2], "hidden_size": [64, 32], "num_heads": [8, 4]}
    told |= {"num_decoder_layers": [layers, expected]} if layers != expected else {}
    assert sizes_changed(base.model, small.model) == told


def test_a_small_model_stays() -> None:
    small = config(model={"hidden_size": 8})
    assert shrunk(small, [ParallelConfig(tp=2), ParallelConfig(pp=2)]) == small
    assert sizes_changed(small.model, small.model) == {}


def test_the_files_own_layout_is_no_hindrance() -> None:
    own = config(model=LARGE, parallel={"tp": 16}, train={"global_batch_size": 8})
    assert shrunk(own, [ParallelConfig(tp=2)]).model.num_heads == 4


@pytest.mark.slow
@given(
    st.integers(1, 80),
    st.integers(1, 24),
    st.integers(1, 80),
    st.integers(1, 3),
    st.sampled_from([None, 96, 100, 2160]),
    st.integers(1, 8),
)
def test_every_layout_of_the_large_model_fits_the_small_one(
    layers: int, heads: int, head_dim: int, micro: int, ffn: int | None, times: int
) -> None:
    base = config(
        model={"num_layers": layers, "num_heads": heads, "hidden_size": heads * head_dim, "ffn_hidden_size": ffn},
        train={"global_batch_size": micro * times, "micro_batch_size": micro},
    )
    variants, _ = default_set(base, precision="fp64", capacity=Capacity("cpu", 16, "too many."))
    small = shrunk(base, [each.config.parallel for each in variants])
    for each in variants:
        assert check(under(small, each.chosen, precision="fp64", source=each.layout)) == []
    assert small.model.num_layers <= layers and small.model.hidden_size <= base.model.hidden_size
    assert heads % small.model.num_heads == 0 and small.model.ffn <= base.model.ffn + heads


def test_a_teacher_keeps_its_width() -> None:
    """That of the large model where none was given: the maps to its hidden states lead to the same vectors."""
    taught = {"teacher": "teacher", "student_layers": [3], "teacher_layers": [5]}
    for given_width, expected in ((None, 1024), (768, 768)):
        bert = large(kind="bert", position="learned").model_dump(exclude_none=True)
        base = Config.model_validate(bert | {"distillation": taught | {"teacher_hidden_size": given_width}})
        small = shrunk(base, [ParallelConfig(tp=2)])
        assert small.distillation.teacher_hidden_size == expected
        assert small.model.num_layers == 4, "the block that is compared is there"
