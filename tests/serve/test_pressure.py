"""A server under load: queueing, refusals, clients that disconnect, and models that are unloaded."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.serve.serving import Served, idle, served, until
from tests.spread import spread

from weft.api.load import load
from weft.api.settings import sampling
from weft.explain import views
from weft.nn.block import Block
from weft.progress import pausing
from weft.serve import library, listen, model_thread, stepped_call
from weft.serve.config import Limits, Serving
from weft.serve.errors import RefusedError
from weft.serve.library import ServedModel
from weft.serve.model_thread import ModelThread

COMPLETE = "/v1/completions"
LONG: dict[str, Any] = {"model": "bytes", "prompt": "A", "max_tokens": 400, "logit_bias": {"3": -100}}


@contextmanager
def busy(thread: ModelThread) -> Iterator[None]:
    """Keep a model's thread busy."""
    begun, end = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        end.wait(20)

    def call() -> None:
        with suppress(RefusedError):  # its deadline
            asyncio.run(thread.call(wait, "the test"))

    caller = threading.Thread(target=call)
    caller.start()
    assert begun.wait(20)
    try:
        yield
    finally:
        end.set()
        caller.join()


def complete(server: Served, model: str, **body: Any) -> int:
    return server.post(COMPLETE, {"model": model, "prompt": "a", "max_tokens": 2, **body}).status_code


def loaded(server: Served) -> list[str]:
    return [name for name, model in server.library.models.items() if model.thread is not None]


@pytest.mark.slow
def test_texts_do_not_depend_on_the_load(server: Served, runs: Path) -> None:
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
    models = {name: load(runs / name) for name in ("bytes", "gpt", "lstm", "ngram")}
    for request, answer in zip(requests, answers, strict=True):
        model, prompt = models[request.pop("model")], request.pop("prompt")
        assert answer["choices"][0]["text"] == model.complete([prompt], sampling(**request))[0].text
    assert all(server.thread(name).blocks[0] == 0 for name in ("bytes", "gpt"))


def test_a_full_queue_refuses_with_retry_after(runs: Path) -> None:
    with served(runs / "gpt", queue=3) as server, ThreadPoolExecutor(8) as pool:
        complete(server, "gpt")
        with busy(server.thread("gpt")):
            waiting = [pool.submit(complete, server, "gpt") for _ in range(3)]
            until(lambda: server.thread("gpt").waiting == 3)
            turns = [{"role": "user", "content": "hi"}]
            bodies: dict[str, dict[str, Any]] = {
                COMPLETE: {"prompt": "a"},
                "/v1/score": {"input": "a"},
                "/v1/messages": {"max_tokens": 2, "messages": turns},
            }
            for path, body in bodies.items():
                refused = server.post(path, {"model": "gpt", **body})
                assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
                if path == "/v1/messages":
                    assert refused.json()["error"]["type"] == "rate_limit_error"
        assert [status.result() for status in waiting] == [200, 200, 200]


def test_each_client_has_its_limit(runs: Path) -> None:
    serving = Serving(keys=("key of many", "key of one"), limits=Limits(queue=50, per_client=8, rows=1))
    with served(runs / "gpt", serving=serving) as server, ThreadPoolExecutor(16) as pool:

        def send(key: str) -> httpx.Response:
            body = {"model": "gpt", "prompt": "a", "max_tokens": 1}
            return server.post(COMPLETE, body, headers={"Authorization": f"Bearer {key}"})

        send("key of many")
        thread = server.thread("gpt")
        with busy(thread):
            responses = [pool.submit(send, "key of many") for _ in range(8)]
            until(lambda: thread.waiting == 8)
            refused = send("key of many")
            assert refused.status_code == 429 and "8 of your texts" in refused.json()["error"]["message"]
            responses.append(pool.submit(send, "key of one"))
            until(lambda: thread.waiting == 9)
        assert all(response.result().status_code == 200 for response in responses)


def test_the_kv_cache_can_be_quantised(runs: Path) -> None:
    with served(runs / "gpt", quantize_cache="int8") as server:
        assert complete(server, "gpt") == 200
        engine = server.thread("gpt")._engine
        assert engine is not None and engine.manager.store.data.dtype == torch.int8


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_frees_its_kv_blocks(server: Served, stream: bool) -> None:
    server.post(COMPLETE, {**LONG, "max_tokens": 1})
    thread = server.thread("bytes")
    written = thread.counts.written
    with server.connected({**LONG, "n": 4, "max_tokens": 512, "stream": stream}):
        until(lambda: thread.blocks[0] > 0)
    until(lambda: idle(thread) and thread.blocks[0] == 0)
    assert thread.counts.written - written < 4 * 512
    assert server.library.models["bytes"].users == 0


