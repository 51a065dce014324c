"""A T5 writes: the encoder runs once, keys and values of the memory are made once, and every layout writes the same."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from colonnade.config.model import ModelConfig
from colonnade.generation.sample import Generated, Stages, generate, logits_behind
from colonnade.generation.texts import Answered
from colonnade.mesh.layout import Layout
from colonnade.mesh.mesh import Axis, build_mesh, paper_mesh
from colonnade.model.initialize import initialize_
from colonnade.model.t5 import T5, T5Inputs
from colonnade.pipeline.chunk import Chunk
from colonnade.pipeline.inference import Inference, ResidentWeights
from colonnade.tensor_parallel.parallel import Parallel
from tests.distributed import run_on_ranks

SERIAL, VOCAB, START = Axis("tp"), 21, 2
PROMPTS = [[4, 8, 15, 16, 3], [7], [9, 9, 1, 0, 12, 13, 14, 5, 6]]
HELD = (
    ["embedding"],
    ["encoder.blocks.0", "encoder.blocks.1", "decoder.embedding", "decoder.blocks.0"],
    ["decoder.blocks.1", "head"],
)


def tiny_t5(tp: Axis, units: list[str] | None = None, **more: Any) -> T5:
    """float64, 2 and 2 layers, with initial weights so wide that it prefers some tokens to others."""
    shape = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "head_dim": 6, "seq_length": 12, "dropout": 0.1}
    model = ModelConfig(kind="t5", **{**shape, "relative_buckets": 6, "relative_distance": 5, "init_std": 2.0, **more})
    t5 = T5(model, VOCAB, Parallel(tp), units=units).double()
    initialize_(t5, tp, 7)
    return t5


def at_once(t5: T5, prompt: list[int], written: list[int], start: int = START) -> Tensor:
    """Logits [t, v] behind a start and each token of a text, without caches."""
    carry: tuple[Tensor, ...] = ()
    given = T5Inputs(torch.tensor(prompt)[:, None], decoder_tokens=torch.tensor([start, *written])[:, None])
    with torch.no_grad():
        for unit in list(t5.units())[:-1]:
            carry = t5.run(unit, carry, given)
        return t5.head.logits(carry[0])[:, 0]


@pytest.mark.parametrize("tied", [True, False])
def test_logits_with_caches_are_those_without(tied: bool) -> None:
    t5 = tiny_t5(SERIAL, tie_embeddings=tied)
    written = [3, 20, 7, 7, 1, 12, 0, 9]  # further than the ranges reach
    for prompt in PROMPTS:
        text = Answered(t5, prompt, 9, START)
        inputs, expected = text.first(), at_once(t5, prompt, written)
        for position, token in enumerate(written, 1):
            found = logits_behind(Stages(t5, SERIAL, start=START), inputs)
            np.testing.assert_allclose(found, expected[position - 1].numpy(), rtol=1e-10, atol=1e-12)
            inputs = text.following(token, position)


def test_the_encoder_runs_once_and_the_memory_is_read_once() -> None:
    mesh = paper_mesh(Layout(tp=4), 0)
    t5 = tiny_t5(mesh.tp)
    stages, text = Stages(t5, mesh.tp), Answered(t5, [1, 2, 3], 4, START)
    logits_behind(stages, text.first())
    first = Counter(entry.operation for entry in mesh.ledger.entries)
    before = len(mesh.ledger.entries)
    keys = {unit: cache.memory.keys for unit, cache in text.caches.items()}
    logits_behind(stages, text.following(4, 1))
    sent = [(entry.operation, entry.shape) for entry in list(mesh.ledger.entries)[before:]]
    # two embeddings, two encoder layers of two sublayers, two decoder layers of three; then the decoder alone
    assert first == {"all_reduce": 2 + 4 + 6, "all_gather": 1}
    assert sent == [("all_reduce", (1, 1, 16))] * (1 + 6) + [("all_gather", (6,))]
    assert all(cache.memory.keys is keys[unit] is not None for unit, cache in text.caches.items())


WAYS: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "seed": 3}]


def texts(stages: Stages) -> list[list[Generated]]:
    return [list(generate(stages, PROMPTS, max_new_tokens=6, stop=(1,), **way)) for way in WAYS]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_every_tp_writes_what_one_rank_does(tp: int) -> None:
    def on_rank(rank: int, num_ranks: int) -> list[list[Generated]]:
        axis = build_mesh(Layout(tp=num_ranks), rank).tp
        return texts(Stages(tiny_t5(axis), axis, start=START))

    expected = texts(Stages(tiny_t5(SERIAL), SERIAL, start=START))
    assert len({new.token for way in expected for new in way}) > 6, "it does not repeat one token"
    assert run_on_ranks(on_rank, tp) == [expected] * tp


@pytest.mark.slow
def test_stages_write_what_one_rank_does() -> None:
    """tp 2 × pp 3: the first stage has no block, the second ends one stack and begins the other."""

    def on_rank(rank: int, num_ranks: int) -> list[list[Generated]]:
        mesh = build_mesh(Layout(tp=2, pp=3), rank)
        model = tiny_t5(mesh.tp, HELD[mesh.pp.rank])
        units = model.architecture.named(HELD[mesh.pp.rank])
        inference = Inference([Chunk(units, model, ResidentWeights())], model, mesh.pp, ResidentWeights())
        return texts(Stages(model, mesh.tp, mesh.pp, inference.hidden, START))

    assert run_on_ranks(on_rank, 6) == [texts(Stages(tiny_t5(SERIAL), SERIAL, start=START))] * 6


def test_texts_are_as_long_as_asked_for_whatever_the_model_was_trained_on() -> None:
    made = list(generate(Stages(tiny_t5(SERIAL), SERIAL, start=START), [[3] * 30], max_new_tokens=20, temperature=0.0))
    assert len(made) == 20 and made[-1].end == "length"
    for seq_length, ends in ((30, [None] * 5 + ["length"]), (3, [None, None, "full"])):
        made = list(generate(Stages(tiny_t5(SERIAL), SERIAL), [[3]], max_new_tokens=6, seq_length=seq_length))
        assert [new.end for new in made] == ends


def test_the_first_token_is_the_likeliest_behind_the_start() -> None:
    """And each that follows, behind those before it."""
    t5 = tiny_t5(SERIAL)
    firsts = {}
    for start in range(6):
        made = list(generate(Stages(t5, SERIAL, start=start), PROMPTS[:1], max_new_tokens=3, temperature=0.0))
        written = [new.token for new in made]
        assert written == at_once(t5, PROMPTS[0], written[:-1], start).argmax(-1).tolist()
        firsts[start] = written[0]
    assert len(set(firsts.values())) > 1, "the start matters"
