"""Metrics of classifiers against hand calculation, and correlations against SciPy's."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.later import Later

from weft.errors import DataError
from weft.evaluate import agreement as c
from weft.recipe.metrics import against_baseline

stats = Later("scipy.stats")

NAMES = ("cat", "dog", "frog")


def test_metrics_of_three_labels_by_hand() -> None:
    #           cat cat cat dog dog frog frog frog frog frog
    truth, predicted = [0, 0, 0, 1, 1, 2, 2, 2, 2, 2], [0, 0, 1, 1, 2, 2, 2, 2, 0, 2]
    found = c.label_metrics(truth, predicted, NAMES)
    assert found["matrix"] == [[2, 1, 0], [0, 1, 1], [1, 0, 4]]
    assert found["labels"] == list(NAMES)
    assert found["accuracy"] == pytest.approx(0.7)
    # F1: 2·2/(3+3), 2·1/(2+2), 2·4/(5+5)
    assert found["macro_f1"] == pytest.approx((2 / 3 + 1 / 2 + 4 / 5) / 3)
    # (7·10 − (3·3 + 2·2 + 5·5)) / √((100 − 38)(100 − 38))
    assert found["matthews"] == pytest.approx((70 - 38) / 62)


def test_intervals_are_binomial_and_rows_are_drawn_as_a_whole() -> None:
    truth, predicted = [0] * 300 + [1] * 100, [0] * 280 + [1] * 120
    found = c.label_intervals(truth, predicted, losses=[0.5] * 400, rows=range(400))
    assert found["baseline_accuracy"] == 0.75 and found["rows"] == 400
    low, high = found["intervals"]["accuracy"]
    assert (low, high) == pytest.approx(tuple(stats.binom(400, 380 / 400).ppf([0.025, 0.975]) / 400), abs=0.006)
    assert found["intervals"]["loss"] == pytest.approx([0.5, 0.5])
    assert found["intervals"]["matthews"][0] < c.matthews(c.confusion(truth, predicted, 2))
    # ten words per sentence, all correct or all wrong: as certain as 40 answers, not 400
    sentences = c.label_intervals(truth, predicted, losses=[0.5] * 400, rows=[n // 10 for n in range(400)])
    wide = sentences["intervals"]["accuracy"]
    assert sentences["rows"] == 40 and wide[1] - wide[0] > 2 * (high - low)
    assert c.label_intervals([0, 1], [0, 1], losses=[0.1, 0.2], rows=[0, 0])["intervals"] == {}


@pytest.mark.parametrize(
    ("accuracy", "low", "verdict"),
    [(0.5, 0.4, "worse than"), (0.6, 0.5, "no better than"), (0.7, 0.55, "hardly better than"), (0.7, 0.65, "")],
)
def test_the_accuracy_is_compared_with_the_commonest_label(accuracy: float, low: float, verdict: str) -> None:
    line = against_baseline({"accuracy": accuracy, "baseline_accuracy": 0.6, "intervals": {"accuracy": [low, 0.9]}})
    assert (verdict in line and "(60.0%)" in line) if verdict else line == ""
    assert against_baseline({"loss": 1.0}) == ""


def test_matthews_of_two_labels_is_the_textbook_formula() -> None:
    tp, tn, fp, fn = 90, 3, 4, 5
    matrix = np.array([[tn, fp], [fn, tp]])
    textbook = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert c.matthews(matrix) == pytest.approx(textbook)
    # with two labels it is also the correlation of the labels as numbers
    truth = [0] * (tn + fp) + [1] * (fn + tp)
    predicted = [0] * tn + [1] * fp + [0] * fn + [1] * tp
    assert c.matthews(matrix) == pytest.approx(stats.pearsonr(truth, predicted).statistic)


@pytest.mark.parametrize(("predicted", "expected"), [([1, 1, 1], 0.0), ([0, 1, 1], 1.0), ([1, 0, 0], -1.0)])
def test_matthews_at_its_extremes(predicted: list[int], expected: float) -> None:
    assert c.label_metrics([0, 1, 1], predicted, ("no", "yes"))["matthews"] == expected


def test_macro_f1_ignores_labels_that_never_occur() -> None:
    assert c.label_metrics([0, 1, 0, 1], [0, 1, 0, 0], NAMES)["macro_f1"] == pytest.approx((4 / 5 + 2 / 3) / 2)
    # a label that is predicted but never true counts with 0
    assert c.label_metrics([0, 1, 0, 1], [0, 1, 0, 2], NAMES)["macro_f1"] == pytest.approx((1 + 2 / 3 + 0) / 3)


number = st.integers(-4, 4)


def scipys(one: Any, other: Any) -> dict[str, float]:
    return {"pearson": stats.pearsonr(one, other).statistic, "spearman": stats.spearmanr(one, other).statistic}


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_correlations_equal_scipys_even_with_ties(data: st.DataObject) -> None:
    one, other = zip(*data.draw(st.lists(st.tuples(number, number), min_size=3, max_size=30)), strict=True)
    assert c.ranks(one).tolist() == stats.rankdata(one).tolist()
    found = c.correlations(one, other)
    if len(set(one)) == 1 or len(set(other)) == 1:
        assert math.isnan(found["spearman"]) and math.isnan(found["pearson"])
        return
    assert found == pytest.approx(scipys(one, other), abs=1e-12)


def test_correlations_of_large_and_small_numbers() -> None:
    generator = np.random.default_rng(0)
    one, other = generator.normal(size=50) * 1e-9 + 5, generator.normal(size=50) * 1e9
    assert c.correlations(one, other) == pytest.approx(scipys(one, other), rel=1e-6)


def test_impossible_inputs_are_refused() -> None:
    with pytest.raises(DataError, match="nothing was classified"):
        c.confusion([], [], 2)
    for one, other, message in (([1], [1], "at least two"), ([1, math.nan], [1, 2], "not all finite")):
        with pytest.raises(DataError, match=message):
            c.pearson(one, other)
