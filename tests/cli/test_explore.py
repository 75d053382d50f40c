"""`weft explore`: a folder's page on this machine alone, whatever is in the folder."""

import os
import signal
import socket
import subprocess
import sys
import webbrowser
from pathlib import Path
from typing import Any

import httpx
import pytest

from weft.cli import explore as command
from weft.cli.main import run


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that a browser was sent to; there is one, and no server."""
    pages: list[str] = []
    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.BackgroundBrowser("browser"))
    monkeypatch.setattr(webbrowser, "open", pages.append)
    monkeypatch.setattr(command.threading, "Thread", _AtOnce)
    monkeypatch.setattr(command, "answer", lambda library, serving, listener: listener.close())
    return pages


class _AtOnce:
    def __init__(self, target: Any, args: Any, daemon: bool):
        self.start = lambda: target(*args)


def test_a_browser_is_opened_unless_it_is_told_not_to(
    opened: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["explore", str(tmp_path)]) == 0
    told = capsys.readouterr().err
    assert len(opened) == 1 and opened[0].startswith("http://127.0.0.1:") and opened[0] in told
    assert run(["explore", str(tmp_path), "--no-browser"]) == 0 and len(opened) == 1
    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.GenericBrowser("lynx"))
    assert run(["explore", str(tmp_path)]) == 0 and len(opened) == 1  # it would take the terminal


def test_a_port_that_is_taken_gives_another_unless_it_was_asked_for(
    opened: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(command, "PORT", port)
        assert run(["explore", str(tmp_path)]) == 0 and f":{port}/" not in opened[0]
        assert run(["explore", str(tmp_path), "--port", str(port)]) == 2
    assert "another port may be free" in capsys.readouterr().err


def test_a_folder_that_is_missing_is_a_mistake_unless_it_is_the_default(
    opened: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["explore", "rnus"]) == 2
    assert capsys.readouterr().err == "weft: rnus: no such folder; `weft train` makes runs/\n"
    assert run(["explore"]) == 0 and len(opened) == 1


@pytest.mark.slow
def test_it_serves_the_page_until_it_is_ended(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "weft", "explore", "--no-browser"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stderr is not None
        told = server.stderr.readline()
        where = told.split(" is at ")[1].split(" ")[0]
        page = httpx.get(where, timeout=30, verify=False)
        runs = httpx.get(f"{where}v1/runs", timeout=30, verify=False)
        server.send_signal(signal.SIGTERM)
        server.wait(30)
    assert "<title>weft</title>" in page.text and runs.json()["runs"] == []
