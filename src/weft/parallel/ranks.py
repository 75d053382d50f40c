"""Several processes that train one model together: each reads its part of every batch, and sums are taken over all.

torchrun starts the processes and gives each its rank. What they have to agree on goes through here; everything above
is written as for one process, for which nothing in this file does anything.

Large tensors travel on the device that they are on (NCCL between GPUs). Words, numbers to agree on and waiting go
through the processors' memory (Gloo), where waiting keeps no GPU busy.
"""

import atexit
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed

from weft.errors import ConfigError, LostError, WeftError
from weft.parallel.heartbeat import FAILED, STOPPED, Heartbeat, patience

T = TypeVar("T")
BUCKET = 64 << 20  # bytes that travel at once: few large messages are faster than many small ones
# The first process may prepare a large text while the others wait. Whether it still runs is `heartbeat.py`'s to notice.
PATIENCE = timedelta(days=1)


@dataclass(frozen=True)
class Ranks:
    """This process among `ranks` of them: all, or those of a `group`. Rank 0 of all leads: it writes and decides."""

    rank: int = 0
    ranks: int = 1
    group: Any = None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.ranks == 1

    @torch.no_grad()
    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Put the sum over all processes in each tensor's place; all processes give the same shapes in the same order.
        Every process ends with the same bits. On a GPU the host doesn't wait."""
        if self.alone:
            return
        with self._together():
            for bucket in _buckets(tensors):
                if len(bucket) == 1 and bucket[0].is_contiguous():
                    distributed.all_reduce(bucket[0], group=self.group)
                    continue
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                distributed.all_reduce(flat, group=self.group)
                parts = flat.split([tensor.numel() for tensor in bucket])
                torch._foreach_copy_(list(bucket), [p.view_as(t) for p, t in zip(parts, bucket, strict=True)])

    def total(self, number: int, device: torch.device) -> int | Tensor:
        """The sum of a number over all processes: as () on the device, which nobody waits for; alone, the number."""
        if self.alone:
            return number
        there = torch.full((), number, dtype=torch.int64, device=device)
        self.sum_([there])
        return there

    def least(self, number: int) -> int:
        return self._agree(number, "MIN")

    def most(self, number: int) -> int:
        return self._agree(number, "MAX")

    def _agree(self, number: int, how: str) -> int:
        if self.alone:
            return number
        there = torch.tensor([number])
        with self._together():
            distributed.all_reduce(there, getattr(distributed.ReduceOp, how), group=self.group)
        return int(there)

    def share(self, make: Callable[[], T]) -> T:
        """What `make` gives on rank 0, on every rank; the others don't call it. It travels as JSON."""
        if self.alone:
            return make()
        text = [json.dumps(make(), default=float) if self.leads else ""]
        with self._together():
            distributed.broadcast_object_list(text, 0, group=self.group, device=torch.device("cpu"))
        return cast(T, json.loads(text[0]))

    def gather(self, value: T) -> list[T]:
        """The value of every process, by rank. They travel as JSON."""
        if self.alone:
            return [value]
        texts: list[Any] = [None] * self.ranks
        with self._together():
            distributed.all_gather_object(texts, json.dumps(value), group=self.group)
        return [json.loads(text) for text in texts]

    def give(self, tensor: Tensor) -> None:
        """Put rank 0's tensor in the place of everyone's; it is on the host."""
        if not self.alone:
            with self._together():
                distributed.broadcast(tensor, 0, group=self.group)

    def wait(self) -> None:
        """Until all processes are here."""
        self._agree(0, "MAX")

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        """What is done inside is done by rank 0 first, and by the others when it is through."""
        if not self.leads:
            self.wait()
        yield
        if self.leads:
            self.wait()

    @contextmanager
    def _together(self) -> Iterator[None]:
        _heart[0].count(common=1)
        with reaching():
            yield


@contextmanager
def reaching(where: str = "", step: bool = False) -> Iterator[None]:
    """Inside, torch may wait for the other processes. One that has ended can't be waited for: one of those that are
    left says who it was and `where` that was noticed, and all stop.

    In a `step` no process works alone: where none of them goes on for as long as a silent one is waited for, they stop.
    """
    outer = _place.where
    _place.where = where or outer
    _place.depth += 1
    if _heart:
        _heart[0].count(progress=1, inside=1)
        _heart[0].step = where if step else _heart[0].step
    try:
        yield
    except RuntimeError as error:
        if not _heart or not lost(error):
            raise
        with _stopping:  # the same for all threads that notice it
            if not _end:
                _end.append(_noticed(_place.where))
        raise _end[0] from error
    except WeftError as error:
        if _heart and _place.depth == 1 and not isinstance(error, LostError):  # a person reads it: that is enough
            _heart[0].leave(FAILED)
            atexit.unregister(_leave)
            atexit.register(_heart[0].end_last)
            atexit.register(distributed.destroy_process_group)  # before that
        raise
    finally:
        _place.where = outer
        _place.depth -= 1
        if _heart:
            _heart[0].count(inside=-1)
            _heart[0].step = "" if step else _heart[0].step


