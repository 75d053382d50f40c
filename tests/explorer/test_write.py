"""Write: a text comes token by token, branches where another token is chosen, and is the same after a reload."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.explorer.reading import At, saved_svg
from tests.serve.serving import RUNS, served

import weft
from weft.decode.config import Sampling
from weft.decode.sampling import filter_logits

HOSTILE = "<img src=x onerror=alert(1)> \u202eA tale"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}: {% endfor %}"
JUDGE = """async ([packed, settings]) => {
  const { Distribution, unpackLogprobs } = await import("/web/distribution.js");
  const full = new Distribution(unpackLogprobs(packed)), left = full.filter(settings);
  return { ...left, ids: [...full.order.slice(0, left.kept)], p: [...left.probabilities] };
}"""
ESCAPE = """() => new MutationObserver((_, watch) => {
  if (document.querySelectorAll(".write-token").length < 5) return;
  watch.disconnect();
  document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
}).observe(document, { childList: true, subtree: true })"""  # sooner than a key that is pressed from outside
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 1.7, "top_k": 7},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 1.2, "top_k": 20, "top_p": 0.83, "min_p": 0.02},
    {"temperature": 0.05, "top_p": 0.05},
    {"temperature": 2.0, "top_k": 100_000, "top_p": 1.0},
]


def texts(page: Any) -> list[str]:
    return list(page.locator(".write-token").all_text_contents())


def opened(page: Any, address: str) -> None:
    """Open the view, and wait until nothing is written any more and the panel knows what comes next."""
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector(".write-text[aria-busy=false] .write-token")
    page.wait_for_selector(".write-sum:not(:empty)")


@pytest.mark.parametrize("model", ["gpt", "lstm", "ngram", "bahdanau", "pairs"])
def test_a_visitor_sees_a_text_at_once(page: Any, at: At, model: str) -> None:
    opened(page, at("write", model=model, length=12))
    assert 1 <= len(texts(page)) <= 12
    assert page.locator("#write-prompt").input_value()
    assert page.locator(".write-rows button").count() >= 2


def test_what_the_settings_leave_is_what_is_drawn_from(page: Any, at: At) -> None:
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(0.0, 2.5, 600).astype("<f4"))
    logits[40:48] = logits.topk(6).values[-1]  # equals
    logits[:9] = -torch.inf
    log_p = logits.log_softmax(dim=-1)
    packed = base64.b64encode(log_p.numpy().tobytes()).decode()
    page.goto(at("tokens"))
    for settings in SETTINGS:
        found = page.evaluate(JUDGE, [packed, settings])
        if settings["temperature"] == 0:
            wanted = torch.zeros(len(log_p)).index_fill(0, log_p.argmax()[None], 1.0)
        else:
            wanted = filter_logits(log_p[None], [Sampling(**settings)])[0].softmax(dim=-1)
        assert sorted(found["ids"]) == wanted.nonzero()[:, 0].tolist(), settings
        assert found["p"] == pytest.approx(wanted[found["ids"]].tolist(), rel=1e-3, abs=1e-7), settings
        assert found["mass"] == pytest.approx(float(log_p.exp()[wanted > 0].sum()), abs=1e-4)
        assert found["entropy"] == pytest.approx(float(torch.special.entr(wanted).sum()), abs=1e-3)


def test_another_token_begins_a_branch_and_a_reload_gives_the_same_tree(page: Any, at: At) -> None:
    opened(page, at("write", model="gpt", text="A tale", length=14))
    first = texts(page)
    page.locator(".write-token").nth(4).click()
    page.wait_for_selector(".write-sum:not(:empty)")
    assert "rank" in page.locator(".write-facts").inner_text()
    page.locator(".write-rows button:not([aria-current])").nth(1).click()
    page.wait_for_selector(".write-text[aria-busy=false]")
    branch = texts(page)
    assert branch[:4] == first[:4] and branch[4] != first[4] and len(branch) == 14
    assert page.locator(".write-tree .write-segment").count() == 3
    address = page.url
    assert "tree=" in address and "at=1" in address
    opened(page, address)
    assert texts(page) == branch
    page.locator(".write-tree .write-segment").nth(1).click()
    assert texts(page) == first
    picture = saved_svg(page)
    assert picture.startswith("<svg") and picture.count("<path") == 5


def test_with_keys_alone(page: Any, at: At) -> None:
    opened(page, at("write", model="gpt", text="A tale", length=8))
    first = texts(page)
    page.locator(".write-caret").focus()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
    page.wait_for_selector(".write-token:nth-child(6):focus")
    page.wait_for_selector(".write-rows button:nth-of-type(12)")
    page.keyboard.press("Enter")
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(".write-tree:not([hidden])")
    page.wait_for_selector(".write-text[aria-busy=false]")
    assert texts(page)[:5] == first[:5]


def test_writing_stops_and_stays_stopped(page: Any, at: At) -> None:
    page.goto(at("write", model="gpt", text="A tale", length=400))
    page.evaluate(ESCAPE)
    page.wait_for_selector(".write-text[aria-busy=false] .write-token")
    before = texts(page)
    assert len(before) < 400 and "*" in page.url
    opened(page, page.url)
    assert texts(page) == before
    page.get_by_role("button", name="Continue").click()
    page.wait_for_selector(f".write-token:nth-child({len(before) + 1})")


def test_settings_change_the_distribution_and_the_text(page: Any, at: At) -> None:
    opened(page, at("write", model="gpt", text="A tale", length=10))
    page.get_by_label("Top-k").fill("3")
    page.wait_for_selector(".write-sum:has-text('from 3 of')")
    page.wait_for_selector(".write-dropped")
    assert "top_k=3" in page.url
    page.get_by_label("Method").select_option("beam")
    page.locator(".write-segment:has-text('score')").nth(3).wait_for()
    assert "--beam 4" in page.locator(".tools code").inner_text()
    page.get_by_label("Max. tokens", exact=True).fill("4")
    page.wait_for_selector(".write-token:nth-child(5)", state="detached")
    page.locator(".write-segment:has-text('score')").nth(3).wait_for()


def test_hostile_text_is_text(page: Any, at: At) -> None:
    opened(page, at("write", model="ngram", text=HOSTILE, length=4))
    assert page.locator("#write-prompt").input_value() == HOSTILE
    assert page.locator("img").count() == 0


def test_a_conversation_goes_on_and_is_there_after_a_reload(page: Any, tmp_path: Path) -> None:
    shutil.copytree(RUNS / "gpt", tmp_path / "talks")
    settings = tmp_path / "talks" / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text("utf-8")), "chat_template": TEMPLATE}))
    with served(tmp_path / "talks") as own:
        opened(page, f"{own.url}/#/write?text=Hello&length=5")
        reply = "".join(texts(page)).strip()
        page.get_by_role("button", name="Send").click()
        page.locator("#write-prompt").fill("And then?")
        page.wait_for_selector(".write-text[aria-busy=false] .write-token")
        opened(page, page.url)
        turns = page.locator(".write-turn p").all_text_contents()
        assert [turn.strip() for turn in turns] == ["Hello", reply]
        assert page.locator("#write-prompt").input_value() == "And then?"


def test_hidden_words_are_filled_in(page: Any, at: At) -> None:
    page.goto(at("write", model="masked-next"))
    page.wait_for_selector(".write-fill .write-row")
    text = page.locator("#write-prompt").input_value()
    assert "[MASK]" in text
    page.locator(".write-fill .write-row").first.click()
    page.wait_for_selector(".write-fills:has-text('Select a token')")
    assert "[MASK]" not in page.locator("#write-prompt").input_value()
    page.locator(".write-hide").nth(1).click()
    page.wait_for_selector(".write-fill .write-row")
    assert "[MASK]" in page.locator("#write-prompt").input_value()


def test_an_empty_prompt_is_empty(page: Any, at: At) -> None:
    opened(page, at("write", model="gpt", length=6))
    with page.expect_request("**/v1/write") as request:
        page.locator("#write-prompt").fill("")
    assert request.value.post_data_json["input"] == ""
    page.wait_for_selector(".write-text[aria-busy=false] .write-token")
    assert "text=&" in f"{page.url}&"
    opened(page, page.url)
    assert page.locator("#write-prompt").input_value() == ""
    for view in ("step", "attention"):
        with page.expect_request(
            lambda request: "/v1/explain/" in request.url and "text" not in request.url
        ) as request:
            page.goto(at(view, model="gpt", text=""))
        assert request.value.post_data_json["input"] == ""
    page.goto(at("write", model="pairs", text=""))
    page.get_by_text("Type a source text.").wait_for()
    assert page.get_by_role("button", name="Restart").is_disabled()
    page.goto(at("write", model="masked-next", text=""))
    page.get_by_text("Type a text, then select a token to mask it.").wait_for()


def test_every_view_has_the_answer_of_translate(page: Any, at: At, runs: Path) -> None:
    run, source = weft.load(runs / "pairs"), "a b c"
    (best,) = run.translate([source])
    opened(page, at("write", model="pairs", text=source))
    assert "".join(texts(page)).removesuffix("<eos>").strip() == best.strip()
    assert page.locator(".write-usual").inner_text() == "Default: beam 5, as weft translate"
    page.get_by_label("Method").select_option("greedy")
    page.get_by_role("button", name="Use the default").click()
    page.wait_for_function("() => document.querySelector('.write-settings select').value === 'beam'")
    page.goto(at("step", model="pairs", text=source))
    page.wait_for_selector(".stage svg")
    assert page.locator(".step-status").inner_text().startswith("Following position")
    page.get_by_label("Answer").select_option("greedy")
    page.wait_for_function("() => location.hash.includes('answer=greedy')")
    page.goto(at("search", model="pairs", text=source))
    page.wait_for_selector(".search-tree")
    assert page.get_by_label("Beams").input_value() == "5"
    assert page.get_by_text("weft translate searches with 5 beams.").is_visible()
