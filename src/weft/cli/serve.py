"""`weft serve`: put models behind the API that programs already speak."""

import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.console import options
from weft.cli.console.options import argument, flag, option
from weft.cli.console.terminal import loading
from weft.errors import ConfigError
from weft.progress import log_to_stderr

if TYPE_CHECKING:
    from weft.serve.config import Serving
    from weft.serve.library import Library

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANY_ADDRESS = ("0.0.0.0", "::", "")
MAX_KEYS_BYTES = 1 << 20
SWITCH_SECONDS = 0.001  # after which a model's thread gets its turn, beside many streams
MIN_KEY = 8  # characters


def serve(
    places: list[str] = argument("RUN", "Runs, or folders of runs.", autocompletion=options.complete_runs),
    host: str = option("127.0.0.1", "The address to listen at; the default is reached from this machine alone."),
    port: int = option(8000, "The port to listen at."),
    api_key_file: Path | None = option(None, "Answer only who sends a key of this file, one a line.", value="FILE"),
    without_key: bool = flag("--without-key", "Listen at an address that others reach, without a key."),
    allow_host: list[str] | None = option(None, "A name that this server has; may be repeated."),
    allow_origin: list[str] | None = option(None, "Let pages of this site read the answers; may be repeated."),
    quantize: str | None = option(None, "Use smaller weights: bf16, int8, int4 or auto.", value="BITS"),
    quantize_cache: str | None = option(None, "Keep keys and values in fewer bits: int8.", value="BITS"),
    rows: int = option(64, "How many texts a model writes at a time."),
    queue: int = option(256, "How many requests may wait for a model."),
    per_key: int | None = option(None, "How many texts of one key may wait or be written (default: as many as wait)."),
    timeout: float = option(600.0, "End a request after so many seconds."),
    max_tokens: int = option(65536, "How many tokens a text may have at most."),
    ssl_certfile: Path | None = option(None, "A certificate, for https.", value="FILE"),
    ssl_keyfile: Path | None = option(None, "Its private key.", value="FILE"),
    uds: Path | None = option(None, "Listen at this Unix socket instead.", value="PATH"),
    root_path: str = option("", "The path under which a proxy shows this server.", value="PATH"),
    log_prompts: bool = flag("--log-prompts", "Write prompts to the log, which otherwise has none of their words."),
) -> None:
    """Serve models over HTTP: OpenAI's and Anthropic's routes, and weft's own.

    Each model is loaded when it is first asked for, and unloaded when memory is short. /docs lists the routes.

    $ weft serve runs/mine

    $ curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"model": "mine", "prompt": "Once"}'
    """
    if api_key_file is None and host not in LOOPBACK and uds is None and not without_key:
        raise ConfigError(f"--host {host}: others can reach it; give --api-key-file, or say --without-key as well")
    if (ssl_certfile is None) != (ssl_keyfile is None):
        raise ConfigError("--ssl-certfile and --ssl-keyfile go together")
    keys = () if api_key_file is None else _keys(api_key_file)
    with loading():
        import logging

        from weft.config import validate
        from weft.serve.config import Limits, Serving
        from weft.serve.library import Library

    given = {"queue": queue, "per_client": per_key or queue, "rows": rows, "seconds": timeout, "max_tokens": max_tokens}
    limits = validate(Limits, given | {"quantize_cache": quantize_cache})
    hosts = ("*",) if uds is not None or (keys and host not in LOOPBACK) else (*LOOPBACK, *_names(host))
    serving = Serving(
        keys=keys,
        hosts=(*hosts, *(allow_host or ())),
        origins=tuple(allow_origin or ()),
        root_path=root_path.rstrip("/"),
        log_prompts=log_prompts,
        limits=limits,
    )
    library = Library(places, quantize, limits)
    listener = None if uds is not None else listening(host, port)
    scheme = "http" if ssl_certfile is None else "https"
    where = str(uds) if listener is None else f"{scheme}://{_shown(host)}:{listener.getsockname()[1]}"
    log_to_stderr(f"weft: serving {', '.join(library.shelves)} at {where}, routes at {where}/docs; Ctrl-C ends it")
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    files = {"uds": uds, "ssl_certfile": ssl_certfile, "ssl_keyfile": ssl_keyfile}
    answer(library, serving, listener, {name: str(path) for name, path in files.items() if path is not None})


def answer(
    library: "Library", serving: "Serving", listener: socket.socket | None, files: Mapping[str, str] | None = None
) -> None:
    """Answer requests until the process is ended."""
    import logging

    import uvicorn

    from weft.serve.app import make_app
    from weft.serve.listen import uvicorn_config

    config = uvicorn_config(make_app(library, serving), serving, **(files or {}))
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    sys.setswitchinterval(SWITCH_SECONDS)
    uvicorn.Server(config).run(None if listener is None else [listener])


def _keys(path: Path) -> tuple[str, ...]:
    from weft.storage import files

    try:
        lines = files.read_text(path, MAX_KEYS_BYTES).splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    short = next((number for number, key in enumerate(keys, start=1) if len(key) < MIN_KEY), None)
    if not keys or short:
        raise ConfigError(f"{path}: expected a key a line, each of at least {MIN_KEY} characters")
    return keys


def _names(host: str) -> list[str]:
    """What this machine is called from outside, where it listens at all of its addresses."""
    if host not in ANY_ADDRESS:
        return [host]
    name = socket.gethostname()
    try:
        return [name, *socket.gethostbyname_ex(name)[2]]
    except OSError:
        return [name]


def listening(host: str, port: int) -> socket.socket:
    """A socket that others can connect to already."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OverflowError:
        raise ConfigError(f"--port {port}: expected 0 … 65535, where 0 takes one that is free") from None
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror}; another port may be free") from None
    listener.set_inheritable(True)
    return listener


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else "127.0.0.1" if host in ANY_ADDRESS else host
