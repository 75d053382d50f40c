"""What `weft train` does before anything is loaded."""

import os

import pytest

from weft.cli.main import run


@pytest.mark.parametrize("given", [None, "100"])
@pytest.mark.parametrize("words", [["train", "no-such-recipe"], ["quickstart", "no-such-key=1"]])
def test_torch_keeps_what_a_step_frees(words: list[str], given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", given or "")
    if given is None:
        monkeypatch.delenv("MIMALLOC_PURGE_DELAY")
    assert run(words) == 2
    assert os.environ["MIMALLOC_PURGE_DELAY"] == (given or "-1")
