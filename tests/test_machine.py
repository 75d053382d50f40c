"""What is read of processors, and that the best of several turns counts."""

import time
from collections.abc import Callable

import pytest
import torch

from weft import machine
from weft.machine import best_of, described_by_cpuinfo, described_by_sysctl, products

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


def test_processors_are_described() -> None:
    amx = ("AMX bf16", "AMX int8", "AVX-512 BF16", "AVX-512 VNNI", "AVX-512", "AVX2")
    assert described_by_cpuinfo(XEON) == ("Intel(R) Xeon(R) Platinum 8480C", amx)
    assert described_by_cpuinfo(GRAVITON) == ("ARM Neoverse-V1", ("SVE", "bf16", "i8mm", "dot product", "NEON"))
    assert described_by_sysctl(M2) == ("Apple M2", ("bf16", "i8mm", "NEON"))
    assert described_by_sysctl(M2.replace("BF16: 1", "BF16: 0"))[1] == ("i8mm", "NEON")


def test_what_is_unknown_has_a_name_all_the_same() -> None:
    for described in (described_by_cpuinfo(""), described_by_sysctl("")):
        assert described[0]
        assert described[1] == ()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that stands still but for what is said to pass."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def test_the_best_turn_counts_and_the_first_does_not(clock: Callable[[float], None]) -> None:
    taken = {"a": iter([0.001, 3.0, 2.0, 9.0]), "b": iter([0.002, 5.0, 6.0, 9.0])}
    order: list[str] = []

    def run(name: str) -> None:
        order.append(name)
        clock(next(taken[name]))

    assert best_of({name: lambda name=name: run(name) for name in taken}, 15.0) == {"a": 2.0, "b": 5.0}  # type: ignore[misc]
    assert order == ["a", "b"] * 3  # the warm-up, and two turns of 16 seconds


def test_rates_follow_the_sizes(clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A product at a made-up rate is measured at that rate; a format that is too slow is tried in a tiny one alone."""
    rates, asked = {torch.float32: 200e9, torch.bfloat16: 700e9, torch.float16: 1e6}, []

    def linear(x: torch.Tensor, weight: torch.Tensor) -> None:
        operations = 2 * x.numel() * len(weight)
        asked.append((x.dtype, operations))
        clock(operations / rates[x.dtype])

    monkeypatch.setattr(machine.F, "linear", linear)
    found = products.__wrapped__(48, 96, 640, ("fp32", "bf16", "fp16"))
    assert found == pytest.approx({"fp32": 200e9, "bf16": 700e9, "fp16": 1e6})
    large, tiny = 2 * 48 * 96 * 640, 2 * 32 * 256 * 256
    assert {operations for dtype, operations in asked if dtype == torch.bfloat16} == {tiny, large}
    assert {operations for dtype, operations in asked if dtype == torch.float16} == {tiny}
    asked.clear()
    products.__wrapped__(10**6, 10**5, 10**5)
    assert max(operations for _, operations in asked) == 2 * 512 * 1024 * 4096


def test_a_format_without_products_has_rate_0(clock: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(x: torch.Tensor, weight: torch.Tensor) -> None:
        raise RuntimeError("not implemented")

    monkeypatch.setattr(machine.torch, "_int_mm", refuse)
    monkeypatch.setattr(machine.F, "linear", lambda x, weight: clock(1e-3))
    assert products.__wrapped__(8, 8, 8, ("fp32", "int8")) == pytest.approx({"fp32": 2 * 8**3 / 1e-3, "int8": 0.0})


def test_this_machine_multiplies_and_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SECONDS", 0.0)
    monkeypatch.setattr(machine, "READ", 1 << 16)
    threads = torch.get_num_threads()
    found = products.__wrapped__(16, 16, 16)
    assert set(found) == {"fp32", "bf16"}
    assert all(rate > 0 for rate in found.values())
    assert machine.bandwidth(threads=1) > 0
    assert torch.get_num_threads() == threads
