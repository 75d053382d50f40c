"""What holds for every test."""

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
from tests.command import Cli

from weft.objectives import next_token

# how long drawing an example takes says how busy the machine is
settings.register_profile("weft", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("weft")

# started in the background, a shell hands down an ignored Ctrl-C; the tests press it
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def sooner() -> Iterator[None]:
    """Leave out what every training would wait for: the disk, and long texts at its end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr(next_token, "SAMPLE_TOKENS", 8)
        for absent in () if torch.cuda.is_available() else (torch.cuda, torch.xpu, torch.mtia):
            patch.setattr(absent, "manual_seed_all", lambda seed: None)  # each would note the whole stack
        yield


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


EARLIER = Path(__file__).parent / "api" / "runs-0.1"
BEST = {"chat-lora": "step-00000003"}  # of the others it is the last


def pytest_configure() -> None:
    """An archive of the sources holds no links: those of the earlier runs are made again."""
    for folder in EARLIER.glob("*/checkpoints"):
        last = max(path.name for path in folder.glob("step-*"))
        for name, step in (("latest", last), ("best", BEST.get(folder.parent.name, last))):
            if not (folder / name).exists():
                with suppress(FileExistsError):  # another process was quicker
                    (folder / name).symlink_to(step)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """What is imported and collected stays to the end: nobody looks for garbage in it, now or later, nor often."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked for a GPU where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
