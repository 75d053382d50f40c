"""Before the long work: what surely doesn't fit is refused; then a step, a short evaluation, one checkpoint written and
read back.

A processor's memory gives no error when it is full; the system ends the process. So the least that the settings call
for (`weft plan` counts it) is compared with what the machine has before it is allocated. Measured on a CPU, a step
takes 1.0 to 2.5 times as much, so nothing that would fit is refused.

What would fail after hours fails in the first seconds: a batch that doesn't fit in memory, an evaluation that needs
more than training does, a full disk. The checkpoint is written first and read back last, which restores weights,
moments and random generators bit for bit: the run that follows is the run that would have been.
"""

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from weft.costs.memory import Memory, Workload, training_memory
from weft.costs.units import byte_size
from weft.data.batch import Batch
from weft.errors import RunError, out_of_memory
from weft.layout import Layout
from weft.machine import total_memory
from weft.models.base import LanguageModel, Pass
from weft.recipe.config import SettledRecipe
from weft.training.learner import Learner
from weft.training.loader import Loader

SURE = 0.9  # of what is planned: what two layers need may share memory
WHOLE = Layout()  # one process has all
TOKEN = 16  # bytes of a token and its target, before they are read
AMPLE = 2.5  # times the least that a step needs of a processor's memory: as much as was ever measured
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
        """A warning if the disk can't hold `keep` checkpoints, the best one, and one that is being written."""
        if self.free >= (keep + 2) * self.checkpoint:
            return None
        return (
            f"the disk has {byte_size(self.free)} left, and checkpoint.keep = {keep} needs up to "
            f"{byte_size((keep + 2) * self.checkpoint)}; some checkpoints may fail"
        )

    def __str__(self) -> str:
        return (
            f"a step, an evaluation and a checkpoint ({byte_size(self.checkpoint)}) succeeded in {self.seconds:.1f} s, "
            f"using at most {byte_size(self.memory)} of memory"
        )


