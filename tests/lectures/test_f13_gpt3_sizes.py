"""F13: the table of GPT-3's sizes (lectures 3 and 5; Brown et al. 2020, table 2.1).

weft plan --lecture gpt3
"""

from types import SimpleNamespace

import pytest

from weft.costs.count import count
from weft.costs.published import GPT3
from weft.models.presets import PRESETS, preset


@pytest.mark.parametrize("row", GPT3, ids=lambda row: row.preset)
def test_f13_parameters_are_near_the_rows_name(row: SimpleNamespace) -> None:
    model = preset(row.preset)
    assert count(model).parameters == pytest.approx(row.parameters, rel=0.03)
    assert (model.layers, model.context) == (row.layers, 2048)
    assert model.attention.heads * model.d_head == model.d_model


@pytest.mark.parametrize("row", [r for r in GPT3 if r.heads * r.d_head == r.d_model], ids=lambda row: row.preset)
def test_f13_six_rows_are_built_as_printed(row: SimpleNamespace) -> None:
    model = preset(row.preset)
    assert (model.d_model, model.attention.heads, model.d_head) == (row.d_model, row.heads, row.d_head)


def test_f13_presets_of_two_rows_note_that_they_do_not_multiply_out() -> None:
    assert [row.preset for row in GPT3 if row.heads * row.d_head != row.d_model] == ["gpt3-xl", "gpt3-13b"]
    xl, large = preset("gpt3-xl"), preset("gpt3-13b")
    assert (xl.d_model, xl.attention.heads, xl.d_head) == (2048, 16, 128)
    assert (large.d_model, large.attention.heads, large.d_head) == (5120, 40, 128)
    assert all(note in PRESETS["gpt3-xl"][1] for note in ("24 heads", "built as 16"))
    assert all(note in PRESETS["gpt3-13b"][1] for note in ("5140", "built as 5120"))


def test_f13_compute_of_the_largest() -> None:
    """6 · parameters · tokens = 3.14e23 FLOPs (Brown et al. 2020, appendix D) leaves out attention's 3 %."""
    total = count(preset("gpt3-175b")).training() * 300e9
    assert total == pytest.approx(3.14e23, rel=0.04)
