"""What a model is made of: published sizes, options, and the modules that are built."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.architecture.families import architecture_of
from colonnade.architecture.statement import vocab_rows_per_rank
from colonnade.config.model import ModelConfig
from colonnade.mesh.mesh import Axis
from colonnade.tasks.tasks import TASKS
from colonnade.tensor_parallel.parallel import Parallel
from colonnade.tensor_parallel.placement import named_placements
from tests.blocks import LLAMA_BLOCK

NAMED = {
    "gpt2-124m": 124e6,
    "gpt2-355m": 355e6,
    "gpt2-1.2b": 1.2e9,
    "gpt2-2.5b": 2.5e9,
    "gpt2-4.2b": 4.2e9,
    "gpt2-8.3b": 8.3e9,
    "turing-nlg-17b": 17e9,
}

BASE = {"num_layers": 2, "hidden_size": 24, "num_heads": 4, "seq_length": 10}
MODELS = [
    ModelConfig(**BASE, tie_embeddings=tied, position=position, norm_position=norm, embedding_norm=embedding_norm)
    for tied, position, norm, embedding_norm in product(
        (True, False), ("learned", "alibi"), ("pre", "post"), (True, False)
    )
]
LLAMA = {
    **BASE,
    **LLAMA_BLOCK,
    "tie_embeddings": False,
}
MODELS += [
    ModelConfig(**LLAMA),
    ModelConfig(**LLAMA, num_key_value_heads=2, query_key_norm=True),
    ModelConfig(**LLAMA, num_key_value_heads=1, head_dim=10),
    ModelConfig(**BASE, num_key_value_heads=2, bias=True, norm="rmsnorm", embedding_norm=True),
    ModelConfig(**BASE, num_key_value_heads=1, bias=False),
]
BERT = {**BASE, "kind": "bert"}
MODELS += [
    ModelConfig(**BERT),
    ModelConfig(**BERT, norm_position="post", embedding_norm=True, tie_embeddings=False),
    ModelConfig(**BERT, position="rotary", bias=False, norm="rmsnorm", activation="swiglu", token_types=3),
    ModelConfig(**BERT, num_key_value_heads=2),
    ModelConfig(**BERT, head="classification", num_labels=3),
    ModelConfig(**BERT, head="spans"),
    ModelConfig(**BERT, head="spans", norm_position="post", bias=False),
    ModelConfig(**BERT, head="classification", num_labels=1, norm_position="post", tie_embeddings=False),
    ModelConfig(head="preferences", num_layers=2, hidden_size=16, num_heads=4, seq_length=12),
    ModelConfig(**BERT, head="choice", num_labels=4, bias=False, norm="rmsnorm"),
    ModelConfig(**BERT, head="none"),
]
T5 = {**BASE, "kind": "t5"}
T5_MODELS = [
    ModelConfig(**T5),
    ModelConfig(**T5, num_decoder_layers=3, activation="geglu_tanh", tie_embeddings=False, head_dim=10),
    ModelConfig(**T5, num_decoder_layers=1, relative_buckets=6, decoder_seq_length=7),
]
T5_STAGES = [
    ["embedding"],
    ["embedding", "encoder.blocks.0"],
    ["encoder.blocks.1", "decoder.embedding"],
    ["decoder.embedding"],
    ["encoder.blocks.1", "decoder.embedding", "decoder.blocks.0"],
    ["decoder.blocks.0", "head"],
    ["head"],
    None,
]
STAGES = [["embedding"], ["embedding", "blocks.0"], ["blocks.1"], ["blocks.1", "head"], ["head"], None]


PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "smollm-135m": 134_515_008,
    "smollm-360m": 361_821_120,
    "smollm-1.7b": 1_711_376_384,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "pythia-12b": 11_846_072_320,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "bert-tiny": 4_433_468,  # these of transformers' BertForPreTraining and MegatronBertForPreTraining
    "bert-base": 110_106_428,
    "bert-large": 336_226_108,
    "bert-336m": 336_226_108,
    "bert-1.3b": 1_280_595_772,
    "bert-3.9b": 3_869_081_404,
    "t5-small": 60_506_624,  # these of the published files
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1.1-small": 76_961_152,
    "t5-v1.1-base": 247_577_856,
    "t5-v1.1-large": 783_150_080,
    "t5-v1.1-xl": 2_849_757_184,
    "t5-v1.1-xxl": 11_135_332_352,
}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_weights_have_exactly_as_many_parameters(name: str) -> None:
    model = ModelConfig(preset=name)
    assert model.vocab_size is not None
    assert parameters(model, model.vocab_size) == PUBLISHED[name]


def parameters(model: ModelConfig, vocab_size: int) -> int:
    return architecture_of(model, vocab_size).num_parameters


@pytest.mark.parametrize("vocab_size", [61, 5000], ids=["few rows", "rows in tiles"])
@pytest.mark.parametrize("model", MODELS + T5_MODELS, ids=range(len(MODELS + T5_MODELS)))
def test_the_modules_have_what_is_stated(model: ModelConfig, vocab_size: int) -> None:
    stated = architecture_of(model, vocab_size)
    for names, tp_size in product(T5_STAGES if model.kind == "t5" else STAGES, (1, 2, 4)):
        tp = Axis("tp", tp_size, tp_size - 1)
        built = TASKS[model.kind_and_head].build(model, vocab_size, Parallel(tp), names)
        units = stated.units if names is None else stated.named(names)
        assert list(built.units()) == [unit.name for unit in units]
        places = named_placements(built.bucket_modules(), tp)
        assert set(places) == {bucket for unit in units for bucket in unit.buckets}
        for bucket, found in places.items():
            expected = [
                (
                    w.name,
                    w.shape,
                    None if w.is_shared(tp_size) else w.cut,
                    w.is_partial or w.is_shared(tp_size),
                    w.local_shape(tp_size),
                )
                for w in stated.buckets[bucket]
            ]
            assert [(p.name, p.shape, p.dim, p.is_partial, tuple(p.parameter.shape)) for p in found] == expected


@pytest.mark.parametrize("model", MODELS, ids=range(len(MODELS)))
def test_units_say_what_they_are(model: ModelConfig) -> None:
    stated = architecture_of(model, 61)
    first, *blocks, last = stated.units
    assert [unit for unit in stated.units if unit.reads_tokens] == [first]
    assert [unit.layer for unit in blocks] == list(range(model.num_layers)) and first.layer is last.layer is None
    assert [unit for unit in stated.units if unit.is_loss] == [last] and last.losses == stated.losses
    order = list(stated.buckets)
    assert all(list(unit.buckets) == [name for name in order if name in unit.buckets] for unit in stated.units)


def test_only_a_tied_table_is_shared() -> None:
    """Gradients of what units share are summed over the stages that have them."""
    for kind in ("gpt", "bert"):
        tied, untied = (ModelConfig(**BASE, kind=kind, tie_embeddings=tied) for tied in (True, False))
        stated = architecture_of(tied, 61)
        assert stated.shared_buckets() == ["embedding.tokens"] and architecture_of(untied, 61).shared_buckets() == []
        first, *_, last = stated.units
        own = sum(map(stated.parameters_of, stated.units)) - stated.num_parameters
        assert own == 61 * 24 and "embedding.tokens" in first.buckets and "embedding.tokens" in last.buckets


def test_the_loss_has_what_no_other_unit_has() -> None:
    """A tied table is the embedding's: an encoder without a head has it too."""
    for kind, tie in (("gpt", True), ("gpt", False), ("bert", True)):
        stated = architecture_of(ModelConfig(**BASE, kind=kind, tie_embeddings=tie), 61)
        others = {bucket for unit in stated.units if not unit.is_loss for bucket in unit.buckets}
        rest = {f"{bucket}.{weight.name}" for bucket in others for weight in stated.buckets[bucket]}
        assert stated.weights_of_loss() == stated.weights().keys() - rest != set()


