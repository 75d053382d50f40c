"""Routes that speak in tokens, held to what the library itself gives."""

import base64
import json
from typing import Any

import numpy as np
import pytest
import torch
from tests.serve.serving import RUNS, Served

from weft.api.load import load
from weft.api.settings import sampling
from weft.decode.beam import beam_search
from weft.decode.config import Beam
from weft.decode.generate import generate
from weft.decode.prompt import Prompt

CONTINUING = ("gpt", "lstm", "ngram")
WRITING = ("pairs", "bahdanau")


def of(server: Served, path: str, **body: Any) -> Any:
    found = server.post(f"/v1/{path}", body)
    assert found.status_code == 200, found.text
    return found.json()


def written(server: Served, **body: Any) -> list[Any]:
    """The tokens of a text that is written."""
    found = server.post("/v1/write", body)
    assert found.status_code == 200, found.text
    lines = [line.removeprefix("data: ") for line in found.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]" and json.loads(lines[0])["model"] == body["model"]
    return [json.loads(line) for line in lines[1:-1]]


@pytest.mark.parametrize("model", CONTINUING)
def test_a_text_is_written_as_the_library_writes_it(server: Served, model: str) -> None:
    run = load(RUNS / model)
    settings = sampling(max_tokens=12, temperature=0.8, top_k=9, seed=3, logprobs=4)
    wanted = list(generate(run.model, [Prompt.of(run.tokenizer, "A tale")], settings))
    found = written(server, model=model, input="A tale", max_tokens=12, temperature=0.8, top_k=9, seed=3, top=4)
    assert [each["id"] for each in found] == [chunk.id for chunk in wanted]
    assert [each["adds"] for each in found] == [chunk.text for chunk in wanted]
    assert found[-1]["finish"] == wanted[-1].finish
    for each, chunk in zip(found, wanted, strict=True):
        assert each["logprob"] == pytest.approx(chunk.logprob, abs=1e-4)
        assert [other["id"] for other in each["top"]] == [id for id, _ in chunk.top]


@pytest.mark.parametrize("model", [*CONTINUING, *WRITING])
def test_a_branch_keeps_its_tokens_and_the_random_numbers_of_its_places(server: Served, model: str) -> None:
    given = {"model": model, "input": "a tale", "max_tokens": 9, "seed": 5}
    whole = written(server, **given)
    ids = [each["id"] for each in whole]
    assert written(server, **given, tokens=ids[:3]) == whole  # as they were drawn
    other = next(each["id"] for each in whole[1]["top"] if each["id"] != ids[1] and "<" not in each["text"])
    branch = written(server, **given, tokens=[ids[0], other])
    assert [each["id"] for each in branch[:2]] == [ids[0], other]
    assert branch[1]["top"] == whole[1]["top"]


@pytest.mark.parametrize("model", [*CONTINUING, *WRITING])
def test_what_may_come_next_is_what_writing_reports(server: Served, model: str) -> None:
    tokens = written(server, model=model, input="a tale", max_tokens=3, seed=1, top=5)
    ids = [each["id"] for each in tokens]
    for place, token in enumerate(tokens):
        found = of(server, "next", model=model, input="a tale", tokens=ids[:place], top=5, logprobs=True)
        assert [each["logprob"] for each in found["tokens"]] == pytest.approx(
            [each["logprob"] for each in token["top"]], abs=1e-4
        )
        every = np.frombuffer(base64.b64decode(found["logprobs"]), "<f4")
        assert len(every) == found["vocab_size"] and every[token["id"]] == pytest.approx(token["logprob"], abs=1e-4)
        assert np.exp(every.astype(float)).sum() == pytest.approx(1.0, abs=1e-4)
        entropy = float(torch.special.entr(torch.from_numpy(every.copy()).exp()).sum())
        assert found["entropy"] == pytest.approx(entropy, abs=1e-4)


def test_beams_are_those_of_the_library_with_their_scores(server: Served) -> None:
    run = load(RUNS / "gpt")
    prompt = Prompt.of(run.tokenizer, "A tale")
    first = run.tokenizer.encode("s")
    for written_already in ([], first):
        begun = Prompt.of(run.tokenizer, [*prompt.ids, *written_already])
        wanted = beam_search(run.model, [begun], Beam(beams=3, n=3, max_tokens=6 - len(written_already)))[0]
        found = of(server, "beams", model="gpt", input="A tale", tokens=written_already, beams=3, max_tokens=6)["texts"]
        assert [tuple(each["ids"]) for each in found] == [each.ids for each in wanted]
        assert [each["score"] for each in found] == pytest.approx([each.score for each in wanted], abs=1e-4)


def test_a_conversation_is_continued_as_a_chat(server: Served) -> None:
    turns = [{"role": "user", "content": "hi"}]
    chat = {"model": "gpt", "messages": turns, "temperature": 0}
    reply = server.post("/v1/chat/completions", {**chat, "max_tokens": 6}).json()["choices"][0]["message"]["content"]
    assert "".join(each["adds"] for each in written(server, **chat, max_tokens=6)) == reply


def test_masked_places_are_filled(server: Served) -> None:
    text = "a [MASK] is told"
    tokens = of(server, "fill", model="masked-next", input=text, top=4)["tokens"]
    masked = [each for each in tokens if "top" in each]
    assert len(masked) == 1 and text[masked[0]["start"] : masked[0]["end"]] == "[MASK]"
    assert [each["logprob"] for each in masked[0]["top"]] == sorted(
        (each["logprob"] for each in masked[0]["top"]), reverse=True
    )
    plain = of(server, "fill", model="masked-next", input="a tale is told")["tokens"]
    assert not any("top" in each for each in plain)
    long = of(server, "fill", model="masked-next", input="[MASK] tale " * 200, top=1)["tokens"]
    assert 0 < len(long) < 400 and long[0]["top"]  # as much as its window holds
    assert server.post("/v1/fill", {"model": "gpt", "input": "a"}).status_code == 400


def test_every_tokenizer_cuts_a_text_and_no_model_is_loaded(server: Served) -> None:
    text = "A tale 😀 שלום <img src=x>"
    found = of(server, "tokenizers", input=text)["tokenizers"]
    names = [name for each in found for name in each["models"]]
    assert set(names) >= {path.name for path in RUNS.iterdir()} and len(names) == len(set(names))
    kinds = {each["kind"]: each for each in found if not each["models"]}
    assert set(kinds) == {"byte", "char", "word"}
    assert kinds["byte"]["count"] == len(text.encode()) and kinds["char"]["count"] == len(text)
    assert b"".join(bytes.fromhex(token["bytes"]) for token in kinds["byte"]["tokens"]).decode() == text
    assert [text[token["start"] : token["end"]] for token in kinds["char"]["tokens"]] == list(text)
    assert of(server, "tokenizers", input="")["tokenizers"][0]["count"] == 0


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("write", {"model": "classify", "input": "a"}, "classifier"),
        ("write", {"model": "gpt", "tokens": [10**6]}, "no token's id"),
        ("next", {"model": "gpt", "tokens": [-1]}, "tokens"),
        ("next", {"model": "classify", "input": "a"}, "classifier"),
        ("write", {"model": "gpt", "temperature": 3}, "temperature"),
        ("tokenizers", {"input": "a" * 10_001}, "input"),
    ],
)
def test_what_is_wrong_is_said(server: Served, path: str, body: dict[str, Any], said: str) -> None:
    found = server.post(f"/v1/{path}", body)
    assert found.status_code == 400 and said in found.json()["error"]["message"]
