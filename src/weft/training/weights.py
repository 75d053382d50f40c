"""The weights that a run begins with, fresh or another run's, and those that it ends with."""

import json
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from weft.config import flat
from weft.errors import ConfigError, ModelError, RunError
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import TransformerConfig
from weft.models.heads import LMHead
from weft.models.transformer import Transformer
from weft.nn.block import block_linears
from weft.nn.config import LoRA
from weft.nn.init import empty_weights
from weft.nn.linear import LowRank
from weft.progress import warn
from weft.recipe.config import Recipe
from weft.runs import checkpoint
from weft.runs.folder import RunFolder, open_run
from weft.storage import files

M = TypeVar("M", bound=nn.Module)
# what a pretrained head holds that the next head can continue with: BERT's pooler (Devlin et al. 2019, §3.2)
HANDED_ON = {"output.next_sentence.pooler.": "output.pooler."}


def first_model(recipe: Recipe) -> LanguageModel:
    """The recipe's model before its first step: freshly drawn, then filled from `init` where the recipe names a run.
    With an adapter all that was filled is frozen; what is learned stands beside it, and in a head that is new."""
    model = build(recipe.model)
    fresh: list[str] = []
    if recipe.init is not None:
        _check_alike(recipe.model.model_dump(mode="json"), recipe.init)
        fresh = take_over(model, recipe.init)
    if recipe.adapter is not None:
        add_adapters(model, recipe.adapter, fresh)
    return model


def load_model(
    run: RunFolder, which: Literal["best", "latest"] = "best", device: torch.device | str = "cpu"
) -> tuple[LanguageModel, list[str]]:
    """The run's model with its best (or latest) weights, ready to use, and a line for whatever keeps it from them."""
    recipe = run.recipe()
    return checkpoint.find(run.checkpoints, which, lambda path: fill_model(run, recipe, path, torch.device(device)))


def fill_model(run: RunFolder, recipe: Recipe, path: Path, device: torch.device) -> LanguageModel:
    """The run's model with the weights of one of its checkpoints, which is verified."""
    if isinstance(recipe.model, TransformerConfig) and recipe.adapter is None:
        with empty_weights():
            model: LanguageModel = build(recipe.model)
        checkpoint.place_weights(path, model, device)
        return model.eval()
    checkpoint.verify(path)
    if recipe.adapter is not None:  # the run holds the adapter alone, which is merged into what it began with
        check_base(run, recipe)
    model = build(recipe.model) if recipe.adapter is None else first_model(recipe)
    checkpoint.load_weights(path, model)
    return (model if recipe.adapter is None else merged(model)).to(device).eval()


def written_in(recipe: Recipe, model: LanguageModel, device: torch.device) -> torch.dtype:
    """What the weights of a Transformer are kept in for use on `device`; `model` has the type that they are stored in.

    float32, but 16 bits on a GPU for one that writes and that learned in bf16 or fp8, or came in 16 bits: writing reads
    every weight for every token.
    """
    assert isinstance(model, Transformer)
    if model.decoder is None or not isinstance(model.output, LMHead) or device.type != "cuda":
        return torch.float32
    own = model.embedding.weight.dtype
    return torch.bfloat16 if own == torch.float32 and recipe.precision in ("bf16", "fp8") else own


def add_adapters(model: nn.Module, settings: LoRA, fresh: Collection[str] = ()) -> list[str]:
    """Freeze `model` and put trained low-rank matrices beside the layers that `settings` names; their names.

    In place. The model computes what it did before, until it is trained. Parameters that are `fresh`, a new head's,
    know nothing yet and are trained too.
    """
    linears = block_linears(model)
    if not linears:
        raise ModelError("adapter: it needs a model made of Transformer blocks")
    if _adapters(model):
        raise ModelError("adapter: this model has adapters already; merge them first")
    names = settings.match_targets(linears)
    head = list(model.get_submodule("output").parameters()) if settings.head else []
    if settings.head and not head:
        raise ModelError("adapter.head: this head has no weights of its own, it shares the embeddings'")
    model.requires_grad_(False)
    for name in names:
        model.set_submodule(name, LowRank(linears[name], settings))
    for parameter in [*head, *(own for name, own in model.named_parameters() if name in fresh)]:
        parameter.requires_grad_(True)
    return names


