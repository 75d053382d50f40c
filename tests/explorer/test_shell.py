"""The page around the views: who may load what, where models come from, and what happens when the server is away."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.serve.serving import RUNS, Served, served

from weft.serve.library import SEE_LOG

WEB = Path(__file__).parents[2] / "src" / "weft" / "web"
MAX_WEB_BYTES = 550_000


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


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A folder of one good model, one with a setting that is not one, and one without a tokenizer."""
    for name in ("gpt", "setting", "tokenizer"):
        shutil.copytree(RUNS / "gpt", tmp_path / name)
    config = tmp_path / "setting" / "config.toml"
    config.write_text(config.read_text("utf-8").replace("layers = 1", 'layers = "one"'), "utf-8")
    (tmp_path / "tokenizer" / "tokenizer.json").unlink()
    return tmp_path


def test_why_a_model_cannot_be_loaded_is_told_where_files_may_be_shown(damaged: Path) -> None:
    setting, tokenizer = (
        "config.toml: model.layers = 'one': expected a whole number",
        "no tokenizer.json in this folder",
    )
    for show, problems in ((True, [None, setting, tokenizer]), (False, [None, "its recipe cannot be read", SEE_LOG])):
        with served(damaged, show_errors=show) as server:
            refused = server.refused("/v1/explain/text", {"model": "tokenizer"}, 409)
            assert refused == f"model 'tokenizer' cannot be loaded: {problems[2]}"
            assert [each.get("problem") for each in server.get("/v1/models").json()["data"]] == problems


def test_cards_and_the_menu_say_why_a_model_cannot_be_loaded(browser: Any, damaged: Path) -> None:
    with served(damaged, show_errors=True) as server:
        page = browser.new_page(reduced_motion="reduce")
        page.goto(server.url)
        page.locator(".home-candidate").first.wait_for()  # of the model that can be loaded
        cards = page.locator(".home-card")
        cards.get_by_text("Cannot be loaded: config.toml: model.layers = 'one': expected a whole number").wait_for()
        cards.get_by_text("Model 'tokenizer' cannot be loaded: no tokenizer.json in this folder").wait_for()
        page.goto(f"{server.url}/#/tokens?model=setting")
        page.get_by_text("Model 'setting' cannot be loaded: config.toml: ").wait_for()
        page.reload()
        page.wait_for_selector("#chooser option", state="attached")
        options = page.locator("#chooser option").all_text_contents()
        assert [each.split(": ")[0] for each in options] == ["gpt", "tokenizer", "setting"]
        assert options[1].endswith("no tokenizer.json in this folder") and options[2].endswith("a whole number")
        page.close()


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
