"""Every view of every kind of model: it opens, reloads, is saved, is accessible, and takes no text for markup."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.explorer.conftest import problems_of
from tests.explorer.reading import saved_svg
from tests.serve.serving import Served, served

from weft.serve.config import Limits, Serving

AXE = Path(__file__).parents[2] / ".venv" / "node_modules" / "axe-core" / "axe.min.js"
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><b>bold</b> & \u202eleft"
MODELS = ("gpt", "lstm", "ngram", "bahdanau", "masked-next", "classify", "pairs")
VIEWS = (
    *("write", "predict", "step", "attention", "surprise", "lens", "saliency", "patch", "search", "experts"),
    *("tokens", "abilities", "runs", "compare", "anatomy"),
)


def offered(page: Any) -> list[str]:
    """The views that the page has for this model."""
    page.wait_for_selector("nav#views a")
    links = page.eval_on_selector_all("nav#views a:not(.lacking)", "all => all.map(each => each.getAttribute('href'))")
    return [link.removeprefix("#/").split("?")[0] for link in links]


def settle(page: Any) -> None:
    """Wait until nothing is asked for any more, and nothing is busy."""
    page.wait_for_selector(".view > *", state="attached")
    page.wait_for_load_state("networkidle")
    page.wait_for_function("() => !document.querySelector('[aria-busy=true]')")


@pytest.mark.parametrize("model", MODELS)
def test_each_view_opens_and_opens_again(page: Any, at: Callable[..., str], model: str) -> None:
    page.goto(at("tokens", model=model))
    views = offered(page)
    assert set(views) <= set(VIEWS)
    assert {"tokens", "runs", "anatomy"} <= set(views)
    for view in views:
        page.goto("about:blank")
        page.goto(at(view, model=model))
        settle(page)
        assert not problems_of(page), (view, problems_of(page))
        heading = page.locator("h1").inner_text()
        page.reload()
        settle(page)
        assert page.locator("h1").inner_text() == heading
        assert not problems_of(page), (view, problems_of(page))


# Texts smaller than `least` pixels, texts of a picture on each other, and the page if it is wider than the window.
FAULTS = """least => {
  const faults = [], texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, { parentElement: parent } = node, svg = parent.closest("svg");
    if (!node.textContent.trim() || parent.closest("script, style, option, .unseen, .skip, [hidden]")) continue;
    if (!parent.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect(), view = svg?.viewBox.baseVal.width;
    if (!box.width) continue;
    const scale = (parent.currentCSSZoom ?? 1) * (view ? svg.getBoundingClientRect().width / view : 1);
    const size = parseFloat(getComputedStyle(parent).fontSize) * scale;
    if (size < least - 0.1) faults.push(`${node.textContent.trim()}: ${size.toFixed(1)} px`);
    if (svg && parent.closest(".stage")) texts.push([node.textContent, box]);
  }
  texts.forEach(([name, a], n) => texts.slice(n + 1).forEach(([other, b]) => {
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    if (wide > 3 && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4) faults.push(`${name} | ${other}`);
  }));
  if (document.documentElement.scrollWidth > innerWidth) faults.push("the page is too wide");
  return faults;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280, 1920])
@pytest.mark.parametrize("model", MODELS)
def test_nothing_overlaps_overflows_or_is_too_small(
    page: Any, at: Callable[..., str], model: str, width: int, scheme: str
) -> None:
    page.set_viewport_size({"width": width, "height": 1080 if width == 1920 else 900})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.goto(at("tokens", model=model))
    for view in offered(page):
        page.goto(at(view, model=model))
        settle(page)
        assert not page.evaluate(FAULTS, 12), view
        if width == 1920:
            page.keyboard.press("p")
            page.wait_for_timeout(100)
            assert not page.evaluate(FAULTS, 18), f"{view}, presented"
            page.keyboard.press("p")


@pytest.mark.skipif(not AXE.is_file(), reason="needs axe-core: make test-explorer")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_views_are_accessible(browser: Any, server: Served, model: str, scheme: str) -> None:
    context = browser.new_context(bypass_csp=True, reduced_motion="reduce", color_scheme=scheme)
    page = context.new_page()
    page.goto(f"{server.url}/#/tokens?model={model}")
    for view in offered(page):
        page.goto(f"{server.url}/#/{view}?model={model}")
        settle(page)
        page.add_script_tag(path=str(AXE))
        found = page.evaluate("axe.run(document).then(result => result.violations)")
        bad = [each for each in found if each["impact"] in ("serious", "critical")]
        examples = [(each["id"], [node["html"][:200] for node in each["nodes"][:3]]) for each in bad]
        assert not bad, (view, examples)
    context.close()


@pytest.mark.parametrize("model", ["gpt", "pairs", "masked-next"])
def test_text_is_never_markup(page: Any, at: Callable[..., str], model: str) -> None:
    page.goto(at("tokens", model=model))
    for view in offered(page):
        page.goto("about:blank")
        page.goto(at(view, model=model, text=HOSTILE, prompt=HOSTILE))
        page.wait_for_selector(".view > *")
        page.wait_for_load_state("networkidle")
        assert page.title() != "owned"
        assert page.locator("img[src=x], .view b:text-is('bold')").count() == 0


def test_each_view_is_saved_as_a_picture(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("tokens", model="gpt"))
    for view in offered(page):
        page.goto("about:blank")  # no button of the view before is pressed
        page.goto(at(view, model="gpt"))
        settle(page)
        if not page.get_by_role("button", name="Save SVG").count():
            assert view in ("runs", "compare", "abilities"), view  # nothing is chosen there yet
            continue
        text = saved_svg(page)
        assert text.startswith("<svg") and "var(--" not in text
        assert "http" not in text.replace("http://www.w3.org/", "")


def test_the_page_goes_on_when_the_server_is_back(browser: Any, runs: Path) -> None:
    page = browser.new_page(reduced_motion="reduce")
    with served(runs) as first:
        port = first.port
        page.goto(f"{first.url}/#/surprise?model=gpt&text={quote('A tale')}")
        settle(page)
    page.locator("textarea").first.fill("Another tale")
    page.get_by_text("The server is not responding").wait_for()
    with served(runs, port=port):
        page.get_by_text("The server is not responding").wait_for(state="detached")
        settle(page)
        assert page.locator("textarea").first.input_value() in ("Another tale", "A tale")
    page.close()


def test_a_key_is_asked_for(browser: Any, runs: Path) -> None:
    with served(runs, serving=Serving(keys=("a long secret",), limits=Limits(max_tokens=64))) as server:
        page = browser.new_page(reduced_motion="reduce")
        page.goto(f"{server.url}/#/tokens?model=gpt")
        page.get_by_label("Key").fill("a long secret")
        page.get_by_role("button", name="Continue").click()
        settle(page)
        assert page.locator("h1").inner_text() == "Tokens"
        page.close()
