"""`weft docs`: open the documentation in a browser."""

import webbrowser
from pathlib import Path

import weft
from weft.cli.console.options import argument, flag
from weft.cli.console.terminal import echo
from weft.cli.explore import opens_window
from weft.errors import ConfigError

SITE = Path(weft.__file__).parents[2] / "site"  # in a checkout


def docs(
    folder: Path = argument(
        "DIR", "The folder of the built documentation (default: site/ in weft's checkout).", SITE, show_default=False
    ),
    no_browser: bool = flag("--no-browser", "Do not open a browser; the address is printed in any case."),
) -> None:
    """Open the documentation in a browser: lectures, guides, every command and setting. Works offline.

    $ weft docs
    """
    page = folder / "index.html"
    if not page.is_file():
        raise ConfigError(f"{page}: no such page; `make docs` in a checkout of weft builds the documentation")
    address = page.resolve().as_uri()
    echo(address)
    if not no_browser and opens_window():
        webbrowser.open(address)
