"""Heartbeats: each process of a run reports its progress every few seconds, and watches the reports of the others.

A process that exits closes its connections, so whoever waits for it notices immediately. A process that is stopped, or
whose machine is gone, closes nothing. So a thread in every process writes a heartbeat to the store that they
rendezvoused through, with the number of collectives its main thread has entered, and checks the others' heartbeats:

- a process on this machine may have exited while this process's main thread is not waiting on a connection to it;
- a heartbeat that does not change for `patience` seconds belongs to a process that does not run;
- a process whose heartbeat continues while its main thread keeps the others waiting that long hangs. Rank 0 is exempt:
  the others wait for it while it prepares data, evaluates and saves, for any length of time;
- inside a step no process works alone: if all are in one and none has made progress that long, one of them hangs.
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

PATIENCE = 600.0  # seconds without a heartbeat, or without progress, after which a process is given up
VARIABLE = "WEFT_PATIENCE"  # environment variable that overrides PATIENCE
# reported instead of a heartbeat: the process has finished, failed with an error that it prints, or stopped because
# another process is gone
DONE, FAILED, STOPPED = "done", "failed", "stopped"
ENDS = (DONE, FAILED, STOPPED)


def patience() -> float:
    """Return how many seconds to wait for a silent process."""
    value = os.environ.get(VARIABLE) or str(PATIENCE)
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        expected = "how many seconds to wait for a silent process, such as 600"
        raise ConfigError(f"{VARIABLE} = {value!r}: expected {expected}")
    return seconds


@dataclass
class PeerStatus:
    """The last report of a process, and since when (monotonic seconds) its state has lasted."""

    report: str
    collectives: int
    progress: str
    reported: float  # the report last changed
    moved: float  # it last made progress
    behind: float  # it has been behind this process since
    ended: float | None = None  # it was found to have ended


@dataclass
class Heartbeat:
    """The heartbeat of process `rank` of `ranks`, over a dedicated connection to their common `store`."""

    store: Any
    rank: int
    ranks: int
    patience: float
    collectives: int = 0  # collectives that this process has entered: the same number on every rank at the same point
    progress: int = 0  # watched contexts that this process has entered, whether or not the others enter them too
    watched: int = 0  # watched contexts that it is in now, in all threads: it may be waiting for the others
    step: str = ""  # the step that the main thread is in
    answered: float = 0.0  # when the store last answered
    store_silent: bool = False  # the last request to the store failed
    left: bool = False  # this process has reported its end
    explained: bool = False  # another process has printed why all stop
    peers: list[list[str]] = field(default_factory=list)  # pid, machine and host of each process
    lock: threading.Lock = field(default_factory=threading.Lock)
    report_lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Report and watch until the process ends. All processes call this."""
        self.answered = time.monotonic()
        self.store.set(f"who/{self.rank}", f"{os.getpid()} {_machine()} {socket.gethostname()}")
        self.store.set(f"beat/{self.rank}", "")
        self.peers = [text.split(" ", 2) for text in self._read("who")]
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()
        threading.Thread(target=self._watch_store, name="heartbeat store", daemon=True).start()

    def leave(self, why: str = DONE) -> None:
        """Report that this process is not missing: it has finished, fails, or stops because another one is gone."""
        self.left = True
        if not self.store_silent:  # a store that hangs would never answer
            reporting = threading.Thread(target=self._report, args=(why,), daemon=True)
            reporting.start()
            reporting.join(2.0)

    def _report(self, text: str) -> None:
        with self.report_lock, suppress(Exception):  # the store may be gone; `_watch_store` notices
            if not self.left or text in ENDS:  # no heartbeat may replace the final report
                self.store.set(f"beat/{self.rank}", text)

    def keep_store(self) -> None:
        """Wait, on the rank that holds the store, until the others have read there why all stop."""
        until = time.monotonic() + 3 * self._interval
        while self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            running = [rank for rank, text in enumerate(self._reports()) if rank and text not in ENDS]
            if time.monotonic() > until or all(self._is_dead(rank) for rank in running):
                return
            time.sleep(0.05)

    def count(self, collectives: int = 0, progress: int = 0, watched: int = 0) -> None:
        """Add to the counts; any thread may call this."""
        with self.lock:
            self.collectives += collectives
            self.progress += progress
            self.watched += watched

    def missing(self) -> list[int]:
        """Return the ranks that have ended or do not run, within a few heartbeats; empty if that can't be known."""
        others = [rank for rank in range(self.ranks) if rank != self.rank]
        began, first = time.monotonic(), self._reports()
        while time.monotonic() - began < 2.5 * self._interval:
            reports = self._reports()
            if self.store_silent:  # the store was rank 0's, or that of what started it
                return [0] if self.rank and (not self._is_local(0) or self._is_dead(0)) else []
            gone = [rank for rank in others if self._has_ended(rank, reports[rank])]
            if gone or FAILED in reports:
                return gone
            time.sleep(0.05)
        reports = self._reports()
        return [] if self.store_silent or not first else [r for r in others if reports[r] == first[r] not in ENDS]

    def speaks(self, gone: Iterable[int]) -> bool:
        """Return whether this process prints why all stop: the lowest rank left (on this machine without a store)."""
        reachable = (rank for rank in range(self.ranks) if not self.store_silent or self._is_local(rank))
        return self.rank == min((rank for rank in reachable if rank not in gone), default=self.rank)

    def name(self, rank: int) -> str:
        """Return a process's name in messages: its rank, pid and host."""
        pid, _, host = self.peers[rank]
        return f"process {rank} of {self.ranks} (pid {pid} on {host})"

    def _has_ended(self, rank: int, report: str) -> bool:
        return report == DONE if report in ENDS else self._is_dead(rank)

    def _is_local(self, rank: int) -> bool:
        return self.peers[rank][1:] == self.peers[self.rank][1:]

    def _is_dead(self, rank: int) -> bool:
        """Return whether a process of this machine does not exist any more; of other machines that is not known."""
        if not self._is_local(rank):
            return False
        pid = self.peers[rank][0]
        with suppress(OSError):
            if Path("/proc/self/stat").exists():
                return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
            os.kill(int(pid), 0)
            return False
        return True

    def _read(self, key: str) -> list[str]:
        return [text.decode() for text in self.store.multi_get([f"{key}/{rank}" for rank in range(self.ranks)])]

    def _reports(self) -> list[str]:
        """Return the last report of each process; empty if the store is gone."""
        try:
            reports = self._read("beat")
        except Exception:  # torch raises errors of several types
            self.store_silent = True
            return []
        self.store_silent, self.answered = False, time.monotonic()
        self.explained = self.explained or FAILED in reports  # remembered when the store goes with the failed process
        return reports

    def _watch(self) -> None:
        statuses, beats = dict[int, PeerStatus](), 0
        while not self.left:
            beats += 1
            self._report(f"{beats} {self.collectives} {self.progress} {int(bool(self.step))} {_source_line()}")
            reports = self._reports()
            for rank, text in enumerate(reports):
                self._check_peer(rank, text, statuses)
            if reports and not self.left:
                self._check_step(reports, statuses)
            time.sleep(self._interval)

    def _watch_store(self) -> None:
        """Give up a store that does not answer: it hangs with rank 0, or with what started rank 0."""
        while not self.left:
            time.sleep(self._interval)
            if time.monotonic() - self.answered > self.patience:
                self.store_silent = True
                self._give_up([0] if self.rank else [], f"not answered for {self._duration}")

    @property
    def _interval(self) -> float:
        return min(5.0, self.patience / 8)

    @property
    def _duration(self) -> str:
        return f"{self.patience / 60:g} minutes" if self.patience >= 60 else f"{self.patience:g} seconds"

    def _check_peer(self, rank: int, report: str, statuses: dict[int, PeerStatus]) -> None:
        """Give up a process that has ended, or whose counts have not changed for too long."""
        now = time.monotonic()
        peer = statuses.setdefault(rank, PeerStatus(report, -1, "", reported=now, moved=now, behind=now))
        if report and report not in ENDS:
            _, collectives, progress, _ = report.split(" ", 3)
            # a process that is as far as this one keeps nobody waiting
            if int(collectives) != peer.collectives or int(collectives) >= self.collectives:
                peer.behind = now
            if (int(collectives), progress) != (peer.collectives, peer.progress):
                peer.moved = now
            peer.collectives, peer.progress = int(collectives), progress
        peer.report, peer.reported = report, now if report != peer.report else peer.reported
        if rank == self.rank:
            return
        ended = report in (FAILED, STOPPED) or self._has_ended(rank, report)
        peer.ended = (peer.ended or now) if self.watched and ended else None
        # the main thread notices too if it waits on a connection; a process that is done may only be faster at its end
        if peer.ended is not None and now - peer.ended > (self.patience if report == DONE else 2 * self._interval):
            self._give_up([rank], "" if report in (FAILED, STOPPED) else "ended")
        if report in ENDS:
            return
        if now - peer.reported > self.patience:
            self._give_up([rank], f"not answered for {self._duration}")
        if rank and report and now - peer.behind > self.patience and now - peer.reported < 2 * self._interval:
            self._give_up([rank], f"kept the others waiting for {self._duration}")

    def _check_step(self, reports: list[str], statuses: dict[int, PeerStatus]) -> None:
        """Give up a step in which this process waits for one that does not come, or in which none makes progress."""
        now, lines = time.monotonic(), dict[str, list[int]]()
        if not self.step or now - statuses[self.rank].moved <= self.patience:
            return
        for rank, text in enumerate(reports):
            words = text.split(" ", 4)
            if len(words) < 5 or now - statuses[rank].moved <= self.patience:
                return
            if words[3] == "0":  # it is outside the step, where only rank 0 may be
                if rank:
                    self._give_up([rank], f"kept the others waiting for {self._duration}")
                return
            lines.setdefault(words[4], []).append(rank)
        where = []
        for line, ranks in sorted(lines.items(), key=lambda item: len(item[1]))[:3]:  # fewest processes first
            more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
            shown = ", ".join(map(str, ranks[:4])) + more
            where.append(f"{'process' if len(ranks) == 1 else 'processes'} {shown} in {line}")
        stalled = f"none of {self.ranks} processes has made progress for {self._duration} {self.step}"
        self._stop([], f"{stalled} ({', '.join(where)})")

    def _give_up(self, gone: list[int], state: str) -> None:
        """Stop because of a process; without a `state` to print if it has printed why, or stops for another one."""
        who = self.name(gone[0]) if gone else "the store that the processes rendezvoused through"
        lead = ", which leads," if gone == [0] else ""
        self._stop(gone, f"{who}{lead} has {state}" if state else "")

    def _stop(self, gone: list[int], line: str) -> None:
        """End this process, whose main thread is blocked in a library. One process prints why."""
        if self.left:
            return
        if line and not self.explained and self.speaks(gone):
            sys.stderr.write(
                f"weft: {line}; stopping: a resumed training run continues from its last checkpoint"
                f"{f' ({VARIABLE} sets another time, in seconds)' if self._duration in line else ''}\n"
            )
        elif line:
            time.sleep(2 * self._interval)  # the process that prints must notice the lost one first, not our end
        sys.stderr.flush()
        sys.stdout.flush()
        self.leave(STOPPED)
        self.keep_store()
        os._exit(2)


def _machine() -> str:
    """Return an id shared by processes that see each other's pids; host names may clash, or be several."""
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{booted}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return "-"


def _source_line() -> str:
    """Return the source line that the main thread is executing."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "?"
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"
