"""A contender that is prepared in no time."""

from pathlib import Path

import pytest

from weft.compare.config import contender, experiment
from weft.compare.contenders import ReadyContender, prepare_contenders


@pytest.fixture
def ngram(tmp_path: Path) -> ReadyContender:
    book = tmp_path / "book.txt"
    book.write_text("".join(f"frog {n} sat by the river {n * n % 97}\n" for n in range(1200)))
    tree = {"data": {"sources": [str(book)]}, "budget": {"tokens": 1000}, "settings": {"tokenizer": {"kind": "byte"}}}
    settings = experiment({**tree, "contenders": dict([contender("ngram-3")])})
    return prepare_contenders(settings, tmp_path / "data", "cpu", log=print)[0]
