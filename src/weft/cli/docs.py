"""`weft docs`: open the documentation in a browser."""

import os
import subprocess
import sys
import webbrowser
from pathlib import Path

import weft
from weft.cli.console.options import argument, flag
from weft.cli.console.terminal import echo
from weft.cli.explore import opens_window
from weft.errors import ConfigError

SITE = Path(weft.__file__).parent / "site"  # part of a wheel; built in a checkout
SOURCES = Path(weft.__file__).parents[2] / "docs"  # in a checkout


def docs(
    folder: Path = argument("DIR", "The folder of the built site (default: weft's own).", SITE, show_default=False),
    no_browser: bool = flag("--no-browser", "Do not open a browser; the address is printed in any case."),
) -> None:
    """Open the documentation in a browser: lectures, guides, every command and setting. Works offline.

    In a checkout, the site is built on first use, which takes about ten seconds; `make docs` builds it again.

    $ weft docs
    """
    page = folder / "index.html"
    if folder == SITE and not page.is_file() and (SOURCES / "ext" / "site.py").is_file():
        build(SOURCES, SITE)
    if not page.is_file():
        raise ConfigError(f"{page}: no such page; `make docs` in a checkout of weft builds the documentation")
    address = page.resolve().as_uri()
    echo(address)
    if not no_browser and opens_window():
        webbrowser.open(address)


def build(sources: Path, site: Path) -> None:
    """Build the site from the pages of a checkout, with the builder in them."""
    echo("weft: building the documentation, once …", err=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(sources), str(sources.parent / "src")])}
    command = [sys.executable, "-P", "-m", "ext.site", str(site)]
    result = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
    if not (site / "index.html").is_file():  # broken links are not the reader's concern
        reason = result.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"{sources}: the site cannot be built: {reason}")
