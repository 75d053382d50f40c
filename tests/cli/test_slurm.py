"""The Slurm script, with stubs for Slurm's commands that log their arguments."""

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
    # runs until SIGTERM if WAITS is set
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


def start(script: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
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
def test_the_torchrun_command(script: Path) -> None:
    run_folder = script.parent / "my runs" / "large"
    words = (str(run_folder), "gpt2", "--data", "a text.txt", "parallel.shard=2")
    assert start(script, *words).wait() == 0
    weft = f"weft train gpt2 --data a text.txt parallel.shard=2 --run {run_folder}"
    srun = "srun --ntasks=2 --ntasks-per-node=1 torchrun"
    log = script.parent / "log"
    assert log.read_text() == f"{srun} {TORCHRUN.format('41234-0')} --no-python -- {weft}\n"
    log.unlink()
    run_folder.mkdir(parents=True)
    (run_folder / "config.toml").write_text("")  # an existing run is resumed
    assert start(script, *words, SLURM_RESTART_COUNT="2", STATUS="3").wait() == 3  # failures are not retried
    assert log.read_text() == f"{srun} {TORCHRUN.format('41234-2')} --no-python -- weft train --resume {run_folder}\n"
    wrong = start(script, "runs/large")
    assert "usage: sbatch" in wrong.communicate()[1]
    assert wrong.returncode == 2


@pytest.mark.timeout(60)
def test_it_saves_and_requeues_before_the_time_limit(script: Path) -> None:
    job = start(script, "runs/large", "gpt2", WAITS="yes")
    pid = script.parent / "log.pid"
    while not (pid.exists() and pid.read_text().strip()):
        time.sleep(0.02)
    time.sleep(0.2)  # for the trap to be set
    job.send_signal(signal.SIGUSR1)
    assert job.wait() == 1
    assert (script.parent / "log").read_text().splitlines()[1:] == [
        "scancel --signal=TERM 41234",
        "scontrol requeue 41234",
    ]
