"""`weft serve`: serve models over HTTP, with APIs that existing clients speak."""

import socket
from pathlib import Path

from weft.cli.console import options
from weft.cli.console.options import argument, flag, option
from weft.cli.console.terminal import loading
from weft.errors import ConfigError, os_errors
from weft.progress import log_to_stderr

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ANY_ADDRESS = ("0.0.0.0", "::", "")
MAX_KEY_FILE_BYTES = 1 << 20
MIN_KEY_CHARACTERS = 8


def serve(
    paths: list[str] = argument("RUN", "Runs, or folders of runs.", autocompletion=options.complete_runs),
    host: str = option("127.0.0.1", "The address to listen on; the default is reachable from this machine only."),
    port: int = option(8000, "The port to listen on."),
    api_key_file: Path | None = option(None, "Require one of the keys in this file, one per line.", value="FILE"),
    without_key: bool = flag("--without-key", "Listen on an address that others can reach without requiring a key."),
    allow_host: list[str] | None = option(None, "Another host name of this server; may be repeated."),
    allow_origin: list[str] | None = option(None, "Let web pages of this site read responses; may be repeated."),
    quantize: str | None = option(None, "Quantise the weights: bf16, int8, int4 or auto.", value="BITS"),
    quantize_cache: str | None = option(None, "Quantise the KV cache: int8.", value="BITS"),
    rows: int = option(64, "Texts that a model generates at the same time."),
    queue: int = option(256, "Requests that may wait for a model."),
    per_key: int | None = option(None, "Texts of one key that may wait or be in progress (default: --queue)."),
    timeout: float = option(600.0, "End a request after this many seconds."),
    max_tokens: int = option(65536, "The most tokens that a request may ask for."),
    max_input_tokens: int = option(131072, "The most tokens of the texts that a request may send."),
    ssl_certfile: Path | None = option(None, "A certificate, for https.", value="FILE"),
    ssl_keyfile: Path | None = option(None, "The certificate's private key.", value="FILE"),
    uds: Path | None = option(None, "Listen on this Unix socket instead.", value="PATH"),
    root_path: str = option("", "The path prefix under which a proxy shows this server.", value="PATH"),
    log_prompts: bool = flag("--log-prompts", "Write prompts to the log, which otherwise contains none."),
) -> None:
    """Serve models over HTTP: the APIs of OpenAI and Anthropic, and weft's own routes.

    Each model is loaded on its first request, and unloaded when memory runs short. /docs lists the routes.

    $ weft serve runs/mine

    $ curl localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{"model": "mine", "prompt": "Once"}'
    """
    if api_key_file is None and host not in LOOPBACK and uds is None and not without_key:
        raise ConfigError(f"--host {host}: others can reach it; give --api-key-file, or --without-key as well")
    if (ssl_certfile is None) != (ssl_keyfile is None):
        raise ConfigError("--ssl-certfile and --ssl-keyfile: give both, or neither")
    keys = () if api_key_file is None else _read_keys(api_key_file)
    with loading():
        import logging

        from weft.config import validate
        from weft.serve.config import Limits, Serving
        from weft.serve.library import Library
        from weft.serve.listen import freeze_loaded, run_server

    settings: dict[str, float] = {"queue": queue, "per_client": per_key or queue, "rows": rows, "seconds": timeout}
    settings |= {"max_tokens": max_tokens, "max_input_tokens": max_input_tokens}
    limits = validate(Limits, {**settings, "quantize_cache": quantize_cache})
    hosts = ("*",) if uds is not None or (keys and host not in LOOPBACK) else (*LOOPBACK, *_host_names(host))
    serving = Serving(
        keys=keys,
        hosts=(*hosts, *(allow_host or ())),
        origins=tuple(allow_origin or ()),
        root_path=root_path.rstrip("/"),
        log_prompts=log_prompts,
        limits=limits,
    )
    library = Library(paths, quantize, limits, on_change=freeze_loaded)
    listener = None if uds is not None else listen(host, port)
    scheme = "http" if ssl_certfile is None else "https"
    url_host = f"[{host}]" if ":" in host else "127.0.0.1" if host in ANY_ADDRESS else host
    url = str(uds) if listener is None else f"{scheme}://{url_host}:{listener.getsockname()[1]}"
    log_to_stderr(f"weft: serving {', '.join(library.models)} at {url}, routes at {url}/docs; Ctrl-C stops the server")
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    files = {"uds": uds, "ssl_certfile": ssl_certfile, "ssl_keyfile": ssl_keyfile}
    run_server(library, serving, listener, **{name: str(path) for name, path in files.items() if path is not None})


def _read_keys(path: Path) -> tuple[str, ...]:
    from weft.storage import files

    with os_errors(path, ConfigError):
        lines = files.read_text(path, MAX_KEY_FILE_BYTES).splitlines()
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys or any(len(key) < MIN_KEY_CHARACTERS for key in keys):
        raise ConfigError(f"{path}: expected one key per line, each of at least {MIN_KEY_CHARACTERS} characters")
    return keys


def _host_names(host: str) -> list[str]:
    """Return the names under which others reach a server that listens on `host`."""
    if host not in ANY_ADDRESS:
        return [host]
    name = socket.gethostname()
    try:
        return [name, *socket.gethostbyname_ex(name)[2]]
    except OSError:
        return [name]


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OverflowError:
        raise ConfigError(f"--port {port}: expected 0 … 65535; 0 takes any free port") from None
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror}; try another port") from None
    listener.set_inheritable(True)
    return listener
