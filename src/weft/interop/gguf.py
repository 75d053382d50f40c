"""Models as GGUF files, llama.cpp's format: one file with the settings, the weights and the tokenizer.

Numbers that lie in blocks of few bits are unpacked to fp32, which holds them exactly; fp16 would round each of them
once more. Where all matrices of a file are of one half-width type and its vectors fit in it, that type is kept. A file
that is written with `dtype = None` holds every matrix as the run does, so that reading it again gives the same numbers.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.config import validate
from weft.errors import suggestion
from weft.interop.bundle import LazyWeights, ModelBundle, named_tokenizer
from weft.interop.gguf_file import (
    BY_NAME,
    DTYPES,
    STRING,
    UINT32,
    Contents,
    Encoding,
    Slot,
    Value,
    open_file,
    packing,
    write_file,
)
from weft.interop.gguf_models import (
    FREQUENCIES,
    KNOWN,
    POSITIONS,
    Settings,
    architecture_of,
    frequency_factors,
    model_keys,
    rules,
    settings_tree,
)
from weft.interop.gguf_tokenizer import read_tokenizer, tokenizer_keys
from weft.interop.weight_map import Conversion, conversions, to_ours, to_theirs
from weft.models.config import Decoder
from weft.nn.config import Llama3Scaling, RMSNorm, Rotary
from weft.progress import bar

TYPES = ("f32", "f16", "bf16", "q8_0")


# ---- reading


def recognises(path: Path) -> bool:
    """Whether a path looks like a GGUF file."""
    return path.suffix == ".gguf"


def read(path: Path, tokenizer: Path | None = None) -> ModelBundle:
    """The model in a GGUF file, with the tokenizer at another path if one is given.

    Weights are read, and unpacked, when they are asked for.
    """
    contents = open_file(path)
    settings = Settings(contents)
    architecture = settings.architecture
    if architecture not in KNOWN:
        raise settings.wrong(f"general.architecture = {architecture!r:.60}: {suggestion(str(architecture), KNOWN)}")
    if (parts := settings.get("split.count", 1)) != 1:
        raise settings.wrong(f"one of {parts!r:.60} parts of a model; join them with llama-gguf-split")
    if any(entry.encoding.block > 1 for entry in contents.tensors.values()):
        packing()  # said now, not when the first weight is read
    found = {name: entry.shape for name, entry in contents.tensors.items() if name != FREQUENCIES}
    if architecture == "gpt2" and _repeated(contents, "output.weight", "token_embd.weight"):
        del found["output.weight"]  # some writers store GPT-2's one table twice
    tree = settings_tree(settings) | {"kind": "decoder", "head": {"kind": "lm", "tied": "output.weight" not in found}}
    model = validate(Decoder, tree, str(path))
    own = (
        read_tokenizer(contents.keys, str(path)) if tokenizer is None else named_tokenizer(tokenizer, model.vocab_size)
    )
    _same_vocabulary(settings, model.vocab_size)
    weights = to_ours(conversions(rules(architecture, model), model), found, contents.tensor, str(path))
    encoding, dtype = _most(contents), _dtype(contents, model)
    return ModelBundle(
        model=model,
        weights={name: _as(dtype, make) for name, make in weights.items()},
        tokenizer=own,
        origin=f"{path.name} (GGUF, {architecture}, {encoding.name})",
        notes={"gguf": {"architecture": architecture, "encoding": encoding.name, "keys": settings.unused()}},
    )


def _as(dtype: torch.dtype, make: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: make().to(dtype)


def _repeated(contents: Contents, name: str, other: str) -> bool:
    there = contents.tensors
    return name in there and other in there and contents.raw(name) == contents.raw(other)


def _same_vocabulary(settings: Settings, rows: int) -> None:
    """The table of embeddings, the tokens and the settings must agree on how many there are."""
    said = settings.get(f"{settings.architecture}.vocab_size", rows)
    tokens = settings.contents.get("tokenizer.ggml.tokens")
    listed = len(tokens) if isinstance(tokens, list) else rows
    for what, size in ((f"'{settings.architecture}.vocab_size' is", said), ("the tokenizer's tokens are", listed)):
        if size != rows:
            raise settings.wrong(f"the vocabulary disagrees: {what} {size!r:.60}, 'token_embd.weight' has {rows} rows")


def _most(contents: Contents) -> Encoding:
    """The encoding of most numbers."""
    sizes: dict[Encoding, int] = {}
    for entry in contents.tensors.values():
        sizes[entry.encoding] = sizes.get(entry.encoding, 0) + math.prod(entry.shape)
    return max(sizes, key=sizes.__getitem__)


def _dtype(contents: Contents, model: Decoder) -> torch.dtype:
    """One type that holds every number of the file as it is."""
    offset = model.norm.offset if isinstance(model.norm, RMSNorm) else 0.0
    matrices = {entry.encoding.name for name, entry in contents.tensors.items() if not _always_wide(name, entry.shape)}
    dtype = DTYPES.get(matrices.pop(), torch.float32) if len(matrices) == 1 else torch.float32
    for name, entry in contents.tensors.items():
        if _always_wide(name, entry.shape) and name != FREQUENCIES:
            vector = contents.tensor(name).float() - offset
            if not torch.equal(vector.to(dtype).float(), vector):
                return torch.float32
    return dtype


def _always_wide(name: str, shape: tuple[int, ...]) -> bool:
    """Whether llama.cpp wants fp32 of a tensor, however narrow the others are."""
    return len(shape) == 1 or name == POSITIONS


# ---- writing


def write(bundle: ModelBundle, path: Path, dtype: str | None = None) -> None:
    """Write a model as a GGUF file, whole or not at all.

    `dtype`, one of TYPES, is what matrices are stored in; without one each stays as it is. Vectors are fp32, as
    llama.cpp wants them. Keys that were read from a GGUF file and that weft has no word for are written again.
    """
    model, tokenizer = bundle.model, bundle.tokenizer
    architecture = architecture_of(model)
    assert isinstance(model, Decoder)
    if dtype == "q8_0":
        packing()
    kept = bundle.notes.get("gguf", {}).get("keys", {})
    if tokenizer is None or bundle.notes.get("tokenizer", tokenizer.fingerprint) != tokenizer.fingerprint:
        kept = {key: value for key, value in kept.items() if not key.startswith("tokenizer.")}  # about another one
    keys = _general(architecture, path.stem, kept) | model_keys(architecture, model)
    if tokenizer is not None:
        pre = kept["tokenizer.ggml.pre"][1] if "tokenizer.ggml.pre" in kept else None
        keys |= tokenizer_keys(tokenizer, model.vocab_size, pre)
    keys |= {key: Value(*value) for key, value in kept.items() if key not in keys}
    table = conversions(rules(architecture, model), model)
    slots = _slots(table, bundle.weights, dtype)
    if isinstance(model.position, Rotary) and isinstance(model.position.scaling, Llama3Scaling):
        factors = frequency_factors(model.position, model.d_head)
        slots.insert(0, Slot(FREQUENCIES, tuple(factors.shape), BY_NAME["F32"], lambda: factors))
    with bar("writing", len(slots)) as advance:
        write_file(path, keys, slots, advance)


def _slots(table: list[Conversion], weights: LazyWeights, dtype: str | None) -> list[Slot]:
    makers = to_theirs(table, weights)
    parts = [part for conversion in table for part in conversion.parts]
    return [Slot(part.name, part.shape, _encoding(part.name, part.shape, dtype), makers[part.name]) for part in parts]


def _encoding(name: str, shape: tuple[int, ...], dtype: str | None) -> Encoding | None:
    if _always_wide(name, shape):
        return BY_NAME["F32"]
    if dtype is None:
        return None
    wanted = BY_NAME[dtype.upper()]
    return wanted if shape[-1] % wanted.block == 0 else BY_NAME["F16"]


def _general(architecture: str, name: str, kept: Mapping[str, Any]) -> dict[str, Value]:
    first = {
        "general.architecture": Value(STRING, architecture),
        "general.type": Value(STRING, "model"),
        "general.name": Value(STRING, name),
        "general.file_type": Value(UINT32, 0),
        "general.quantization_version": Value(UINT32, 2),
    }
    return first | {key: Value(*kept[key]) for key in ("general.type", "general.name") if key in kept}
