"""Tensors of published files that are no weights: what a module registers as a buffer, and computes anew."""

import pytest

from colonnade.architecture import megatron
from colonnade.architecture.huggingface.families import FAMILIES
from colonnade.architecture.huggingface.statement import Family

EVERY = {**FAMILIES, "megatron gpt": megatron.GPT, "megatron bert": megatron.BERT}
CONSTANTS = {
    "gpt2": ("transformer.h.10.attn.bias", "transformer.h.0.attn.masked_bias"),
    "llama": ("model.layers.11.self_attn.rotary_emb.inv_freq",),
    "mistral": ("model.layers.11.self_attn.rotary_emb.inv_freq",),
    "gpt_neox": (
        "gpt_neox.layers.0.attention.bias",
        "gpt_neox.layers.10.attention.masked_bias",
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq",
    ),
    "bert": ("bert.embeddings.position_ids",),
    "t5": ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    "megatron gpt": (
        "transformer.layers.0.attention.bias",
        "transformer.layers.10.attention.masked_bias",
        "language_model.rotary_pos_emb.inv_freq",
    ),
}
"""Names that files have been published with."""


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_passed_over(name: str) -> None:
    assert [each for each in CONSTANTS[name] if not EVERY[name].constants.fullmatch(each)] == []


@pytest.mark.parametrize("family", EVERY.values(), ids=EVERY)
def test_no_weight_is_passed_over_as_a_constant(family: Family) -> None:
    """Whatever the layer, and whatever stands before the name."""
    names = [each for place in family.places.values() for each in place.names]
    whole = [f"{family.base * based}{name}.{kind}" for name in names for kind in ("weight", "bias") for based in (0, 1)]
    assert whole and not [each for each in whole if family.constants.fullmatch(each.replace("{i}", "10"))]
