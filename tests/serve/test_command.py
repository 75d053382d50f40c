"""`weft serve`: refused options, and the process from start to end."""

import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
from tests.command import Cli, Patch
from tests.serve.serving import RUNS, until


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0: others can reach it; give --api-key-file, or --without-key as well"),
        (["--host", "::"], "others can reach it"),
        (["--ssl-certfile", "a.pem"], "--ssl-certfile and --ssl-keyfile: give both, or neither"),
        (["--api-key-file", "missing"], "missing: cannot be read"),
        (["--api-key-file", "short"], "short: expected one key per line, each of at least 8 characters"),
        (["--api-key-file", "empty"], "empty: expected one key per line"),
        (["--rows", "0"], "rows"),
        (["--timeout", "nan"], "seconds"),
        (["--port", "99999"], "--port 99999"),
        (["--port", "-1"], "--port -1"),
        (["nowhere"], "nowhere: not a run"),
        (["--quantize", "int3"], "int3"),
    ],
)
def test_invalid_options_are_refused(
    options: list[str], message: str, tmp_path: Path, monkeypatch: Patch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(RUNS / "gpt", "gpt")
    Path("short").write_text("long enough\nshort\n")
    Path("empty").write_text("# none\n")
    assert message in cli.refused("serve", tmp_path / "gpt", *options)


def test_two_runs_of_the_same_name_are_refused(tmp_path: Path, cli: Cli) -> None:
    shutil.copytree(RUNS / "gpt", tmp_path / "gpt")
    assert "is named 'gpt' as well; rename one of them" in cli.refused("serve", RUNS / "gpt", tmp_path / "gpt")


@pytest.mark.slow
def test_texts_in_progress_finish_after_sigterm(tmp_path: Path) -> None:
    """The text is read over a Unix socket."""
    socket = tmp_path / "weft.sock"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = shutil.copytree(RUNS / "ngram", tmp_path / "ngram")
    words = [sys.executable, "-m", "weft", "serve", str(run), "--uds", str(socket)]
    with subprocess.Popen(words, stderr=subprocess.PIPE, env=environment, text=True) as server:
        try:
            until(socket.exists, 60)
            transport = httpx.HTTPTransport(uds=str(socket))
            with httpx.Client(transport=transport, base_url="http://weft", timeout=60) as client:
                body = {"model": "ngram", "prompt": "a", "max_tokens": 2000, "logit_bias": {"3": -100}, "stream": True}
                with client.stream("POST", "/v1/completions", json=body) as response:
                    lines = response.iter_lines()
                    next(lines)
                    server.send_signal(signal.SIGTERM)
                    rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
            assert server.wait(30) == 128 + signal.SIGTERM
        finally:
            server.kill()
        assert server.stderr is not None and "Traceback" not in server.stderr.read()


@pytest.mark.slow
def test_texts_that_take_too_long_are_refused_after_sigterm(tmp_path: Path) -> None:
    socket = tmp_path / "weft.sock"
    code = "from weft.serve import listen; listen.DRAIN_SECONDS = 0.5; from weft.cli.main import main; main()"
    words = [sys.executable, "-c", code, "serve", str(RUNS / "ngram"), "--uds", str(socket)]
    body = {"model": "ngram", "prompt": "a", "max_tokens": 60_000, "logit_bias": {"3": -100}}
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        try:
            until(socket.exists, 60)
            threading.Timer(3, server.terminate).start()
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(socket)), timeout=60) as client:
                answer = client.post("http://weft/v1/completions", json=body)
            assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the server is stopping")
            assert server.wait(30) == 128 + signal.SIGTERM
        finally:
            server.kill()
        assert server.stderr is not None and "Traceback" not in server.stderr.read()


STUCK = """
import asyncio, os, signal, sys, threading, time, types, uvicorn
from weft.serve.listen import DrainingServer

async def app(scope, receive, send):
    await receive()
    asyncio.get_running_loop().run_in_executor(None, time.sleep, 600)
    threading.Timer(1, os.kill, [os.getpid(), signal.SIGTERM]).start()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})

signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as the command does
library = types.SimpleNamespace(refuse_calls=lambda: None)
config = uvicorn.Config(app, lifespan="on", port=0, timeout_graceful_shutdown=1, log_level="error")
DrainingServer(config, library, patience=0.5).run()
"""


@pytest.mark.slow
def test_a_thread_that_does_not_return_is_abandoned_after_sigterm() -> None:
    process = subprocess.run([sys.executable, "-c", STUCK], timeout=60, check=False)
    assert process.returncode == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_certificate_serves_https(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to create a certificate")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    options = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    openssl = ["openssl", *options.split(), "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(openssl, check=True, capture_output=True)
    run = shutil.copytree(RUNS / "ngram", tmp_path / "ngram")
    words = [sys.executable, "-m", "weft", "serve", str(run), "--port", "0"]
    words += ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    trusting = ssl.create_default_context(cafile=str(certificate))
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            line = server.stderr.readline()
            port = line.partition("https://127.0.0.1:")[2].partition(",")[0]
            for _ in range(100):
                try:
                    found = httpx.get(f"https://localhost:{port}/v1/models", verify=trusting)
                    break
                except httpx.ConnectError:
                    time.sleep(0.1)
            assert found.json()["data"][0]["id"] == "ngram"
        finally:
            server.terminate()
            assert server.wait(30) == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fuzzed_requests() -> None:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    words = [sys.executable, str(root / "benchmarks" / "serve_fuzz.py"), "--cases", "300"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
