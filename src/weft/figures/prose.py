"""Texts of pages, which are in a texts.toml beside the code that shows them."""

import tomllib
from pathlib import Path


def prose(module: str) -> dict[str, str]:
    """Return the texts beside a module, by name, with the lines of a paragraph joined."""
    texts = tomllib.loads(Path(module).with_name("texts.toml").read_text(encoding="utf-8"))
    return {name: " ".join(text.split()) for name, text in texts.items()}
