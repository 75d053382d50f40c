"""A model's passes through torch.compile for the time of a run.

On a GPU the passes of a step are also captured as CUDA graphs, forward and backward, and replayed: a small model's step
is hundreds of kernels that the GPU finishes faster than the host can launch them. That needs steps of one shape, each
of one forward and one backward pass; all others are compiled only. Evaluations are compiled where there is much to
read: theirs is a graph of its own, and compiling it takes half a minute.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from weft.models.base import LanguageModel, Pass
from weft.models.transformer import RowInputs, Transformer
from weft.nn.mask import build_block_mask
from weft.recipe.config import SettledRecipe
from weft.training.loader import Loader
from weft.training.worker import Worker

# of all evaluations of a run, on a processor and on a GPU: about a minute, of which compiling saves more than it takes
MIN_EVALUATION_FLOPS = (5e12, 5e15)


class Compiled:
    """A pass over whole sequences, compiled."""

    def __init__(self, features: Pass, capture: bool, evaluations: bool = True):
        self.plain = torch.compile(features)
        self.evaluating = self.plain if evaluations else features
        self.captured = torch.compile(features, mode="reduce-overhead") if capture else None
        self.whole = True  # whether the coming step is one forward and one backward pass

    def __call__(self, *args: Any, **given: Any) -> Tensor:
        """As the pass. What a replayed one returns is overwritten by the next one."""
        if not torch.is_grad_enabled():
            return self.evaluating(*args, **given)
        if self.captured is None or not self.whole:
            return self.plain(*args, **given)
        torch.compiler.cudagraph_mark_step_begin()
        return self.captured(*args, **given)


def can_be_captured(recipe: SettledRecipe, model: LanguageModel, loader: Loader, worker: Worker) -> bool:
    """Whether all steps have one shape, on one GPU, of a kind that was tried."""
    plain = not recipe.data.document_mask and not recipe.batch.recompute
    one_gpu = worker.device.type == "cuda" and worker.ranks.alone
    return one_gpu and loader.even and plain and isinstance(model, Transformer)


def evaluations_pay(recipe: SettledRecipe, flops_per_token: float, device: torch.device) -> bool:
    """Whether a run's evaluations are so long that compiling them saves more than it takes."""
    times = -(-recipe.steps // recipe.evaluate.every)
    forward = flops_per_token / 3 * times * (recipe.evaluate.tokens or math.inf)
    return forward >= MIN_EVALUATION_FLOPS[device.type == "cuda"]


@contextmanager
def compiled(model: LanguageModel, wanted: bool, capture: bool, evaluations: bool = True) -> Iterator[Compiled | None]:
    """Inside, the model's passes are compiled, if that is wanted; those of evaluations if that pays."""
    if not wanted:
        yield None
        return
    passes = Compiled(without_maps(model), capture, evaluations)
    with model.wrapped(lambda features: passes):
        yield passes


def without_maps(model: LanguageModel) -> Pass:
    """The model's pass. FlexAttention's maps stay out of graphs: made in one, they read out of bounds (torch 2.11)."""
    if not isinstance(model, Transformer):
        return model.forward_features
    outside = torch.compiler.disable(build_block_mask)

    def features(tokens: Tensor, **given: Any) -> Tensor:
        return model.forward_rows(tokens, RowInputs(**given), build_block_mask=outside)

    return features
