"""Every format that weft imports. A new one is a file with `read`, and a line in the table."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from weft.errors import InteropError, hub_failure, suggestion
from weft.interop import llama2c, nanogpt
from weft.interop.bundle import ModelBundle
from weft.interop.ctranslate2 import argos, ctranslate2
from weft.interop.gguf import gguf
from weft.interop.hf import hf
from weft.storage.untrusted import refuse_pointer


class ImportFormat(NamedTuple):
    """A format: its name in messages, how to recognise a path of it, and its reader.

    The reader takes the path and, where the user named one, that of a tokenizer to use instead of the model's own.
    """

    title: str
    recognises: Callable[[Path], bool]
    read: Callable[[Path, Path | None], ModelBundle]


WEIGHTS = re.compile(r"(pytorch|adapter)_model.*\.bin")  # of transformers and PEFT, not a model of llama2.c
FORMATS = (
    ImportFormat("a CTranslate2 folder", ctranslate2.recognises, ctranslate2.read),
    ImportFormat("an .argosmodel", argos.recognises, argos.read),
    ImportFormat("a Hugging Face folder or hub name", lambda path: (path / hf.CONFIG).is_file(), hf.read),
    ImportFormat("a .gguf file", lambda path: path.suffix == ".gguf", gguf.read),
    ImportFormat("llama2.c's .bin", lambda path: path.suffix == ".bin" and not WEIGHTS.match(path.name), llama2c.read),
    ImportFormat("nanoGPT's .pt", lambda path: path.suffix == ".pt", nanogpt.read),
)
PICKLED = ["pytorch_model*.bin"]
HUB_FILES = ["README.md", "*.json", "*.safetensors", "*.txt", "*.model", "*.spm", "*.jinja"]


def read_model(source: Path | str, tokenizer: Path | str | None = None) -> ModelBundle:
    """Another program's model, in whichever of the formats it is; one on the hub is downloaded first."""
    path, name = Path(source), str(source)
    if not path.exists():
        if not re.fullmatch(r"(hub:)?\w[\w.-]*/\w[\w.-]*", name) or Path(name.partition("/")[0]).is_dir():
            near = suggestion(name, map(str, path.parent.glob("*")), what="files here")
            raise InteropError(f"{name}: no such file or folder{near and f'; {near}'}")
        path = _download(name.removeprefix("hub:"))
    for known in FORMATS:
        if known.recognises(path):
            return known.read(path, None if tokenizer is None else Path(tokenizer))
    raise InteropError(f"{path}: {_unrecognised(path)}")


def _download(repository: str) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        look = "to look for it on the hub, install huggingface_hub: pip install 'weft[hub]'"
        raise InteropError(f"{repository}: no such folder here; {look}") from None
    try:
        folder = Path(huggingface_hub.snapshot_download(repository, allow_patterns=HUB_FILES))
        if not any(folder.glob("*.safetensors")):  # an older model
            huggingface_hub.snapshot_download(repository, allow_patterns=PICKLED)
        return folder
    except Exception as error:  # the client, its HTTP library and the system each have errors of their own
        why = f"taken for a name on the hub, and {hub_failure(error)}"
        raise InteropError(f"{repository}: no such folder here; {why}") from None


def _unrecognised(path: Path) -> str:
    known = f"weft imports {', '.join(each.title for each in FORMATS)}, and with --base a PEFT folder"
    if path.is_dir():
        if (path / "config.toml").is_file():
            return "already a run of weft; it needs no import"
        likely = [each for each in sorted(path.glob("*")) if each.is_dir() or each.suffix in (".gguf", argos.ENDING)]
        inside = next((each for each in likely if any(form.recognises(each) for form in FORMATS)), None)
        hint = f"name {inside.name} in it" if inside else known
        return f"not a model that weft knows: it has no {hf.CONFIG}; {hint}"
    if path.is_file():
        refuse_pointer(path)
    if path.suffix in (".safetensors", ".json") or WEIGHTS.match(path.name):
        return f"one file of a model; name the folder that it is in: weft import {path.absolute().parent} RUN"
    return f"not a model that weft knows; {known}"
