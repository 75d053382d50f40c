"""`weft explore`: the runs of a folder, and what is inside their models, in a browser."""

import socket
import threading
import webbrowser
from pathlib import Path

from weft.cli.console import options
from weft.cli.console.options import argument, flag, option
from weft.cli.console.terminal import loading
from weft.cli.serve import answer, listening
from weft.errors import ConfigError
from weft.progress import log_to_stderr

RUNS = Path("runs")
COMPARISONS = Path("comparisons")  # that weft compare and weft scale make
HOST, PORT = "127.0.0.1", 8000  # the port, where it is free


def explore(
    folder: Path = argument("DIR", "A folder of runs, or a run.", RUNS, autocompletion=options.complete_runs),
    port: int | None = option(None, f"The port to listen at (default: {PORT}, or one that is free)."),
    no_browser: bool = flag("--no-browser", "Do not open a browser; the address is printed in any case."),
) -> None:
    """Look at runs and inside their models, in a browser: curves as they grow, and each model's own numbers.

    Runs that begin later appear by themselves. Only this machine reaches the page.

    $ weft explore runs
    """
    if folder != RUNS and not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; `weft train` makes {RUNS}/")
    listener = _free() if port is None else listening(HOST, port)
    with loading():
        from weft.serve.config import Serving
        from weft.serve.library import Library

    serving = Serving()
    beside = [str(COMPARISONS)] if folder == RUNS and COMPARISONS.is_dir() else []
    library = Library([str(folder), *beside], None, serving.limits, may_be_empty=True)
    where = f"http://{HOST}:{listener.getsockname()[1]}/"
    log_to_stderr(f"weft: {folder} is at {where} for this machine alone; Ctrl-C ends it")
    if not no_browser and has_window():
        threading.Thread(target=webbrowser.open, args=(where,), daemon=True).start()
    answer(library, serving, listener)


def _free() -> socket.socket:
    try:
        return listening(HOST, PORT)
    except ConfigError:
        return listening(HOST, 0)


def has_window() -> bool:
    """Whether there is a browser that opens a window of its own: one of the terminal would take that from us."""
    try:
        return type(webbrowser.get()) is not webbrowser.GenericBrowser
    except webbrowser.Error:
        return False
