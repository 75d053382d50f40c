"""How fast `weft serve` writes for many clients at once, on loopback.

    python benchmarks/serve.py --seconds 60 --streams 64
    python benchmarks/serve.py --run smollm2 --transformers smollm2-hf --streams 8 32 --seconds 1 --tokens 16 --greedy
    python benchmarks/serve.py --minutes 30 --drops 0

One client alone, then many, each of which asks for a text of `--tokens` tokens, reads it as it comes and asks again.
Then clients that go away at random, after which no block may be in use and memory must be as before. The server is a
process of its own, by default of a decoder of 4 layers of 256 over characters that is made first. `--run` takes another
run; `--url` and `--model` ask another server that speaks OpenAI's API, with `--chat` for conversations alone.

`--transformers` names the same model as `weft export --to hf` writes it, `--llama-server` llama.cpp's program and the
file that `--to gguf` writes: these servers answer the same clients in turn with weft. With `--minutes`, texts are then
asked for half as often as the server can write them, and what it holds in memory meanwhile is fitted with a line.
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
MOST = 64  # texts that are open at a time while memory is watched
SAMPLE_SECONDS = 10.0
PROMPT = "The following story is told by somebody who was there, or says so: "


@dataclass
class Seen:
    """What clients have seen, in seconds and tokens."""

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    texts: int = 0
    failures: int = 0


@dataclass(frozen=True)
class Place:
    """A model of a server."""

    url: str
    model: str
    chat: bool = False
    greedy: bool = False

    async def ask(self, tokens: int, seed: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        said = f"{PROMPT}{seed}"
        asked = {"messages": [{"role": "user", "content": said}]} if self.chat else {"prompt": said}
        temperature = 0.0 if self.greedy else 0.8
        body = {"model": self.model, **asked, "max_tokens": tokens, "seed": seed, "temperature": temperature}
        body["stream"] = True
        content = json.dumps({**body, "stream_options": {"include_usage": True}}).encode()
        path = "chat/completions" if self.chat else "completions"
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        return reader, writer


async def read_text(place: Place, tokens: int, seed: int, seen: Seen) -> None:
    """One text as it comes."""
    began = last = time.perf_counter()
    writer, usage = None, None
    try:
        reader, writer = await place.ask(tokens, seed)
        begun = False
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter()
            if b'"usage":{' in line or b'"usage": {' in line:
                usage = json.loads(line[6:])["usage"] or usage
            (seen.between if begun else seen.first).append(now - (last if begun else began))
            last, begun = now, True
    except OSError:
        usage = None
    finally:
        if writer is not None:
            writer.close()
    seen.texts += 1
    seen.failures += usage is None
    seen.tokens += 0 if usage is None else usage["completion_tokens"]


async def load(place: Place, streams: int, seconds: float, tokens: int) -> tuple[Seen, float]:
    """What so many clients see in so many seconds; the texts they are reading then are read to their ends."""
    seen, began = Seen(), time.perf_counter()

    async def client(number: int) -> None:
        seed = number
        while time.perf_counter() - began < seconds:
            await read_text(place, tokens, seed, seen)
            seed += streams

    await asyncio.gather(*(client(number) for number in range(streams)))
    return seen, time.perf_counter() - began


async def soak(place: Place, server: "subprocess.Popen[bytes]", rate: float, seconds: float, tokens: int) -> None:
    """Ask for `rate` texts a second, of which at most MOST are open; the line through the server's memory meanwhile."""
    seen, began, held = Seen(), time.perf_counter(), []
    open_now: set[asyncio.Task[None]] = set()
    skipped = asked = 0
    while (now := time.perf_counter() - began) < seconds:
        if now >= SAMPLE_SECONDS * len(held):
            held.append(memory(server))
        if now < asked / rate:
            await asyncio.sleep(min(asked / rate - now, SAMPLE_SECONDS))
            continue
        asked += 1
        if len(open_now) >= MOST:
            skipped += 1
            continue
        task = asyncio.create_task(read_text(place, tokens, asked, seen))
        open_now.add(task)
        task.add_done_callback(open_now.discard)
    await asyncio.gather(*open_now)
    row(f"{rate:.2f} texts/s, {seconds / 60:.0f} min", seen, time.perf_counter() - began)
    late = held[len(held) // 3 :]  # what is needed once is there by then
    slope = statistics.linear_regression(range(len(late)), late).slope if len(late) > 1 else float("nan")
    print(f"memory {held[0]:.0f} → {late[0]:.1f} → {held[-1]:.1f} MB: {slope * 3600 / SAMPLE_SECONDS:+.1f} MB an hour")
    print(f"{used_blocks(place.url)} blocks in use; {skipped} texts were not asked for, as {MOST} were open")


async def drop(place: Place, connections: int, at_once: int) -> None:
    """Clients that go away: before the answer, at its beginning, in the middle."""
    rng, free = random.Random(0), asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with free:
            reader, writer = await place.ask(400, number)
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


def row(name: str, seen: Seen, seconds: float) -> float:
    rate = seen.tokens / seconds
    first = f"{1e3 * statistics.median(seen.first):.0f} / {1e3 * percentile(seen.first, 0.95):.0f}"
    print(
        f"| {name} | {rate:,.0f} | {first} | {1e3 * percentile(seen.between, 0.95):.1f} "
        f"| {seen.texts:,} | {seen.failures} |",
        flush=True,
    )
    return rate


def serve(run: Path, log: Path, options: list[str]) -> tuple["subprocess.Popen[bytes]", str]:
    command = [sys.executable, "-m", "weft", "serve", str(run), "--port", "0", "--queue", "2000", *options]
    with log.open("w") as stderr:
        server = subprocess.Popen(command, stderr=stderr)
    for _ in range(600):
        time.sleep(0.1)
        if found := re.search(r" at (http://\S+), routes", log.read_text()):
            with_ready = f"{found[1]}/ready"
            try:
                if json.load(urlopen(with_ready, timeout=5))["ready"]:
                    return server, found[1]
            except OSError:
                continue
    raise SystemExit(f"the server has not begun: {log.read_text()}")


def used_blocks(url: str) -> int:
    text = urlopen(f"{url}/metrics", timeout=60).read().decode()
    return sum(int(float(value)) for value in re.findall(r"weft_cache_blocks_used\{.*\} (\S+)", text))


@contextmanager
def other_server(command: list[str], log: Path) -> Iterator[str]:
    """The address of another program's server, on a port that is free now."""
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
            raise SystemExit(f"the server has not begun: {log.read_text()}")
        yield f"http://localhost:{port}"
    finally:
        server.terminate()
        server.wait(60)


def memory(server: "subprocess.Popen[bytes]") -> float:
    """Megabytes that the server holds now."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{server.pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def drops(place: Place, server: "subprocess.Popen[bytes]", connections: int, at_once: int) -> None:
    """Twice: what the first round leaves in memory, the second finds there."""
    held = []
    for _ in range(2):
        asyncio.run(drop(place, connections, at_once))
        end = time.monotonic() + 60
        while used_blocks(place.url) and time.monotonic() < end:
            time.sleep(0.2)
        held.append(memory(server))
    megabytes = [round(each) for each in held]
    print(f"{connections:,} connections dropped, twice: {used_blocks(place.url)} blocks in use, {megabytes} MB")


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
    parser.add_argument("--greedy", action="store_true", help="the likeliest token always")
    parser.add_argument("--transformers", type=Path, metavar="FOLDER", help="the same model, served beside it")
    parser.add_argument("--llama-server", nargs=2, metavar=("PROGRAM", "GGUF"), help="llama.cpp's, beside it")
    parser.add_argument("--quantize", help="weft's weights, as `weft serve` takes it")
    parser.add_argument("--minutes", type=float, default=0.0, help="at half of what the server can write")
    given = parser.parse_args()
    print("| | tokens/s | first token p50 / p95, ms | between p95, ms | texts | failures |\n|---|---|---|---|---|---|")
    if given.url is not None:
        measure({"": Place(given.url, given.model, given.chat, given.greedy)}, given)
        return
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        if given.run is None:
            text = Path(folder, "text.txt")
            text.write_text(Path(__file__).parents[1].joinpath("README.md").read_text(encoding="utf-8") * 5)
            given.run = Path(folder, "small")
            weft.train("llama-tiny", data=str(text), run=given.run, changes=CHANGES, log=lambda line: None)
        server, url = serve(given.run, Path(folder, "log"), ["--quantize", given.quantize] if given.quantize else [])
        try:
            place = Place(url, given.run.resolve().name, given.chat, given.greedy)
            places = {"weft": place}
            if given.transformers is not None:
                command = [str(Path(sys.executable).with_name("transformers")), "serve", str(given.transformers)]
                other = stack.enter_context(other_server(command, Path(folder, "transformers")))
                places["transformers"] = Place(other, str(given.transformers), given.chat, given.greedy)
            if given.llama_server is not None:
                program, file = given.llama_server
                rows = str(max(given.streams))
                command = [program, "-m", file, "-np", rows, "-c", str(512 * int(rows)), "-t", "2"]
                other = stack.enter_context(other_server(command, Path(folder, "llama.cpp")))
                places["llama.cpp"] = Place(other, "model", given.chat, given.greedy)
            rate = measure(places, given)
            if given.drops:
                drops(place, server, given.drops, 100)
            if given.minutes:
                asyncio.run(soak(place, server, rate / given.tokens / 2, 60 * given.minutes, given.tokens))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def measure(places: dict[str, Place], given: argparse.Namespace) -> float:
    """Tokens a second of the first of some servers with the last number of streams; they are asked in turn."""
    for place in places.values():
        asyncio.run(load(place, 2, 1.0, 16))  # what is done once
    rates: dict[int, dict[str, float]] = {}
    for streams in dict.fromkeys((1, *given.streams)):
        seconds = given.seconds if streams > 1 else min(given.seconds, 20.0)
        several = "streams" if streams > 1 else "stream"
        rates[streams] = {
            name: row(f"{streams} {several} {name}".rstrip(), *asyncio.run(load(place, streams, seconds, given.tokens)))
            for name, place in places.items()
        }
        first, *others = rates[streams].values()
        for name, other in zip(list(places)[1:], others, strict=True):
            log_to_stderr(f"{streams} {several}: {first / other:.2f} times as many tokens a second as {name}")
    alone, many = (next(iter(rates[streams].values())) for streams in (1, given.streams[-1]))
    log_to_stderr(f"{given.streams[-1]} streams are {many / alone:.1f} times as fast as one")
    return many


if __name__ == "__main__":
    main()
