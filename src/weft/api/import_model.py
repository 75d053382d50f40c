"""Models from other programs as runs."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.config import validate
from weft.errors import InteropError, RunError
from weft.interop import peft
from weft.interop.bundle import ModelBundle, lazy_weights
from weft.interop.formats import read_model
from weft.models.config import Decoder, Encoder, EncoderDecoder
from weft.recipe.config import SOURCE_TOKENIZER, Recipe
from weft.recipe.objective import OBJECTIVES
from weft.recipe.resolve import run_name
from weft.runs import checkpoint
from weft.runs.folder import RunFolder, open_run
from weft.runs.imported import checkpoint_weights, read_run, write_run
from weft.storage.files import replacing_folder, write_text
from weft.training.weights import base_note

MAX_WINDOW = 2048  # tokens read at once when an imported model is evaluated, however long its context


def import_model(
    source: Path | str, run: Path | str, *, tokenizer: Path | str | None = None, base: Path | str | None = None
) -> tuple[RunFolder, ModelBundle]:
    """Turn another program's model into a run; the run, and what was read.

    `tokenizer` is a file or folder for sources that come without one; `base` is the run of the model that an adapter
    (a PEFT folder) was trained for. The run's folder must not exist, or be empty.
    """
    target = Path(run)
    check_empty(target, "choose another folder for the run")
    if peft.recognises(Path(source)):
        if tokenizer is not None:
            raise InteropError(f"--tokenizer {tokenizer}: {source} is an adapter, which has its base's; leave it out")
        return _import_adapter(Path(source), target, base)
    if base is not None:
        raise InteropError(f"--base {base}: {source} is no adapter; leave it out")
    bundle = read_model(source, tokenizer)
    if bundle.tokenizer is None:
        size = bundle.model.vocab_size
        raise InteropError(f"{source}: it comes without a tokenizer; name one of {size} tokens with --tokenizer")
    save_run(bundle, target, recipe_for(bundle, target))
    return RunFolder(target), bundle


def _import_adapter(source: Path, target: Path, base: Path | str | None) -> tuple[RunFolder, ModelBundle]:
    """An adapter as a run that begins with another run's weights; and that run's model, with the adapter's weights."""
    if base is None:
        wanted = peft.base_of(source)
        raise InteropError(f"{source}: a PEFT adapter for {wanted}; import that, and name its run with --base")
    below = open_run(base)
    own = below.recipe()
    if own.adapter is not None:
        raise InteropError(f"--base {base}: an adapter itself; merge it first: weft export {base} DEST --to weft")
    path, _ = checkpoint.find(below.checkpoints, "best", checkpoint.whole)
    model = read_run(below, checkpoint_weights(path, own.model))
    adapter = peft.read(source, model)
    weights = lazy_weights(adapter.weights.__getitem__, adapter.weights)
    bundle = replace(model, weights=weights, notes=adapter.notes, files=adapter.files, unused={})
    bundle = replace(bundle, origin=f"{source} (PEFT)")
    settings = adapter.settings.model_dump(mode="json", exclude_none=True)
    recipe = recipe_like(own, bundle, target).replace(init=str(base), adapter=settings)
    save_run(bundle, target, recipe, base_note(str(base)))
    return RunFolder(target), bundle


def check_empty(path: Path, instead: str) -> None:
    """Refuse a place that holds something already."""
    path = Path(os.path.realpath(path))
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunError(f"{path}: already exists and is not an empty folder; {instead}")
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None


def save_run(bundle: ModelBundle, target: Path, recipe: Recipe, base: str | None = None) -> None:
    """Write a bundle as a run, whole or not at all; of an adapter, with the note of its `base`."""
    try:
        with replacing_folder(target) as folder:
            if base is not None:
                write_text(RunFolder(folder).base, base)
            write_run(RunFolder(folder), bundle, recipe)
    except OSError as error:
        raise RunError(f"{os.path.realpath(target)}: cannot be written: {error.strerror or error}") from None


def recipe_for(bundle: ModelBundle, place: Path) -> Recipe:
    """The recipe of an imported model: how it reads, and the objective it could be trained for further."""
    tokenizer = {"kind": "pretrained", "path": str(place)}
    tree: dict[str, Any] = {
        "name": run_name(place.name),
        "precision": "fp32",
        "compile": False,
        "tokenizer": tokenizer,
        "model": bundle.model.model_dump(mode="json", exclude_none=True),
        "objective": _objective(bundle),
        "batch": {"length": bundle.length or min(getattr(bundle.model, "context", MAX_WINDOW), MAX_WINDOW)},
    }
    if bundle.source_tokenizer is not None:
        tree["source_tokenizer"] = {**tokenizer, "path": str(place / SOURCE_TOKENIZER)}
    return validate(Recipe, tree, bundle.origin)


def recipe_like(own: Recipe, bundle: ModelBundle, place: Path) -> Recipe:
    """The recipe of a model that reads, and does, what a run with the recipe `own` has learned, without its data."""
    return recipe_for(bundle, place).replace(
        steps=own.steps,  # whose texts were read as in training (`text_frame`), if there were any
        objective=own.objective.model_dump(exclude_none=True),
        batch={"length": own.batch.length},
        data={"column": own.data.column, "document_mask": own.data.document_mask},
        precision=own.precision,
    )


def _objective(bundle: ModelBundle) -> dict[str, Any]:
    model = bundle.model
    if isinstance(model, EncoderDecoder):
        return {"kind": "pairs", "languages": bundle.languages} if bundle.languages else {"kind": "pairs"}
    if not isinstance(model, Decoder | Encoder) or model.head.kind == "lm":
        return {"kind": "next-token"}
    head = model.head
    if getattr(head, "labels", None) == 1:
        return {"kind": "regress"}
    kinds = (kind for kind, its in OBJECTIVES.items() if model.kind in its.kinds and head.kind == its.heads[0])
    # what no objective teaches (replaced tokens) leaves a model that embeds texts
    objective: dict[str, Any] = {"kind": next(kinds, "contrastive")}
    if bundle.labels is not None and objective["kind"] in ("classify", "tag"):
        objective["labels"] = list(bundle.labels)
    return objective