def test_a_beam_search_ends_when_its_client_disconnects(server: Served) -> None:
    complete(server, "ngram")
    model = server.library.models["ngram"]
    with server.connected({**LONG, "model": "ngram", "max_tokens": 512, "beams": 32}):
        until(lambda: model.users == 1)
    until(lambda: model.users == 0 and idle(server.thread("ngram")))
    assert complete(server, "ngram") == 200


def test_a_slow_reader_delays_nobody(server: Served) -> None:
    body = {**LONG, "n": 16, "max_tokens": 512, "logprobs": 20, "stream": True}
    with server.connected(body, buffer=1024) as connection:
        assert connection.recv(10)
        assert server.post(COMPLETE, {**LONG, "max_tokens": 5}).status_code == 200
    until(lambda: idle(server.thread("bytes")) and server.library.models["bytes"].users == 0)


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_disconnected(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "IDLE_SECONDS", 0.5)
    body = {"model": "bytes", "prompt": "A", "n": 16, "max_tokens": 512, "logprobs": 20, "stream": True}
    server.post(COMPLETE, {**LONG, "max_tokens": 1})
    model = server.library.models["bytes"]
    with server.connected(body, buffer=1024):
        until(lambda: model.users == 1)
        until(lambda: model.users == 0 and server.thread("bytes").blocks[0] == 0, 60)  # while the connection is open


def test_connections_that_drop_at_random_leave_nothing(server: Served) -> None:
    server.post(COMPLETE, {**LONG, "max_tokens": 1})
    thread = server.thread("bytes")

    async def drop(number: int, http: httpx.AsyncClient) -> None:
        body = {**LONG, "stream": number % 3 > 0, "max_tokens": 200}
        try:
            async with asyncio.timeout(0.02 * (number % 10)):
                async with http.stream("POST", COMPLETE, json=body) as response:
                    async for _ in response.aiter_lines():
                        pass
        except (TimeoutError, httpx.HTTPError):
            pass

    async def drop_all() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60, verify=False) as http:
            await asyncio.gather(*(drop(number, http) for number in range(40)))

    asyncio.run(drop_all())
    until(lambda: idle(thread) and thread.blocks[0] == 0 and server.library.models["bytes"].users == 0)
    assert server.post(COMPLETE, {**LONG, "max_tokens": 2}).status_code == 200


