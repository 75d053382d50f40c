"""A server that is asked for much: who waits, who is refused, who goes away, and what is unloaded."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.serve.serving import Served, idle, served, until

from weft.api.load import load
from weft.api.settings import sampling
from weft.serve import library as shelves
from weft.serve import listen
from weft.serve.config import Limits, Serving
from weft.serve.worker import Worker

COMPLETE = "/v1/completions"
LONG: dict[str, Any] = {"model": "bytes", "prompt": "A", "max_tokens": 400, "logit_bias": {"3": -100}}


@contextmanager
def held(worker: Worker) -> Iterator[None]:
    """The model's thread is busy until the end of this."""
    begun, go_on = threading.Event(), threading.Event()

    def busy() -> None:
        begun.set()
        go_on.wait(20)

    thread = threading.Thread(target=lambda: asyncio.run(worker.ask(busy, "the test")))
    thread.start()
    assert begun.wait(20)
    try:
        yield
    finally:
        go_on.set()
        thread.join()


def wanted(runs: Path, requests: list[dict[str, Any]]) -> list[str]:
    found = {}
    for name in {request["model"] for request in requests}:
        run = load(runs / name)
        for place, request in enumerate(requests):
            if request["model"] == name:
                settings = {key: value for key, value in request.items() if key not in ("model", "prompt")}
                found[place] = run.complete([request["prompt"]], sampling(**settings))[0].text
    return [found[place] for place in range(len(requests))]


def test_texts_are_those_of_the_run_whatever_the_load(server: Served, runs: Path) -> None:
    requests: list[dict[str, Any]] = [
        {
            "model": ("bytes", "gpt", "lstm", "ngram")[number % 4],
            "prompt": "A tale is told"[: 1 + number % 14],
            "max_tokens": 4 + 9 * (number % 8),
            "temperature": (0.0, 0.7, 1.0)[number % 3],
            "seed": number,
            **({"stop": ["e"]} if number % 5 == 0 else {}),
            **({"frequency_penalty": 0.5} if number % 7 == 0 else {}),
        }
        for number in range(32)
    ]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda body: server.post(COMPLETE, body).json(), requests))
    assert [answer["choices"][0]["text"] for answer in answers] == wanted(runs, requests)
    assert all(server.worker(name).blocks[0] == 0 for name in ("bytes", "gpt"))


