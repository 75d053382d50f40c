"""All formats that weft imports. To add one, write a module with `read` and add a line to FORMATS."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from weft.errors import InteropError, download_first, hub_failure, quoted, suggestion
from weft.interop import llama2c, nanogpt, word_vectors
from weft.interop.bundle import ModelBundle
from weft.interop.ctranslate2 import argos, ctranslate2
from weft.interop.gguf import gguf
from weft.interop.hf import hf
from weft.storage.untrusted import refuse_pointer


class ImportFormat(NamedTuple):
    """A format: its name in messages, a predicate for paths, and its reader.

    The reader takes the path of the model and, if the user named one, of a tokenizer that replaces the model's.
    """

    title: str
    recognises: Callable[[Path], bool]
    read: Callable[[Path, Path | None], ModelBundle]


WEIGHTS = re.compile(r"(pytorch|adapter)_model.*\.bin")  # of transformers and PEFT; other .bin files are llama2.c's
FORMATS = (
    ImportFormat("a CTranslate2 folder", ctranslate2.recognises, ctranslate2.read),
    ImportFormat("an .argosmodel", argos.recognises, argos.read),
    ImportFormat("a Hugging Face folder or hub name", lambda path: (path / hf.CONFIG).is_file(), hf.read),
    ImportFormat("a .gguf file", lambda path: path.suffix == ".gguf", gguf.read),
    ImportFormat("word vectors of word2vec or GloVe", word_vectors.recognises, word_vectors.read),
    ImportFormat("llama2.c's .bin", lambda path: path.suffix == ".bin" and not WEIGHTS.match(path.name), llama2c.read),
    ImportFormat("nanoGPT's .pt", lambda path: path.suffix == ".pt", nanogpt.read),
)
PICKLED = ["pytorch_model*.bin"]
HUB_FILES = ["README.md", "*.json", "*.safetensors", "*.txt", "*.model", "*.spm", "*.jinja"]


HUB_NAME = re.compile(r"(hub:)?\w[\w.-]*/\w[\w.-]*")


def read_model(source: Path | str, tokenizer: Path | str | None = None) -> ModelBundle:
    """Read another program's model in any of the formats; a model on the hub is downloaded first."""
    path = find_model(source)
    for form in FORMATS:
        if form.recognises(path):
            return form.read(path, None if tokenizer is None else Path(tokenizer))
    raise InteropError(f"{path}: {_why_unrecognised(path)}")


def recognises(source: Path | str) -> bool:
    """Return whether a path has one of the formats, or may be a name on the hub."""
    return any(form.recognises(Path(source)) for form in FORMATS) or _may_be_on_hub(str(source))


def find_model(source: Path | str) -> Path:
    """Return the path of a model; one on the hub is downloaded first."""
    path, name = Path(source), str(source)
    if path.exists():
        return path
    if _may_be_on_hub(name):
        return _download(name.removeprefix("hub:"))
    if page := re.match(r"https?://huggingface\.co/([\w.-]+/[\w.-]+)", name):
        raise InteropError(f"{name}: give a model on the hub by its name: weft import {page[1]} RUN")
    if "://" in name:
        raise InteropError(download_first(name))
    near = suggestion(name, map(str, path.parent.glob("*")), what="files here")
    raise InteropError(f"{name}: no such file or folder{near and f'; {near}'}")


def _may_be_on_hub(name: str) -> bool:
    """Return whether nothing here has this name, nor its first part, which would be a user's folder."""
    owner = name.partition("/")[0]
    return bool(HUB_NAME.fullmatch(name)) and owner != "runs" and not Path(name).exists() and not Path(owner).is_dir()


def _download(repository: str) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        advice = "to look for it on the hub, install huggingface_hub: pip install 'weft[hub]'"
        raise InteropError(f"{repository}: no such folder here; {advice}") from None
    try:
        folder = Path(huggingface_hub.snapshot_download(repository, allow_patterns=HUB_FILES))
        if not any(folder.glob("*.safetensors")):  # an older model
            huggingface_hub.snapshot_download(repository, allow_patterns=PICKLED)
        return folder
    except Exception as error:  # the client, its HTTP library and the system each raise different errors
        why = f"taken for a name on the hub, and {hub_failure(error)}"
        raise InteropError(f"{repository}: no such folder here; {why}") from None


def _why_unrecognised(path: Path) -> str:
    known = f"weft imports {', '.join(form.title for form in FORMATS)}, and with --base a PEFT folder"
    if path.is_dir():
        if (path / "config.toml").is_file():
            return "already a run of weft; it needs no import"
        inner = [file for file in sorted(path.glob("*")) if file.is_dir() or file.suffix in (".gguf", argos.ENDING)]
        model = next((file for file in inner if any(form.recognises(file) for form in FORMATS)), None)
        hint = f"name {model.name} in it" if model else known
        return f"not a model that weft knows: it has no {hf.CONFIG}; {hint}"
    if path.is_file():
        refuse_pointer(path)
    if path.suffix in (".safetensors", ".json") or WEIGHTS.match(path.name):
        return f"one file of a model; name the folder that it is in: weft import {quoted(path.absolute().parent)} RUN"
    return f"not a model that weft knows; {known}"
