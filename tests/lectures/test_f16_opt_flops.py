"""F16: FLOPs of an update and their shares, for OPT's sizes (lecture 5).

    weft plan --lecture opt

Per token and layer, 2d² + 8Td for the projections (fitted), 16d² for the FFN and 4Td for attention, and 3/4 · 2dV for
the logits reproduce the slide's shares and its FLOPs of an update. weft counts 8d² for the projections.
"""

from itertools import pairwise
from math import isnan
from types import SimpleNamespace

import pytest

from weft.costs.published import OPT, OPT_PARTS, opt_flops, opt_slide_flops, opt_table


@pytest.mark.parametrize("row", OPT, ids=lambda row: row.name)
def test_f16_the_slides_columns(row: SimpleNamespace) -> None:
    flops = opt_slide_flops(row)
    update = sum(flops.values())
    shares = (row.projections, row.feedforward, row.attention, row.logits)
    assert [100 * flops[part] / update for part in OPT_PARTS] == pytest.approx(shares, abs=0.5)
    assert isnan(row.update) if row.name == "13B" else update == pytest.approx(row.update, rel=0.03)


@pytest.mark.parametrize("row", OPT, ids=lambda row: row.name)
def test_f16_only_the_projections_are_another_count(row: SimpleNamespace) -> None:
    """In every standard count projections are half of the FFN, 8d²L to 16d²L; the slide falls below a quarter."""
    slide, ours = opt_slide_flops(row), opt_flops(row)
    assert all(ours[part] == pytest.approx(slide[part]) for part in OPT_PARTS[1:])
    assert ours["FFN"] == pytest.approx(2 * ours["MHA projections"])
    assert OPT[-1].projections / OPT[-1].feedforward < 0.25 < 0.75 < OPT[0].projections / OPT[0].feedforward


def test_f16_the_trend_of_both() -> None:
    for count in (opt_flops, opt_slide_flops):
        shares = [{part: flops / sum(parts.values()) for part, flops in parts.items()} for parts in map(count, OPT)]
        for small, large in pairwise(shares):
            assert small["FFN"] < large["FFN"]
            assert small["attention"] > large["attention"] and small["logits"] > large["logits"]


def test_f16_the_tables_show_both_counts() -> None:
    reproduced, ours = opt_table()
    assert reproduced.rows[-1] == ("175B", "2.4e+18 | 2.44e+18", "17 | 16.6", "80 | 79.7", "3.3 |  3.3", "0.3 |  0.3")
    assert reproduced.rows[4][1].startswith("? | ")
    assert ours.rows[-1][2:4] == ("32.3", "64.7")
