"""A model that several processes hold in parts: in training, a `Learner` where what differs is in `parallel/apply.py`;
and a trained one, of which each of them holds, and reads, a part of every matrix.

It is loaded where there are several processes: torch's own parts for this take a second.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.costs.layouts import indivisible
from weft.errors import ConfigError
from weft.layout import Layout
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import TransformerConfig
from weft.models.transformer import Transformer
from weft.nn.init import empty_weights
from weft.parallel import mesh as meshes
from weft.parallel.apply import Split, lay_out
from weft.parallel.context import check_context
from weft.parallel.mesh import Mesh
from weft.parallel.ranks import Ranks
from weft.parallel.stages import check as check_stages
from weft.parallel.tensor import keep_local
from weft.recipe.config import Recipe, SettledRecipe
from weft.runs import checkpoint, sharded_checkpoint
from weft.runs.folder import RunFolder
from weft.storage import tensors
from weft.training import optimizer
from weft.training.learner import Copy, Learner, fitted
from weft.training.precision import check_precision
from weft.training.weights import add_adapters, first_model, written_in


class SplitLearner(Learner):
    """This process's part of a model, and of the optimizer's state; all processes call the same."""

    parallel: Split

    def restart(self, recipe: SettledRecipe) -> None:
        torch.manual_seed(recipe.seed)
        self.parallel.fill(first_model(recipe).named_parameters())
        self.optimizer = optimizer.build(recipe.optimizer, self.model, self.parallel.local)

    def copy(self, step: int, notes: Mapping[str, Any]) -> sharded_checkpoint.ShardedSnapshot:
        return sharded_checkpoint.snapshot(step, self.parallel, self.optimizer, notes=notes)

    def write(self, folder: Path, copy: Copy, keep: int, interrupted: bool = False) -> Path:
        return sharded_checkpoint.write(folder, copy, keep, interrupted=interrupted, ranks=self.parallel.mesh.beside)

    def load(self, path: Path) -> dict[str, Any]:
        return sharded_checkpoint.load(path, self.parallel, self.optimizer)

    def load_weights(self, path: Path) -> None:
        sharded_checkpoint.load_weights(path, self.parallel)

    def size(self) -> int:
        return sharded_checkpoint.size(self.parallel, self.optimizer)

    def try_moments(self, folder: Path) -> None:
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

    def given_out() -> Iterator[tuple[str, Tensor]]:  # one after another: nobody else has ever to hold them all
        for name, shape in shapes.items():
            values = whole[name].detach() if mesh.world.leads else torch.empty(shape)
            mesh.world.give(values)
            yield name, values

    frozen = mesh.world.share(lambda: [name for name, parameter in whole.items() if not parameter.requires_grad])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    parallel = lay_out(fitted(model, recipe), mesh, recipe.precision, recipe.compile)
    parallel.root.to_empty(device=device)
    parallel.fill(given_out())
    return SplitLearner(parallel, optimizer.build(recipe.optimizer, model, parallel.local))


def load_part(
    run: RunFolder, ranks: Ranks, device: torch.device, dtype: torch.dtype | None = None
) -> tuple[LanguageModel, list[str]]:
    """This process's part of a run's model with its best weights, ready to use, and a line for each damaged checkpoint.

    All processes call this. The first one looks for a checkpoint and verifies it; then each gives memory to its part
    alone, and reads that, into `dtype` or as `written_in` says.
    """

    def intact(path: Path) -> Path:  # its moments, which are larger, nobody reads
        files = checkpoint.manifest_of(path)["files"]
        tensors.check(path / sharded_checkpoint.WEIGHTS, files[sharded_checkpoint.WEIGHTS]["sha256"])
        return path

    def find() -> tuple[str, list[str]]:
        check_divides(run, recipe, ranks.ranks)
        path, damage = checkpoint.find(run.checkpoints, "best", intact)
        return str(path.resolve()), damage

    recipe = run.recipe()
    found, damage = ranks.share(find)
    path = Path(found)
    with empty_weights():
        model: LanguageModel = build(recipe.model)
    if isinstance(model, Transformer):
        model.to(tensors.common_type(path / sharded_checkpoint.WEIGHTS))
        model.to(dtype or written_in(recipe, model, device))
    over = meshes.build(Layout(tensor=ranks.ranks), ranks, device)
    parallel = lay_out(model, over, "fp32", compile_=False)
    parallel.root.to_empty(device=device)
    sharded_checkpoint.load_weights(path, parallel)
    keep_local(model, over)
    return model.eval(), damage


def check_divides(run: RunFolder, recipe: Recipe, processes: int) -> None:
    """Refuse what so many processes can't divide among them, before any of them allocates memory for it."""
    if recipe.adapter is not None:
        raise ConfigError(
            f"{run.path}: an adapter is merged into its base by one process; merge it once and for all with "
            f"`weft export {run.path} MERGED --to weft`, and start {processes} processes with that run"
        )
    if recipe.model.kind == "ngram":
        raise ConfigError(f"{run.path}: an n-gram model has no matrices for {processes} processes to divide; start one")
    if isinstance(recipe.model, TransformerConfig):
        model = recipe.model
        if (reason := indivisible(model, processes)) is not None:
            heads = range(1, model.attention.heads + 1)
            *fitting, last = (str(number) for number in heads if indivisible(model, number) is None)
            start = f"{', '.join(fitting)} or {last}" if fitting else last
            cure = f"start {start} with torchrun --nproc-per-node"
            raise ConfigError(f"{run.path}: {processes} processes: its {reason}; {cure}")
