"""A small GPT-2 of `transformers` with a byte-level BPE, and our checkpoint of the same weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.data.tokenizer import Tokenizer
from tests.commands import forked, here

transformers = pytest.importorskip("transformers")


@dataclass(frozen=True)
class Pair:
    """Theirs and ours."""

    theirs: Path
    ours: Path
    twin: Any
    """Theirs, in float64."""
    tokenizer: Tokenizer


def make_pair(folder: Path, tokenizer: Tokenizer, *, seq_length: int) -> Pair:
    """Both, with random weights that prefer some tokens to others."""
    config = transformers.GPT2Config(
        vocab_size=tokenizer.vocab_size,
        n_positions=seq_length,
        n_embd=24,
        n_layer=2,
        n_head=4,
        bos_token_id=tokenizer.end_of_document,
        eos_token_id=tokenizer.end_of_document,
    )
    model = transformers.GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator) * 0.3
        parameter.data = drawn + (parameter.ndim == 1)
    model.save_pretrained(folder / "theirs")
    tokenizer.save(folder / "theirs" / "tokenizer.json")
    end = "<|endoftext|>"
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": end}
    (folder / "theirs" / "tokenizer_config.json").write_text(json.dumps(content))
    answer = here("convert", folder / "theirs", folder / "ours")
    assert (answer.status, answer.err) == (0, ""), answer
    return Pair(folder / "theirs", folder / "ours", model.double().eval(), tokenizer)


def measured(pair: Pair, *arguments: object, num_ranks: int = 1) -> dict[str, Any]:
    """What `evaluate … --json` tells, in float64."""
    answer = forked("evaluate", pair.ours, *arguments, "--precision", "fp64", "--json", num_ranks=num_ranks)
    assert answer.status == 0 and answer.out.count("\n") == 1, answer
    told: dict[str, Any] = json.loads(answer.out)
    return told
