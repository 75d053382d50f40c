"""Measure `weft serve` with many concurrent clients on loopback: throughput, latency and memory.

    python benchmarks/serve.py --seconds 60 --streams 64
    python benchmarks/serve.py --run smollm2 --transformers smollm2-hf --streams 8 32 --seconds 1 --tokens 16 --greedy
    python benchmarks/serve.py --minutes 30 --drops 0

First one client, then many, each of which requests a text of `--tokens` tokens, reads the stream and repeats. Then
clients disconnect at random, after which no KV block may be in use and memory must not have grown. The server runs in a
separate process, by default with a small character-level decoder (4 layers, d_model 256) that is trained first. `--run`
serves another run; `--url` and `--model` use another server with OpenAI's API, with `--chat` if it only has chats.

`--transformers` names a folder that `weft export --to hf` wrote, `--llama-server` llama.cpp's program and a file that
`--to gguf` wrote: these servers and weft answer the same clients alternately. With `--minutes`, texts are then
requested at half the measured throughput, and a line is fitted to the server's memory.
"""

import argparse
import asyncio
import json
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import weft
from weft.progress import log_to_stderr

CHANGES = {"tokenizer": "char", "steps": 1, "model.layers": 4, "model.d_model": 256, "model.context": 512}
MAX_OPEN = 64  # concurrent texts while memory is watched
SAMPLE_SECONDS = 10.0  # between two readings of the server's memory
PROMPT = "The following story is told by somebody who was there, or says so: "


