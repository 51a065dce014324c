"""Generation: the cache against recomputing, every tp against the serial run, ends, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch

from colonnade.errors import ConfigError, DataError
from colonnade.generation import sample
from colonnade.generation.choose import choose
from colonnade.generation.sample import Generated, Stages, generate, next_logits
from colonnade.generation.sampling import Sampling
from colonnade.generation.texts import Continued
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, build_mesh, paper_mesh
from colonnade.model.gpt import GPT
from colonnade.pipeline.chunk import Chunk
from colonnade.pipeline.inference import Inference, ResidentWeights
from tests.distributed import run_on_ranks
from tests.generation.tiny import tiny_gpt
from tests.model.whole import hidden

SERIAL = Axis("tp")
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8]]
SAMPLED = {"temperature": 0.8, "top_k": 9, "top_p": 0.95, "seed": 3}


def tokens_of(generated: list[Generated], prompt: int) -> list[int]:
    return [new.token for new in generated if new.prompt == prompt]


def without_a_cache(model: GPT, prompt: list[int], number: int, count: int, sampling: Sampling) -> list[int]:
    """The whole text through the model again for every token."""
    text = list(prompt)
    for _ in range(count):
        text.append(choose(next_logits(Stages(model, SERIAL), text), sampling, prompt=number, position=len(text)))
    return text[len(prompt) :]


@pytest.mark.parametrize("how", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_with_the_cache_is_as_without(how: dict[str, Any]) -> None:
    model = tiny_gpt(SERIAL)
    generated = list(generate(Stages(model, SERIAL), PROMPTS, max_new_tokens=5, **how))
    assert [new.prompt for new in generated] == [0] * 5 + [1] * 5 + [2] * 5
    texts = [tokens_of(generated, number) for number in range(3)]
    assert texts == [without_a_cache(model, p, n, 5, Sampling(**how)) for n, p in enumerate(PROMPTS)]
    assert len({token for text in texts for token in text}) > 4, "the model of this test says more than one thing"


@pytest.mark.parametrize("cuts", [[10], [1] * 10, [3, 4, 1, 2]], ids=["at once", "one by one", "in pieces"])
def test_cached_logits_are_those_of_the_whole_text(cuts: list[int]) -> None:
    model, text = tiny_gpt(SERIAL), [7, 0, 20, 3, 3, 11, 2, 19, 5, 1]
    caches, done = model.empty_caches(10), 0
    for count in cuts:
        cached = next_logits(Stages(model, SERIAL), text[done : done + count], caches, done)
        done += count
        np.testing.assert_allclose(cached, next_logits(Stages(model, SERIAL), text[:done]), rtol=1e-12, atol=1e-13)


def test_logits_are_those_of_a_plain_product() -> None:
    model = tiny_gpt(SERIAL, tie_embeddings=False)
    x = hidden(model, torch.tensor([[4], [8]]))
    plain = model.head.norm(x)[-1, 0] @ model.head.output.weight.T
    np.testing.assert_allclose(next_logits(Stages(model, SERIAL), [4, 8]), plain.detach().numpy(), rtol=1e-12)


def test_a_prompt_alone_is_continued_as_among_others() -> None:
    model = tiny_gpt(SERIAL)
    together = list(generate(Stages(model, SERIAL), PROMPTS, max_new_tokens=4, temperature=0.0))
    for number, prompt in enumerate(PROMPTS):
        alone = list(generate(Stages(model, SERIAL), [prompt], max_new_tokens=4, temperature=0.0))
        assert tokens_of(alone, 0) == tokens_of(together, number)


def test_the_same_prompt_twice_gives_two_samples() -> None:
    generated = list(generate(Stages(tiny_gpt(SERIAL), SERIAL), [[1, 2], [1, 2]], max_new_tokens=8, temperature=2.0))
    assert tokens_of(generated, 0) != tokens_of(generated, 1)


# 21 leaves the last of two ranks fewer real rows; 9 on four ranks are 3 + 3 + 3 + 0.
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("tp", "vocab_size"), [(2, 21), (4, 21), (4, 9)])
def test_every_tp_generates_what_one_rank_does(tp: int, vocab_size: int) -> None:
    prompts = [[token % vocab_size for token in prompt] for prompt in PROMPTS]
    ways: list[dict[str, Any]] = [{"temperature": 0.0}, SAMPLED]

    def on(axis: Axis) -> tuple[Any, ...]:
        models = [tiny_gpt(axis, vocab_size=vocab_size, tie_embeddings=tied) for tied in (True, False)]
        texts = [
            list(generate(Stages(model, axis), prompts, max_new_tokens=6, **how)) for model in models for how in ways
        ]
        return texts, np.stack([next_logits(Stages(model, axis), prompts[0]) for model in models])

    def on_rank(rank: int, num_ranks: int) -> tuple[Any, ...]:
        return on(build_mesh(Layout(tp=num_ranks), rank).tp)

    serial_texts, serial_logits = on(SERIAL)
    results = run_on_ranks(on_rank, tp)
    for texts, logits in results:
        assert texts == serial_texts
        assert np.array_equal(logits, results[0][1]), "all ranks choose from the same bits"
        np.testing.assert_allclose(logits, serial_logits, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_stages_generate_what_one_rank_does() -> None:
    """tp 2 × pp 3, the first stage without a block; every rank gets every token."""
    held = (["embedding"], ["blocks.0"], ["blocks.1", "head"])

    def on_rank(rank: int, num_ranks: int) -> list[Generated]:
        mesh = build_mesh(Layout(tp=2, pp=3), rank)
        model = tiny_gpt(mesh.tp, units=held[mesh.pp.rank])
        units = model.architecture.named(held[mesh.pp.rank])
        inference = Inference([Chunk(units, model, ResidentWeights())], model, mesh.pp, ResidentWeights())
        return list(generate(Stages(model, mesh.tp, mesh.pp, inference.hidden), PROMPTS, max_new_tokens=5, **SAMPLED))

    expected = list(generate(Stages(tiny_gpt(SERIAL), SERIAL), PROMPTS, max_new_tokens=5, **SAMPLED))
    assert run_on_ranks(on_rank, 6) == [expected] * 6


def test_a_new_token_sends_its_logits_once_and_two_reductions_a_layer() -> None:
    mesh = paper_mesh(Layout(tp=4), 0)
    model = tiny_gpt(mesh.tp)
    caches = model.empty_caches(12)
    next_logits(Stages(model, mesh.tp), [1, 2, 3], caches)
    before = len(mesh.ledger.entries)
    next_logits(Stages(model, mesh.tp), [4], caches, 3)
    sent = [(entry.operation, entry.shape) for entry in list(mesh.ledger.entries)[before:]]
    assert sent == [("all_reduce", (1, 1, 16))] * 5 + [("all_gather", (6,))]  # the embedding's, 2 layers' two each


def test_the_stop_token_ends_its_text_only() -> None:
    model = tiny_gpt(SERIAL)
    free = list(generate(Stages(model, SERIAL), PROMPTS, max_new_tokens=5, temperature=0.0))
    stop = tokens_of(free, 0)[2]
    stopped = list(generate(Stages(model, SERIAL), PROMPTS, max_new_tokens=5, temperature=0.0, stop=(stop,)))
    for number in range(3):
        text = tokens_of(free, number)
        expected = text[: text.index(stop) + 1] if stop in text else text
        assert tokens_of(stopped, number) == expected
        last = [new.end for new in stopped if new.prompt == number]
        assert last == [None] * (len(expected) - 1) + ["stop" if stop in text else "length"]
    count = tokens_of(free, 0).index(stop) + 1
    just = list(generate(Stages(model, SERIAL), PROMPTS[:1], max_new_tokens=count, temperature=0.0, stop=(stop,)))
    assert [new.end for new in just] == [None] * (count - 1) + ["stop"], "as the last token that was asked for too"


@pytest.mark.parametrize(
    ("length", "count", "end"),
    [(10, 2, "length"), (10, 3, "length"), (10, 4, "full"), (12, 1, "length"), (12, 9, "full")],
)
def test_a_full_model_ends_the_text(length: int, count: int, end: str) -> None:
    model = tiny_gpt(SERIAL, seq_length=12)
    generated = list(generate(Stages(model, SERIAL), [[1] * length], max_new_tokens=count, temperature=0.0))
    assert len(generated) == min(count, 13 - length) and generated[-1].end == end


def test_fewer_positions_than_the_model_has() -> None:
    generated = list(
        generate(Stages(tiny_gpt(SERIAL), SERIAL), [[1, 2]], max_new_tokens=9, seq_length=4, temperature=0.0)
    )
    assert [new.end for new in generated] == [None, None, "full"]
    (new,) = generate(Stages(tiny_gpt(SERIAL), SERIAL), [[1]], max_new_tokens=1, seq_length=1, temperature=0.0)
    assert new.end == "length", "the token behind one position"


@pytest.mark.parametrize(("count", "limit", "cached"), [(5, 12, 7), (1, 12, 3), (9, 4, 4), (3, None, 5)])
def test_as_many_tokens_are_cached_as_are_read(count: int, limit: int | None, cached: int) -> None:
    """The last new one is not."""
    text = Stages(tiny_gpt(SERIAL), SERIAL).text([1, 2, 3], count, limit)
    assert isinstance(text, Continued) and text.capacity == cached


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_last_stage_tells_the_others_its_logits(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """In numbers of one kind."""
    told: list[tuple[int, torch.dtype, torch.Size]] = []

    def broadcast(x: torch.Tensor, axis: Axis, source: int) -> None:
        assert axis is mesh.pp
        told.append((source, x.dtype, x.shape))

    monkeypatch.setattr(sample, "broadcast_", broadcast)
    mesh = paper_mesh(Layout(pp=3), 0)
    model = tiny_gpt(SERIAL).to(dtype)
    found = next_logits(Stages(model, SERIAL, mesh.pp), [1, 2])
    next_logits(Stages(model, SERIAL, mesh.pp, lambda inputs: None), [1, 2])
    wide = torch.promote_types(dtype, torch.float32)
    assert told == [(2, wide, torch.Size([21]))] * 2 and found.dtype == np.float64


def test_it_streams() -> None:
    model, seen = tiny_gpt(SERIAL), []
    model.embedding.register_forward_hook(lambda *_: seen.append("step"))
    stream = generate(Stages(model, SERIAL), PROMPTS, max_new_tokens=5)
    assert seen == []
    next(stream)
    next(stream)
    assert seen == ["step"] * 2
    assert torch.is_grad_enabled(), "between tokens the caller's setting holds"


@pytest.mark.parametrize(
    ("prompts", "options", "kind", "says"),
    [
        ([[1], []], {}, DataError, "prompt 2 has no tokens"),
        ([[1] * 13], {}, DataError, "prompt 1 has 13 tokens, but the model reads at most 12 .* by 1 tokens or more"),
        ([[1] * 5], {"seq_length": 4}, DataError, "has 5 tokens, but the model reads at most 4"),
        ([[1, 21]], {}, DataError, "token id 21, but the model's vocabulary has 21"),
        ([[-1]], {}, DataError, "token id -1"),
        ([[1], [2, -5, 30]], {}, DataError, "prompt 2 has token id -5"),
        ([[1]], {"max_new_tokens": 0}, ConfigError, "max_new_tokens = 0"),
        ([[1]], {"seq_length": 13}, ConfigError, "seq_length = 13, but the model has learned 12"),
        ([[1]], {"seq_length": 0}, ConfigError, "seq_length = 0"),
        ([[1]], {"top_p": 2.0}, ConfigError, "top_p = 2.0"),
    ],
)
def test_what_is_refused_is_refused_at_once(
    prompts: list[list[int]], options: dict[str, Any], kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says):
        generate(Stages(tiny_gpt(SERIAL), SERIAL), prompts, **{"max_new_tokens": 3, **options})
