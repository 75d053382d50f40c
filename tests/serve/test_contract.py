"""Responses to OpenAI's and Anthropic's clients, which parse every one with their own types."""

import json
from typing import Any

import pytest
from tests.later import Later
from tests.serve.serving import RUNS, Served
from tests.spread import spread

from weft.api.load import load
from weft.api.run import Run
from weft.api.settings import beam, sampling
from weft.decode.config import Beam, Sampling
from weft.decode.text import Completion

anthropic, openai = Later("anthropic"), Later("openai")

CONTINUING = ("gpt", "lstm", "ngram")
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def claude(server: Served) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


def complete(run: Run, prompt: str, **settings: Any) -> Completion:
    return run.complete([prompt], sampling(**settings))[0]


def test_models_are_listed_and_retrieved(client: Any) -> None:
    assert {model.id for model in client.models.list()} == {path.name for path in RUNS.iterdir()} | {"bytes"}
    assert client.models.retrieve("gpt").object == "model"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.models.retrieve("gpt-5")


@pytest.mark.parametrize("model", CONTINUING)
def test_a_completion_equals_the_runs(client: Any, model: str) -> None:
    settings: dict[str, Any] = {"max_tokens": 12, "temperature": 0.8, "seed": 7}
    expected = complete(load(RUNS / model), "A tale", **settings)
    whole = client.completions.create(model=model, prompt="A tale", **settings)
    assert whole.choices[0].text == expected.text
    assert whole.usage is not None and whole.usage.completion_tokens == expected.tokens
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(model=model, prompt="A tale", **settings, **streamed))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected.text
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_several_prompts_with_several_texts_each(client: Any) -> None:
    texts = client.completions.create(model="gpt", prompt=["ab", "cd"], n=3, max_tokens=6, seed=3).choices
    assert [text.index for text in texts] == list(range(6))
    run = load(RUNS / "gpt")
    expected = [complete(run, "ab", max_tokens=6, seed=seed).text for seed in (3, 4, 5)]
    expected += [complete(run, "cd", max_tokens=6, seed=seed).text for seed in (6, 7, 8)]
    assert [text.text for text in texts] == expected
    ids = client.completions.create(model="gpt", prompt=run.tokenizer.encode("ab"), max_tokens=6, seed=3).choices
    assert ids[0].text == expected[0]


@pytest.mark.parametrize("model", CONTINUING)
def test_log_probabilities(client: Any, model: str) -> None:
    body: dict[str, Any] = {"model": model, "prompt": "A ta", "max_tokens": 5, "temperature": 0}
    found = client.completions.create(**body, logprobs=3).choices[0].logprobs
    assert found.tokens
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert logprob <= 0 and max(top.values()) == pytest.approx(top[token])  # greedy: the likeliest one
    options = {"max_completion_tokens": 4, "seed": 1, "logprobs": True, "top_logprobs": 2}
    chat = client.chat.completions.create(model=model, messages=HI, **options)
    content = chat.choices[0].logprobs.content
    assert content is not None and all(len(token.top_logprobs) == 2 for token in content)


def test_stop_strings_biases_penalties_best_of_and_echo(client: Any) -> None:
    body: dict[str, Any] = {"model": "gpt", "prompt": "A", "max_tokens": 20}
    a, b = load(RUNS / "gpt").tokenizer.encode("ab")
    assert client.completions.create(**body, logit_bias={str(a): 100}).choices[0].text == "a" * 20
    stopped = client.completions.create(**body, logit_bias={str(a): 100}, stop=["aaa"]).choices[0]
    assert (stopped.text, stopped.finish_reason) == ("", "stop")
    bias = {str(a): 100, str(b): 99}
    both = client.completions.create(**body, logit_bias=bias, frequency_penalty=2.0, seed=1).choices[0]
    assert set(both.text) == {"a", "b"}
    assert len(client.completions.create(**body, best_of=4, n=2, seed=1).choices) == 2
    assert client.completions.create(**body, echo=True, seed=1).choices[0].text.startswith("A")


