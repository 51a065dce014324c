"""Checkpoints as Megatron-LM writes them, and what their models compute: with torch alone, from the published layout.

Nothing of the package is used. A model is a dict of whole weights, rows of q, k, v as [head, (q, k, v), d] (grouped:
[group, (q …, k, v), d]); `write` cuts it for ranks as its layers do, and `gpt_logits` computes with it in float64.
"""

import argparse
import copy
import enum
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.nn import functional

VOCAB = 61
PAD_TO = 8
"""make_vocab_size_divisible_by."""


class AttnMaskType(enum.Enum):
    """Its name in the file is that of Megatron's own, and it is written by its value, as by most versions of Python."""

    padding = 1
    causal = 2

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return type(self), (self.value,)


class LayerType(enum.Enum):
    """Another of them, written as Python 3.11.0 to 3.11.3 do."""

    encoder = 1
    decoder = 2

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        return getattr, (type(self), self.name)


ENUMS = "megatron.model.enums"
AttnMaskType.__module__ = LayerType.__module__ = ENUMS
ENUM_ARGS: dict[str, enum.Enum] = {"mask": AttnMaskType.causal, "layer_type": LayerType.decoder}

GPT: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "ffn_hidden_size": 36,
    "kv_channels": 4,
    "max_position_embeddings": 16,
    "seq_length": 12,
    "make_vocab_size_divisible_by": PAD_TO,
    "layernorm_epsilon": 1e-5,
    "openai_gelu": False,
    "bias_gelu_fusion": True,
    "init_method_std": 0.02,
    "apply_query_key_layer_scaling": True,
    "apply_residual_connection_post_layernorm": False,
    "params_dtype": torch.float32,
    "num_experts": None,
    "exit_signal": None,
}
LLAMA_LIKE: dict[str, Any] = {
    **GPT,
    "group_query_attention": True,
    "num_query_groups": 3,
    "add_bias_linear": False,
    "swiglu": True,
    "bias_gelu_fusion": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "untie_embeddings_and_output_weights": True,
}


def weights(args: dict[str, Any], *, bert: bool = False, seed: int = 0, vocab: int = VOCAB) -> dict[str, Tensor]:
    """Every weight of a model, random, without a layout or padding."""
    generator = torch.Generator().manual_seed(seed)
    h, f, n, d = (args[key] for key in ("hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels"))
    groups = args.get("num_query_groups", n) if args.get("group_query_attention") else n
    gated, bias = args.get("swiglu", False), args.get("add_bias_linear", True)
    norm_bias = args.get("normalization") != "RMSNorm"
    made: dict[str, Tensor] = {}

    def add(name: str, *shape: int, base: float = 0.0) -> None:
        made[name] = torch.randn(shape, generator=generator) * 0.3 + base

    def linear(name: str, out: int, size: int) -> None:
        add(f"{name}.weight", out, size)
        if bias:
            add(f"{name}.bias", out)

    def norm(name: str) -> None:
        add(f"{name}.weight", h, base=1.0)
        if norm_bias:
            add(f"{name}.bias", h)

    add("word_embeddings.weight", vocab, h)
    if args.get("position_embedding_type", "learned_absolute") == "learned_absolute":
        add("position_embeddings.weight", args["max_position_embeddings"], h)
    if bert:
        add("tokentype_embeddings.weight", 2, h)
    for i in range(args["num_layers"]):
        norm(f"layers.{i}.input_layernorm")
        linear(f"layers.{i}.query_key_value", (n + 2 * groups) * d, h)
        linear(f"layers.{i}.dense", h, n * d)
        norm(f"layers.{i}.post_attention_layernorm")
        linear(f"layers.{i}.dense_h_to_4h", (2 if gated else 1) * f, h)
        linear(f"layers.{i}.dense_4h_to_h", h, f)
    norm("final_layernorm")
    if args.get("untie_embeddings_and_output_weights"):
        add("output_layer.weight", vocab, h)
    if bert:
        linear("pooler.dense", h, h)
        linear("lm_head.dense", h, h)
        norm("lm_head.layernorm")
        add("lm_head.bias", vocab)
        linear("binary_head", 2, h)
    return made


