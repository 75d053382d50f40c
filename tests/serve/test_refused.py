"""What a server refuses: strangers, foreign names, and requests that are broken, too large or never end."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.serve.serving import Served, idle, served, until

from weft.serve import gate, listen
from weft.serve.config import Limits, Serving

COMPLETE = "/v1/completions"
OPENAI = {"message", "type", "param", "code"}
GOOD = {"model": "gpt", "prompt": "a", "max_tokens": 2}
DEEP = 100_000


def refused(response: httpx.Response, status: int = 400) -> str:
    """The message of an error in the shape of the API it came from."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    if response.request.url.path.startswith("/v1/messages"):
        assert response.json()["type"] == "error" and set(error) == {"type", "message"}
    else:
        assert set(error) == OPENAI
    return str(error["message"])


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
    "zero": b'{"model": "gpt", "prompt": "a", "max_tokens": 0}',
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
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused_in_the_shape_of_the_api(server: Served, name: str, path: str) -> None:
    found = server.post(path, content=BROKEN[name], headers={"Content-Type": "application/json"})
    message = refused(found, found.status_code)
    assert found.status_code in (400, 404, 413) and message and "Traceback" not in message
    assert server.post(COMPLETE, GOOD).status_code == 200


def test_a_pattern_that_explodes_holds_nobody_up(server: Served) -> None:
    pattern = {"type": "regex", "pattern": "(((a|b){99}){99}){99}x"}
    assert server.post(COMPLETE, {**GOOD, "response_format": pattern}).status_code in (200, 400)


def test_metadata_that_is_no_text_is_refused(server: Served) -> None:
    body = b'{"model": "gpt", "input": "a", "max_output_tokens": 1, "metadata": {"a": NaN}}'
    assert "metadata" in refused(
        server.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    )


def test_paths_methods_and_models_that_are_not_there(server: Served) -> None:
    for path in ("/v2/completions", "/v1/models/..%2f..%2fetc", "/v1/models/nobody", "/v1/explain", "/%00", "/v1/%ff"):
        refused(server.get(path), 404)
    refused(server.get(COMPLETE), 405)
    assert "did you mean 'gpt'" in refused(server.post(COMPLETE, {**GOOD, "model": "gtp"}), 404)
    assert "nope" in refused(server.post("/v1/messages", {"model": "nope", "max_tokens": 1, "messages": HI}), 404)
    refused(server.post("/v1/explain/passwords", {"model": "gpt", "input": "a"}))


def test_views_are_asked_for_what_they_have(server: Served) -> None:
    def asked(view: str, **more: Any) -> str:
        return refused(server.post(f"/v1/explain/{view}", {"model": "gpt", "input": "a tale", **more}))

    assert "place: surprise has none" in asked("surprise", place=1)
    assert "target: search has none" in asked("search", target="a")
    assert "settings: lens has none" in asked("lens", settings={"beams": 2})
    assert "settings.beams" in asked("search", settings={"beams": 99})
    assert "place = 99: the model reads" in asked("saliency", place=99)


HI = [{"role": "user", "content": "hi"}]


def test_more_texts_than_the_server_takes_are_no_matter_of_waiting(server: Served) -> None:
    assert "texts" in refused(server.post(COMPLETE, {**GOOD, "prompt": ["a"] * 100, "n": 16}))
    refused(server.post(COMPLETE, {**GOOD, "n": 100}))
    refused(server.post(COMPLETE, {**GOOD, "best_of": 100}))


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


def test_what_is_no_http_is_answered_or_closed(server: Served) -> None:
    for sent in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
        b"GET / HTTP/9.9\r\n\r\n",
        b"\r\n" * 100 + b"x\r\n\r\n",
    ):
        assert server.raw(sent)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 505", b"")
    assert server.post(COMPLETE, GOOD).status_code == 200


def test_headers_without_end_are_cut_off(server: Served) -> None:
    lines = b"".join(b"x-%d: " % number + b"y" * 1000 + b"\r\n" for number in range(10_000))
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        with pytest.raises(ConnectionError):
            connection.sendall(lines)


def test_connections_that_neither_ask_nor_read_are_closed(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "PATIENCE_SECONDS", 0.3)
    for sent in (b"", b"GET /heal", b"GET /health HTTP/1.1\r\nHost: localhost\r\n"):
        assert server.raw(sent) == b""
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.3)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    assert server.raw(head).startswith(b"HTTP/1.1 408")
    assert server.post(COMPLETE, GOOD).status_code == 200


def test_a_foreign_host_is_refused(server: Served) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1].evil.example"):
        refused(server.get("/v1/models", headers={"Host": host}), 421)
    for host in ("localhost", "LOCALHOST:99", "[::1]:8000", "127.0.0.1"):
        assert server.get("/v1/models", headers={"Host": host}).status_code == 200


