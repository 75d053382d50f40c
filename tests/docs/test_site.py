"""The documentation as a whole: references that exist, a site whose links resolve, and outputs that still come.

The tests marked `docs` run every block of every page; `make test-docs` runs these, in about half an hour.
"""

import ast
import json
import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from pygments.lexers import TextLexer

from ext import pages, record, references
from ext.pages import DOCS, FIGURES, ROOT, Block
from ext.site import Site

NAMES = [name for name in pages.page_names() if pages.page_path(name).suffix == ".md"]
TEXTS = {name: pages.page_path(name).read_text(encoding="utf-8") for name in [*NAMES, "../README"]}
NEEDS = [
    pytest.param(block, id=f"{name}:{block.line}")
    for name, text in TEXTS.items()
    for block in pages.parse(text)
    if "needs" in block.options
]
MAX_RECORDED_BYTES = 3 << 20  # outputs and figures in the repository
MAX_SITE_BYTES = 25 << 20


@pytest.mark.docs
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", record.runnable_pages([]))
def test_the_recorded_outputs_of_a_page_still_come(page: str) -> None:
    problems = record.check(page)
    assert not problems, "\n\n".join(problems)


@pytest.mark.docs
@pytest.mark.slow
@pytest.mark.parametrize("block", NEEDS)
def test_blocks_that_need_more_than_this_machine_has(block: Block) -> None:
    pytest.skip(f"needs {block.options['needs']}")


# ---- pages


@pytest.mark.parametrize("page", TEXTS)
def test_everything_that_a_page_refers_to_exists(page: str) -> None:
    assert references.problems(TEXTS[page]) == []


@pytest.mark.parametrize("page", TEXTS)
def test_every_name_that_a_page_imports_from_weft_exists(page: str) -> None:
    for block in pages.parse(TEXTS[page]):
        for node in ast.walk(ast.parse(block.body)) if block.kind == "python" else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weft"):
                names = [alias.name for alias in node.names]
                exec(f"from {node.module} import {', '.join(names)}", {})


def test_references_to_missing_things_are_found() -> None:
    text = "`weft/nn/gone.py` `weft/nn/mask.py:Gone` `weft trian` `optimizer.gone` **F99** `some text` `a.b=1`"
    assert len(references.problems(text)) == 5


def test_recorded_outputs_and_figures_are_small() -> None:
    outputs = sum(len(block.recorded or "") for text in TEXTS.values() for block in pages.parse(text))
    figures = sum(path.stat().st_size for path in (DOCS / FIGURES).rglob("*.*"))
    notebooks = sum(path.stat().st_size for path in DOCS.rglob("*.ipynb"))
    assert outputs + figures + notebooks < MAX_RECORDED_BYTES


def test_every_fact_of_the_lectures_has_a_section_that_computes_it() -> None:
    lectures = [text for name, text in TEXTS.items() if name.startswith("lectures/")]
    sections = [section for text in lectures for section in re.split(r"(?m)^(?=##? )", text)]
    shown = {fact for section in sections if pages.parse(section) for fact in re.findall(r"\*\*(F\d+)\*\*", section)}
    assert {f"F{number}" for number in range(1, 28)} <= shown


def test_the_main_figures_are_measured() -> None:
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    measured = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", results, re.M))
    slugs = {references.slug(heading): heading for heading in measured}
    rows = re.findall(r"^\|(.*)\| \[([\d-]+)\]\(\.\./benchmarks/RESULTS\.md#([^)]+)\) \|$", TEXTS["benchmarks"], re.M)
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


def test_the_page_about_installing_lists_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) == set(re.findall(r"^\| `([\w-]+)` \|", TEXTS["start/install"], re.M))


# ---- the site


class Page(HTMLParser):
    """The ids of a page, its links, and the files that it loads."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.ids |= {value for key in ("id", "name") if (value := values.get(key))}
        if tag == "a" and values.get("href"):
            self.links.append(values["href"] or "")
        if (loaded := values.get("src") or (values.get("href") if tag == "link" else None)) and tag != "a":
            self.loaded.append(loaded)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from the recorded outputs; its sources without colours, which take most of the time."""
    out = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ext.site.get_lexer_for_filename", lambda name: TextLexer())
        site = Site()
    site.write(out)
    assert site.problems == []
    return out


@pytest.fixture(scope="module")
def built(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def test_every_internal_link_of_the_site_resolves(site: Path, built: dict[Path, Page]) -> None:
    assert len(built) > len(NAMES)
    broken = []
    for path, page in built.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            linked = built.get(target)
            if not target.is_file() or (parts.fragment and linked and unquote(parts.fragment) not in linked.ids):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert not broken


def test_the_site_is_small_and_loads_nothing_from_a_network(site: Path, built: dict[Path, Page]) -> None:
    assert not {loaded for page in built.values() for loaded in page.loaded if re.match(r"(https?:)?//", loaded)}
    assert sum(path.stat().st_size for path in site.rglob("*.*")) < MAX_SITE_BYTES


def test_the_search_index_contains_every_page(site: Path) -> None:
    text = (site / "search.js").read_text(encoding="utf-8")
    entries = json.loads(text.removeprefix("window.searchIndex=").rstrip(";\n"))
    known = {address.partition("#")[0].removesuffix(".html") for address, *_ in entries}
    assert {re.sub(r"README$", "index", name) for name in pages.page_names()} <= known


FRONT = """\
# Front

## Learn

- [Page](page.md#section-two)
"""
PAGE = """\
# A *page*

`names.txt`:

```text
Ada & Grace
```

<!-- run: lines 1 -->
```sh
cat names.txt
```

```output
…
last <line>
```

<!-- run python
print("never shown")
-->

<!-- run: needs several GPUs -->
```sh
weft train gpt2 --processes 8
```

![a drawing](figures/page/a.svg)
![not recorded yet](figures/page/b.svg)

## Section two

$x^2$ [gone](gone.md) [no section](page.md#three)
"""


def test_a_page_of_a_small_site(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    (docs / "figures" / "page").mkdir(parents=True)
    (docs / "figures" / "page" / "a.svg").write_text("<svg/>")
    (docs / "README.md").write_text(FRONT)
    (docs / "page.md").write_text(PAGE)
    site = Site(tmp_path)
    site.write(tmp_path / "out")
    assert site.problems == ["docs/page.md: gone.md: no such file", "docs/page.md: page.md#three: no such section"]
    html = (tmp_path / "out" / "page.html").read_text(encoding="utf-8")
    assert "<title>A page · weft</title>" in html and '<h2 id="section-two">' in html
    assert "Ada &amp; Grace" in html and "last &lt;line&gt;" in html and "never shown" not in html
    assert "Not run here: needs several GPUs." in html
    assert 'alt="a drawing"' in html and "not recorded yet" not in html
    assert (tmp_path / "out" / "figures" / "page" / "a.svg").is_file()
    assert '<svg class="math" role="img" aria-label="x^2"' in html
