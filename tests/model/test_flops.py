"""The count of arithmetic against torch's own counter on a plain model."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from colonnade.architecture.devices import peak_flops
from colonnade.architecture.families import architecture_of
from colonnade.architecture.matching import with_maps
from colonnade.architecture.parts import with_parts
from colonnade.config.distillation import DistillationConfig
from colonnade.config.model import ModelConfig
from colonnade.config.parts import PartsConfig
from colonnade.mesh.mesh import Mesh
from colonnade.model.gpt import GPT
from colonnade.tensor_parallel.parallel import Parallel
from tests.model.plain import plain_logits


def test_forward_and_backward_as_torch_counts_them() -> None:
    config = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, ffn_hidden_size=40, seq_length=8)
    weights = dict(GPT(config, 37, Parallel(Mesh().tp)).named_parameters())
    for parameter in weights.values():
        torch.nn.init.normal_(parameter)
    counter = FlopCounterMode(display=False)
    with counter:
        plain_logits(config, weights, torch.zeros(3, 8, dtype=torch.int64)).sum().backward()
    future = 6 * config.num_layers * config.hidden_size * config.seq_length  # scores that a causal model does not need
    assert counter.get_total_flops() == 3 * 8 * (architecture_of(config, 37).flops_per_token + future)


@pytest.mark.parametrize(
    ("frozen", "length"),
    [(("*.mlp.*",), 8), (("*.mlp.*",), 1), (("*.attention.qkv.weight", "head.*"), 8), (("blocks.0.*",), 8)],
    ids=str,
)
def test_frozen_weights_have_no_gradients_to_compute(frozen: tuple[str, ...], length: int) -> None:
    """With the embedding trained, gradients go through all of the model."""
    config = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, seq_length=length, tie_embeddings=False)
    stated = with_parts(architecture_of(config, 37), PartsConfig(frozen=frozen))
    weights = dict(GPT(config, 37, Parallel(Mesh().tp)).named_parameters())
    for name, parameter in weights.items():
        torch.nn.init.normal_(parameter)
        parameter.requires_grad_(not stated.weights()[name].is_frozen)
    counter = FlopCounterMode(display=False)
    with counter:
        plain_logits(config, weights, torch.zeros(3, length, dtype=torch.int64)).sum().backward()
    future = 6 * config.num_layers * config.hidden_size * config.seq_length  # scores that a causal model does not need
    assert stated.flops_per_token < architecture_of(config, 37).flops_per_token
    assert counter.get_total_flops() == 3 * length * (stated.flops_per_token + future)


def test_below_all_that_is_trained_there_is_a_forward_alone() -> None:
    config = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, seq_length=8)
    stated = with_parts(architecture_of(config, 37), PartsConfig(frozen=("*", "!blocks.1.*")))
    embedding, below, trained, head = stated.units
    assert stated.flops_of(embedding) == 0
    assert stated.flops_of(below) == 2 * below.multiply_adds
    assert stated.flops_of(trained) == 6 * trained.multiply_adds
    assert stated.flops_of(head) == 4 * head.multiply_adds


def test_frozen_matrices_of_a_decoder_count_for_the_tokens_that_they_read() -> None:
    config = ModelConfig(kind="t5", num_layers=1, hidden_size=16, num_heads=2, seq_length=64, decoder_seq_length=16)
    whole = architecture_of(config, 128)
    block = whole.unit_names.index("decoder.blocks.0")

    def saved(pattern: str) -> float:
        apart = with_parts(whole, PartsConfig(frozen=(pattern,)))
        return whole.flops_of(whole.units[block]) - apart.flops_of(apart.units[block])

    assert saved("decoder.blocks.0.cross.query.weight") == 2 * 16 * 16 / 4  # a quarter of the encoder's tokens
    assert saved("decoder.blocks.0.cross.key_value.weight") == 2 * 32 * 16  # all of them


def test_a_masked_models_head_pools_one_position() -> None:
    config = ModelConfig(kind="bert", num_layers=2, hidden_size=16, num_heads=2, seq_length=8)
    head = architecture_of(config, 37).units[-1]
    assert head.multiply_adds == (37 + 16) * 16 + 16 * 16 // 8  # output layer, transform, and the pooler's share


SMALL = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "seq_length": 16}


@pytest.mark.parametrize(
    ("options", "linear", "attention"),
    [
        ({}, 16 * (4 * 16 + 2 * 64), 16 * 16),
        ({"window": 4}, 16 * (4 * 16 + 2 * 64), 16 * (2 * 4 - 1)),
        ({"window": 16}, 16 * (4 * 16 + 2 * 64), 16 * 16),
        ({"window": 99}, 16 * (4 * 16 + 2 * 64), 16 * 16),
        ({"kind": "bert"}, 16 * (4 * 16 + 2 * 64), 2 * 16 * 16),
        ({"activation": "swiglu", "ffn_hidden_size": 40}, 16 * (4 * 16 + 3 * 40), 16 * 16),
        ({"num_key_value_heads": 2, "head_dim": 10}, 16 * (2 * 40 + 2 * 20 + 2 * 64), 40 * 16),
    ],
    ids=str,
)
def test_what_a_block_multiplies_for_a_token(options: dict[str, object], linear: int, attention: int) -> None:
    """Its matrices, and both products of attention: of the causal half, of a window's band, or of all pairs."""
    stated = architecture_of(ModelConfig(**SMALL, **options), 37)
    first, *blocks, last = stated.units
    assert [block.multiply_adds for block in blocks] == [linear + attention] * 2
    assert first.multiply_adds == 0 and last.multiply_adds >= 37 * 16
    assert stated.flops_per_token == 6.0 * sum(unit.multiply_adds for unit in stated.units)


