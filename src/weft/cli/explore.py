"""`weft explore`: look at runs, and inside their models, in a browser."""

import threading
import webbrowser
from pathlib import Path
from urllib.parse import urlencode

from weft.cli.console import options
from weft.cli.console.options import argument, flag, option
from weft.cli.console.terminal import loading
from weft.cli.serve import listen
from weft.errors import ConfigError
from weft.progress import log_to_stderr

RUNS = Path("runs")
COMPARISONS = Path("comparisons")  # written by weft compare and weft scale
HOST, DEFAULT_PORT = "127.0.0.1", 8000


def explore(
    folder: Path = argument("DIR", "A folder of runs, or a run.", RUNS, autocompletion=options.complete_runs),
    port: int | None = option(None, f"The port to listen on (default: {DEFAULT_PORT}, or any free port)."),
    story: str | None = option(None, "Play a story: its name, or a TOML file of your own.", value="STORY"),
    no_browser: bool = flag("--no-browser", "Do not open a browser; the address is printed in any case."),
) -> None:
    """Look at runs, and inside their models, in a browser: live curves, and each model's own values.

    New runs appear automatically. The page can be reached from this machine only. Stories, one per lecture:
    sequences, transformer, decoding, bert and attention.

    $ weft explore runs --story attention
    """
    if folder != RUNS and not folder.is_dir():
        a_file = "a file; give a run's folder, or a folder of runs"
        raise ConfigError(f"{folder}: {a_file if folder.exists() else f'no such folder; `weft train` creates {RUNS}/'}")
    from weft.serve.stories import named_story

    told = dict([named_story(story)]) if story else {}
    try:
        listener = listen(HOST, DEFAULT_PORT if port is None else port)
    except ConfigError:
        if port is not None:
            raise
        listener = listen(HOST, 0)
    with loading():
        from weft.serve.config import Serving
        from weft.serve.library import Library
        from weft.serve.listen import freeze_loaded, run_server

    if not folder.is_dir():
        log_to_stderr(f"weft: {folder}: no such folder yet; `weft train` and `weft quickstart` create it")
    serving = Serving(stories=told)
    comparisons = [str(COMPARISONS)] if folder == RUNS and COMPARISONS.is_dir() else []
    library = Library(
        [str(folder), *comparisons],
        None,
        serving.limits,
        may_be_empty=True,
        show_errors=True,
        on_change=freeze_loaded,
    )
    url = f"http://{HOST}:{listener.getsockname()[1]}/" + "".join(f"#/?{urlencode({'story': name})}" for name in told)
    log_to_stderr(f"weft: {folder} is at {url} (this machine only); Ctrl-C stops the server")
    if not no_browser and opens_window():
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()
    run_server(library, serving, listener)


def opens_window() -> bool:
    """Return whether the default browser opens a window; one that runs in the terminal would take it over."""
    try:
        return type(webbrowser.get()) is not webbrowser.GenericBrowser
    except webbrowser.Error:
        return False
