"""Two machines that train together over a bad network: delay and loss slow them down, a cut ends both with a message.

    sudo python benchmarks/network_faults.py --patience 20

Each of two torchrun nodes runs in a network, process and host namespace of its own. Their packets go through this
process (a TUN device in each namespace), which holds them back, loses some of them or all. Delayed, lossy or cut off
for a moment, a run must end with the weights that it has without that; cut off for good, both nodes must say so within
WEFT_PATIENCE and a little, and end.
"""

import argparse
import ctypes
import fcntl
import heapq
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from weft.runs import checkpoint
from weft.runs.folder import RunFolder

DEVICE, PORT = "weft0", 29400
MODEL = ["model.d_model=16", "model.attention.heads=2", "model.feedforward.d_ff=24", "model.layers=1"]
SETTINGS = [*MODEL, "tokenizer=byte", "batch.size=4", "batch.length=16", "steps=10", "log.every=1", "schedule.warmup=2",
            "evaluate.every=10", "evaluate.tokens=100", "checkpoint.every=5", "parallel.shard=2"]  # fmt: skip
LITTLE = 20.0  # seconds beyond the patience in which both must have ended
LONG = 300.0  # seconds in which anything must have ended


@dataclass
class Network:
    """Two namespaces, and what happens to packets between them; `lost` names the nodes whose packets get nowhere."""

    delay: float = 0.0
    loss: float = 0.0
    lost: set[int] = field(default_factory=set)
    names: tuple[str, str] = (f"weft-{os.getpid()}-0", f"weft-{os.getpid()}-1")

    def __enter__(self) -> "Network":
        self.devices = [self._node(node) for node in (0, 1)]
        for node in (0, 1):
            threading.Thread(target=self._carry, args=(node,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.lost = {0, 1}
        for name in self.names:
            _ip("netns", "del", name)

    def _node(self, node: int) -> int:
        """A namespace and its device, whose packets are read and written here."""
        name = self.names[node]
        _ip("netns", "add", name)
        with _inside(name):
            device = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(device, 0x400454CA, struct.pack("16sH22x", DEVICE.encode(), 0x1001))  # TUNSETIFF: packets, bare
        _ip("-n", name, "addr", "add", f"10.77.0.{node + 1}/24", "dev", DEVICE)
        for link in ("lo", DEVICE):
            _ip("-n", name, "link", "set", link, "up")
        return device

    def link(self, node: int, state: str) -> None:
        """Take a node's link `down`, or `up` again."""
        _ip("-n", self.names[node], "link", "set", DEVICE, state)

    def _carry(self, node: int) -> None:
        """From one node to the other, in order, each packet when its time has come."""
        waiting: list[tuple[float, int, bytes]] = []
        ready, pick, number = threading.Condition(), random.Random(node), 0

        def deliver() -> None:
            while True:
                with ready:
                    while not waiting:
                        ready.wait()
                    due, _, packet = heapq.heappop(waiting)
                time.sleep(max(0.0, due - time.monotonic()))
                if node not in self.lost:
                    _quietly(os.write, self.devices[1 - node], packet)

        threading.Thread(target=deliver, daemon=True).start()
        while True:
            packet = _quietly(os.read, self.devices[node], 65536)
            if packet is None:  # the link is down
                time.sleep(0.05)
            elif node not in self.lost and pick.random() >= self.loss:
                number += 1
                with ready:
                    heapq.heappush(waiting, (time.monotonic() + self.delay, number, packet))
                    ready.notify()


def _quietly(call: object, *given: object) -> bytes | None:
    try:
        return call(*given)  # type: ignore[operator,no-any-return]
    except OSError:
        return None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def _inside(name: str) -> Iterator[None]:
    """This thread in a network namespace."""
    libc, own = ctypes.CDLL(None, use_errno=True), os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(there, 0x40000000):
            raise OSError(ctypes.get_errno(), "setns")
        yield
    finally:
        libc.setns(own, 0x40000000)
        os.close(own)
        os.close(there)


def refusal() -> str | None:
    """Why this machine can't do it, or None."""
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if sys.platform != "linux" or missing:
        return f"needs Linux with {' and '.join(missing) or 'network namespaces'}"
    try:
        with Network():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces can't be made here: {getattr(error, 'stderr', None) or error}"


# ---- a job


@dataclass
class Job:
    """A torchrun in each namespace, on machines called node0 and node1; what each prints goes to a file."""

    network: Network
    run: Path
    patience: float

    def __enter__(self) -> "Job":
        self.logs = [self.run.with_suffix(f".{node}.log") for node in (0, 1)]
        self.nodes = [self._start(node) for node in (0, 1)]
        return self

    def __exit__(self, *error: object) -> None:
        for node in self.nodes:
            if node.poll() is None:
                node.kill()  # and with it all that is in its namespace
            node.wait()

    def _start(self, node: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)]
        words += ["--nproc-per-node", "1", "--master-addr", "10.77.0.1", "--master-port", str(PORT), "-m", "--", "weft"]
        words += ["train", "gpt-tiny", "--data", "text.txt", "--run", str(self.run), *SETTINGS]
        alone = ["ip", "netns", "exec", self.network.names[node], "unshare", "--pid", "--uts", "--fork", "--mount-proc"]
        alone += ["--kill-child", "sh", "-c", f'hostname node{node}; exec "$@"', "sh"]
        given = os.environ | {"GLOO_SOCKET_IFNAME": DEVICE, "WEFT_PATIENCE": str(self.patience), "OMP_NUM_THREADS": "1"}
        log = self.logs[node].open("w")
        return subprocess.Popen([*alone, *words], stdout=log, stderr=subprocess.STDOUT, env=given)

    def reached(self, step: int) -> None:
        """Wait for a step."""
        until = time.monotonic() + LONG
        while f"step {step}/" not in self.logs[0].read_text():
            if time.monotonic() > until or any(node.poll() is not None for node in self.nodes):
                raise SystemExit(f"{self.run.name}: never got to step {step}:\n{self.printed()}")
            time.sleep(0.02)

    def ended(self) -> list[float]:
        """The seconds until each node has ended; those that hang take as long as we wait."""
        began, ends = time.monotonic(), [LONG, LONG]
        while time.monotonic() - began < LONG and LONG in ends:
            for node, process in enumerate(self.nodes):
                if process.poll() is not None and ends[node] == LONG:
                    ends[node] = time.monotonic() - began
            time.sleep(0.05)
        return ends

    def lines(self, node: int) -> list[str]:
        """What weft said of an end."""
        return [line for line in self.logs[node].read_text().splitlines() if line.startswith("weft: ")]

    def printed(self) -> str:
        return "\n".join(f"--- node {node}\n{log.read_text()[-3000:]}" for node, log in enumerate(self.logs))


def outcome(run: Path) -> list[str]:
    """The weights and moments of each checkpoint by their sums, and the curve."""
    folder = RunFolder(run)
    return [
        folder.metrics.read_text(),
        *(str(checkpoint.verify(p)["files"]) for p in folder.checkpoints.glob("step-*")),
    ]


# ---- the cases


@dataclass(frozen=True)
class Case:
    """What is wrong with the network, and for how many seconds after step 3; None: from the beginning to the end."""

    name: str
    delay: float = 0.0
    loss: float = 0.0
    lost: tuple[int, ...] = ()
    down: int | None = None
    seconds: float | None = None
    ends: bool = False  # with a message


CASES = [
    Case("nothing"),
    Case("200 ms each way", delay=0.2),
    Case("10 % of the packets lost", loss=0.1),
    Case("cut for 5 s", lost=(0, 1), seconds=5.0),
    Case("cut", lost=(0, 1), ends=True),
    Case("what node 0 sends is lost", lost=(0,), ends=True),
    Case("what node 1 sends is lost", lost=(1,), ends=True),
    Case("node 0's link down", down=0, ends=True),
    Case("node 1's link down", down=1, ends=True),
]


def tried(case: Case, patience: float, expected: list[str] | None) -> tuple[list[str], list[str]]:
    """Train through a case; a row of the table, and what came out."""
    run, began = Path(case.name.replace(" ", "-").replace("%", "").replace("'", "")), time.monotonic()
    steady = not case.lost and case.down is None
    with Network(delay=case.delay * steady, loss=case.loss * steady) as network, Job(network, run, patience) as job:
        if not steady:
            job.reached(3)
            network.lost = set(case.lost)
            if case.down is not None:
                network.link(case.down, "down")
            if case.seconds is not None:
                time.sleep(case.seconds)
                network.lost = set()
        ends = job.ended()
        codes = [node.poll() for node in job.nodes]
        lines = [job.lines(node) for node in (0, 1)]
    seconds = f"{time.monotonic() - began:.0f}" if not case.ends else " / ".join(f"{end:.1f}" for end in ends)
    if case.ends:
        right = max(ends) < patience + LITTLE and all(len(said) == 1 for said in lines) and 0 not in codes
        found: list[str] = []
    else:
        found = outcome(run) if codes == [0, 0] else []
        right = bool(found) and (expected is None or found == expected)
    if any("Traceback" in log.read_text().partition("elastic")[0] for log in job.logs):  # torchrun's own comes last
        right = False
    if not right:
        print(job.printed(), flush=True)
    said = [f"node{node}: {line[6:].split('; stopping')[0]}" for node in (0, 1) for line in lines[node]]
    row = [case.name, "ends" if case.ends else "the same weights", seconds, " · ".join(said)]
    return [*row, "yes" if right else "no"], found


def main() -> int:
    """Go through all cases, or those asked for; exit status 1 where one isn't as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--patience", type=float, default=20.0)
    parser.add_argument("--only", nargs="*", default=[case.name for case in CASES], help="names of cases")
    options = parser.parse_args()
    reason = refusal()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    rows, expected = [], None
    with tempfile.TemporaryDirectory(prefix="weft-network-") as folder:
        os.chdir(folder)
        Path("text.txt").write_text("".join(f"frog {n} sat by river {n * n % 97} and ran\n\n" for n in range(200)))
        for case in [case for case in CASES if case.name in options.only]:
            row, found = tried(case, options.patience, expected)
            expected = expected or found or None
            rows.append(row)
            print(f"{row[0]}: {row[2]} s: {row[4]}", flush=True)
        os.chdir("/")
    print("\n| the network | should | seconds (a cut: from it, node 0 / 1) | what is said | as it should |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return 1 if any(row[4] != "yes" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
