"""The Slurm script, with stand-ins for Slurm's commands that note how they were called."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from weft.cli.main import run

pytestmark = pytest.mark.skipif(os.name != "posix", reason="a shell script")

COMMANDS = {
    "scontrol": '[ "$1" = requeue ] && echo "scontrol $*" >> "$LOG"; printf "node7\\nnode8\\n"',
    "srun": 'echo "srun $*" >> "$LOG"; while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scancel": 'echo "scancel $*" >> "$LOG"; kill -TERM $(cat "$LOG.pid")',
    # trains until it is told to stop, if it is to wait at all
    "torchrun": 'echo $$ > "$LOG.pid"; trap "exit 1" TERM; while [ "$WAITS" ]; do sleep 0.05; done; exit ${STATUS:-0}',
}
TORCHRUN = (
    "--nnodes 2 --nproc-per-node gpu --max-restarts 3 --rdzv-id {} --rdzv-backend c10d --rdzv-endpoint node7:21234"
)


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert run(["config", "slurm"]) == 0
    file = tmp_path / "train.sbatch"
    file.write_text(capsys.readouterr().out)
    (tmp_path / "bin").mkdir()
    for name, body in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return file


def started(script: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PATH": f"{script.parent / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "LOG": str(script.parent / "log"),
        "SLURM_JOB_ID": "41234",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NODELIST": "node[7-8]",
        **variables,
    }
    return subprocess.Popen(["bash", str(script), *words], env=environment, text=True, stderr=subprocess.PIPE)


@pytest.mark.timeout(60)
def test_the_command_that_comes_out(script: Path) -> None:
    place = script.parent / "my runs" / "large"
    words = (str(place), "gpt2", "--data", "a text.txt", "parallel.shard=2")
    assert started(script, *words).wait() == 0
    weft = f"weft train gpt2 --data a text.txt parallel.shard=2 --run {place}"
    srun = "srun --ntasks=2 --ntasks-per-node=1 torchrun"
    log = script.parent / "log"
    assert log.read_text() == f"{srun} {TORCHRUN.format('41234-0')} --no-python -- {weft}\n"
    log.unlink()
    place.mkdir(parents=True)
    (place / "config.toml").write_text("")  # a run has begun
    assert started(script, *words, SLURM_RESTART_COUNT="2", STATUS="3").wait() == 3  # a failure isn't tried again
    assert log.read_text() == f"{srun} {TORCHRUN.format('41234-2')} --no-python -- weft train --resume {place}\n"
    wrong = started(script, "runs/large")
    assert "usage: sbatch" in wrong.communicate()[1]
    assert wrong.returncode == 2


@pytest.mark.timeout(60)
def test_it_saves_before_its_time_ends_and_goes_back_to_the_queue(script: Path) -> None:
    job = started(script, "runs/large", "gpt2", WAITS="yes")
    pid = script.parent / "log.pid"
    while not (pid.exists() and pid.read_text().strip()):
        time.sleep(0.02)
    time.sleep(0.2)  # until its trap is set
    job.send_signal(signal.SIGUSR1)
    assert job.wait() == 1
    assert (script.parent / "log").read_text().splitlines()[1:] == [
        "scancel --signal=TERM 41234",
        "scontrol requeue 41234",
    ]
