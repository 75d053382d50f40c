"""What the clients that programs already use get from a server: every answer is read by their own types."""

import json
from typing import Any

import pytest
from tests.later import Later
from tests.serve.serving import RUNS, Served

from weft.api.load import load
from weft.api.run import Run
from weft.api.settings import beam, sampling
from weft.decode.text import Completion

anthropic, openai = Later("anthropic"), Later("openai")

CONTINUING = ("gpt", "lstm", "ngram")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def claude(server: Served) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60)


def drawn(run: Run, prompt: str, **settings: Any) -> Completion:
    return run.complete([prompt], sampling(**settings))[0]


def test_models_are_listed_and_named(client: Any) -> None:
    assert {model.id for model in client.models.list()} == {path.name for path in RUNS.iterdir()} | {"bytes"}
    assert client.models.retrieve("gpt").object == "model"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.models.retrieve("gpt-5")


@pytest.mark.parametrize("model", CONTINUING)
def test_a_completion_is_what_the_run_itself_writes(client: Any, model: str) -> None:
    wanted = drawn(load(RUNS / model), "A tale", max_tokens=12, temperature=0.8, seed=7)
    found = client.completions.create(model=model, prompt="A tale", max_tokens=12, temperature=0.8, seed=7)
    assert found.choices[0].text == wanted.text
    assert found.usage is not None and found.usage.completion_tokens == wanted.tokens
    pieces = list(
        client.completions.create(
            model=model,
            prompt="A tale",
            max_tokens=12,
            temperature=0.8,
            seed=7,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == wanted.text
    assert pieces[-1].usage == found.usage
    assert pieces[-2].choices[0].finish_reason == found.choices[0].finish_reason


def test_several_prompts_have_several_texts_each(client: Any) -> None:
    texts = client.completions.create(model="gpt", prompt=["ab", "cd"], n=3, max_tokens=6, seed=3).choices
    assert [text.index for text in texts] == list(range(6))
    run = load(RUNS / "gpt")
    wanted = [drawn(run, "ab", max_tokens=6, seed=seed).text for seed in (3, 4, 5)]
    wanted += [drawn(run, "cd", max_tokens=6, seed=seed).text for seed in (6, 7, 8)]
    assert [text.text for text in texts] == wanted
    ids = client.completions.create(model="gpt", prompt=run.tokenizer.encode("ab"), max_tokens=6, seed=3).choices
    assert ids[0].text == wanted[0]


@pytest.mark.parametrize("model", CONTINUING)
def test_log_probabilities(client: Any, model: str) -> None:
    given: dict[str, Any] = {"model": model, "prompt": "A ta", "max_tokens": 5, "temperature": 0}
    found = client.completions.create(**given, logprobs=3).choices[0].logprobs
    assert found is not None and found.tokens and found.token_logprobs and found.top_logprobs
    for token, logprob, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert logprob <= 0 and max(top.values()) == pytest.approx(top[token])  # greedy: the likeliest one
    content = (
        client.chat.completions.create(
            model=model, messages=HI, max_completion_tokens=4, seed=1, logprobs=True, top_logprobs=2
        )
        .choices[0]
        .logprobs
    )
    assert (
        content is not None and content.content is not None and all(len(e.top_logprobs) == 2 for e in content.content)
    )


def test_stops_biases_penalties_and_the_best(client: Any) -> None:
    given: dict[str, Any] = {"model": "gpt", "prompt": "A", "max_tokens": 20}
    a, b = load(RUNS / "gpt").tokenizer.encode("ab")
    assert client.completions.create(**given, logit_bias={str(a): 100}).choices[0].text == "a" * 20
    stopped = client.completions.create(**given, logit_bias={str(a): 100}, stop=["aaa"]).choices[0]
    assert (stopped.text, stopped.finish_reason) == ("", "stop")
    both = client.completions.create(
        **given, logit_bias={str(a): 100, str(b): 99}, frequency_penalty=2.0, seed=1
    ).choices[0]
    assert set(both.text) == {"a", "b"}
    assert len(client.completions.create(**given, best_of=4, n=2, seed=1).choices) == 2
    assert client.completions.create(**given, echo=True, seed=1).choices[0].text.startswith("A")


def test_a_schema_holds(client: Any) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    found = client.chat.completions.create(model="bytes", messages=HI, max_tokens=30, response_format=schema)
    assert json.loads(found.choices[0].message.content or "")["a"] in (1, 2)
    told = client.responses.create(model="bytes", input="hi", max_output_tokens=30, text=form)
    assert json.loads(told.output_text)["a"] in (1, 2)
    with pytest.raises(openai.BadRequestError, match="no token of this vocabulary"):
        client.chat.completions.create(model="gpt", messages=HI, response_format=schema)


@pytest.mark.parametrize("model", CONTINUING)
def test_a_pattern_and_a_grammar_hold(client: Any, model: str) -> None:
    for kind in ({"type": "regex", "pattern": "[a-c]{3}"}, {"type": "grammar", "grammar": 'start: "b" "a"'}):
        text = client.completions.create(
            model=model, prompt="x", max_tokens=9, extra_body={"response_format": kind}
        ).choices[0]
        assert set(text.text) <= set("abc") and text.finish_reason == "stop"


def test_beams_are_those_of_the_run(client: Any) -> None:
    found = client.completions.create(model="lstm", prompt="A", max_tokens=5, n=2, extra_body={"beams": 3}).choices
    run = load(RUNS / "lstm")
    assert found[0].text == run.complete(["A"], beam(max_tokens=5, beams=3))[0].text
    assert len({text.text for text in found}) == 2


@pytest.mark.parametrize("model", [*CONTINUING, "pairs", "bahdanau"])
def test_chats_and_responses(client: Any, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=HI, max_completion_tokens=5, seed=2)
    assert whole.choices[0].message.role == "assistant" and whole.usage is not None
    pieces = client.chat.completions.create(model=model, messages=HI, max_completion_tokens=5, seed=2, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole.choices[0].message.content
    response = client.responses.create(model=model, input="hi", instructions="Be brief", max_output_tokens=5)
    assert response.status in ("completed", "incomplete") and response.usage is not None
    with client.responses.stream(model=model, input=HI, max_output_tokens=5) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert last.response.output_text == said  # type: ignore[union-attr]


@pytest.mark.parametrize("model", [*CONTINUING, "pairs"])
def test_messages(claude: Any, model: str) -> None:
    whole = claude.messages.create(model=model, max_tokens=5, messages=HI, system="Be brief")
    assert whole.type == "message" and whole.stop_reason in ("end_turn", "max_tokens")
    with claude.messages.stream(model=model, max_tokens=5, messages=HI) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(block.text for block in final.content if block.type == "text") == text
    assert final.usage.output_tokens > 0
    counted = claude.messages.count_tokens(model=model, messages=HI, system="Be brief")
    assert counted.input_tokens == whole.usage.input_tokens


def test_a_stop_sequence_is_named(claude: Any) -> None:
    stops = [chr(letter) for letter in range(ord("a"), ord("z") + 1)]
    found = claude.messages.create(model="ngram", max_tokens=200, messages=HI, stop_sequences=stops[:16])
    assert found.stop_reason == "stop_sequence" and found.stop_sequence in stops


def test_tools_pictures_and_unknown_settings_are_refused_by_name(client: Any, claude: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="tools: ") as caught:
        client.chat.completions.create(model="gpt", messages=HI, tools=[TOOL])  # type: ignore[list-item]
    assert caught.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match="tools: "):
        client.responses.create(model="gpt", input="hi", tools=[{"type": "web_search"}])
    with pytest.raises(anthropic.BadRequestError, match="tools: "):
        claude.messages.create(
            model="gpt", max_tokens=5, messages=HI, tools=[{"name": "look", "input_schema": {"type": "object"}}]
        )
    picture: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]
    with pytest.raises(openai.BadRequestError, match="weft reads text alone"):
        client.chat.completions.create(model="gpt", messages=picture)
    with pytest.raises(openai.BadRequestError, match="reasons_to_live"):
        client.completions.create(model="gpt", prompt="a", extra_body={"reasons_to_live": 3})


@pytest.mark.parametrize("model", ["gpt", "lstm", "classify", "twins", "base"])
def test_embeddings(client: Any, model: str) -> None:
    found = client.embeddings.create(model=model, input=["ab", "c d"])
    plain = client.embeddings.create(model=model, input=["ab", "c d"], encoding_format="float")
    wanted = load(RUNS / model).embed(["ab", "c d"])
    for packed, listed, vector in zip(found.data, plain.data, wanted, strict=True):
        assert packed.embedding == pytest.approx(vector, abs=1e-6) == listed.embedding


def test_what_a_model_cannot_do_is_said(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="classifier"):
        client.completions.create(model="classify", prompt="a")
    with pytest.raises(openai.BadRequestError, match="gives no vectors"):
        client.embeddings.create(model="ngram", input="a")
    with pytest.raises(openai.NotFoundError, match="did you mean 'gpt'"):
        client.completions.create(model="gptt", prompt="a")


def test_own_routes_answer_as_the_run_does(server: Served) -> None:
    def of(path: str, **body: Any) -> Any:
        found = server.post(f"/v1/{path}", body)
        assert found.status_code == 200, found.text
        return found.json()

    pairs, classify, gpt = (load(RUNS / name) for name in ("pairs", "classify", "gpt"))
    assert of("translate", model="pairs", input=["a b", ""])["translations"] == pairs.translate(["a b", ""])
    assert of("classify", model="classify", input="good")["labels"] == [
        pytest.approx(classify.classify(["good"])[0], abs=1e-6)
    ]
    tokens = of("tokenize", model="gpt", input="A tale")
    assert of("detokenize", model="gpt", tokens=tokens["tokens"])["text"] == "A tale"
    scored = of("score", model="gpt", input="A tale")
    assert [each["nats"] for each in scored["tokens"]] == pytest.approx([e.nats for e in gpt.surprisal("A tale")])
    for view in ("attention", "heads", "lens", "saliency", "search", "surprise"):
        assert of(f"explain/{view}", model="gpt", input="A tale")[view]
    explained = of("explain/saliency", model="gpt", input="A tale", place=2)["saliency"]
    assert explained["place"] == 2
    assert explained["log_prob"] == pytest.approx(gpt.explain.saliency("A tale", place=2).log_prob, abs=1e-5)
    trees = of("explain/search", model="gpt", input="A tale", settings={"beams": 2, "samples": 1})["search"]
    assert len(trees["trees"][2]["written"]) == 1 and len(trees["laid"][1]["spots"]) == len(trees["trees"][1]["nodes"])


def test_health_readiness_metrics_and_pages(server: Served) -> None:
    server.post("/v1/completions", {"model": "gpt", "prompt": "a"})
    assert server.get("/health").json() == {"status": "ok"}
    assert "gpt" in server.get("/ready").json()["loaded"]
    metrics = server.get("/metrics").text
    assert 'weft_requests_total{path="/v1/completions",status="200"}' in metrics
    assert 'weft_cache_blocks_used{model="gpt"} 0.0' in metrics
    assert "/v1/chat/completions" in server.get("/docs").text
    assert "/v1/chat/completions" in server.get("/openapi.json").json()["paths"]
