"""The pre-flight: refuse what can't fit in memory, then try a step, a short evaluation and a checkpoint.

A CPU's memory raises no error when it is full: the system kills the process. So the least memory that the settings need
(`weft plan` counts it) is compared with the machine's before anything is allocated. Measured on a CPU, a step takes 1.0
to 2.5 times as much, so nothing that would fit is refused.

What would fail after hours fails in the first seconds: a batch that does not fit in memory, an evaluation that needs
more than training does, a full disk. A checkpoint is written first and read back last, which restores weights, moments
and random-number generators bit for bit: the run is the same as without a pre-flight.
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

CERTAIN = 0.9  # of the planned bytes are certainly needed: layers may share the rest
MAX_CPU_FACTOR = 2.5  # most memory that a step on a CPU was measured to take, in units of the least it needs
MAX_GPU_FRACTION = 0.92  # of a GPU's memory that "auto" fills, since the need varies from step to step
TOKEN_BYTES = 16  # of a token and its target in a batch
UNSHARDED = Layout()


@dataclass(frozen=True)
class Findings:
    """Measurements of the pre-flight."""

    micro: int  # rows of a micro-batch
    checkpoint: int  # bytes of a checkpoint
    free: int  # bytes free on disk
    memory: int  # peak bytes
    seconds: float

    def disk_warning(self, keep: int) -> str | None:
        """Return a warning if the disk can't hold `keep` checkpoints, the best one, and one being written."""
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
    """A trial of a run's step, evaluation and checkpoint; with `auto`, micro-batches are halved until they fit."""

    learner: Learner
    loader: Loader
    step: Callable[[list[Batch]], object]
    evaluate: Callable[[], object]
    device: torch.device
    need: Callable[[int], int]  # least bytes for micro-batches of this many rows
    first: int = 1  # the loader's step to try
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
            micro = self._fitting_rows()
            needed = self.learner.size()  # with the moments, which now exist
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
            if not parallel.mesh.is_sharded or parallel.mesh.world.leads:
                shutil.rmtree(scratch, ignore_errors=True)
        seconds = time.perf_counter() - began
        return Findings(micro, needed, free, memory=peak_memory(self.device), seconds=seconds)

    def _fitting_rows(self) -> int:
        """Return the rows of a micro-batch: the recipe's if they fit; else raise or, with `auto`, find what fits."""
        requested = self.loader.micro
        micro = self._first_try(requested)
        while not self._fits(micro):
            if micro == 1:
                raise RunError(
                    f"{_device_title(self.device)} has too little memory for one {self.loader.row}; shorten "
                    "batch.length, set batch.recompute=true or use a smaller model"
                )
            micro = -(-micro // 2)
        if micro < requested and not self.auto:
            raise RunError(
                f"batch.micro = {requested}: {requested} times a {self.loader.row} do not fit in the memory of "
                f"{_device_title(self.device)}; batch.micro={micro} does, with the same gradient (batch.micro=auto "
                "finds it)"
            )
        return micro

    def _first_try(self, requested: int) -> int:
        """Return the rows to try first. On a CPU, where too many would end the process, fewer than `requested` if the
        settings show that these can't fit. Without `auto` that is an error, since it is not certain what fits."""
        if self.device.type != "cpu":
            return requested
        memory, micro = total_memory(self.device), requested
        lacking = self.need(requested) > memory
        while micro > 1 and (lacking or self.auto) and MAX_CPU_FACTOR * self.need(micro) > memory:
            micro = -(-micro // 2)
        if lacking and (not self.auto or self.need(micro) > memory):
            parts = f"set batch.micro={micro}, which gives the same gradient in parts, or " if micro < requested else ""
            raise RunError(
                f"{requested} times a {self.loader.row} need at least {byte_size(self.need(requested))} of memory, "
                f"and this machine has {byte_size(memory)}; {parts}lower batch.size, batch.length or the model's size"
            )
        return micro

    def _fits(self, micro: int) -> bool:
        gpu = self.device.type == "cuda"
        try:
            # twice: the first update creates the moments, and a compiled step is captured only after it. Once on a CPU,
            # where a step takes seconds and running out of memory ends the process anyway
            for _ in range(1 if self.device.type == "cpu" else 2):
                self.step(replace(self.loader, micro=micro).parts(self.first))
            if gpu:
                torch.cuda.synchronize(self.device)
        except Exception as error:
            if not out_of_memory(error):
                raise
            fits = False
        else:
            tight = gpu and peak_memory(self.device) > MAX_GPU_FRACTION * total_memory(self.device)
            fits = not self.auto or micro == 1 or not tight
        if not fits:
            self.learner.optimizer.zero_grad(set_to_none=True)
            if gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats(self.device)
        return fits


class _SecondPass(BaseException):  # not an Exception, so that no evaluation catches it
    """An evaluation is about to read its second batch."""


@contextmanager
def one_pass(model: LanguageModel) -> Iterator[None]:
    """Leave the body when the model is about to read a second batch: the first has shown whether it fits."""
    passes = 0

    def around(features: Pass) -> Pass:
        def first(*args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal passes
            passes += 1
            if passes > 1:
                raise _SecondPass
            return features(*args, **kwargs)

        return first

    with suppress(_SecondPass), model.wrapped(around):
        yield


def peak_memory(device: torch.device) -> int:
    """Return the most bytes held so far: by tensors on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def check_model(recipe: SettledRecipe, device: torch.device, layout: Layout = UNSHARDED) -> None:
    """Refuse a model whose weights, gradients and moments alone can't fit, and a batch whose tokens can't."""
    batch, memory = recipe.batch, total_memory(device)
    fixed = _planned_memory(recipe, 1, 1, layout=layout).fixed
    if CERTAIN * fixed > memory:
        raise RunError(
            f"this model needs at least {byte_size(fixed)} for weights, gradients and moments, and "
            f"{_device_title(device)} has {byte_size(memory)} of memory; lower model.layers, model.d_model or the "
            "vocabulary, or choose a smaller preset"
        )
    # rows of text have exactly the length that is set; rows of a table are bounded by the table
    tokens = (batch.size or 0) * batch.length if recipe.objective.reads == "text" else 0
    host = total_memory(torch.device("cpu"))
    if TOKEN_BYTES * tokens > host:
        raise RunError(
            f"batch.size = {batch.size} × batch.length = {batch.length}: the tokens of a step alone take "
            f"{byte_size(TOKEN_BYTES * tokens)}, and this machine has {byte_size(host)} of memory; lower one of them"
        )


@dataclass(frozen=True)
class MemoryNeed:
    """The least bytes that a step takes with micro-batches of this many rows, weights and moments included."""

    recipe: SettledRecipe
    first: Callable[[], Batch]  # makes the first step's batch; called only if rows differ in length
    layout: Layout = UNSHARDED

    def __call__(self, rows: int) -> int:
        rows, length = min(rows, self._shape[0]), self._shape[1]
        need = _planned_memory(self.recipe, rows, length, layout=self.layout)
        # activations are divided over some axes: at best, over all of them
        divided = self.layout.tensor * self.layout.context * self.layout.pipeline
        activations = (need.total(self.recipe.batch.recompute) - need.logits - need.fixed) / divided
        # gradients replace activations in the backward pass, unless those of earlier micro-batches exist already
        whole = rows == self._shape[0]
        both = max(activations, need.gradients) if whole else activations + need.gradients
        return round(CERTAIN * (need.fixed - need.gradients + both))

    @cached_property
    def _shape(self) -> tuple[int, int]:
        batch = self.recipe.batch
        if self.recipe.objective.reads == "text" and not self.recipe.objective.has_source and batch.size is not None:
            return batch.size, batch.length
        made = self.first()
        rows, length = made.tokens.shape
        return rows, length if made.source is None else min(length, made.source.tokens.shape[1])


def _planned_memory(recipe: SettledRecipe, rows: int, length: int, *, layout: Layout) -> Memory:
    shards = layout.shard * layout.context * layout.tensor * layout.pipeline
    work = Workload(rows, length, recipe.precision, recipe.optimizer.kind, shards)
    return training_memory(recipe.model, work, recipe.adapter)


def _device_title(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this machine"