def padded(x: Tensor, tp: int) -> Tensor:
    """Rows of a vocabulary, padded as Megatron does; what is in the padding means nothing."""
    rows = -(-len(x) // (PAD_TO * tp)) * PAD_TO * tp
    return torch.cat([x, torch.full((rows - len(x), *x.shape[1:]), 7.0)])


def shard(name: str, x: Tensor, rank: int, tp: int, args: dict[str, Any], version: float) -> Tensor:
    """What one tensor-parallel rank has, in a version's order."""
    if name in ("word_embeddings.weight", "output_layer.weight", "lm_head.bias"):
        return padded(x, tp).chunk(tp)[rank].clone()
    if ".dense_h_to_4h." in name:
        if args.get("swiglu"):
            gate, up = x.chunk(2)
            return torch.cat([gate.chunk(tp)[rank], up.chunk(tp)[rank]])
        return x.chunk(tp)[rank].clone()
    if name.startswith("layers.") and name.endswith((".dense.weight", ".dense_4h_to_h.weight")):
        return x.chunk(tp, 1)[rank].clone()
    if ".query_key_value." not in name:
        return x.clone()
    mine = x.chunk(tp)[rank]
    d = args["kv_channels"]
    heads = len(mine) // (3 * d)
    if version >= 2:
        return mine.clone()
    by_head = mine.view(heads, 3, d, *x.shape[1:])
    if version >= 1:
        return by_head.transpose(1, 2).reshape(mine.shape)  # [heads, d, 3]
    return by_head.transpose(0, 1).reshape(mine.shape)  # [3, heads, d]


def layer_name(name: str, style: str) -> str:
    """A name within a layer: `old` (2020), `new` (2021 on), `norm` (late 2023), `core` (megatron.core)."""
    attention = "attention" if style == "old" else "self_attention"
    if style == "core":
        return {
            "query_key_value": "self_attention.linear_qkv",
            "dense": "self_attention.linear_proj",
            "dense_h_to_4h": "mlp.linear_fc1",
            "dense_4h_to_h": "mlp.linear_fc2",
            "input_layernorm": "self_attention.linear_qkv.layer_norm",
            "post_attention_layernorm": "pre_mlp_layernorm",
        }[name]
    if name in ("query_key_value", "dense"):
        return f"{attention}.{name}"
    if name.startswith("dense"):
        return f"mlp.{name}"
    return name.replace("layernorm", "norm") if style == "norm" else name


def part_of(
    whole: dict[str, Tensor],
    args: dict[str, Any],
    layers: range,
    first: bool,
    last: bool,
    rank: int,
    tp: int,
    version: float,
    style: str,
    only: bool,
) -> dict[str, Any]:
    """The state dict of one rank's part of the model."""

    def of(name: str) -> Tensor:
        return shard(name, whole[name], rank, tp, args, version)

    def table(prefix: str) -> "OrderedDict[str, Tensor]":
        names = [name for name in whole if name.startswith(f"{prefix}.")]
        return OrderedDict((name.removeprefix(f"{prefix}."), of(name)) for name in names)

    blocks: OrderedDict[str, Any] = OrderedDict()
    for number, layer in enumerate(layers):
        for name in whole:
            if name.startswith(f"layers.{layer}."):
                _, _, module, kind = name.split(".")
                joint = "_" if style == "core" and module == "input_layernorm" else "."
                blocks[f"layers.{number}.{layer_name(module, style)}{joint}{kind}"] = of(name)
        if style == "core":
            blocks[f"layers.{number}.self_attention.core_attention._extra_state"] = None
    final = "final_norm" if style == "norm" else "final_layernorm"
    if last:
        blocks.update({f"{final}.{key}": x for key, x in table("final_layernorm").items()})
    embedding = {
        key: table(key)
        for key in ("word_embeddings", "position_embeddings", "tokentype_embeddings")
        if f"{key}.weight" in whole
    }
    tied = "output_layer.weight" not in whole
    if style == "core":
        flat: OrderedDict[str, Any] = OrderedDict()
        if first:
            flat.update({f"embedding.{key}.weight": x["weight"] for key, x in embedding.items()})
        flat.update({f"decoder.{key}": x for key, x in blocks.items()})
        if last and not tied:
            flat["output_layer.weight"] = of("output_layer.weight")
        elif last and not first:
            flat["output_layer.weight"] = of("word_embeddings.weight")
        return flat
    language: dict[str, Any] = {"embedding": embedding} if first else {}
    language["transformer" if style == "old" else "encoder"] = blocks
    if last and not tied:
        language["output_layer"] = table("output_layer")
    model: dict[str, Any] = {"language_model": language}
    if last and "pooler.dense.weight" in whole:
        language["pooler"] = table("pooler")
        model["lm_head"], model["binary_head"] = table("lm_head"), table("binary_head")
    if last and not first and tied:
        model["word_embeddings_for_head"] = table("word_embeddings")
    return model


def write(
    folder: Path,
    args: dict[str, Any],
    whole: dict[str, Tensor],
    *,
    tp: int = 1,
    pp: int = 1,
    virtual: int = 1,
    version: float = 3.0,
    style: str = "new",
    iteration: int = 5000,
    tracker: bool = True,
) -> Path:
    """A checkpoint's folder; returns that of the iteration."""
    import sys
    import types

    where = folder / f"iter_{iteration:07d}" if tracker else folder
    if tracker:
        where.mkdir(parents=True)
        (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    rows = len(padded(whole["word_embeddings.weight"], tp))
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "padded_vocab_size": rows}
    each = args["num_layers"] // (pp * virtual)
    chunks = [(c, p) for c in range(virtual) for p in range(pp)]
    modules = {name: types.ModuleType(name) for name in ("megatron", "megatron.model", ENUMS)}
    vars(modules[ENUMS]).update(AttnMaskType=AttnMaskType, LayerType=LayerType)
    sys.modules.update(modules)
    try:
        for p in range(pp):
            for rank in range(tp):
                content: dict[str, Any] = {
                    "args": argparse.Namespace(**args, **sizes, rank=p * tp + rank, **ENUM_ARGS),
                    "checkpoint_version": version,
                    "iteration": iteration,
                }
                for c in range(virtual):
                    number = chunks.index((c, p))
                    content["model" if virtual == 1 else f"model{c}"] = part_of(
                        whole,
                        args,
                        range(number * each, (number + 1) * each),
                        number == 0,
                        number == len(chunks) - 1,
                        rank,
                        tp,
                        version,
                        style,
                        len(chunks) == 1,
                    )
                moments = [torch.zeros(3), torch.ones(5)]
                content["optimizer"] = {
                    "optimizer": {"state": {0: {"exp_avg": moments}}},
                    "grad_scaler": {"scale": 1.0},
                }
                content["rng_state"] = [
                    {
                        "random_rng_state": (3, (1, 2, 3), None),
                        "np_rng_state": numpy.random.RandomState(0).get_state(),
                        "torch_rng_state": torch.get_rng_state(),
                    }
                ]
                name = f"mp_rank_{rank:02d}" if pp == 1 else f"mp_rank_{rank:02d}_{p:03d}"
                (where / name).mkdir(parents=True)
                torch.save(copy.deepcopy(content), where / name / "model_optim_rng.pt")
    finally:
        for name in modules:
            sys.modules.pop(name, None)
    return where


@torch.no_grad()
def gpt_logits(whole: dict[str, Tensor], args: dict[str, Any], tokens: Tensor) -> Tensor:
    """[s, b] -> [s, b, v] in float64."""
    w = {name: x.double() for name, x in whole.items()}
    n, d = args["num_attention_heads"], args["kv_channels"]
    groups = args.get("num_query_groups", n) if args.get("group_query_attention") else n
    s, b = tokens.shape
    rope = args.get("position_embedding_type") == "rope"
    x = w["word_embeddings.weight"][tokens]
    x = x if rope else x + w["position_embeddings.weight"][:s, None]

    def norm(name: str, x: Tensor) -> Tensor:
        epsilon = args["layernorm_epsilon"]
        if args.get("normalization") == "RMSNorm":
            return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * w[f"{name}.weight"]
        return functional.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], epsilon)

    def linear(name: str, x: Tensor) -> Tensor:
        return functional.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def turn(x: Tensor) -> Tensor:  # [s, b, n, d]
        angles = torch.arange(s).double()[:, None] * 10_000.0 ** -(torch.arange(0, d, 2).double() / d)
        both = torch.cat([angles, angles], -1)[:, None, None]
        half = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
        return x * both.cos() + half * both.sin()

    causal = torch.ones(s, s, dtype=torch.bool).tril()
    for i in range(args["num_layers"]):
        y = linear(f"layers.{i}.query_key_value", norm(f"layers.{i}.input_layernorm", x))
        y = y.view(s, b, groups, -1, d)
        q, k, v = y[..., :-2, :].reshape(s, b, n, d), y[..., -2, :], y[..., -1, :]
        k, v = (each.repeat_interleave(n // groups, 2) for each in (k, v))
        q, k = (turn(q), turn(k)) if rope else (q, k)
        scores = torch.einsum("sbnd,tbnd->bnst", q, k) / d**0.5
        seen = torch.einsum("bnst,tbnd->sbnd", scores.masked_fill(~causal, -torch.inf).softmax(-1), v)
        x = x + linear(f"layers.{i}.dense", seen.reshape(s, b, -1))
        y = linear(f"layers.{i}.dense_h_to_4h", norm(f"layers.{i}.post_attention_layernorm", x))
        if args.get("swiglu"):
            gate, up = y.chunk(2, -1)
            y = functional.silu(gate) * up
        else:
            y = functional.gelu(y, approximate="tanh" if args["bias_gelu_fusion"] or args["openai_gelu"] else "none")
        x = x + linear(f"layers.{i}.dense_4h_to_h", y)
    table = w.get("output_layer.weight", w["word_embeddings.weight"])
    return norm("final_layernorm", x) @ table.t()
