"""Models from other programs as runs, and runs as other programs' models.

Reading and writing a format is `weft.interop`'s; here the format is found, and the run's folder made or opened. What is
made is built beside its place and renamed: a failure leaves nothing behind.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from weft.config import validate
from weft.errors import InteropError, RunError, TokenizerError, suggestion
from weft.interop import safetensors
from weft.interop.loaded import Loaded, Weights
from weft.interop.mapping import shapes
from weft.models.build import build
from weft.models.config import Encoder, EncoderDecoder, Model
from weft.nn.init import empty_weights
from weft.progress import bar
from weft.recipe.config import SOURCE_TOKENIZER, Recipe
from weft.recipe.objective import GOALS
from weft.runs.checkpoint import checkpoint_name, link, seal, write_synced
from weft.runs.folder import RunFolder, checkpoint_path, found, load_model, open_run, read_lines
from weft.text.tokenizer import FILE, Tokenizer

Format = Literal["hf", "gguf", "onnx", "weft"]
FORMATS: tuple[Format, ...] = ("hf", "gguf", "onnx", "weft")
READS = "a Hugging Face folder or hub name, .gguf, a CTranslate2 folder, llama2.c's .bin, nanoGPT's .pt"
LONGEST_WINDOW = 2048  # read at once when an imported model is measured, however long its context
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.spm", "*.jinja"]


# ---- in


def import_model(
    source: Path | str, run: Path | str, *, tokenizer: Path | str | None = None
) -> tuple[RunFolder, Loaded]:
    """Make a run of another program's model; the run, and what was read.

    `tokenizer` is a file or folder for sources that come without one. The run's folder must not exist, or be empty.
    """
    target = Path(run)
    _refuse_existing(target, "choose another folder for the run")
    loaded = read_model(source, tokenizer)
    if loaded.tokenizer is None:
        raise InteropError(f"{source}: there is no tokenizer with it; name one with --tokenizer")
    with built_beside(target) as beside:
        _write_run(RunFolder(beside), loaded, target)
    return RunFolder(target), loaded


def read_model(source: Path | str, tokenizer: Path | str | None = None) -> Loaded:
    """Another program's model, whichever of the formats it is in."""
    path = Path(source)
    given = Tokenizer.load(tokenizer) if tokenizer is not None and path.suffix not in (".bin", ".pt") else None
    loaded = _read(path, str(source), given, tokenizer)
    if given is None:
        return loaded
    size = loaded.model.vocab_size
    if given.vocab_size > size:
        raise TokenizerError(f"{tokenizer}: {given.vocab_size} entries, but the model knows {size}")
    return _with_tokenizer(loaded, given)


def _read(path: Path, source: str, given: Tokenizer | None, tokenizer: Path | str | None) -> Loaded:
    from weft.interop import hf

    if path.is_dir():
        from weft.interop import ctranslate2

        if ctranslate2.is_folder(path):
            return ctranslate2.read(path)
        if (path / hf.CONFIG).is_file():
            return hf.read(path, given)
        if (path / "config.toml").is_file():
            raise InteropError(f"{path}: a run of weft already; it needs no import")
        inside = sorted(path.glob("*.gguf"))
        hint = f"; {inside[0].name} in it can be read by its own name" if inside else f"; weft reads {READS}"
        raise InteropError(f"{path}: no model that weft knows: there is no {hf.CONFIG} in it{hint}")
    if path.is_file():
        return _read_file(path, tokenizer)
    if re.fullmatch(r"(hub:)?\w[\w.-]*/\w[\w.-]*", source) and not Path(source.partition("/")[0]).is_dir():
        return hf.read(_download(source.removeprefix("hub:")), given)
    near = [str(path.parent / name) for name in _listing(path.parent)]
    raise InteropError(f"{source}: no such file or folder; {suggestion(source, near)}")


