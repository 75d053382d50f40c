"""Recorded outputs: written into pages, compared with new runs, and small."""

import json
from pathlib import Path

import pytest

from ext import record
from ext.record import compact_svg, normalised

PAGE = """\
# A page

`count.txt`:

```text
1 apple
```

<!-- run: varies numbers -->
```sh
cat count.txt; cp count.txt /dev/null
```

```python
print("took 0.3 s")
```

```sh
echo '<svg xmlns="http://www.w3.org/2000/svg"/>' > a.svg
```

![A figure](figures/page/a.svg)
"""


@pytest.mark.parametrize(
    ("before", "now", "varies", "same"),
    [
        ("1,234 tok/s in 2 min 14 s", "99 tok/s in 48 s", "", True),
        ("12.1 MiB at 2026-11-18 06:40", "9 GiB at 2027-01-02 11:11", "", True),
        ("/tmp/weft-abc/x  done", "/tmp/tmpq9 done", "", True),
        ("loss 1.93", "loss 1.94", "", False),
        ("loss 1.93 | -2.0e-05", "loss 1.94 | 3", "numbers", True),
        ("loss 1.93", "perplexity 1.93", "numbers", False),
        ("loss 1.93", "loss nan", "numbers", True),
        ("Once upon", "It was a", "text", True),
        ("Once upon", "", "text", False),
        ('"sha256": "ab", 3', '"sha256": "cd", 3', '/"sha256": "\\w+"/', True),
        ('"sha256": "ab", 3', '"sha256": "cd", 4', '/"sha256": "\\w+"/', False),
    ],
)
def test_what_may_differ_is_not_compared(before: str, now: str, varies: str, same: bool) -> None:
    assert (normalised(before, varies) == normalised(now, varies)) is same


def test_a_page_is_recorded_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(PAGE)
    assert [problem.splitlines()[0] for problem in record.check("page", tmp_path)] == [
        "page: a.svg is not recorded",
        "page, line 10: the recorded output no longer comes",
        "page, line 14: the recorded output no longer comes",
    ]
    record.record("page", tmp_path)
    text = path.read_text()
    assert "```output\n1 apple\n```" in text and "```output\ntook 0.3 s\n```" in text
    assert (tmp_path / "figures" / "page" / "a.svg").read_text().startswith("<svg")
    assert record.check("page", tmp_path) == []
    slower = text.replace("output\ntook 0.3 s", "output\ntook 9 minutes")
    path.write_text(slower.replace("output\n1 apple", "output\n2 apple"))
    assert record.check("page", tmp_path) == []
    record.record("page", tmp_path)
    assert path.read_text() == slower  # only a time differs
    path.write_text(text.replace("output\n1 apple", "output\n1 pear"))
    (problem,) = record.check("page", tmp_path)
    assert "-1 pear\n+1 apple" in problem


def test_a_page_that_fails_keeps_its_recorded_outputs(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("```sh\nfalse\n```\n\n```output\nkept\n```\n")
    with pytest.raises(record.PageError, match="page, line 1: exit code 1"):
        record.record("page", tmp_path)
    assert "kept" in path.read_text()


def test_figures_are_rounded_and_have_no_metadata() -> None:
    figure = '<?xml?>\n<svg>\n  <metadata>date</metadata><!-- by -->\n <path d="M 10.123456 0.000012345"/>\n</svg>'
    assert compact_svg(figure) == '<svg>\n<path d="M 10.12 1.234e-05"/>\n</svg>\n'


def test_pages_are_chosen_by_name_or_folder() -> None:
    assert record.runnable_pages(["docs/guides/train.md"]) == ["guides/train"]
    assert {"start/quickstart", "start/own-text"} <= set(record.runnable_pages(["start"]))
    assert record.runnable_pages(["README"])[-1] == "../README"
    assert record.runnable_pages(["nothing"]) == []
    assert {"guides/train", "notebooks/attention", "reference/settings"} <= set(record.runnable_pages([]))


def test_outputs_of_cells_are_compared(tmp_path: Path) -> None:
    cell = {"metadata": {}, "outputs": [{"text": ["loss 1.2\n"]}, {"data": {"image/svg+xml": ["<svg/>"]}}]}
    assert list(record._cell_outputs(json.dumps({"cells": [cell]}))) == [("loss 1.2\nimage/svg+xml", "numbers")]
