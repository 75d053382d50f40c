"""Tables as text: columns that are too wide are wrapped, or dropped with a remark."""

from weft.figures.page import html_table
from weft.figures.tables import Table, text_lines, text_table

NAME = "placement=pre,position=rotary,norm=rmsnorm"
TABLE = Table(("name", "size", "speed", ""), [(NAME, "12", "3.5", "a b c"), ("short", "1,000", "20", "")], "Title")


def test_columns_are_aligned_left_or_right() -> None:
    assert text_table(Table(("a", "n"), [("x", "1"), ("long", "100")], "T", ["R"])).splitlines() == [
        "T", "a       n", "x       1", "long  100", "R",
    ]  # fmt: skip
    assert text_table(Table(("", ""), [("x", "1")])) == "x  1"  # no header, no title


def test_a_word_too_long_for_its_column_is_on_a_separate_line() -> None:
    lines = text_table(TABLE._replace(text=(0, 3)), 40).splitlines()
    assert max(map(len, lines)) <= max(40, len(NAME))
    assert "".join(lines[2:4]).startswith(NAME[:40]) and lines[-1].split() == ["short", "1,000", "20"]
    assert any(line.split() == ["12", "3.5", "a", "b", "c"] for line in lines)


def test_spare_columns_are_dropped_and_named() -> None:
    table = TABLE._replace(spare=(2, 1))
    assert text_table(table, 200) == text_table(TABLE)
    lines = dict(text_lines(table, 52))
    assert "speed" not in lines["header"] and "size" in lines["header"]
    assert lines["remark"] == "not shown for lack of space: speed; --json has all"


def test_a_page_escapes_cells_and_folds_long_tables() -> None:
    html = html_table(Table(("a", "<n>"), [("<b>", "1"), ("  in", "2")], "T<", ["R>"]))
    assert '<td>&lt;b&gt;</td><td class="n">1</td>' in html and '<td class="in">  in</td>' in html
    assert "&lt;n&gt;" in html and "T&lt;" in html and "R&gt;" in html and "<details" not in html
    long = html_table(Table(("a",), [("x",)] * 17, "Many"))
    assert "<summary>Many: 17 rows</summary>" in long and "<caption" not in long


def test_a_legend_explains_only_shown_columns() -> None:
    remarks = ["GPU: fast. MFU: the share of a peak (model.flops) that is used. rows: read at a time."]
    table = Table(("name", "MFU", "rows"), [("a" * 12, "0.5", "3")], "", remarks, spare=(1,))
    assert "MFU: the share" in text_table(table)
    shown = text_table(table, 18)
    assert "MFU: the share" not in shown and "GPU: fast. rows: read" in shown and "not shown" in shown
