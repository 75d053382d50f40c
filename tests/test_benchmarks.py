"""What benchmarks import is there: nothing else in the suite runs them."""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).parent.parent / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("file", BENCHMARKS, ids=lambda file: file.stem)
def test_what_a_benchmark_imports_is_there(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    names = [
        (node.module, name.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weft.")
        for name in node.names
    ]
    assert names or "\nimport weft\n" in source
    for module, name in names:
        assert module is not None and _has(module, name), (module, name)


def _has(module: str, name: str) -> bool:
    found = importlib.util.find_spec(module)
    if found is not None and found.submodule_search_locations is not None:
        # a file of kernels can be imported only where there is a GPU
        return importlib.util.find_spec(f"{module}.{name}") is not None
    return hasattr(importlib.import_module(module), name)