def _read_file(path: Path, tokenizer: Path | str | None) -> Loaded:
    match path.suffix:
        case ".gguf":
            from weft.interop import gguf

            return gguf.read(path)
        case ".bin" if path.name == "model.bin" and (path.parent / "config.json").is_file():
            from weft.interop import ctranslate2

            return ctranslate2.read(path.parent)
        case ".bin" if not path.name.startswith("pytorch_model"):
            from weft.interop import llama2c

            return llama2c.read(path, tokenizer)
        case ".pt":
            from weft.interop import nanogpt

            return nanogpt.read(path, tokenizer)
        case ".safetensors" | ".json":
            raise InteropError(f"{path}: one file of a model; name the folder that it is in")
    raise InteropError(f"{path}: not a model that weft knows; it reads {READS}")


def _listing(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _download(repository: str) -> Path:
    """A model of the hub, in the client's cache."""
    try:
        import huggingface_hub
    except ImportError:
        raise InteropError(
            f"{repository}: no such folder here; as a name on the hub it needs huggingface_hub: pip install 'weft[hub]'"
        ) from None
    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=HUB_FILES))
    except Exception as error:  # the client, its HTTP library and the system each have errors of their own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InteropError(f"{repository}: no such folder here, and not to be had from the hub: {reason}") from None


def _with_tokenizer(loaded: Loaded, tokenizer: Tokenizer) -> Loaded:
    from dataclasses import replace

    return loaded if loaded.tokenizer is tokenizer else replace(loaded, tokenizer=tokenizer)


def _refuse_existing(path: Path, instead: str) -> None:
    path = Path(os.path.realpath(path))
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise RunError(f"{path}: something is there already; {instead}")
    except OSError as error:
        raise RunError(f"{path}: cannot be read: {error.strerror}") from None


@contextmanager
def built_beside(target: Path) -> Iterator[Path]:
    """A folder beside `target` that takes its place when all went well, and goes when not."""
    target = Path(os.path.realpath(target))  # `.` and links to folders too
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.mkdir(parents=True)
        yield beside
        for path in (*sorted(beside.rglob("*")), beside):
            if not path.is_symlink():
                _sync(path)
        os.rename(beside, target)
        _sync(target.parent)
    except OSError as error:
        raise RunError(f"{target}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- a run's folder


def _write_run(run: RunFolder, loaded: Loaded, place: Path, own: Recipe | None = None) -> None:
    """Everything that `weft.load` needs, and the notes that an export gives back; `own` is what it learned by here."""
    assert loaded.tokenizer is not None
    checkpoint = run.checkpoints / checkpoint_name(0)
    (checkpoint / "state").mkdir(parents=True)
    with bar("importing", parameters(loaded.model)) as advance:
        safetensors.write(checkpoint / "model.safetensors", _counted(loaded.weights, advance))
    write_synced(checkpoint / "state/state.json", json.dumps({"step": 0, "notes": {}}, indent=1))
    seal(checkpoint, 0, {})
    for name in ("latest", "best"):
        link(run.checkpoints, name, checkpoint)
    loaded.tokenizer.save(run.path)
    if loaded.source_tokenizer is not None:
        (run.path / SOURCE_TOKENIZER).mkdir()
        loaded.source_tokenizer.save(run.path / SOURCE_TOKENIZER)
    _write_origin(run.origin, loaded)
    found(run, _recipe(loaded, place) if own is None else _as_learned(_recipe(loaded, place), own))
    run.event("import", origin=loaded.origin, parameters=parameters(loaded.model))


def _counted(weights: Weights, advance: Callable[[int], None]) -> Weights:
    """The same weights; each is counted when it was made."""

    def counted(make: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def counting() -> Tensor:
            tensor = make()
            advance(tensor.numel())
            return tensor

        return counting

    return {name: counted(make) for name, make in weights.items()}


def parameters(model: Model) -> int:
    """How many numbers a model has learned."""
    with empty_weights():
        return sum(parameter.numel() for parameter in build(model).parameters())


def _write_origin(folder: Path, loaded: Loaded) -> None:
    """What an export needs to give back the files as they were."""
    assert loaded.tokenizer is not None
    folder.mkdir()
    notes = {"origin": loaded.origin, "tokenizer": loaded.tokenizer.fingerprint, "notes": loaded.notes}
    write_synced(folder / "notes.json", json.dumps(notes, indent=1, ensure_ascii=False))
    for name, data in loaded.files.items():
        file = folder / "files" / name
        assert file.resolve().is_relative_to(folder.resolve()), "a format's reader names its files itself"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    if loaded.unused:
        safetensors.write(folder / "unused.safetensors", loaded.unused)


def _recipe(loaded: Loaded, place: Path) -> Recipe:
    """The recipe that stands for an imported model: how it is read, and what it could be trained for further."""
    model = loaded.model
    tokenizer = {"kind": "pretrained", "path": str(place)}
    tree: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9._+-]+", "-", place.name).strip("-._+") or "run",
        "precision": "fp32",
        "compile": False,
        "tokenizer": tokenizer,
        "model": model.model_dump(mode="json", exclude_none=True),
        "objective": _goal(loaded),
        "batch": {"length": min(getattr(model, "context", LONGEST_WINDOW), LONGEST_WINDOW)},
    }
    if loaded.source_tokenizer is not None:
        tree["source_tokenizer"] = {**tokenizer, "path": str(place / SOURCE_TOKENIZER)}
    return validate(Recipe, tree, loaded.origin)


