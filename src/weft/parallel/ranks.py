"""The process group of a distributed run: ranks, sums over ranks, and small values that all ranks agree on.

torchrun starts the processes and gives each its rank. With a single process nothing in this file does anything. Large
tensors travel on the device that they are on (NCCL between GPUs). Text, small integers and barriers go through host
memory (Gloo), where waiting keeps no GPU busy.
"""

import atexit
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, distributed

from weft.errors import ConfigError, LostError, WeftError
from weft.parallel.heartbeat import FAILED, STOPPED, Heartbeat, patience

T = TypeVar("T")
P = ParamSpec("P")
BUCKET_BYTES = 64 << 20  # largest bucket of an all-reduce: few large messages are faster than many small ones
# Rank 0 may prepare a large text while the others wait in a collective; `heartbeat.py` notices if it stops running.
TIMEOUT = timedelta(days=1)


class PeerWatch:
    """Turns the loss of another process into one message, from whichever thread notices it. `join` creates it."""

    def __init__(self, heartbeat: Heartbeat):
        self._heartbeat, self._lock, self._thread = heartbeat, threading.Lock(), threading.local()
        self.error: BaseException | None = None  # this process ends with it, because another one is gone

    @contextmanager
    def watching(self, where: str = "", *, step: bool = False, collective: bool = False) -> Iterator[None]:
        """Raise one error in all threads if a process is lost inside; report an error of this process to the others."""
        heartbeat = self._heartbeat
        nested: list[str] = vars(self._thread).setdefault("nested", [])
        nested.append(where or (nested[-1] if nested else ""))
        heartbeat.count(collectives=int(collective), progress=1, watched=1)
        if step:
            heartbeat.step = where
        try:
            yield
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            with self._lock:
                self.error = self.error or self._loss(nested[-1])
            raise self.error from error
        except WeftError as error:
            if len(nested) == 1 and not isinstance(error, LostError):  # it will be printed: the others need not
                self._stop_with(FAILED)
                atexit.register(distributed.destroy_process_group)  # runs before `keep_store`
            raise
        finally:
            nested.pop()
            heartbeat.count(watched=-1)
            if step:
                heartbeat.step = ""

    def leave(self) -> None:
        """Leave the process group at the end of this process."""
        self._heartbeat.leave()
        distributed.destroy_process_group()  # delivers what was sent to the others first

    def _stop_with(self, report: str) -> None:
        self._heartbeat.leave(report)
        atexit.unregister(self.leave)
        atexit.register(self._heartbeat.keep_store)

    def _loss(self, where: str) -> BaseException:
        """Return the error that names the lost processes, or SystemExit if another process prints it."""
        heartbeat = self._heartbeat
        gone, reported = heartbeat.missing(), heartbeat.left
        self._stop_with(STOPPED)
        if reported or heartbeat.explained or not heartbeat.speaks(gone):
            return SystemExit(2)
        who = " and ".join(heartbeat.name(rank) for rank in gone)
        line = f"{who} {'has' if len(gone) == 1 else 'have'} ended" if gone else "another process can't be reached"
        return LostError(
            f"{line}{f', noticed {where}' if where else ''}; stopping: a resumed training run continues from its last "
            "checkpoint (WEFT_DEBUG=1 shows the underlying error)"
        )


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error means that another process can't be reached, rather than a failure of this one."""
    unreachable = isinstance(error, distributed.DistError) or "gloo" in str(error).lower()
    return unreachable and not isinstance(error, torch.OutOfMemoryError)