@dataclass(frozen=True)
class Preflight:
    """What is tried: `step` updates with the parts of step `first`, `evaluate` evaluates.

    With `auto` the parts are halved until they fit; otherwise a batch that doesn't fit is an error that names the size
    which would.
    """

    learner: Learner
    loader: Loader
    step: Callable[[list[Batch]], object]
    evaluate: Callable[[], object]
    device: torch.device
    need: Callable[[int], int]
    first: int = 1
    auto: bool = False

    def run(self, scratch: Path, notes: Mapping[str, Any]) -> Findings:
        """Try everything once in the folder `scratch`, which is removed again. The run's state is restored."""
        began = time.perf_counter()
        optimizer, parallel = self.learner.optimizer, self.learner.parallel
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        parallel.once(lambda: shutil.rmtree(scratch, ignore_errors=True))
        try:
            saved = self.learner.write(scratch, self.learner.copy(0, notes), keep=1)
            micro = self._fitting()
            needed = self.learner.size()  # only now are there moments
            free = shutil.disk_usage(scratch).free
            if free < needed:
                lack = f"{byte_size(free)} left on the disk; a checkpoint needs {byte_size(needed)}"
                raise RunError(f"{scratch.parent}: {lack}")
            self.learner.try_moments(scratch)
            try:
                with one_pass(self.learner.model):
                    self.evaluate()
            except Exception as error:
                if not out_of_memory(error):
                    raise
                cure = "shorten batch.length or use a smaller model"
                raise RunError(f"the evaluation runs out of memory although training fits; {cure}") from None
            self.learner.load(saved)
            parallel.once(lambda: shutil.rmtree(scratch, ignore_errors=True))
        finally:
            optimizer.zero_grad(set_to_none=True)
            if not parallel.mesh.splits or parallel.mesh.world.leads:
                shutil.rmtree(scratch, ignore_errors=True)
        return Findings(micro, needed, free, peak_memory(self.device), time.perf_counter() - began)

    def _fitting(self) -> int:
        """The rows to read at a time: as the recipe says if that fits, else an error or, with `auto`, what fits."""
        wanted = self.loader.micro
        micro = self._planned(wanted)
        while not self._fits(micro):
            if micro == 1:
                raise RunError(
                    f"{place(self.device)} has too little memory for one {self.loader.row}; shorten batch.length, "
                    "set batch.recompute=true or use a smaller model"
                )
            micro = -(-micro // 2)
        if micro < wanted and not self.auto:
            raise RunError(
                f"batch.micro = {wanted}: {wanted} times a {self.loader.row} do not fit at once in the memory of "
                f"{place(self.device)}; batch.micro={micro} does, with the same gradient (batch.micro=auto finds it)"
            )
        return micro

    def _planned(self, wanted: int) -> int:
        """The rows at a time to begin with. On a processor, where too many would end the process, fewer than are
        wanted if the settings show that these can't fit: an error without `auto`, for what fits isn't known for
        certain."""
        if self.device.type != "cpu":
            return wanted
        there, micro = total_memory(self.device), wanted
        lacking = self.need(wanted) > there
        while micro > 1 and (lacking or self.auto) and AMPLE * self.need(micro) > there:
            micro = -(-micro // 2)
        if lacking and (not self.auto or self.need(micro) > there):
            parts = f"set batch.micro={micro}, which gives the same gradient in parts, or " if micro < wanted else ""
            raise RunError(
                f"{wanted} times a {self.loader.row} need at least {byte_size(self.need(wanted))} of memory at once, "
                f"and this machine has {byte_size(there)}; {parts}lower batch.size, batch.length or the model's size"
            )
        return micro

    def _fits(self, micro: int) -> bool:
        gpu = self.device.type == "cuda"
        try:
            # twice: moments come with the first update, and a compiled step is captured only after it. On a processor,
            # where a step takes seconds and too little memory ends the process rather than the step, once
            for _ in range(1 if self.device.type == "cpu" else 2):
                self.step(replace(self.loader, micro=micro).parts(self.first))
            if gpu:
                torch.cuda.synchronize(self.device)
        except Exception as error:
            if not out_of_memory(error):
                raise
            fits = False
        else:
            tight = gpu and peak_memory(self.device) > FULL * total_memory(self.device)
            fits = not self.auto or micro == 1 or not tight
        if not fits:
            self.learner.optimizer.zero_grad(set_to_none=True)
            if gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.device)
        return fits


class _Enough(BaseException):  # not an error, and no evaluation may take it for one
    """An evaluation has read its first batch."""


@contextmanager
def one_pass(model: LanguageModel) -> Iterator[None]:
    """End what is done inside when it wants to read a second batch: the first has shown whether it fits."""
    passes = 0

    def around(features: Pass) -> Pass:
        def first(*args: Any, **given: Any) -> torch.Tensor:
            nonlocal passes
            passes += 1
            if passes > 1:
                raise _Enough
            return features(*args, **given)

        return first

    with suppress(_Enough), model.wrapped(around):
        yield


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


def check_model(recipe: SettledRecipe, device: torch.device, layout: Layout = WHOLE) -> None:
    """Refuse a model whose weights, gradients and moments alone can't fit, and a batch whose tokens can't."""
    batch, there = recipe.batch, total_memory(device)
    fixed = _planned(recipe, 1, 1, layout).fixed
    if SURE * fixed > there:
        raise RunError(
            f"this model needs at least {byte_size(fixed)} for weights, gradients and moments, and {place(device)} has "
            f"{byte_size(there)} of memory; lower model.layers, model.d_model or the vocabulary, or choose a smaller "
            "preset"
        )
    # rows of text are as long as they are set to; those of a table are bounded by its size
    tokens = (batch.size or 0) * batch.length if recipe.objective.reads == "text" else 0
    host = total_memory(torch.device("cpu"))
    if TOKEN * tokens > host:
        raise RunError(
            f"batch.size = {batch.size} × batch.length = {batch.length}: the tokens of a step alone take "
            f"{byte_size(TOKEN * tokens)}, and this machine has {byte_size(host)} of memory; lower one of them"
        )


@dataclass(frozen=True)
class Need:
    """The least that reading so many rows of a step at a time takes, in bytes, weights and moments included."""

    recipe: SettledRecipe
    first: Callable[[], Batch]  # the first step's batch, which is asked for only where rows differ in length
    layout: Layout = WHOLE

    def __call__(self, rows: int) -> int:
        rows, length = min(rows, self._shape[0]), self._shape[1]
        need = _planned(self.recipe, rows, length, self.layout)
        # what is kept of a token is split over some axes: at the least, over all of them
        shared = self.layout.tensor * self.layout.context * self.layout.pipeline
        kept = (need.total(self.recipe.batch.recompute) - need.logits - need.fixed) / shared
        # gradients come as activations go, unless those of the rows before are there already
        whole = rows == self._shape[0]
        held = max(kept, need.gradients) if whole else kept + need.gradients
        return round(SURE * (need.fixed - need.gradients + held))

    @cached_property
    def _shape(self) -> tuple[int, int]:
        batch = self.recipe.batch
        if self.recipe.objective.reads == "text" and not self.recipe.objective.has_source and batch.size is not None:
            return batch.size, batch.length
        made = self.first()
        rows, length = made.tokens.shape
        return rows, length if made.source is None else min(length, made.source.tokens.shape[1])


def _planned(recipe: SettledRecipe, rows: int, length: int, layout: Layout) -> Memory:
    shards = layout.shard * layout.context * layout.tensor * layout.pipeline
    work = Workload(rows, length, recipe.precision, recipe.optimizer.kind, shards)
    return training_memory(recipe.model, work, recipe.adapter)


def place(device: torch.device) -> str:
    """A device as a message calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine"