@pytest.mark.parametrize("model", CONTINUING)
def test_prompts_are_echoed_with_their_log_probabilities(client: Any, model: str) -> None:
    body: dict[str, Any] = {"model": model, "temperature": 0, "logprobs": 2, "echo": True}
    texts = client.completions.create(**body, prompt=["A tale", "told"], max_tokens=3).choices
    assert [text.text[:-3] for text in texts] == ["A tale", "told"]
    found = texts[0].logprobs
    assert found.tokens[:6] == list("A tale") and found.text_offset == list(range(9))
    assert found.token_logprobs[0] is found.top_logprobs[0] is None and max(found.token_logprobs[1:]) < 0
    written = client.completions.create(**{**body, "echo": False}, prompt="A tale", max_tokens=3).choices[0].logprobs
    assert written.token_logprobs == found.token_logprobs[6:]
    ids = load(RUNS / model).tokenizer.encode("A tale")
    read = client.completions.create(**body, prompt=[ids], max_tokens=0)
    assert read.choices[0].text == "A tale" and read.choices[0].finish_reason == "length"
    assert read.choices[0].logprobs.token_logprobs == pytest.approx(found.token_logprobs[:6], abs=1e-5)
    assert read.usage.completion_tokens == 0
    stream = client.completions.create(**body, prompt="A tale", max_tokens=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == texts[0].text


def test_parts_of_characters_are_reported_as_bytes(client: Any) -> None:
    found = client.completions.create(model="bytes", prompt="é€", max_tokens=0, logprobs=1, echo=True).choices[0]
    assert found.text == "é€"
    assert found.logprobs.tokens[:2] == ["bytes:\\xc3", "bytes:\\xa9"] and found.logprobs.text_offset == [0, 0, 1, 1, 1]
    assert all(len(top) <= 2 for top in found.logprobs.top_logprobs[1:])


def test_responses_follow_a_schema(client: Any) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    found = client.chat.completions.create(model="bytes", messages=HI, max_tokens=30, response_format=schema)
    assert json.loads(found.choices[0].message.content or "")["a"] in (1, 2)
    response = client.responses.create(model="bytes", input="hi", max_output_tokens=30, text=form)
    assert json.loads(response.output_text)["a"] in (1, 2)
    with pytest.raises(openai.BadRequestError, match="no token of this vocabulary"):
        client.chat.completions.create(model="gpt", messages=HI, response_format=schema)


@pytest.mark.parametrize("model", CONTINUING)
def test_completions_match_a_pattern_or_a_grammar(client: Any, model: str) -> None:
    for kind in ({"type": "regex", "pattern": "[a-c]{3}"}, {"type": "grammar", "grammar": 'start: "b" "a"'}):
        extra = {"response_format": kind}
        text = client.completions.create(model=model, prompt="x", max_tokens=9, extra_body=extra).choices[0]
        assert set(text.text) <= set("abc") and text.finish_reason == "stop"


def test_beams_equal_the_runs(client: Any) -> None:
    found = client.completions.create(model="lstm", prompt="A", max_tokens=5, n=2, extra_body={"beams": 3}).choices
    run = load(RUNS / "lstm")
    assert found[0].text == run.complete(["A"], beam(max_tokens=5, beams=3))[0].text
    assert len({text.text for text in found}) == 2


@pytest.mark.parametrize("model", spread([*CONTINUING, "pairs", "bahdanau"], 2))
def test_chats_and_responses(client: Any, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=HI, max_completion_tokens=5, seed=2)
    assert whole.choices[0].message.role == "assistant" and whole.usage is not None
    chunks = client.chat.completions.create(model=model, messages=HI, max_completion_tokens=5, seed=2, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    response = client.responses.create(model=model, input="hi", instructions="Be brief", max_output_tokens=5)
    assert response.status in ("completed", "incomplete") and response.usage is not None
    with client.responses.stream(model=model, input=HI, max_output_tokens=5) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert last.response.output_text == text


@pytest.mark.parametrize("model", spread([*CONTINUING, "pairs"], 2))
def test_messages(claude: Any, model: str) -> None:
    whole = claude.messages.create(model=model, max_tokens=5, messages=HI, system="Be brief")
    assert whole.type == "message" and whole.stop_reason in ("end_turn", "max_tokens")
    with claude.messages.stream(model=model, max_tokens=5, messages=HI) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(block.text for block in final.content if block.type == "text") == text
    assert final.usage.output_tokens > 0
    body = {"model": model, "max_tokens": 5, "messages": HI}
    with claude.messages.create(**body, stream=True) as events:  # some clients read the usage of the last event only
        last = next(event.usage for event in events if event.type == "message_delta")
    assert last.input_tokens == final.usage.input_tokens > 0
    counted = claude.messages.count_tokens(model=model, messages=HI, system="Be brief")
    assert counted.input_tokens == whole.usage.input_tokens


def test_a_stop_sequence_is_returned(claude: Any) -> None:
    stops = [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
    found = claude.messages.create(model="ngram", max_tokens=200, messages=HI, stop_sequences=stops[:16])
    assert found.stop_reason == "stop_sequence" and found.stop_sequence in stops


def test_tools_pictures_and_unknown_fields_are_refused_by_name(client: Any, claude: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="tools: ") as caught:
        client.chat.completions.create(model="gpt", messages=HI, tools=[TOOL])
    assert caught.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match=r"tools\.0: only tools of type 'function' are called"):
        client.responses.create(model="gpt", input="hi", tools=[{"type": "web_search"}])
    tool = {"name": "look", "input_schema": {"type": "object"}}
    with pytest.raises(anthropic.BadRequestError, match="tools: "):
        claude.messages.create(model="gpt", max_tokens=5, messages=HI, tools=[tool])
    picture: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]
    with pytest.raises(openai.BadRequestError, match="weft reads only text"):
        client.chat.completions.create(model="gpt", messages=picture)
    with pytest.raises(openai.BadRequestError, match="reasons_to_live"):
        client.completions.create(model="gpt", prompt="a", extra_body={"reasons_to_live": 3})


@pytest.mark.parametrize("model", ["gpt", "lstm", "classify", "twins", "base"])
def test_embeddings(client: Any, model: str) -> None:
    found = client.embeddings.create(model=model, input=["ab", "c d"])
    plain = client.embeddings.create(model=model, input=["ab", "c d"], encoding_format="float")
    expected = load(RUNS / model).embed(["ab", "c d"])
    for packed, listed, vector in zip(found.data, plain.data, expected, strict=True):
        assert packed.embedding == pytest.approx(vector, abs=1e-6) == listed.embedding


def test_a_model_refuses_what_it_cannot_do(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="classifier"):
        client.completions.create(model="classify", prompt="a")
    with pytest.raises(openai.BadRequestError, match="gives no vectors"):
        client.embeddings.create(model="ngram", input="a")
    with pytest.raises(openai.NotFoundError, match="did you mean 'gpt'"):
        client.completions.create(model="gptt", prompt="a")


def test_own_routes_return_what_the_run_does(server: Served) -> None:
    pairs, classify, gpt = (load(RUNS / name) for name in ("pairs", "classify", "gpt"))
    translations = server.json("/v1/translate", model="pairs", input=["a b", ""])["translations"]
    assert translations == pairs.translate(["a b", ""])
    (labels,) = server.json("/v1/classify", model="classify", input="good")["labels"]
    assert labels == pytest.approx(classify.classify(["good"])[0], abs=1e-6)
    tokens = server.json("/v1/tokenize", model="gpt", input="A tale")["tokens"]
    assert server.json("/v1/detokenize", model="gpt", tokens=tokens)["text"] == "A tale"
    scored = server.json("/v1/score", model="gpt", input="A tale")["tokens"]
    assert [token["nats"] for token in scored] == pytest.approx([token.nats for token in gpt.surprisal("A tale")])
    for view in ("attention", "heads", "lens", "saliency", "search", "surprise"):
        assert server.json(f"/v1/explain/{view}", model="gpt", input="A tale")[view]
    swap = {"input": "A tale", "other": "A cart"}
    patched = server.json("/v1/explain/patch", model="gpt", **swap, answer=["s", "t"])["patch"]
    known: Any = gpt.explain.patch("A tale", "A cart", ("s", "t"))
    assert patched["maps"][0]["recovered"] == pytest.approx(known.maps[0].recovered, abs=1e-4)
    explained = server.json("/v1/explain/saliency", model="gpt", input="A tale", place=2)["saliency"]
    assert explained["place"] == 2
    assert explained["log_prob"] == pytest.approx(gpt.explain.saliency("A tale", place=2).log_prob, abs=1e-5)
    settings = {"beams": 2, "samples": 1}
    trees = server.json("/v1/explain/search", model="gpt", input="A tale", settings=settings)["search"]
    assert len(trees["trees"][2]["written"]) == 1 and len(trees["layouts"][1]["positions"]) == len(
        trees["trees"][1]["nodes"]
    )


def test_settings_are_described_for_forms(server: Served) -> None:
    settings = {row["name"]: row for row in server.get("/v1/settings").json()["data"]}
    assert set(settings) == {*Sampling.model_fields, *Beam.model_fields}
    assert settings["top_p"]["bounds"] == {"gt": 0.0, "le": 1.0} and settings["top_p"]["option"] == "--top-p"
    assert settings["length_penalty"]["default"] == {"kind": "power", "alpha": 1.0}
    assert all(row["description"] for row in settings.values())


def test_health_readiness_metrics_and_pages(server: Served) -> None:
    server.post("/v1/completions", {"model": "gpt", "prompt": "a"})
    assert server.get("/health").json() == {"status": "ok"}
    assert "gpt" in server.get("/ready").json()["loaded"]
    metrics = server.get("/metrics").text
    assert 'weft_requests_total{path="/v1/completions",status="200"}' in metrics
    assert 'weft_cache_blocks_used{model="gpt"} 0.0' in metrics
    assert "/v1/chat/completions" in server.get("/docs").text
    assert "/v1/chat/completions" in server.get("/openapi.json").json()["paths"]


def test_models_are_listed_in_the_format_of_the_client(server: Served) -> None:
    names = [row["id"] for row in server.get("/v1/models").json()["data"]]
    version = {"anthropic-version": "2023-06-01"}
    listed = server.get("/v1/models", headers=version).json()
    assert [row["id"] for row in listed["data"]] == names and listed["last_id"] == names[-1] and not listed["has_more"]
    assert {tuple(row) for row in listed["data"]} == {("type", "id", "display_name", "created_at")}
    assert server.get("/v1/models/gpt", headers=version).json() in listed["data"]
    assert server.get("/v1/models/none", headers=version).json()["error"]["type"] == "not_found_error"
    assert server.get("/v1/models/none").json()["error"]["code"] == "model_not_found"


def test_embeddings_can_be_shortened(server: Served) -> None:
    whole = server.json("/v1/embeddings", model="gpt", input="a tale")["data"][0]["embedding"]
    short = server.json("/v1/embeddings", model="gpt", input="a tale", dimensions=4)["data"][0]["embedding"]
    norm = sum(value**2 for value in whole[:4]) ** 0.5
    assert short == pytest.approx([value / norm for value in whole[:4]])
    body = {"model": "gpt", "input": "a", "dimensions": len(whole) + 1}
    assert f"this model's vectors have {len(whole)}" in server.refused("/v1/embeddings", body)
