"""`model.features` through torch.compile for the time of a run.

On a GPU the passes of a step are also recorded, forward and backward, and replayed (CUDA graphs): a small model's step
is hundreds of kernels that the GPU does faster than the host can launch them. That needs steps of one shape, each of
one forward and one backward pass; all others, and evaluations, are compiled only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from weft.models.base import LanguageModel
from weft.models.transformer import Transformer
from weft.parallel.ranks import Ranks
from weft.recipe.config import Recipe
from weft.training.loader import Feed


class Compiled:
    """Takes the place of a model's `features`."""

    def __init__(self, model: LanguageModel, record: bool):
        self.plain = torch.compile(model.features)
        self.recorded = torch.compile(model.features, mode="reduce-overhead") if record else None
        self.whole = True  # whether the step that comes is one forward and one backward pass

    def __call__(self, *args: Any, **given: Any) -> Tensor:
        """As `features`. What a recorded pass gives is overwritten by the next one."""
        if self.recorded is None or not self.whole or not torch.is_grad_enabled():
            return self.plain(*args, **given)
        torch.compiler.cudagraph_mark_step_begin()
        return self.recorded(*args, **given)


def can_be_recorded(recipe: Recipe, model: LanguageModel, batches: Feed, device: torch.device, ranks: Ranks) -> bool:
    """Whether all steps have one shape, on one GPU, of a kind that was tried."""
    plain = not recipe.data.document_mask and not recipe.batch.recompute
    return device.type == "cuda" and batches.even and plain and ranks.alone and isinstance(model, Transformer)


@contextmanager
def compiled(model: LanguageModel, wanted: bool, record: bool) -> Iterator[Compiled | None]:
    """The model with compiled passes, if that is wanted; afterwards the class's own again."""
    if not wanted:
        yield None
        return
    passes = Compiled(model, record)
    model.features = passes
    try:
        yield passes
    finally:
        del model.features
