"""Whether the other processes of a run are still there: each tells the others every few seconds how far it is.

A process that has ended closes its connections, and whoever waits for it learns so at once. One that is stopped, or
whose machine is gone, closes nothing. So a thread of each process counts in the store that they met through, beside
how often its main thread has taken part in something common, and looks at what the others tell:

- one of this machine may have ended while this process's main thread waits for something else than a connection;
- a count that stands still for `patience` belongs to a process that doesn't run;
- one that goes on while its main thread keeps the others waiting for as long belongs to one that hangs. The first
  process is left out of this: the others wait for it while it prepares, evaluates and saves, however long that takes;
- inside a step nobody works alone: where all are in one, and none has gone on for as long, one of them hangs.
"""

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import ConfigError

PATIENCE = 600.0  # seconds without news after which a process is given up
VARIABLE = "WEFT_PATIENCE"  # names another time
# told instead of a count: a process has ended; it ends by an error, which it says; it stops because another has ended
DONE, FAILED, STOPPED = "done", "failed", "stopped"
ENDS = (DONE, FAILED, STOPPED)


def patience() -> float:
    """How long a silent process is waited for, in seconds."""
    given = os.environ.get(VARIABLE) or str(PATIENCE)
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        expected = "how many seconds to wait for a silent process, such as 600"
        raise ConfigError(f"{VARIABLE} = {given!r}: expected {expected}")
    return seconds


@dataclass
class Seen:
    """What a process told last; since when it has told the same, has not gone on, is behind and has ended."""

    told: str
    common: int
    progress: str
    beaten: float
    moved: float
    behind: float
    ended: float | None = None


