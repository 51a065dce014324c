"""Memory is a few tensors, however many a GGUF file has."""

from pathlib import Path

import numpy
import pytest

from tests.convert.measured import peak_of
from tests.gguf.written import NAMES

gguf = pytest.importorskip("gguf")
HIDDEN, FFN, VOCAB, LAYERS = 512, 2048, 8192, 17


def write(path: Path, layers: int, kind: gguf.GGMLQuantizationType) -> None:
    """A LLaMA whose numbers are all zero."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(8)
    writer.add_layer_norm_rms_eps(1e-5)

    def add(name: str, *shape: int) -> None:
        used = kind if len(shape) == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(numpy.zeros(shape, numpy.float32), used)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=used)

    add("token_embd", VOCAB, HIDDEN)
    add("output_norm", HIDDEN)
    for block in range(layers):
        for name in NAMES.values():
            if name.startswith(("attn_", "ffn_")) and name not in ("attn_q_norm", "attn_k_norm"):
                out, size = {"ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)}.get(
                    name, (HIDDEN, HIDDEN)
                )
                add(f"blk.{block}.{name}", *((HIDDEN,) if name.endswith("norm") else (out, size)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_seventeen_times_the_layers_take_no_more_memory(kind: str, tmp_path: Path) -> None:
    """Of 16.8 MB each layer in fp32, and 16.8 MB the largest tensor: 268 MB more, and less than 2 tensors more."""
    peaks = []
    for layers in (1, LAYERS):
        write(path := tmp_path / f"{layers}.gguf", layers, gguf.GGMLQuantizationType[kind])
        peaks.append(peak_of("convert", path, tmp_path / f"ours{layers}"))
    table = VOCAB * HIDDEN * 4
    assert sum(file.stat().st_size for file in (tmp_path / f"ours{LAYERS}").iterdir()) > 15 * table
    assert peaks[1] - peaks[0] < 2 * table
