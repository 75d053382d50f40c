"""Broken model files, a few of each format: the long form is benchmarks/mutated.py."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    file = Path(__file__).parent.parent.parent / "benchmarks" / "mutated.py"
    spec = importlib.util.spec_from_file_location("mutated", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("files", [22, pytest.param(110, marks=pytest.mark.slow)])  # two, or ten, of each format
def test_broken_files_are_refused_in_one_line(files: int, harness: ModuleType) -> None:
    outcomes, wrong = harness.sweep(files, seed=1)
    assert not wrong
    assert sum(count for name, count in outcomes.items() if name.endswith("refused")) >= files // 4
