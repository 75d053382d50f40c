"""Send the heaviest requests that a server accepts, or must read in order to refuse them, beside two-token requests.

    python benchmarks/serve_neighbours.py
    python benchmarks/serve_neighbours.py --only beams grammar

For each heavy request: its status and seconds, the number of two-token requests answered meanwhile, and the longest of
them, in wall-clock time and in processor time of the server, which other work on the machine does not lengthen. A heavy
request is given up after `--seconds`; the neighbour asks the same model, or `gpt` if that model writes no text.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from tests.serve.tool_models import write_models

import weft
from serve_fuzz import RUNS, address
from weft.serve.config import Limits

WRITERS = ("gpt", "long", "lstm", "ngram", "hermes", "pairs", "bahdanau")
SENTENCE = "A tale is told, and then another one.\n"
TOKENS = Limits().max_input_tokens
TEXTS = ("input", "other", "second")  # fields of a view's body
SETTLE_SECONDS = 0.2  # of two-token requests alone, before a heavy one
TICKS = os.sysconf("SC_CLK_TCK")


class Request(NamedTuple):
    """A heavy request: its path and its body, or its bytes."""

    path: str
    body: dict[str, Any] | bytes | None

    @property
    def model(self) -> str:
        name = self.body.get("model", "gpt") if isinstance(self.body, dict) else "gpt"
        return name if name in WRITERS else "gpt"


class Wait(NamedTuple):
    """A two-token request: seconds until its answer, processor seconds that the server used meanwhile, and status."""

    seconds: float
    processor: float
    status: int


def text(characters: int) -> str:
    return (SENTENCE * (characters // len(SENTENCE) + 1))[:characters]


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def schema(properties: int) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"type": "string", "minLength": 3, "maxLength": 900},
        {"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 98_765}, "maxItems": 500},
        {"enum": [f"value {number}" for number in range(20)]},
    ]
    return {"type": "object", "properties": {f"field {n}": kinds[n % 3] for n in range(properties)}}


def filled(begin: str, item: str, end: str, count: int = 0) -> bytes:
    """Return a body of the largest size that consists of one item many times."""
    count = count or (Limits().body_bytes - len(begin) - len(end)) // len(item)
    return (begin + (item * count)[: -1 if item.endswith(",") else None] + end).encode()


def cases() -> dict[str, Request]:
    """Return the heavy requests by name."""
    complete, chat, messages = "/v1/completions", "/v1/chat/completions", "/v1/messages"
    found: dict[str, Request] = {}

    def add(name: str, path: str, **body: Any) -> None:
        found[name] = Request(path, body)

    for model in ("gpt", "lstm", "ngram"):
        add(f"{model}: a prompt of {TOKENS:,} tokens", complete, model=model, prompt=text(TOKENS), max_tokens=2)
        add(f"{model}: the same as ids", complete, model=model, prompt=[5] * TOKENS, max_tokens=2)
        add(f"{model}: 128 texts", complete, model=model, prompt=[text(1000)] * 8, n=16, max_tokens=500)
        add(
            f"{model}: echo, 20 logprobs",
            complete,
            model=model,
            prompt=text(TOKENS),
            echo=True,
            logprobs=20,
            max_tokens=0,
        )
        add(f"{model}: best of 16", complete, model=model, prompt=text(100), best_of=16, logprobs=20, max_tokens=2000)
        add(f"{model}: 64 beams", complete, model=model, prompt="A", beams=64, n=16, max_tokens=65_536)
        add(f"{model}: /v1/beams", "/v1/beams", model=model, input=text(20_000), beams=64, max_tokens=4096)
        add(f"{model}: score", "/v1/score", model=model, input=text(TOKENS))
        add(f"{model}: next", "/v1/next", model=model, input=text(TOKENS), top=1000, logprobs=True)
        add(f"{model}: write", "/v1/write", model=model, input=text(TOKENS), max_tokens=4096, top=20)
        add(f"{model}: embeddings", "/v1/embeddings", model=model, input=[text(64)] * 2048)
    longest = text(4000)
    for model in ("long", "lstm", "ngram", "pairs", "bahdanau", "masked-next"):
        for view in ("attention", "heads", "lens", "saliency", "search", "surprise", "step", "maps", "pair"):
            body = {} if view == "pair" else {"input": longest}
            add(f"{model}: view {view}", f"/v1/explain/{view}", model=model, **body)
        for ability in ("agreement", "induction"):
            add(f"{model}: {ability}", "/v1/abilities", model=model, ability=ability, questions=100)
    branching = {"beams": 10}
    add("view search, most branches", "/v1/explain/search", model="long", input=longest, settings=branching)
    for model in ("long", "lstm"):
        other = longest[:6] + "b" + longest[7:]
        add(f"{model}: view patch", "/v1/explain/patch", model=model, input=longest, other=other, answer=["a", "b"])
    heads = [["decoder", layer, 0] for layer in range(4)]
    add("view without heads", "/v1/explain/without_heads", model="long", input=longest, heads=heads)
    for model in ("classify", "score"):
        add(f"{model}: prediction", "/v1/explain/prediction", model=model, input=longest)
    add("twins: prediction", "/v1/explain/prediction", model="twins", input=longest, second=longest)
    for model in ("pairs", "bahdanau"):
        add(f"{model}: translate", "/v1/translate", model=model, input=[text(60)] * 2048, beams=64)
        add(f"{model}: /v1/beams", "/v1/beams", model=model, input=text(4000), beams=64, max_tokens=4096)
    add("classify", "/v1/classify", model="classify", input=[text(60)] * 2048)
    add("embeddings of pairs of texts", "/v1/embeddings", model="twins", input=[text(60)] * 2048)
    add("fill", "/v1/fill", model="masked-next", input="[MASK] " * 18_000, top=100)
    add("tokenize", "/v1/tokenize", model="gpt", input=text(TOKENS))
    add("tokenize, refused", "/v1/tokenize", model="gpt", input=text(2_000_000))
    add("tokenize into words", "/v1/tokenize", model="classify", input=text(TOKENS))
    add("tokenize one long word", "/v1/tokenize", model="classify", input="a" * TOKENS)
    add("detokenize", "/v1/detokenize", model="gpt", tokens=[5] * TOKENS)
    add("tokenizers", "/v1/tokenizers", input=text(10_000))
    biases = {str(n).zfill(9): 1.0 for n in range(50)} | {f"{n:0{3 + n // 50}}": 0.5 for n in range(50, 10_000)}
    short = {"model": "gpt", "prompt": "A", "max_tokens": 200}
    add("10,000 biases", complete, **short, logit_bias=biases)
    add("16 stop strings of 200,000 characters", complete, **short, stop=[text(200_000) + str(n) for n in range(16)])
    for name, format in {
        "schema of 2,000 properties": {"type": "json_schema", "schema": schema(2000)},
        "schema of 20,000 properties": {"type": "json_schema", "schema": schema(20_000)},
        "nested schema": {"type": "json_schema", "schema": json.loads('{"properties":{"a":' * 60 + "{}" + "}}" * 60)},
        "schema of 50,000 values": {"type": "json_schema", "schema": {"enum": [f"value {n}" for n in range(50_000)]}},
        "regular expression": {"type": "regex", "pattern": "(a|b|cd)*[a-f]{1,90}x" * 400},
        "regular expression that grows": {"type": "regex", "pattern": "(((a|b){99}){99}){99}x"},
        "lazy regular expression": {"type": "regex", "pattern": "(.*a){12}.{30}"},
        "grammar": {
            "type": "grammar",
            "grammar": "start: "
            + " | ".join(f'"w{n}" r{n}' for n in range(2500))
            + "\n"
            + "\n".join(f'r{n}: "x" | "y{n}"' for n in range(2500)),
        },
    }.items():
        add(name, complete, **short, response_format=format)
    hermes: dict[str, Any] = {"model": "hermes", "max_tokens": 200}
    tools = [{"type": "function", "function": {"name": f"tool_{n}", "parameters": schema(6)}} for n in range(128)]
    claude = [{"name": f"tool_{n}", "input_schema": schema(6)} for n in range(128)]
    add("128 tools", chat, **hermes, messages=user("hi"), tools=tools, tool_choice="required")
    add("128 tools, Anthropic", messages, **hermes, messages=user("hi"), tools=claude, tool_choice={"type": "any"})
    add("10,000 messages", chat, **hermes, messages=user("hi") * 10_000)
    add("one long message", chat, **hermes, messages=user(text(TOKENS)))
    add("10,000 blocks", messages, **hermes, messages=user([{"type": "text", "text": "a"}] * 10_000))
    add("10,000 messages, Anthropic", messages, **hermes, messages=user("hi") * 10_000)
    add("count tokens", "/v1/messages/count_tokens", model="hermes", messages=user("hi") * 10_000)
    add("responses", "/v1/responses", model="hermes", max_output_tokens=200, input=user("hi") * 10_000)
    head = '{"model":"gpt","prompt":"A","max_tokens":2,"user":'
    for name, content in {
        "4 MB of empty lists": filled(head + "[", "[],", "]}"),
        "4 MB of objects": filled(head + "[", '{"a":1},', "]}"),
        "4 MB of numbers": filled(head + "[", "1,", "]}"),
        "4 MB of fractions": filled(head + "[", "1.5e3,", "]}"),
        "4 MB of escapes": filled(head + '"', "\\u00e9", '"}'),
        "4 MB of one digit string": filled(head, "9", "}"),
        "4 MB of opening brackets": filled(head, "[", ""),
        "4 MB of token ids": filled('{"model":"gpt","prompt":[', "5,", "]}"),
        "4 MB of distinct keys": ('{"model":"gpt",' + ",".join(f'"{n:x}":1' for n in range(400_000)) + "}").encode(),
        "4 MB of distinct keys, ignored": (head + "{" + ",".join(f'"{n:x}":1' for n in range(400_000)) + "}}").encode(),
    }.items():
        found[name] = Request(complete, content)
    found["4 MB of messages, wrong"] = Request(chat, filled('{"model":"gpt","messages":[', "{},", "]}", 9999))
    for path in ("/v1/models", "/v1/runs", "/v1/runs/gpt/metrics", "/v1/runs/gpt/events", "/openapi.json", "/docs"):
        found[path] = Request(path, None)
    for view in ("graph", "growth", "costs", "anatomy"):
        found[f"{view} of a preset"] = Request(f"/v1/architecture/{view}?preset=gpt3-175b", None)
    return found


@contextmanager
def server(seconds: float) -> Iterator[tuple[str, int]]:
    """Serve all kinds of models in another process; yield its URL and process id."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(RUNS, f"{folder}/runs")
        shutil.copytree(write_models(Path(folder, "tools")), f"{folder}/runs", dirs_exist_ok=True)
        changes = {"steps": 1, "tokenizer": "char", "model.context": 2048, "batch.length": 64}
        weft.train("llama-tiny", data="builtin:python", run=f"{folder}/runs/long", changes=changes)
        log = Path(folder, "log")
        command = [sys.executable, "-m", "weft", "serve", f"{folder}/runs", "--port", "0", "--timeout", str(seconds)]
        with log.open("w") as stderr:
            process = subprocess.Popen(command, stderr=stderr, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            yield address(log, process), process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def within_limit(url: str, request: Request) -> Request:
    """Cut the texts of a view to the longest that it takes, which its refusals name."""
    while request.path.startswith("/v1/explain/") and isinstance(request.body, dict):
        answer = httpx.post(url + request.path, json=request.body, timeout=60)
        found = re.search(r"(?:takes|shown of|reads)(?: at most)? ([\d,]+)", answer.text)
        texts = {name: value for name, value in request.body.items() if name in TEXTS}
        if answer.status_code != 400 or found is None or not texts:
            break
        end = min(int(found[1].replace(",", "")), *map(len, texts.values())) - 2  # two tokens mark the ends
        request = request._replace(body=request.body | {name: value[:end] for name, value in texts.items()})
    return request


async def measure(url: str, pid: int, request: Request, seconds: float) -> tuple[str, float, list[Wait]]:
    """Send a heavy request; return its status, its seconds, and the two-token requests beside it."""
    waits: list[Wait] = []
    limits = httpx.Timeout(4 * seconds)
    async with httpx.AsyncClient(base_url=url, timeout=limits) as http, httpx.AsyncClient(timeout=limits) as other:
        small = {"model": request.model, "prompt": "A", "max_tokens": 2}

        async def neighbour() -> None:
            while True:
                began, used = time.monotonic(), processor_seconds(pid)
                answer = await http.post("/v1/completions", json=small)
                waits.append(Wait(time.monotonic() - began, processor_seconds(pid) - used, answer.status_code))

        await http.post("/v1/completions", json=small)  # loads the model
        if isinstance(request.body, dict) and "model" in request.body:
            await http.post("/v1/tokenize", json={"model": request.body["model"], "input": "a"})
        loop = asyncio.create_task(neighbour())
        await asyncio.sleep(SETTLE_SECONDS)
        waits.clear()
        content = request.body if isinstance(request.body, bytes | None) else json.dumps(request.body).encode()
        method, headers = "GET" if content is None else "POST", {"Content-Type": "application/json"}
        began = time.monotonic()
        try:
            async with asyncio.timeout(seconds + 5):
                answer = await other.request(method, url + request.path, content=content, headers=headers)
                status = str(answer.status_code)
        except TimeoutError:
            status = "given up"
        took = time.monotonic() - began
        answered = len(waits)
        while len(waits) == answered:  # the one in progress
            await asyncio.sleep(0.01)
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
    return status, took, waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of requests")
    parser.add_argument("--seconds", type=float, default=10.0, help="time limit of a request")
    options = parser.parse_args()
    rows = []
    with server(options.seconds) as (url, pid):
        for name, request in cases().items():
            if options.only and not any(part in name for part in options.only):
                continue
            request = within_limit(url, request)
            status, took, waits = asyncio.run(measure(url, pid, request, options.seconds))
            longest = max(waits)
            rows.append((longest, name))
            columns = f"{status:8} {took:7.2f} s {len(waits):5} {longest.seconds:7.3f} s {longest.processor:7.2f} s"
            failures = sorted({wait.status for wait in waits} - {200})
            print(f"{columns}  {name}{f', neighbours got {failures}' if failures else ''}", flush=True)
        (longest, name), load = max(rows), os.getloadavg()[0]
        wait = f"{longest.seconds:.3f} s ({longest.processor:.2f} s of processor)"
        print(f"\nlongest wait {wait}: {name}; load {load:.1f}")


if __name__ == "__main__":
    main()
