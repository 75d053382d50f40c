"""Inside a step: models of every kind on the stage, with the server's own numbers, by mouse and by keyboard."""

import json
import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.explorer.reading import At, saved_svg
from tests.serve.serving import Served, served

import weft
from weft.figures.shaded import percent

TEXT = "A tale is told"
FAMILIES = ("gpt", "lstm", "ngram", "bahdanau", "pairs", "masked-next", "classify")
CAPTION, SAY = ".stage-caption b", ".stage-say:not(.stage-source)"


def asked(server: Served, model: str, **more: Any) -> Any:
    """What the route answers."""
    answer = server.post("/v1/explain/step", {"model": model, "input": TEXT, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["step"]


def opened(page: Any, address: str) -> None:
    page.goto(address)
    page.wait_for_selector(".stage-picture svg text")


def numbers(texts: list[str]) -> list[float]:
    """The texts that are a number."""
    plain = [text.replace("−", "-") for text in texts]
    return [float(text) for text in plain if re.fullmatch(r"-?\d*\.?\d+", text)]


def texts(page: Any, under: str = "") -> list[str]:
    return list(page.locator(f".stage-picture svg {under} text").all_text_contents())


# Texts of the picture that are small, or outside it, or on another text.
FAULTS = """() => {
  const svg = document.querySelector(".stage-picture svg"), box = svg.getBoundingClientRect();
  const all = [...svg.querySelectorAll("text")].filter(each => each.textContent.trim())
    .map(each => ({ name: each.textContent, size: parseFloat(getComputedStyle(each).fontSize),
      at: each.getBoundingClientRect() }));
  const faults = all.filter(({ size, at }) => size < 12 || at.left < box.left - 1 || at.right > box.right + 1
    || at.top < box.top - 1 || at.bottom > box.bottom + 1).map(({ name }) => name);
  all.forEach(({ name, at: a }, n) => all.slice(n + 1).forEach(({ name: other, at: b }) => {
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 3 && high > 4) faults.push(`${name} | ${other}`);
  }));
  if (document.documentElement.scrollWidth > innerWidth) faults.push("the page is too wide");
  return faults;
}"""


@pytest.mark.parametrize("size", [(390, 844), (1280, 800), (1920, 1080)], ids=["390", "1280", "1920"])
@pytest.mark.parametrize("model", FAMILIES)
def test_each_family_is_legible_and_its_steps_follow_each_other(page: Any, at: At, model: str, size: Any) -> None:
    page.set_viewport_size({"width": size[0], "height": size[1]})
    opened(page, at("step", model=model, text=TEXT, stage="tokens"))
    assert not page.evaluate(FAULTS)
    titles = []
    for _ in range(page.locator(".stage-ticks button").count()):
        titles.append(page.locator(CAPTION).inner_text())
        page.keyboard.press("ArrowRight")
    assert len(titles) >= 6 and all(one != other for one, other in pairwise(titles))
    assert page.locator(".stage-picture svg g.later").count() == 0
    assert not page.evaluate(FAULTS)


def test_weights_and_probabilities_are_those_of_the_route(page: Any, at: At, server: Served) -> None:
    step = asked(server, "gpt")
    threads = step["threads"]
    own, here = threads["block"]["attention"], threads["rows"].index(step["place"])
    opened(page, at("step", model="gpt", text=TEXT, head=1))
    shown = page.locator(".stage-picture svg .halo").all_text_contents()
    assert [float(each) for each in shown] == pytest.approx(own["weights"][1][here], abs=0.0051)
    percents = [each for each in texts(page, ".word") if each.endswith("%")]
    finals = [each["final"] for each in step["choice"]["candidates"][: len(percents) - 1]]
    assert percents[:-1] == [percent(p) for p in finals]


def test_it_opens_on_the_head_that_looks_hardest_at_another_token(page: Any, at: At, server: Served) -> None:
    threads = asked(server, "gpt")["threads"]
    here = len(threads["rows"]) - 1  # the last token is followed
    elsewhere = [max(head[here][1:here]) for head in threads["block"]["attention"]["weights"]]
    opened(page, at("step", model="gpt", text=TEXT))
    assert f"Attention, head {elsewhere.index(max(elsewhere))}" in texts(page)


def test_zooming_ends_at_a_number_with_its_operands(page: Any, at: At, server: Served) -> None:
    step = asked(server, "gpt")
    threads, choice = step["threads"], step["choice"]
    attention, here = threads["block"]["attention"], threads["rows"].index(step["place"])
    opened(page, at("step", model="gpt", text=TEXT, stage="scores", head=0))
    page.keyboard.press("Enter")
    scores = [score for score in attention["scores"][0][here] if score is not None]
    rows = page.locator(f'.stage-picture svg [data-go^="head/{here}/"]')
    shown = [numbers(row.locator("text").all_text_contents())[-1] for row in rows.all()]
    assert shown == pytest.approx(scores, abs=0.0051)
    rows.nth(2).click()
    q, k = attention["q"][0][here], attention["k"][0][2]
    products = [a * b for a, b in zip(q, k, strict=True)]
    written = numbers(texts(page))
    assert written == pytest.approx([*q, *k, *products], abs=0.0051)
    total = re.findall(r"−?\d+\.\d+", texts(page)[-1])
    assert float(total[-1].replace("−", "-")) == pytest.approx(sum(products) * attention["scale"], abs=0.0051)
    assert page.locator(".stage-crumbs").inner_text().count("›") == 4
    page.keyboard.press("ArrowRight")
    assert page.url.endswith("zoom=head%2F" + f"{here}%2F2")  # siblings are not in the address
    for _ in range(4):
        page.keyboard.press("Escape")
    assert page.locator(".stage-crumbs b").inner_text() == "Model"
    opened(page, at("step", model="gpt", text=TEXT, zoom="logit/0"))
    factors = choice["factors"]
    terms = [a * b for a, b in zip(factors["rows"][0], factors["features"], strict=True)]
    assert numbers(texts(page))[-len(terms) :] == pytest.approx(terms, abs=0.0051)
    unit = threads["block"]["feedforward"]["units"][0]
    opened(page, at("step", model="gpt", text=TEXT, zoom=f"ff/{unit}"))
    hidden = threads["block"]["feedforward"]["hidden"][unit]
    assert texts(page)[-1].endswith(f"{abs(hidden):.{2 if abs(hidden) >= 0.1 else 3}f}")


def test_a_unit_of_a_cell_is_computed_from_its_gates(page: Any, at: At, server: Served) -> None:
    layer = asked(server, "lstm")["threads"]["layers"][0]
    opened(page, at("step", model="lstm", text=TEXT, zoom="layer/0/3"))
    i, f, g, o = (gate[3] for gate in layer["values"])
    cell = f * layer["previous"][1][3] + i * g
    shown = numbers(texts(page))
    assert shown[-1] == pytest.approx(o * math.tanh(cell), abs=0.0051) and shown[4] == pytest.approx(cell, abs=0.0051)
    assert shown[-1] == pytest.approx(layer["state"][0][3], abs=0.0051)


def test_the_encoder_is_opened_down_to_a_number(page: Any, at: At, server: Served) -> None:
    opened(page, at("step", model="pairs", text=TEXT, stage="source"))
    title, crumbs = page.locator(CAPTION), page.locator(".stage-crumbs")
    page.keyboard.press("Enter")
    assert title.inner_text() == "For the decoder" and "zoom=encoder" in page.url
    token = page.locator('.stage-picture [data-key="follow=2"]')
    token.click()
    page.wait_for_function("() => location.hash.includes('source_place=2')")
    page.wait_for_function("() => !document.querySelector('[aria-busy=true]')")
    threads = asked(server, "pairs", source_place=2)["threads"]["source"]["encoder"]
    weights = threads["block"]["attention"]["weights"][0][2]
    page.locator('.stage-picture [data-key="head=0"]').press("Enter")
    page.goto(page.url.replace("zoom=encoder", "zoom=encoder%2Fhead%2F2"))
    page.wait_for_function("() => document.querySelector('.stage-crumbs').textContent.includes('Encoder')")
    assert [each for each in texts(page) if each.endswith("%")] == [percent(weight) for weight in weights]
    for expected in ("Head", "Block", "Encoder", "Model"):
        page.keyboard.press("Escape")
        crumbs.locator("b", has_text=expected).wait_for()
    assert title.inner_text() == "Source" and "zoom" not in page.url and crumbs.inner_text().startswith("Model")


def test_the_keyboard_leads_through_the_stage(page: Any, at: At) -> None:
    opened(page, at("step", model="gpt", text=TEXT, stage="tokens"))
    title, play = page.locator(CAPTION), page.locator(".stage-play")
    for key, expected in (("ArrowRight", "Embedding"), ("ArrowLeft", "Tokens"), ("End", "Probabilities")):
        page.keyboard.press(key)
        assert title.inner_text() == expected
    page.keyboard.press("Home")
    page.keyboard.press(" ")
    assert play.get_attribute("aria-label") == "Pause"
    page.wait_for_function("() => document.querySelector('.stage-caption b').textContent === 'Embedding'")
    page.keyboard.press(" ")
    assert play.get_attribute("aria-label") == "Play" and "stage=embedding" in page.url
    page.keyboard.press("1")
    assert "head=1" in page.url
    part = page.locator('.stage-picture [data-key="head=0"]')
    part.focus()
    page.keyboard.press("Enter")
    assert "head=1" not in page.url
    assert page.evaluate("document.activeElement.getAttribute('data-key')") == "head=0"  # kept over the new picture


def of_two_blocks(route: Any) -> None:
    """The route's answer as if the one block of the model came twice; the requested one is open."""
    body = route.request.post_data_json
    answer = route.fetch(post_data=json.dumps({**body, "layer": None})).json()
    threads = answer["step"]["threads"]
    threads["blocks"], threads["open"] = threads["blocks"] * 2, body["layer"] or 0
    answer["step"] = json.loads(json.dumps(answer["step"]).replace("decoder.0", f"decoder.{threads['open']}"))
    route.fulfill(json=answer)


def test_what_is_shown_is_in_the_address(page: Any, at: At) -> None:
    page.route("**/v1/explain/step", of_two_blocks)
    opened(page, at("step", model="gpt", text="A tale", stage="values"))
    page.locator('.stage-picture [data-go="open=1"]').click()
    page.locator('.stage-picture [data-go="open=0"]').wait_for()
    page.locator('.stage-picture [data-go="head=1"]').click()
    page.locator('.stage-picture [data-go="follow=2"]').click()
    page.wait_for_function("() => document.querySelector('.step-status').textContent.includes('position 2;')")
    before = texts(page)
    page.reload()
    page.wait_for_selector(".stage-picture svg text")
    assert texts(page) == before
    for part in ("layer=1", "place=2", "head=1", "stage=values"):
        assert part in page.url


def test_a_mixture_shows_which_experts_read_the_token(page: Any, tmp_path: Path) -> None:
    (tmp_path / "tale.txt").write_text(f"{TEXT}, and then another one.\n" * 60, "utf-8")
    shape = {"model.layers": 2, "model.d_model": 32, "batch.size": 2, "batch.length": 16}
    changes = {"tokenizer": "byte", "steps": 2, **shape}
    weft.train(
        "moe-tiny", data=tmp_path / "tale.txt", run=tmp_path / "runs" / "experts", changes=changes, log=lambda _: None
    )
    with served(tmp_path / "runs") as server:
        experts = asked(server, "experts")["threads"]["block"]["experts"]
        opened(page, f"{server.url}/#/step?model=experts&text={TEXT}&stage=mixture")
        assert {percent(p) for p in experts["probabilities"]} <= set(texts(page))
        for weight in experts["weights"]:
            assert f"{weight:.2f}" in page.locator(".stage-caption").inner_text()
        page.get_by_text("Values as a table").click()
        assert page.get_by_text("Experts of block").count()
        assert not page.evaluate(FAULTS)


def test_settings_change_the_words_at_once_and_the_server_agrees(page: Any, at: At, server: Served) -> None:
    opened(page, at("step", model="gpt", text=TEXT))
    with page.expect_response("**/v1/explain/step"):
        page.get_by_label("Temperature", exact=True).fill("0.5")
        page.get_by_label("Top-k", exact=True).fill("3")
    choice = asked(server, "gpt", temperature=0.5, top_k=3)["choice"]
    page.wait_for_load_state("networkidle")
    percents = [each for each in texts(page, ".word") if each.endswith("%") or each == "0"]
    expected = [each["final"] for each in choice["candidates"][: len(percents) - 1]]
    assert percents[:-1] == [percent(p) for p in expected] and percents[-1] == "0"
    assert "T = 0.50" in page.locator(".stage-formula").inner_text()


@pytest.mark.parametrize(("number", "listed"), [(0.0, True), (0.999, False)])
def test_the_draw_may_fall_outside_the_list_and_its_word_is_appended(
    page: Any, at: At, server: Served, number: float, listed: bool
) -> None:
    page.add_init_script(f"Math.random = () => {number}")
    choice = asked(server, "gpt")["choice"]
    opened(page, at("step", model="gpt", text=TEXT))
    page.keyboard.press("ArrowRight")
    likeliest = [each["piece"] for each in choice["candidates"][:8]]
    chosen = page.locator(".stage-formula").inner_text().split("“")[1].rstrip("”")
    assert (chosen in [piece.strip("␣") or "␣" for piece in likeliest]) == listed
    assert page.locator(".word.chosen").get_attribute("data-word") == ("0" if listed else "8")
    page.keyboard.press(" ")
    page.wait_for_function("() => /position 1[5-8];/.test(document.querySelector('.step-status').textContent)")
    assert page.locator(SAY).inner_text().startswith(TEXT)


def test_the_sentence_is_edited_in_place(page: Any, at: At) -> None:
    opened(page, at("step", model="gpt", text=TEXT))
    page.locator(SAY).click()
    assert page.locator(SAY).inner_text() == TEXT
    page.keyboard.press("Control+a")
    page.keyboard.type("Told")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('.step-status').textContent.includes('has 5 tokens')")
    assert "text=Told" in page.url and page.locator(".stage-picture .chip").count() == 5


def test_the_threads_of_a_long_text_can_be_exchanged(page: Any, at: At, server: Served) -> None:
    opened(page, at("step", model="gpt", text=TEXT * 2))
    assert page.locator(".stage-picture .chip").count() == 12
    more = page.locator('.stage-picture [data-go^="more="]').first
    wanted = more.get_attribute("data-go").removeprefix("more=").split("-")
    more.click()
    page.wait_for_url("**threads=**")
    page.wait_for_load_state("networkidle")
    shown = asked(server, "gpt", input=TEXT * 2, threads=list(range(*map(int, wanted))))["threads"]["rows"]
    assert page.locator(".stage-picture .chip").count() == len(shown)


def test_the_values_are_also_a_table(page: Any, at: At, server: Served) -> None:
    step = asked(server, "gpt")
    opened(page, at("step", model="gpt", text=TEXT, head=0))
    page.get_by_text("Values as a table").click()
    tables = page.locator(".stage-table table")
    rows = tables.first.locator("tbody tr")
    assert rows.count() == len(step["threads"]["rows"])
    here = step["threads"]["rows"].index(step["place"])
    weights = [float(row.locator("td").nth(4).inner_text()) for row in rows.all()]
    assert weights == pytest.approx(step["threads"]["block"]["attention"]["weights"][0][here], rel=1e-3)
    assert "Predictions" in page.locator(".stage-table").inner_text()


@pytest.fixture
def moving(browser: Any) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    yield context.new_page()
    context.close()


def test_it_plays_when_it_is_opened(moving: Any, at: At) -> None:
    opened(moving, at("step", model="gpt", text=TEXT))
    assert moving.locator(".stage-play").get_attribute("aria-label") == "Pause"
    assert moving.locator(CAPTION).inner_text() == "Tokens"
    moving.wait_for_function("() => document.querySelector('.stage-caption b').textContent === 'Embedding'")
    assert "stage=" not in moving.url


def test_text_is_shown_as_text_and_a_picture_is_saved(page: Any, at: At) -> None:
    opened(page, at("step", model="gpt", text="<img src=x onerror=alert(1)>"))
    assert page.locator("img").count() == 0
    drawn = saved_svg(page)
    assert "Embedding" in drawn and "class=" not in drawn


def test_a_text_that_is_too_long_keeps_its_message(page: Any, at: At) -> None:
    opened(page, at("step", model="gpt", text=TEXT))
    page.locator(SAY).click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text("ab " * 1400)
    page.keyboard.press("Enter")
    message = page.locator(".problem")
    message.wait_for()
    assert "longer than 4000 characters" in message.inner_text()
    assert len(page.locator(SAY).inner_text()) >= 4199 and page.locator(".stage-stale").count() == 1
    page.locator(SAY).click()
    page.keyboard.press("Control+a")
    page.keyboard.insert_text("Told")
    page.keyboard.press("Enter")
    message.wait_for(state="detached")
    assert page.locator(".stage-stale").count() == 0 and page.locator(".stage-picture .chip").count() == 5
