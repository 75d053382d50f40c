"""`weft docs` opens the built documentation, or names the command that builds it."""

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


def test_the_site_is_opened_in_a_browser_with_a_window(
    opened: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "a site" / "index.html"
    page.parent.mkdir()
    page.write_text("<h1>weft</h1>")
    assert run(["docs", str(page.parent)]) == 0
    assert opened == [page.as_uri()] == [capsys.readouterr().out.strip()]
    assert run(["docs", str(page.parent), "--no-browser"]) == 0 and len(opened) == 1
    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.GenericBrowser("lynx"))
    assert run(["docs", str(page.parent)]) == 0 and len(opened) == 1  # lynx would take over the terminal


def test_a_missing_site_is_one_line(opened: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["docs", str(tmp_path)]) == 2 and not opened
    captured = capsys.readouterr()
    assert "make docs" in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_the_default_is_the_checkouts_site() -> None:
    assert Path(__file__).parents[2] / "site" == docs.SITE
