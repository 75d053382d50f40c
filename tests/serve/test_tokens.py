"""Routes about single tokens return what the library does."""

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
WRITING_FROM_SOURCE = ("pairs", "bahdanau")


def write(server: Served, **body: Any) -> list[Any]:
    """Return the tokens of a text that /v1/write writes."""
    response = server.post("/v1/write", body)
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]" and json.loads(lines[0])["model"] == body["model"]
    return [json.loads(line) for line in lines[1:-1]]


@pytest.mark.parametrize("model", CONTINUING)
def test_write_equals_generate(server: Served, model: str) -> None:
    run = load(RUNS / model)
    settings = sampling(max_tokens=12, temperature=0.8, top_k=9, seed=3, logprobs=4)
    expected = list(generate(run.model, [Prompt.of(run.tokenizer, "A tale")], settings))
    tokens = write(server, model=model, input="A tale", max_tokens=12, temperature=0.8, top_k=9, seed=3, top=4)
    assert [token["id"] for token in tokens] == [chunk.id for chunk in expected]
    assert [token["adds"] for token in tokens] == [chunk.text for chunk in expected]
    assert tokens[-1]["finish"] == expected[-1].finish
    for token, chunk in zip(tokens, expected, strict=True):
        assert token["logprob"] == pytest.approx(chunk.logprob, abs=1e-4)
        assert [other["id"] for other in token["top"]] == [id for id, _ in chunk.top]


@pytest.mark.parametrize("model", [*CONTINUING, *WRITING_FROM_SOURCE])
def test_a_branch_keeps_its_tokens_and_the_random_numbers_of_each_position(server: Served, model: str) -> None:
    body = {"model": model, "input": "a tale", "max_tokens": 9, "seed": 5}
    whole = write(server, **body)
    ids = [token["id"] for token in whole]
    assert write(server, **body, tokens=ids[:3]) == whole
    other = next(token["id"] for token in whole[1]["top"] if token["id"] != ids[1] and "<" not in token["text"])
    branch = write(server, **body, tokens=[ids[0], other])
    assert [token["id"] for token in branch[:2]] == [ids[0], other]
    assert branch[1]["top"] == whole[1]["top"]


@pytest.mark.parametrize("model", [*CONTINUING, *WRITING_FROM_SOURCE])
def test_next_equals_the_predictions_that_write_reports(server: Served, model: str) -> None:
    tokens = write(server, model=model, input="a tale", max_tokens=3, seed=1, top=5)
    ids = [token["id"] for token in tokens]
    for position, token in enumerate(tokens):
        found = server.json("/v1/next", model=model, input="a tale", tokens=ids[:position], top=5, logprobs=True)
        top = [each["logprob"] for each in found["tokens"]]
        assert top == pytest.approx([each["logprob"] for each in token["top"]], abs=1e-4)
        log_p = np.frombuffer(base64.b64decode(found["logprobs"]), "<f4")
        assert len(log_p) == found["vocab_size"] and log_p[token["id"]] == pytest.approx(token["logprob"], abs=1e-4)
        assert np.exp(log_p.astype(float)).sum() == pytest.approx(1.0, abs=1e-4)
        entropy = float(torch.special.entr(torch.from_numpy(log_p.copy()).exp()).sum())
        assert found["entropy"] == pytest.approx(entropy, abs=1e-4)


def test_beams_equal_beam_search(server: Served) -> None:
    run = load(RUNS / "gpt")
    prompt = Prompt.of(run.tokenizer, "A tale")
    for prefix in ([], run.tokenizer.encode("s")):
        begun = Prompt.of(run.tokenizer, [*prompt.ids, *prefix])
        expected = beam_search(run.model, [begun], Beam(beams=3, n=3, max_tokens=6 - len(prefix)))[0]
        texts = server.json("/v1/beams", model="gpt", input="A tale", tokens=prefix, beams=3, max_tokens=6)["texts"]
        assert [tuple(text["ids"]) for text in texts] == [text.ids for text in expected]
        assert [text["score"] for text in texts] == pytest.approx([text.score for text in expected], abs=1e-4)


def test_write_continues_a_conversation_as_chat_does(server: Served) -> None:
    chat = {"model": "gpt", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 6}
    reply = server.json("/v1/chat/completions", **chat)["choices"][0]["message"]["content"]
    assert "".join(token["adds"] for token in write(server, **chat)) == reply


def test_masked_positions_are_filled(server: Served) -> None:
    text = "a [MASK] is told"
    tokens = server.json("/v1/fill", model="masked-next", input=text, top=4)["tokens"]
    (masked,) = [token for token in tokens if "top" in token]
    assert text[masked["start"] : masked["end"]] == "[MASK]"
    logprobs = [token["logprob"] for token in masked["top"]]
    assert logprobs == sorted(logprobs, reverse=True)
    plain = server.json("/v1/fill", model="masked-next", input="a tale is told")["tokens"]
    assert not any("top" in token for token in plain)
    long = server.json("/v1/fill", model="masked-next", input="[MASK] tale " * 200, top=1)["tokens"]
    assert 0 < len(long) < 400 and long[0]["top"]  # as much as the window holds
    assert server.post("/v1/fill", {"model": "gpt", "input": "a"}).status_code == 400


def test_every_tokenizer_tokenizes_a_text(server: Served) -> None:
    text = "A tale 😀 שלום <img src=x>"
    rows = server.json("/v1/tokenizers", input=text)["tokenizers"]
    names = [name for row in rows for name in row["models"]]
    assert set(names) >= {path.name for path in RUNS.iterdir()} and len(names) == len(set(names))
    kinds = {row["kind"]: row for row in rows if not row["models"]}
    assert set(kinds) == {"byte", "char", "word"}
    assert kinds["byte"]["count"] == len(text.encode()) and kinds["char"]["count"] == len(text)
    assert b"".join(bytes.fromhex(token["bytes"]) for token in kinds["byte"]["tokens"]).decode() == text
    assert [text[token["start"] : token["end"]] for token in kinds["char"]["tokens"]] == list(text)
    assert server.json("/v1/tokenizers", input="")["tokenizers"][0]["count"] == 0


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("write", {"model": "classify", "input": "a"}, "classifier"),
        ("write", {"model": "gpt", "tokens": [10**6]}, "1000000 is not a token id"),
        ("next", {"model": "gpt", "tokens": [-1]}, "tokens.0: expected a number greater than or equal to 0, not -1"),
        ("next", {"model": "classify", "input": "a"}, "classifier"),
        ("write", {"model": "gpt", "temperature": 3}, "temperature: expected a number less than or equal to 2, not 3"),
        ("write", {"model": "gpt", "temprature": 1}, "temprature: unknown field"),
        ("fill", {"model": "gpt"}, "input: this field is required"),
        ("tokenizers", {"input": "a" * 10_001}, "input"),
    ],
)
def test_invalid_bodies_are_refused(server: Served, path: str, body: dict[str, Any], message: str) -> None:
    assert message in server.refused(f"/v1/{path}", body)
