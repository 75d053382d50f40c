"""Lost processes: torchrun restarts the job, which ends as if undisturbed, and checkpoints stay whole."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import redirect_stderr
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.parallel.test_layouts import LONG
from tests.parallel.test_ranks import in_processes, note, noted
from tests.training.small import events
from tests.training.test_elastic import curve, on_step, started
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from weft.api.train import train
from weft.cli.main import main
from weft.errors import LostError
from weft.parallel.ranks import Ranks, restarts
from weft.runs import checkpoint
from weft.runs.folder import RunFolder

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
SMALL = ["model.d_model=16", "model.attention.heads=2", "model.feedforward.d_ff=24", "model.layers=1", "tokenizer=byte"]
SETTINGS = [*SMALL, "model.dropout=0.1", "batch.size=4", "batch.length=16", "steps=12", "log.every=2",
            "schedule.warmup=2", "evaluate.every=6", "evaluate.tokens=50", "checkpoint.every=4"]  # fmt: skip


def _weft(folder: str) -> None:
    """Run `weft train`; one of its processes kills itself in its seventh step unless torchrun has restarted it."""
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115 — until it ends
    torch.set_num_threads(1)

    def die(number: int, *args: object) -> None:
        if number == 1 + 7 and os.environ["RANK"] == "1" and not restarts():  # the first step is the pre-flight's
            os.kill(os.getpid(), signal.SIGKILL)

    on_step(die)
    sys.argv = ["weft", "train", "gpt-tiny", "--data", f"{folder}/text.txt", "--run", f"{folder}/run", *SETTINGS]
    main()


def _undisturbed(ranks: Ranks, folder: Path) -> None:
    train("gpt-tiny", data=str(folder / "text.txt"), run=folder / "straight", changes=SETTINGS, log=lambda line: None)


def outcome(run: Path) -> dict[str, Any]:
    """Return the verified checkpoints with the hashes of their files, all file names, and the metrics."""
    folder = RunFolder(run)
    sums = {
        path.name: checkpoint.manifest_of(checkpoint.verify(path))["files"]
        for path in checkpoint.all_checkpoints(folder.checkpoints)
    }
    names = sorted(path.name for path in [*run.iterdir(), *folder.checkpoints.iterdir()])
    return {"sums": sums, "names": names, "metrics": folder.metrics.read_text()}


@pytest.mark.slow
def test_a_job_that_torchrun_restarts_ends_as_if_undisturbed(tmp_path: Path) -> None:
    """With torchrun's launcher, from processes in which torch is loaded already."""
    (tmp_path / "text.txt").write_text("\n\n".join(f"frog {n} sat by river {n * n % 97}" for n in range(100)))
    assert in_processes(_undisturbed, tmp_path) == [0, 0]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = LaunchConfig(1, 1, 2, run_id="frogs", max_restarts=1, monitor_interval=0.1, start_method="forkserver",
                       rdzv_backend="static", rdzv_endpoint=f"127.0.0.1:{port}", rdzv_configs={"rank": 0})  # fmt: skip
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in handled}
    try:
        elastic_launch(job, _weft)(str(tmp_path))
    finally:  # the launcher replaces the handlers
        for number, handler in before.items():
            signal.signal(number, handler)
    printed = (tmp_path / "log").read_text()
    assert "Traceback" not in printed
    assert "/run: begun by this job before it was restarted; resuming" in printed
    assert [line["step"] for line in events(tmp_path / "run", "resume")] == [6]  # the best so far was saved
    restarted, expected = outcome(tmp_path / "run"), outcome(tmp_path / "straight")
    assert restarted == expected and "step-00000012" in expected["sums"]


# ---- while a checkpoint is being written


def _write(ranks: Ranks, folder: Path, what: str) -> None:
    """Kill one process, or fill its disk, while it writes its chunks of the second checkpoint."""
    written: Any = import_module("weft.runs.sharded_checkpoint")
    original, saves = written.write_pieces, 0

    def write_pieces(*args: Any) -> None:
        nonlocal saves
        saves += threading.current_thread() is not threading.main_thread()  # not the pre-flight's
        if saves == 2 and ranks.rank == 1:
            if what == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            saves += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        original(*args)

    written.write_pieces = write_pieces
    (folder / what).mkdir(exist_ok=True)
    with (folder / f"{ranks.rank}.err").open("w") as errors, redirect_stderr(errors):
        try:
            started(ranks, folder / what, *LONG, "parallel.shard=2", "evaluate.every=8", "checkpoint.every=2")
        except LostError as error:
            note(folder, ranks, line=str(error))
            raise SystemExit(2) from None


def test_a_process_lost_while_it_writes_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    assert in_processes(_write, tmp_path, "killed") == [2, -9]
    line = noted(tmp_path, 1)[0]["line"]
    assert re.match(r"process 1 of 2 .* has ended, noticed (while the checkpoint of step 4 was|at step [5-8])", line)
    run = RunFolder(tmp_path / "killed/run")
    assert [path.name for path in checkpoint.all_checkpoints(run.checkpoints)] == ["step-00000002"]
    assert checkpoint.newest_good(run.checkpoints)[1] == [] and not list(run.checkpoints.glob(".*"))
    assert not events(run.path, "checkpoint failed")  # training has stopped


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_process_costs_one_checkpoint(tmp_path: Path) -> None:
    assert in_processes(_write, tmp_path, "full") == [0, 0]
    run = RunFolder(tmp_path / "full/run")
    failed = events(run.path, "checkpoint failed")
    assert [line["step"] for line in failed] == [4] and "No space left on device" in failed[0]["reason"]
    assert [checkpoint.step_of(path) for path in checkpoint.all_checkpoints(run.checkpoints)] == [6, 8]
    assert not list(run.checkpoints.glob(".*")) and curve(run.path)[-1][0] == 8
    for path in checkpoint.all_checkpoints(run.checkpoints):
        checkpoint.verify(path)


# ---- repeated kills


def _benchmark(name: str, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *words], capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_kills_at_any_time() -> None:
    assert "the same" in _benchmark("kills.py", "--kills", "6", "--layouts", "tensor 2 × shard 2", "replicate 4")


@pytest.mark.slow
def test_a_network_that_is_cut_ends_in_a_message() -> None:
    printed = _benchmark("network_faults.py", "--patience", "8", "--only", "cut")
    if printed.startswith("skipped"):
        pytest.skip(printed)
    assert "has not answered for 8 seconds" in printed
