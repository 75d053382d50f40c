"""Packages that few tests use and that take long to import: the first test that uses one imports it.

Each of the processes that share the tests out between them imports every file of tests.
"""

from importlib import import_module
from typing import Any


class Later:
    """A module, imported by the first look into it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__") or key == "_mock_name":  # what pytest asks of everything that stands in a file
            raise AttributeError(key)
        return getattr(import_module(self._name), key)
