"""Which weights patterns freeze, and what follows for units; patterns that mean nothing are refused."""

from typing import Any

import pytest

from colonnade.architecture.families import architecture_of
from colonnade.architecture.matching import with_maps
from colonnade.architecture.parts import with_parts
from colonnade.architecture.sites import parts as measured
from colonnade.architecture.statement import Architecture
from colonnade.config.distillation import DistillationConfig
from colonnade.config.model import ModelConfig
from colonnade.config.parts import PartsConfig
from colonnade.errors import ConfigError

MODEL = ModelConfig(num_layers=3, hidden_size=16, num_heads=2, seq_length=8)


def stated(**parts: Any) -> Architecture:
    return with_parts(architecture_of(MODEL, 40), PartsConfig(**parts))


def frozen(*patterns: str) -> set[str]:
    return {name for name, weight in stated(frozen=patterns).weights().items() if weight.is_frozen}


def test_a_pattern_matches_whole_names() -> None:
    assert frozen("embedding.*") == {"embedding.tokens.weight", "embedding.positions.weight"}
    assert frozen("blocks.[0-1].attention.qkv.*") == {
        f"blocks.{layer}.attention.qkv.{kind}" for layer in (0, 1) for kind in ("weight", "bias")
    }
    assert frozen() == set()


def test_the_last_pattern_counts() -> None:
    assert frozen("*", "!head.*") == set(stated().weights()) - {"head.norm.weight", "head.norm.bias"}
    assert "head.norm.weight" in frozen("!head.*", "*", "!blocks.*")
    rates = stated(learning_rate={"*": 0.5, "blocks.*": 2.0, "blocks.1.mlp.*": 3.0}).weights()
    assert rates["embedding.tokens.weight"].learning_rate == 0.5
    assert rates["blocks.1.attention.qkv.weight"].learning_rate == 2.0
    assert rates["blocks.1.mlp.up.weight"].learning_rate == 3.0
    assert stated(learning_rate={"blocks.1.*": 3.0, "*": 0.5}).weights()["blocks.1.mlp.up.weight"].learning_rate == 0.5
    assert stated(weight_decay={"head.*": 0.0}).weights()["head.norm.weight"].weight_decay == 0.0


def test_backward_ends_where_nothing_below_is_trained() -> None:
    units = stated(frozen=("embedding.*", "blocks.0.*")).units
    assert [unit.has_backward for unit in units] == [False, False, True, True, True]
    assert [unit.sends_back for unit in units] == [False, False, False, True, True]
    assert units[2].kind != units[3].kind, "the first trained block computes no gradient of what it takes"
    assert all(unit.has_backward for unit in stated(frozen=("blocks.*",)).units)


def test_blocks_of_which_something_is_frozen_are_of_one_kind_where_they_take_the_same_time() -> None:
    """The first hands no gradient on, and of the second other weights are frozen."""
    units = stated(frozen=("embedding.*", "blocks.*.mlp.*", "!blocks.1.mlp.up.*")).units
    assert len({unit.kind for unit in units[1:4]}) == 3
    alike = stated(frozen=("blocks.*.mlp.*",)).units
    assert len({unit.kind for unit in alike[1:4]}) == 1 and alike[1].kind != "block"
    assert all(unit.has_backward for unit in stated(frozen=("*.bias",)).units), "matrices are trained"


def test_a_block_is_of_its_kind_whatever_is_frozen_in_it_and_whatever_its_states_are_compared_with() -> None:
    """So that what was measured of one that is trained can be asked for."""
    plain = architecture_of(MODEL, 40)
    maps = DistillationConfig(teacher="t", student_layers=(1, 2), teacher_layers=(0, 1), teacher_hidden_size=24)
    units = with_parts(with_maps(plain, MODEL, maps), PartsConfig(frozen=("blocks.[0-1].mlp.*",))).units
    assert len({unit.kind for unit in units}) == 5, "three blocks of three kinds"
    assert [unit.usual_kind for unit in units] == [unit.kind for unit in plain.units]


def test_a_part_is_measured_where_some_of_it_is_trained_and_somebody_looks() -> None:
    some = stated(frozen=("embedding.*", "blocks.1.*", "*.bias"))
    assert measured(some) == ("blocks.0", "blocks.2", "head")
    assert measured(some, ("gradients",)) == measured(some, ("updates", "mlp_hidden")) == measured(some)
    assert measured(some, ("mlp_hidden",)) == ()


def test_a_model_without_frozen_parts_is_stated_as_before() -> None:
    plain, with_factors = architecture_of(MODEL, 40), stated(learning_rate={"*": 1.0})
    assert [unit.kind for unit in plain.units] == [unit.kind for unit in with_factors.units]
    assert plain.weights() == with_factors.weights()
    assert stated(frozen=("embedding.*",)).num_trained == plain.num_parameters - 48 * 16


@pytest.mark.parametrize("key", ["frozen", "learning_rate", "weight_decay"])
def test_a_pattern_that_matches_nothing(key: str) -> None:
    pattern = "blocks.0.atention.qkv.weight"
    with pytest.raises(ConfigError, match=rf'parts.{key} has "{pattern}".*blocks.0.attention.qkv.weight'):
        stated(**{key: (pattern,) if key == "frozen" else {pattern: 0.5}})


def test_nothing_left_to_train() -> None:
    with pytest.raises(ConfigError, match=r"freezes all 40 weights.*!head"):
        stated(frozen=("embedding.*", "blocks.*", "head.*"))
