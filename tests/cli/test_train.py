"""What commands do before anything is loaded."""

import os

import pytest

from weft.cli.main import run, share_processors


@pytest.mark.parametrize("given", [None, "100"])
@pytest.mark.parametrize("words", [["train", "no-such-recipe"], ["quickstart", "no-such-key=1"]])
def test_torch_keeps_what_a_step_frees(words: list[str], given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", given or "")
    if given is None:
        monkeypatch.delenv("MIMALLOC_PURGE_DELAY")
    assert run(words) == 2
    assert os.environ["MIMALLOC_PURGE_DELAY"] == (given or "-1")


@pytest.mark.parametrize(
    ("machine", "given", "expected"),
    [
        ("x86_64", {}, "10000"),
        ("x86_64", {"GOMP_SPINCOUNT": "5"}, "5"),
        ("x86_64", {"OMP_WAIT_POLICY": "active"}, None),
        ("aarch64", {}, None),
    ],
)
def test_threads_that_wait_leave_the_processor_soon(
    machine: str, given: dict[str, str], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(os, "environ", dict(given))
    share_processors()
    assert os.environ.get("GOMP_SPINCOUNT") == expected
