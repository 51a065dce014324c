"""GPT-2's weights there and back, exactly, and the order of q, k and v."""

import pytest
import torch

from colonnade.checkpoint.huggingface import from_gpt2_state_dict, to_gpt2_state_dict
from colonnade.errors import CheckpointError

HEADS, DIM, LAYERS = 4, 6, 2
H = HEADS * DIM


def gpt2(tied: bool = True) -> dict[str, torch.Tensor]:
    """Every tensor of a small GPT2LMHeadModel, with the shapes that transformers gives them."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (31, H), "wpe.weight": (8, H)}
    for i in range(LAYERS):
        shapes |= {f"h.{i}.{norm}.{kind}": (H,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
        for name, (rows, columns) in {
            "attn.c_attn": (H, 3 * H),
            "attn.c_proj": (H, H),
            "mlp.c_fc": (H, 4 * H),
            "mlp.c_proj": (4 * H, H),
        }.items():
            shapes |= {f"h.{i}.{name}.weight": (rows, columns), f"h.{i}.{name}.bias": (columns,)}
    shapes |= {"ln_f.weight": (H,), "ln_f.bias": (H,)}
    generator = torch.Generator().manual_seed(1)
    state = {f"transformer.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    head = state["transformer.wte.weight"] if tied else torch.randn((31, H), generator=generator)
    return state | {"lm_head.weight": head}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("tied", [True, False])
def test_there_and_back(tied: bool) -> None:
    theirs = gpt2(tied)
    ours = from_gpt2_state_dict(theirs, HEADS)
    assert ("head.output.weight" in ours) is not tied
    assert equal(to_gpt2_state_dict(ours, HEADS), theirs)
    assert equal(from_gpt2_state_dict(to_gpt2_state_dict(ours, HEADS), HEADS), ours)
    assert all(x.is_contiguous() for x in ours.values())


def test_names_and_shapes() -> None:
    ours = from_gpt2_state_dict(gpt2(), HEADS)
    assert {name: tuple(x.shape) for name, x in ours.items() if "blocks.1" in name or "blocks" not in name} == {
        "embedding.tokens.weight": (31, H),
        "embedding.positions.weight": (8, H),
        "blocks.1.attention_norm.weight": (H,),
        "blocks.1.attention_norm.bias": (H,),
        "blocks.1.attention.qkv.weight": (3 * H, H),
        "blocks.1.attention.qkv.bias": (3 * H,),
        "blocks.1.attention.output.weight": (H, H),
        "blocks.1.attention.output.bias": (H,),
        "blocks.1.mlp_norm.weight": (H,),
        "blocks.1.mlp_norm.bias": (H,),
        "blocks.1.mlp.up.weight": (4 * H, H),
        "blocks.1.mlp.up.bias": (4 * H,),
        "blocks.1.mlp.down.weight": (H, 4 * H),
        "blocks.1.mlp.down.bias": (H,),
        "head.norm.weight": (H,),
        "head.norm.bias": (H,),
    }


def test_each_heads_q_k_v_lie_together() -> None:
    theirs = gpt2()
    ours = from_gpt2_state_dict(theirs, HEADS)
    x = torch.randn(5, H)
    for i in range(LAYERS):
        attention = f"transformer.h.{i}.attn.c_attn"
        q, k, v = (x @ theirs[f"{attention}.weight"] + theirs[f"{attention}.bias"]).chunk(3, dim=-1)
        mine = torch.nn.functional.linear(x, *(ours[f"blocks.{i}.attention.qkv.{kind}"] for kind in ("weight", "bias")))
        mine = mine.view(5, HEADS, 3, DIM)
        for part, expected in enumerate((q, k, v)):
            torch.testing.assert_close(mine[:, :, part], expected.view(5, HEADS, DIM))


def test_masks_of_older_versions_and_the_bare_model_are_read() -> None:
    bare = {name.removeprefix("transformer."): x for name, x in gpt2().items() if name != "lm_head.weight"}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    assert equal(from_gpt2_state_dict(bare, HEADS), from_gpt2_state_dict(gpt2(), HEADS))


def test_what_is_no_gpt2_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"'model\.layers\.0\.mlp\.gate_proj\.weight', and GPT-2 has none"):
        from_gpt2_state_dict({"model.layers.0.mlp.gate_proj.weight": torch.zeros(2, 2)}, 1)
    with pytest.raises(CheckpointError, match=r"'blocks\.0\.attention\.rope', and GPT-2 has no place"):
        to_gpt2_state_dict(from_gpt2_state_dict(gpt2(), HEADS) | {"blocks.0.attention.rope": torch.zeros(2)}, HEADS)
    with pytest.raises(CheckpointError, match=r"num_heads = 5 does not divide the model's hidden size 24"):
        from_gpt2_state_dict(gpt2(), 5)


@pytest.mark.parametrize("name", ["embedding.positions.weight", "head.norm.weight"])
def test_a_model_without_what_gpt2_needs_is_refused(name: str) -> None:
    """ALiBi has no positions, post-LayerNorm no final norm: written without a word, another model would be read."""
    ours = from_gpt2_state_dict(gpt2(), HEADS)
    del ours[name]
    with pytest.raises(CheckpointError, match=f"The model has no {name}, and GPT-2 cannot be without"):
        to_gpt2_state_dict(ours, HEADS)
