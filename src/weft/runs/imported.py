"""A model bundle as a run's folder, and a run as a bundle again: how imports and exports meet the disk.

An imported run keeps in origin/ what an export needs to reproduce the files as they were: notes.json,
unused.safetensors (tensors that weft has no place for, and blocks of quantized ones) and files/.
"""

import json
import secrets
from collections.abc import Callable
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
from weft.runs.checkpoint import checkpoint_name, link, seal
from weft.runs.folder import RunFolder, note_files, open_run
from weft.storage import files, tensors
from weft.storage.files import write_text
from weft.storage.tensors import LazyWeights
from weft.storage.untrusted import read_object
from weft.text.tokenizer import FILE, Tokenizer

GENERATIONS = 16  # runs on runs whose origin is looked for


def write_run(run: RunFolder, bundle: ModelBundle, recipe: Recipe) -> None:
    """Fill an empty folder with all that `weft.load` needs, and with what an export reproduces."""
    assert bundle.tokenizer is not None
    parameters = count(bundle.model).parameters
    run.event("import", id=secrets.token_hex(8), origin=bundle.origin, parameters=parameters)
    checkpoint = run.checkpoints / checkpoint_name(0)
    (checkpoint / "state").mkdir(parents=True)
    with bar("importing", len(bundle.weights)) as advance:
        tensors.write(checkpoint / "model.safetensors", with_progress(bundle.weights, advance))
    write_text(checkpoint / "state/state.json", json.dumps({"step": 0, "notes": {}}, indent=1))
    seal(checkpoint, 0, {})
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
        assert file.resolve().is_relative_to(run.origin.resolve()), "a format's reader names its files itself"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    if bundle.unused:
        tensors.write(run.origin / "unused.safetensors", bundle.unused)
    run.write_config(recipe)
    note_files(run)


def read_run(run: RunFolder, weights: LazyWeights) -> ModelBundle:
    """A run as a bundle with these weights: its settings, its tokenizers, and what came with it if it was imported."""
    recipe, origin = run.recipe(), run.origin
    notes, came_with, unused = {}, {}, {}
    if (origin / "notes.json").is_file():
        saved = read_object(origin / "notes.json")
        notes = {**saved.get("notes", {}), "tokenizer": saved.get("tokenizer")}
        kept = sorted(path for path in (origin / "files").rglob("*") if path.is_file())
        came_with = {path.relative_to(origin / "files").as_posix(): files.read_bytes(path) for path in kept}
        if (origin / "unused.safetensors").is_file():
            unused = _stored(origin / "unused.safetensors")
    labels = getattr(recipe.objective, "labels", None)
    rest = notes, unused, came_with, None if labels is None else tuple(labels), recipe.batch.length
    source = Tokenizer.load(run.source_tokenizer) if (run.source_tokenizer / FILE).is_file() else None
    return ModelBundle(recipe.model, weights, Tokenizer.load(run.path), str(run.path), *rest, source)


def license_of(run: RunFolder) -> dict[str, str]:
    """The license that a run's model came with; of one that was trained on another run's, that run's."""
    try:
        for _ in range(GENERATIONS):
            notes = run.origin / "notes.json"
            found = read_object(notes).get("notes", {}).get("license") if notes.is_file() else None
            if isinstance(found, dict) and found:
                return found
            base = run.recipe().init
            if base is None:
                break
            run = open_run(base)
    except WeftError:  # a run that it began with is gone, or is none
        pass
    return {}


class Generation(NamedTuple):
    """How the makers of a checkpoint have it write, and search; and what of that can't be used, one line each."""

    writing: Tree
    search: Tree
    odd: list[str]


def generation(run: RunFolder, vocab_size: int) -> Generation:
    """What the makers of an imported checkpoint say of it; of other runs, nothing.

    Their file says it; where a format has none, the notes of the import say what its own program does. Before they had
    that file, it was in config.json, with defaults for drawing that nobody chose.
    """
    file, notes = run.origin / "files" / GENERATION, run.origin / "notes.json"
    try:
        noted = read_object(notes).get("notes", {}) if notes.is_file() else {}
        old = {key: value for key, value in noted.get("config", {}).items() if key not in (*SAMPLING_KEYS, "do_sample")}
        tree = read_object(file) if file.is_file() else noted.get("generation") or old
    except InteropError as error:
        return Generation({}, {}, [str(error)])
    if not tree:
        return Generation({}, {}, [])
    answers = isinstance(run.recipe().model, EncoderDecoder)
    (writing, odd), (search, more) = generation_settings(tree, vocab_size, answers), search_settings(tree)
    lines = [f"{file}: {each}: not used; it makes no sense there" for each in odd + more]
    lines += [f"{file}: {each}: not used; weft has no such rule" for each in unsupported_settings(tree, answers)]
    return Generation(writing, search, lines)


def checkpoint_weights(path: Path, model: Model) -> LazyWeights:
    """A checkpoint's weights, each read when it is asked for."""
    stored = _stored(path / "model.safetensors")
    tied = json.loads(files.read_text(path / "manifest.json"))["tied"]
    weights = {**stored, **{name: stored[original] for name, original in tied.items()}}
    weights = {current_name(name): read for name, read in weights.items()}
    missing = [name for name in shapes(model) if name not in weights]
    if missing:
        raise RunError(f"{path}: '{missing[0]}' is missing, but the model in config.toml has it")
    return weights


def _stored(file: Path) -> dict[str, Callable[[], Tensor]]:
    return {name: stored.read for name, stored in tensors.list_tensors(file).items()}
