"""Environment variables that commands set before torch is loaded."""

import os

import pytest
from tests.command import Patch

from weft.cli.main import limit_spinning, run


@pytest.mark.parametrize("user_value", [None, "100"])
@pytest.mark.parametrize("words", [["train", "no-such-recipe"], ["quickstart", "no-such-key=1"]])
def test_mimalloc_keeps_freed_memory(words: list[str], user_value: str | None, monkeypatch: Patch) -> None:
    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", user_value or "")
    if user_value is None:
        monkeypatch.delenv("MIMALLOC_PURGE_DELAY")
    assert run(words) == 2
    assert os.environ["MIMALLOC_PURGE_DELAY"] == (user_value or "-1")


@pytest.mark.parametrize(
    ("machine", "environment", "expected"),
    [
        ("x86_64", {}, "10000"),
        ("x86_64", {"GOMP_SPINCOUNT": "5"}, "5"),
        ("x86_64", {"OMP_WAIT_POLICY": "active"}, None),
        ("aarch64", {}, None),
    ],
)
def test_idle_openmp_threads_soon_sleep_on_x86(
    machine: str, environment: dict[str, str], expected: str | None, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(os, "environ", dict(environment))
    limit_spinning()
    assert os.environ.get("GOMP_SPINCOUNT") == expected
