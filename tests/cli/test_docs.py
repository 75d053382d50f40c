"""`weft docs` opens the built documentation, and builds it in a checkout that has none."""

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


def test_a_checkout_builds_its_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources, site = tmp_path / "docs", tmp_path / "site"
    (sources / "ext").mkdir(parents=True)
    (sources / "ext" / "site.py").write_text(
        "import pathlib, sys\nsite = pathlib.Path(sys.argv[1])\nsite.mkdir()\n(site / 'index.html').touch()"
    )
    docs.build(sources, site)
    assert (site / "index.html").is_file() and "building the documentation" in capsys.readouterr().err
    (sources / "ext" / "site.py").write_text("raise SystemExit('no such module')")
    with pytest.raises(docs.ConfigError, match="cannot be built: no such module"):
        docs.build(sources, tmp_path / "other")


def test_the_site_is_part_of_the_package() -> None:
    root = Path(__file__).parents[2]
    assert root / "src" / "weft" / "site" == docs.SITE and root / "docs" == docs.SOURCES
