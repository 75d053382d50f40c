"""Models from other programs as runs."""

import os
from pathlib import Path
from typing import Any

from weft.config import validate
from weft.errors import InteropError, RunError
from weft.files import replacing_folder
from weft.interop.bundle import ModelBundle
from weft.interop.formats import read_model
from weft.models.config import Encoder, EncoderDecoder
from weft.recipe.config import SOURCE_TOKENIZER, Recipe
from weft.recipe.objective import OBJECTIVES
from weft.recipe.resolve import run_name
from weft.runs.folder import RunFolder
from weft.runs.imported import write_run

LONGEST_WINDOW = 2048  # tokens read at once when an imported model is evaluated, however long its context


def import_model(
    source: Path | str, run: Path | str, *, tokenizer: Path | str | None = None
) -> tuple[RunFolder, ModelBundle]:
    """Turn another program's model into a run; the run, and what was read.

    `tokenizer` is a file or folder for sources that come without one. The run's folder must not exist, or be empty.
    """
    target = Path(run)
    check_empty(target, "choose another folder for the run")
    bundle = read_model(source, tokenizer)
    if bundle.tokenizer is None:
        size = bundle.model.vocab_size
        raise InteropError(f"{source}: it comes without a tokenizer; name one of {size} tokens with --tokenizer")
    save_run(bundle, target, recipe_for(bundle, target))
    return RunFolder(target), bundle


def check_empty(path: Path, instead: str) -> None:
    """Refuse a place that holds something already."""
    path = Path(os.path.realpath(path))
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunError(f"{path}: already exists and is not an empty folder; {instead}")
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None


def save_run(bundle: ModelBundle, target: Path, recipe: Recipe) -> None:
    """Write a bundle as a run, whole or not at all."""
    try:
        with replacing_folder(target) as folder:
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
        "batch": {"length": min(getattr(bundle.model, "context", LONGEST_WINDOW), LONGEST_WINDOW)},
    }
    if bundle.source_tokenizer is not None:
        tree["source_tokenizer"] = {**tokenizer, "path": str(place / SOURCE_TOKENIZER)}
    return validate(Recipe, tree, bundle.origin)


def _objective(bundle: ModelBundle) -> dict[str, Any]:
    """What a model of this kind, with this head, is trained for."""
    model = bundle.model
    if isinstance(model, EncoderDecoder):
        return {"kind": "pairs"}
    if not isinstance(model, Encoder):
        return {"kind": "next-token"}
    head = model.head
    if getattr(head, "labels", None) == 1:
        return {"kind": "regress"}
    kinds = (kind for kind, its in OBJECTIVES.items() if "encoder" in its.kinds and head.kind == its.heads[0])
    # what no objective teaches (answers in a text, replaced tokens) leaves an encoder, which embeds texts
    objective: dict[str, Any] = {"kind": next(kinds, "contrastive")}
    if bundle.labels is not None and objective["kind"] in ("classify", "tag"):
        objective["labels"] = list(bundle.labels)
    return objective
