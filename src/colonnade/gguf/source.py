"""A GGUF file, understood: the config.json that its metadata stand for, and its tensors under the family's names.

llama.cpp turns neighbouring features of a head together, and its converter moved the rows of LLaMA's q and k for that;
they are moved back here. Qwen's rows stay as they were. Quantized numbers become fp32.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colonnade.architecture.huggingface.families import model_of
from colonnade.architecture.huggingface.keys import Keys, Refused, lines_of, shown
from colonnade.checkpoint.schema import clip
from colonnade.errors import CheckpointError, not_installed
from colonnade.gguf.header import FORMATS, Header, Laid, read_header
from colonnade.huggingface.files import CODES
from colonnade.huggingface.folder import Published, ids_in, matched, stub

ARCHITECTURES = ("llama", "qwen2", "qwen3")
FREQUENCIES = "rope_freqs.weight"
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_AT_ONCE = 1 << 22  # elements that are made of quantized ones at a time
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Packed:
    """One tensor of a file, to be read when asked for."""

    path: Path
    laid: Laid
    heads: int | None = None
    """Of rows that llama.cpp's converter has moved; None: it has not."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.laid.shape

    @property
    def dtype(self) -> torch.dtype:
        """fp32 for quantized numbers."""
        return _PLAIN.get(FORMATS[self.laid.code].name, torch.float32)

    @property
    def kind(self) -> str:
        return CODES[self.dtype]

    def read(self) -> Tensor:
        """Its numbers, in memory of their own. CheckpointError where the package for quantized ones is missing."""
        raw = np.memmap(self.path, np.uint8, "c", self.laid.start, (self.laid.num_bytes,))
        if FORMATS[self.laid.code].name in _PLAIN:
            x = torch.from_numpy(raw).clone().view(self.dtype).view(self.shape)
        else:
            x = self._dequantized(raw)
        if self.heads is None:
            return x
        moved = x.view(self.heads, -1, 2, *x.shape[1:])  # [n, d/2, (first, second half)]
        return moved.transpose(1, 2).reshape(x.shape)

    def _dequantized(self, raw: np.ndarray[Any, Any]) -> Tensor:
        dequantize, kinds = _package()
        blocks = raw.reshape(-1, FORMATS[self.laid.code].num_bytes)
        whole, at = torch.empty(math.prod(self.shape), dtype=torch.float32), 0
        step = max(1, _AT_ONCE // FORMATS[self.laid.code].elements)
        for first in range(0, len(blocks), step):
            made = torch.from_numpy(
                dequantize(np.array(blocks[first : first + step]), kinds(self.laid.code)).reshape(-1)
            )
            whole[at : at + len(made)] = made
            at += len(made)
        return whole.view(self.shape)


def _package() -> tuple[Any, Any]:
    """ggml's own decoding of quantized numbers."""
    try:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        instead = "name a GGUF file in F16, BF16 or F32"
        raise CheckpointError(
            not_installed("what reads quantized numbers of GGUF", "gguf", "colonnade[gguf]", instead)
        ) from None
    return dequantize, GGMLQuantizationType


def open_gguf(path: Path) -> tuple[Published, Header]:
    """Read all of a file but its numbers. CheckpointError says what is wrong with it."""
    header = read_header(path)
    try:
        content = config_of(header)
        family, model = model_of(content)
    except Refused as refused:
        raise CheckpointError(f"{path} describes a model that cannot be read:\n{lines_of(refused.lines)}") from None
    stub(path, model, "fp32")
    if any(each.code in FORMATS and FORMATS[each.code].name not in _PLAIN for each in header.tensors.values()):
        _package()
    moved = {"attn_q": model.num_heads, "attn_k": model.key_value_heads} if _arch(header) == "llama" else {}
    found = {}
    for laid in header.tensors.values():
        if laid.name != FREQUENCIES:
            name, module = _theirs(laid.name)
            heads = moved.get(module)
            if heads is not None and laid.shape[0] % (2 * heads):
                raise CheckpointError(f"{path} has {clip(laid.name)} as {list(laid.shape)}, and {heads} heads.")
            found[name] = Packed(path, laid, heads)
    sources, stored = matched(path, family, model, found, described="its metadata")
    tied_by = "it has no output layer of its own"
    assert model.vocab_size is not None, "every family reads it"
    return Published(path, family, model, model.vocab_size, sources, stored, _facts(header), tied_by), header


def _arch(header: Header) -> str:
    return str(header.metadata.get("general.architecture"))


def _facts(header: Header) -> dict[str, Any]:
    """What begins a text, and what ends one: a document, a turn (eot) or a message (eom)."""
    begin, *ends = (header.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "eot", "eom"))
    found = list(dict.fromkeys(each for each in ends if type(each) is int))
    ids = {"bos_token_id": begin, "eos_token_id": found if len(found) > 1 else next(iter(found), None)}
    return {key: value for key, value in ids.items() if ids_in(value)}


