"""Predict: labels, numbers, tags, answers and similar texts, with what each depends on."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.explorer.conftest import problems_of
from tests.explorer.reading import At, saved_svg
from tests.explorer.test_every_view import HOSTILE, settle
from tests.serve.predicting import train_predictors
from tests.serve.serving import Served, served

import weft

TEXT, CONTEXT = "Grace likes Oslo", "Here Grace is in Lima. Ken is in Rome."
KINDS = ("classify", "entail", "regress", "tag", "answer", "contrastive")


@pytest.fixture(scope="module")
def predictors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_predictors(tmp_path_factory.mktemp("predict"))


@pytest.fixture(scope="module")
def predicting(predictors: Path) -> Iterator[Served]:
    with served(predictors) as server:
        yield server


@pytest.fixture
def to(page: Any, predicting: Served) -> Callable[..., None]:
    """Open a view of one of the predictors: to("predict", model="tag", text="A tale")."""

    def go(path: str, **state: Any) -> None:
        page.goto("about:blank")
        page.goto(f"{predicting.url}/#/{path}?{urlencode(state)}")
        settle(page)

    return go


@pytest.mark.parametrize("model", KINDS)
def test_it_opens_with_a_sample_and_every_other_view_opens(page: Any, to: Callable[..., None], model: str) -> None:
    to("predict", model=model)
    assert page.locator("h1").inner_text() == "Predict"
    assert page.get_by_text("Sample from the held-out data.").is_visible()
    assert all(page.locator("textarea").nth(n).input_value() for n in range(2 if model in ("entail", "answer") else 1))
    assert page.locator(".predict-depends .shaded-token").count() > 2
    assert page.locator(".predict-result h2").count() == 1
    for view in ("step", "attention"):
        to(view, model=model)
        assert not problems_of(page), (view, problems_of(page))
    to("surprise", model=model)
    assert "which predicts no tokens. Open Predict, Inside a step or Attention instead." in page.locator(
        ".view"
    ).inner_text().replace("\n", " ")
    page.get_by_role("link", name="Predict").last.click()
    page.wait_for_selector(".predict-result h2")


def test_labels_are_those_of_the_run_and_another_can_be_explained(
    page: Any, to: Callable[..., None], predictors: Path
) -> None:
    to("predict", model="classify", text=TEXT)
    labels = weft.load(predictors / "classify").classify([TEXT])[0]
    shown = page.locator(".predict-rows .write-row").all_inner_texts()
    assert [text.split()[0] for text in shown] == list(labels)
    assert [float(text.split()[-1].rstrip("%")) for text in shown] == pytest.approx(
        [100 * p for p in labels.values()], abs=0.6
    )
    page.locator(".predict-rows .write-row").nth(1).click()
    page.wait_for_function("() => location.hash.includes('output=')")
    page.wait_for_selector(".predict-rows .write-row:nth-child(2)[aria-current]")
    assert page.locator(".saliency-target").inner_text().startswith(list(labels)[1])
    assert "weft classify runs/classify --json" in page.locator(".tools code").inner_text()
    page.reload()
    page.wait_for_selector(".predict-rows .write-row:nth-child(2)[aria-current]")
    assert saved_svg(page).startswith("<svg")


def test_words_are_tagged_and_the_answer_is_marked(page: Any, to: Callable[..., None], predictors: Path) -> None:
    to("predict", model="tag", text=TEXT)
    tags = [tag for tag, _ in weft.load(predictors / "tag").tag([TEXT.split()])[0]]
    assert page.locator(".predict-word .predict-tag").all_inner_texts() == tags
    page.locator(".predict-word").nth(2).click()
    page.wait_for_selector(".predict-word:nth-child(3)[aria-pressed=true]")
    page.get_by_label("Text", exact=True).fill("")
    page.get_by_text("Type a text to tag its words.").wait_for()
    to("predict", model="answer", text="where is Ken?", second=CONTEXT)
    answer = weft.load(predictors / "answer").answer(["where is Ken?"], [CONTEXT])[0]
    assert page.locator("mark").inner_text() == answer.text == page.locator(".predict-headline b").inner_text()
    assert page.locator(".predict-context").inner_text() == CONTEXT


def test_a_text_is_compared_with_another(page: Any, to: Callable[..., None], predictors: Path) -> None:
    to("predict", model="contrastive", text=TEXT)
    assert page.locator(".predict-rows .write-row").count() == 8
    page.get_by_label("Compare with (optional)").fill(CONTEXT)
    page.get_by_role("heading", name="Similarity").wait_for()
    first, second = weft.load(predictors / "contrastive").embed([TEXT, CONTEXT])
    cosine = float(page.locator(".predict-headline b").inner_text().replace("−", "-"))
    assert cosine == pytest.approx(float(first @ second), abs=6e-4)


@pytest.mark.parametrize("model", KINDS)
def test_it_fits_a_phone_and_takes_no_text_for_markup(page: Any, to: Callable[..., None], model: str) -> None:
    page.set_viewport_size({"width": 390, "height": 900})
    page.emulate_media(color_scheme="dark")
    pair = {"second": HOSTILE} if model in ("entail", "answer", "contrastive") else {}
    to("predict", model=model, text=HOSTILE, **pair)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.title() != "owned" and page.locator("img[src=x]").count() == 0


def test_a_model_without_a_view_says_why(page: Any, at: At) -> None:
    page.goto(at("predict", model="gpt"))
    page.get_by_text("gpt is a language model, which predicts tokens, not labels, numbers or vectors.").wait_for()
    page.goto(at("lens", model="lstm"))
    page.get_by_text("lstm is a language model, which has no residual stream").wait_for()
    assert page.locator("nav .lacking").all_inner_texts() == ["Predict", "Attention", "Lens", "Experts"]
    page.locator("#chooser select").first.select_option("gpt")  # it has this view
    page.wait_for_function("() => document.title === 'Lens · gpt · weft'")
    page.locator("#chooser select").first.select_option("classify")  # it does not: its first view is opened
    page.wait_for_function("() => document.title === 'Predict · classify · weft'")
