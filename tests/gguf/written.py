"""GGUF files as llama.cpp's converter writes them, of random models of transformers."""

from pathlib import Path
from typing import Any

import gguf
import numpy
import torch

from tests.convert.published import VOCAB, tokenizer

NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def name_of(theirs: str) -> str:
    *path, module, kind = theirs.split(".")
    block = f"blk.{path[path.index('layers') + 1]}." if "layers" in path else ""
    return f"{block}{NAMES[module]}.{kind}"


def permuted(x: numpy.ndarray[Any, Any], heads: int) -> numpy.ndarray[Any, Any]:
    """As LlamaModel.permute of convert_hf_to_gguf.py."""
    rows = x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:])
    return rows.swapaxes(1, 2).reshape(x.shape)


def write(path: Path, model: Any, arch: str, kind: gguf.GGMLQuantizationType, **keys: Any) -> dict[str, torch.Tensor]:
    """A file of `model`; returns its weights as the file has them, rounded, by transformers' names."""
    c, writer = model.config, gguf.GGUFWriter(path, arch)
    width = c.hidden_size // c.num_attention_heads
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_file_type(0)
    if getattr(c, "head_dim", width) != width:
        writer.add_key_length(c.head_dim)
        writer.add_value_length(c.head_dim)
    writer.add_vocab_size(VOCAB)
    for key, value in keys.items():
        getattr(writer, key)(value)
    rope = c.rope_parameters
    if rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** -(torch.arange(0, width, 2).double() / width)
        scaled = model.model.rotary_emb.inv_freq.double()
        writer.add_tensor("rope_freqs.weight", (plain / scaled).float().numpy())
    state = {}
    for theirs, parameter in model.named_parameters():
        x = parameter.detach().float().numpy()
        heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}.get(theirs.split(".")[-2])
        stored = permuted(x, heads) if arch == "llama" and heads is not None else x
        used = kind if x.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(stored, used)
        writer.add_tensor(name_of(theirs), data, raw_dtype=used)
        rounded = gguf.quants.dequantize(data, used).reshape(stored.shape)
        if arch == "llama" and heads is not None:  # back, by where each row went
            place = permuted(numpy.arange(x.shape[0]), heads)
            back = numpy.empty_like(rounded)
            back[place] = rounded
            rounded = back
        state[theirs] = torch.from_numpy(numpy.array(rounded))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return state


def words(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text(tokenizer().to_str())
    return folder / "tokenizer.json"
