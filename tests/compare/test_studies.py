"""Comparisons and scaling laws are found by their files, and read as they were written."""

import json
from pathlib import Path

import pytest
from tests.compare.page_sample import comparison, scaling

from weft.compare.page import ComparisonPage
from weft.compare.studies import read_study, studies
from weft.errors import RunError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished comparison, a scaling law, a running and a damaged comparison, and other folders."""
    root = tmp_path_factory.mktemp("comparisons")
    written = {"four": ("compare.json", ComparisonPage(comparison()).data()), "law": ("scale.json", scaling().data())}
    for name, (file, data) in written.items():
        (root / name).mkdir()
        (root / name / file).write_text(json.dumps(data), encoding="utf-8")
    for name, text in (("runs", "{}\n{}\n"), ("damaged", "{}\n")):
        (root / name).mkdir()
        (root / name / "results.jsonl").write_text(text)
    (root / "runs" / "plan.json").write_text(json.dumps({"command": "weft compare a b"}))
    (root / "damaged" / "compare.json").write_text('{"kind": "compare"')
    (root / "corpus").mkdir()
    (root / "corpus" / "plan.json").write_text("{}")
    (root / "note.txt").write_text("no folder")
    return root


def test_studies_are_found_and_read_as_written(folder: Path) -> None:
    assert list(studies([folder])) == ["damaged", "four", "law", "runs"]
    assert studies([folder / "law", folder / "gone"]) == {"law": folder / "law"}
    found = read_study(folder / "four")
    page = ComparisonPage(comparison())
    assert found["finished"] and found["result"] == page.result and found["kind"] == "compare"
    assert [panel["name"] for panel in found["panels"]] == [panel.name for panel in page.panels()]
    assert {each["name"] for each in found["contenders"]} == {ranked.name for ranked in page.ranking}
    assert read_study(folder / "law")["kind"] == "scale"


def test_unfinished_and_damaged_studies(folder: Path) -> None:
    running = {"kind": "compare", "finished": False, "command": "weft compare a b", "runs": 2}
    assert read_study(folder / "runs") == running
    with pytest.raises(RunError, match=r"damaged: its results are damaged"):
        read_study(folder / "damaged")
    with pytest.raises((RunError, OSError)):
        read_study(folder / "four", max_bytes=100)
