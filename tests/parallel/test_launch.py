"""`weft train --processes 2` runs like two processes of torchrun."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.parallel.test_ranks import in_processes
from tests.parallel.test_restart import SETTINGS, _undisturbed
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from weft.cli.main import run

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("\n\n".join(f"frog {n} sat by river {n * n % 97}" for n in range(100)))
    return tmp_path


def started(folder: Path, *words: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "weft", "train", *words, "--processes", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")}
    (folder / "tmp").mkdir(exist_ok=True)
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
def test_the_curve_is_that_of_torchruns_processes(text: Path) -> None:
    words = ["gpt-tiny", "--data", "text.txt", "--run", "run", *SETTINGS]
    process = started(text, *words)
    assert in_processes(_undisturbed, text) == [0, 0]
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    assert out.count("on held-out data") == 1
    assert (text / "run" / "metrics.jsonl").read_text() == (text / "straight" / "metrics.jsonl").read_text()
    assert not list((text / "tmp").iterdir())


@pytest.mark.slow
def test_a_mistake_is_shown_once(text: Path) -> None:
    process = started(text, "gpt-tiny", "--data", "texd.txt")
    errors = process.communicate()[1]
    assert (process.returncode, errors) == (2, "weft: texd.txt: no such file; did you mean 'text.txt'?\n")


@pytest.mark.slow
def test_an_interrupted_run_is_saved_and_continues(text: Path) -> None:
    words = ["gpt-tiny", "--data", "text.txt", "--run", "run", *SETTINGS, "log.every=1"]
    process = started(text, *words)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 2/"):
            process.send_signal(signal.SIGINT)
            break
    errors = process.communicate()[1]
    assert process.returncode == 130
    assert "saved; continue with `weft train --resume run`" in errors
    assert errors.count("interrupted") == 1
    process = started(text, "--resume", "run")
    errors = process.communicate()[1]
    assert process.returncode == 0, errors
    assert [json.loads(line)["step"] for line in (text / "run" / "metrics.jsonl").open()] == list(range(1, 13))


def failing(*codes: int) -> Any:
    failures = {rank: SimpleNamespace(exitcode=code, timestamp=rank) for rank, code in enumerate(codes)}
    error = ChildFailedError.__new__(ChildFailedError)
    error.failures = failures  # type: ignore[assignment]

    def main(words: list[str]) -> None:
        raise error

    return main


@pytest.mark.parametrize(("codes", "code"), [((2, -15), 2), ((-9, 2), 2), ((1,), 1)])
def test_the_exit_code_is_that_of_the_process_that_prints_why(
    codes: tuple[int, ...], code: int, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchrun, "main", failing(*codes))
    with pytest.raises(SystemExit) as end:
        run(["train", "gpt-tiny", "--data", "x", "--processes", "2"])
    assert (end.value.code, capsys.readouterr().err) == (code, "")


def test_processes_that_were_killed_are_named(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "main", failing(-15, -9))
    assert run(["train", "gpt-tiny", "--data", "x", "--processes", "2"]) == 2
    assert capsys.readouterr().err == "weft: process 1 of 2 was ended by SIGKILL\n"


@pytest.fixture(autouse=True)
def unchanged_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logging.disable", lambda: None)
    for name in ("OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"):
        monkeypatch.setenv(name, "1")


def test_several_gpus_are_named(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert run(["train", "gpt-tiny", "--data", "x"]) == 2
    line = "this machine has 4 GPUs, but one is used; --processes 4 uses all of them"
    assert capsys.readouterr().err.splitlines()[0] == line
    assert run(["train", "gpt-tiny", "--data", "x", "--processes", "1"]) == 2
    assert "GPUs" not in capsys.readouterr().err
    assert run(["train", "gpt-tiny", "--data", "x", "--processes", "8"]) == 2
    assert "--processes 8: each process needs a GPU, but this machine has 4" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(["train", "gpt-tiny", "--data", "x", "--processes", "4"]) == 2
    assert "--processes 4: torchrun has already started 2; leave it out" in capsys.readouterr().err
