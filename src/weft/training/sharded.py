"""A model sharded over several processes: in training, and a trained one for inference.

Imported only where there are several processes: torch's modules for this take a second to load.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.costs.layouts import indivisible
from weft.errors import ConfigError, quoted
from weft.layout import Layout
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import TransformerConfig
from weft.models.transformer import Transformer
from weft.nn.init import empty_weights
from weft.parallel import mesh as meshes
from weft.parallel.apply import ShardedParallel, lay_out
from weft.parallel.context import check_context
from weft.parallel.mesh import Mesh
from weft.parallel.pipeline import check_stages
from weft.parallel.ranks import Ranks
from weft.parallel.tensor import keep_local
from weft.recipe.config import Recipe, SettledRecipe
from weft.runs import checkpoint, sharded_checkpoint
from weft.runs.folder import RunFolder
from weft.storage import tensors
from weft.training import optimizer
from weft.training.learner import Copy, Learner, prepare_model
from weft.training.precision import check_precision
from weft.training.weights import add_adapters, first_model, inference_dtype


class ShardedLearner(Learner):
    """The local shard of a model in training and of the optimizer's state. All processes call every method."""

    parallel: ShardedParallel

    def restart(self, recipe: SettledRecipe) -> None:
        torch.manual_seed(recipe.seed)
        self.parallel.fill(_tensors(first_model(recipe)).items())
        self.optimizer = optimizer.build(recipe.optimizer, self.model, self.parallel)
        self.step_state.restore({})

    def copy(self, step: int, notes: Mapping[str, Any]) -> sharded_checkpoint.ShardedSnapshot:
        state = self.step_state.tensors()
        return sharded_checkpoint.snapshot(step, self.parallel, self.optimizer, notes=notes, step_state=state)

    def write(self, folder: Path, copy: Copy, keep: int, *, interrupted: bool = False) -> Path:
        ranks = self.parallel.mesh.checkpoints
        return sharded_checkpoint.write(folder, copy, keep, interrupted=interrupted, ranks=ranks)

    def load(self, path: Path) -> dict[str, Any]:
        notes, step_state = sharded_checkpoint.load(path, self.parallel, self.optimizer)
        self.step_state.restore(step_state)
        return notes

    def load_weights(self, path: Path) -> None:
        sharded_checkpoint.load_weights(path, self.parallel)

    def size(self) -> int:
        return sharded_checkpoint.size(self.parallel, self.optimizer, self.step_state.tensors())

    def try_moments(self, folder: Path) -> None:
        self.write(folder / "moments", self.copy(1, {}), keep=1)


def _tensors(model: LanguageModel) -> dict[str, Tensor]:
    """Return the parameters of a model, and its buffers, such as biases for the choice of experts, by name."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def start(recipe: SettledRecipe, mesh: Mesh, device: torch.device) -> ShardedLearner:
    """Return the recipe's model before its first step, over a mesh, with the weights that one process would draw."""
    check_precision(recipe.precision, device)
    check_stages(recipe.model, mesh.layout)
    check_context(mesh.layout, recipe.model, recipe.objective.kind, length=recipe.batch.length)
    with empty_weights():
        model = build(recipe.model)
        if recipe.adapter is not None:
            add_adapters(model, recipe.adapter, [])
    shapes = {name: tensor.shape for name, tensor in _tensors(model).items()}
    full = _tensors(first_model(recipe)) if mesh.world.leads else {}

    def broadcast() -> Iterator[tuple[str, Tensor]]:  # one by one: only rank 0 ever holds them all
        for name, shape in shapes.items():
            values = full[name].detach() if mesh.world.leads else torch.empty(shape)
            mesh.world.broadcast_(values)
            yield name, values

    frozen = mesh.world.share(lambda: [name for name, tensor in full.items() if not tensor.requires_grad])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    parallel = lay_out(prepare_model(model, recipe), mesh, recipe.precision, compile_=recipe.compile)
    parallel.root.to_empty(device=device)
    parallel.fill(broadcast())
    return ShardedLearner(parallel, optimizer.build(recipe.optimizer, model, parallel))


def load_shard(
    run: RunFolder, ranks: Ranks, device: torch.device, *, dtype: torch.dtype | None = None
) -> tuple[LanguageModel, list[str]]:
    """Load this process's shard of a run's best weights; return the model, and a line for each damaged checkpoint.

    All processes call this. Rank 0 finds and verifies a checkpoint; each process reads only its shard, in `dtype` or
    that of `inference_dtype`.
    """

    def intact(path: Path) -> Path:  # the moments, which are larger, are not read
        files = checkpoint.manifest_of(path)["files"]
        tensors.check(path / sharded_checkpoint.WEIGHTS, files[sharded_checkpoint.WEIGHTS]["sha256"])
        return path

    def find() -> tuple[str, list[str]]:
        check_divides(run, recipe, ranks.ranks)
        path, damage = checkpoint.find(run.checkpoints, "best", intact)
        return str(path.resolve()), damage

    recipe = run.recipe()
    name, damage = ranks.share(find)
    path = Path(name)
    with empty_weights():
        model: LanguageModel = build(recipe.model)
    if isinstance(model, Transformer):
        model.to(tensors.common_dtype(path / sharded_checkpoint.WEIGHTS))
        model.to(dtype or inference_dtype(recipe, model, device))
    mesh = meshes.build(Layout(tensor=ranks.ranks), ranks, device)
    parallel = lay_out(model, mesh, "fp32", compile_=False)
    parallel.root.to_empty(device=device)
    sharded_checkpoint.load_weights(path, parallel)
    keep_local(model, mesh)
    return model.eval(), damage


def check_divides(run: RunFolder, recipe: Recipe, processes: int) -> None:
    """Refuse a model that this many processes can't shard, before any of them allocates memory for it."""
    if recipe.adapter is not None:
        raise ConfigError(
            f"{run.path}: an adapter is merged into its base by one process; merge it permanently with "
            f"`weft export {quoted(run.path)} MERGED --to weft`, and start {processes} processes with that run"
        )
    if recipe.model.kind in ("ngram", "word2vec", "glove"):
        kind = f"a model of kind '{recipe.model.kind}'"
        raise ConfigError(f"{run.path}: {kind} has no matrices for {processes} processes to divide; start one")
    if isinstance(recipe.model, TransformerConfig):
        model = recipe.model
        if (reason := indivisible(model, processes)) is not None:
            heads = range(1, model.attention.heads + 1)
            *fitting, last = (str(number) for number in heads if indivisible(model, number) is None)
            start = f"{', '.join(fitting)} or {last}" if fitting else last
            cure = f"start {start} with torchrun --nproc-per-node"
            raise ConfigError(f"{run.path}: {processes} processes: its {reason}; {cure}")