@pytest.mark.parametrize("model", MODELS, ids=range(len(MODELS)))
def test_only_blocks_are_recomputed(model: ModelConfig) -> None:
    for unit in architecture_of(model, 61).units:
        assert unit.recomputes == (unit.layer is not None) == (unit.kind == "block")


@pytest.mark.parametrize("model", T5_MODELS, ids=range(len(T5_MODELS)))
def test_units_of_two_stacks_say_what_they_are(model: ModelConfig) -> None:
    stated = architecture_of(model, 61)
    first, *between, last = stated.units
    assert len(stated.units) == model.num_units and first.is_first and not any(unit.is_first for unit in between)
    assert [unit for unit in stated.units if unit.reads_tokens] == [first, between[model.num_layers]]
    blocks = [unit for unit in between if unit.layer is not None]
    assert [unit.layer for unit in blocks] == list(range(model.num_layers + model.decoder_layers))
    assert [unit.stack for unit in stated.units] == [0] * (model.num_layers + 1) + [1] * (model.decoder_layers + 2)
    assert all(unit.recomputes == (unit.layer is not None) for unit in stated.units)
    assert [unit for unit in stated.units if unit.is_loss] == [last] and last.losses == ("language_model",)
    order = list(stated.buckets)
    assert all(list(unit.buckets) == [name for name in order if name in unit.buckets] for unit in stated.units)
    tables = {"embedding.tokens": first, "encoder.positions": blocks[0], "decoder.positions": blocks[-1]}
    assert {bucket for bucket in tables if bucket in tables[bucket].buckets} == set(tables)
    shared = {bucket for bucket in stated.buckets if sum(bucket in unit.buckets for unit in stated.units) > 1}
    assert set(stated.shared_buckets()) == shared <= set(tables) and "embedding.tokens" in shared


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_preset_has_the_parameters_that_its_name_says(name: str) -> None:
    model = ModelConfig(preset=name)
    assert model.vocab_size == 50_257
    assert parameters(model, model.vocab_size) == pytest.approx(NAMED[name], rel=0.03)


