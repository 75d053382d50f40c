"""Commands that several processes carry out together, started by torchrun or as it does; the first speaks for all."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
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
SAVING_SECONDS = 600  # that an interrupted run has to save a large model, before torch ends its processes


def together(command: Callable[P, None]) -> Callable[P, None]:
    """A command that uses a run with `load_together`."""

    @wraps(command)
    def by_all(*args: P.args, **kwargs: P.kwargs) -> None:
        with loading():
            from weft.parallel.ranks import join
        ranks = join()
        with ranks.watching(), _quiet(ranks):
            command(*args, **kwargs)
            ranks.barrier()

    return by_all


def start_processes(count: int | None) -> None:
    """Carry out this command in `count` processes and end as they do; with one, or inside of one of them, go on."""
    import torch

    gpus, started = torch.cuda.device_count(), os.environ.get("WORLD_SIZE")
    if started is not None:
        if count is not None and str(count) != started:
            raise ConfigError(f"--processes {count}: torchrun has started {started} already; leave it out")
    elif count is None and gpus > 1:
        log_to_stderr(f"this machine has {gpus} GPUs, of which one is used; --processes {gpus} uses all of them")
    elif count is not None and 0 < gpus < count:
        raise ConfigError(f"--processes {count}: each needs a GPU of its own, and this machine has {gpus}")
    elif count is not None and count > 1:
        raise SystemExit(_launch(count))


def _launch(count: int) -> int:
    """The exit code of this command in `count` processes, which have said themselves what is wrong."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable()  # torch's pages of warnings would bury what they say
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // count)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SAVING_SECONDS))
    command = [sys.executable, "-P", "-m", "weft", *sys.argv[1:]]
    try:
        with TemporaryDirectory() as logs:
            torchrun.main(
                ["--standalone", f"--nproc-per-node={count}", "--log-dir", logs, "--no-python", "--", *command]
            )
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        ended = sorted(failed.failures.items(), key=lambda failure: failure[1].timestamp)
        if code := next((failure.exitcode for _, failure in ended if failure.exitcode > 0), None):
            return code
        rank, first = next((each for each in ended if each[1].exitcode != -SIGTERM), ended[0])
        raise RunError(f"process {rank} of {count} was ended by {Signals(-first.exitcode).name}") from None
    return 0


def refuse_together(ranks: "Ranks", options: Mapping[str, Any]) -> None:
    """Refuse options that a model can't serve while several processes divide it; those left out are None or False."""
    name, value = next(((name, value) for name, value in options.items() if value), ("", None))
    if name and not ranks.alone:
        given = name if value is True else f"{name} {value}"
        raise ConfigError(f"{given}: not for a model divided over {ranks.ranks} processes; leave it out, or start one")


def load_together(run: Path, **given: Any) -> "Run":
    """A run's model, of which each process has a part. One that fails by itself says so; the others learn that it is
    gone."""
    from weft.api.load import load
    from weft.parallel.ranks import is_lost_peer, join

    ranks = join()
    try:
        return load(run, ranks=ranks, **given)
    except WeftError as error:
        if ranks.leads:
            raise
        if error.__cause__ is None or not is_lost_peer(error.__cause__):
            print(f"weft: process {ranks.rank} of {ranks.ranks}: {error}", file=sys.__stderr__, flush=True)
        raise SystemExit(2) from None


@contextmanager
def _quiet(ranks: "Ranks") -> Iterator[None]:
    """Inside, all processes do the same: what a person has to read, the first one prints."""
    if ranks.leads:
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            yield
        except WeftError as error:
            with suppress(WeftError):
                ranks.barrier()  # the first one meets the same: it says so before torchrun ends it for this one's sake
            raise SystemExit(2) from error
        except KeyboardInterrupt as error:
            raise SystemExit(130) from error
