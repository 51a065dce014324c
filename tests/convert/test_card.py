"""The model card of a converted checkpoint, line by line."""

from types import SimpleNamespace
from typing import Any

import pytest

from colonnade.architecture.families import architecture_of
from colonnade.architecture.huggingface.families import FAMILIES
from colonnade.config.model import ModelConfig
from colonnade.convert.card import card
from tests.parity.runs import SERIAL, Case, configured

MODEL = ModelConfig(num_layers=1, hidden_size=24, num_heads=4, seq_length=2048, vocab_size=1200)
TABLE = """\
| | |
|---|---|
| class | `GPT2LMHeadModel` |
| parameters | {parameters:,} |
| shape | 1 layer, hidden 24, 4 heads |
| positions | 2,048 (learned) |
| vocabulary | 1,200 |
| number format | bfloat16 |
"""


def made(came: Any, *files: str, train: str | None = None, model: ModelConfig = MODEL, **more: object) -> str:
    config = configured(Case(), SERIAL)
    of_run = {
        "model": model,
        "run": config.run.model_copy(update={"folder": "/disk/of/mine/gpt-small"}),
        "data": config.data.model_copy(update={"train": train}),
    }
    metadata: Any = SimpleNamespace(step=1234, samples=5000, model=SimpleNamespace(vocab_size=1200))
    manifest: Any = SimpleNamespace(metadata={**more, **({} if came is None else {"converted_from": came})})
    return card(config.model_copy(update=of_run), metadata, manifest, FAMILIES["gpt2"], "bfloat16", files)


def test_a_trained_model_is_described_by_its_run() -> None:
    text = made(None, "config.json", train="https://you:secret@host/corpus/news")
    assert text.startswith("---\nlibrary_name: transformers\ntags:\n- colonnade\n- gpt2\n---\n\n# gpt-small\n\n")
    assert TABLE.format(parameters=architecture_of(MODEL, 1200).num_parameters) in text
    lines = text.splitlines()
    assert (
        "Trained by the run `gpt-small` with Colonnade, step 1,234 of 5: 5,000 samples, up to 10,240,000 tokens."
        in (lines)
    )
    assert "- optimizer: adamw, learning rate 0.01, cosine decay, 8 samples a step, computed in fp64" in lines
    assert "- token files: `news`" in lines and "/disk" not in text and "secret" not in text
    assert "from transformers import GPT2LMHeadModel" in lines and "AutoTokenizer" not in text, "it has none"


@pytest.mark.parametrize(
    ("merged", "said"),
    [
        ({"step": 2, "samples": 16}, "step 2 of 5: 16 samples, up to 32,768 tokens."),
        ({"step": 2}, "step 2 of 5."),
        ({"step": "2", "samples": -1}, "step 1,234 of 5."),
    ],
)
def test_what_was_merged_is_described_by_the_run_of_its_adapters(merged: dict[str, object], said: str) -> None:
    """A merge begins at step 0 again. Its metadata did not tell of samples at first, and may be a stranger's."""
    assert f"Trained by the run `gpt-small` with Colonnade, {said}" in made(None, merged_from=merged).splitlines()


@pytest.mark.parametrize(("came", "name"), [({"name": "their-model"}, "their-model"), ({}, "?")])
def test_a_model_of_others_is_described_by_where_it_came_from(came: dict[str, str], name: str) -> None:
    """And not by a run that there was not."""
    text = made(came, "tokenizer.json")
    assert f"# {name}\n\nConverted from `{name}` (GPT-2) without training in between.\n\n{TABLE[:5]}" in text
    assert "samples" not in text and "optimizer" not in text and "gpt-small" not in text
    assert "from transformers import GPT2LMHeadModel, AutoTokenizer" in text
    assert 'tokenizer = AutoTokenizer.from_pretrained("this folder")' in text


@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        ({"head": "preferences"}, "20,480,000"),
        ({"kind": "bert", "head": "choice", "num_labels": 4}, "40,960,000"),
    ],
)
def test_the_tokens_of_a_sample_are_those_of_all_its_texts(model: dict[str, Any], tokens: str) -> None:
    text = made(None, model=MODEL.model_copy(update=model))
    assert f"step 1,234 of 5: 5,000 samples, up to {tokens} tokens." in text


def test_a_run_without_token_files_names_none() -> None:
    assert "- token files" not in made(None)
