"""What the directives and roles make of a page, and what they say of one that is wrong."""

import io
from contextlib import suppress
from pathlib import Path

import pytest
from tests.later import Later

pytest.importorskip("sphinx", reason="Sphinx is not installed; `make docs` installs it")
pytestmark = pytest.mark.filterwarnings("ignore:.*BuildEnvironment.app")  # which Sphinx 11 will lack
application, docutils = Later("sphinx.application"), Later("sphinx.util.docutils")

PAGE = """\
# A page

```{file} names.txt
Ada & Grace
```
```{run}
:lines: 1
:figure: a.svg
:alt: a drawing
cat names.txt; echo '<svg xmlns="http://www.w3.org/2000/svg"/>' > a.svg; echo last
```
```{run-python}
:quiet:
print("never shown")
```
```{run}
:hidden:
echo hidden output
```
```{run}
:needs: several GPUs
weft train gpt2 --processes 8
```

{src}`weft/nn/attention.py:SelfAttention` {src}`lectures/gpt.py` {fact}`F5`
{setting}`optimizer=muon` {cmd}`weft train --resume` {math}`x^2`
"""


def build(text: str, folder: Path) -> tuple[str, str]:
    """A page as HTML, and what Sphinx said of it."""
    (folder / "docs" / "reference").mkdir(parents=True)
    (folder / "docs" / "index.md").write_text(f"{text}\n```{{toctree}}\nreference/settings\nreference/commands\n```\n")
    for name in ("settings", "commands"):
        (folder / "docs" / "reference" / f"{name}.md").write_text("# A page of the reference\n")
    said, settings = io.StringIO(), {"html_math_renderer": "mathml", "executed": str(folder / "executed")}
    with docutils.patch_docutils(), docutils.docutils_namespace(), suppress(LookupError):  # what was named isn't there
        application.Sphinx(
            srcdir=folder / "docs",
            confdir=None,
            outdir=folder / "site",
            doctreedir=folder / "trees",
            buildername="html",
            confoverrides={"extensions": ["myst_parser", "ext.site"], **settings},
            status=None,
            warning=said,
        ).build()
    return (folder / "site" / "index.html").read_text(encoding="utf-8"), said.getvalue()


def test_a_page_shows_what_was_run_and_what_it_printed(tmp_path: Path) -> None:
    page, said = build(PAGE, tmp_path)
    assert not said
    assert "names.txt" in page and "Ada &amp; Grace" in page
    assert "…\nlast" in page and 'alt="a drawing"' in page
    assert "never shown" in page and page.count("never shown") == 1  # the code, not what it printed
    assert "hidden output" not in page
    assert "not run here: needs several GPUs" in page
    for link in (
        "source/src/weft/nn/attention.py.html#L-",
        "source/tests/lectures/test_f05_perplexity.py.html",
        "reference/settings.html#setting-optimizer-muon",
        "reference/commands.html#weft-train",
    ):
        assert f'href="{link}' in page
    assert "<math" in page and "mathjax" not in page.lower()
    source = (tmp_path / "site" / "source" / "src" / "weft" / "nn" / "attention.py.html").read_text(encoding="utf-8")
    assert 'id="L-1"' in source and "SelfAttention" in source


def test_what_is_wrong_with_a_page_is_said_with_its_line(tmp_path: Path) -> None:
    _, said = build("# A page\n\n{src}`weft/nn/attention.py:Nothing`\n\n```{run}\nexit 3\n```\n", tmp_path)
    assert "index.md:3: WARNING: {src}: weft/nn/attention.py: no 'Nothing' is defined in it" in said
    assert "index.md:5: WARNING: exit code 3, expected 0" in said
