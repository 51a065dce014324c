"""Layouts from text, layouts chosen for a configuration, and what cannot be."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config.load import loads, to_toml
from colonnade.config.schema import Config
from colonnade.errors import ConfigError
from colonnade.verify.layouts import KEYS, Capacity, default_set, named, parse, serial, text_of, under

CAPACITY = Capacity("cpu", 16, "too many.")
TEXT = """
[model]
num_layers = 2
hidden_size = 16
num_heads = 2
seq_length = 16
[data]
train = "tokens"
[train]
steps = 6
global_batch_size = 4
micro_batch_size = 2
evaluate_every = 3
[optim]
learning_rate = 1e-2
[run]
folder = "run"
"""


def config(**sections: dict[str, Any]) -> Config:
    """A small configuration with some keys changed: config(model={"num_heads": 1})."""
    content = loads(TEXT.replace("evaluate_every = 3", "")).model_dump(exclude_none=True)
    changed = {name: {**content[name], **sections.get(name, {})} for name in content}
    return Config.model_validate(changed)


def refusal(text: str, base: Config | None = None, precision: str = "fp64") -> str:
    with pytest.raises(ConfigError) as refused:
        named(base or config(), [text], precision=precision)
    return str(refused.value)


# --- text -------------------------------------------------------------------------------------------------------------


def test_a_text_is_keys_and_values() -> None:
    text = "tp=2, pp=2,schedule=interleaved,virtual_stages=2,cuts=[1,2, 3,4],sequence_parallel=true,micro_batch_size=1"
    assert parse(text) == {
        "tp": 2,
        "pp": 2,
        "schedule": "interleaved",
        "virtual_stages": 2,
        "cuts": [1, 2, 3, 4],
        "sequence_parallel": True,
        "micro_batch_size": 1,
    }
    assert parse("parallel.tp=2,train.micro_batch_size=1") == {"tp": 2, "micro_batch_size": 1}


VALUES = {
    "schedule": st.sampled_from(["naive", "gpipe", "1f1b", "interleaved", "zero_bubble"]),
    "partition": st.sampled_from(["layers", "parameters", "flops"]),
    "recompute": st.sampled_from(["none", "selective", "full"]),
    "cuts": st.lists(st.integers(1, 9), min_size=1),
    "sequence_parallel": st.booleans(),
    "offload": st.booleans(),
}


@given(st.fixed_dictionaries({}, optional={key: VALUES.get(key, st.integers(0, 512)) for key in KEYS}))
def test_text_of_is_the_inverse_of_parse(chosen: dict[str, Any]) -> None:
    text = text_of(chosen)
    assert text == "serial" if not chosen else parse(text) == chosen


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("foo", "'foo' is not of the form key=value. Write sizes of tp, pp and dp"),
        ("", "'' is not of the form key=value"),
        ("tp=2,,dp=2", "'' is not of the form key=value"),
        ("tp=", "'tp=' is not of the form key=value"),
        ("tp=2,tp=4", "gives tp twice"),
        ("tp=2,parallel.tp=4", "gives tp twice"),
        ("tp=1" + "0" * 24, "tp cannot be read: it has a whole number that 64 bits cannot hold"),
        ("tpp=2", "did you mean tp?"),
        ("micro_batch=2", "did you mean micro_batch_size?"),
        ("tensor_model_parallel_size=2", "did you mean tp?"),
        ("hidden_size=8", "hidden_size is not a key of a layout. Use keys of [parallel] (tp, pp, dp,"),
    ],
)
def test_what_is_no_layout(text: str, said: str) -> None:
    assert said in refusal(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "tp=4",
            "parallel.tp = 4 does not divide model.num_heads = 2: each tensor-parallel rank needs whole heads. Use 1",
        ),
        ("tp=x", 'parallel.tp = "x" is text, where a whole number'),
        ("zero=4", "Use 0, 1, 2 or 3."),
        ("pp=5", "5 stages, but 2 blocks, the embedding and the head are 4 units"),
        ("schedule=interleave", 'Did you mean "interleaved"?'),
        ("pp=2,virtual_stages=2", 'Use schedule = "interleaved", or virtual_stages = 1.'),
        ("dp=2,micro_batch_size=4", "Use a global_batch_size of 8 only in a new run"),
        ("pp=2,cuts=[1,2]", "sums to 3, but the model has 4 units"),
        ("pp=2,offload=true", "there is no master copy"),
    ],
)
def test_what_cannot_be_is_refused_in_the_configurations_words(text: str, said: str) -> None:
    told = refusal(text)
    assert said in told and told.startswith(f"--layout {text} at --precision fp64: ")


def test_a_sequence_that_tp_does_not_divide() -> None:
    assert "Use a seq_length of 14 or 16" in refusal("tp=2,sequence_parallel=true", config(model={"seq_length": 15}))


def test_all_mistakes_in_one_message() -> None:
    with pytest.raises(ConfigError) as refused:
        named(config(), ["tp=4", "tp=2", "foo"], precision="fp64")
    assert "tp = 4 does not divide" in str(refused.value) and "'foo'" in str(refused.value)


def test_offload_is_possible_in_16_bits() -> None:
    (variant,) = named(config(), ["dp=2,zero=1,offload=true"], precision="bf16")
    assert variant.config.parallel.offload and variant.config.train.precision == "bf16"


def test_a_layout_named_twice_runs_once() -> None:
    assert [each.layout for each in named(config(), ["tp=2", "dp=2", "tp=2"], precision="fp64")] == ["tp=2", "dp=2"]


# --- configurations ---------------------------------------------------------------------------------------------------

FULL = config(
    parallel={
        "tp": 2,
        "pp": 2,
        "schedule": "interleaved",
        "virtual_stages": 2,
        "cuts": (1, 1, 1, 1),
        "sequence_parallel": True,
        "zero": 3,
        "recompute": "full",
        "recompute_every": 2,
        "offload": True,
    },
    train={"precision": "bf16", "reduce_precision": "16-bit"},
)


def test_the_serial_run_has_nothing_of_the_layout() -> None:
    alone = serial(FULL, precision="fp64")
    assert alone.parallel == config().parallel and alone.parallel.num_ranks == 1
    assert (alone.train.precision, alone.train.reduce_precision, alone.train.evaluate_every) == ("fp64", "fp32", 0)
    assert alone.train.micro_batch_size == FULL.train.micro_batch_size
    assert (alone.model, alone.data) == (FULL.model, FULL.data)


def test_a_layout_says_all_of_it() -> None:
    """What its text does not name has its default, whatever the file says."""
    cut = under(FULL, {"tp": 2, "micro_batch_size": 1}, precision="bf16", source="test")
    assert cut.parallel == config(parallel={"tp": 2}).parallel
    assert (cut.train.micro_batch_size, cut.train.reduce_precision) == (1, "16-bit")


def test_epsilon_is_not_smaller_than_rounding_allows() -> None:
    assert serial(config(optim={"epsilon": 1e-8}), precision="fp64").optim.epsilon == 1e-6
    assert serial(config(optim={"epsilon": 1e-4}), precision="fp64").optim.epsilon == 1e-4


def test_ranks_read_the_same_configuration_from_a_file() -> None:
    for each in (serial(FULL, precision="fp64"), under(FULL, {"pp": 2, "cuts": [3, 1]}, precision="bf16", source="")):
        assert loads(to_toml(each)) == each


# --- the default set --------------------------------------------------------------------------------------------------


def chosen(base: Config, *, precision: str = "fp64", capacity: Capacity = CAPACITY) -> tuple[list[str], dict[str, str]]:
    variants, left_out = default_set(base, precision=precision, capacity=capacity)
    return [each.layout for each in variants], {each.layout: each.reason for each in left_out}


def test_one_of_each_kind() -> None:
    layouts, left_out = chosen(config())
    assert layouts == [
        "tp=2",
        "tp=2,sequence_parallel=true",
        "pp=2,micro_batch_size=1",
        "pp=2,schedule=interleaved,virtual_stages=2,micro_batch_size=1",
        "pp=2,schedule=zero_bubble,micro_batch_size=1",
        "dp=2",
        "dp=2,zero=1",
        "dp=2,zero=2",
        "dp=2,zero=3",
        "tp=2,pp=2,dp=2,sequence_parallel=true,zero=1,micro_batch_size=1",
        "recompute=full",
    ]
    assert left_out == {}


def test_what_the_shape_does_not_admit_is_left_out_with_the_reason() -> None:
    layouts, left_out = chosen(config(model={"num_heads": 1, "num_layers": 1}))
    assert "pp=2,micro_batch_size=1" in layouts and "dp=2,zero=3" in layouts
    assert not any("tp" in layout for layout in layouts)
    assert "each tensor-parallel rank needs whole heads" in left_out["tp=2"]
    (interleaved,) = (reason for layout, reason in left_out.items() if "interleaved" in layout)
    assert "1 blocks, the embedding and the head are 3 units" in interleaved


def test_heads_and_batches_that_2_does_not_divide() -> None:
    base = config(model={"num_heads": 3, "hidden_size": 24}, train={"global_batch_size": 9, "micro_batch_size": 9})
    layouts, _ = chosen(base)
    assert "tp=3" in layouts and "dp=3,zero=2,micro_batch_size=3" in layouts
    assert "tp=3,pp=2,dp=3,sequence_parallel=true,zero=1,micro_batch_size=1" not in layouts  # 16 tokens, 3 ranks


def test_the_files_own_layout_comes_first() -> None:
    own = config(parallel={"tp": 2, "dp": 2, "zero": 2, "recompute": "full"})
    assert chosen(own)[0][0] == "tp=2,dp=2,zero=2,recompute=full"
    assert chosen(FULL)[0][0].endswith("recompute=full,recompute_every=2"), "fp64 has no master copy to offload"
    assert chosen(FULL, precision="bf16")[0][0].endswith("recompute_every=2,offload=true")


def test_an_own_layout_of_many_ranks_runs_in_small() -> None:
    own = config(
        model={"num_heads": 8, "hidden_size": 64},
        parallel={"tp": 8, "dp": 64, "sequence_parallel": True},
        train={"global_batch_size": 512, "micro_batch_size": 8},
    )
    layouts, left_out = chosen(own)
    assert layouts[0] == "tp=2,dp=2,sequence_parallel=true"
    assert left_out == {"tp=8,dp=64,sequence_parallel=true": "512 ranks: too many."}


def test_the_small_version_has_micro_batches_for_its_own_stages() -> None:
    """17 of two samples are no whole number for each of two stages, and 34 of one are."""
    own = config(model={"num_layers": 17}, parallel={"pp": 17}, train={"global_batch_size": 34, "micro_batch_size": 2})
    layouts, left_out = chosen(own)
    assert layouts[0] == "pp=2,micro_batch_size=1" and left_out["pp=17"] == "17 ranks: too many."


def test_cuts_of_many_stages_are_not_those_of_the_small_version() -> None:
    own = config(parallel={"pp": 4, "dp": 8, "cuts": (1, 1, 1, 1)}, train={"global_batch_size": 64})
    layouts, left_out = chosen(own)
    assert layouts[0] == "pp=2,dp=2"
    assert left_out == {"pp=4,dp=8,cuts=[1,1,1,1]": "32 ranks: too many."}


def test_no_more_ranks_than_there_is_room_for() -> None:
    layouts, left_out = chosen(config(), capacity=Capacity("cuda", 2, "2 GPUs."))
    assert "tp=2" in layouts
    assert list(left_out.values()) == ["8 ranks: 2 GPUs."]
    assert chosen(config(), capacity=Capacity("cuda", 1, "1 GPU."))[0] == ["recompute=full"]


@pytest.mark.parametrize(
    ("batch", "micro", "layout", "expected"),
    [
        (8, 2, "pp=2", ""),
        (8, 4, "pp=2", ",micro_batch_size=2"),
        (2, 2, "pp=2", ",micro_batch_size=1"),  # two micro-batches for two stages, where there are no four
        (16, 4, "tp=2,pp=2,dp=2,sequence_parallel=true,zero=1", ",micro_batch_size=2"),
        (16, 2, "tp=2,pp=2,dp=2,sequence_parallel=true,zero=1", ""),
        (16, 4, "dp=2", ""),
        (16, 16, "dp=2", ",micro_batch_size=8"),
    ],
)
def test_micro_batches_are_as_large_as_stages_and_copies_admit(
    batch: int, micro: int, layout: str, expected: str
) -> None:
    """Each copy has its share of the batch, in a multiple of the stages, twice as many if that can be."""
    layouts, _ = chosen(config(train={"global_batch_size": batch, "micro_batch_size": micro}))
    assert layout + expected in layouts


@pytest.mark.slow
@given(
    st.integers(1, 6),
    st.sampled_from([1, 2, 3, 4, 6]),
    st.integers(1, 24),
    st.integers(1, 4),
    st.integers(1, 16),
)
def test_whatever_is_chosen_can_be(layers: int, heads: int, micro: int, times: int, seq_length: int) -> None:
    """Each variant loads from what is written for its ranks, its text names just it, and nothing is lost silently."""
    base = config(
        model={"num_layers": layers, "num_heads": heads, "hidden_size": 4 * heads, "seq_length": seq_length},
        train={"global_batch_size": micro * times, "micro_batch_size": micro},
    )
    variants, left_out = default_set(base, precision="fp64", capacity=CAPACITY)
    assert len(variants) + len(left_out) == 11
    for each in variants:
        assert loads(to_toml(each.config)) == each.config
        assert named(base, [each.layout], precision="fp64")[0].config == each.config
    assert all(each.reason for each in left_out)


def test_layouts_are_decided_without_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    program = (
        "import sys; import colonnade.verify.verify, colonnade.verify.shrink; "
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert answer.stdout == "[]\n", answer
