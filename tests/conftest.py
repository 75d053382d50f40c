"""Fixtures and hooks for every test."""

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from tests.command import Cli

from weft import progress
from weft.objectives import next_token

# the time to draw an example depends on how busy the machine is
settings.register_profile("weft", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("weft")

# a shell starts background processes with SIGINT ignored, but the tests send it
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def faster_training() -> Iterator[None]:
    """Do not wait for the disk, for long samples after a training, and for Hypothesis to read all sources."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr(next_token, "SAMPLE_TOKENS", 8)
        patch.setattr(providers, "_get_local_constants", lambda: providers._local_constants, raising=False)
        for absent in () if torch.cuda.is_available() else (torch.cuda, torch.xpu, torch.mtia):
            patch.setattr(absent, "manual_seed_all", lambda seed: None)  # each would record the whole stack
        yield


@pytest.fixture(autouse=True)
def fresh_warnings() -> None:
    """Forget the warnings of earlier tests, since each is printed once per process."""
    progress.warn.cache_clear()


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


EARLIER = Path(__file__).parent / "api" / "runs-0.1"
BEST = {"chat-lora": "step-00000003"}  # for all other runs, the last checkpoint is the best


def pytest_configure() -> None:
    """Create the links of the earlier runs, which an archive of the sources does not hold."""
    for folder in EARLIER.glob("*/checkpoints"):
        last = max(path.name for path in folder.glob("step-*"))
        for name, step in (("latest", last), ("best", BEST.get(folder.parent.name, last))):
            if not (folder / name).exists():
                with suppress(FileExistsError):  # another process created it
                    (folder / name).symlink_to(step)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Collect tests without garbage collection, and exempt the collected objects from later ones, which are rare."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on machines without one."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
