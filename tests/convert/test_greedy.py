"""Greedy text of a converted model is what `generate` of transformers writes with the same weights."""

from pathlib import Path

import pytest
import torch

from tests.commands import forked
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