class _Place(threading.local):
    """Where a thread is while it reaches others, and how often it has begun to."""

    where = ""
    depth = 0


def lost(error: BaseException) -> bool:
    """Whether an error means that another process can't be reached; anything else is an error of this one's own."""
    away = isinstance(error, distributed.DistError) or "gloo" in str(error).lower()
    return away and not isinstance(error, torch.OutOfMemoryError)


def ending() -> bool:
    """Whether this process ends because another one is gone."""
    return bool(_end)


def _noticed(where: str) -> BaseException:
    heart = _heart[0]
    gone, said = heart.missing(), heart.left
    heart.leave(STOPPED)
    atexit.unregister(_leave)
    atexit.register(heart.end_last)
    if said or heart.explained or not heart.speaks(gone):
        return SystemExit(2)
    who = " and ".join(heart.name(rank) for rank in gone)
    line = f"{who} {'has' if len(gone) == 1 else 'have'} ended" if gone else "another process can't be reached any more"
    return LostError(
        f"{line}{f', noticed {where}' if where else ''}; stopping: a resumed training run continues from its last "
        "checkpoint (WEFT_DEBUG=1 shows the error that was met here)"
    )


ALONE = Ranks()
_heart: list[Heartbeat] = []  # this process's, once it has joined others
_place = _Place()
_stopping = threading.Lock()
_end: list[BaseException] = []  # what this process ends with


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in order, in groups of one kind that hold at most BUCKET bytes, or a single larger one."""
    bucket, size = list[Tensor](), 0
    for tensor in tensors:
        alike = bucket and (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not alike or size + tensor.nbytes > BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


@cache
def join() -> Ranks:
    """Take this process's place among those that torchrun started; without torchrun it is alone. On a machine with GPUs
    each process has the one of its local rank, from here on the current one."""
    given = {key: os.environ.get(key, "") for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    if not all(given.values()) or given["WORLD_SIZE"] == "1":
        return ALONE
    place: dict[str, Any] = {"backend": "gloo"}
    if torch.cuda.is_available():
        local, devices = int(os.environ.get("LOCAL_RANK", given["RANK"])), torch.cuda.device_count()
        if local >= devices:
            raise ConfigError(
                f"process {local + 1} of this machine has no GPU of its own: there {'is' if devices == 1 else 'are'} "
                f"{devices}; start as many processes with torchrun --nproc-per-node {devices}"
            )
        torch.cuda.set_device(local)
        place = {"backend": "cpu:gloo,cuda:nccl"}
    seconds = patience()
    starting = timedelta(seconds=max(60.0, seconds))  # which takes a while
    try:
        # each attempt has a place of its own in torchrun's store, where the one before left its addresses (torch 2.13)
        store, rank, size = next(iter(distributed.rendezvous("env://", timeout=starting)))
        store = distributed.PrefixStore(f"attempt {restarts()}", store)
        _meet(store, rank, size, starting)
        distributed.init_process_group(**place, timeout=PATIENCE, store=store, rank=rank, world_size=size)
        # a connection of its own: nobody waits for what the main thread waits for
        own = store.clone()  # type: ignore[attr-defined]
        heart = Heartbeat(own, rank, size, seconds, inside=_place.depth)
        heart.start()
    except (RuntimeError, ValueError) as error:
        address = f"{given['MASTER_ADDR']}:{given['MASTER_PORT']}"
        reason = str(error).splitlines()[0]
        raise ConfigError(f"process {given['RANK']} can't reach the others at {address}: {reason}") from error
    _heart[:] = [heart]
    atexit.register(_leave)
    ranks = Ranks(rank, size)
    ranks.wait()  # one that fails at once must not be gone before the last one has found the others
    return ranks


def _meet(store: distributed.Store, rank: int, size: int, starting: timedelta) -> None:
    """Wait until all are here; one that doesn't come is not waited for all day."""
    store.set(f"here/{rank}", "")
    keys = [f"here/{other}" for other in range(size)]
    try:
        store.wait(keys, starting)
    except distributed.DistStoreError:
        late = ", ".join(str(other) for other, key in enumerate(keys) if not store.check([key]))
        raise RuntimeError(f"process {late} has not come within {starting.seconds} seconds (WEFT_PATIENCE)") from None


def _leave() -> None:
    _heart[0].leave()
    distributed.destroy_process_group()  # what was sent to the others arrives first


def restarts() -> int:
    """How often torchrun has started this job's processes again (`--max-restarts`)."""
    given = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(given) if given.isdigit() else 0


def job() -> str | None:
    """A name that a job keeps when its processes are started again; None outside of torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"agent {os.getppid()}" if name == "none" else name  # without a name of its own: the torchrun that waits
