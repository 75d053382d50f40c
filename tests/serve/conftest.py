"""Fixtures of the server's tests."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.serve.serving import RUNS, Served, served

import weft

SMALL = {"tokenizer": "byte", "steps": 1, "model.layers": 2, "model.d_model": 32, "model.context": 64}
SMALL |= {"model.attention.heads": 2}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small runs, and `bytes`: a decoder over bytes with a window of 64 tokens."""
    folder = tmp_path_factory.mktemp("serve")
    text = folder / "text.txt"
    text.write_text("A tale is told, and then another one.\n" * 400)
    weft.train("gpt-tiny", data=str(text), run=folder / "runs" / "bytes", changes=SMALL, log=lambda line: None)
    for path in RUNS.iterdir():
        shutil.copytree(path, folder / "runs" / path.name)
    return folder / "runs"


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[Served]:
    with served(runs) as server:
        yield server
