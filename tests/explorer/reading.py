"""Views of a text: going from one to the next without loading the page again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

At = Callable[..., str]  # address of a view: at("attention", model="gpt", text="A tale")


def show(page: Any, address: str, model: str) -> None:
    """Go to an address and wait until the view of that model is drawn."""
    page.goto(address)
    page.wait_for_function("name => document.title.includes(name)", arg=f"· {model} ·")
    page.wait_for_selector(".reading-drawn > *")


def saved_svg(page: Any) -> str:
    """Save the view's first picture, and return it."""
    with page.expect_download() as download:
        page.get_by_role("button", name="Save SVG").first.click()
    return Path(download.value.path()).read_text("utf-8")
