"""torch.compile for a model's passes during a run.

On a GPU the passes of a step are also captured as CUDA graphs, forward and backward, and replayed: a small model's step
is hundreds of kernels that the GPU finishes faster than the host can launch them. That requires steps of one shape,
each with one forward and one backward pass; other steps are compiled only. Evaluations have a separate graph, which
takes half a minute to compile, so they are compiled only if there is much to read.
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

# operations of all evaluations of a run, on a CPU and on a GPU, from which compiling them saves time: about a minute
MIN_EVALUATION_FLOPS = (5e12, 5e15)


class Compiled:
    """A compiled pass over whole sequences."""

    def __init__(self, features: Pass, capture: bool, evaluations: bool = True):
        self.plain = torch.compile(features)
        self.evaluating = self.plain if evaluations else features
        self.captured = torch.compile(features, mode="reduce-overhead") if capture else None
        self.one_pass = True  # whether the coming step is one forward and one backward pass

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the pass. The output of a replayed graph is overwritten by the next replay."""
        if not torch.is_grad_enabled():
            return self.evaluating(*args, **kwargs)
        if self.captured is None or not self.one_pass:
            return self.plain(*args, **kwargs)
        torch.compiler.cudagraph_mark_step_begin()
        return self.captured(*args, **kwargs)


def evaluations_pay(recipe: SettledRecipe, flops_per_token: float, device: torch.device) -> bool:
    """Return whether a run's evaluations are long enough that compiling them saves time."""
    times = -(-recipe.steps // recipe.evaluate.every)
    forward = flops_per_token / 3 * times * (recipe.evaluate.tokens or math.inf)
    return forward >= MIN_EVALUATION_FLOPS[device.type == "cuda"]


@contextmanager
def compiled(model: LanguageModel, *, capture: bool, evaluations: bool = True) -> Iterator[Compiled]:
    """Compile the model's passes, and those of evaluations if `evaluations`; undone on exit."""
    passes = Compiled(without_maps(model), capture, evaluations)
    with model.wrapped(lambda features: passes):
        yield passes


def without_maps(model: LanguageModel) -> Pass:
    """Return the model's pass with block masks built outside the graph: inside they read out of bounds (torch 2.11)."""
    if not isinstance(model, Transformer):
        return model.forward_features
    outside = torch.compiler.disable(build_block_mask)

    def features(tokens: Tensor, **inputs: Any) -> Tensor:
        return model.forward_rows(tokens, RowInputs(**inputs), build_block_mask=outside)

    return features