def _as_learned(recipe: Recipe, own: Recipe) -> Recipe:
    """The recipe with what another one says about using the model: its goal, its columns, where texts are cut."""
    return recipe.replace(
        objective=own.objective.model_dump(exclude_none=True),
        batch={"length": own.batch.length},
        data={"column": own.data.column},
        precision=own.precision,
    )


def _goal(loaded: Loaded) -> dict[str, Any]:
    """What a model of this kind, with this head, is trained for."""
    model = loaded.model
    if isinstance(model, EncoderDecoder):
        return {"kind": "pairs"}
    if not isinstance(model, Encoder):
        return {"kind": "next-token"}
    head = model.head
    if getattr(head, "labels", None) == 1:
        return {"kind": "score"}
    goals = (name for name, goal in GOALS.items() if "encoder" in goal.kinds and head.kind in goal.heads)
    goal: dict[str, Any] = {"kind": next(goals, "next-token")}
    if loaded.labels is not None and goal["kind"] in ("classify", "tag"):
        goal["labels"] = list(loaded.labels)
    return goal


# ---- out


def export_model(run: Path | str, to: str, dest: Path | str, *, dtype: str | None = None) -> str:
    """Write a run's best weights as another program's model; a line that says what was written.

    `to` is hf (a folder for transformers), gguf (a file for llama.cpp), onnx (a folder for onnxruntime) or weft (a run
    that stands by itself, an adapter merged into its base). `dtype` is what the numbers become: fp32, fp16 or bf16 for
    hf, f32, f16, bf16 or q8_0 for gguf; absent, they stay as they are.
    """
    if to not in FORMATS:
        raise InteropError(f"--to {to}: {suggestion(to, FORMATS)}")
    folder, target = open_run(run), Path(dest)
    _refuse_existing(target, "choose another place for the export")
    if to == "hf":
        return _to_hf(folder, target, dtype)
    if to == "gguf":
        return _to_gguf(folder, target, dtype)
    if to == "onnx":
        return _to_onnx(folder, target, dtype)
    return _to_weft(folder, target, dtype)


def read_run(run: RunFolder) -> tuple[Loaded, Path]:
    """A run as a model that could go elsewhere, its weights not yet read; and the checkpoint that they are in."""
    recipe = run.recipe()
    path, _ = checkpoint_path(run)
    weights = _merged(run) if recipe.adapter is not None else _stored(path, recipe.model)
    origin, notes = run.origin, {}
    tokenizer = Tokenizer.load(run.path)
    files: dict[str, bytes] = {}
    unused: Weights = {}
    if (origin / "notes.json").is_file():
        saved = safetensors.read_json(origin / "notes.json")
        notes = {**saved.get("notes", {}), "tokenizer": saved.get("tokenizer")}
        kept = origin / "files"
        files = {file.relative_to(kept).as_posix(): file.read_bytes() for file in _files(kept)}
        if (origin / "unused.safetensors").is_file():
            spare = safetensors.listing(origin / "unused.safetensors")
            unused = _lazily(safetensors.reader(spare), {name: name for name in spare})
    source = run.path / SOURCE_TOKENIZER
    labels = getattr(recipe.objective, "labels", None)
    return Loaded(
        model=recipe.model,
        weights=weights,
        tokenizer=tokenizer,
        origin=str(run.path),
        notes=notes,
        unused=unused,
        files=files,
        labels=None if labels is None else tuple(labels),
        source_tokenizer=Tokenizer.load(source) if (source / FILE).is_file() else None,
    ), path


