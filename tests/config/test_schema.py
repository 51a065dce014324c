from typing import Annotated, get_args

import pytest
from pydantic import ValidationError

from colonnade.config.describe import all_keys, expectation, keys_of, sections
from colonnade.config.model import ModelConfig
from colonnade.config.nature import MAY_CHANGE, NOT_THE_MODEL, Of, Since
from colonnade.config.parts import LoraConfig
from colonnade.config.presets import PRESETS
from colonnade.config.schema import Config, DataConfig, OptimConfig, ParallelConfig, TrainConfig
from colonnade.config.split import parse_split


def test_every_key_is_of_one_section() -> None:
    """Those of [model.rotary] are none of [model]."""
    of_sections = [key.name for section in sections() for key in keys_of(section)]
    assert sorted(of_sections) == sorted(all_keys())
    assert not all_keys().keys() & sections().keys(), "a section has no value of its own"


@pytest.mark.parametrize(("rank", "alpha", "scale"), [(8, None, 2.0), (8, 4.0, 0.5), (0, None, 0.0), (0, 4.0, 0.0)])
def test_adapters_are_multiplied_with_alpha_over_their_rank(rank: int, alpha: float | None, scale: float) -> None:
    """With 2 where nothing is said; where there are none, with nothing."""
    assert LoraConfig(rank=rank, alpha=alpha).scale == scale


# What the names say, in parameters.


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_heads_of_a_preset_divide_its_width(name: str) -> None:
    model = ModelConfig(preset=name)
    assert model.head_dim is not None or model.head_width * model.num_heads == model.hidden_size


def test_a_written_key_is_stronger_than_the_preset_and_the_preset_than_the_default() -> None:
    model = ModelConfig(preset="gpt2-8.3b", num_heads=32)
    assert (model.num_layers, model.num_heads, model.activation, model.dropout) == (72, 32, "gelu", 0.0)


# Heads, heads of keys and values, width of a head, positions, activation, epsilon of norms, base of rotary angles.
LLAMA, GELU = ("swiglu", 1e-5), ("gelu", 1e-5)
T5, T5_1_1 = ("relu", 1e-6), ("geglu_tanh", 1e-6)
SHAPES = {
    "gpt2-124m": (12, 12, 64, 1024, "gelu_tanh", 1e-5, None),
    "gpt2-355m": (16, 16, 64, 1024, "gelu_tanh", 1e-5, None),
    "gpt2-1.2b": (16, 16, 96, 1024, *GELU, None),
    "gpt2-2.5b": (20, 20, 96, 1024, *GELU, None),
    "gpt2-4.2b": (24, 24, 96, 1024, *GELU, None),
    "gpt2-8.3b": (24, 24, 128, 1024, *GELU, None),
    "turing-nlg-17b": (28, 28, 152, 1024, *GELU, None),
    "bloom-176b": (112, 112, 128, 2048, "gelu_tanh", 1e-5, None),
    "bert-tiny": (2, 2, 64, 512, "gelu", 1e-12, None),
    "bert-base": (12, 12, 64, 512, "gelu", 1e-12, None),
    "bert-large": (16, 16, 64, 512, "gelu", 1e-12, None),
    "bert-336m": (16, 16, 64, 512, *GELU, None),
    "bert-1.3b": (32, 32, 64, 512, *GELU, None),
    "bert-3.9b": (40, 40, 64, 512, *GELU, None),
    "t5-small": (8, 8, 64, 512, *T5, None),
    "t5-base": (12, 12, 64, 512, *T5, None),
    "t5-large": (16, 16, 64, 512, *T5, None),
    "t5-3b": (32, 32, 128, 512, *T5, None),
    "t5-11b": (128, 128, 128, 512, *T5, None),
    "t5-v1.1-small": (6, 6, 64, 512, *T5_1_1, None),
    "t5-v1.1-base": (12, 12, 64, 512, *T5_1_1, None),
    "t5-v1.1-large": (16, 16, 64, 512, *T5_1_1, None),
    "t5-v1.1-xl": (32, 32, 64, 512, *T5_1_1, None),
    "t5-v1.1-xxl": (64, 64, 64, 512, *T5_1_1, None),
    "llama2-7b": (32, 32, 128, 4096, *LLAMA, 1e4),
    "llama2-13b": (40, 40, 128, 4096, *LLAMA, 1e4),
    "llama2-70b": (64, 8, 128, 4096, *LLAMA, 1e4),
    "llama3-8b": (32, 8, 128, 8192, *LLAMA, 5e5),
    "llama3-70b": (64, 8, 128, 8192, *LLAMA, 5e5),
    "llama3.1-8b": (32, 8, 128, 131_072, *LLAMA, 5e5),
    "llama3.2-1b": (32, 8, 64, 131_072, *LLAMA, 5e5),
    "smollm-135m": (9, 3, 64, 2048, *LLAMA, 1e4),
    "smollm-360m": (15, 5, 64, 2048, *LLAMA, 1e4),
    "smollm-1.7b": (32, 32, 64, 2048, *LLAMA, 1e4),
    "pythia-160m": (12, 12, 64, 2048, *GELU, 1e4),
    "pythia-410m": (16, 16, 64, 2048, *GELU, 1e4),
    "pythia-1b": (8, 8, 256, 2048, *GELU, 1e4),
    "pythia-1.4b": (16, 16, 128, 2048, *GELU, 1e4),
    "pythia-2.8b": (32, 32, 80, 2048, *GELU, 1e4),
    "pythia-6.9b": (32, 32, 128, 2048, *GELU, 1e4),
    "pythia-12b": (40, 40, 128, 2048, *GELU, 1e4),
    "qwen2.5-0.5b": (14, 2, 64, 32_768, "swiglu", 1e-6, 1e6),
    "qwen2.5-1.5b": (12, 2, 128, 32_768, "swiglu", 1e-6, 1e6),
    "qwen2.5-3b": (16, 2, 128, 32_768, "swiglu", 1e-6, 1e6),
    "qwen2.5-7b": (28, 4, 128, 131_072, "swiglu", 1e-6, 1e6),
    "qwen3-0.6b": (16, 8, 128, 40_960, "swiglu", 1e-6, 1e6),
    "qwen3-8b": (32, 8, 128, 40_960, "swiglu", 1e-6, 1e6),
}
UNTIED = ("t5-v1.1", "llama2-", "llama3-", "llama3.1-", "pythia-", "qwen2.5-7b", "qwen3-8b")
"""Models that have an output layer of their own begin so."""