@dataclass
class Heartbeat:
    """This process's count among those of `ranks` processes; `store` is theirs, over a connection of its own."""

    store: Any
    rank: int
    ranks: int
    patience: float
    common: int = 0  # what this process has begun together with the others: all count the same
    progress: int = 0  # what it has begun by itself
    inside: int = 0  # in how many things at once the others are waited for
    step: str = ""  # the step that the main thread is in
    answered: float = 0.0  # when the store last answered
    silent: bool = False  # whether it did not, the last time
    left: bool = False
    explained: bool = False  # whether another process has said why all stop
    known: list[list[str]] = field(default_factory=list)  # of each process: its number, machine and host
    lock: threading.Lock = field(default_factory=threading.Lock)
    telling: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Count and watch until the process ends; all processes call this."""
        self.answered = time.monotonic()
        self.store.set(f"who/{self.rank}", f"{os.getpid()} {_machine()} {socket.gethostname()}")
        self.store.set(f"beat/{self.rank}", "")
        self.known = [text.split(" ", 2) for text in self._read("who")]
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()
        threading.Thread(target=self._watch_store, name="heartbeat store", daemon=True).start()

    def leave(self, why: str = DONE) -> None:
        """Tell the others that this process isn't missing: it has nothing left to do, fails, or stops with another."""
        self.left = True
        if not self.silent:  # a store that stands still just now would never answer
            telling = threading.Thread(target=self._tell, args=(why,), daemon=True)
            telling.start()
            telling.join(2.0)

    def _tell(self, text: str) -> None:
        with self.telling, suppress(Exception):  # the store may be gone already; `_watch_store` notices
            if not self.left or text in ENDS:  # nothing else is told after that
                self.store.set(f"beat/{self.rank}", text)

    def end_last(self) -> None:
        """Where the first process holds the store, the others still look there who it is that all stop for."""
        until = time.monotonic() + 3 * self._every
        while self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            told = self._told()
            here = [rank for rank, text in enumerate(told) if rank and text not in ENDS]
            if time.monotonic() > until or all(self._near(rank) and self._dead(rank) for rank in here):
                return
            time.sleep(0.05)

    def count(self, common: int = 0, progress: int = 0, inside: int = 0) -> None:
        with self.lock:  # more than one thread may
            self.common += common
            self.progress += progress
            self.inside += inside

    def missing(self) -> list[int]:
        """The processes that have ended, or don't run any more, found within a few beats; none where nobody knows."""
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        began, first = time.monotonic(), self._told()
        while time.monotonic() - began < 2.5 * self._every:
            told = self._told()
            if self.silent:  # it stood with the first process, or with what had started that
                return [0] if self.rank and (not self._near(0) or self._dead(0)) else []
            gone = [rank for rank in others if self._ended(rank, told[rank])]
            if gone or FAILED in told:
                return gone
            time.sleep(0.05)
        told = self._told()
        return [] if self.silent or not first else [r for r in others if told[r] == first[r] not in ENDS]

    def speaks(self, gone: Iterable[int]) -> bool:
        """Whether this process says why all stop: the first one left or, where they can't reach each other, the first
        one left of each machine."""
        left = [rank for rank in range(self.ranks) if rank not in gone and (not self.silent or self._near(rank))]
        return self.rank == min(left, default=self.rank)

    def name(self, rank: int) -> str:
        """A process, as a person finds it: its rank, its number and its machine."""
        number, _, host = self.known[rank]
        return f"process {rank} of {self.ranks} (pid {number} on {host})"

    def _ended(self, rank: int, told: str) -> bool:
        return told == DONE if told in ENDS else self._near(rank) and self._dead(rank)

    def _near(self, rank: int) -> bool:
        return self.known[rank][1:] == self.known[self.rank][1:]

    def _dead(self, rank: int) -> bool:
        number = self.known[rank][0]
        with suppress(OSError):
            if Path("/proc/self/stat").exists():
                return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            os.kill(int(number), 0)
            return False
        return True

    def _read(self, what: str) -> list[str]:
        return [text.decode() for text in self.store.multi_get([f"{what}/{rank}" for rank in range(self.ranks)])]

    def _told(self) -> list[str]:
        """What each process told last; nothing where the store is gone."""
        try:
            told = self._read("beat")
        except Exception:  # whatever torch makes of it
            self.silent = True
            return []
        self.silent, self.answered = False, time.monotonic()
        self.explained = self.explained or FAILED in told  # also when the store is gone with the one that said it
        return told

    def _watch(self) -> None:
        seen, beats = dict[int, Seen](), 0
        while not self.left:
            beats += 1
            self._tell(f"{beats} {self.common} {self.progress} {int(bool(self.step))} {_place()}")
            told = self._told()
            for rank, text in enumerate(told):
                self._judge(rank, text, seen)
            if told and not self.left:
                self._judge_step(told, seen)
            time.sleep(self._every)

    def _watch_store(self) -> None:
        """A store that doesn't answer stands still with the first process, or with what started it."""
        while not self.left:
            time.sleep(self._every)
            if time.monotonic() - self.answered > self.patience:
                self.silent = True
                self._end([0] if self.rank else [], f"not answered for {self._time}")

    @property
    def _every(self) -> float:
        return min(5.0, self.patience / 8)

    @property
    def _time(self) -> str:
        return f"{self.patience / 60:g} minutes" if self.patience >= 60 else f"{self.patience:g} seconds"

    def _judge(self, rank: int, told: str, seen: dict[int, Seen]) -> None:
        """Give a process up that has ended, or whose counts have stood still too long."""
        now = time.monotonic()
        one = seen.setdefault(rank, Seen(told, -1, "", now, now, now))
        if told and told not in ENDS:
            _, common, progress, _ = told.split(" ", 3)
            # one that is as far as this one keeps nobody waiting
            one.behind = now if int(common) != one.common or int(common) >= self.common else one.behind
            one.moved = now if (int(common), progress) != (one.common, one.progress) else one.moved
            one.common, one.progress = int(common), progress
        one.beaten = now if told != one.told else one.beaten
        one.told = told
        if rank == self.rank:
            return
        ended = told in (FAILED, STOPPED) or self._ended(rank, told)
        one.ended = (one.ended or now) if self.inside and ended else None
        # the main thread learns it too, if it waits for a connection; one that is done may just be faster at its end
        if one.ended is not None and now - one.ended > (self.patience if told == DONE else 2 * self._every):
            self._end([rank], "" if told in (FAILED, STOPPED) else "ended")
        if told in ENDS:
            return
        if now - one.beaten > self.patience:
            self._end([rank], f"not answered for {self._time}")
        if rank and told and now - one.behind > self.patience and now - one.beaten < 2 * self._every:
            self._end([rank], f"kept the others waiting for {self._time}")

    def _judge_step(self, told: list[str], seen: dict[int, Seen]) -> None:
        """Give up a step in which this process waits for one that does not come, or in which none goes on."""
        now, places = time.monotonic(), dict[str, list[int]]()
        if not self.step or now - seen[self.rank].moved <= self.patience:
            return
        for rank, text in enumerate(told):
            words = text.split(" ", 4)
            if len(words) < 5 or now - seen[rank].moved <= self.patience:
                return
            if words[3] == "0":  # it is somewhere else, where only the first process may be
                if rank:
                    self._end([rank], f"kept the others waiting for {self._time}")
                return
            places.setdefault(words[4], []).append(rank)
        where = []
        for place, found in sorted(places.items(), key=lambda item: len(item[1]))[:3]:  # not where the others are
            more = f" and {len(found) - 4} more" if len(found) > 4 else ""
            shown = ", ".join(map(str, found[:4])) + more
            where.append(f"{'process' if len(found) == 1 else 'processes'} {shown} in {place}")
        self._say([], f"none of {self.ranks} processes has gone on for {self._time} {self.step} ({', '.join(where)})")

    def _end(self, gone: list[int], what: str) -> None:
        """Give a process up; where it has said why, or stops for another's sake, that needs no words."""
        lead = ", which leads," if gone == [0] else ""
        who = f"{self.name(gone[0])}{lead}" if gone else "what the processes met through"
        self._say(gone, f"{who} has {what}" if what else "")

    def _say(self, gone: list[int], line: str) -> None:
        """End this process: its main thread waits in a library and can't be told. One of them says why."""
        if self.left:
            return
        if line and not self.explained and self.speaks(gone):
            sys.stderr.write(
                f"weft: {line}; stopping: a resumed training run continues from its last checkpoint"
                f"{f' ({VARIABLE} sets another time, in seconds)' if self._time in line else ''}\n"
            )
        elif line:
            time.sleep(2 * self._every)  # the one that does may find it a beat later: by itself, not by our end
        sys.stderr.flush()
        sys.stdout.flush()
        self.leave(STOPPED)
        self.end_last()
        os._exit(2)


def _machine() -> str:
    """What only processes share that see each other's numbers: hosts may have the same name, or several of them."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{booted}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return "-"


def _place() -> str:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "?"
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"
