"""Presentation mode and stories: type, keys, the pen, every slide of every story, and a story without a server."""

from pathlib import Path
from typing import Any

import pytest
from tests.explorer.conftest import problems_of
from tests.explorer.reading import At
from tests.serve.serving import Served

from weft.serve.stories import stories

TEXT = "A tale is told"
SCREEN = {"width": 1920, "height": 1080}
# Visible texts below 18 pixels; a drawing's text has the scale of its drawing.
SMALL = """() => {
  const found = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement, range = document.createRange();
    if (!walk.currentNode.data.trim() || !element.checkVisibility()) continue;
    if (element.closest("script, .unseen, .skip")) continue;
    range.selectNode(walk.currentNode);
    if (!range.getBoundingClientRect().width) continue;
    const scale = element.getScreenCTM ? Math.abs(element.getScreenCTM().a || element.getScreenCTM().b)
      : element.currentCSSZoom;
    const size = parseFloat(getComputedStyle(element).fontSize) * scale;
    if (size < 17.9) found.push(`${walk.currentNode.data.slice(0, 20)} ${size.toFixed(1)}`);
  }
  return found;
}"""


def told(page: Any, server: Served, name: str) -> None:
    page.goto(f"{server.url}/#/?story={name}")
    page.wait_for_selector(".story-says p")


def turn(page: Any, number: int) -> None:
    page.keyboard.press("ArrowRight")
    page.wait_for_function(f"() => document.querySelector('.story-turn span').textContent.startsWith('{number} ')")


def complete(page: Any) -> None:
    page.wait_for_load_state("networkidle")
    page.locator(".view :is(svg, canvas, table, .write-text, .tok-pieces, .predict-rows)").filter(
        visible=True
    ).first.wait_for()


def test_p_shows_the_view_alone_with_large_type_and_escape_ends_it(page: Any, at: At) -> None:
    page.set_viewport_size(SCREEN)
    page.goto(at("step", model="gpt", text=TEXT, stage="tokens"))
    page.wait_for_selector(".stage-picture svg text")
    page.keyboard.press("p")
    assert not page.locator("header").is_visible() and not page.locator(".stage-bar").is_visible()
    assert page.evaluate(SMALL) == []
    box = page.locator(".stage").bounding_box()
    assert box["y"] + box["height"] <= SCREEN["height"] and box["height"] > 1000
    for key in ("ArrowRight", "PageDown"):  # a presenter's clicker sends PageDown
        page.keyboard.press(key)
    assert page.locator(".stage-caption b").inner_text() not in ("Tokens", "Embedding")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")  # out of the zoom
    assert page.locator("body.presenting").count() == 1
    page.keyboard.press("Escape")
    assert page.locator("body.presenting").count() == 0 and page.locator("header").is_visible()


def test_letters_that_are_typed_are_no_keys(page: Any, at: At) -> None:
    page.goto(at("surprise", model="gpt", text=TEXT))
    page.locator("textarea").press_sequentially("pd")
    assert page.locator("body.presenting").count() == 0


def test_arrows_step_through_the_tokens_of_a_text(page: Any, at: At) -> None:
    page.goto(at("surprise", model="gpt", text=TEXT, place=2))
    page.wait_for_selector(".shaded-text")
    page.keyboard.press("p")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "place=4" in page.url


def test_arrows_step_through_the_cells_of_a_table(page: Any, at: At) -> None:
    page.goto(at("lens", model="gpt", text=TEXT))
    chosen = page.locator(".lens-chosen")
    first = int(chosen.get_attribute("data-column"))
    page.keyboard.press("p")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert int(chosen.get_attribute("data-column")) == first + 2


def test_a_line_can_be_drawn(page: Any, at: At) -> None:
    page.goto(at("step", model="gpt", text=TEXT, stage="tokens"))
    page.wait_for_selector(".stage-picture svg text")
    page.keyboard.press("p")
    page.keyboard.press("d")
    page.mouse.move(300, 300)
    page.mouse.down()
    page.mouse.move(500, 350)
    page.mouse.up()
    assert "L500 350" in page.locator(".pen path").get_attribute("d")
    page.keyboard.press("ArrowRight")  # the next step takes the line away, not the pen
    assert page.locator(".pen path").count() == 0 and page.locator(".pen").count() == 1
    page.keyboard.press("Escape")
    assert page.locator(".pen").count() == 0 and page.locator("body.presenting").count() == 1


@pytest.mark.parametrize("name", list(stories()))
def test_every_slide_is_shown_and_legible(page: Any, server: Served, name: str) -> None:
    page.set_viewport_size(SCREEN)
    told(page, server, name)
    slides = stories()[name].slides
    for number, slide in enumerate(slides, 1):
        if number > 1:
            turn(page, number)
        complete(page)
        assert page.locator(".story-says p").first.inner_text() == slide.says[0]
        assert not problems_of(page) and page.evaluate(SMALL) == [], (name, number)
        assert page.evaluate("document.documentElement.scrollHeight") == SCREEN["height"]
        assert f"#/{slide.view}?" in page.url or page.locator(".story-lacks code").count()
    page.keyboard.press("Home")
    page.wait_for_function("() => document.querySelector('.story-turn span').textContent.startsWith('1 ')")


def test_a_text_of_ones_own_is_kept_through_a_story(page: Any, server: Served) -> None:
    told(page, server, "attention")
    page.wait_for_selector(".stage-picture svg text")
    page.locator(".stage-say:not(.stage-source)").click()
    page.keyboard.press("Control+a")
    page.keyboard.type("Told")
    page.keyboard.press("Enter")
    page.wait_for_url("**text=Told**")
    turn(page, 2)
    page.wait_for_url("**text=Told**stage=embedding**")


def test_a_saved_story_needs_no_server(page: Any, browser: Any, server: Served, tmp_path: Path) -> None:
    told(page, server, "attention")
    complete(page)
    with page.expect_download(timeout=60_000) as download:
        page.locator(".story-save").click()
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    context = browser.new_context(viewport=SCREEN, reduced_motion="reduce", offline=True)
    alone, faults = context.new_page(), list[str]()
    alone.on("pageerror", lambda error: faults.append(str(error)))
    alone.on("request", lambda request: faults.extend([request.url] if request.url.startswith("http") else []))
    alone.goto(file.as_uri())
    alone.wait_for_selector(".story-says p")
    for number, slide in enumerate(stories()["attention"].slides, 1):
        if number > 1:
            turn(alone, number)
        complete(alone)
        assert f"#/{slide.view}?" in alone.url and not problems_of(alone)
    assert not faults and alone.locator(".story-save").count() == 0
    context.close()
