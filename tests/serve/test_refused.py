"""Requests that a server refuses: without a key, for another host, malformed, too large, or too slow."""

import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.command import Patch
from tests.serve.serving import Served, idle, refusal, served, until
from tests.spread import spread

from weft.serve import gate, listen
from weft.serve.config import Limits, Serving

COMPLETE = "/v1/completions"
GOOD = {"model": "gpt", "prompt": "a", "max_tokens": 2}
DEEP = 100_000


def refused(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    return refusal(response)


BROKEN = {
    "nothing": b"",
    "half": b'{"model": "gpt", "prompt": "a',
    "a list": b"[]",
    "a number": b"1",
    "null": b"null",
    "invalid UTF-8": b'{"model": "gpt", "prompt": "\xff\xfe"}',
    "a lone surrogate": b'{"model": "gpt", "prompt": "\\ud800"}',
    "a surrogate in a name": b'{"model": "\\udfff", "prompt": "a"}',
    "a surrogate as a key": b'{"model": "gpt", "prompt": "a", "\\ud800": 1}',
    "NaN": b'{"model": "gpt", "prompt": "a", "temperature": NaN}',
    "infinity": b'{"model": "gpt", "prompt": "a", "temperature": Infinity}',
    "too large a number": b'{"model": "gpt", "prompt": "a", "temperature": 1e999}',
    "too many digits": b'{"model": "gpt", "prompt": "a", "seed": ' + b"9" * 10_000 + b"}",
    "a negative number": b'{"model": "gpt", "prompt": "a", "max_tokens": -1}',
    "zero": b'{"model": "gpt", "prompt": "a", "n": 0}',
    "too much": b'{"model": "gpt", "prompt": "a", "max_tokens": 1000000000000}',
    "a wrong type": b'{"model": "gpt", "prompt": {"a": 1}}',
    "mixed types": b'{"model": "gpt", "prompt": ["a", 1]}',
    "no token's id": b'{"model": "gpt", "prompt": [5, 100000]}',
    "a negative id": b'{"model": "gpt", "prompt": [-1]}',
    "deep lists": b'{"model": "gpt", "prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep objects": b'{"model": "gpt", "metadata": ' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}",
    "deep where anything goes": b'{"model": "gpt", "tools": ' + b"[" * 900 + b"]" * 900 + b"}",
    "a bias of nothing": b'{"model": "gpt", "prompt": "a", "logit_bias": {"-1": 1}}',
    "a bias of too much": b'{"model": "gpt", "prompt": "a", "logit_bias": {"\xd9\xa1\xd9\xa1\xd9\xa1\xd9\xa1": 1}}',
    "a pattern that is none": b'{"model": "gpt", "response_format": {"type": "regex", "pattern": "("}}',
    "a schema that is none": b'{"model": "gpt", "response_format": {"type": "json_schema", "schema": {"type": 7}}}',
    "a schema from elsewhere": b'{"model": "gpt", "response_format": {"type": "json_schema", "schema": '
    b'{"$ref": "file:///etc/passwd"}}}',
    "a path": b'{"model": "../../etc", "prompt": "a"}',
}


@pytest.mark.parametrize("path", [COMPLETE, "/v1/messages"])
@pytest.mark.parametrize("name", spread(BROKEN, 10))
def test_malformed_bodies_are_refused_in_the_format_of_the_api(server: Served, name: str, path: str) -> None:
    response = server.post(path, content=BROKEN[name], headers={"Content-Type": "application/json"})
    message = refused(response, response.status_code)
    assert response.status_code in (400, 404, 413) and message and "Traceback" not in message
    assert server.post(COMPLETE, GOOD).status_code == 200


def test_an_exploding_pattern_does_not_hang_the_server(server: Served) -> None:
    pattern = {"type": "regex", "pattern": "(((a|b){99}){99}){99}x"}
    assert server.post(COMPLETE, {**GOOD, "response_format": pattern}).status_code in (200, 400)


def test_metadata_must_be_text(server: Served) -> None:
    body = b'{"model": "gpt", "input": "a", "max_output_tokens": 1, "metadata": {"a": NaN}}'
    headers = {"Content-Type": "application/json"}
    assert "metadata" in server.refused("/v1/responses", content=body, headers=headers)


def test_unknown_paths_methods_and_models(server: Served) -> None:
    for path in ("/v2/completions", "/v1/models/..%2f..%2fetc", "/v1/models/nobody", "/v1/explain", "/%00", "/v1/%ff"):
        refused(server.get(path), 404)
    refused(server.get(COMPLETE), 405)
    assert "did you mean 'gpt'" in server.refused(COMPLETE, {**GOOD, "model": "gtp"}, 404)
    message = server.refused("/v1/score", {"model": "pairs", "input": "a"})
    assert message.startswith("model 'pairs': this run is") and message.endswith(
        "use it with weft translate pairs < lines.txt"
    )
    assert "nope" in server.refused("/v1/messages", {"model": "nope", "max_tokens": 1, "messages": HI}, 404)
    server.refused("/v1/explain/passwords", {"model": "gpt", "input": "a"})


@pytest.mark.parametrize(
    ("view", "options", "message"),
    [
        ("surprise", {"place": 1}, "place: the view 'surprise' has no such option"),
        ("search", {"target": "a"}, "target: the view 'search' has no such option"),
        ("lens", {"settings": {"beams": 2}}, "settings: the view 'lens' has no such option"),
        ("search", {"settings": {"beams": 99}}, "settings.beams"),
        ("saliency", {"place": 99}, "place = 99: the model reads"),
    ],
)
def test_views_refuse_options_of_others(server: Served, view: str, options: dict[str, Any], message: str) -> None:
    assert message in server.refused(f"/v1/explain/{view}", {"model": "gpt", "input": "a tale", **options})


HI = [{"role": "user", "content": "hi"}]


def test_a_request_for_too_many_texts_is_refused_for_good(server: Served) -> None:
    assert "texts" in server.refused(COMPLETE, {**GOOD, "prompt": ["a"] * 100, "n": 16})
    server.refused(COMPLETE, {**GOOD, "n": 100})
    server.refused(COMPLETE, {**GOOD, "best_of": 100})


def test_a_large_body_is_refused_before_it_is_read(server: Served) -> None:
    large = json.dumps({**GOOD, "prompt": "a" * 10_000_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(large))
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")
    chunk = b"%x\r\n" % (5 << 20) + b" " * (5 << 20) + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        try:
            connection.sendall(chunk)
            assert connection.recv(65536)[:12] in (b"HTTP/1.1 413", b"")
        except ConnectionError:
            pass  # closed while it was still sending
    assert b" 400 " in server.raw(head + b"Connection: close\r\nContent-Length: " + b"9" * 400 + b"\r\n\r\n")[:20]
    assert server.post(COMPLETE, GOOD).status_code == 200


LARGE: dict[str, tuple[str, dict[str, Any], str]] = {
    "texts": (COMPLETE, {"prompt": ["a"] * 200_000}, "prompt: 200,000 texts; at most 128"),
    "lists": (COMPLETE, {"prompt": [[1]] * 200_000}, "prompt: 200,000 texts; at most 128"),
    "negative ids": (COMPLETE, {"prompt": [-1] * 200_000}, "prompt: expected a text, a list of texts"),
    "mixed": ("/v1/embeddings", {"input": ["a", 1] * 100_000}, "input: expected a text, a list of texts"),
    "turns": ("/v1/chat/completions", {"messages": [{"role": "x"}] * 100_000}, "messages: 100,000 messages"),
    "blocks": (
        "/v1/messages",
        {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "text"}] * 50_000}]},
        "blocks; at most 10,000",
    ),
    "fields": (COMPLETE, {f"k{number}": 1 for number in range(100_000)}, "100,001 fields"),
    "biases": (COMPLETE, {"logit_bias": {str(number): "a" for number in range(100_000)}}, "100,000 biases"),
}


