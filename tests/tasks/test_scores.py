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


def test_f1_is_of_what_is_predicted_and_of_what_is_right() -> None:
    """One hit of one that is predicted and of three that are right; 0 where label 1 is nowhere."""
    predicted = np.eye(2)[[1, 0, 0, 0]]
    found = scores_of(predicted, np.array([1.0, 1.0, 1.0, 0.0]), binary=True)
    assert (found["accuracy"], found["f1"], found["matthews"]) == (0.5, 0.5, pytest.approx(1 / 3))
    assert scores_of(np.eye(2)[[0, 0]], np.zeros(2), binary=True) == {"accuracy": 1.0, "f1": 0.0, "matthews": 0.0}


def test_equal_scores_share_the_mean_of_their_ranks() -> None:
    """Ranks 0.5, 0.5 and 2 beside 0, 1 and 2; what does not vary goes with nothing."""
    found = scores_of(np.array([[1.0], [1.0], [9.0]]), np.array([1.0, 2.0, 3.0]), binary=False)
    assert found["spearman"] == pytest.approx(np.sqrt(3) / 2)
    for score in (1.0, 0.1):  # three times 0.1 is more than 0.3
        assert scores_of(np.full((3, 1), score), np.arange(3.0), binary=False) == {"pearson": 0.0, "spearman": 0.0}
        assert scores_of(np.full((3, 1), score), np.full(3, 0.1), binary=False)["pearson"] == 0.0
        assert scores_of(np.arange(3.0)[:, None], np.full(3, score), binary=False) == {"pearson": 0.0, "spearman": 0.0}
    assert scores_of(np.full((7, 1), 0.1), np.arange(7.0) ** 2 / 7, binary=False)["pearson"] == 0.0, "not 4e-17"


def test_the_order_of_scores_counts_in_their_ranks_alone() -> None:
    found = scores_of(np.array([[1.0], [2.0], [9.0], [2.0]]), np.array([1.0, 2.0, 2.0, 3.0]), binary=False)
    assert found["spearman"] == pytest.approx(0.5) and found["pearson"] != pytest.approx(0.5)
