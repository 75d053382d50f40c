"""Before the long work: a step, one pass of evaluation, one checkpoint written and read back.

What would fail after hours fails in the first seconds: a batch that doesn't fit in memory, an evaluation that needs
more than training does, a disk without room. The checkpoint is written first and read back last, which puts weights,
moments and random generators back bit for bit: the run that follows is the run that would have been.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import optim

from weft.data.batch import Batch
from weft.errors import RunError, out_of_memory
from weft.explain.units import byte_size
from weft.models.base import LanguageModel
from weft.runs import checkpoint
from weft.training.loader import Feed

FULL = 0.92  # of a GPU's memory: "auto" leaves the rest to what varies from step to step


@dataclass(frozen=True)
class Findings:
    """What the pre-flight measured: rows at a time; bytes of a checkpoint, free on the disk, of memory; seconds."""

    micro: int
    checkpoint: int
    free: int
    memory: int
    seconds: float

    def crowded(self, keep: int) -> str | None:
        """A warning where the disk won't hold `keep` checkpoints, the best one, and one that is being written."""
        if self.free >= (keep + 2) * self.checkpoint:
            return None
        return (
            f"the disk has {byte_size(self.free)} left, and checkpoint.keep = {keep} needs up to "
            f"{byte_size((keep + 2) * self.checkpoint)}; some checkpoints may fail"
        )

    def __str__(self) -> str:
        return (
            f"a step, an evaluation and a checkpoint ({byte_size(self.checkpoint)}) went well in {self.seconds:.1f} s, "
            f"with {byte_size(self.memory)} of memory at most"
        )


def preflight(
    scratch: Path,
    model: LanguageModel,
    optimizer: optim.Optimizer,
    notes: Mapping[str, Any],
    batches: Feed,
    auto: bool,
    first: int,
    step: Callable[[list[Batch]], object],
    evaluate: Callable[[], object],
    device: torch.device,
) -> Findings:
    """Try everything once in the folder `scratch`, which is removed again. The run's state is as before afterwards.

    `step` makes the update of the given pieces, which are those of step `first`; with `auto` they are halved until
    they fit. Otherwise a batch that doesn't fit is an error that names the pieces which would.
    """
    began = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        saved = checkpoint.save(scratch, 0, model, optimizer, notes, keep=1)
        micro = _fitting(batches, auto, first, step, optimizer, device)
        room = checkpoint.needed(model, optimizer)  # only now are there moments
        free = shutil.disk_usage(scratch).free
        if free < room:
            raise RunError(
                f"{scratch.parent}: {byte_size(free)} left on the disk; a checkpoint needs {byte_size(room)}"
            )
        checkpoint.try_moments(scratch, model, optimizer)
        try:
            with one_pass(model):
                evaluate()
        except Exception as error:
            if not out_of_memory(error):
                raise
            raise RunError(
                "the evaluation runs out of memory although training fits; shorten batch.length or use a smaller model"
            ) from None
        checkpoint.load(saved, model, optimizer)
    finally:
        optimizer.zero_grad(set_to_none=True)
        shutil.rmtree(scratch, ignore_errors=True)
    return Findings(micro, room, free, peak_memory(device), time.perf_counter() - began)


def _fitting(
    batches: Feed,
    auto: bool,
    first: int,
    step: Callable[[list[Batch]], object],
    optimizer: optim.Optimizer,
    device: torch.device,
) -> int:
    """The pieces to cut the batch into: as the recipe says if that fits, else an error or, with `auto`, what fits."""

    def fits(micro: int) -> bool:
        try:
            # twice: moments come with the first update, and only then a compiled step is recorded
            step(batches.cut(micro).parts(first))
            step(batches.cut(micro).parts(first))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as error:
            if not out_of_memory(error):
                raise
            roomy = False
        else:
            roomy = not auto or micro == 1 or device.type != "cuda" or _share(device) <= FULL
        if not roomy:
            optimizer.zero_grad(set_to_none=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(device)
        return roomy

    wanted = micro = batches.micro
    while not fits(micro):
        if micro == 1:
            raise RunError(
                f"{_place(device)} has too little memory for one {batches.row}; shorten batch.length, "
                "set batch.recompute=true or use a smaller model"
            )
        micro = -(-micro // 2)
    if micro < wanted and not auto:
        raise RunError(
            f"batch.micro = {wanted}: {wanted} times a {batches.row} do not fit at once in the memory of "
            f"{_place(device)}; batch.micro={micro} does, with the same gradient (batch.micro=auto finds it)"
        )
    return micro


class _Enough(BaseException):  # no error, and no evaluator may take it for one
    """An evaluation has read its first batch."""


@contextmanager
def one_pass(model: LanguageModel) -> Iterator[None]:
    """End what is done inside when it wants to read a second batch: the first has shown whether it fits."""
    read, own, passes = model.features, vars(model).get("features"), 0

    def features(*args: Any, **given: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        if passes > 1:
            raise _Enough
        return read(*args, **given)

    model.features = features
    try:
        yield
    except _Enough:
        return
    finally:
        if own is None:
            del model.features
        else:
            model.features = own


def peak_memory(device: torch.device) -> int:
    """The most bytes held so far: on a GPU by tensors, on a processor by the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _share(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / torch.cuda.get_device_properties(device).total_memory


def _place(device: torch.device) -> str:
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return f"{torch.cuda.get_device_name(device)} ({byte_size(total)})"
    return "this machine"