def _theirs(name: str) -> tuple[str, str]:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`, and `attn_q`."""
    *block, module, kind = name.split(".") if "." in name else ("", name)
    if module not in _NAMES:
        return name, module
    inner = _NAMES[module]
    if len(block) == 2 and block[0] == "blk" and block[1].isdecimal():
        return f"model.layers.{int(block[1])}.{inner}.{kind}", module
    return f"{inner}.{kind}", module


def config_of(header: Header) -> dict[str, Any]:
    """The config.json that a file's metadata stand for. Refused: other architectures, and keys that nobody knows."""
    arch, metadata = _arch(header), header.metadata
    if arch not in ARCHITECTURES:
        raise Refused([f"general.architecture = {shown(arch)}: {', '.join(ARCHITECTURES)} are read"])
    if metadata.get("split.count", 1) not in (0, 1):
        raise Refused(["split.count: the model is in several files. Join them first: `llama-gguf-split --merge`"])
    keys = Keys({key.removeprefix(f"{arch}."): x for key, x in metadata.items() if key.startswith(f"{arch}.")})
    table = header.tensors.get("token_embd.weight")
    if table is None:
        raise Refused(["there is no token_embd.weight"])
    heads = keys.take("attention.head_count", int)
    width = keys.take("embedding_length", int)
    head_dim = keys.take("attention.key_length", int, width // max(heads, 1))
    keys.fixed("attention.value_length", head_dim, why="keys and values are equally wide here")
    keys.fixed("rope.dimension_count", head_dim, why="rotary positions of these families turn whole heads here")
    keys.fixed("expert_count", 0, why="its MLP is a mixture of experts, and there are none here")
    keys.fixed("expert_used_count", 0, why="its MLP is a mixture of experts, and there are none here")
    keys.fixed("vocab_size", table.shape[0], why=f"token_embd.weight has {table.shape[0]:,} rows")
    window = keys.take("attention.sliding_window", int, None)
    content: dict[str, Any] = {
        "model_type": "mistral" if arch == "llama" and window else arch,
        "num_hidden_layers": keys.take("block_count", int),
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.take("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "intermediate_size": keys.take("feed_forward_length", int),
        "max_position_embeddings": keys.take("context_length", int),
        "rms_norm_eps": keys.take("attention.layer_norm_rms_epsilon", float, 1e-5),
        "vocab_size": table.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": _rope(header, keys, head_dim),
    }
    if window and arch != "llama":
        content |= {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    elif window:
        content["sliding_window"] = window
    if arch == "llama" and not window:
        content["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
        content["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    keys.finish()
    return content


def _rope(header: Header, keys: Keys, head_dim: int) -> dict[str, Any]:
    """`rope_parameters`. LLaMA 3.1's rule is not among the keys: its divisors are a tensor. A factor without a type is
    linear, as llama.cpp has it.
    """
    base, factor = keys.take("rope.freq_base", float, 10_000.0), keys.take("rope.scaling.factor", float, None)
    kind = keys.take("rope.scaling.type", str, "none" if factor is None else "linear")
    length = keys.take("rope.scaling.original_context_length", int, None)
    keys.ignore("rope.scaling.finetuned")
    found: dict[str, Any] = {"rope_theta": base, "rope_type": "default"}
    if kind not in ("none", "linear", "yarn"):
        keys.refuse(f"rope.scaling.type = {shown(kind)}: none, linear and yarn are read")
    elif kind != "none":
        found |= {"rope_type": kind, "factor": factor or 1.0}
        found |= {"original_max_position_embeddings": length} if kind == "yarn" and length else {}
    laid = header.tensors.get(FREQUENCIES)
    if laid is None:
        return found
    if found.get("factor", 1.0) != 1.0:
        keys.refuse(f"rope.scaling.factor = {shown(factor)} beside {FREQUENCIES}: one rule for longer texts is read")
    divisors = Packed(header.path, laid).read().double().flatten()
    scaled = {**found, "rope_type": "llama3", "factor": round(float(divisors.max()), 4), **_LLAMA3}
    expected = _llama3_divisors(scaled, head_dim)
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-4):
        keys.refuse(f"{FREQUENCIES} does not hold what LLaMA 3's rule gives for a factor of {scaled['factor']:g}")
    return scaled


def _llama3_divisors(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """[d/2] What each plane's angle is divided by ("The Llama 3 Herd of Models", 2024)."""
    length, low, high, factor = (
        float(rope[key])
        for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "factor")
    )
    waves = 2 * math.pi * rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    kept = ((length / waves - low) / (high - low)).clamp(0.0, 1.0)
    divisors: Tensor = 1.0 / (kept + (1.0 - kept) / factor)
    return divisors
