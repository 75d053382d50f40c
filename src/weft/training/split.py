"""A model in training that several processes hold in parts: `Learner`, where what differs is in `parallel/apply.py`.

It is loaded where a recipe asks for it: torch's own parts for this take a second.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.models.build import build
from weft.nn.init import empty_weights
from weft.parallel.apply import Split, lay_out
from weft.parallel.context import check_context
from weft.parallel.mesh import Mesh
from weft.parallel.ranks import Ranks
from weft.parallel.stages import check as check_stages
from weft.recipe.config import SettledRecipe
from weft.runs import together
from weft.training import optimizer
from weft.training.finetune import add_adapters
from weft.training.learner import Copy, Learner, fitted
from weft.training.precision import check_precision
from weft.training.weights import first_model


class SplitLearner(Learner):
    """This process's part of a model, and of the optimizer's state."""

    parallel: Split

    def restart(self, recipe: SettledRecipe) -> None:
        """Back to the weights before the first step, with an optimizer that has seen no gradient."""
        torch.manual_seed(recipe.seed)
        self.parallel.fill(first_model(recipe).named_parameters())
        self.optimizer = optimizer.build(recipe.optimizer, self.model, self.parallel.local)

    def copy(self, step: int, notes: Mapping[str, Any]) -> together.Part:
        """This process's part of everything resumable, in the host's memory."""
        return together.part(step, self.parallel, self.optimizer, notes)

    def write(self, folder: Path, copy: Copy, keep: int, interrupted: bool = False) -> Path:
        """Write a checkpoint together with the others, which all call this."""
        return together.write(folder, copy, keep, interrupted, self.parallel.mesh.beside)

    def load(self, path: Path) -> dict[str, Any]:
        """Put back this process's part of a checkpoint, whatever mesh it was saved on; its notes."""
        return together.load(path, self.parallel, self.optimizer)

    def load_weights(self, path: Path) -> None:
        """The weights alone."""
        together.load_weights(path, self.parallel)

    def size(self) -> int:
        """About how many bytes a checkpoint takes on the disk, over all processes."""
        return together.size(self.parallel, self.optimizer)

    def try_moments(self, folder: Path) -> None:
        """Together with the others, as a checkpoint of its own."""
        self.write(folder / "moments", self.copy(1, {}), keep=1)


def start(recipe: SettledRecipe, mesh: Mesh, device: torch.device) -> SplitLearner:
    """The recipe's model before its first step, over a mesh: the weights that one process would have drawn."""
    check_precision(recipe.precision, device)
    check_stages(recipe.model, mesh.layout)
    check_context(mesh.layout, recipe.model, recipe.objective.kind, recipe.batch.length)
    with empty_weights():
        model = build(recipe.model)
        if recipe.adapter is not None:
            add_adapters(model, recipe.adapter, [])
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    whole = dict(first_model(recipe).named_parameters()) if mesh.world.leads else {}
    frozen = mesh.world.share(lambda: [name for name, parameter in whole.items() if not parameter.requires_grad])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    parallel = lay_out(fitted(model, recipe), mesh, recipe.precision, recipe.compile)
    parallel.root.to_empty(device=device)
    parallel.fill(_given_out(whole, shapes, mesh.world))
    return SplitLearner(parallel, optimizer.build(recipe.optimizer, model, parallel.local))


def _given_out(
    whole: Mapping[str, Tensor], shapes: Mapping[str, torch.Size], ranks: Ranks
) -> Iterator[tuple[str, Tensor]]:
    """The first process's parameters on every process, one after another: nobody else has ever to hold them all."""
    for name, shape in shapes.items():
        values = whole[name].detach() if ranks.leads else torch.empty(shape)
        ranks.give(values)
        yield name, values
