"""Memory is a few tensors, however many a rank's file has."""

from pathlib import Path

import pytest

from tests.convert.measured import peak_of
from tests.megatron import written

HIDDEN, VOCAB, LAYERS = 512, 8192, 17


def write(folder: Path, layers: int) -> None:
    shape = {"hidden_size": HIDDEN, "num_attention_heads": 8, "kv_channels": 64, "ffn_hidden_size": 4 * HIDDEN}
    args = {**written.GPT, **shape, "num_layers": layers}
    written.write(folder, args, written.weights(args, vocab=VOCAB), tp=2)


@pytest.mark.slow
def test_seventeen_times_the_layers_take_no_more_memory(tmp_path: Path) -> None:
    """Of 12.6 MB each layer, and 16.8 MB the largest tensor: 201 MB more of weights, and less than 2 tensors more."""
    peaks = []
    for layers in (1, LAYERS):
        folder = tmp_path / f"theirs{layers}"
        write(folder, layers)
        peaks.append(peak_of("convert", folder, tmp_path / f"ours{layers}", "--vocab-size", VOCAB))
    table = VOCAB * HIDDEN * 4
    assert sum(path.stat().st_size for path in folder.rglob("*.pt")) > 12 * table
    assert peaks[1] - peaks[0] < 2 * table
