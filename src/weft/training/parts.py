"""A trained model that several processes use together: each holds, and reads, a part of every matrix.

It is loaded where there are several processes: torch's own parts for this take a second.
"""

from pathlib import Path

import torch

from weft import tensors
from weft.errors import ConfigError
from weft.layout import Layout
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import TransformerConfig
from weft.models.transformer import Transformer
from weft.nn.init import empty_weights
from weft.parallel import mesh
from weft.parallel.apply import lay_out
from weft.parallel.ranks import Ranks
from weft.parallel.tensor import keep_local
from weft.recipe.config import Recipe
from weft.runs import checkpoint, together
from weft.runs.folder import RunFolder
from weft.training.weights import written_in


def load_model(
    run: RunFolder, ranks: Ranks, device: torch.device, dtype: torch.dtype | None = None
) -> tuple[LanguageModel, list[str]]:
    """This process's part of a run's model with its best weights, ready to use, and a line for each damaged checkpoint.

    All processes call this. The first one looks for a checkpoint and verifies it; then each gives memory to its part
    alone, and reads that, into `dtype` or as `written_in` says.
    """

    def find() -> tuple[str, list[str]]:
        check_divides(run, recipe, ranks.ranks)
        path, damage = checkpoint.find(run.checkpoints, "best", _intact_weights)
        return str(path.resolve()), damage

    recipe = run.recipe()
    found, damage = ranks.share(find)
    path = Path(found)
    with empty_weights():
        model: LanguageModel = build(recipe.model)
    if isinstance(model, Transformer):
        model.to(tensors.common_type(path / together.WEIGHTS))
        model.to(dtype or written_in(recipe, model, device))
    over = mesh.build(Layout(tensor=ranks.ranks), ranks, device)
    parallel = lay_out(model, over, "fp32", compile_=False)
    parallel.root.to_empty(device=device)
    together.load_weights(path, parallel)
    keep_local(model, over)
    return model.eval(), damage


def _intact_weights(path: Path) -> Path:
    """A checkpoint whose weights are as they were written; its moments, which are larger, nobody reads."""
    files = checkpoint.manifest_of(path)["files"]
    tensors.check(path / together.WEIGHTS, files[together.WEIGHTS]["sha256"])
    return path


def check_divides(run: RunFolder, recipe: Recipe, processes: int) -> None:
    """Refuse what so many processes can't divide among them, before any of them allocates memory for it."""
    if recipe.adapter is not None:
        raise ConfigError(
            f"{run.path}: an adapter is merged into its base by one process; merge it once and for all with "
            f"`weft export {run.path} MERGED --to weft`, and start {processes} processes with that run"
        )
    if recipe.model.kind == "ngram":
        raise ConfigError(
            f"{run.path}: an n-gram model has no matrices that {processes} processes could divide; start one"
        )
    if isinstance(recipe.model, TransformerConfig):
        attention = recipe.model.attention
        sizes = {"attention.heads": attention.heads, "attention.kv_heads": attention.groups}
        sizes["feedforward.d_ff"] = recipe.model.feedforward.d_ff
        key = next((key for key, size in sizes.items() if size % processes), None)
        if attention.qk_norm is not None and attention.qk_norm_over != "head":
            raise ConfigError(
                f"{run.path}: its model.attention.qk_norm_over = '{attention.qk_norm_over}' needs all heads in one"
                " process; start one"
            )
        if key is not None:
            fitting = [str(n) for n in range(1, attention.groups + 1) if not any(size % n for size in sizes.values())]
            raise ConfigError(
                f"{run.path}: its model.{key} = {sizes[key]} can't be divided over {processes} processes; start "
                f"{' or '.join(filter(None, (', '.join(fitting[:-1]), fitting[-1])))} with torchrun --nproc-per-node"
            )
