"""Requests that nobody would write, to every route of a server: none is answered with a 5xx, and none hangs.

    python benchmarks/serve_fuzz.py --cases 10000

schemathesis makes them from the server's own OpenAPI document, valid and invalid, with the names of models that are
served. They go to a server of its own process, and at the end it must still write what it wrote at the beginning.
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
SECONDS = 30  # after which a request is taken to hang
LIMITS = ["--max-tokens", "64", "--timeout", "20"]
PHASES = "coverage,fuzzing"


def with_names(document: dict[str, Any]) -> dict[str, Any]:
    """The same document, in which models are those that are served: most requests get past their names."""
    for schema in document["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": list(NAMES)}
    return document


def text(url: str) -> str:
    body = {"model": "gpt", "prompt": "A tale", "max_tokens": 20, "seed": 1}
    found: str = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    return found


def fuzz(cases: int, seed: int) -> int:
    """How many cases were tried; what fails is printed, and ends the program."""
    with tempfile.TemporaryDirectory() as place:
        for name in NAMES:  # what a model leaves in its run when it is loaded stays there
            shutil.copytree(RUNS / name, Path(place, "runs", name))
        command = [sys.executable, "-m", "weft", "serve", f"{place}/runs", "--port", "0", *LIMITS]
        log = Path(place, "log")
        with log.open("w") as stderr:
            server = subprocess.Popen(command, stderr=stderr)
        try:
            url = address(log, server)
            before = text(url)
            document = with_names(httpx.get(f"{url}/openapi.json").json())
            Path(place, "openapi.json").write_text(json.dumps(document))
            operations = sum(len(methods) for methods in document["paths"].values())
            words = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{place}/openapi.json", "--url", url]
            words += ["--checks", "not_a_server_error", "--phases", PHASES, "--seed", str(seed), "--no-shrink"]
            words += ["--max-examples", str(-(-cases // operations)), "--request-timeout", str(SECONDS)]
            words += ["--workers", "1", "--continue-on-failure", "--suppress-health-check", "all", "--warnings", "off"]
            said = subprocess.run(words, capture_output=True, text=True, cwd=place)
            tried = re.search(r"(\d+) generated", said.stdout)
            if said.returncode or tried is None:
                print(said.stdout, said.stderr, log.read_text()[-20_000:], sep="\n")
                raise ConfigError("some requests failed")
            if text(url) != before:
                raise ConfigError("the server writes something else than at the beginning")
            if "Traceback" in log.read_text():
                raise ConfigError(log.read_text()[-20_000:])
            return int(tried[1])
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def address(log: Path, server: "subprocess.Popen[bytes]") -> str:
    """Where the server listens, once it answers."""
    while server.poll() is None:
        found = re.search(r" at (http://\S+), routes", log.read_text())
        if found is not None:
            try:
                httpx.get(f"{found[1]}/health")
                return found[1]
            except httpx.TransportError:
                pass
        try:
            server.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
    raise ConfigError(f"the server has not begun: {log.read_text()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(f"{fuzz(given.cases, given.seed):,} requests: no 5xx, no hang")


if __name__ == "__main__":
    main()
