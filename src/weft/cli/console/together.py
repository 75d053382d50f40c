"""Commands that several processes carry out together, where torchrun has started them; the first one speaks for all."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from weft.cli.console.terminal import loading
from weft.errors import ConfigError, WeftError

if TYPE_CHECKING:
    from weft.api.run import Run
    from weft.parallel.ranks import Ranks

P = ParamSpec("P")


def together(command: Callable[P, None]) -> Callable[P, None]:
    """A command that uses a run with `load_together`."""

    @wraps(command)
    def by_all(*args: P.args, **kwargs: P.kwargs) -> None:
        with loading():
            from weft.parallel.ranks import join, reaching
        ranks = join()
        with reaching(), _quiet(ranks):
            command(*args, **kwargs)
            ranks.wait()

    return by_all


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
    from weft.parallel.ranks import join, lost

    ranks = join()
    try:
        return load(run, ranks=ranks, **given)
    except WeftError as error:
        if ranks.leads:
            raise
        if error.__cause__ is None or not lost(error.__cause__):
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
                ranks.wait()  # the first one meets the same: it says so before torchrun ends it for this one's sake
            raise SystemExit(2) from error
        except KeyboardInterrupt as error:
            raise SystemExit(130) from error
