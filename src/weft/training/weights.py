"""The weights that a run begins with, fresh or another run's, and loading those that it ends with."""

import json
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from weft.config import flat
from weft.errors import ConfigError, ModelError, RunError, listed
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
# parameters of a pretrained head that a new head continues with: BERT's pooler (Devlin et al. 2019, §3.2)
INHERITED = {"output.next_sentence.pooler.": "output.pooler."}
# settings that may differ from those of the run that weights come from, because they do not change what weights mean
FREE = ("head", "dropout", "attention.dropout", "init", "vocab_size", "source_vocab_size")


def first_model(recipe: Recipe) -> LanguageModel:
    """Return the recipe's model before its first step: drawn at random, then filled from the run in `init`, if any.
    With an adapter the filled weights are frozen; the adapter and a new head are trained."""
    model = build(recipe.model)
    fresh: list[str] = []
    if recipe.init is not None:
        _check_compatible(recipe.model.model_dump(mode="json"), recipe.init)
        fresh = fill_from_run(model, recipe.init)
    if recipe.adapter is not None:
        add_adapters(model, recipe.adapter, fresh)
    return model


def load_model(
    run: RunFolder, which: Literal["best", "latest"] = "best", device: torch.device | str = "cpu"
) -> tuple[LanguageModel, list[str]]:
    """Load the run's model with its best (or latest) weights; return it with a line for each damaged checkpoint."""
    recipe = run.recipe()
    target = torch.device(device)
    return checkpoint.find(run.checkpoints, which, lambda path: fill_model(run, recipe, path, device=target))


def model_at(run: RunFolder, step: int, device: torch.device) -> LanguageModel:
    """Load the run's model as it was at a step that has a checkpoint, or before the first one (0)."""
    recipe, steps = run.recipe(), run.steps()
    if step == 0 not in steps and any(True for _ in build(recipe.model).parameters()):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            return merged(first_model(recipe)).to(device).eval()
    path = next(
        (path for path in checkpoint.all_checkpoints(run.checkpoints) if checkpoint.step_of(path) == step), None
    )
    if path is None:
        raise RunError(f"{run.path}: no checkpoint of step {step}; there are {listed(map(str, steps))}")
    return fill_model(run, recipe, path, device=device)


def fill_model(run: RunFolder, recipe: Recipe, path: Path, *, device: torch.device) -> LanguageModel:
    """Load the run's model with the weights of one of its checkpoints, which is verified."""
    if isinstance(recipe.model, TransformerConfig) and recipe.adapter is None:
        with empty_weights():
            model: LanguageModel = build(recipe.model)
        checkpoint.place_weights(path, model, device)
        return model.eval()
    checkpoint.verify(path)
    if recipe.adapter is not None:  # the run holds only the adapter, which is merged into its base
        check_base(run, recipe)
    model = build(recipe.model) if recipe.adapter is None else first_model(recipe)
    checkpoint.load_weights(path, model)
    return (model if recipe.adapter is None else merged(model)).to(device).eval()


def inference_dtype(recipe: Recipe, model: LanguageModel, device: torch.device) -> torch.dtype:
    """Return the dtype that the weights of a Transformer, now in their stored dtype, are used in on `device`.

    float32; but 16 bits on a GPU for a language model trained in bf16 or fp8, or stored in 16 bits: decoding reads
    every weight for every token.
    """
    assert isinstance(model, Transformer)
    if model.decoder is None or not isinstance(model.output, LMHead) or device.type != "cuda":
        return torch.float32
    stored = model.embedding.weight.dtype
    return torch.bfloat16 if stored == torch.float32 and recipe.precision in ("bf16", "fp8") else stored


def add_adapters(model: nn.Module, settings: LoRA, fresh: Collection[str] = ()) -> list[str]:
    """Freeze `model` and add trained low-rank matrices to the layers that `settings` names, in place; return the names.
    The outputs are unchanged until the adapters are trained. Parameters in `fresh`, a new head's, are trained too."""
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
    for parameter in [*head, *(parameter for name, parameter in model.named_parameters() if name in fresh)]:
        parameter.requires_grad_(True)
    return names


def merged(model: M) -> M:
    """Return a copy of the model with its adapters merged into its weights, as if it never had any."""
    copy = deepcopy(model)
    for name, adapter in _adapters(copy).items():
        copy.set_submodule(name, adapter.merge())
    return copy.requires_grad_(True)


def _adapters(model: nn.Module) -> dict[str, LowRank]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LowRank)}


def base_note(origin: str) -> str:
    """Return the content of base.json: the run that an adapter is trained for, and the hash of its weights."""
    return json.dumps({"init": origin, "sha256": _base_hash(origin)})


def check_base(run: RunFolder, recipe: Recipe, check: Callable[[Path], Path] = checkpoint.verify) -> None:
    """Refuse a run whose adapter was trained for other weights than those of `init` now, which `check` verifies."""
    assert recipe.init is not None
    try:
        noted = json.loads(files.read_text(run.base))["sha256"] if run.base.exists() else None
    except (ValueError, LookupError, TypeError):
        raise RunError(f"{run.base}: damaged: not the note of the weights that this run's adapter needs") from None
    if noted != _base_hash(recipe.init, check):
        raise RunError(
            f"{run.path}: its adapter was trained for the weights of {recipe.init}, which have changed since; "
            "restore them, or train the adapter again"
        )


def _base_hash(origin: str, check: Callable[[Path], Path] = checkpoint.verify) -> str:
    path, _ = checkpoint.find(open_run(origin).checkpoints, "best", check)
    return " ".join(checkpoint.manifest_of(path)["files"]["model.safetensors"]["sha256"])


def _check_compatible(settings: Mapping[str, Any], origin: str) -> None:
    """Refuse a model that would compute something else with the same weights."""
    earlier = flat(open_run(origin).recipe().model.model_dump(mode="json"))
    for key, value in flat(settings).items():
        free = any(key == name or key.startswith(f"{name}.") for name in FREE)
        if not free and key in earlier and earlier[key] != value:
            raise ConfigError(
                f"model.{key} = {value!r}: the weights of init = '{origin}' were trained with {earlier[key]!r}; "
                "leave it out, and it is taken from there"
            )


def fill_from_run(model: LanguageModel, origin: str) -> list[str]:
    """Fill `model` with the best weights of the run `origin`; return the names of parameters that stay fresh. Only a
    new head may stay fresh: everything below it must exist in that run, with the same shape."""
    loaded, damage = load_model(open_run(origin))
    for line in damage:
        warn(line)
    earlier = loaded.state_dict()
    for old, new in INHERITED.items():
        earlier |= {new + name.removeprefix(old): value for name, value in earlier.items() if name.startswith(old)}
    state = model.state_dict()
    fitting = {name: value for name, value in earlier.items() if name in state and value.shape == state[name].shape}
    fresh = [name for name in state if name not in fitting]
    body = [name for name in fresh if not name.startswith("output.")]
    if body:
        name, value = body[0], earlier.get(body[0])
        had = "lack it" if value is None else f"have it as {tuple(value.shape)}"
        raise ConfigError(
            f"init = '{origin}': {name} {tuple(state[name].shape)} can't begin with that run's weights, which {had}; "
            "leave the model's sizes out of the recipe, and they are taken from there"
        )
    with torch.no_grad():
        for name, value in fitting.items():
            state[name].copy_(value)
    return fresh
