"""The texts of pages: they stand in a texts.toml beside the code that shows them."""

import tomllib
from pathlib import Path


def prose(module: str) -> dict[str, str]:
    """The texts beside a module, by name; a paragraph's lines are put together."""
    texts = tomllib.loads(Path(module).with_name("texts.toml").read_text(encoding="utf-8"))
    return {name: " ".join(text.split()) for name, text in texts.items()}
