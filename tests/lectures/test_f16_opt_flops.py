"""F16: shares of the FLOPs of an update, for OPT's sizes (lecture 5).

    weft plan --lecture opt

The slide's FFN, attention and logits columns have the ratios of 16d²L, 4TdL and 2dV, with layers counted four times and
logits three times. Its MHA column follows from no standard count and shifts the other shares, so of the shares
themselves only the trend is tested.
"""

from itertools import pairwise

import pytest

from weft.costs.published import OPT, OPTRow, opt_shares


@pytest.mark.parametrize("row", OPT, ids=lambda row: row.name)
def test_f16_the_slides_ratios(row: OPTRow) -> None:
    ours = opt_shares(row)
    assert ours["FFN"] / ours["attention"] == pytest.approx(row.feedforward / row.attention, rel=0.015)
    # the slide rounds the FFN to a percent and the logits to a tenth of one
    assert ours["FFN"] / ours["logits"] == pytest.approx(row.feedforward / row.logits, rel=0.03 + 0.05 / row.logits)


def test_f16_the_trend() -> None:
    shares = [opt_shares(row) for row in OPT]
    for rising in ([share["FFN"] for share in shares], [row.feedforward for row in OPT]):
        assert all(small < large for small, large in pairwise(rising))
    slide = [[row.attention for row in OPT], [row.logits for row in OPT]]
    for falling in (*([share[part] for share in shares] for part in ("attention", "logits")), *slide):
        assert all(small > large for small, large in pairwise(falling))


def test_f16_the_mha_column_is_another_count() -> None:
    """In every standard count projections are half of the FFN, 8d²L to 16d²L; the slide falls below a quarter."""
    assert all(opt_shares(row)["FFN"] == pytest.approx(2 * opt_shares(row)["MHA projections"]) for row in OPT)
    assert OPT[0].projections / OPT[0].feedforward > 0.75
    assert OPT[-1].projections / OPT[-1].feedforward < 0.25