def _stored(path: Path, model: Model) -> Weights:
    """A checkpoint's weights, each read when it is asked for."""
    stored = safetensors.listing(path / safetensors.SINGLE)
    tied = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["tied"]
    names = {**{name: name for name in stored}, **tied}
    missing = [name for name in shapes(model) if name not in names]
    if missing:
        raise RunError(f"{path}: '{missing[0]}' is not in it, though the model in config.toml has it")
    return _lazily(safetensors.reader(stored), names)


def _merged(run: RunFolder) -> Weights:
    """The weights of a run that holds an adapter alone, merged with those it was learned beside."""
    tensors = load_model(run)[0].state_dict()
    return _lazily(lambda name: tensors[name], {name: name for name in tensors})


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _lazily(read: Callable[[str], Tensor], names: Mapping[str, str]) -> Weights:
    def one(name: str) -> Callable[[], Tensor]:
        return lambda: read(name)

    return {name: one(stored) for name, stored in names.items()}


HALVES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _to_hf(run: RunFolder, target: Path, dtype: str | None) -> str:
    from weft.interop import hf_export

    if dtype is not None and dtype not in HALVES:
        raise InteropError(f"--dtype {dtype}: {suggestion(dtype, HALVES)}")
    loaded, path = read_run(run)
    size = (path / safetensors.SINGLE).stat().st_size
    with built_beside(target) as beside, bar("writing", size, unit="bytes") as advance:
        wanted = None if dtype is None else HALVES[dtype]
        family = hf_export.write(loaded, beside, wanted, advance)
        (beside / "README.md").write_text(_card(run), encoding="utf-8")
    return f"{target}: {family.title}, for transformers"


def _to_gguf(run: RunFolder, target: Path, dtype: str | None) -> str:
    from weft.interop import gguf

    kinds = ("f32", "f16", "bf16", "q8_0")
    if dtype is not None and dtype not in kinds:
        raise InteropError(f"--dtype {dtype}: {suggestion(dtype, kinds)}")
    loaded, _ = read_run(run)
    gguf.write(
        loaded.model,
        loaded.weights,
        loaded.tokenizer,
        target,
        dtype,  # type: ignore[arg-type]
        notes=loaded.notes,
        progress=True,
    )
    return f"{target}: GGUF, for llama.cpp"


def _to_onnx(run: RunFolder, target: Path, dtype: str | None) -> str:
    from weft.interop import onnx

    if dtype is not None:
        raise InteropError(f"--dtype {dtype}: an ONNX file is written in fp32; leave it out")
    model, _ = load_model(run, device="cpu")
    source = run.path / SOURCE_TOKENIZER
    other = Tokenizer.load(source) if (source / FILE).is_file() else None
    onnx.export_onnx(model, Tokenizer.load(run.path), target, other)
    return f"{target}: ONNX, for onnxruntime"


def _to_weft(run: RunFolder, target: Path, dtype: str | None) -> str:
    if dtype is not None:
        raise InteropError(f"--dtype {dtype}: a run keeps its numbers as they are; leave it out")
    loaded, _ = read_run(run)
    with built_beside(target) as beside:
        _write_run(RunFolder(beside), loaded, target, run.recipe())
    return f"{target}: a run of its own"


def _card(run: RunFolder) -> str:
    from weft.explain.count import count
    from weft.interop.card import card, run_facts

    recipe, events = run.recipe(), list(read_lines(run.events))
    results: dict[str, Any] = {}
    steps = next((line["step"] for line in reversed(events) if line.get("event") == "finish"), None)
    if steps is not None and recipe.batch.size is not None and recipe.batch.length is not None:
        results["tokens"] = steps * recipe.batch.size * recipe.batch.length
        results["flops"] = results["tokens"] * count(recipe.model, recipe.batch.length).training()
    return card(run_facts(recipe.model_dump(mode="json", exclude_none=True), events, results))
