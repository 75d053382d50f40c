"""Train on two nodes over a faulty network: delay and loss slow training down, a broken link ends both with a message.

    sudo python benchmarks/network_faults.py --patience 20

Each of two torchrun nodes runs in separate network, process and host namespaces. Their packets pass through this
process (a TUN device in each namespace), which delays or drops them. With delay, loss or a short interruption a run
must end with the weights of an undisturbed run. After a permanent interruption both nodes must report it and end
within WEFT_PATIENCE plus GRACE seconds.
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
GRACE = 20.0  # seconds beyond WEFT_PATIENCE in which both nodes must end
MAX_SECONDS = 300.0  # a job that runs longer hangs


@dataclass
class Network:
    """Two namespaces and the link between them; packets from the nodes in `lost` are dropped."""

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
        """Create a node's namespace and its TUN device; return the device's file descriptor."""
        name = self.names[node]
        _ip("netns", "add", name)
        with _inside(name):
            device = os.open("/dev/net/tun", os.O_RDWR)
            fcntl.ioctl(
                device, 0x400454CA, struct.pack("16sH22x", DEVICE.encode(), 0x1001)
            )  # TUNSETIFF: IFF_TUN | IFF_NO_PI
        _ip("-n", name, "addr", "add", f"10.77.0.{node + 1}/24", "dev", DEVICE)
        for link in ("lo", DEVICE):
            _ip("-n", name, "link", "set", link, "up")
        return device

    def link(self, node: int, state: str) -> None:
        """Set a node's link `up` or `down`."""
        _ip("-n", self.names[node], "link", "set", DEVICE, state)

    def _carry(self, node: int) -> None:
        """Forward packets from one node to the other in order, each after the delay."""
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


def _quietly(call: object, *args: object) -> bytes | None:
    try:
        return call(*args)  # type: ignore[operator,no-any-return]
    except OSError:
        return None


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def _inside(name: str) -> Iterator[None]:
    """Move this thread into a network namespace; undone on exit."""
    libc, original = ctypes.CDLL(None, use_errno=True), os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    target = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    try:
        if libc.setns(target, 0x40000000):
            raise OSError(ctypes.get_errno(), "setns")
        yield
    finally:
        libc.setns(original, 0x40000000)
        os.close(original)
        os.close(target)


def refusal() -> str | None:
    """Return why this machine can't run the benchmark, or None."""
    missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
    if sys.platform != "linux" or missing:
        return f"needs Linux with {' and '.join(missing) or 'network namespaces'}"
    try:
        with Network():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"cannot create network namespaces: {getattr(error, 'stderr', None) or error}"


# ---- a job


@dataclass
class Job:
    """torchrun in each namespace, on hosts called node0 and node1; each logs to a file."""

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
                node.kill()  # also ends all processes of its namespace
            node.wait()

    def _start(self, node: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)]
        words += ["--nproc-per-node", "1", "--master-addr", "10.77.0.1", "--master-port", str(PORT), "-m", "--", "weft"]
        words += ["train", "gpt-tiny", "--data", "text.txt", "--run", str(self.run), *SETTINGS]
        isolate = [
            "ip",
            "netns",
            "exec",
            self.network.names[node],
            "unshare",
            "--pid",
            "--uts",
            "--fork",
            "--mount-proc",
        ]
        isolate += ["--kill-child", "sh", "-c", f'hostname node{node}; exec "$@"', "sh"]
        environment = os.environ | {
            "GLOO_SOCKET_IFNAME": DEVICE,
            "WEFT_PATIENCE": str(self.patience),
            "OMP_NUM_THREADS": "1",
        }
        log = self.logs[node].open("w")
        return subprocess.Popen([*isolate, *words], stdout=log, stderr=subprocess.STDOUT, env=environment)

    def wait_for_step(self, step: int) -> None:
        until = time.monotonic() + MAX_SECONDS
        while f"step {step}/" not in self.logs[0].read_text():
            if time.monotonic() > until or any(node.poll() is not None for node in self.nodes):
                raise SystemExit(f"{self.run.name}: did not reach step {step}:\n{self.tails()}")
            time.sleep(0.02)

    def wait(self) -> list[float]:
        """Seconds until each node has ended; MAX_SECONDS for one that hangs."""
        began, ends = time.monotonic(), [MAX_SECONDS, MAX_SECONDS]
        while time.monotonic() - began < MAX_SECONDS and MAX_SECONDS in ends:
            for node, process in enumerate(self.nodes):
                if process.poll() is not None and ends[node] == MAX_SECONDS:
                    ends[node] = time.monotonic() - began
            time.sleep(0.05)
        return ends

    def lines(self, node: int) -> list[str]:
        """weft's messages in a node's log."""
        return [line for line in self.logs[node].read_text().splitlines() if line.startswith("weft: ")]

    def tails(self) -> str:
        return "\n".join(f"--- node {node}\n{log.read_text()[-3000:]}" for node, log in enumerate(self.logs))


