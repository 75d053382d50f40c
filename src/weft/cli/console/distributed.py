"""Commands that run in several processes, started by torchrun or `--processes`; only rank 0 prints."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import wraps
from pathlib import Path
from signal import SIGTERM, Signals
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ParamSpec

from weft.cli.console.terminal import loading
from weft.errors import ConfigError, RunError, WeftError
from weft.progress import log_to_stderr
from weft.workers import cores

if TYPE_CHECKING:
    from weft.api.run import Run
    from weft.parallel.ranks import Ranks

P = ParamSpec("P")
SAVE_SECONDS = 600  # time that an interrupted run has to save a large model before torchrun kills its processes


def distributed_command(command: Callable[P, None]) -> Callable[P, None]:
    """Decorate a command that loads its run with `load_sharded`."""

    @wraps(command)
    def on_all_ranks(*args: P.args, **kwargs: P.kwargs) -> None:
        with loading():
            from weft.parallel.ranks import join
        ranks = join()
        with ranks.watching(), _print_on_rank_0(ranks):
            command(*args, **kwargs)
            ranks.barrier()

    return on_all_ranks


def start_processes(count: int | None, arguments: Sequence[str]) -> None:
    """Run the command `weft ARGUMENTS` in `count` processes and exit; return in one of them, or if one is enough."""
    import torch

    gpus, world_size = torch.cuda.device_count(), os.environ.get("WORLD_SIZE")
    if world_size is not None:
        if count is not None and str(count) != world_size:
            raise ConfigError(f"--processes {count}: torchrun has already started {world_size}; leave it out")
    elif count is None and gpus > 1:
        log_to_stderr(f"this machine has {gpus} GPUs, but one is used; --processes {gpus} uses all of them")
    elif count is not None and 0 < gpus < count:
        raise ConfigError(f"--processes {count}: each process needs a GPU, but this machine has {gpus}")
    elif count is not None and count > 1:
        raise SystemExit(_launch(count, arguments))


def _launch(count: int, arguments: Sequence[str]) -> int:
    """Run a command in `count` processes, which report their own mistakes; return its exit code."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable()  # torch's pages of warnings would bury the messages of the processes
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // count)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVE_SECONDS))
    command = [sys.executable, "-P", "-m", "weft", *arguments]
    try:
        with TemporaryDirectory() as logs:
            options = ["--standalone", f"--nproc-per-node={count}", "--log-dir", logs, "--no-python"]
            torchrun.main([*options, "--", *command])
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda failure: failure[1].timestamp)
        if code := next((failure.exitcode for _, failure in failures if failure.exitcode > 0), None):
            return code
        # the others got SIGTERM from torchrun because of the first
        rank, first = next((each for each in failures if each[1].exitcode != -SIGTERM), failures[0])
        raise RunError(f"process {rank} of {count} was ended by {Signals(-first.exitcode).name}") from None
    return 0


def refuse_sharded(ranks: "Ranks", options: Mapping[str, Any]) -> None:
    """Refuse options that do not work with a model sharded over several processes; options left out are falsy."""
    name, value = next(((name, value) for name, value in options.items() if value), ("", None))
    if name and not ranks.alone:
        shown = name if value is True else f"{name} {value}"
        message = f"not available for a model sharded over {ranks.ranks} processes; leave it out, or start one process"
        raise ConfigError(f"{shown}: {message}")


def load_sharded(run: Path, *, special_tokens: bool = False, **options: Any) -> "Run":
    """Load a run's model, of which each rank holds a shard; a rank that fails alone reports it."""
    from weft.api.load import load
    from weft.parallel.ranks import is_lost_peer, join

    ranks = join()
    try:
        loaded = load(run, ranks=ranks, **options)
        return loaded.reading_specials() if special_tokens else loaded
    except WeftError as error:
        if ranks.leads:
            raise
        if error.__cause__ is None or not is_lost_peer(error.__cause__):
            print(f"weft: process {ranks.rank} of {ranks.ranks}: {error}", file=sys.__stderr__, flush=True)
        raise SystemExit(2) from None


@contextmanager
def _print_on_rank_0(ranks: "Ranks") -> Iterator[None]:
    """Silence all ranks but 0, which do the same work."""
    if ranks.leads:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as null, redirect_stdout(null), redirect_stderr(null):
        try:
            yield
        except WeftError as error:
            with suppress(WeftError):
                ranks.barrier()  # rank 0 fails in the same way: let it report before torchrun ends all processes
            raise SystemExit(2) from error
        except KeyboardInterrupt as error:
            raise SystemExit(130) from error
