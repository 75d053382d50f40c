"""Parsing of CPU descriptions, and measurements."""

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch

from weft import machine
from weft.machine import best_of, matmul_rates, parse_cpuinfo, parse_sysctl

XEON = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480C
flags\t\t: fpu sse avx avx2 avx512f avx512_bf16 avx512_vnni amx_bf16 avx512_fp16 amx_tile amx_int8

processor\t: 1
model name\t: another
"""
GRAVITON = """processor\t: 0
Features\t: fp asimd asimdhp asimddp sve i8mm bf16
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""
M2 = """machdep.cpu.brand_string: Apple M2
hw.optional.arm.FEAT_BF16: 1
hw.optional.arm.FEAT_I8MM: 1
hw.optional.arm.FEAT_SME: 0
hw.optional.AdvSIMD: 1
"""


def test_processors_are_parsed() -> None:
    amx = ("AMX bf16", "AMX int8", "AVX-512 BF16", "AVX-512 VNNI", "AVX-512", "AVX2")
    assert parse_cpuinfo(XEON) == ("Intel(R) Xeon(R) Platinum 8480C", amx)
    assert parse_cpuinfo(GRAVITON) == ("ARM Neoverse-V1", ("SVE", "bf16", "i8mm", "dot product", "NEON"))
    assert parse_sysctl(M2) == ("Apple M2", ("bf16", "i8mm", "NEON"))
    assert parse_sysctl(M2.replace("BF16: 1", "BF16: 0"))[1] == ("i8mm", "NEON")


@pytest.mark.parametrize("parse", [parse_cpuinfo, parse_sysctl])
def test_an_unknown_processor_has_a_name(parse: Callable[[str], tuple[str, tuple[str, ...]]]) -> None:
    name, features = parse("")
    assert name and not features


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Replace the clock; return a function that advances it."""
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def advance(seconds: float) -> None:
        nonlocal now
        now += seconds

    return advance


def test_the_best_turn_counts_but_not_the_warm_up(clock: Callable[[float], None]) -> None:
    durations = {"a": iter([0.001, 3.0, 2.0, 9.0]), "b": iter([0.002, 5.0, 6.0, 9.0])}
    order: list[str] = []

    def run(name: str) -> None:
        order.append(name)
        clock(next(durations[name]))

    assert best_of({name: partial(run, name) for name in durations}, 15.0) == {"a": 2.0, "b": 5.0}
    assert order == ["a", "b"] * 3  # the warm-up, and two turns of 16 seconds


def test_rates_follow_from_the_sizes(clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A product at a given rate is measured at that rate; a dtype that is too slow only has the tiny product."""
    rates, calls = {torch.float32: 200e9, torch.bfloat16: 700e9, torch.float16: 1e6}, []

    def linear(x: torch.Tensor, weight: torch.Tensor) -> None:
        operations = 2 * x.numel() * len(weight)
        calls.append((x.dtype, operations))
        clock(operations / rates[x.dtype])

    monkeypatch.setattr(machine.F, "linear", linear)
    found = matmul_rates.__wrapped__(48, 96, 640, dtypes=("fp32", "bf16", "fp16"))
    assert found == pytest.approx({"fp32": 200e9, "bf16": 700e9, "fp16": 1e6})
    large, tiny = 2 * 48 * 96 * 640, 2 * 32 * 256 * 256
    assert {operations for dtype, operations in calls if dtype == torch.bfloat16} == {tiny, large}
    assert {operations for dtype, operations in calls if dtype == torch.float16} == {tiny}
    calls.clear()
    matmul_rates.__wrapped__(10**6, 10**5, 10**5)
    assert max(operations for _, operations in calls) == 2 * 512 * 1024 * 4096


def test_a_dtype_without_products_has_rate_0(clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(x: torch.Tensor, weight: torch.Tensor) -> None:
        raise RuntimeError("not implemented")

    monkeypatch.setattr(torch, "_int_mm", refuse)
    monkeypatch.setattr(machine.F, "linear", lambda x, weight: clock(1e-3))
    found = matmul_rates.__wrapped__(8, 8, 8, dtypes=("fp32", "int8"))
    assert found == pytest.approx({"fp32": 2 * 8**3 / 1e-3, "int8": 0.0})


def test_this_machine_multiplies_and_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SECONDS", 0.0)
    monkeypatch.setattr(machine, "READ_ELEMENTS", 1 << 16)
    threads = torch.get_num_threads()
    found = matmul_rates.__wrapped__(16, 16, 16)
    assert set(found) == {"fp32", "bf16"}
    assert all(rate > 0 for rate in found.values())
    assert machine.bandwidth(threads=1) > 0
    assert torch.get_num_threads() == threads
