"""Store an imported model bundle as a run, and turn a run back into a bundle for export.

An imported run keeps in origin/ what an export needs to reproduce the original files: notes.json, unused.safetensors
(tensors that weft doesn't use, and blocks of quantised ones) and files/.
"""

import json
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from weft.config import Tree
from weft.costs.count import count
from weft.errors import InteropError, RunError, WeftError
from weft.interop.bundle import ModelBundle, with_progress
from weft.interop.generation import SAMPLING_KEYS, generation_settings, search_settings, unsupported_settings
from weft.interop.hf.hf import GENERATION
from weft.interop.weight_map import shapes
from weft.models.base import current_name
from weft.models.config import EncoderDecoder, Model
from weft.progress import bar
from weft.recipe.config import Recipe
from weft.runs.checkpoint import checkpoint_name, link, write_manifest
from weft.runs.folder import RunFolder, note_files, open_run
from weft.storage import files, tensors
from weft.storage.files import write_text
from weft.storage.tensors import LazyWeights
from weft.storage.untrusted import read_object
from weft.text.tokenizer import FILE, Tokenizer

MAX_ANCESTORS = 16  # runs along the chain of `init` that are searched for a license


def write_run(run: RunFolder, bundle: ModelBundle, recipe: Recipe) -> None:
    """Fill an empty folder with everything `weft.load` needs, and with the files that an export reproduces."""
    assert bundle.tokenizer is not None
    run.event("import", id=secrets.token_hex(8), origin=bundle.origin, parameters=count(bundle.model).parameters)
    checkpoint = run.checkpoints / checkpoint_name(0)
    (checkpoint / "state").mkdir(parents=True)
    with bar("importing", len(bundle.weights)) as advance:
        tensors.write(checkpoint / "model.safetensors", with_progress(bundle.weights, advance))
    write_text(checkpoint / "state/state.json", json.dumps({"step": 0, "notes": {}}, indent=1))
    write_manifest(checkpoint, 0, {})
    for name in ("latest", "best"):
        link(run.checkpoints, name, checkpoint)
    bundle.tokenizer.save(run.path)
    if bundle.source_tokenizer is not None:
        bundle.source_tokenizer.save(run.source_tokenizer)
    run.origin.mkdir()
    notes = {"origin": bundle.origin, "tokenizer": bundle.tokenizer.fingerprint, "notes": bundle.notes}
    write_text(run.origin / "notes.json", json.dumps(notes, indent=1, ensure_ascii=False))
    for name, data in bundle.files.items():
        file = run.origin / "files" / name
        assert file.resolve().is_relative_to(run.origin.resolve()), "file names come from the format's reader"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    if bundle.unused:
        tensors.write(run.origin / "unused.safetensors", bundle.unused)
    run.write_config(recipe)
    note_files(run)


def read_run(run: RunFolder, weights: LazyWeights) -> ModelBundle:
    """Return a run as a bundle with these weights, including the original files if it was imported."""
    recipe, origin = run.recipe(), run.origin
    notes, originals, unused = {}, {}, {}
    if (origin / "notes.json").is_file():
        saved = read_object(origin / "notes.json")
        notes = {**saved.get("notes", {}), "tokenizer": saved.get("tokenizer")}
        paths = sorted(path for path in (origin / "files").rglob("*") if path.is_file())
        originals = {path.relative_to(origin / "files").as_posix(): files.read_bytes(path) for path in paths}
        if (origin / "unused.safetensors").is_file():
            unused = _readers(origin / "unused.safetensors")
    labels, length = getattr(recipe.objective, "labels", None), recipe.batch.length
    source = Tokenizer.load(run.source_tokenizer) if (run.source_tokenizer / FILE).is_file() else None
    bundle = ModelBundle(recipe.model, weights, Tokenizer.load(run.path), origin=str(run.path), notes=notes)
    return replace(bundle, unused=unused, files=originals, labels=labels, length=length, source_tokenizer=source)


def license_of(run: RunFolder) -> dict[str, str]:
    """Return the license of an imported model, or of the one that a run's weights were initialised from."""
    try:
        for _ in range(MAX_ANCESTORS):
            notes = run.origin / "notes.json"
            license = read_object(notes).get("notes", {}).get("license") if notes.is_file() else None
            if isinstance(license, dict) and license:
                return license
            base = run.recipe().init
            if base is None:
                break
            run = open_run(base)
    except WeftError:  # a run named by `init` is missing or invalid
        pass
    return {}


class Generation(NamedTuple):
    """Sampling and search settings that a checkpoint's authors recommend, and a message for each unusable one."""

    writing: Tree
    search: Tree
    problems: list[str]


def generation(run: RunFolder, vocab_size: int) -> Generation:
    """Return the generation settings that came with an imported checkpoint; empty for other runs.

    They are in generation_config.json, or in the import's notes for a format without that file. Older checkpoints have
    them in config.json, where the sampling settings are defaults that nobody chose and are ignored.
    """
    file, notes_file = run.origin / "files" / GENERATION, run.origin / "notes.json"
    try:
        notes = read_object(notes_file).get("notes", {}) if notes_file.is_file() else {}
        old = {key: value for key, value in notes.get("config", {}).items() if key not in (*SAMPLING_KEYS, "do_sample")}
        tree = read_object(file) if file.is_file() else notes.get("generation") or old
    except InteropError as error:
        return Generation({}, {}, [str(error)])
    if not tree:
        return Generation({}, {}, [])
    has_source = isinstance(run.recipe().model, EncoderDecoder)
    (writing, invalid), (search, more) = generation_settings(tree, vocab_size, has_source), search_settings(tree)
    problems = [f"{file}: {setting}: not used; it is invalid there" for setting in invalid + more]
    unsupported = unsupported_settings(tree, has_source)
    problems += [f"{file}: {setting}: not used; weft has no such rule" for setting in unsupported]
    return Generation(writing, search, problems)


def checkpoint_weights(path: Path, model: Model) -> LazyWeights:
    """Return readers of a checkpoint's weights by name; each weight is read on demand."""
    stored = _readers(path / "model.safetensors")
    tied = json.loads(files.read_text(path / "manifest.json"))["tied"]
    weights = {**stored, **{name: stored[original] for name, original in tied.items()}}
    weights = {current_name(name): read for name, read in weights.items()}
    if missing := [name for name in shapes(model) if name not in weights]:
        raise RunError(f"{path}: '{missing[0]}' is missing, but the model in config.toml has it")
    return weights


def _readers(file: Path) -> dict[str, Callable[[], Tensor]]:
    return {name: stored.read for name, stored in tensors.list_tensors(file).items()}
