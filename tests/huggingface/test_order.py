"""The order of rows, spelled out: which number goes where, by hand."""

import pytest
import torch

from colonnade.architecture.huggingface.families import FAMILIES, family_of, model_of
from colonnade.architecture.huggingface.statement import Source
from colonnade.architecture.statement import Weight
from colonnade.config.model import ModelConfig
from colonnade.huggingface.order import to_ours, to_theirs


def source(theirs: int, *, transposed: bool = False, fused: int = 1) -> Source:
    names = tuple(f"part{number}" for number in range(theirs))
    return Source("ours", Weight("weight", (12, 5)), names, (12 // theirs, 5), transposed, fused)


def rows(*numbers: int) -> torch.Tensor:
    """[n, 5], each row of one number."""
    return torch.tensor(numbers)[:, None].expand(len(numbers), 5).clone()


@pytest.mark.parametrize("vector", [False, True])
def test_each_heads_q_k_v_lie_together(vector: bool) -> None:
    """Two heads of width 2: q of both heads is 0 1 2 3, k 10 …, v 20 …"""
    q, k, v = (rows(*range(start, start + 4)) for start in (0, 10, 20))
    ours = rows(0, 1, 10, 11, 20, 21, 2, 3, 12, 13, 22, 23)
    if vector:
        q, k, v, ours = q[:, 0], k[:, 0], v[:, 0], ours[:, 0]
    assert torch.equal(to_ours(source(3), [q, k, v], 2), ours)
    assert torch.equal(to_ours(source(1, fused=3), [torch.cat([q, k, v])], 2), ours)
    for part, expected in zip(to_theirs(source(3), ours, 2), (q, k, v), strict=True):
        assert torch.equal(part, expected) and part.is_contiguous()
    (fused,) = to_theirs(source(1, fused=3), ours, 2)
    assert torch.equal(fused, torch.cat([q, k, v]))


def test_transposes() -> None:
    theirs = torch.arange(60).view(5, 12)
    ours = to_ours(source(1, transposed=True), [theirs], 2)
    assert ours.shape == (12, 5) and ours[7, 3] == theirs[3, 7]
    (back,) = to_theirs(source(1, transposed=True), ours, 2)
    assert torch.equal(back, theirs) and back.is_contiguous()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_has_a_place_for_what_its_models_hold_and_no_tensor_twice(model_type: str) -> None:
    family = FAMILIES[model_type]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
    for tied in (True, False):
        content = {"model_type": model_type, **sizes, "vocab_size": 7, "tie_word_embeddings": tied}
        if model_type == "bloom":
            del content["intermediate_size"]
        if model_type == "gpt2":
            content["n_inner"] = content.pop("intermediate_size")
        if model_type == "t5":
            names = ("d_model", "num_layers", "num_heads", "d_ff")
            content |= {ours: content.pop(name) for ours, name in zip(names, sizes, strict=True)}
        read, model = model_of(content)
        assert read is family and model.tie_embeddings is tied
        theirs = [name for each in family.sources(model, 7) for name in each.theirs]
        assert len(set(theirs)) == len(theirs)
        assert family_of(model, 7)[0].places == family.places, "a model of the family becomes one again"


def test_presets_have_their_families() -> None:
    for preset, title in (
        ("gpt2-124m", "GPT-2"),
        ("bloom-176b", "BLOOM"),
        ("llama2-7b", "LLaMA"),
        ("llama3.1-8b", "LLaMA"),
        ("smollm-135m", "LLaMA"),
        ("pythia-160m", "GPT-NeoX"),
        ("qwen2.5-0.5b", "Qwen 2"),
        ("qwen3-0.6b", "Qwen 3"),
        ("bert-base", "BERT"),
        ("bert-1.3b", "Megatron-BERT"),
    ):
        model = ModelConfig(preset=preset)
        assert model.vocab_size is not None
        assert family_of(model, model.vocab_size)[0].title == title
