"""LAMBADA: the share of passages whose word is the likeliest, and how sure it is."""

import math
import statistics

import pytest

from colonnade.evaluation.lambada import evaluate_lambada
from colonnade.evaluation.passages import Example
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
