"""The documentation as a whole: every block of every page runs, and the site is built without a warning.

`make test-docs` runs these; they take minutes.
"""

import json
import re
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from ext import pages, references
from ext.pages import ROOT, STORE, Block

DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).with_suffix("").as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
BLOCKS = {name: pages.parse(text) for name, text in TEXTS.items()}
BLOCKS["README"] = pages.parse_readme((ROOT / "README.md").read_text(encoding="utf-8"))
NEEDS = [
    pytest.param(block, id=f"{name}:{block.line}") for name, each in BLOCKS.items() for block in each if block.needs
]

slow = [pytest.mark.docs, pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("page", [pytest.param(name, marks=slow) for name, blocks in BLOCKS.items() if blocks])
def test_every_block_of_a_page_runs(page: str) -> None:
    pages.kept(page, BLOCKS[page], STORE, anew=True)  # where `make docs` looks for it


@pytest.mark.docs
@pytest.mark.slow
@pytest.mark.parametrize("block", NEEDS)
def test_blocks_that_need_more_than_this_machine_has(block: Block) -> None:
    pytest.skip(f"needs {block.needs}")


# ---- what pages are made of


def test_every_source_that_is_linked_is_there() -> None:
    linked = [(name, found) for name, text in TEXTS.items() for found in references.SOURCE.findall(text)]
    for name, target in linked:
        try:
            references.source(target)
        except LookupError as error:
            pytest.fail(f"docs/{name}.md: {error}")


def test_every_fact_of_the_lectures_has_a_section_that_computes_it() -> None:
    lectures = [text for name, text in TEXTS.items() if name.startswith("lectures/")]
    if not lectures:
        pytest.skip("there are no pages of the lectures yet")
    sections = [section for text in lectures for section in pages.sections(text)]
    shown = {fact for section in sections if pages.parse(section) for fact in references.FACT.findall(section)}
    assert {f"F{number}" for number in range(1, 28)} <= shown


def test_the_main_figures_are_those_that_were_measured() -> None:
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    measured = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", results, re.M))
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"): heading for heading in measured}
    rows = re.findall(r"^\|(.*)\| \[([\d-]+)\]\(#([^)]+)\) \|$", TEXTS["benchmarks"], re.M)
    assert len(rows) > 15
    for cells, date, slug in rows:
        heading, (_, weft, peer, *ratio) = slugs[slug], cells.split("|")
        assert date in heading
        values = [_last_number(cell) for cell in (weft, peer)]
        for value in values:
            assert value in measured[heading], f"{value} of {cells} is not in '{heading}'"
        if ratio:
            a, b = (float(value.replace(",", "")) for value in values)
            faster = a / b if "/s" in weft else b / a
            assert faster == pytest.approx(float(ratio[0]), abs=0.006), cells


def _last_number(cell: str) -> str:
    return re.findall(r"[\d.,]*\d", cell)[-1]


def test_every_extra_is_on_the_page_about_installing() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) == set(re.findall(r"^\| `([\w-]+)` \|", TEXTS["start/install"], re.M))


# ---- the site


class Page(HTMLParser):
    """The ids of a page, and what it links and loads."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.ids |= {value for key in ("id", "name") if (value := given.get(key))}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        if (loaded := given.get("src") or (given.get("href") if tag == "link" else None)) and tag != "a":
            self.loaded.append(loaded)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors. What pages printed is taken from where it is kept."""
    pytest.importorskip("sphinx", reason="Sphinx is not installed; `make test-docs` installs it")
    out = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-d",
        str(out / ".doctrees"),
        "docs",
        str(out),
    ]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return out


@pytest.fixture(scope="module")
def built(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


@pytest.mark.docs
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_internal_link_of_the_site_resolves(site: Path, built: dict[Path, Page]) -> None:
    assert len(built) > len(PAGES)
    broken = []
    for path, page in built.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = built.get(target)
            if not target.is_file() or (parts.fragment and there and unquote(parts.fragment) not in there.ids):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


@pytest.mark.docs
@pytest.mark.slow
def test_the_site_loads_nothing_from_a_network(built: dict[Path, Page]) -> None:
    away = {loaded for page in built.values() for loaded in page.loaded if re.match(r"(https?:)?//", loaded)}
    assert not away


@pytest.mark.docs
@pytest.mark.slow
def test_the_search_index_knows_every_page(site: Path) -> None:
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    known = json.loads(index.removeprefix("Search.setIndex(").removesuffix(")"))
    assert set(PAGES) <= set(known["docnames"])