def test_the_longest_idle_model_is_unloaded_when_memory_is_short(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(runs / "gpt", runs / "lstm", runs / "base") as server:
        assert complete(server, "gpt") == complete(server, "lstm") == 200 and loaded(server) == ["gpt", "lstm"]
        free = library.free_memory
        monkeypatch.setattr(library, "free_memory", lambda device: 0 if "gpt" in loaded(server) else free(device))
        assert complete(server, "base") == 200 and loaded(server) == ["lstm", "base"]
        monkeypatch.setattr(library, "free_memory", free)

        failures = 1
        start = server.library._start

        def start_or_fail(model: ServedModel) -> ModelThread:
            nonlocal failures
            failures -= 1
            if failures >= 0:
                raise MemoryError
            return start(model)

        monkeypatch.setattr(server.library, "_start", start_or_fail)
        assert complete(server, "gpt") == 200 and loaded(server) == ["gpt", "base"]
        failures = 4
        refused = server.post(COMPLETE, {"model": "lstm", "prompt": "a"})
        assert refused.status_code == 503 and "not enough memory" in refused.json()["error"]["message"]
        assert loaded(server) == [] and complete(server, "gpt") == 503
        failures = 0
        assert complete(server, "gpt") == complete(server, "lstm") == 200


def test_ngram_tables_count_as_memory(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = (runs / "ngram" / "checkpoints" / "latest" / "model.safetensors").stat().st_size
    with served(runs / "gpt", runs / "ngram") as server:
        assert complete(server, "gpt") == 200
        monkeypatch.setattr(library, "free_memory", lambda device: 2 * size)
        assert complete(server, "ngram") == 200 and loaded(server) == ["gpt", "ngram"]
        server.thread("ngram").close()
        server.library.models["ngram"].thread = None
        monkeypatch.setattr(library, "free_memory", lambda device: size)
        assert complete(server, "ngram") == 200 and loaded(server) == ["ngram"]


def test_a_model_in_use_is_not_unloaded(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(runs / "bytes", runs / "gpt") as server, ThreadPoolExecutor(1) as pool:
        server.post(COMPLETE, {**LONG, "max_tokens": 1})
        with busy(server.thread("bytes")):
            writing = pool.submit(server.post, COMPLETE, {**LONG, "max_tokens": 5})
            until(lambda: server.thread("bytes").waiting)
            monkeypatch.setattr(library, "free_memory", lambda device: 0)
            assert complete(server, "gpt") == 200
        assert writing.result().status_code == 200


LENGTHY: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "lstm", "prompt": "a", "max_tokens": 60_000, "beams": 64, "logit_bias": {"3": -100}},
    "/v1/score": {"model": "lstm", "input": "A tale is told, and then another one.\n" * 800},
    "/v1/embeddings": {"model": "lstm", "input": ["A tale is told, and then another one.\n" * 20] * 1000},
}


@pytest.mark.parametrize("path", spread(LENGTHY, 1))
def test_long_work_takes_turns_and_ends_with_its_client(runs: Path, path: str) -> None:
    with served(runs / "lstm", max_tokens=1 << 16, max_input_tokens=1 << 20) as server:
        assert complete(server, "lstm") == 200
        thread = server.thread("lstm")
        with server.connected(LENGTHY[path], path):
            until(lambda: thread._calls)
            began = time.monotonic()
            assert complete(server, "lstm") == 200
            assert server.post("/v1/tokenize", {"model": "lstm", "input": "a"}).status_code == 200
            assert thread._calls and time.monotonic() - began < 5
        until(lambda: not thread._calls)
        with server.connected(LENGTHY[path], path):
            until(lambda: thread._calls)
            thread.close()  # SIGTERM: the call is refused at its next pause
            assert not thread._calls


@pytest.mark.parametrize("model", ["bytes", "lstm"])
def test_many_long_texts_of_one_request_leave_room_for_others(runs: Path, model: str) -> None:
    """Texts of one request never take all rows, and a short text is written before long ones have had their turns."""
    body = {"model": model, "prompt": ["A tale is told, and then another one.\n"] * 8, "n": 4, "max_tokens": 60_000}
    body |= {"logit_bias": {"3": -100}}  # eos: no text ends before its last token
    with served(runs / model, rows=4, max_tokens=1 << 16) as server:
        assert complete(server, model) == 200
        thread = server.thread(model)
        with server.connected(body):
            until(lambda: thread.active == 3 and thread.waiting)
            began, written = time.monotonic(), thread.counts.written
            assert complete(server, model) == 200
            assert thread.active == 3 and thread.counts.written - written < 2000 and time.monotonic() - began < 5
        until(lambda: idle(thread))


@pytest.mark.slow
def test_requests_share_a_model_without_an_engine_whatever_their_number_of_texts(runs: Path) -> None:
    """One text gets about half of the time beside the twelve texts of another request, and not a thirteenth."""
    body = {"model": "lstm", "prompt": ["A tale is told."] * 12, "max_tokens": 60_000, "logit_bias": {"3": -100}}
    short = body | {"prompt": "A tale", "max_tokens": 300}
    with served(runs / "lstm", rows=16, max_tokens=1 << 16) as server:
        assert complete(server, "lstm") == 200
        thread = server.thread("lstm")
        with server.connected(body):
            until(lambda: thread.active == 12)
            written = thread.counts.written
            assert server.post(COMPLETE, short).status_code == 200
            assert thread.counts.written - written < 5 * 300  # 13 * 300 if every text had the same share
        until(lambda: idle(thread))


LENGTHY_PASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "a prompt of a recurrent model": ("lstm", {"prompt": "A tale is told. " * 300, "max_tokens": 1}),
    "an embedding of a recurrent model": ("lstm", {"input": "A tale is told. " * 300}),
    "a pass of a Transformer": ("gpt", {"input": "A tale is told. " * 4}),
}


