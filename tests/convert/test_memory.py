"""Memory is a few tensors, however many there are: of a model that is large without being there (a sparse file)."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.convert import sparse_folder, taken_by
from colonnade.config.model import ModelConfig
from tests.blocks import LLAMA_BLOCK
from tests.convert.measured import peak_of

SHAPE = {**LLAMA_BLOCK, "hidden_size": 512, "num_heads": 8, "ffn_hidden_size": 2048, "vocab_size": 8192}
GIGABYTE = 1 << 30


@pytest.mark.slow
def test_seventeen_times_the_layers_take_no_more_memory(tmp_path: Path) -> None:
    """Of 16.8 MB each layer, and 16.8 MB the largest tensor: 268 MB more of weights, and less than 2 tensors more."""
    sizes, peaks = [], []
    for layers in (1, 17):
        theirs, ours, back = (tmp_path / f"{name}{layers}" for name in ("theirs", "ours", "back"))
        sizes.append(sparse_folder(theirs, ModelConfig(num_layers=layers, seq_length=128, **SHAPE), torch.float32))
        peaks.append((peak_of("convert", theirs, ours), peak_of("convert", ours, back)))
    table = 8192 * 512 * 4
    assert sizes[1] - sizes[0] > 15 * table
    for little, much in zip(*peaks, strict=True):
        assert much - little < 2 * table


def pickled(folder: Path, layers: int) -> Path:
    """A GPT-2 of zeros as `torch.save` writes it."""
    h, shapes = 512, {"wte.weight": (8192, 512), "wpe.weight": (128, 512), "ln_f.weight": (512,), "ln_f.bias": (512,)}
    for layer in range(layers):
        for name, wide in (("attn.c_attn", 3 * h), ("attn.c_proj", h), ("mlp.c_fc", 4 * h)):
            shapes |= {f"h.{layer}.{name}.weight": (h, wide), f"h.{layer}.{name}.bias": (wide,)}
        shapes |= {f"h.{layer}.mlp.c_proj.weight": (4 * h, h), f"h.{layer}.mlp.c_proj.bias": (h,)}
        shapes |= {f"h.{layer}.ln_{norm}.{kind}": (h,) for norm in (1, 2) for kind in ("weight", "bias")}
    folder.mkdir()
    sizes = {"n_embd": h, "n_layer": layers, "n_head": 8, "n_positions": 128, "vocab_size": 8192}
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    torch.save({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "pytorch_model.bin")
    return folder


@pytest.mark.slow
def test_a_state_dict_of_torch_takes_no_more_memory_with_more_layers(tmp_path: Path) -> None:
    """Of 12.6 MB each layer: 201 MB more of weights, and less than 2 of the largest tensor more."""
    peaks = []
    for layers in (1, 17):
        folder = pickled(tmp_path / f"theirs{layers}", layers)
        peaks.append(peak_of("convert", folder, tmp_path / f"ours{layers}"))
    table = 8192 * 512 * 4
    assert (folder / "pytorch_model.bin").stat().st_size > 12 * table
    assert peaks[1] - peaks[0] < 2 * table


@pytest.mark.slow
def test_the_memory_of_who_measures_is_not_counted() -> None:
    torch.ones(GIGABYTE, dtype=torch.uint8)
    assert 0 < taken_by("--version").peak_bytes < GIGABYTE
    assert 0 < peak_of("--version") < GIGABYTE