def test_what_is_given_as_unset_is_the_presets() -> None:
    model = ModelConfig(preset="llama3-8b", num_key_value_heads=None, vocab_size=None, head_dim=None)
    assert (model.key_value_heads, model.vocab_size, model.head_width) == (8, 128_256, 128)


def test_a_key_of_a_section_leaves_the_others_of_a_preset() -> None:
    model = ModelConfig.model_validate({"preset": "llama3.1-8b", "rotary": {"base": 1e6}})
    published = ModelConfig(preset="llama3.1-8b").rotary
    assert model.rotary == published.model_copy(update={"base": 1e6}) and model.rotary.scaling == "llama3"


def test_presets_are_as_published_in_what_no_number_of_parameters_tells() -> None:
    assert SHAPES.keys() == PRESETS.keys() - {"tiny"}
    for name, expected in SHAPES.items():
        m = ModelConfig(preset=name)
        base = m.rotary.base if m.position == "rotary" else None
        found = (m.num_heads, m.key_value_heads, m.head_width, m.seq_length, m.activation, m.norm_epsilon, base)
        assert found == expected, name
    scaled = {
        name: (r.factor, r.original_length) for name in SHAPES if (r := ModelConfig(preset=name).rotary).factor > 1
    }
    assert scaled == {"llama3.1-8b": (8.0, 8192), "llama3.2-1b": (32.0, 8192)}
    assert all(ModelConfig(preset=name).rotary.scaling == "llama3" for name in scaled)
    for kind in ("bert", "t5"):
        of_kind = {name for name in SHAPES if ModelConfig(preset=name).kind == kind}
        assert of_kind == {name for name in SHAPES if name.startswith(f"{kind}-")}
    untied = {name for name in SHAPES if not ModelConfig(preset=name).tie_embeddings}
    assert untied == {name for name in SHAPES if name.startswith(UNTIED)}
    post = {name for name in SHAPES if ModelConfig(preset=name).norm_position == "post"}
    assert post == {"bert-tiny", "bert-base", "bert-large"}


