"""Inside a step: one token's way through models of every kind, with the server's own numbers, stage by stage."""

import json
import re
from typing import Any

import pytest
from tests.explorer.reading import At, saved_svg
from tests.serve.serving import Served

TEXT = "A tale is told"
FAMILIES = ("gpt", "lstm", "ngram", "bahdanau", "pairs", "masked-next", "classify")


def asked(server: Served, model: str, **more: Any) -> Any:
    """What the route answers."""
    answer = server.post("/v1/explain/step", {"model": model, "input": TEXT, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()["step"]


def opened(page: Any, address: str) -> None:
    page.goto(address)
    page.wait_for_selector(".step-panel h2")


def last_number(text: str) -> float:
    """The number that a line of the page ends with."""
    found = re.search(r"(−?[\d.,]+(?:e[+−]?\d+)?)$", text)
    assert found, text
    return float(found[1].replace("−", "-").replace(",", ""))


def flat(values: Any) -> list[Any]:
    return [each for value in values for each in flat(value)] if isinstance(values, list) else [values]


# Steps through all stages: of each its place, its title, and what its first matrix tells of its first value.
WALK = """() => {
  const next = [...document.querySelectorAll(".step-buttons button")][2], seen = [];
  for (;;) {
    const matrix = document.querySelector(".step-matrix");
    matrix?.dispatchEvent(new KeyboardEvent("keydown", { key: "Home", bubbles: true }));
    const names = [".step-where", ".step-panel h2", ".step-readout"];
    seen.push(names.map(name => document.querySelector(name)?.textContent));
    if (next.disabled) return seen;
    next.click();
  }
}"""


@pytest.mark.parametrize("model", FAMILIES)
def test_every_stage_is_shown_with_its_own_numbers(page: Any, at: At, server: Served, model: str) -> None:
    stages = asked(server, model)["stages"]
    opened(page, at("step", model=model, text=TEXT))
    assert page.locator(".step-box").count() == len(stages)
    seen = page.evaluate(WALK)
    assert [title for _, title, _ in seen] == [stage["title"] for stage in stages]
    for number, (stage, (where, title, told)) in enumerate(zip(stages, seen, strict=True), start=1):
        assert where == f"{number} of {len(stages)}: {title}"
        shown = [flat(tensor["values"])[0] for tensor in stage["tensors"]]
        assert told is None or any(last_number(told) == pytest.approx(value, rel=2e-3) for value in shown), stage["id"]
    assert sum(told is not None for _, _, told in seen) >= (0 if model == "ngram" else 3)


def test_the_probabilities_of_a_head_are_those_of_the_route(page: Any, at: At, server: Served) -> None:
    stages = {stage["id"]: stage for stage in asked(server, "gpt")["stages"]}
    opened(page, at("step", model="gpt", text=TEXT, stage="decoder.0.attention.softmax", head=1))
    shown = page.locator(".step-keys .step-now .step-number").all_text_contents()
    expected = stages["decoder.0.attention.softmax"]["tensors"][0]["values"][1]
    assert [float(each) for each in shown] == pytest.approx(expected, abs=5e-4)


def test_the_keyboard_steps_plays_and_moves_in_a_matrix(page: Any, at: At) -> None:
    opened(page, at("step", model="gpt", text=TEXT))
    title = page.locator(".step-panel h2")
    page.keyboard.press("ArrowRight")
    assert title.inner_text() == "Embedding"
    page.keyboard.press("ArrowLeft")
    assert title.inner_text() == "Tokens"
    page.keyboard.press(" ")
    page.get_by_role("button", name="Pause").wait_for()
    page.wait_for_function("() => document.querySelector('.step-panel h2').textContent === 'Embedding'")
    page.keyboard.press(" ")
    page.get_by_role("button", name="Play", exact=True).wait_for()
    page.locator(".step-box.step-now").focus()
    page.keyboard.press("ArrowUp")
    assert page.evaluate("document.activeElement.classList.contains('step-now')")
    assert page.evaluate("document.activeElement.dataset.id") == "embedding.position"


def of_two_blocks(route: Any) -> None:
    """The route's answer as if the one block of the model stood there twice: the one asked for is opened."""
    asked = route.request.post_data_json
    answer = route.fetch(post_data=json.dumps({**asked, "layer": None})).json()
    stages = answer["step"]["stages"]
    inside = [stage for stage in stages if stage["id"].startswith("decoder.0")]
    others = [stage for stage in stages if stage not in inside]
    above = json.loads(json.dumps(inside).replace("decoder.0", "decoder.1"))
    blocks = [inside[-1], *above] if asked["layer"] else [*inside, above[-1]]
    start = next(at for at, stage in enumerate(others) if stage["group"] == "output")
    answer["step"]["stages"] = [*others[:start], *blocks, *others[start:]]
    route.fulfill(json=answer)


def test_what_is_shown_stands_in_the_address(page: Any, at: At) -> None:
    page.route("**/v1/explain/step", of_two_blocks)
    opened(page, at("step", model="gpt", text=TEXT))
    page.locator(".step-tokens button").nth(2).click()
    page.locator('.step-tokens button:nth-child(3)[aria-pressed="true"]').wait_for()
    page.locator('.step-box[data-id="decoder.1"]').click()
    page.get_by_role("button", name="Unfold this block").click()
    page.locator('.step-box[data-id="decoder.1.attention.softmax"]').click()
    page.locator(".step-head select").select_option("1")
    before = page.locator(".step-keys").text_content()
    page.reload()
    page.wait_for_selector(".step-keys")
    assert page.locator(".step-keys").text_content() == before
    assert page.locator(".step-head select").input_value() == "1"
    assert page.locator('.step-tokens button[aria-pressed="true"]').count() == 1
    for part in ("layer=1", "place=2", "head=1", "stage=decoder.1.attention.softmax"):
        assert part in page.url


def test_settings_change_the_choice_at_once_and_the_server_agrees(page: Any, at: At, server: Served) -> None:
    opened(page, at("step", model="gpt", text=TEXT, stage="output.choice"))
    with page.expect_response("**/v1/explain/step"):
        page.get_by_label("Temperature", exact=True).fill("0.5")
        page.get_by_label("Top-k", exact=True).fill("3")
    assert page.locator(".step-candidates .write-row:not(.write-dropped)").count() == 3
    choice = asked(server, "gpt", temperature=0.5, top_k=3)["choice"]
    page.wait_for_function("() => !document.querySelector('.step-kept').textContent.startsWith('about')")
    first = page.locator(".step-candidates .write-number").nth(1).text_content()
    assert float(re.sub(r"[^\d.]", "", first)) == pytest.approx(100 * choice["candidates"][0]["final"], abs=0.6)
    assert f"{choice['kept']} of" in page.locator(".step-kept").inner_text()


def test_a_chosen_token_is_appended(page: Any, at: At) -> None:
    opened(page, at("step", model="gpt", text=TEXT, stage="output.choice"))
    tokens = page.locator(".step-tokens button").count()
    page.locator(".step-candidates button").nth(1).click()
    page.locator(".step-append .primary").click()
    page.wait_for_function(f"() => document.querySelectorAll('.step-tokens button').length === {tokens + 1}")
    assert page.locator(".step-panel h2").inner_text() == "Tokens"
    assert page.locator(".step-texts textarea").first.input_value() != TEXT


def test_text_is_shown_as_text_and_a_picture_is_saved(page: Any, at: At) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    opened(page, at("step", model="gpt", text=hostile))
    assert page.locator("img").count() == 0
    drawn = saved_svg(page)
    assert "Embedding" in drawn and "class=" not in drawn


def test_groups_are_named_in_words(page: Any, at: At) -> None:
    page.goto(at("step", model="gpt"))
    names = "async () => ['source_embedding', 'decoder.3'].map((await import('/web/flow.js')).blockName)"
    assert page.evaluate(names) == ["Source embedding", "Decoder, block 3"]


def test_a_text_that_is_too_long_is_whole_and_its_message_replaces_the_picture(page: Any, at: At) -> None:
    opened(page, at("step", model="gpt", text=TEXT))
    page.get_by_label("Text").fill("ab " * 1400)
    message = page.locator(".problem")
    message.wait_for()
    assert "longer than 4000 characters" in message.inner_text() and not page.locator(".step-panel").is_visible()
    assert len(page.get_by_label("Text").input_value()) == 4200
    assert message.bounding_box()["y"] < page.get_by_label("Text").bounding_box()["y"]
    page.get_by_label("Text").fill(TEXT)
    page.locator(".step-panel h2").wait_for()
    assert not message.count()
