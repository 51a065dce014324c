"""Small token files, and the real files that some tests compare with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from colonnade.data.tokenizer import Tokenizer
from colonnade.data.writer import TokenFileWriter

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.fixture(scope="session")
def gpt2() -> Tokenizer:
    """GPT-2's tokenizer."""
    folder = SHARED / "gpt2-bpe"
    if not folder.is_dir():
        pytest.skip(f"{folder} with GPT-2's encoder.json and vocab.bpe is not on this machine")
    return Tokenizer.load(folder)


@pytest.fixture(scope="session")
def megatron() -> Path:
    """The folder of token files that Megatron's own tools wrote."""
    folder = SHARED / "openwebtext"
    if not folder.is_dir():
        pytest.skip(f"{folder} with Megatron's .bin and .idx is not on this machine")
    return folder


@pytest.fixture
def write_tokens(tmp_path: Path) -> Callable[..., str]:
    """Writes documents of the given lengths whose tokens count up from 0 (modulo `vocab_size`); returns the prefix."""

    def write(*lengths: int, name: str = "tokens", dtype: str = "<u2", vocab_size: int = 60_000) -> str:
        prefix = str(tmp_path / name)
        start = 0
        with TokenFileWriter(prefix, np.dtype(dtype)) as writer:
            for length in lengths:
                writer.add_document(np.arange(start, start + length) % vocab_size)
                start += length
        return prefix

    return write
