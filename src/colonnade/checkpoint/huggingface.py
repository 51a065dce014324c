"""GPT-2's weights under Hugging Face's names and under ours, and back. Both directions are exact.

theirs (Conv1D: [in, out], applied as x·W)       ours (Linear: [out, in], applied as x·Wᵀ)
transformer.wte.weight          [v, h]           embedding.tokens.weight        [v, h]
transformer.wpe.weight          [S, h]           embedding.positions.weight     [S, h]
h.{i}.ln_1.weight, .bias        [h]              blocks.{i}.attention_norm.…    [h]
h.{i}.attn.c_attn.weight        [h, 3h]          blocks.{i}.attention.qkv.…     [3h, h]    columns q|k|v, each by heads
                                                                                           → rows [head, (q, k, v), d]
h.{i}.attn.c_proj.weight        [h, h]           blocks.{i}.attention.output.…  [h, h]
h.{i}.ln_2.weight, .bias        [h]              blocks.{i}.mlp_norm.…          [h]
h.{i}.mlp.c_fc.weight           [h, f]           blocks.{i}.mlp.up.…            [f, h]
h.{i}.mlp.c_proj.weight         [f, h]           blocks.{i}.mlp.down.…          [h, f]
transformer.ln_f.weight, .bias  [h]              head.norm.…                    [h]
lm_head.weight                  [v, h]           head.output.weight             [v, h]     only where it is not tied
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from colonnade.errors import CheckpointError

OUTSIDE = {"wte.weight": "embedding.tokens.weight", "wpe.weight": "embedding.positions.weight"}
OUTSIDE |= {f"ln_f.{kind}": f"head.norm.{kind}" for kind in ("weight", "bias")}
OUTPUT = ("lm_head.weight", "head.output.weight")
INSIDE = {
    "ln_1": "attention_norm",
    "attn.c_attn": "attention.qkv",
    "attn.c_proj": "attention.output",
    "ln_2": "mlp_norm",
    "mlp.c_fc": "mlp.up",
    "mlp.c_proj": "mlp.down",
}
MASKS = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")  # constants that older versions of transformers stored
PREFIX = "transformer."


def from_gpt2_state_dict(state_dict: Mapping[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """A GPT-2 state dict of `transformers` (with or without the `transformer.` prefix) under our names and layouts.

    `lm_head.weight` is left out where it equals the token embedding (tied). CheckpointError names what is no GPT-2's.
    """
    theirs = {name.removeprefix(PREFIX): x for name, x in state_dict.items()}
    theirs = {name: x for name, x in theirs.items() if not MASKS.fullmatch(name)}
    output = theirs.pop(OUTPUT[0], None)
    ours = {_our_name(name): _our_layout(name, x, num_heads) for name, x in theirs.items()}
    if output is not None and not torch.equal(output, ours[OUTSIDE["wte.weight"]]):
        ours[OUTPUT[1]] = output.clone()
    return ours


def to_gpt2_state_dict(weights: Mapping[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """Our logical weights as a state dict for `transformers.GPT2LMHeadModel`, `lm_head.weight` included.

    CheckpointError names what GPT-2 has no place for, and what it has that the model lacks.
    """
    ours = dict(weights)
    lacking = [name for name in ("embedding.positions.weight", "head.norm.weight") if name not in ours]
    if lacking:
        raise CheckpointError(
            f"The model has no {' and no '.join(lacking)}, and GPT-2 cannot be without: only models built as GPT-2 "
            "(learned positions, pre-LayerNorm, GELU) can be written as one."
        )
    output = ours.pop(OUTPUT[1], ours.get(OUTSIDE["wte.weight"]))
    names = {name: _their_name(name) for name in ours}
    theirs = {PREFIX + names[name]: _their_layout(names[name], x, num_heads) for name, x in ours.items()}
    if output is not None:
        theirs[OUTPUT[0]] = output.clone()
    return theirs


def _our_name(name: str) -> str:
    if name in OUTSIDE:
        return OUTSIDE[name]
    match = re.fullmatch(r"h\.(\d+)\.(.+)\.(weight|bias)", name)
    if match is None or match[2] not in INSIDE:
        raise CheckpointError(
            f"The state dict has a tensor {name!r}, and GPT-2 has none of that name: only GPT-2 models can be read. "
            f"Give the state dict of a transformers.GPT2LMHeadModel or GPT2Model."
        )
    return f"blocks.{match[1]}.{INSIDE[match[2]]}.{match[3]}"


def _their_name(name: str) -> str:
    outside = {ours: theirs for theirs, ours in OUTSIDE.items()}
    if name in outside:
        return outside[name]
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
    inside = {ours: theirs for theirs, ours in INSIDE.items()}
    if match is None or match[2] not in inside:
        raise CheckpointError(
            f"The model has a tensor {name!r}, and GPT-2 has no place for it: only models built as GPT-2 (learned "
            f"positions, pre-LayerNorm, GELU) can be written as one."
        )
    return f"h.{match[1]}.{inside[match[2]]}.{match[3]}"


def _our_layout(name: str, x: Tensor, num_heads: int) -> Tensor:
    x = x.t() if _is_conv1d(name) else x  # [in, out] -> [out, in]
    return (
        _reorder(x, (3, num_heads), num_heads) if ".c_attn." in name else x.clone(memory_format=torch.contiguous_format)
    )


def _their_layout(name: str, x: Tensor, num_heads: int) -> Tensor:
    x = _reorder(x, (num_heads, 3), num_heads) if ".c_attn." in name else x
    x = x.t() if _is_conv1d(name) else x  # [out, in] -> [in, out]
    return x.clone(memory_format=torch.contiguous_format)


def _is_conv1d(name: str) -> bool:
    return ".c_" in name and name.endswith(".weight")


def _reorder(x: Tensor, order: tuple[int, int], num_heads: int) -> Tensor:
    """Swap the two outer parts of dim 0: [(3, n, d), …] <-> [(n, 3, d), …]."""
    if x.shape[0] % (3 * num_heads):
        raise CheckpointError(
            f"num_heads = {num_heads} does not divide the model's hidden size {x.shape[0] // 3}: q, k and v need whole "
            f"heads. Set model.num_heads to that of the model which is read (its config.json calls it n_head)."
        )
    return x.reshape(*order, -1, *x.shape[1:]).transpose(0, 1).reshape(x.shape).contiguous()
