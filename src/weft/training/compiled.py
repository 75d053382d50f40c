"""`model.features` through torch.compile for the time of a run.

On a GPU the passes of a step are also captured as CUDA graphs, forward and backward, and replayed: a small model's step
is hundreds of kernels that the GPU finishes faster than the host can launch them. That needs steps of one shape, each
of one forward and one backward pass; all others, and evaluations, are compiled only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from weft.models.base import LanguageModel
from weft.models.recurrent import keep_states_out_of_graphs
from weft.models.transformer import Transformer, keep_blocks_out_of_graphs
from weft.recipe.config import SettledRecipe
from weft.training.loader import Loader
from weft.training.worker import Worker


class Compiled:
    """Takes the place of a model's `features`."""

    def __init__(self, model: LanguageModel, capture: bool):
        keep_blocks_out_of_graphs()
        keep_states_out_of_graphs()
        self.plain = torch.compile(model.features)
        self.captured = torch.compile(model.features, mode="reduce-overhead") if capture else None
        self.whole = True  # whether the coming step is one forward and one backward pass

    def __call__(self, *args: Any, **given: Any) -> Tensor:
        """As `features`. What a replayed pass returns is overwritten by the next one."""
        if self.captured is None or not self.whole or not torch.is_grad_enabled():
            return self.plain(*args, **given)
        torch.compiler.cudagraph_mark_step_begin()
        return self.captured(*args, **given)


def can_be_captured(recipe: SettledRecipe, model: LanguageModel, loader: Loader, worker: Worker) -> bool:
    """Whether all steps have one shape, on one GPU, of a kind that was tried."""
    plain = not recipe.data.document_mask and not recipe.batch.recompute
    one_gpu = worker.device.type == "cuda" and worker.ranks.alone
    return one_gpu and loader.even and plain and isinstance(model, Transformer)


@contextmanager
def compiled(model: LanguageModel, wanted: bool, capture: bool) -> Iterator[Compiled | None]:
    """The model with compiled passes, if that is wanted; afterwards the class's own again."""
    if not wanted:
        yield None
        return
    passes = Compiled(model, capture)
    model.features = passes
    try:
        yield passes
    finally:
        del model.features
