"""Collectives over processes, and how they end when one of them is lost."""

import atexit
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.spread import spread

from weft.errors import ConfigError, LostError
from weft.parallel.heartbeat import patience
from weft.parallel.ranks import ALONE, Ranks, _buckets, ending, join


def in_processes(
    function: Callable[..., None], folder: Path, *args: Any, count: int = 2, patience: float | None = None
) -> list[int | None]:
    """Call `function(ranks, folder, *args)` in `count` processes, as torchrun starts them; return the exit codes."""
    context = multiprocessing.get_context("forkserver")  # imports run once, and no thread is forked
    context.set_forkserver_preload(["torch._dynamo", "tests.parallel.warm"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    shared |= {"WEFT_PATIENCE": str(patience)} if patience else {}
    environments = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    processes = [context.Process(target=_call, args=(each, function, folder, *args)) for each in environments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def _call(environment: dict[str, str], function: Callable[..., None], folder: Path, *args: Any) -> None:
    os.environ |= environment
    torch.set_num_threads(1)
    try:
        function(join(), folder, *args)
    finally:
        atexit._run_exitfuncs()  # multiprocessing skips them at the end of a process


def note(folder: Path, ranks: Ranks, **values: Any) -> None:
    """Write a process's values for the test to read."""
    (folder / f"{ranks.rank}.json").write_text(json.dumps(values))


def noted(folder: Path, count: int = 2) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


# ---- three processes

SHAPES = [(2, 3), (1,), (), (30,), (4,)]


def _collectives(ranks: Ranks, folder: Path) -> None:
    value = float(ranks.rank + 1)
    tensors = [torch.full(shape, value * (number + 1)) for number, shape in enumerate(SHAPES)]
    tensors += [torch.full((3,), ranks.rank, dtype=torch.int64), torch.full((2, 2), value).T]
    tensors.append(torch.arange(6.0).reshape(2, 3).T * value)  # not contiguous
    ranks.sum_(tensors, bucket_bytes=40)  # several buckets, and one tensor larger than any
    with ranks.leader_first():
        first = sorted(path.name for path in folder.glob("turn-*"))
        if ranks.leads:
            time.sleep(0.2)
            (folder / "turn-0").touch()
    note(
        folder,
        ranks,
        sums=[tensor.tolist() for tensor in tensors],
        total=int(ranks.total(ranks.rank + 5, torch.device("cpu"))),
        ends=[ranks.min(10 - ranks.rank), ranks.max(10 - ranks.rank)],
        shared=ranks.share(lambda: {"who": ranks.rank, "text": "Fäden ✓", "loss": float("nan"), "none": None}),
        before=first,
    )
    ranks.barrier()


def test_processes_agree(tmp_path: Path) -> None:
    assert in_processes(_collectives, tmp_path, count=3) == [0, 0, 0]
    found = noted(tmp_path, 3)
    expected = [torch.full(shape, 6.0 * (number + 1)) for number, shape in enumerate(SHAPES)]
    expected += [torch.full((3,), 3), torch.full((2, 2), 6.0), torch.arange(6.0).reshape(2, 3).T * 6]
    for one in found:
        assert one["sums"] == [tensor.tolist() for tensor in expected]
        assert one["total"] == 5 + 6 + 7
        assert one["ends"] == [8, 10]
        assert (one["shared"]["who"], one["shared"]["text"], one["shared"]["none"]) == (0, "Fäden ✓", None)
        assert one["shared"]["loss"] != one["shared"]["loss"]  # NaN arrives as NaN
    assert [one["before"] for one in found] == [[], ["turn-0"], ["turn-0"]]


def _lose_the_last(ranks: Ranks, folder: Path) -> None:
    if ranks.rank == ranks.ranks - 1:
        raise SystemExit(7)
    try:
        ranks.sum_([torch.ones(3)])
    except LostError as error:
        note(folder, ranks, line=str(error))
        raise SystemExit(2) from None


def test_a_lost_process_is_not_waited_for(tmp_path: Path) -> None:
    assert in_processes(_lose_the_last, tmp_path) == [2, 7]
    line = json.loads((tmp_path / "0.json").read_text())["line"]
    assert re.match(r"process 1 of 2 \(pid \d+ on .*\) has ended; stopping: a resumed training run continues", line)
    assert "\n" not in line


def _lose_the_first(ranks: Ranks, folder: Path) -> None:
    if ranks.leads:
        raise SystemExit(9)
    with ranks.watching("in the evaluation after step 7"):
        try:
            ranks.share(str)
        except LostError as error:
            note(folder, ranks, line=str(error))
            raise SystemExit(2) from None


def test_the_others_stop_with_rank_0(tmp_path: Path) -> None:
    """Although the store of the heartbeats is gone with it, one of them prints why."""
    assert in_processes(_lose_the_first, tmp_path, count=3) == [9, 2, 2]
    line = json.loads((tmp_path / "1.json").read_text())["line"]
    assert re.match(r"process 0 of 3 \(pid \d+ on .*\) has ended, noticed in the evaluation after step 7; ", line)
    assert not (tmp_path / "2.json").exists()


def _refuse(ranks: Ranks, folder: Path) -> None:
    with ranks.watching():
        if ranks.rank == 1:
            raise ConfigError("wrong")
        try:
            ranks.barrier()
        except LostError:
            note(folder, ranks)
            raise


def test_only_the_failing_process_prints_why(tmp_path: Path) -> None:
    assert in_processes(_refuse, tmp_path, count=3) == [2, 1, 2] and not list(tmp_path.glob("*.json"))


def _hang(ranks: Ranks, folder: Path, who: int, how: str) -> None:
    sys.stderr = open(folder / f"{ranks.rank}.err", "w")  # noqa: SIM115 — until the process ends
    ranks.barrier()
    if ranks.rank == who:
        note(folder, ranks, pid=os.getpid())
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "hanging":  # its threads continue
            time.sleep(60)
    with ranks.watching("at step 3", step=True):
        if ranks.rank == who:
            time.sleep(60)
        torch.distributed.all_reduce(torch.ones(3))  # as torch's modules do


def _kill_after_other(folder: Path, who: int) -> None:
    """Kill a stopped process once the other one has ended."""
    end = time.monotonic() + 40
    while time.monotonic() < end and not (folder / f"{1 - who}.err").exists():
        time.sleep(0.05)
    while time.monotonic() < end and "stopping" not in (folder / f"{1 - who}.err").read_text():
        time.sleep(0.05)
        if "stopping" in (folder / f"{who}.err").read_text():
            return  # it has ended without
    os.kill(json.loads((folder / f"{who}.json").read_text())["pid"], signal.SIGKILL)


@pytest.mark.parametrize(("who", "how"), spread([(1, "stopped"), (0, "stopped"), (1, "hanging"), (0, "in a step")], 2))
def test_a_hanging_process_is_given_up(tmp_path: Path, who: int, how: str) -> None:
    started = time.monotonic()
    killer = threading.Thread(target=_kill_after_other, args=(tmp_path, who))
    killer.start()
    codes = in_processes(_hang, tmp_path, who, how, patience=2)
    killer.join()
    assert codes[1 - who] == 2 and time.monotonic() - started < 30
    lines = (tmp_path / f"{1 - who}.err").read_text().splitlines()
    if how == "in a step":  # all are in it: rank 0 can't know which of them hangs, but where each of them is
        line = (tmp_path / "0.err").read_text()
        assert line.startswith("weft: none of 2 processes has made progress for 2 seconds at step 3 (process 0 in ")
        assert re.search(r"process 0 in parallel/test_ranks.py:\d+, process 1 in distributed/.*py:\d+\)", line)
        assert lines == []
        return
    assert len(lines) == 1 and re.match(rf"weft: process {who} of 2 \(pid \d+ on .*\)", lines[0])
    waiting = "has kept the others waiting" if how == "hanging" else "has not answered"
    assert f"{waiting} for 2 seconds; stopping" in lines[0]


def _evaluate_long(ranks: Ranks, folder: Path) -> None:
    """Let rank 0 work alone for longer than a silent process is waited for; then the other leaves early."""

    def evaluate() -> str:
        time.sleep(3)
        return "evaluated"

    result = ranks.share(evaluate)
    if ranks.leads:
        time.sleep(2)
    note(folder, ranks, result=result)


@pytest.mark.slow
def test_rank_0_may_work_alone(tmp_path: Path) -> None:
    assert in_processes(_evaluate_long, tmp_path, patience=1) == [0, 0]
    assert [one["result"] for one in noted(tmp_path)] == ["evaluated"] * 2


# ---- one process


def test_alone_nothing_happens() -> None:
    tensor, before = torch.ones(2), torch.get_rng_state()
    ALONE.sum_([tensor])
    ALONE.barrier()
    with ALONE.leader_first():
        assert tensor.tolist() == [1.0, 1.0]
    assert torch.equal(torch.get_rng_state(), before)
    value = object()
    assert ALONE.share(lambda: value) is value
    assert (ALONE.total(3, torch.device("cpu")), ALONE.min(4), ALONE.max(5)) == (3, 4, 5)


@pytest.mark.parametrize("environment", [{}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}])
def test_a_single_process_is_alone(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert join.__wrapped__() is ALONE
    assert not torch.distributed.is_initialized() and not ending()


def test_buckets_keep_order_and_dtype() -> None:
    tensors = [torch.zeros(2), torch.zeros(2), torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.zeros(9)]
    sizes = [[tensor.numel() for tensor in bucket] for bucket in _buckets(tensors, 16)]
    assert sizes == [[2, 2], [1], [1], [9]]


@pytest.mark.parametrize("given", ["soon", "0", "-1", "inf", "nan"])
def test_an_invalid_patience_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_PATIENCE", given)
    with pytest.raises(ConfigError, match=f"WEFT_PATIENCE = '{given}': expected how many seconds"):
        patience()
