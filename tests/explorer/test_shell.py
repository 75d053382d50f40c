"""The page around the views: who may load what, where models come from, and what happens when the server is away."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.serve.serving import Served

WEB = Path(__file__).parents[2] / "src" / "weft" / "web"
MAX_WEB_BYTES = 569_500


def test_the_page_may_load_nothing_from_elsewhere(server: Served) -> None:
    answer = server.get("/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert server.get("/web/explorer.js").headers["content-type"].startswith("text/javascript")


def test_only_files_of_the_page_are_given_out(server: Served) -> None:
    for name in ("..%2f__init__.py", "page.html", "nothing.js", "%2e%2e/serve/app.py", "explorer.js%00"):
        assert server.get(f"/web/{name}").status_code == 404


def test_the_page_is_small() -> None:
    assert sum(file.stat().st_size for file in WEB.iterdir() if file.is_file()) <= MAX_WEB_BYTES


def test_a_model_is_described_before_it_is_loaded(server: Served) -> None:
    known = {each["id"]: each["weft"] for each in server.get("/v1/models").json()["data"]}
    assert known["gpt"]["kind"] == "decoder"
    assert known["gpt"]["continues"]
    assert known["pairs"]["writes"]
    assert known["ngram"]["heads"] is None


def test_views_are_offered_and_a_model_is_chosen(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("tokens", model="lstm"))
    page.wait_for_selector("h1")
    assert page.locator("#chooser select").first.input_value() == "lstm"
    page.locator("#chooser select").first.select_option("gpt")
    page.wait_for_function("() => location.hash.includes('model=gpt')")


def test_a_model_that_is_not_there_is_named(page: Any, at: Callable[..., str]) -> None:
    page.goto(at("tokens", model="<img src=x onerror=alert(1)>"))
    page.get_by_text("No model '<img src=x onerror=alert(1)>' on this server", exact=False).wait_for()


# Baselines of the header's items: a copy of each stands beside an empty inline block, whose foot is on its baseline.
BASELINES = """() => [...document.querySelectorAll("header :is(.name, label, select, output, nav a, .present-start)")]
  .filter(each => each.checkVisibility() && getComputedStyle(each).position === "static").map(each => {
    const copy = each.cloneNode(true), probe = document.createElement("i"), line = document.createElement("div");
    const { font, padding, border, minHeight } = getComputedStyle(each);
    Object.assign(copy.style, { font, padding, border, minHeight, display: "inline-block", margin: 0 });
    Object.assign(probe.style, { display: "inline-block" });
    Object.assign(line.style, { position: "fixed", whiteSpace: "nowrap" });
    line.append(copy, probe);
    each.parentElement.append(line);
    const below = probe.getBoundingClientRect().bottom - copy.getBoundingClientRect().top;
    line.remove();
    return Math.round(each.getBoundingClientRect().top + below);
  })"""


@pytest.mark.parametrize(("width", "lines"), [(390, 3), (1280, 2), (1920, 2)])
def test_the_header_stands_on_one_baseline_a_line(page: Any, at: Callable[..., str], width: int, lines: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(at("attention", model="bahdanau"))
    page.wait_for_load_state("networkidle")
    assert len(set(page.evaluate(BASELINES))) == lines
