import pytest
from pydantic import ValidationError

from colonnade.config.describe import all_keys, expectation
from colonnade.config.presets import PRESETS
from colonnade.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    parameter_count,
    parse_split,
)

# What the names say, in parameters.
NAMED = {
    "gpt2-124m": 124e6,
    "gpt2-355m": 355e6,
    "gpt2-1.2b": 1.2e9,
    "gpt2-2.5b": 2.5e9,
    "gpt2-4.2b": 4.2e9,
    "gpt2-8.3b": 8.3e9,
    "turing-nlg-17b": 17e9,
}


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_preset_has_the_parameters_that_its_name_says(name: str) -> None:
    model = ModelConfig(preset=name)
    assert model.vocab_size == 50_257
    assert parameter_count(model, model.vocab_size) == pytest.approx(NAMED[name], rel=0.03)


def test_gpt2_has_exactly_the_published_number_of_parameters() -> None:
    assert parameter_count(ModelConfig(preset="gpt2-124m"), 50_257) == 124_439_808
    assert parameter_count(ModelConfig(preset="gpt2-355m"), 50_257) == 354_823_168


def test_an_untied_output_layer_and_a_wider_mlp_are_counted() -> None:
    model = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, seq_length=16)
    wide = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, seq_length=16, ffn_hidden_size=40)
    untied = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, seq_length=16, tie_embeddings=False)
    assert parameter_count(wide, 100) - parameter_count(model, 100) == 8 * (2 * 8 + 1)
    assert parameter_count(untied, 100) - parameter_count(model, 100) == 100 * 8


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_heads_of_a_preset_divide_its_width(name: str) -> None:
    model = ModelConfig(preset=name)
    assert model.head_dim * model.num_heads == model.hidden_size


def test_a_written_key_is_stronger_than_the_preset_and_the_preset_than_the_default() -> None:
    model = ModelConfig(preset="gpt2-8.3b", num_heads=32)
    assert (model.num_layers, model.num_heads, model.activation, model.dropout) == (72, 32, "gelu", 0.1)


def test_derived_values() -> None:
    assert ModelConfig().ffn == 3072
    assert ModelConfig(ffn_hidden_size=100).ffn == 100
    assert ModelConfig().head_dim == 64
    assert ParallelConfig(tp=8, dp=64).num_ranks == 512
    train = TrainConfig(steps=1, global_batch_size=48, micro_batch_size=2)
    assert train.num_microbatches(8) == 3
    assert OptimConfig(learning_rate=1.0).decay_end(70) == 70
    assert OptimConfig(learning_rate=1.0, decay_steps=50).decay_end(70) == 50


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


@pytest.mark.parametrize("name", sorted(all_keys()))
def test_every_key_is_documented_and_every_number_has_a_unit(name: str) -> None:
    key = all_keys()[name]
    assert key.meaning.endswith("."), "a sentence"
    assert bool(key.unit) == (key.type in (int, float)) or name == "data.split"
    assert expectation(key)


def test_the_sections_are_those_of_the_contract() -> None:
    assert list(Config.model_fields) == [
        "model",
        "parallel",
        "data",
        "curriculum",
        "train",
        "optim",
        "checkpoint",
        "run",
    ]


def test_parameters_that_a_model_does_not_have_are_not_counted() -> None:
    base = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, seq_length=16)
    count = parameter_count(base, 100)
    assert parameter_count(base.model_copy(update={"position": "alibi"}), 100) == count - 16 * 8
    assert parameter_count(base.model_copy(update={"embedding_norm": True}), 100) == count + 2 * 8
    assert parameter_count(base.model_copy(update={"norm_position": "post"}), 100) == count - 2 * 8
