"""`weft docs`: a site that is there is opened, and one that isn't is said how to get."""

import webbrowser
from pathlib import Path

import pytest

from weft.cli import docs
from weft.cli.main import run


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    pages: list[str] = []
    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.BackgroundBrowser("browser"))
    monkeypatch.setattr(webbrowser, "open", pages.append)
    return pages


def test_the_site_of_a_folder_is_opened(
    opened: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "a site" / "index.html"
    page.parent.mkdir()
    page.write_text("<h1>weft</h1>")
    assert run(["docs", str(page.parent)]) == 0
    assert opened == [page.as_uri()] == [capsys.readouterr().out.strip()]
    assert run(["docs", str(page.parent), "--no-browser"]) == 0 and len(opened) == 1
    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.GenericBrowser("lynx"))
    assert run(["docs", str(page.parent)]) == 0 and len(opened) == 1  # it would take the terminal


def test_a_site_that_was_not_built_is_one_line(
    opened: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["docs", str(tmp_path)]) == 2 and not opened
    said = capsys.readouterr()
    assert "make docs" in said.err and said.err.count("\n") == 1 and not said.out


def test_by_default_it_is_the_checkouts() -> None:
    assert Path(__file__).parents[2] / "site" == docs.SITE
