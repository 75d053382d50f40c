"""Whether the other processes of a run are still there: each tells the others every few seconds how far it is.

A process that has ended closes its connections, and whoever waits for it learns so at once. One that is stopped, or
whose machine is gone, closes nothing. So a thread of each process counts in the store that they met through, beside
how often its main thread has taken part in something common, and looks at the others' counts:

- a count that stands still for `patience` belongs to a process that doesn't run;
- one that goes on while its main thread keeps the others waiting for as long belongs to one that hangs. The first
  process is left out of this: the others wait for it while it prepares, evaluates and saves, however long that takes.
"""

import math
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import ConfigError

PATIENCE = 600.0  # seconds without news after which a process is given up
VARIABLE = "WEFT_PATIENCE"  # names another time
DONE, STOPPED = "done", "stopped"  # told instead of a count: a process has ended; it stops because another has


def patience() -> float:
    """How long a silent process is waited for, in seconds."""
    given = os.environ.get(VARIABLE) or str(PATIENCE)
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(
            f"{VARIABLE} = {given!r}: expected how many seconds to wait for a silent process, such as 600"
        )
    return seconds


@dataclass
class Heartbeat:
    """This process's count among those of `ranks` processes; `store` is theirs, over a connection of its own."""

    store: Any
    rank: int
    ranks: int
    patience: float = field(default_factory=patience)
    common: int = 0  # what the main thread has begun together with the others
    answered: float = 0.0  # when the store last answered
    left: bool = False

    def start(self) -> None:
        """Count and watch until the process ends."""
        self.answered = time.monotonic()
        self.store.set(f"who/{self.rank}", f"{os.getpid()} {socket.gethostname()}")
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()
        threading.Thread(target=self._watch_store, name="heartbeat store", daemon=True).start()

    def leave(self, why: str = DONE) -> None:
        """Tell the others that this process has nothing left to do, or stops for another's sake, and isn't missing."""
        self.left = True
        with suppress(Exception):  # the store may be gone already
            self.store.set(f"beat/{self.rank}", why)

    def missing(self) -> list[int]:
        """The processes that have ended, or don't run any more, found within a few beats; none where nobody knows."""
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        began, first = time.monotonic(), dict[int, str]()
        with suppress(Exception):
            first = {rank: self._told(rank) for rank in others}
            while time.monotonic() - began < 2.5 * self._every:
                gone = [rank for rank in others if self._ended(rank)]
                if gone:
                    return gone
                time.sleep(0.05)
            return [rank for rank in others if self._told(rank) == first[rank] != STOPPED]
        return []

    def name(self, rank: int) -> str:
        """A process, as a person finds it: its rank, its number and its machine."""
        with suppress(Exception):
            number, _, host = self.store.get(f"who/{rank}").decode().partition(" ")
            return f"process {rank} of {self.ranks} (pid {number} on {host})"
        return f"process {rank} of {self.ranks}"

    def _told(self, rank: int) -> str:
        return str(self.store.get(f"beat/{rank}").decode()) if self.store.check([f"beat/{rank}"]) else ""

    def _ended(self, rank: int) -> bool:
        """Whether a process has said that it has ended, or was of this machine and is no more."""
        told = self._told(rank)
        if told in (DONE, STOPPED):
            return told == DONE
        number, _, host = self.store.get(f"who/{rank}").decode().partition(" ")
        if host != socket.gethostname():
            return False
        state = Path(f"/proc/{number}/stat")
        if Path("/proc/self/stat").exists():
            return not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"
        try:
            os.kill(int(number), 0)
        except ProcessLookupError:
            return True
        return False

    def _watch(self) -> None:
        seen: dict[int, tuple[tuple[int, int], float, float]] = {}
        beats = 0
        while not self.left:
            beats += 1
            with suppress(Exception):  # `_watch_store` notices
                self.store.set(f"beat/{self.rank}", f"{beats} {self.common}")
                found = self._others()
                self.answered = time.monotonic()
                for rank, news in found.items():
                    self._judge(rank, news, seen)
            time.sleep(self._every)

    def _watch_store(self) -> None:
        """A store that doesn't answer stands still with the first process, or with what started it."""
        while not self.left:
            time.sleep(self._every)
            if time.monotonic() - self.answered > self.patience and not self.left:
                self._end(0, "has not answered")

    @property
    def _every(self) -> float:
        return min(5.0, self.patience / 8)

    def _others(self) -> dict[int, tuple[int, int]]:
        """Beats and common work of each other process that counts."""
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        told = {rank: self._told(rank) for rank in others}
        counts = {rank: text.split() for rank, text in told.items() if text not in ("", DONE, STOPPED)}
        return {rank: (int(beats), int(common)) for rank, (beats, common) in counts.items()}

    def _judge(self, rank: int, news: tuple[int, int], seen: dict[int, tuple[tuple[int, int], float, float]]) -> None:
        """Give a process up whose counts have stood still too long; `seen` holds them, and when each last changed."""
        now = time.monotonic()
        before, beaten, moved = seen.get(rank, ((-1, -1), now, now))
        beaten = now if news[0] != before[0] else beaten
        # one that is as far as this one keeps nobody waiting
        moved = now if news[1] != before[1] or news[1] >= self.common else moved
        seen[rank] = news, beaten, moved
        if now - beaten > self.patience:
            self._end(rank, "has not answered")
        if rank and now - moved > self.patience:
            self._end(rank, "has kept the others waiting")

    def _end(self, rank: int, what: str) -> None:
        """End this process: its main thread waits in a library and can't be told. One of them says why."""
        if self.rank == (1 if rank == 0 else 0):
            minutes = f"{self.patience / 60:g} minutes" if self.patience >= 60 else f"{self.patience:g} seconds"
            lead = ", which leads," if rank == 0 else ""
            line = f"error: process {rank} of {self.ranks}{lead} {what} for {minutes}; stopping (resume continues from "
            sys.stderr.write(f"{line}the last checkpoint; {VARIABLE} sets another time, in seconds)\n")
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(2)
