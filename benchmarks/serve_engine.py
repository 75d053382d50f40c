"""Measure the server's overhead: streams of one model over HTTP beside the bare engine.

    python benchmarks/serve_engine.py                                                          # a small model
    python benchmarks/serve_engine.py --layers 32 --d-model 4096 --d-ff 11008 --vocab 32000 --streams 64 256   # 7B

Weights are random. Each stream has a different prompt and the same number of tokens; separate client processes read the
server-sent events. Engine and server are warmed up as a server is before it is ready, then timed for the same rounds.
Every round has new prompts: none profits from another's cached prefixes.
"""

import argparse
import asyncio
import gc
import json
import random
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import uvicorn

from weft.api.run import Run
from weft.decode.config import Sampling
from weft.decode.engine.engine import Engine, EngineLimits
from weft.decode.prompt import Prompt
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.presets import llama
from weft.recipe.config import Recipe
from weft.recipe.resolve import resolve
from weft.serve.app import make_app
from weft.serve.config import Limits, Serving
from weft.serve.library import Library, ServedModel
from weft.serve.listen import configure_interpreter, freeze_loaded
from weft.serve.model_thread import ModelThread
from weft.text.config import Word
from weft.text.tokenizer import Tokenizer, build_tokenizer

CLIENTS = 8  # client processes
Prompts = list[list[int]]  # a prompt per stream


def main() -> None:
    """Print tokens per second of both, for each number of streams."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--d-ff", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=2000)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()

    run = random_run(options)
    model, tokenizer = run.model, run.tokenizer
    configure_interpreter()
    pool = ProcessPoolExecutor(CLIENTS, mp_context=get_context("spawn"))
    list(pool.map(time.sleep, [0.5] * CLIENTS))
    for streams in options.streams:
        rng, words = random.Random(streams), range(8, tokenizer.vocab_size)
        rounds = [[rng.choices(words, k=options.prompt) for _ in range(streams)] for _ in range(options.rounds)]
        settings = Sampling(max_tokens=options.answer, temperature=0.0)
        blocks = streams * -(-(options.prompt + options.answer) // 16) + 64
        bare = engine_rates(model, tokenizer, EngineLimits(blocks=blocks, rows=streams), rounds, settings)
        served = over_http(run, rounds, options.answer, pool)
        print(
            f"{streams} streams of {options.prompt} + {options.answer} tokens, tokens/s of engine and server by round:"
        )
        for engine, server in zip(bare, served, strict=True):
            print(f"  {engine:,.0f}, {server:,.0f}: {server / engine:.1%}", flush=True)
    pool.shutdown()


def random_run(options: argparse.Namespace) -> Run:
    """Build a LLaMA of these sizes with random weights, created on the device, and a vocabulary of made-up words."""
    tokenizer = build_tokenizer(Word(), [" ".join(f"w{number}" for number in range(options.vocab - 4))])
    gpu = torch.cuda.is_available()
    heads = options.d_model // (128 if options.d_model >= 1024 else 32)
    config = llama(options.layers, options.d_model, heads, d_ff=options.d_ff, vocab_size=options.vocab, context=2048)
    torch.set_default_dtype(torch.bfloat16 if gpu else torch.float32)
    with torch.device("cuda" if gpu else "cpu"):
        model = build(config).eval()
    torch.set_default_dtype(torch.float32)
    recipe = resolve("llama-tiny", []).model_copy(update={"model": config})
    return Run(Path("."), Recipe.model_validate(recipe.model_dump()), model, tokenizer)


def engine_rates(
    model: LanguageModel, tokenizer: Tokenizer, limits: EngineLimits, rounds: list[Prompts], settings: Sampling
) -> list[float]:
    """Tokens per second of the engine in each round; its memory is freed afterwards."""
    engine = Engine(model, tokenizer.vocab_size, limits)
    engine.warm_up()
    rates = []
    for prompts in rounds:
        begin = time.perf_counter()
        requests = [engine.submit(Prompt.of(tokenizer, ids), settings, 0) for ids in prompts]
        while engine.step():
            pass
        rates.append(sum(request.written for request in requests) / (time.perf_counter() - begin))
    del engine, requests
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return rates


def over_http(run: Run, rounds: list[Prompts], answer: int, pool: ProcessPoolExecutor) -> list[float]:
    """Tokens per second of each round over HTTP, with a server in this process."""
    streams = len(rounds[0])
    limits = Limits(rows=streams, queue=2 * streams, per_client=2 * streams)
    library = Library([], None, limits)
    served = library.models["model"] = ServedModel("model", None, 0)  # type: ignore[arg-type]
    begin = time.perf_counter()
    served.thread = ModelThread("model", run, limits)
    asyncio.run(served.thread.call(lambda: None, "the benchmark"))
    print(f"ready after {time.perf_counter() - begin:.1f} s", flush=True)
    freeze_loaded()
    config = uvicorn.Config(make_app(library, Serving(limits=limits)), port=0, log_config=None, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    port = server.servers[0].sockets[0].getsockname()[1]
    rates = []
    for prompts in rounds:
        parts = [prompts[number::CLIENTS] for number in range(CLIENTS)]
        begin = time.perf_counter()
        futures = [pool.submit(streams_of, port, part, answer) for part in parts]
        tokens = sum(future.result() for future in futures)
        rates.append(tokens / (time.perf_counter() - begin))
    server.should_exit = True
    thread.join()
    return rates


def streams_of(port: int, prompts: list[list[int]], answer: int) -> int:
    """Request all prompts concurrently and read the streams; return the number of tokens."""

    async def read_stream(ids: list[int]) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        body = {"model": "model", "prompt": ids, "max_tokens": answer, "temperature": 0, "stream": True}
        content = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        tail = b""
        while part := await reader.read(1 << 16):
            tail = (tail + part)[-2000:]
        writer.close()
        return int(
            json.loads(b'{"' + tail[tail.rindex(b"completion_tokens") :].split(b",")[0] + b"}")["completion_tokens"]
        )

    async def read_all() -> int:
        return sum(await asyncio.gather(*map(read_stream, prompts)))

    return asyncio.run(read_all())


if __name__ == "__main__":
    main()
