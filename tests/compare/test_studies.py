"""Comparisons and scaling laws are found by what they leave on disk, and read as they were written."""

import json
from pathlib import Path

import pytest
from tests.compare.page_sample import comparison, scaling

import weft.compare.studies as told
from weft.compare.page import ComparisonPage
from weft.compare.studies import read_study, studies
from weft.errors import RunError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished comparison, a law, one that runs, a damaged one, and folders that are something else."""
    place = tmp_path_factory.mktemp("comparisons")
    written = {"four": ("compare.json", ComparisonPage(comparison()).data()), "law": ("scale.json", scaling().data())}
    for name, (file, data) in written.items():
        (place / name).mkdir()
        (place / name / file).write_text(json.dumps(data), encoding="utf-8")
    for name, text in (("runs", "{}\n{}\n"), ("damaged", "{}\n")):
        (place / name).mkdir()
        (place / name / "results.jsonl").write_text(text)
    (place / "runs" / "plan.json").write_text(json.dumps({"command": "weft compare a b"}))
    (place / "damaged" / "compare.json").write_text('{"kind": "compare"')
    (place / "corpus").mkdir()
    (place / "corpus" / "plan.json").write_text("{}")
    (place / "note.txt").write_text("no folder")
    return place


def test_a_place_is_a_study_or_holds_some(folder: Path) -> None:
    assert list(studies([folder])) == ["damaged", "four", "law", "runs"]
    assert studies([folder / "law", folder / "gone"]) == {"law": folder / "law"}


def test_a_finished_one_is_what_was_written(folder: Path) -> None:
    found = read_study(folder / "four")
    page = ComparisonPage(comparison())
    assert found["finished"] and found["result"] == page.result and found["kind"] == "compare"
    assert [panel["name"] for panel in found["panels"]] == [panel.name for panel in page.panels()]
    assert {each["name"] for each in found["contenders"]} == {ranked.name for ranked in page.ranking}
    assert read_study(folder / "law")["kind"] == "scale"


def test_one_that_runs_says_how_many_runs_have_finished(folder: Path) -> None:
    running = {"kind": "compare", "finished": False, "command": "weft compare a b", "runs": 2}
    assert read_study(folder / "runs") == running


def test_a_damaged_one_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match=r"damaged: holds no results that weft wrote"):
        read_study(folder / "damaged")
    monkeypatch.setattr(told, "MAX_STUDY_BYTES", 100)
    with pytest.raises((RunError, OSError)):
        read_study(folder / "four")
