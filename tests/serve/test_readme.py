"""README's examples of requests run as printed, except for the port."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.serve.serving import Served, served

README = Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")
SECTION = README.split("\n## Serve\n")[1].split("\n## ")[0]
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", SECTION, re.DOTALL)


@pytest.fixture(scope="module")
def server(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = shutil.copytree(runs / "bytes", tmp_path_factory.mktemp("readme") / "gpt-tiny")
    with served(path) as server:
        yield server


def block(language: str, begins: str, server: Served) -> str:
    (code,) = [text for kind, text in BLOCKS if kind == language and text.startswith(begins)]
    assert "localhost:8000" in code
    return code.replace("localhost:8000", f"localhost:{server.port}")


def test_curl(server: Served) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    done = subprocess.run(["sh", "-c", block("sh", "curl", server)], capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"][0]["text"]


def test_python(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    exec(block("python", "from openai", server), {})
    assert capsys.readouterr().out


def test_javascript(server: Served) -> None:
    if shutil.which("node") is None:
        pytest.skip("no node")
    command = ["node", "--input-type=module", "--eval", block("js", "const headers", server)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip()
