"""Export runs as models for other programs."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.api.import_model import check_empty, recipe_like, save_run
from weft.errors import InteropError, RunError, suggestion
from weft.interop import onnx, peft, word_vectors
from weft.interop.bundle import ModelBundle, lazy_weights
from weft.interop.gguf import gguf
from weft.interop.hf import hf
from weft.objectives import table as objectives
from weft.objectives.pairs import Pairs
from weft.objectives.rows import RowObjective
from weft.objectives.tokens import TranslationObjective
from weft.progress import warn
from weft.runs import checkpoint
from weft.runs.card import model_card
from weft.runs.folder import RunFolder, changed_files, open_run
from weft.runs.imported import checkpoint_weights, license_of, read_run
from weft.runs.lines import read_lines
from weft.storage.files import replacing_folder
from weft.storage.tensors import LazyWeights
from weft.training.objective import Objective
from weft.training.weights import check_base, load_model

# the values of `--dtype` by format, or why it cannot be chosen
FORMATS: dict[str, tuple[str, ...] | str] = {
    "hf": tuple(hf.TYPES),
    "peft": "an adapter keeps its weights as they are",
    "gguf": gguf.TYPES,
    "onnx": "an ONNX file is written in fp32",
    "weft": "a run keeps its weights as they are",
    **dict.fromkeys(word_vectors.TITLES, "word vectors are written in fp32"),
}


def export_model(run: Path | str, to: str, dest: Path | str, *, dtype: str | None = None) -> str:
    """Write a run's best weights as another program's model; return a line that describes the output.

    `to` is one of FORMATS: hf (a folder for transformers), peft (only a run's adapter, for peft), gguf (a file for
    llama.cpp), onnx (a folder for onnxruntime), weft (a run), or a file of word vectors: word2vec, word2vec-binary,
    glove; all but peft merge an adapter into its base. `dtype` is
    the type that weights are converted to: fp32, fp16, bf16 for hf; f32, f16, bf16, q8_0, q4_k, q4_0 for gguf. By
    default they keep theirs.
    """
    if to not in FORMATS:
        raise InteropError(f"'{to}': unknown export format; {suggestion(to, FORMATS)}")
    dtypes = FORMATS[to]
    if dtype is not None and isinstance(dtypes, str):
        raise InteropError(f"--dtype {dtype}: {dtypes}; leave it out")
    if dtype is not None and dtype not in dtypes:
        raise InteropError(f"--dtype {dtype}: {suggestion(dtype, dtypes)}")
    folder, target = open_run(run), Path(dest)
    check_empty(target, "choose another path for the export")
    try:
        return f"{target}: {_write(folder, to, target, dtype=dtype)}"
    except OSError as error:
        raise RunError(f"{os.path.realpath(target)}: cannot be written: {error.strerror or error}") from None


def bundle_of(run: RunFolder) -> ModelBundle:
    """Return a run as a model to export; weights are read lazily, and an adapter is merged into its base."""
    recipe = run.recipe()
    for line in changed_files(run, origin=True):
        if f"{run.origin}{os.sep}" in line:
            raise RunError(f"{line}; the export would contain it, so import the model again")
        warn(line)
    weights: LazyWeights
    if recipe.adapter is None:
        weights = checkpoint_weights(_best(run), recipe.model)
    else:
        model, damage = load_model(run)
        for line in damage:
            warn(line)
        tensors = model.state_dict()
        weights = lazy_weights(tensors.__getitem__, tensors)
    bundle = read_run(run, weights)
    return replace(bundle, notes={**bundle.notes, "license": license_of(run)})


def _best(run: RunFolder) -> Path:
    path, damage = checkpoint.find(run.checkpoints, "best", checkpoint.verify)
    for line in damage:
        warn(line)
    return path


def _write(run: RunFolder, to: str, target: Path, *, dtype: str | None) -> str:
    if to == "peft":
        return _write_adapter(run, target)
    bundle = bundle_of(run)
    if to == "gguf":
        gguf.write(bundle, target, dtype)
        return "GGUF, for llama.cpp"
    if to in word_vectors.TITLES:
        return word_vectors.write(bundle, target, to)
    if to == "weft":  # with the run's objective, columns and length
        save_run(bundle, target, recipe_like(run.recipe(), bundle, target))
        return "a run"
    with replacing_folder(target) as folder:
        if to == "onnx":
            onnx.write(bundle, folder)
            return "ONNX, for onnxruntime"
        family = hf.write(_with_frame(run, bundle), folder, dtype)
        card = model_card(run.recipe(), read_lines(run.events), license_of(run))
        (folder / "README.md").write_text(card, encoding="utf-8")
    return f"{family.title}, for transformers"


def _with_frame(run: RunFolder, bundle: ModelBundle) -> ModelBundle:
    """Add the special tokens that the model reads around a whole text: a source, or a text to label."""
    objective: Objective[Any] = objectives.build(run.recipe(), run)
    tokenizer = bundle.source_tokenizer or bundle.tokenizer
    if isinstance(objective, Pairs) and objective.settings.languages is not None:
        return bundle  # a multilingual model keeps the files it was imported with
    if not isinstance(objective, TranslationObjective | RowObjective):
        return bundle
    if tokenizer is None or not (tokenizer.has_frame or tokenizer.eos_id):
        return bundle
    return replace(bundle, frame=(objective.frame.before, objective.frame.after))


def _write_adapter(run: RunFolder, target: Path) -> str:
    recipe = run.recipe()
    if recipe.adapter is None or recipe.init is None:
        raise InteropError(f"--to peft: {run.path} has no adapter; --to hf writes the whole model")
    check_base(run, recipe)
    bundle, base_notes = read_run(run, {}), read_run(open_run(recipe.init), {}).notes
    weights = checkpoint.load_tensors(_best(run) / "model.safetensors")
    adapter = peft.Adapter(recipe.adapter, weights, bundle.files, bundle.notes)
    base = base_notes.get("place") or str(recipe.init)
    with replacing_folder(target) as folder:
        parameters = peft.write(
            folder, replace(bundle, notes=base_notes), adapter, base_name=base
        )  # by the base family's names
        card = model_card(recipe, read_lines(run.events), license_of(run), adapter=parameters)
        (folder / "README.md").write_text(card, encoding="utf-8")
    return "an adapter, for peft"