@pytest.mark.parametrize("name", spread(LARGE, 3))
def test_a_long_list_of_mistakes_is_refused_with_one_error(server: Served, name: str) -> None:
    """Validation runs in the event loop, and an error per item would hold up everybody for minutes."""
    path, body, message = LARGE[name]
    assert message in server.refused(path, {"model": "gpt", **body})


@pytest.mark.parametrize("value", [[1] * 300_000, {str(n): "," for n in range(300_000)}, [[]] * 300_000])
def test_a_body_of_many_values_is_refused_before_it_is_parsed(server: Served, value: Any) -> None:
    """It would be parsed in the event loop, and a value of two bytes takes a hundred times its size in memory."""
    message = server.refused(COMPLETE, {**GOOD, "user": value}, 413)
    assert re.fullmatch(r"the body has 300,\d+ values; this server reads at most 262,144 in one request", message)
    assert server.post(COMPLETE, {**GOOD, "user": '\\",' * 300_000}).status_code == 200  # in a string


def test_bytes_that_are_not_http_are_answered_or_closed(server: Served) -> None:
    tls = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20
    for request in (tls, b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 100 + b"x\r\n\r\n"):
        assert server.raw(request)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 505", b"")
    assert server.post(COMPLETE, GOOD).status_code == 200


def test_endless_headers_are_cut_off(server: Served) -> None:
    lines = b"".join(b"x-%d: " % number + b"y" * 1000 + b"\r\n" for number in range(10_000))
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises(ConnectionError):
            connection.sendall(lines)


