"""Checkpoints beside the training: the loop waits for a copy in memory, a thread writes it to the disk.

At most one write is in flight. One that fails, on a full disk for instance, is reported and the training goes on: the
checkpoints that exist are untouched, and the next write may succeed. Only the last one must.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from weft.errors import LostError, RunError
from weft.runs import checkpoint
from weft.runs.folder import RunFolder
from weft.training.learner import Copy

Write = Callable[[Path, Copy, int, bool], Path]  # folder, copy, how many to keep, whether the run was interrupted


class Saver:
    """Writes a run's checkpoints by `write`. `before` is called first each time: it brings the metrics to the disk."""

    def __init__(self, run: RunFolder, write: Write, keep: int, before: Callable[[], None]):
        self._run, self._write_copy, self._keep, self._before = run, write, keep, before
        self._thread: threading.Thread | None = None
        self._failure: RunError | None = None
        self._fatal: BaseException | None = None  # raised where the loop waits
        self._unreported = False
        self.lost_best = False  # the best weights so far never reached the disk

    def save(self, step: int, take: Callable[[], Copy], best: bool = False, interrupted: bool = False) -> None:
        """Take a snapshot and start to write it, after the write before it has ended."""
        self.wait()
        try:
            self._before()
        except OSError as error:
            self._fail(step, f"{self._run.metrics}: cannot be written: {error.strerror or error}", best)
            return
        self._thread = threading.Thread(target=self._write, args=(take(), best, interrupted), daemon=True)
        self._thread.start()

    def _write(self, copy: Copy, best: bool, interrupted: bool) -> None:
        try:
            path = self._write_copy(self._run.checkpoints, copy, self._keep, interrupted)
        except LostError as error:  # nothing that the next write could make good
            self._fatal = error
        except RunError as error:
            self._fail(copy.step, str(error), best)
        except BaseException as error:  # a bug, or the end of this process
            self._fatal = error
        else:
            self._failure = None
            self.lost_best = self.lost_best and not best
            self._run.event("checkpoint", step=copy.step, path=path.name, best=best)

    def _fail(self, step: int, reason: str, best: bool) -> None:
        self._failure, self._unreported = RunError(reason), True
        self.lost_best = self.lost_best or best
        self._run.event("checkpoint failed", step=step, reason=reason)

    def wait(self) -> None:
        """Until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._fatal is not None:
            raise self._fatal

    def news(self) -> str | None:
        """A message about a write that has failed since the last call, without waiting for one in flight."""
        if self._unreported:
            self._unreported = False
            return f"{self._failure}; training continues, and the next checkpoint may succeed"
        return None

    def finish(self) -> None:
        """Wait, and raise if the newest state is not on the disk."""
        self.wait()
        if self._failure is not None:
            standing = checkpoint.standing(self._run.checkpoints)
            left = f"the newest whole checkpoint is {standing[-1].name}" if standing else "no checkpoint was written"
            raise RunError(f"{self._failure}; {left}; `weft train --resume {self._run.path}` continues from there")