def test_gpt2_has_exactly_the_published_number_of_parameters() -> None:
    assert parameters(ModelConfig(preset="gpt2-124m"), 50_257) == 124_439_808
    assert parameters(ModelConfig(preset="gpt2-355m"), 50_257) == 354_823_168


def test_an_untied_output_layer_and_a_wider_mlp_are_counted() -> None:
    model = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, seq_length=16)
    wide = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, seq_length=16, ffn_hidden_size=40)
    untied = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, seq_length=16, tie_embeddings=False)
    assert parameters(wide, 100) - parameters(model, 100) == 8 * (2 * 8 + 1)
    assert parameters(untied, 100) - parameters(model, 100) == 100 * 8


def test_parameters_that_a_model_does_not_have_are_not_counted() -> None:
    base = ModelConfig(num_layers=1, hidden_size=8, num_heads=2, seq_length=16)
    count = parameters(base, 100)
    assert parameters(base.model_copy(update={"position": "alibi"}), 100) == count - 16 * 8
    assert parameters(base.model_copy(update={"embedding_norm": True}), 100) == count + 2 * 8
    assert parameters(base.model_copy(update={"norm_position": "post"}), 100) == count - 2 * 8


@given(st.integers(1, 300_000), st.integers(1, 64))
def test_rows_hold_the_vocabulary_with_little_padding(vocab_size: int, tp_size: int) -> None:
    rows = vocab_rows_per_rank(vocab_size, tp_size)
    exact = -(-vocab_size // tp_size)
    assert rows * tp_size >= vocab_size
    assert rows <= exact * 9 / 8
    assert rows % 128 == 0 or rows == exact


def test_rows_of_gpt2s_vocabulary() -> None:
    assert [vocab_rows_per_rank(50257, tp) for tp in (1, 2, 8, 64)] == [50304, 25216, 6400, 786]
