"""What [lora] adds to a model, and may not ask for; what adapters compute is tested by training them."""

import pytest

from colonnade.architecture.adapters import with_adapters
from colonnade.architecture.families import architecture_of
from colonnade.config.model import ModelConfig
from colonnade.config.parts import LoraConfig
from colonnade.errors import ConfigError
from colonnade.mesh.mesh import Axis
from colonnade.model.gpt import GPT
from colonnade.tensor_parallel.parallel import Parallel

LONG = ModelConfig(num_layers=1, hidden_size=1024, num_heads=16, seq_length=(1 << 20) + 1, position="rotary")


def test_masks_fit_a_stream() -> None:
    """Of the widest that is read: the MLP's inner columns are four times as many as the stream's."""
    stated = architecture_of(LONG, 40)
    with pytest.raises(ConfigError) as caught:
        with_adapters(stated, LoraConfig(rank=4, dropout=0.1))
    assert str(caught.value) == (
        "lora.dropout = 0.1 draws a mask of 1,048,577 positions × 4,096 features for each sample, of what the adapter "
        "of blocks.0.mlp.down reads: a stream of random numbers has 2^32 elements. Set lora.dropout = 0, leave such "
        "modules out of lora.targets, or use sequences of at most 1,048,576 tokens."
    )
    for fits in (LoraConfig(rank=4), LoraConfig(rank=4, dropout=0.1, targets=("attention.*", "mlp.up"))):
        assert with_adapters(stated, fits).adapters is not None
    shorter = architecture_of(LONG.model_copy(update={"seq_length": 1 << 20}), 40)
    assert with_adapters(shorter, LoraConfig(rank=4, dropout=0.1)).adapters is not None, "as many as there are numbers"


def test_a_rank_is_as_large_as_the_smallest_weight_is_at_most() -> None:
    """Keys and values of one group of four features: eight rows."""
    small = ModelConfig(num_layers=1, hidden_size=16, num_heads=4, num_key_value_heads=1, seq_length=8)
    stated = architecture_of(small, 40)
    assert with_adapters(stated, LoraConfig(rank=8, targets=("*",))).adapters is not None
    with pytest.raises(
        ConfigError, match=r"lora\.rank = 9 is larger than blocks\.0\.attention\.key_value is: .* 8 × 16"
    ):
        with_adapters(stated, LoraConfig(rank=9, targets=("*",)))
    assert with_adapters(stated, LoraConfig(rank=9, targets=("mlp.up",))).adapters is not None


def test_an_adapter_costs_its_products_and_begins_as_wide_as_its_input_asks() -> None:
    model = ModelConfig(num_layers=1, hidden_size=16, num_heads=4, seq_length=8)
    plain = architecture_of(model, 40)
    lora = LoraConfig(rank=2, alpha=6.0, targets=("mlp.down",))
    stated = with_adapters(plain, lora)
    more = [after.multiply_adds - before.multiply_adds for before, after in zip(plain.units, stated.units, strict=True)]
    assert more == [0, 2 * (64 + 16), 0], "x Aᵀ and then Bᵀ, for each token"
    weights = stated.weights()
    assert weights["blocks.0.mlp.down.lora_a"].std == pytest.approx((3 * 64) ** -0.5)
    assert weights["blocks.0.mlp.down.lora_b"].std is None
    assert stated.adapters is not None and stated.adapters.scale == 3.0 and stated.adapters.rank == 2


def test_an_adapter_of_a_shorter_stream_costs_its_own_tokens() -> None:
    """FLOPs are told for a token of the encoder: of 8, and the decoder reads 4; of its memory it reads all 8."""
    t5 = ModelConfig(kind="t5", num_layers=1, hidden_size=16, num_heads=4, seq_length=8, decoder_seq_length=4)
    plain, size = architecture_of(t5, 40), 2 * (16 + 64)
    for target, more in (
        ("encoder.*mlp.up", {"encoder.blocks.0": size}),
        ("decoder.*mlp.up", {"decoder.blocks.0": size // 2}),
        ("decoder.*cross.key_value", {"decoder.blocks.0": 2 * (16 + 32)}),
    ):
        stated = with_adapters(plain, LoraConfig(rank=2, targets=(target,)))
        found = {
            after.name: after.multiply_adds - before.multiply_adds
            for before, after in zip(plain.units, stated.units, strict=True)
            if after != before
        }
        assert found == more, target


def test_units_with_adapters_and_without_are_of_different_kinds() -> None:
    """Also where all weights are trained: they take different times and memory."""
    plain = architecture_of(ModelConfig(num_layers=4, hidden_size=16, num_heads=4, seq_length=8), 40)
    stated = with_adapters(plain, LoraConfig(rank=2, targets=("blocks.[02].mlp.up", "blocks.3.mlp.down")))
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(unit.kind for unit in stated.units))}
    assert [numbers[unit.kind] for unit in stated.units] == [0, 1, 2, 1, 3, 4]
    assert [unit.usual_kind for unit in stated.units] == [unit.kind for unit in plain.units]


def test_a_target_is_whole_names_behind_a_point() -> None:
    stated = architecture_of(ModelConfig(num_layers=1, hidden_size=16, num_heads=4, seq_length=8), 40)
    with pytest.raises(ConfigError, match=r'lora\.targets has "wn", which matches no linear layer .*mlp\.down'):
        with_adapters(stated, LoraConfig(rank=2, targets=("wn",)))


def test_keys_and_values_of_a_decoder_read_what_the_encoder_has_read() -> None:
    t5 = ModelConfig(kind="t5", num_layers=1, hidden_size=1024, num_heads=16, seq_length=1 << 23, decoder_seq_length=8)
    with pytest.raises(ConfigError, match=r"8,388,608 positions × 1,024 features .* decoder\.blocks\.0\.cross\.key_"):
        with_adapters(architecture_of(t5, 40), LoraConfig(rank=4, dropout=0.1, targets=("decoder.*cross*",)))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_modules_have_the_adapters_that_are_stated(tp_size: int) -> None:
    """Keys and values of two groups, which four ranks all have whole, their adapter too: each uses a part."""
    grouped = ModelConfig(num_layers=1, hidden_size=16, num_heads=4, num_key_value_heads=2, seq_length=8)
    stated = with_adapters(architecture_of(grouped, 40), LoraConfig(rank=2, targets=("*",)))
    model = GPT(grouped, 40, Parallel(Axis("tp", tp_size, tp_size - 1)))
    model.train_as(stated)
    found = {
        f"{bucket}.{place.name}": (tuple(place.parameter.shape), place.is_partial)
        for bucket, places in model.placements().items()
        for place in places
    }
    assert found == {
        name: (weight.local_shape(tp_size), weight.is_shared(tp_size)) for name, weight in stated.weights().items()
    }
