"""Greedy text of a converted model is what `generate` of transformers writes with the same weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import forked, here
from tests.convert.published import MODELS, saved, tokenizer
from tests.convert.test_round_trip import converted

DEFAULT = ("pythia", "qwen2")
GPTS = [name for name in MODELS if "bert" not in name and "t5" not in name]
PROMPT = "w5 w9 w12 w40"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.slow) for name in GPTS]
)
def test_greedy_text_is_theirs(name: str, tmp_path: Path) -> None:
    twin = saved(tmp_path / "theirs", name).double().eval()
    converted(tmp_path / "theirs", tmp_path / "ours")
    ids = torch.tensor([tokenizer().encode(PROMPT).ids])
    made = twin.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0)
    text = tokenizer().decode(made[0].tolist(), skip_special_tokens=False).partition("<|endoftext|>")[0].rstrip()
    options = ["--temperature", 0, "--max-new-tokens", 12, "--precision", "fp64"]
    answer = forked("generate", tmp_path / "ours", "--prompt", PROMPT, *options)
    # words of this tokenizer have no space of their own: where the prompt ends, none is written
    assert answer.status == 0 and "".join(answer.out.split()) == "".join(text.split()), (answer, text)
    assert len(text.split()) > 6


@pytest.mark.parametrize(
    "said",
    [
        {"generation_config.json": {"eos_token_id": [60, None]}, "config.json": {"eos_token_id": 2}},
        {"generation_config.json": {}, "config.json": {"eos_token_id": None}},
        {"tokenizer_config.json": {"eos_token": {"content": None}}},
    ],
    ids=lambda said: next(iter(said)),
)
def test_a_text_ends_where_the_published_model_says(said: dict[str, Any], tmp_path: Path) -> None:
    """Whatever the token is called; None stands for it."""
    folder, options = tmp_path / "theirs", ["--prompt", PROMPT, "--temperature", 0, "--max-new-tokens", 12, "--json"]
    twin = saved(folder, "qwen2").eval()
    ids = torch.tensor([tokenizer().encode(PROMPT).ids])
    mask = torch.ones_like(ids)
    (made,) = twin.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
    new = made[ids.shape[1] :].tolist()
    end = new[4]
    for name, content in said.items():
        file = folder / name
        kept = json.loads(file.read_text()) if file.exists() else {}
        text = json.dumps(content).replace("null", json.dumps(f"w{end}" if "tokenizer" in name else end))
        file.write_text(json.dumps(kept | json.loads(text)))
    converted(folder, tmp_path / "ours")
    answer = here("generate", tmp_path / "ours", *options)
    (text,) = json.loads(answer.out)["texts"]
    shown = "".join(tokenizer().decode(new[: new.index(end)]).split())
    assert (text["end"], text["tokens"], "".join(text["text"].split())) == ("stop", new.index(end) + 1, shown)
