"""Texts for the commands' tests."""

import random
from pathlib import Path


def write_book(path: Path, seed: int = 0, lines: int = 400) -> Path:
    """Write sentences of a small grammar."""
    pick = random.Random(seed).choice
    names, verbs = ["the cat", "a dog", "my friend"], ["sees", "follows", "likes"]
    path.write_text("".join(f"{pick(names).capitalize()} {pick(verbs)} {pick(names)}.\n" for _ in range(lines)))
    return path
