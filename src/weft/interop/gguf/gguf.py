"""Models as GGUF files, llama.cpp's format: one file with the settings, the weights and the tokenizer.

Quantized weights become fp32, which holds them exactly; fp16 would round each of them once more. Where all matrices of
a file are of one 16-bit type and its vectors fit into it, that type is kept. The blocks themselves are kept beside the
weights: a file that is written with `dtype = None` holds those of every matrix that is still the same, byte for byte,
and any other matrix as the run does, so that reading it again gives the same numbers.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.errors import InteropError
from weft.interop.bundle import ModelBundle, as_dtype, lazily, named_tokenizer
from weft.interop.gguf import file as gguf_file
from weft.interop.gguf import models as gguf_models
from weft.interop.gguf.architectures import ARCHITECTURES, FREQUENCIES, LONG, REPEATED, SHORT
from weft.interop.gguf.file import ARRAY, BY_NAME, DTYPES, Contents, Encoding, LazyTensor, Value, typed
from weft.interop.gguf.models import POSITIONS, rules
from weft.interop.gguf.tokenizer import read_tokenizer, tokenizer_keys
from weft.interop.license import in_keys, to_keys
from weft.interop.settings import Settings, flat, shown
from weft.interop.weight_map import conversions, their_shapes, to_ours, to_theirs
from weft.models.config import Decoder, LMHead
from weft.nn.config import RMSNorm
from weft.progress import bar

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_k", "q4_0")
# Four bits, and what takes their place where a row is not made of whole blocks; the tables of embeddings and of the
# output, to which rounding does most harm, keep eight bits.
FOUR_BITS = {"q4_k": ("Q5_0",), "q4_0": ()}
TABLES = ("token_embd.weight", "output.weight")
FACTORS = (FREQUENCIES, SHORT, LONG)  # tensors that are settings
MAX_KEPT_VALUES = 64  # of an array that is kept as a note
KEPT = ("general.type", "general.name")  # keys that take their former values again
# keys that describe the file itself and are always written afresh
GENERAL = {"general.architecture", "general.alignment", "general.file_type", "general.quantization_version"}


# ---- reading


def recognises(path: Path) -> bool:
    """Whether a path looks like a GGUF file."""
    return path.suffix == ".gguf"


def read(path: Path, tokenizer: Path | None = None) -> ModelBundle:
    """The model in a GGUF file, with the tokenizer at another path if one is given.

    Weights are read, and unpacked, when they are asked for.
    """
    contents = gguf_file.open_file(path)
    architecture = contents.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise InteropError(f"{path}: general.architecture = {shown(architecture)}: weft reads {known}")
    if (parts := contents.get("split.count", 1)) != 1:
        raise InteropError(f"{path}: one of {shown(parts)} parts of a model; join them with llama-gguf-split")
    if any(entry.encoding.block > 1 for entry in contents.tensors.values()):
        gguf_file.quantization()  # a missing package is an error now, not when the first weight is read
    settings = gguf_models.settings_of(contents, architecture)
    found = {name: entry.shape for name, entry in contents.tensors.items() if name not in FACTORS}
    tables = [contents.raw(name) for name in TABLES if name in found]
    if architecture in ("gpt2", *REPEATED) and len(tables) == 2 and tables[0] == tables[1]:
        del found["output.weight"]
    model = gguf_models.read_settings(settings, contents, tied="output.weight" not in found)
    if tokenizer is None:
        own = read_tokenizer(settings.tree, str(path))
    else:
        own = named_tokenizer(tokenizer, model.vocab_size)
        settings.asked |= {key for key in contents.keys if key.startswith("tokenizer.")}  # about another one
    _check_vocabulary(settings, contents, model.vocab_size)
    weights = to_ours(conversions(rules(architecture, model), model), found, contents.tensor, str(path))
    sizes: Counter[str] = Counter()
    for entry in contents.tensors.values():
        sizes[entry.encoding.name] += math.prod(entry.shape)
    dtype = _dtype(contents, model)
    settings.asked |= {*GENERAL, "split.count", "tokenizer.chat_template"}
    unasked = {key: value for key, value in contents.keys.items() if key not in settings.asked}
    kept = {key: list(v) for key, v in unasked.items() if v.type != ARRAY or len(v.value) <= MAX_KEPT_VALUES}
    return ModelBundle(
        model=model,
        weights={name: as_dtype(make, dtype) for name, make in weights.items()},
        tokenizer=own,
        origin=f"{path.name} (GGUF, {architecture}, {sizes.most_common(1)[0][0]})",
        notes={"gguf": {"keys": kept, "encodings": _encodings(contents)}, "license": in_keys(settings.tree)},
        unused=lazily(contents.blocks, (name for name, kind in _encodings(contents).items() if kind not in DTYPES)),
    )


def _encodings(contents: Contents) -> dict[str, str]:
    """How tensors are stored that are not in fp32."""
    return {name: entry.encoding.name for name, entry in contents.tensors.items() if entry.encoding.name != "F32"}


def _check_vocabulary(settings: Settings, contents: Contents, rows: int) -> None:
    """The table of embeddings, the tokens and the settings must agree on how many tokens there are."""
    tokens = contents.get("tokenizer.ggml.tokens")
    for key, size in (
        (f"{settings.prefix}vocab_size", settings.get("vocab_size", rows)),
        ("tokenizer.ggml.tokens", len(tokens) if isinstance(tokens, list) else rows),
    ):
        if size != rows:
            has = f"{key} has {shown(size)} entries"
            raise InteropError(f"{contents.path}: {has}, but 'token_embd.weight' has {rows} rows")


def _dtype(contents: Contents, model: Decoder) -> torch.dtype:
    """One dtype that holds every number of the file as it is."""
    offset = model.norm.offset if isinstance(model.norm, RMSNorm) else 0.0
    matrices = {entry.encoding.name for name, entry in contents.tensors.items() if not _always_fp32(name, entry.shape)}
    dtype = DTYPES.get(matrices.pop(), torch.float32) if len(matrices) == 1 else torch.float32
    for name, entry in contents.tensors.items():
        if _always_fp32(name, entry.shape) and name not in FACTORS:
            vector = contents.tensor(name).float() - offset
            if not torch.equal(vector.to(dtype).float(), vector):
                return torch.float32
    return dtype


def _always_fp32(name: str, shape: tuple[int, ...]) -> bool:
    """Whether llama.cpp wants a tensor in fp32, whatever the others are in."""
    return len(shape) == 1 or name == POSITIONS or name.endswith("_norm.weight")


# ---- writing


def write(bundle: ModelBundle, path: Path, dtype: str | None = None) -> None:
    """Write a model as a GGUF file, whole or not at all.

    `dtype`, one of TYPES, is what matrices are stored in (Q4_K and Q4_0 but for the tables of embeddings and output,
    which take Q8_0); without one each stays as it is, quantized blocks of a GGUF file too. Vectors are fp32, as
    llama.cpp wants them. Keys that were read from a GGUF file and that weft does not use are written again.
    """
    architecture = gguf_models.architecture_of(bundle.model)
    assert isinstance(bundle.model, Decoder)
    if dtype is not None and dtype.startswith("q"):
        gguf_file.quantization()
    keys = _keys(bundle, architecture, path.stem)
    tensors = _tensors(bundle, architecture, dtype)
    with bar("writing", len(tensors)) as advance:
        gguf_file.write_file(path, keys, tensors, advance)


def _keys(bundle: ModelBundle, architecture: str, name: str) -> dict[str, Value]:
    model, tokenizer = bundle.model, bundle.tokenizer
    assert isinstance(model, Decoder)
    kept: Mapping[str, Any] = bundle.notes.get("gguf", {}).get("keys", {})
    if tokenizer is None or bundle.notes.get("tokenizer", tokenizer.fingerprint) != tokenizer.fingerprint:
        kept = {key: value for key, value in kept.items() if not key.startswith("tokenizer.")}  # about another one
    keys = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        "general.file_type": 0,
        "general.quantization_version": 2,
        **{key: name for key, name in to_keys(bundle.notes.get("license", {})).items() if key not in kept},
    }
    keys |= {f"{architecture}.{key}": value for key, value in ARCHITECTURES[architecture].keys(flat(model)).items()}
    if tokenizer is not None:
        pre = kept["tokenizer.ggml.pre"][1] if "tokenizer.ggml.pre" in kept else None
        keys |= tokenizer_keys(tokenizer, model.vocab_size, pre)
    own = {key: Value(*value) for key, value in kept.items() if key not in keys or key in KEPT}
    return {key: typed(value) for key, value in keys.items()} | own


def _tensors(bundle: ModelBundle, architecture: str, dtype: str | None) -> list[LazyTensor]:
    model = bundle.model
    assert isinstance(model, Decoder)
    parts = conversions(rules(architecture, model), model)
    weights = to_theirs(parts, bundle.weights)
    tensors = [
        LazyTensor(name, shape, _encoding(name, shape, dtype), weights[name], *_former(bundle, name))
        for name, shape in their_shapes(parts).items()
    ]
    if architecture in REPEATED and isinstance(model.head, LMHead) and model.head.tied:
        table = next(each for each in tensors if each.name == "token_embd.weight")
        tensors.append(table._replace(name="output.weight"))
    scaled = gguf_models.factors(model)
    first = [LazyTensor(name, tuple(each.shape), BY_NAME["F32"], each.clone) for name, each in scaled.items()]
    return first + tensors


def _former(bundle: ModelBundle, name: str) -> tuple[Encoding | None, Callable[[], Tensor] | None]:
    """How a tensor was stored in the GGUF file that the model came from, if it did, and its quantized blocks."""
    encoding = BY_NAME.get(bundle.notes.get("gguf", {}).get("encodings", {}).get(name))
    if encoding is None or encoding.block == 1:
        return encoding, None
    return (encoding, bundle.unused[name]) if name in bundle.unused else (None, None)


def _encoding(name: str, shape: tuple[int, ...], dtype: str | None) -> Encoding | None:
    if _always_fp32(name, shape):
        return BY_NAME["F32"]
    if dtype is None:
        return None
    wanted = (dtype.upper(), *FOUR_BITS.get(dtype, ()), "F16")
    if dtype in FOUR_BITS and name in TABLES:
        wanted = ("Q8_0", "F16")
    return next(BY_NAME[each] for each in wanted if shape[-1] % BY_NAME[each].block == 0)
