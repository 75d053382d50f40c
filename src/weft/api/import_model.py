"""Import models of other programs as runs."""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import weft
from weft.config import validate
from weft.errors import InteropError, RunError, os_errors, quoted
from weft.interop import peft
from weft.interop.bundle import ModelBundle, lazy_weights
from weft.interop.formats import find_model, read_model
from weft.models.config import Decoder, Encoder, EncoderDecoder, StaticVectors
from weft.progress import log_to_stderr
from weft.recipe.config import SOURCE_TOKENIZER, Recipe
from weft.recipe.objective import OBJECTIVES
from weft.recipe.resolve import run_name
from weft.runs import checkpoint
from weft.runs.folder import RunFolder, open_run
from weft.runs.imported import checkpoint_weights, read_run, write_run
from weft.storage.files import cache_folder, replacing_folder, write_text
from weft.training.weights import base_note

MAX_WINDOW = 2048  # tokens per window when an imported model is evaluated, even if its context is longer


def import_model(
    source: Path | str, run: Path | str, *, tokenizer: Path | str | None = None, base: Path | str | None = None
) -> tuple[RunFolder, ModelBundle]:
    """Turn another program's model into a run; return the run, and the model as read.

    `tokenizer` is a file or folder, for sources without one; `base` is the run of the model that an adapter (a PEFT
    folder) was trained on. The run's folder must not exist, or be empty.
    """
    target = Path(run)
    check_empty(target, "choose another folder for the run")
    if peft.recognises(Path(source)):
        if tokenizer is not None:
            raise InteropError(f"--tokenizer {tokenizer}: {source} is an adapter, which uses its base's; leave it out")
        return _import_adapter(Path(source), target, base)
    if base is not None:
        raise InteropError(f"--base {base}: {source} is not an adapter; leave it out")
    bundle = read_model(source, tokenizer)
    if bundle.tokenizer is None:
        size = bundle.model.vocab_size
        raise InteropError(f"{source}: it has no tokenizer; name one of {size} tokens with --tokenizer")
    save_run(bundle, target, recipe_for(bundle, target))
    return RunFolder(target), bundle


def imported_run(source: Path | str) -> Path:
    """Return a run of another program's model in weft's cache, imported when the model is new or its files changed."""
    path = find_model(source).absolute()
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    states = [(str(file), state.st_size, state.st_mtime_ns) for file in files if (state := file.stat())]
    key = hashlib.blake2b(json.dumps([weft.__version__, states]).encode(), digest_size=6).hexdigest()
    run = cache_folder() / "imported" / f"{run_name(str(source).replace('/', '-'))}-{key}"
    if not RunFolder(run).config.is_file():
        log_to_stderr(f"weft: importing {source} into {run}")
        import_model(path, run)
    return run


def _import_adapter(source: Path, target: Path, base: Path | str | None) -> tuple[RunFolder, ModelBundle]:
    """Turn an adapter into a run on top of another run's weights; return it, and the base model with the adapter."""
    if base is None:
        name = peft.base_of(source)
        raise InteropError(f"{source}: a PEFT adapter for {name}; import that, and name its run with --base")
    base_run = open_run(base)
    base_recipe = base_run.recipe()
    if base_recipe.adapter is not None:
        merge = f"weft export {quoted(base)} DEST --to weft"
        raise InteropError(f"--base {base}: itself an adapter; merge it first: {merge}")
    path, _ = checkpoint.find(base_run.checkpoints, "best", checkpoint.verify)
    model = read_run(base_run, checkpoint_weights(path, base_recipe.model))
    adapter = peft.read(source, model)
    weights = lazy_weights(adapter.weights.__getitem__, adapter.weights)
    bundle = replace(model, weights=weights, notes=adapter.notes, files=adapter.files, unused={})
    bundle = replace(bundle, origin=f"{source} (PEFT)")
    settings = adapter.settings.model_dump(mode="json", exclude_none=True)
    recipe = recipe_like(base_recipe, bundle, target).replace(init=str(base), adapter=settings)
    save_run(bundle, target, recipe, base=base_note(str(base)))
    return RunFolder(target), bundle


def check_empty(path: Path, instead: str) -> None:
    """Refuse a path that exists, unless it is an empty folder."""
    path = Path(os.path.realpath(path))
    with os_errors(path, RunError):
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunError(f"{path}: already exists and is not an empty folder; {instead}")


def save_run(bundle: ModelBundle, target: Path, recipe: Recipe, *, base: str | None = None) -> None:
    """Write a model as a run, atomically; for an adapter, with the note about its `base`."""
    with os_errors(os.path.realpath(target), RunError, verb="written"), replacing_folder(target) as folder:
        if base is not None:
            write_text(RunFolder(folder).base, base)
        write_run(RunFolder(folder), bundle, recipe)


def recipe_for(bundle: ModelBundle, path: Path) -> Recipe:
    """Return the recipe of an imported model at `path`: its settings, and an objective to fine-tune it for."""
    tokenizer = {"kind": "pretrained", "path": str(path)}
    tree: dict[str, Any] = {
        "name": run_name(path.name),
        "precision": "fp32",
        "compile": False,
        "tokenizer": tokenizer,
        "model": bundle.model.model_dump(mode="json", exclude_none=True),
        "objective": _objective(bundle),
        "batch": {"length": bundle.length or min(getattr(bundle.model, "context", MAX_WINDOW), MAX_WINDOW)},
    }
    if bundle.source_tokenizer is not None:
        tree["source_tokenizer"] = {**tokenizer, "path": str(path / SOURCE_TOKENIZER)}
    return validate(Recipe, tree, bundle.origin)


def recipe_like(recipe: Recipe, bundle: ModelBundle, path: Path) -> Recipe:
    """Return the recipe of a model that has learned what a run with `recipe` has, without the data."""
    return recipe_for(bundle, path).replace(
        steps=recipe.steps,  # a model that was trained frames its texts as in training (`text_frame`)
        objective=recipe.objective.model_dump(exclude_none=True),
        batch={"length": recipe.batch.length},
        data={"column": recipe.data.column, "document_mask": recipe.data.document_mask},
        precision=recipe.precision,
    )


def _objective(bundle: ModelBundle) -> dict[str, Any]:
    model = bundle.model
    if isinstance(model, StaticVectors):
        return {"kind": "word-vectors"}
    if not isinstance(model, Decoder | Encoder | EncoderDecoder):
        return {"kind": "next-token"}
    head = model.head
    if isinstance(model, EncoderDecoder) and head.kind == "lm":
        return {"kind": "pairs", "languages": bundle.languages} if bundle.languages else {"kind": "pairs"}
    if isinstance(model, Decoder) and head.kind == "lm":
        return {"kind": "next-token"}
    if getattr(head, "labels", None) == 1:
        return {"kind": "regress"}
    kinds = (kind for kind, each in OBJECTIVES.items() if model.kind in each.kinds and head.kind == each.heads[0])
    # a head that no objective trains (replaced-token detection) leaves a model that embeds texts
    objective: dict[str, Any] = {"kind": next(kinds, "contrastive")}
    if bundle.labels is not None and objective["kind"] in ("classify", "tag"):
        objective["labels"] = list(bundle.labels)
    return objective