def test_no_other_site_reads_answers_unless_it_is_named(server: Served, runs: Path) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in server.get("/v1/models", headers=asked).headers
    assert server.http.options(COMPLETE, headers=asked).status_code == 405
    with served(runs / "gpt", serving=Serving(origins=("https://a.example",), keys=("a long key",))) as named:
        found = named.http.options(COMPLETE, headers=asked)
        assert found.headers["access-control-allow-origin"] == "https://a.example"
        key = {"Authorization": "Bearer a long key"}
        found = named.get("/v1/models", headers={"Origin": "https://a.example", **key})
        assert found.headers["access-control-allow-origin"] == "https://a.example"
        found = named.get("/v1/models", headers={"Origin": "https://b.example", **key})
        assert "access-control-allow-origin" not in found.headers


def test_keys(runs: Path) -> None:
    with served(runs / "gpt", serving=Serving(keys=("first key", "schlüssel"))) as it:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"x-api-key": "first ke"}, {"Authorization": "first"}):
            assert "key" in refused(it.get("/v1/models", headers=headers), 401)
        for path in ("/metrics", "/docs", "/openapi.json", "/nowhere"):
            refused(it.get(path), 401)
        bearers: list[dict[str, Any]] = [{"Authorization": "Bearer first key"}, {"authorization": "bearer first key"}]
        for headers in (*bearers, {"x-api-key": "schlüssel".encode()}):
            assert it.get("/v1/models", headers=headers).status_code == 200
        assert it.get("/health").status_code == 200
        refused(it.post("/v1/messages", {}), 401)


def test_a_poisoned_request_fails_alone(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails in its own code, even what is no Exception, such as a panic of a library in Rust."""
    server.post(COMPLETE, GOOD)
    worker = server.worker("gpt")

    class Panic(BaseException):
        pass

    def fails(*_: Any) -> None:
        raise Panic("inside: /secret/path")

    monkeypatch.setattr(worker.loaded.tokenizer, "token_spans", fails)
    assert refused(server.post("/v1/tokenize", {"model": "gpt", "input": "a"}), 500) == (
        "the server failed; its log says why"
    )
    monkeypatch.setattr(worker._engine, "_step", fails)
    refused(server.post(COMPLETE, GOOD), 500)
    monkeypatch.undo()
    until(lambda: idle(worker))
    assert server.post(COMPLETE, GOOD).status_code == 200 and worker.blocks[0] == 0


def test_memory_that_runs_out_fails_one_request(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    server.post(COMPLETE, GOOD)
    worker = server.worker("gpt")
    assert worker._engine is not None
    read, calls = worker._engine.manager.read, []

    def once(work: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError
        return read(work)

    monkeypatch.setattr(worker._engine.manager, "read", once)
    assert "memory" in refused(server.post(COMPLETE, GOOD), 503)
    assert server.post(COMPLETE, GOOD).status_code == 200 and worker.blocks[0] == 0

    def never(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(worker.loaded.tokenizer, "token_spans", never)
    assert "memory" in refused(server.post("/v1/tokenize", {"model": "gpt", "input": "a"}), 503)


def test_a_proxy_shows_the_server_under_a_path(runs: Path) -> None:
    with served(runs / "gpt", serving=Serving(root_path="/llm")) as it:
        assert it.post(COMPLETE, GOOD).status_code == 200
        refused(it.post("/v1/messages", {"model": "gpt"}))
        refused(it.get("/v1/messages"), 405)
        assert "openapi.json" in it.get("/docs").text


def test_the_log_has_no_prompts_unless_asked(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    for module in ("app", "writing", "worker"):
        monkeypatch.setattr(f"weft.serve.{module}.log.info", lambda words, *more: lines.append(words % more))
    for asked in (False, True):
        with served(runs / "gpt", serving=Serving(log_prompts=asked)) as it:
            it.post(COMPLETE, {**GOOD, "prompt": "zebra\x1b[31m"})
            until(lambda: any("POST" in line for line in lines))
        assert any("zebra" in line for line in lines) == asked and "\x1b" not in "".join(lines)
        lines.clear()


def test_a_text_has_only_so_long(runs: Path) -> None:
    with served(runs / "ngram", seconds=0.2, max_tokens=1 << 16) as it:
        begun = time.monotonic()
        body = {"model": "ngram", "prompt": "a", "max_tokens": 60_000, "logit_bias": {"3": -100}}
        assert "within" in refused(it.post(COMPLETE, body), 408)
        assert time.monotonic() - begun < 5
        assert "within" in refused(it.post(COMPLETE, {**body, "beams": 4}), 408)
        streamed = it.post(COMPLETE, {**body, "stream": True}).text.split("\n\n")
        assert "within" in json.loads(streamed[-2].partition("data: ")[2])["error"]["message"]
        until(lambda: idle(it.worker("ngram")))


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="queue"):
        Limits(queue=0)
