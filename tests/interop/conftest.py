"""Fixtures for tests of other programs' formats."""

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def transformers_warnings() -> Iterator[list[str]]:
    """Warnings that transformers logs."""
    lines: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    recorder, logger = Recorder(logging.WARNING), logging.getLogger("transformers")
    logger.addHandler(recorder)
    yield lines
    logger.removeHandler(recorder)


@pytest.fixture
def seeded() -> None:
    torch.manual_seed(0)