def test_idle_connections_are_closed(server: Served, monkeypatch: Patch) -> None:
    monkeypatch.setattr(listen, "IDLE_SECONDS", 0.3)
    for request in (b"", b"GET /heal", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"):
        assert server.raw(request) == b""
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.3)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    assert server.raw(head).startswith(b"HTTP/1.1 408")
    assert server.post(COMPLETE, GOOD).status_code == 200


def test_an_unknown_host_is_refused(server: Served) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1].evil.example"):
        refused(server.get("/v1/models", headers={"Host": host}), 421)
    for host in ("localhost", "LOCALHOST:99", "[::1]:8000", "127.0.0.1"):
        assert server.get("/v1/models", headers={"Host": host}).status_code == 200


def test_only_named_origins_may_read_responses(server: Served, runs: Path) -> None:
    preflight = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in server.get("/v1/models", headers=preflight).headers
    assert server.http.options(COMPLETE, headers=preflight).status_code == 405
    with served(runs / "gpt", serving=Serving(origins=("https://a.example",), keys=("a long key",))) as named:
        key = {"Authorization": "Bearer a long key"}
        found = named.get("/v1/models", headers={"Origin": "https://a.example", **key})
        for response in (named.http.options(COMPLETE, headers=preflight), found):
            assert response.headers["access-control-allow-origin"] == "https://a.example"
        response = named.get("/v1/models", headers={"Origin": "https://b.example", **key})
        assert "access-control-allow-origin" not in response.headers


def test_keys(runs: Path) -> None:
    with served(runs / "gpt", serving=Serving(keys=("first key", "schlüssel"))) as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "first ke"}, {"Authorization": "first"}):
            assert "a key is required" in refused(server.get("/v1/models", headers=headers), 401)
        for path in ("/metrics", "/docs", "/openapi.json", "/nowhere"):
            refused(server.get(path), 401)
        bearers: list[dict[str, Any]] = [{"Authorization": "Bearer first key"}, {"authorization": "bearer first key"}]
        for headers in (*bearers, {"x-api-key": "schlüssel".encode()}):
            assert server.get("/v1/models", headers=headers).status_code == 200
        assert server.get("/health").status_code == 200
        server.refused("/v1/messages", {}, 401)


def test_an_internal_error_fails_one_request_and_is_not_quoted(server: Served, monkeypatch: Patch) -> None:
    """Also if it is not an Exception, such as a panic in a Rust library."""
    server.post(COMPLETE, GOOD)
    thread = server.thread("gpt")

    class Panic(BaseException):
        pass

    def fails(*_: Any) -> None:
        raise Panic("inside: /secret/path")

    monkeypatch.setattr(thread.loaded.tokenizer, "token_spans", fails)
    message = server.refused("/v1/tokenize", {"model": "gpt", "input": "a"}, 500)
    assert message == "internal server error; the server's log has the details"
    monkeypatch.setattr(thread._engine, "_step", fails)
    server.refused(COMPLETE, GOOD, 500)
    monkeypatch.undo()
    until(lambda: idle(thread))
    assert server.post(COMPLETE, GOOD).status_code == 200 and thread.blocks[0] == 0


