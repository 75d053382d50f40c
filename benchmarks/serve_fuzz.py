"""Send generated requests to every route of a server: no answer may be a 5xx, and none may hang. Print the slowest.

    python benchmarks/serve_fuzz.py --cases 10000

schemathesis generates valid and invalid requests from the server's OpenAPI document, with the names of served models.
The server runs in a separate process, and must generate the same text before and after.
"""

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx

from weft.errors import ConfigError

RUNS = Path(__file__).parents[1] / "tests" / "api" / "runs-0.1"
NAMES = ("gpt", "lstm", "ngram", "pairs", "classify", "bahdanau", "twins")
MAX_SECONDS = 30  # a request that takes longer hangs
SLOWEST = 15  # requests that are printed
LIMITS = ["--max-tokens", "64", "--timeout", "20"]
PHASES = "coverage,fuzzing"


def with_names(document: dict[str, Any]) -> dict[str, Any]:
    """Restrict model names to the served ones, so that most requests get past this check."""
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": list(NAMES)}
    return document


def text(url: str) -> str:
    body = {"model": "gpt", "prompt": "A tale", "max_tokens": 20, "seed": 1}
    answer: str = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    return answer


def slowest(log: str) -> list[tuple[float, str]]:
    """Return the slowest requests in a server's log: seconds, and method, path and status."""
    requests = re.findall(r" ([A-Z]+ \S+ \d+) (\d+\.\d+) s$", log, re.MULTILINE)
    return sorted(((float(seconds), request) for request, seconds in requests), reverse=True)[:SLOWEST]


def fuzz(cases: int, seed: int) -> tuple[int, list[tuple[float, str]]]:
    """Send `cases` requests; return the number sent, and the slowest. Failures are printed and raise an error."""
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:  # loading a model may write to its run
            shutil.copytree(RUNS / name, Path(folder, "runs", name))
        command = [sys.executable, "-m", "weft", "serve", f"{folder}/runs", "--port", "0", *LIMITS]
        log = Path(folder, "log")
        with log.open("w") as stderr:
            server = subprocess.Popen(command, stderr=stderr)
        try:
            url = address(log, server)
            before = text(url)
            document = with_names(httpx.get(f"{url}/openapi.json").json())
            Path(folder, "openapi.json").write_text(json.dumps(document))
            operations = sum(len(methods) for methods in document["paths"].values())
            words = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{folder}/openapi.json", "--url", url]
            words += ["--checks", "not_a_server_error", "--phases", PHASES, "--seed", str(seed), "--no-shrink"]
            words += ["--max-examples", str(-(-cases // operations)), "--request-timeout", str(MAX_SECONDS)]
            words += ["--workers", "1", "--continue-on-failure", "--suppress-health-check", "all", "--warnings", "off"]
            done = subprocess.run(words, capture_output=True, text=True, cwd=folder)
            match = re.search(r"(\d+) generated", done.stdout)
            if done.returncode or match is None:
                print(done.stdout, done.stderr, log.read_text()[-20_000:], sep="\n")
                raise ConfigError("some requests failed")
            if text(url) != before:
                raise ConfigError("the server generates another text than before")
            if "Traceback" in log.read_text():
                raise ConfigError(log.read_text()[-20_000:])
            return int(match[1]), slowest(log.read_text())
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def address(log: Path, server: "subprocess.Popen[bytes]") -> str:
    """Wait until the server answers; return its URL."""
    while server.poll() is None:
        match = re.search(r" at (http://\S+), routes", log.read_text())
        if match is not None:
            try:
                httpx.get(f"{match[1]}/health")
                return match[1]
            except httpx.TransportError:
                pass
        try:
            server.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
    raise ConfigError(f"the server did not start: {log.read_text()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    count, requests = fuzz(options.cases, options.seed)
    print(f"{count:,} requests: no 5xx, no hang; the slowest:")
    for seconds, request in requests:
        print(f"{seconds:8.3f} s  {request}")


if __name__ == "__main__":
    main()