@dataclass(frozen=True)
class Ranks:
    """The rank of this process among all `ranks`, or those of a `group`. Rank 0 leads: it writes and decides."""

    rank: int = 0
    ranks: int = 1
    group: Any = None
    watch: PeerWatch | None = field(default=None, repr=False, compare=False)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.ranks == 1

    @torch.no_grad()
    def sum_(self, tensors: Sequence[Tensor], bucket_bytes: int = BUCKET_BYTES) -> None:
        """All-reduce tensors of the same shapes and order in place, to the same bits, without waiting for a GPU."""
        if self.alone:
            return
        with self._collective():
            for bucket in _buckets(tensors, bucket_bytes):
                if len(bucket) == 1 and bucket[0].is_contiguous():
                    distributed.all_reduce(bucket[0], group=self.group)
                    continue
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                distributed.all_reduce(flat, group=self.group)
                parts = flat.split([tensor.numel() for tensor in bucket])
                torch._foreach_copy_(list(bucket), [p.view_as(t) for p, t in zip(parts, bucket, strict=True)])

    def all_to_all(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send a range of `flat` to each rank, and return what all ranks have sent here, by rank. `sent` and `received`
        are the numbers of elements."""
        arrived = flat.new_empty(sum(received))
        with self._collective():
            distributed.all_to_all_single(arrived, flat, list(received), list(sent), group=self.group)
        return arrived

    def total(self, number: int, device: torch.device) -> int | Tensor:
        """Return the sum of a number over all ranks: on the device, (), without waiting; alone, the number itself."""
        if self.alone:
            return number
        total = torch.full((), number, dtype=torch.int64, device=device)
        self.sum_([total])
        return total

    def min(self, number: int) -> int:
        """Return the smallest of all ranks' numbers."""
        return self._reduce(number, distributed.ReduceOp.MIN)

    def max(self, number: int) -> int:
        """Return the largest of all ranks' numbers."""
        return self._reduce(number, distributed.ReduceOp.MAX)

    def _reduce(self, number: int, operation: Any) -> int:
        if self.alone:
            return number
        reduced = torch.tensor([number])
        with self._collective():
            distributed.all_reduce(reduced, operation, group=self.group)
        return int(reduced)

    def share(self, make: Callable[[], T]) -> T:
        """Return rank 0's `make()` on every rank; the others do not call it. It travels as JSON."""
        if self.alone:
            return make()
        text = [json.dumps(make(), default=float) if self.leads else ""]
        with self._collective():
            distributed.broadcast_object_list(text, 0, group=self.group, device=torch.device("cpu"))
        return cast(T, json.loads(text[0]))

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank. They travel as JSON."""
        if self.alone:
            return [value]
        texts: list[Any] = [None] * self.ranks
        with self._collective():
            distributed.all_gather_object(texts, json.dumps(value), group=self.group)
        return [json.loads(text) for text in texts]

    def broadcast_(self, tensor: Tensor) -> None:
        """Overwrite every rank's tensor, on the host, with rank 0's."""
        if not self.alone:
            with self._collective():
                distributed.broadcast(tensor, 0, group=self.group)

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.max(0)

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        """Run the body on rank 0 first, and on the others once it has finished there."""
        if not self.leads:
            self.barrier()
        yield
        if self.leads:
            self.barrier()

    def watching(self, where: str = "", *, step: bool = False) -> AbstractContextManager[None]:
        """Watch the other processes while torch may wait for them.

        If one has ended, one of those left names it, and `where` that was noticed, and all stop. In a `step` no process
        works alone: all stop as well if none of them makes progress for as long as a silent process is waited for.
        """
        return nullcontext() if self.watch is None else self.watch.watching(where, step=step)

    def _collective(self) -> AbstractContextManager[None]:
        return nullcontext() if self.watch is None else self.watch.watching(collective=True)


ALONE = Ranks()


def _buckets(tensors: Sequence[Tensor], max_bytes: int) -> Iterator[list[Tensor]]:
    """Yield tensors in order, in buckets of one dtype and device of at most `max_bytes`, or of a single tensor."""
    bucket, size = list[Tensor](), 0
    for tensor in tensors:
        fits = bucket and (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)
        if bucket and (not fits or size + tensor.nbytes > max_bytes):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


@cache
def join() -> Ranks:
    """Join the process group that torchrun started, once per process; without torchrun return `ALONE`. On a machine
    with GPUs each process takes the GPU of its local rank as its current device."""
    variables = {key: os.environ.get(key, "") for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    if not all(variables.values()) or variables["WORLD_SIZE"] == "1":
        return ALONE
    backend = "gloo"
    if torch.cuda.is_available():
        local, devices = int(os.environ.get("LOCAL_RANK", variables["RANK"])), torch.cuda.device_count()
        if local >= devices:
            raise ConfigError(
                f"process {local + 1} of this machine has no GPU: there {'is' if devices == 1 else 'are'} {devices}; "
                f"start as many processes with torchrun --nproc-per-node {devices}"
            )
        torch.cuda.set_device(local)
        backend = "cpu:gloo,cuda:nccl"
    seconds = patience()
    timeout = timedelta(seconds=max(60.0, seconds))  # processes take a while to start
    try:
        # each attempt has its own prefix in torchrun's store, where the last attempt left its addresses (torch 2.13)
        store, rank, size = next(iter(distributed.rendezvous("env://", timeout=timeout)))
        store = distributed.PrefixStore(f"attempt {restarts()}", store)
        _await_all(store, rank, size, timeout=timeout)
        distributed.init_process_group(backend=backend, timeout=TIMEOUT, store=store, rank=rank, world_size=size)
        # over a second connection, since the main thread may be waiting on the first one
        heartbeat = Heartbeat(store.clone(), rank, size, seconds)  # type: ignore[attr-defined]
        heartbeat.start()
    except (RuntimeError, ValueError) as error:
        address = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
        reason = str(error).splitlines()[0]
        raise ConfigError(f"process {variables['RANK']} can't reach the others at {address}: {reason}") from error
    watch = PeerWatch(heartbeat)
    atexit.register(watch.leave)
    ranks = Ranks(rank, size, watch=watch)
    ranks.barrier()  # a process that fails immediately must not be gone before the last one has found the others
    return ranks


def watched(function: Callable[P, T]) -> Callable[P, T]:
    """Join the process group, if torchrun started one, and watch it while `function` runs."""

    @wraps(function)
    def watching(*args: P.args, **kwargs: P.kwargs) -> T:
        with join().watching():
            return function(*args, **kwargs)

    return watching


def ending() -> bool:
    """Return whether this process is ending because another one is gone."""
    watch = join().watch if join.cache_info().currsize else None
    return watch is not None and watch.error is not None


def _await_all(store: distributed.Store, rank: int, size: int, *, timeout: timedelta) -> None:
    """Wait for all processes for `timeout` at most; the process group's own time-out is a day."""
    store.set(f"here/{rank}", "")
    keys = [f"here/{other}" for other in range(size)]
    try:
        store.wait(keys, timeout)
    except distributed.DistStoreError:
        late = ", ".join(str(other) for other, key in enumerate(keys) if not store.check([key]))
        raise RuntimeError(f"process {late} has not come within {timeout.seconds} seconds (WEFT_PATIENCE)") from None


def restarts() -> int:
    """Return how often torchrun has restarted this job's processes (`--max-restarts`)."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(count) if count.isdigit() else 0


def job() -> str | None:
    """Return a name that the job keeps when its processes are restarted; None outside of torchrun."""
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"agent {os.getppid()}" if name == "none" else name  # a job without a name: the torchrun that waits for it