def test_what_a_block_of_two_stacks_multiplies_for_a_token_that_the_encoder_reads() -> None:
    """A decoder attends to half of its own square and to all of the memory, with a token for every four."""
    config = ModelConfig(kind="t5", num_layers=1, hidden_size=16, num_heads=2, seq_length=64, decoder_seq_length=16)
    matrices, mlp, of_memory = 4 * 16 * 16, 2 * 16 * 64, 2 * 16 * 16
    *_, head = units = architecture_of(config, 128).units
    encoder, decoder = (unit for unit in units if unit.layer is not None)
    assert encoder.multiply_adds == matrices + mlp + 2 * 16 * 64
    assert decoder.multiply_adds == (matrices + of_memory + mlp + 16 * 16 + 2 * 16 * 64) // 4 + of_memory
    assert head.multiply_adds == 128 * 16 // 4


def test_the_papers_model_needs_six_times_its_parameters_and_a_little() -> None:
    config = ModelConfig(preset="gpt2-8.3b")
    assert 6 * 8.3e9 < architecture_of(config, 51200).flops_per_token < 6 * 8.3e9 * 1.1


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H100 NVL", "bf16", 835e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H200 NVL", "bf16", 835e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L40", "bf16", 181e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA B200", "bf16", 2250e12),
        ("NVIDIA GB200", "bf16", 2500e12),
        ("NVIDIA GH200 480GB", "bf16", 989e12),
        ("NVIDIA H100 80GB HBM3", "fp16", 989e12),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),  # it has no units for it
        ("NVIDIA H100X", "bf16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "fp32", None),
        ("NVIDIA H100 80GB HBM3", "fp64", None),
        ("cpu", "bf16", None),
    ],
)
def test_peaks(name: str, precision: str, peak: float | None) -> None:
    assert peak_flops(name, precision) == peak


def test_a_map_to_a_teachers_width_is_computed_for_every_token() -> None:
    """In the blocks that are compared, and in no other."""
    model = ModelConfig(kind="bert", num_layers=3, hidden_size=16, num_heads=2, seq_length=8)
    taught = DistillationConfig(teacher="teacher", student_layers=(0, 2), teacher_layers=(1, 3), teacher_hidden_size=24)
    plain = architecture_of(model, 30)
    pairs = list(zip(plain.units, with_maps(plain, model, taught).units, strict=True))
    more = {unit.layer: mapped.multiply_adds - unit.multiply_adds for unit, mapped in pairs}
    apart = {mapped.layer for _, mapped in pairs} - {mapped.layer for unit, mapped in pairs if mapped.kind == unit.kind}
    assert apart == {0, 2}, "they are measured as a kind of their own"
    assert more == {None: 0, 0: 24 * 16, 1: 0, 2: 24 * 16}
    maps = [
        bucket[-1] for bucket in with_maps(plain, model, taught).buckets.values() if "to_teacher" in bucket[-1].name
    ]
    assert [each.std for each in maps] == [0.25] * 2, "what a sum over 16 numbers leaves as large as they are"
    for without in ({"teacher": None}, {"teacher_hidden_size": None}, {"student_layers": ()}):
        assert with_maps(plain, model, taught.model_copy(update=without)) is plain, "nothing to map"