def merged(model: M) -> M:
    """A copy of the model in which the adapters are part of its weights: as one that never had any."""
    copy = deepcopy(model)
    for name, adapter in _adapters(copy).items():
        copy.set_submodule(name, adapter.merge())
    return copy.requires_grad_(True)


def _adapters(model: nn.Module) -> dict[str, LowRank]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LowRank)}


def base_note(origin: str) -> str:
    """What a run with an adapter notes of its base in base.json."""
    return json.dumps({"init": origin, "sha256": _base_hash(origin)})


def check_base(run: RunFolder, recipe: Recipe, looked_at: Callable[[Path], Path] = checkpoint.verified) -> None:
    """Refuse a run whose adapter was learned for other weights than those that `init` has now. `looked_at` is how
    closely its checkpoint is looked at: `checkpoint.verified` reads it."""
    assert recipe.init is not None
    try:
        noted = json.loads(files.read_text(run.base))["sha256"] if run.base.exists() else None
    except (ValueError, LookupError, TypeError):
        raise RunError(f"{run.base}: damaged: not the note of the weights that this run's adapter needs") from None
    if noted != _base_hash(recipe.init, looked_at):
        raise RunError(
            f"{run.path}: its adapter was learned for the weights of {recipe.init}, which have changed since; "
            "restore them, or train the adapter again"
        )


def _base_hash(origin: str, looked_at: Callable[[Path], Path] = checkpoint.verified) -> str:
    path, _ = checkpoint.find(open_run(origin).checkpoints, "best", looked_at)
    listed = json.loads(files.read_text(path / "manifest.json"))["files"]
    return " ".join(listed["model.safetensors"]["sha256"])


# what may differ from the run that weights come from: nothing that changes what the weights mean
FREE = ("head", "dropout", "attention.dropout", "init", "vocab_size", "source_vocab_size")


def _check_alike(settings: Mapping[str, Any], origin: str) -> None:
    """Refuse a model that would compute something else with the same weights."""
    earlier = flat(open_run(origin).recipe().model.model_dump(mode="json"))
    for key, value in flat(settings).items():
        free = any(key == name or key.startswith(f"{name}.") for name in FREE)
        if not free and key in earlier and earlier[key] != value:
            raise ConfigError(
                f"model.{key} = {value!r}: the weights of init = '{origin}' were trained with {earlier[key]!r}; "
                "leave it out, and it is taken from there"
            )


def take_over(model: LanguageModel, origin: str) -> list[str]:
    """Fill `model` with the best weights of the run `origin`; the names of what stays fresh: a new head at most.
    Everything below the head must be there and of the same shape."""
    loaded, damage = load_model(open_run(origin))
    for line in damage:
        warn(line)
    earlier = loaded.state_dict()
    for old, new in HANDED_ON.items():
        earlier |= {new + name.removeprefix(old): value for name, value in earlier.items() if name.startswith(old)}
    own = model.state_dict()
    fitting = {name: found for name, found in earlier.items() if name in own and found.shape == own[name].shape}
    fresh = [name for name in own if name not in fitting]
    body = [name for name in fresh if not name.startswith("output.")]
    if body:
        name, there = body[0], earlier.get(body[0])
        had = "lacks it" if there is None else f"has it as {tuple(there.shape)}"
        raise ConfigError(
            f"init = '{origin}': {name} {tuple(own[name].shape)} can't begin with that run's weights, which {had}; "
            "leave the model's sizes out of the recipe, and they are taken from there"
        )
    with torch.no_grad():
        for name, value in fitting.items():
            own[name].copy_(value)
    return fresh
