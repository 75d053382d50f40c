"""Views of a text: going from one to the next without loading the page again."""

from pathlib import Path
from typing import Any


def show(page: Any, address: str, model: str) -> None:
    """Go to an address and wait until the view of that model is drawn."""
    page.goto(address)
    page.wait_for_function("name => document.title.includes(name)", arg=f"· {model} ·")
    page.wait_for_selector(".reading-drawn > *")


def saved(page: Any, folder: Path) -> str:
    """The picture that a view saves."""
    with page.expect_download() as download:
        page.get_by_role("button", name="Save SVG").click()
    download.value.save_as(folder / "view.svg")
    return (folder / "view.svg").read_text("utf-8")