def test_whoever_is_too_much_is_told_when_to_come_back(runs: Path) -> None:
    with served(runs / "gpt", queue=3) as it, ThreadPoolExecutor(8) as pool:
        body = {"model": "gpt", "prompt": "a", "max_tokens": 2}
        it.post(COMPLETE, body)
        with held(it.worker("gpt")):
            waiting = [pool.submit(it.post, COMPLETE, body) for _ in range(3)]
            until(lambda: it.worker("gpt").waiting == 3)
            for path, more in ((COMPLETE, body), ("/v1/tokenize", {"model": "gpt", "input": "a"})):
                refused = it.post(path, more)
                assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
            message = it.post(
                "/v1/messages", {"model": "gpt", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
            )
            assert message.status_code == 429 and message.json()["error"]["type"] == "rate_limit_error"
        assert [each.result().status_code for each in waiting] == [200, 200, 200]


def test_clients_are_served_in_turn_and_each_has_its_limit(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serving = Serving(keys=("key of many", "key of one"), limits=Limits(queue=50, per_client=8, rows=1))
    with served(runs / "gpt", serving=serving) as it, ThreadPoolExecutor(16) as pool:

        def ask(key: str, letter: str) -> httpx.Response:
            body = {"model": "gpt", "prompt": letter, "max_tokens": 1}
            return it.post(COMPLETE, body, headers={"Authorization": f"Bearer {key}"})

        ask("key of many", "a")
        worker, order = it.worker("gpt"), []
        begin = worker._begin

        def noted(task: Any) -> None:
            order.append(task.client)
            begin(task)

        monkeypatch.setattr(worker, "_begin", noted)
        with held(worker):
            many = [pool.submit(ask, "key of many", "b") for _ in range(8)]
            until(lambda: worker.waiting == 8)
            refused = ask("key of many", "b")
            assert refused.status_code == 429 and "your texts" in refused.json()["error"]["message"]
            one = pool.submit(ask, "key of one", "c")
            until(lambda: worker.waiting == 9)
        assert one.result().status_code == 200 and all(each.result().status_code == 200 for each in many)
        assert order[1:].index("key 2") <= 1  # the first is the one that held the thread


def test_a_server_may_keep_keys_and_values_in_8_bits(runs: Path) -> None:
    with served(runs / "gpt", quantize_cache="int8") as it:
        answer = it.post(COMPLETE, {"model": "gpt", "prompt": "ab", "max_tokens": 3})
        assert answer.status_code == 200, answer.text
        engine = it.worker("gpt")._engine
        assert engine is not None and engine.manager.store.data.dtype == torch.int8


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(server: Served, stream: bool) -> None:
    server.post(COMPLETE, {**LONG, "max_tokens": 1})
    worker = server.worker("bytes")
    content = json.dumps({**LONG, "n": 4, "max_tokens": 512, "stream": stream}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    before = worker.counts.written
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        until(lambda: worker.blocks[0] > 0)
    until(lambda: idle(worker) and worker.blocks[0] == 0)
    assert worker.counts.written - before < 4 * 512
    assert server.library.shelves["bytes"].users == 0


def test_a_beam_search_that_nobody_waits_for_ends(server: Served) -> None:
    server.post(COMPLETE, {"model": "ngram", "prompt": "a"})
    body = {"model": "ngram", "prompt": "A", "max_tokens": 512, "beams": 32, "logit_bias": {"3": -100}}
    content = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        until(lambda: server.library.shelves["ngram"].users == 1)
    until(lambda: server.library.shelves["ngram"].users == 0 and idle(server.worker("ngram")))
    assert server.post(COMPLETE, {"model": "ngram", "prompt": "a"}).status_code == 200


def test_a_slow_reader_holds_nobody_up(server: Served) -> None:
    content = json.dumps({**LONG, "n": 16, "max_tokens": 512, "logprobs": 20, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        assert connection.recv(10)
        answer = server.post(COMPLETE, {**LONG, "max_tokens": 5})
        assert answer.status_code == 200
    until(lambda: idle(server.worker("bytes")) and server.library.shelves["bytes"].users == 0)


def test_a_client_that_reads_nothing_is_let_go(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "PATIENCE_SECONDS", 0.5)
    body = {**LONG, "n": 16, "max_tokens": 512, "logprobs": 20, "stream": True}
    content = json.dumps({key: value for key, value in body.items() if key != "logit_bias"}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    shelf = server.library.shelves["bytes"]
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
        until(lambda: shelf.users == 1)
        until(lambda: shelf.users == 0, 60)  # while the connection is open
        assert server.worker("bytes").blocks[0] == 0


def test_connections_that_drop_at_random_leave_nothing(server: Served) -> None:
    server.post(COMPLETE, {**LONG, "max_tokens": 1})
    worker = server.worker("bytes")

    async def drop(number: int, http: httpx.AsyncClient) -> None:
        body = {**LONG, "stream": number % 3 > 0, "max_tokens": 200}
        try:
            async with asyncio.timeout(0.02 * (number % 10)):
                async with http.stream("POST", COMPLETE, json=body) as response:
                    async for _ in response.aiter_lines():
                        pass
        except (TimeoutError, httpx.HTTPError):
            pass

    async def all_of_them() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60, verify=False) as http:
            await asyncio.gather(*(drop(number, http) for number in range(40)))

    asyncio.run(all_of_them())
    until(lambda: idle(worker) and worker.blocks[0] == 0)
    assert server.library.shelves["bytes"].users == 0
    assert server.post(COMPLETE, {**LONG, "max_tokens": 2}).status_code == 200


def test_models_are_unloaded_when_memory_is_short(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(runs / "gpt", runs / "lstm", runs / "base") as it:

        def loaded() -> list[str]:
            found: list[str] = it.get("/ready").json()["loaded"]
            return found

        def ask(name: str) -> int:
            return it.post(COMPLETE, {"model": name, "prompt": "a", "max_tokens": 2}).status_code

        assert ask("gpt") == ask("lstm") == 200 and loaded() == ["gpt", "lstm"]
        free = shelves.free_memory
        # memory is short until one model has gone
        monkeypatch.setattr(shelves, "free_memory", lambda device: free(device) if "gpt" not in loaded_now() else 0)

        def loaded_now() -> list[str]:
            return [name for name, shelf in it.library.shelves.items() if shelf.worker is not None]

        assert ask("base") == 200 and loaded() == ["lstm", "base"]  # whose use was longest ago
        monkeypatch.setattr(shelves, "free_memory", free)
        fails = [MemoryError(), None]
        started = it.library._started

        def short(shelf: Any) -> Worker:
            error = fails.pop(0)
            if error is not None:
                raise error
            return started(shelf)

        monkeypatch.setattr(it.library, "_started", short)
        assert ask("gpt") == 200 and loaded() == ["gpt", "base"]
        fails[:] = [MemoryError()] * 4
        refused = it.post(COMPLETE, {"model": "lstm", "prompt": "a"})
        assert refused.status_code == 503 and "no memory" in refused.json()["error"]["message"]
        assert loaded() == [] and ask("gpt") == 503
        monkeypatch.setattr(it.library, "_started", started)
        assert ask("gpt") == ask("lstm") == 200


def test_tables_of_n_grams_need_memory_too(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (runs / "ngram" / "checkpoints" / "latest" / "model.safetensors").stat().st_size
    with served(runs / "gpt", runs / "ngram") as it:

        def loaded() -> list[str]:
            return [name for name, shelf in it.library.shelves.items() if shelf.worker is not None]

        def ask(name: str) -> int:
            return it.post(COMPLETE, {"model": name, "prompt": "a", "max_tokens": 2}).status_code

        assert ask("gpt") == 200
        monkeypatch.setattr(shelves, "free_memory", lambda device: 2 * size)
        assert ask("ngram") == 200 and loaded() == ["gpt", "ngram"]
        it.worker("ngram").close()
        it.library.shelves["ngram"].worker = None
        monkeypatch.setattr(shelves, "free_memory", lambda device: size)
        assert ask("ngram") == 200 and loaded() == ["ngram"]


def test_a_model_in_use_is_not_unloaded(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(runs / "bytes", runs / "gpt") as it, ThreadPoolExecutor(1) as pool:
        it.post(COMPLETE, {**LONG, "max_tokens": 1})
        with held(it.worker("bytes")):
            writing = pool.submit(it.post, COMPLETE, {**LONG, "max_tokens": 5})
            until(lambda: it.worker("bytes").waiting)
            monkeypatch.setattr(shelves, "free_memory", lambda device: 0)
            assert it.post(COMPLETE, {"model": "gpt", "prompt": "a"}).status_code == 200
        assert writing.result().status_code == 200
