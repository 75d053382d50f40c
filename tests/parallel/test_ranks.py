"""What processes agree on: sums, words, who is first, and what happens when one of them is gone."""

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

from weft.errors import ConfigError, LostError
from weft.parallel import ranks as ranks_module
from weft.parallel.heartbeat import patience
from weft.parallel.ranks import ALONE, Ranks, _buckets, join

ENVIRONMENT: dict[str, str] = {}  # of the processes that `together` starts


def together(work: Callable[..., None], folder: Path, *given: Any, count: int = 2) -> list[int | None]:
    """Call `work(ranks, folder, *given)` in each of `count` processes, as torchrun would start them; how they ended."""
    context = multiprocessing.get_context("forkserver")  # imports are made once, and no thread is forked
    context.set_forkserver_preload(["torch._dynamo", "tests.parallel.warm"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = port, {**ENVIRONMENT}
    processes = [context.Process(target=_one, args=(work, rank, count, place, folder, given)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def _one(
    work: Callable[..., None], rank: int, count: int, place: tuple[int, dict[str, str]], folder: Path, given: Any
) -> None:
    port, environment = place
    os.environ |= environment
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    try:
        work(join(), folder, *given)
    finally:
        atexit._run_exitfuncs()  # as at the end of any other process; multiprocessing ends its own without


def note(folder: Path, ranks: Ranks, **found: Any) -> None:
    """Leave what a process found for the test to read."""
    (folder / f"{ranks.rank}.json").write_text(json.dumps(found))


def noted(folder: Path, count: int = 2) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


# ---- three processes


def _talk(ranks: Ranks, folder: Path) -> None:
    mine = float(ranks.rank + 1)
    ranks_module.BUCKET = 40  # bytes: several buckets, and one tensor larger than any
    shapes = [(2, 3), (1,), (), (30,), (4,)]
    tensors = [torch.full(shape, mine * (place + 1)) for place, shape in enumerate(shapes)]
    tensors += [torch.full((3,), ranks.rank, dtype=torch.int64), torch.full((2, 2), mine).T]
    tensors.append(torch.arange(6.0).reshape(2, 3).T * mine)  # not contiguous
    ranks.sum_(tensors)
    first = []
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
        ends=[ranks.least(10 - ranks.rank), ranks.most(10 - ranks.rank)],
        shared=ranks.share(lambda: {"who": ranks.rank, "text": "Fäden ✓", "loss": float("nan"), "none": None}),
        before=first,
    )
    ranks.wait()


def test_processes_agree(tmp_path: Path) -> None:
    assert together(_talk, tmp_path, count=3) == [0, 0, 0]
    found = noted(tmp_path, 3)
    expected = [torch.full(shape, 6.0 * (place + 1)) for place, shape in enumerate([(2, 3), (1,), (), (30,), (4,)])]
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


def test_who_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    assert together(_lose_the_last, tmp_path) == [2, 7]
    line = json.loads((tmp_path / "0.json").read_text())["line"]
    assert re.match(r"process 1 of 2 \(pid \d+ on .*\) has ended; stopping: a resumed training run continues", line)
    assert "\n" not in line


def _lose_the_first(ranks: Ranks, folder: Path) -> None:
    if ranks.leads:
        raise SystemExit(9)
    with ranks_module.reaching("in the evaluation after step 7"):
        try:
            ranks.share(str)
        except LostError as error:
            note(folder, ranks, line=str(error))
            raise SystemExit(2) from None


def test_those_who_follow_stop_with_the_first(tmp_path: Path) -> None:
    """The store in which they tell of each other is gone with it; one of them says so all the same."""
    assert together(_lose_the_first, tmp_path, count=3) == [9, 2, 2]
    line = json.loads((tmp_path / "1.json").read_text())["line"]
    assert re.match(r"process 0 of 3 \(pid \d+ on .*\) has ended, noticed in the evaluation after step 7; ", line)
    assert not (tmp_path / "2.json").exists()


def _refuse(ranks: Ranks, folder: Path) -> None:
    with ranks_module.reaching():
        if ranks.rank == 1:
            raise ConfigError("wrong")
        try:
            ranks.wait()
        except LostError:
            note(folder, ranks)
            raise


def test_who_says_why_it_ends_is_enough(tmp_path: Path) -> None:
    assert together(_refuse, tmp_path, count=3) == [2, 1, 2] and not list(tmp_path.glob("*.json"))


def _stand_still(ranks: Ranks, folder: Path, who: int, how: str) -> None:
    sys.stderr = open(folder / f"{ranks.rank}.err", "w")  # noqa: SIM115 — the process's own until it ends
    ranks.wait()
    if ranks.rank == who:
        note(folder, ranks, pid=os.getpid())
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how == "hanging":  # its threads go on
            time.sleep(60)
    with ranks_module.reaching("at step 3", step=True):
        if ranks.rank == who:
            time.sleep(60)
        torch.distributed.all_reduce(torch.ones(3))  # as torch's own modules do


def _waited_for(folder: Path, who: int) -> None:
    """Let a process that was stopped end, once the other has ended."""
    end = time.monotonic() + 40
    while time.monotonic() < end and not (folder / f"{1 - who}.err").exists():
        time.sleep(0.05)
    while time.monotonic() < end and "stopping" not in (folder / f"{1 - who}.err").read_text():
        time.sleep(0.05)
        if "stopping" in (folder / f"{who}.err").read_text():
            return  # it has ended by itself
    os.kill(json.loads((folder / f"{who}.json").read_text())["pid"], signal.SIGKILL)


@pytest.mark.parametrize(("who", "how"), [(1, "stopped"), (0, "stopped"), (1, "hanging"), (0, "in a step")])
def test_who_stands_still_is_not_waited_for_all_day(
    tmp_path: Path, who: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = time.monotonic()
    monkeypatch.setattr(sys.modules[__name__], "ENVIRONMENT", {"WEFT_PATIENCE": "2"})
    end = threading.Thread(target=_waited_for, args=(tmp_path, who))
    end.start()
    codes = together(_stand_still, tmp_path, who, how)
    end.join()
    assert codes[1 - who] == 2 and time.monotonic() - started < 30
    lines = (tmp_path / f"{1 - who}.err").read_text().splitlines()
    if how == "in a step":  # all are in it: the first one can't say which of them hangs, but where each of them is
        line = (tmp_path / "0.err").read_text()
        assert line.startswith("weft: none of 2 processes has gone on for 2 seconds at step 3 (process 0 in ")
        assert re.search(r"process 0 in parallel/test_ranks.py:\d+, process 1 in distributed/.*py:\d+\)", line)
        assert lines == []
        return
    assert len(lines) == 1 and re.match(rf"weft: process {who} of 2 \(pid \d+ on .*\)", lines[0])
    waiting = "has kept the others waiting" if how == "hanging" else "has not answered"
    assert f"{waiting} for 2 seconds; stopping" in lines[0]


def _evaluate_long(ranks: Ranks, folder: Path) -> None:
    """The first process works alone for longer than anybody silent would be waited for; then the other leaves early."""
    found = ranks.share(lambda: time.sleep(3) or "evaluated")
    if ranks.leads:
        time.sleep(2)
    note(folder, ranks, found=found)


@pytest.mark.slow
def test_the_first_may_work_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ENVIRONMENT", {"WEFT_PATIENCE": "1"})
    assert together(_evaluate_long, tmp_path) == [0, 0]
    assert [one["found"] for one in noted(tmp_path)] == ["evaluated"] * 2


# ---- one process


def test_alone_nothing_happens() -> None:
    tensor, before = torch.ones(2), torch.get_rng_state()
    ALONE.sum_([tensor])
    ALONE.wait()
    with ALONE.leader_first():
        assert tensor.tolist() == [1.0, 1.0]
    assert torch.equal(torch.get_rng_state(), before)
    made = object()
    assert ALONE.share(lambda: made) is made
    assert (ALONE.total(3, torch.device("cpu")), ALONE.least(4), ALONE.most(5)) == (3, 4, 5)


@pytest.mark.parametrize("environment", [{}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}])
def test_a_single_process_joins_nobody(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert join.__wrapped__() is ALONE
    assert not torch.distributed.is_initialized()


def test_buckets_keep_order_and_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "BUCKET", 16)
    tensors = [torch.zeros(2), torch.zeros(2), torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.zeros(9)]
    sizes = [[tensor.numel() for tensor in bucket] for bucket in _buckets(tensors)]
    assert sizes == [[2, 2], [1], [1], [9]]


@pytest.mark.parametrize("given", ["soon", "0", "-1", "inf", "nan"])
def test_a_time_to_wait_that_is_none_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_PATIENCE", given)
    with pytest.raises(ConfigError, match=f"WEFT_PATIENCE = '{given}': expected how many seconds"):
        patience()
