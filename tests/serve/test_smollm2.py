"""SmolLM2-135M-Instruct on a server replies to OpenAI's and Anthropic's clients as `weft chat` does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.interop.test_smollm2 import model_file
from tests.later import Later
from tests.serve.serving import Served, served

from weft.api.import_model import import_model
from weft.api.load import load

anthropic, openai = Later("anthropic"), Later("openai")

pytestmark = [pytest.mark.weights, pytest.mark.timeout(1800)]

MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]
PROPERTIES = {"fruit": {"enum": ["apple", "cherry"]}, "red": {"type": "boolean"}}
FRUIT = {"type": "object", "properties": PROPERTIES, "required": ["fruit", "red"], "additionalProperties": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2") / "smollm2"
    import_model(model_file(), path)
    return path


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Served]:
    with served(run, max_tokens=64, rows=4) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)


def test_chat_equals_the_runs_chat(client: Any, run: Path) -> None:
    expected = load(run).chat(MESSAGES, temperature=0.0, max_tokens=24)
    assert "Paris" in expected
    settings = {"model": "smollm2", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 24}
    whole = client.chat.completions.create(**settings)
    assert whole.choices[0].message.content == expected
    chunks = client.chat.completions.create(**settings, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    response = client.responses.create(model="smollm2", input=MESSAGES, temperature=0, max_output_tokens=24)
    assert response.output_text == expected


def test_a_message_ends_with_its_turn(server: Served) -> None:
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=600)
    body = {"model": "smollm2", "messages": MESSAGES, "max_tokens": 24, "extra_body": {"temperature": 0}}
    found = claude.messages.create(**body)
    assert found.content[0].type == "text" and "Paris" in found.content[0].text
    assert found.stop_reason == "end_turn" and found.stop_sequence is None
    stopped = claude.messages.create(**body, stop_sequences=["Par"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Par")


def test_schemas_log_probabilities_and_embeddings(client: Any) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "fruit", "schema": FRUIT}}
    messages: Any = [{"role": "user", "content": "Name a red fruit, as JSON."}]
    options = {"max_completion_tokens": 48, "logprobs": True, "top_logprobs": 3}
    found = client.chat.completions.create(model="smollm2", messages=messages, response_format=form, **options)
    assert set(json.loads(found.choices[0].message.content or "")) == {"fruit", "red"}
    assert found.choices[0].logprobs is not None and found.choices[0].logprobs.content
    assert len(client.embeddings.create(model="smollm2", input=["a cat", "a dog"]).data[1].embedding) == 576
