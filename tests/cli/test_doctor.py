"""`weft doctor` with made-up measurements."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.command import Cli, Patch

from weft import machine
from weft.api import doctor
from weft.native import compiler

Capture = pytest.CaptureFixture[str]
RATES = {"fp32": 217e9, "bf16": 747e9, "int8": 0.0}
GPU = {"fp32": 51e12, "bf16": 790e12}


@pytest.fixture
def xeon(monkeypatch: Patch) -> None:
    def matmul_rates(*sizes: int, dtypes: Sequence[str] = ("fp32", "bf16"), device: str = "cpu") -> dict[str, float]:
        return {dtype: (RATES if device == "cpu" else GPU)[dtype] for dtype in dtypes}

    def bandwidth(device: str = "cpu", threads: int | None = None) -> float:
        return 4e12 if device != "cpu" else 11e9 if threads == 1 else 30.4e9

    monkeypatch.setattr(machine, "processor", lambda: ("Xeon", ("AMX bf16", "AVX2")))
    monkeypatch.setattr(machine, "matmul_rates", matmul_rates)
    monkeypatch.setattr(machine, "bandwidth", bandwidth)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def lines(text: str) -> dict[str, str]:
    """Return the second column of a table by the first."""
    return {line[:18].strip(): line[18:].strip() for line in text.splitlines()}


@pytest.mark.usefixtures("xeon")
def test_a_processor_and_its_measurements(cli: Cli) -> None:
    rows = lines(cli("doctor"))
    assert rows["torch"] == torch.__version__
    assert rows["processor"].startswith("Xeon, ")
    assert rows["instructions"] == "AMX bf16, AVX2"
    assert rows["memory bandwidth"] == "one thread 11 GB/s, all 30.4 GB/s"
    assert rows["products"] == "fp32 217 GFLOP/s, bf16 747 GFLOP/s"  # int8 has none that torch uses
    assert rows["training"].startswith("bf16: this CPU multiplies bf16 3.4 times as fast")
    found = cli.json("doctor")
    assert found["products"] == RATES
    assert found["memory bandwidth"] == {"one thread": 11e9, "all threads": 30.4e9}
    assert found["training"]["precision"] == "bf16"


@pytest.mark.usefixtures("xeon")
def test_a_gpu_and_its_measurements(cli: Cli, monkeypatch: Patch) -> None:
    about = type("About", (), {"name": "H200", "total_memory": 139 << 30})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: about)
    rows = lines(cli("doctor"))
    assert rows["GPU 0"].startswith("H200, 139 GiB; fp32 51 TFLOP/s, bf16 790 TFLOP/s, memory bandwidth 4,000 GB/s; ")
    assert "training" not in rows  # on the GPU, in bf16


def test_what_kept_the_kernels_from_being_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert doctor._why_not_compiled() == "no C compiler"
    slow = tmp_path / "cc"
    slow.write_text("#!/bin/sh\nexec /bin/sleep 9\n")
    slow.chmod(0o700)
    monkeypatch.setattr(compiler, "MAX_SECONDS", 0.2)
    assert re.fullmatch(r"\S*cc did not compile \w+\.c within 0\.2 seconds", doctor._why_not_compiled())
    monkeypatch.setenv("WEFT_NATIVE", "0")
    assert doctor._why_not_compiled().startswith("WEFT_NATIVE=0")
