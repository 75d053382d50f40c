"""README's commands to a server, run as they are written there but for the port."""

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
    place = tmp_path_factory.mktemp("readme") / "gpt-tiny"
    shutil.copytree(runs / "bytes", place)
    with served(place) as it:
        yield it


def block(language: str, begins: str, server: Served) -> str:
    (found,) = [text for kind, text in BLOCKS if kind == language and text.startswith(begins)]
    assert "localhost:8000" in found
    return found.replace("localhost:8000", f"localhost:{server.port}")


def test_curl(server: Served) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl")
    said = subprocess.run(["sh", "-c", block("sh", "curl", server)], capture_output=True, timeout=60, check=True)
    assert json.loads(said.stdout)["choices"][0]["text"]


def test_python(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    exec(block("python", "from openai", server), {})
    assert capsys.readouterr().out


def test_javascript(server: Served) -> None:
    if shutil.which("node") is None:
        pytest.skip("no node")
    command = ["node", "--input-type=module", "--eval", block("js", "const headers", server)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.strip()