def outcome(run: Path) -> list[str]:
    """Verified checksums of each checkpoint's files, and the metrics."""
    folder = RunFolder(run)
    return [
        folder.metrics.read_text(),
        *(str(checkpoint.verify(p)["files"]) for p in folder.checkpoints.glob("step-*")),
    ]


# ---- the cases


@dataclass(frozen=True)
class Case:
    """A network fault. Delay and loss last for the whole run; others start after step 3, for `seconds` or for good."""

    name: str
    delay: float = 0.0
    loss: float = 0.0
    lost: tuple[int, ...] = ()
    down: int | None = None
    seconds: float | None = None
    ends: bool = False  # both nodes must end with a message


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


def run_case(case: Case, patience: float, expected: list[str] | None) -> tuple[list[str], list[str]]:
    """Train with a fault; return a row of the table and the outcome."""
    run, began = Path(case.name.replace(" ", "-").replace("%", "").replace("'", "")), time.monotonic()
    steady = not case.lost and case.down is None
    with Network(delay=case.delay * steady, loss=case.loss * steady) as network, Job(network, run, patience) as job:
        if not steady:
            job.wait_for_step(3)
            network.lost = set(case.lost)
            if case.down is not None:
                network.link(case.down, "down")
            if case.seconds is not None:
                time.sleep(case.seconds)
                network.lost = set()
        ends = job.wait()
        codes = [node.poll() for node in job.nodes]
        lines = [job.lines(node) for node in (0, 1)]
    seconds = f"{time.monotonic() - began:.0f}" if not case.ends else " / ".join(f"{end:.1f}" for end in ends)
    if case.ends:
        right = max(ends) < patience + GRACE and all(len(messages) == 1 for messages in lines) and 0 not in codes
        result: list[str] = []
    else:
        result = outcome(run) if codes == [0, 0] else []
        right = bool(result) and (expected is None or result == expected)
    if any(
        "Traceback" in log.read_text().partition("elastic")[0] for log in job.logs
    ):  # torchrun's traceback comes last
        right = False
    if not right:
        print(job.tails(), flush=True)
    messages = [f"node{node}: {line[6:].split('; stopping')[0]}" for node in (0, 1) for line in lines[node]]
    row = [case.name, "ends" if case.ends else "the same weights", seconds, " · ".join(messages)]
    return [*row, "yes" if right else "no"], result


def main() -> int:
    """Run the selected cases; return exit status 1 if one fails."""
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
            row, result = run_case(case, options.patience, expected)
            expected = expected or result or None
            rows.append(row)
            print(f"{row[0]}: {row[2]} s: {row[4]}", flush=True)
        os.chdir("/")
    print("\n| fault | expected | seconds (cut: until the end of node 0 / 1) | messages | passed |")
    print("|---|---|---|---|---|")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    return 1 if any(row[4] != "yes" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
