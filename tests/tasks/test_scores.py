"""Scores beside scikit-learn's and scipy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.tasks.scores import scores_of

PAIRS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=2, max_size=30)


@pytest.mark.slow
@given(PAIRS)
def test_two_labels(pairs: list[tuple[int, int]]) -> None:
    metrics = pytest.importorskip("sklearn.metrics")  # seconds, which only a process that runs this has to spend
    predicted, right = np.array(pairs).T
    found = scores_of(np.eye(2)[predicted], right.astype(float), binary=True)
    assert found["accuracy"] == pytest.approx(metrics.accuracy_score(right, predicted))
    assert found["f1"] == pytest.approx(metrics.f1_score(right, predicted, zero_division=0.0))
    expected = 0.0 if 1 in (len(set(predicted)), len(set(right))) else metrics.matthews_corrcoef(right, predicted)
    assert found["matthews"] == pytest.approx(expected, abs=1e-12)


def test_several_labels_have_an_accuracy() -> None:
    logits = np.array([[0.0, 1.0, 2.0], [3.0, 1.0, 2.0], [0.0, 5.0, 2.0]])
    assert scores_of(logits, np.array([2.0, 0.0, 0.0]), binary=False) == {"accuracy": 2 / 3}


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=30))
def test_scores(pairs: list[tuple[int, int]]) -> None:
    """With equal numbers, whose ranks are shared."""
    stats = pytest.importorskip("scipy.stats")
    told, right = np.array(pairs, dtype=float).T
    found = scores_of(told[:, None], right, binary=False)
    if len(set(told)) == 1 or len(set(right)) == 1:
        assert found == {"pearson": 0.0, "spearman": 0.0}
        return
    assert found["pearson"] == pytest.approx(stats.pearsonr(told, right).statistic, abs=1e-12)
    assert found["spearman"] == pytest.approx(stats.spearmanr(told, right).statistic, abs=1e-12)
