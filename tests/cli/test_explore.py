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
from tests.command import Cli, Patch

from weft.cli import explore as command
from weft.serve import listen as server


@pytest.fixture
def opened(monkeypatch: Patch) -> list[str]:
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


def test_a_missing_folder_of_runs_is_reported(opened: list[str], tmp_path: Path, cli: Cli, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "weft: runs: no such folder yet" in cli.logged("explore", "--no-browser")


def test_a_browser_with_a_window_is_opened(opened: list[str], tmp_path: Path, cli: Cli, monkeypatch: Patch) -> None:
    cli("explore", tmp_path)
    assert len(opened) == 1 and opened[0].startswith("http://127.0.0.1:") and opened[0] in cli.err
    cli("explore", tmp_path, "--no-browser")
    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.GenericBrowser("lynx"))
    cli("explore", tmp_path)
    assert len(opened) == 1  # lynx would take over the terminal


def test_a_taken_port_is_an_error_only_if_it_was_requested(
    opened: list[str], tmp_path: Path, cli: Cli, monkeypatch: Patch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(command, "DEFAULT_PORT", port)
        cli("explore", tmp_path)
        assert f":{port}/" not in opened[0] and "try another port" in cli.refused("explore", tmp_path, "--port", port)


def test_a_missing_folder_is_an_error_unless_it_is_the_default(
    opened: list[str], tmp_path: Path, cli: Cli, monkeypatch: Patch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.refused("explore", "rnus") == "rnus: no such folder; `weft train` creates runs/"
    cli("explore")
    assert len(opened) == 1


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