@pytest.mark.parametrize("name", spread(LENGTHY_PASSES, 1))
def test_a_single_pass_is_cut_into_steps(runs: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of a call reads a whole long text: it pauses every few tokens, or after each layer."""
    monkeypatch.setattr(stepped_call, "STEP_SECONDS", 0.0)
    model, body = LENGTHY_PASSES[name]
    steps = 0
    step = stepped_call.SteppedCall.step

    def counted(call: stepped_call.SteppedCall) -> bool:
        nonlocal steps
        steps += 1
        return step(call)

    monkeypatch.setattr(stepped_call.SteppedCall, "step", counted)
    path = COMPLETE if "prompt" in body else "/v1/next" if model == "gpt" else "/v1/embeddings"
    with served(runs / model) as server:
        assert server.post(path, {"model": model, **body}).status_code == 200
    layers = sum(isinstance(module, Block) for module in load(runs / model).model.modules())
    assert steps > (layers if model == "gpt" else 300 * 16 // 1024)


def test_calls_end_when_the_server_stops_and_texts_do_not(runs: Path) -> None:
    with served(runs / "lstm", max_tokens=1 << 16, max_input_tokens=1 << 20) as server, ThreadPoolExecutor(2) as pool:
        assert complete(server, "lstm") == 200
        thread, path = server.thread("lstm"), "/v1/score"
        text = pool.submit(server.post, COMPLETE, {"model": "lstm", "prompt": "a", "max_tokens": 300})
        call = pool.submit(server.post, path, LENGTHY[path])
        until(lambda: thread._calls)
        server.library.refuse_calls()
        assert call.result(20).status_code == 503 and "stopping" in call.result().text
        assert text.result(60).status_code == 200
        assert server.post(path, LENGTHY[path]).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_texts_that_a_stopping_server_cannot_finish_are_refused(runs: Path, stream: bool) -> None:
    body = {"model": "lstm", "prompt": "a", "max_tokens": 60_000, "logit_bias": {"3": -100}, "stream": stream}
    with served(runs / "lstm", max_tokens=1 << 16) as server, ThreadPoolExecutor(1) as pool:
        assert complete(server, "lstm") == 200
        answer = pool.submit(server.post, COMPLETE, body)
        until(lambda: server.thread("lstm").active)
        server.library.refuse_calls()
        server.library.close()
        assert answer.result().status_code in ((200, 503) if stream else (503,))  # 200 once an event has been sent
        assert '"message":"the server is stopping","type":"server_error"' in answer.result().text[-200:]


def test_passes_of_others_are_not_changed_by_a_capture(runs: Path) -> None:
    """A capture pauses once it has ended: between two tokens that are written without a head, others would lose it."""
    run, pauses = load(runs / "gpt"), 0
    tokens = torch.arange(8)[None]
    expected = run.model.features(tokens)

    def read_another_text() -> None:
        nonlocal pauses
        pauses += 1
        with pausing(lambda: None):
            assert torch.equal(run.model.features(tokens), expected)

    with pausing(read_another_text):
        views.ablation.without_heads(run.explain.reading("a tale", None), [("decoder", 0, 0)])
    assert pauses


@pytest.mark.parametrize("stream", spread([False, True], 1))
def test_the_deadline_holds_while_waiting(runs: Path, stream: bool) -> None:
    with served(runs / "gpt", seconds=0.5) as server:
        assert complete(server, "gpt") == 200
        with busy(server.thread("gpt")):  # in a step without a pause
            began = time.monotonic()
            response = server.post(COMPLETE, {"model": "gpt", "prompt": "a", "stream": stream})
            assert response.status_code == 408 and "within" in response.text and time.monotonic() - began < 5
            assert server.post("/v1/score", {"model": "gpt", "input": "a"}).status_code == 408
            assert server.post("/v1/tokenize", {"model": "gpt", "input": "a"}).status_code == 200  # needs no turn
            until(lambda: server.thread("gpt").waiting <= 2)
        until(lambda: idle(server.thread("gpt")))
        assert complete(server, "gpt") == 200


def test_calls_beyond_those_in_progress_hold_up_no_text(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_thread, "MAX_CALLS", 1)
    body = LENGTHY["/v1/completions"]
    with served(runs / "lstm", max_tokens=1 << 16) as server:
        complete(server, "lstm")
        with server.connected(body), server.connected(body), server.connected(body):
            until(lambda: server.thread("lstm").waiting == 2)
            assert complete(server, "lstm") == 200 and server.thread("lstm").waiting == 2
        until(lambda: idle(server.thread("lstm")))
