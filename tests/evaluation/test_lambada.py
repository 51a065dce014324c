"""LAMBADA: the share of passages whose word is the likeliest, and how sure it is."""

import itertools
import math
import statistics

import pytest

from colonnade.evaluation.continuations import Continuation, score
from colonnade.evaluation.lambada import evaluate_lambada
from colonnade.evaluation.passages import Example
from colonnade.evaluation.progress import Progress
from colonnade.mesh.mesh import Axis, Mesh
from tests.generation.tiny import tiny_gpt


@pytest.mark.parametrize("tokens", [range(21), [3, 3, 3]])
def test_the_error_is_that_of_a_mean_over_a_sample(tokens: list[int]) -> None:
    found = evaluate_lambada(tiny_gpt(Axis("tp")), [Example(0, [1, 2, 4], [token]) for token in tokens], mesh=Mesh())
    right = [1.0] * found.correct + [0.0] * (len(tokens) - found.correct)
    assert found.accuracy == statistics.fmean(right)
    assert found.accuracy_error == pytest.approx(statistics.stdev(right) / math.sqrt(len(right)), rel=1e-12)
    assert found.correct == 1 or len(set(tokens)) == 1, "one of all 21 is the likeliest"


def test_one_passage_has_no_error() -> None:
    assert evaluate_lambada(tiny_gpt(Axis("tp")), [Example(0, [1], [2])], mesh=Mesh()).accuracy_error == 0.0


def test_the_loss_is_that_of_words_however_many_tokens_they_have() -> None:
    passages = [Example(0, [1, 2], [3, 4, 5]), Example(1, [4, 2, 7], [6]), Example(2, [9], [1, 8])]
    model, said, times = tiny_gpt(Axis("tp")), list[str](), itertools.count(0.0, 6.0)
    progress = Progress("passages", clock=lambda: next(times), say=said.append)
    found = evaluate_lambada(model, passages, mesh=Mesh(), batch_size=2, progress=progress)
    words = [Continuation(each.context, each.target) for each in passages]
    losses = score(model, words, mesh=Mesh(), batch_size=1).losses
    assert found.loss == pytest.approx(losses.mean(), rel=1e-12) and losses.mean() > 0
    assert found.perplexity == pytest.approx(math.exp(losses.mean()), rel=1e-12)
    assert (found.passages, found.target_tokens) == (3, 6)
    assert [line.partition(",")[0] for line in said] == ["  2 of 3 passages", "  3 of 3 passages"]
