"""Every view of a run on one page: markup is rendered, never shown to the reader as text."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.cli.test_explain import LACKING, RUNS
from tests.spread import slow

import weft
from weft.explain.views import VIEWS

MARKUP = re.compile(r"</?(svg|g|path|text|table|t[rdh]|div|span|p|b|ul|ol|li|h\d|details|script|button)\b[^>]*>")


class Shown(HTMLParser):
    """Texts that a reader sees, without source lines and data of scripts but with titles and labels; and all tags."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: list[str] = []
        self.texts: list[str] = []
        self.elements: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.inside += [tag] if tag in ("script", "style", "pre") else []
        self.texts += [value for name, value in attributes if value and name in ("title", "aria-label")]

    def handle_endtag(self, tag: str) -> None:
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, data: str) -> None:
        self.texts += [] if self.inside else [data]


@pytest.mark.parametrize("name", [name if name == "gpt" else slow(name) for name in LACKING])
def test_no_markup_is_shown_as_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.explain.timing.COPIED_BYTES", 1 << 20)
    monkeypatch.setattr("weft.explain.timing.MAX_MATRIX", {"cpu": 512})
    album = weft.load(RUNS / name).explain.all(None if name == "pairs" else "the cat <b>sat</b>")
    unseen = name == "ngram"  # no counts of this text to derive a likelihood from
    assert len(album.pictures) == len(VIEWS) - len(LACKING[name]) - unseen
    shown = Shown()
    shown.feed(album.save(tmp_path / "page.html").read_text("utf-8"))
    given = ("<b>", "</b>")  # in the text itself
    assert [match[0] for text in shown.texts for match in MARKUP.finditer(text) if match[0] not in given] == []
    assert name == "ngram" or (shown.elements.count("svg") > 20 and shown.elements.count("table") > 10)
    assert shown.elements.count("section") >= len(album.pictures)