def test_presets_have_positions_and_residuals_as_published() -> None:
    """Which no number of parameters tells, either."""

    def of(**keys: object) -> set[str]:
        return {
            name
            for name in SHAPES
            if all(getattr(ModelConfig(preset=name), key) == value for key, value in keys.items())
        }

    def family(*names: str) -> set[str]:
        return {name for name in SHAPES if name.startswith(names)}

    assert of(position="alibi") == {"bloom-176b"} and of(position="relative") == family("t5")
    assert of(position="rotary") == family("llama", "smollm", "pythia", "qwen")
    assert of(parallel_residual=True) == family("pythia")
    assert {ModelConfig(preset=name).rotary.share for name in family("pythia")} == {0.25}
    assert {ModelConfig(preset=name).rotary.share for name in SHAPES.keys() - family("pythia")} == {1.0}


def test_derived_values() -> None:
    assert ModelConfig().ffn == 3072
    assert ModelConfig(ffn_hidden_size=100).ffn == 100
    assert ModelConfig().head_width == 64
    assert ParallelConfig(tp=8, dp=64).num_ranks == 512
    train = TrainConfig(steps=1, global_batch_size=48, micro_batch_size=2)
    assert train.num_microbatches(8) == 3
    intervals = [train.model_copy(update={"evaluate_every": every}).evaluation_interval for every in (None, 0, 7)]
    assert intervals == [500, 0, 7], "0: never"
    assert OptimConfig(learning_rate=1.0).decay_end(70) == 70
    assert OptimConfig(learning_rate=1.0, decay_steps=50).decay_end(70) == 50
    adapters = (LoraConfig(rank=4), LoraConfig(rank=4, alpha=2.0), LoraConfig(alpha=2.0))
    assert [each.scale for each in adapters] == [2.0, 0.5, 0.0], "twice the rank; and there are none"


def test_a_part_with_a_file_of_its_own_takes_no_share() -> None:
    assert DataConfig(split="969:30:1").shares == (969, 30, 1)
    assert DataConfig(split="29:1", validation="v").shares == (29, 0, 0)
    assert DataConfig(split="8:1:1", test="t").shares == (8, 1, 0)


@pytest.mark.parametrize("text", ["", "1", "0:1", "-1:2", "1:2:3:4", "a:b", "1:nan", "inf:1", "1:"])
def test_what_is_no_split(text: str) -> None:
    with pytest.raises(ValueError):
        parse_split(text)


def test_a_config_is_frozen_and_strict() -> None:
    with pytest.raises(ValidationError):
        ModelConfig().num_layers = 3  # type: ignore[misc]
    for wrong in ({"num_layers": 2.0}, {"num_layers": True}, {"num_layers": "2"}, {"init_std": float("inf")}, {"x": 1}):
        with pytest.raises(ValidationError):
            ModelConfig.model_validate(wrong)


def test_every_key_is_documented_and_every_number_has_a_unit() -> None:
    for name, key in all_keys().items():
        assert key.meaning.endswith("."), f"{name}: a sentence"
        assert bool(key.unit) == (key.type in (int, float)) or name == "data.split", name
        assert expectation(key), name


def test_the_sections_are_those_of_the_contract() -> None:
    assert list(Config.model_fields) == [
        "model",
        "parallel",
        "data",
        "curriculum",
        "train",
        "optim",
        "parts",
        "lora",
        "preferences",
        "distillation",
        "divergence",
        "thermometers",
        "checkpoint",
        "restarts",
        "run",
        "tracking",
    ]


def test_marks_of_different_kinds_are_never_one_annotation() -> None:
    """Older Pythons keep annotations by equality: marks that are equal would take each other's place."""
    marks = [MAY_CHANGE, NOT_THE_MODEL, Since(None), Of(()), Since(()), Of(("bert",))]
    assert all((a == b) is (a is b) for a in marks for b in marks)
    assert [get_args(Annotated[str | None, mark])[1] for mark in marks] == marks
    assert all_keys()["data.cache"].may_change and all_keys()["train.timeout"].may_change
    assert not all_keys()["model.preset"].may_change
