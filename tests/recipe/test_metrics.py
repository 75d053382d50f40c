"""Every metric of an objective is in the table."""

import pytest

from weft.recipe.metrics import METRICS, metric
from weft.recipe.objective import OBJECTIVES


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_metrics_are_known(kind: str) -> None:
    assert OBJECTIVES[kind].metrics[0] == "loss"
    assert set(OBJECTIVES[kind].metrics) <= METRICS.keys()


def test_an_unknown_metric_is_titled_by_its_name() -> None:
    assert metric("words_per_minute").title == "words per minute"
    assert not metric("words_per_minute").lower_is_better
    assert metric("loss").lower_is_better and metric("bits_per_byte").lower_is_better