def test_running_out_of_memory_fails_one_request(server: Served, monkeypatch: Patch) -> None:
    server.post(COMPLETE, GOOD)
    thread = server.thread("gpt")
    assert thread._engine is not None

    def fails(*_: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(thread._engine.manager, "read", fails)
        assert "memory" in server.refused(COMPLETE, GOOD, 503)
    assert server.post(COMPLETE, GOOD).status_code == 200 and thread.blocks[0] == 0
    monkeypatch.setattr(thread.loaded.tokenizer, "token_spans", fails)
    assert "memory" in server.refused("/v1/tokenize", {"model": "gpt", "input": "a"}, 503)


def test_a_proxy_may_add_a_path_prefix(runs: Path) -> None:
    with served(runs / "gpt", serving=Serving(root_path="/llm")) as server:
        assert server.post(COMPLETE, GOOD).status_code == 200
        server.refused("/v1/messages", {"model": "gpt"})
        refused(server.get("/v1/messages"), 405)
        assert "openapi.json" in server.get("/docs").text


@pytest.mark.parametrize("log_prompts", [False, True])
def test_the_log_has_prompts_only_on_request(runs: Path, monkeypatch: Patch, log_prompts: bool) -> None:
    lines: list[str] = []
    monkeypatch.setattr("weft.serve.app.log.info", lambda message, *values: lines.append(message % values))
    with served(runs / "gpt", serving=Serving(log_prompts=log_prompts)) as server:
        server.post(COMPLETE, {**GOOD, "prompt": "zebra\x1b[31m"})
        until(lambda: any("POST" in line for line in lines))
    assert any("zebra" in line for line in lines) == log_prompts and "\x1b" not in "".join(lines)


def test_a_request_has_a_time_limit(runs: Path) -> None:
    with served(runs / "ngram", seconds=0.2, max_tokens=1 << 16) as server:
        begun = time.monotonic()
        body = {"model": "ngram", "prompt": "a", "max_tokens": 60_000, "logit_bias": {"3": -100}}
        assert "not done within" in server.refused(COMPLETE, body, 408)
        assert time.monotonic() - begun < 5
        assert "not done within" in server.refused(COMPLETE, {**body, "beams": 4}, 408)
        events = server.post(COMPLETE, {**body, "stream": True}).text.split("\n\n")
        assert "not done within" in json.loads(events[-2].partition("data: ")[2])["error"]["message"]
        until(lambda: idle(server.thread("ngram")))


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="queue"):
        Limits(queue=0)


TEXT_ROUTES: dict[str, dict[str, Any]] = {
    COMPLETE: {"prompt": "TEXT"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "TEXT"}]},
    "/v1/responses": {"input": "TEXT"},
    "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": "TEXT"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "TEXT"}]},
    "/v1/embeddings": {"input": ["TEXT", "TEXT"]},
    "/v1/classify": {"input": "a", "second": "TEXT"},
    **{
        f"/v1/{name}": {"input": "TEXT"}
        for name in ("translate", "score", "tokenize", "next", "write", "beams", "fill")
    },
}


@pytest.mark.parametrize("path", spread(TEXT_ROUTES, 4))
def test_a_text_beyond_the_bound_is_refused_before_any_work(runs: Path, path: str) -> None:
    with served(runs / "bytes", max_input_tokens=100) as server:
        for text, message in (
            ("a" * 2000, "bytes; this server reads at most 1,600"),
            ("a" * 101, "more than 100 tokens"),
        ):
            body = json.loads(json.dumps(TEXT_ROUTES[path]).replace("TEXT", text))
            assert message in server.refused(path, {"model": "bytes", **body}, 413)


def test_any_prompt_can_be_echoed_with_one_likeliest_token(runs: Path) -> None:
    with served(runs / "bytes", max_input_tokens=60) as server:
        body = {"model": "bytes", "prompt": "a" * 50, "echo": True, "max_tokens": 0}
        assert len(server.post(COMPLETE, {**body, "logprobs": 1}).json()["choices"][0]["logprobs"]["tokens"]) == 50
        message = server.refused(COMPLETE, {**body, "logprobs": 2}, 413)
        assert "at most 60; send fewer prompts, or logprobs = 1" in message


def test_errors_have_the_fields_that_clients_look_for(server: Served) -> None:
    for response in (server.post(COMPLETE, {**GOOD, "model": "nobody"}), server.get("/v1/models/nobody")):
        error = response.json()["error"]
        assert (response.status_code, error["type"], error["code"]) == (404, "invalid_request_error", "model_not_found")
    assert server.get(COMPLETE).headers["allow"] == "POST"
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    message = refused(server.post(COMPLETE, content=json.dumps(GOOD), headers=form), 415)
    assert "Content-Type: application/json" in message and "x-www-form-urlencoded" in message


def test_every_response_has_an_id_of_its_own(server: Served) -> None:
    responses = [server.get("/health"), server.get("/nowhere"), server.post(COMPLETE, GOOD), server.post(COMPLETE, {})]
    responses += [server.get("/health", headers={"Host": "x.example"}), server.post(COMPLETE, {**GOOD, "stream": True})]
    ids = {response.headers["x-request-id"] for response in responses}
    assert len(ids) == len(responses) and {response.headers["request-id"] for response in responses} == ids
