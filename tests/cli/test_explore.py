"""`weft explore`: the page of a folder of runs, served to this machine only."""

import os
import signal
import socket
import subprocess
import sys
import threading
import webbrowser
from pathlib import Path
from typing import Any

import httpx
import pytest

from weft.cli import explore as command
from weft.cli.main import run
from weft.serve import listen as server


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that a browser was opened with; no server is started."""
    pages: list[str] = []
    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.BackgroundBrowser("browser"))
    monkeypatch.setattr(webbrowser, "open", pages.append)
    monkeypatch.setattr(threading, "Thread", _Synchronous)
    monkeypatch.setattr(server, "run_server", lambda library, serving, listener: listener.close())
    return pages


class _Synchronous:
    def __init__(self, target: Any, args: Any, daemon: bool):
        self.start = lambda: target(*args)


def test_a_browser_with_a_window_is_opened(
    opened: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["explore", str(tmp_path)]) == 0
    assert len(opened) == 1 and opened[0].startswith("http://127.0.0.1:") and opened[0] in capsys.readouterr().err
    assert run(["explore", str(tmp_path), "--no-browser"]) == 0 and len(opened) == 1
    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.GenericBrowser("lynx"))
    assert run(["explore", str(tmp_path)]) == 0 and len(opened) == 1  # lynx would take over the terminal


def test_a_taken_port_is_an_error_only_if_it_was_requested(
    opened: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(command, "DEFAULT_PORT", port)
        assert run(["explore", str(tmp_path)]) == 0 and f":{port}/" not in opened[0]
        assert run(["explore", str(tmp_path), "--port", str(port)]) == 2
    assert "try another port" in capsys.readouterr().err


def test_a_missing_folder_is_an_error_unless_it_is_the_default(
    opened: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["explore", "rnus"]) == 2
    assert capsys.readouterr().err == "weft: rnus: no such folder; `weft train` creates runs/\n"
    assert run(["explore"]) == 0 and len(opened) == 1


@pytest.mark.slow
def test_the_page_is_served_until_sigterm(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "weft", "explore", "--no-browser"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        url = server.stderr.readline().split(" is at ")[1].split(" ")[0]
        page = httpx.get(url, timeout=30, verify=False)
        runs = httpx.get(f"{url}v1/runs", timeout=30, verify=False)
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    assert "<title>weft</title>" in page.text and runs.json()["runs"] == []