@dataclass
class Measurements:
    """Measurements of clients: seconds to the first token and between tokens, and counts."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    texts: int = 0
    failures: int = 0


@dataclass(frozen=True)
class ServedModel:
    """Model that a server offers."""

    url: str
    model: str
    chat: bool = False
    greedy: bool = False

    async def request(self, tokens: int, seed: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        prompt = f"{PROMPT}{seed}"
        text = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        temperature = 0.0 if self.greedy else 0.8
        body = {"model": self.model, **text, "max_tokens": tokens, "seed": seed, "temperature": temperature}
        body["stream"] = True
        content = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
        path = "chat/completions" if self.chat else "completions"
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        return reader, writer


async def read_text(model: ServedModel, tokens: int, seed: int, measured: Measurements) -> None:
    """Request one text and read its stream."""
    began = last = time.perf_counter()
    writer, usage = None, None
    try:
        reader, writer = await model.request(tokens, seed)
        begun = False
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            if b'"usage":{' in line or b'"usage": {' in line:
                usage = json.loads(line[6:])["usage"] or usage
            (measured.between if begun else measured.first).append(now - (last if begun else began))
            last, begun = now, True
    except OSError:
        usage = None
    finally:
        if writer is not None:
            writer.close()
    measured.texts += 1
    measured.failures += usage is None
    measured.tokens += 0 if usage is None else usage["completion_tokens"]


async def load(model: ServedModel, streams: int, seconds: float, tokens: int) -> tuple[Measurements, float]:
    """Run `streams` clients for `seconds`, then let them finish their texts; return their measurements and the time."""
    measured, began = Measurements(), time.perf_counter()

    async def client(number: int) -> None:
        seed = number
        while time.perf_counter() - began < seconds:
            await read_text(model, tokens, seed, measured)
            seed += streams

    await asyncio.gather(*(client(number) for number in range(streams)))
    return measured, time.perf_counter() - began


async def soak(model: ServedModel, server: "subprocess.Popen[bytes]", rate: float, seconds: float, tokens: int) -> None:
    """Request `rate` texts per second, at most MAX_OPEN at a time, and print the growth of the server's memory."""
    measured, began, samples = Measurements(), time.perf_counter(), []
    open_now: set[asyncio.Task[None]] = set()
    skipped = requested = 0
    while (now := time.perf_counter() - began) < seconds:
        if now >= SAMPLE_SECONDS * len(samples):
            samples.append(memory(server))
        if now < requested / rate:
            await asyncio.sleep(min(requested / rate - now, SAMPLE_SECONDS))
            continue
        requested += 1
        if len(open_now) >= MAX_OPEN:
            skipped += 1
            continue
        task = asyncio.create_task(read_text(model, tokens, requested, measured))
        open_now.add(task)
        task.add_done_callback(open_now.discard)
    await asyncio.gather(*open_now)
    row(f"{rate:.2f} texts/s, {seconds / 60:.0f} min", measured, time.perf_counter() - began)
    late = samples[len(samples) // 3 :]  # after one-time allocations
    slope = statistics.linear_regression(range(len(late)), late).slope if len(late) > 1 else float("nan")
    hourly = slope * 3600 / SAMPLE_SECONDS
    print(f"memory {samples[0]:.0f} → {late[0]:.1f} → {samples[-1]:.1f} MB: {hourly:+.1f} MB per hour")
    print(f"{used_blocks(model.url)} blocks in use; {skipped} texts were skipped, because {MAX_OPEN} were open")


async def drop(model: ServedModel, connections: int, concurrent: int) -> None:
    """Connect clients that disconnect before, at the start of, or during the answer."""
    rng, free = random.Random(0), asyncio.Semaphore(concurrent)

    async def one(number: int) -> None:
        async with free:
            reader, writer = await model.request(400, number)
            try:
                async with asyncio.timeout(rng.choice((0.0, 0.01, 0.1, 1.0))):
                    await reader.read()
            except (TimeoutError, OSError):
                pass
            finally:
                writer.transport.abort() if number % 2 else writer.close()

    await asyncio.gather(*(one(number) for number in range(connections)))


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def row(name: str, measured: Measurements, seconds: float) -> float:
    rate = measured.tokens / seconds
    first = f"{1e3 * statistics.median(measured.first):.0f} / {1e3 * percentile(measured.first, 0.95):.0f}"
    print(
        f"| {name} | {rate:,.0f} | {first} | {1e3 * percentile(measured.between, 0.95):.1f} "
        f"| {measured.texts:,} | {measured.failures} |",
        flush=True,
    )
    return rate


def serve(run: Path, log: Path, options: list[str]) -> tuple["subprocess.Popen[bytes]", str]:
    command = [sys.executable, "-m", "weft", "serve", str(run), "--port", "0", "--queue", "2000", *options]
    with log.open("w") as stderr:
        server = subprocess.Popen(command, stderr=stderr)
    for _ in range(600):
        time.sleep(0.1)
        if match := re.search(r" at (http://\S+), routes", log.read_text()):
            try:
                if json.load(urlopen(f"{match[1]}/ready", timeout=5))["ready"]:
                    return server, match[1]
            except OSError:
                continue
    raise SystemExit(f"the server did not start: {log.read_text()}")


def used_blocks(url: str) -> int:
    text = urlopen(f"{url}/metrics", timeout=60).read().decode()
    return sum(int(float(value)) for value in re.findall(r"weft_cache_blocks_used\{.*\} (\S+)", text))


@contextmanager
def other_server(command: list[str], log: Path) -> Iterator[str]:
    """Start another program's server on a free port; yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with log.open("w") as stderr:
        server = subprocess.Popen([*command, "--port", str(port)], stdout=stderr, stderr=stderr)
    try:
        for _ in range(1200):
            time.sleep(0.1)
            with suppress(OSError), urlopen(f"http://localhost:{port}/health", timeout=5):
                break
        else:
            raise SystemExit(f"the server did not start: {log.read_text()}")
        yield f"http://localhost:{port}"
    finally:
        server.terminate()
        server.wait(60)


def memory(server: "subprocess.Popen[bytes]") -> float:
    """Resident memory of the server, in MiB."""
    match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{server.pid}/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


def drops(model: ServedModel, server: "subprocess.Popen[bytes]", connections: int, concurrent: int) -> None:
    """Drop connections in two rounds, and print the server's memory after each."""
    megabytes = []
    for _ in range(2):
        asyncio.run(drop(model, connections, concurrent))
        end = time.monotonic() + 60
        while used_blocks(model.url) and time.monotonic() < end:
            time.sleep(0.2)
        megabytes.append(round(memory(server)))
    print(f"{connections:,} connections dropped, twice: {used_blocks(model.url)} blocks in use, {megabytes} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--streams", type=int, nargs="+", default=[64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--drops", type=int, default=200)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--url")
    parser.add_argument("--model", default="")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--greedy", action="store_true", help="always take the likeliest token")
    parser.add_argument("--transformers", type=Path, metavar="FOLDER", help="the model as exported with --to hf")
    parser.add_argument(
        "--llama-server",
        nargs=2,
        metavar=("PROGRAM", "GGUF"),
        help="llama.cpp's server, and the model as exported with --to gguf",
    )
    parser.add_argument("--quantize", help="passed to `weft serve`")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="duration of the memory test, at half the throughput"
    )
    options = parser.parse_args()
    print("| | tokens/s | first token p50 / p95, ms | between p95, ms | texts | failures |\n|---|---|---|---|---|---|")
    if options.url is not None:
        measure({"": ServedModel(options.url, options.model, options.chat, options.greedy)}, options)
        return
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if options.run is None:
            text = Path(folder, "text.txt")
            text.write_text(Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8") * 5)
            options.run = Path(folder, "small")
            weft.train("llama-tiny", data=str(text), run=options.run, changes=CHANGES, log=lambda line: None)
        server, url = serve(
            options.run, Path(folder, "log"), ["--quantize", options.quantize] if options.quantize else []
        )
        try:
            model = ServedModel(url, options.run.resolve().name, options.chat, options.greedy)
            models = {"weft": model}
            if options.transformers is not None:
                command = [str(Path(sys.executable).with_name("transformers")), "serve", str(options.transformers)]
                other = stack.enter_context(other_server(command, Path(folder, "transformers")))
                models["transformers"] = ServedModel(other, str(options.transformers), options.chat, options.greedy)
            if options.llama_server is not None:
                program, file = options.llama_server
                rows = str(max(options.streams))
                command = [program, "-m", file, "-np", rows, "-c", str(512 * int(rows)), "-t", "2"]
                other = stack.enter_context(other_server(command, Path(folder, "llama.cpp")))
                models["llama.cpp"] = ServedModel(other, "model", options.chat, options.greedy)
            rate = measure(models, options)
            if options.drops:
                drops(model, server, options.drops, 100)
            if options.minutes:
                asyncio.run(soak(model, server, rate / options.tokens / 2, 60 * options.minutes, options.tokens))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def measure(models: dict[str, ServedModel], options: argparse.Namespace) -> float:
    """Measure all servers alternately; return the first one's tokens per second with the last number of streams."""
    for model in models.values():
        asyncio.run(load(model, 2, 1.0, 16))  # warm-up
    rates: dict[int, dict[str, float]] = {}
    for streams in dict.fromkeys((1, *options.streams)):
        seconds = options.seconds if streams > 1 else min(options.seconds, 20.0)
        several = "streams" if streams > 1 else "stream"
        rates[streams] = {
            name: row(
                f"{streams} {several} {name}".rstrip(), *asyncio.run(load(model, streams, seconds, options.tokens))
            )
            for name, model in models.items()
        }
        first, *others = rates[streams].values()
        for name, other in zip(list(models)[1:], others, strict=True):
            log_to_stderr(f"{streams} {several}: {first / other:.2f} times the tokens per second of {name}")
    alone, many = (next(iter(rates[streams].values())) for streams in (1, options.streams[-1]))
    log_to_stderr(f"{options.streams[-1]} streams: {many / alone:.1f} times the throughput of one")
    return many


if __name__ == "__main__":
    main()
