"""Checkpoints of nanoGPT: a .pt file with the weights and the arguments of the model.

Such a file is a pickle, which may run code when it is read; `torch_file.py` makes tensors and plain values of it and
nothing else. The vocabulary is not in it: for a model of characters it is in a meta.pkl, an unrestricted pickle, which
is not read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.config import validate
from weft.errors import InteropError
from weft.interop import torch_file
from weft.interop.bundle import ModelBundle
from weft.interop.families.gpt2 import rules
from weft.interop.settings import Flat, Settings, nested
from weft.interop.table import Special, Table, follows, number, whole
from weft.interop.weight_map import SAME, conversions, to_ours
from weft.models.config import Decoder
from weft.text.tokenizer import Tokenizer

COMPILED = "_orig_mod."
TABLE, OUTPUT = "transformer.wte.weight", "lm_head.weight"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GPT2_SIZES = (50257, 50304)  # the second is the first, padded to a multiple of 64
PLAIN = (int, float, str, type(None))  # what a setting may be; of other things the type is shown


def _read_bias(settings: Settings, model: Flat) -> Flat:
    bias = settings.flag("bias", True)
    return {"attention.bias": "all" if bias else "none", "feedforward.bias": bias, "norm.bias": bias}


SETTINGS = Table(
    rows=(
        whole("vocab_size", "vocab_size"),
        whole("context", "block_size"),
        whole("layers", "n_layer"),
        whole("d_model", "n_embd"),
        whole("attention.heads", "n_head"),
        number("dropout", "dropout", 0.0),
        follows("attention.dropout", "dropout"),
        Special(_read_bias),
        Special(lambda settings, model: {"feedforward.d_ff": 4 * model["d_model"]}),
    ),
    fixed={
        "feedforward.kind": "plain",
        "feedforward.activation": "gelu",
        "norm.kind": "layer",
        "position.kind": "learned",
    },
)
RULES = rules(SAME)  # GPT-2's names, with plain linear layers


def recognises(path: Path) -> bool:
    """Whether a path looks like a nanoGPT checkpoint."""
    return path.suffix == ".pt"


def read(path: Path, tokenizer: Path | None = None) -> ModelBundle:
    """The model in a nanoGPT checkpoint, with the tokenizer at a path if one is given: the checkpoint holds none."""
    stored = _open(path)
    model = _settings(stored.get("model_args"), path)
    state = stored.get("model")
    if not isinstance(state, Mapping) or not all(_is_named(*each) for each in state.items()):
        raise InteropError(f"{path}: not a nanoGPT checkpoint: 'model' is not a table of tensors")
    if model.layers > len(state):  # before that many layers are built
        raise InteropError(f"{path}: model_args.n_layer = {model.layers}: the file holds {len(state)} tensors in all")
    tensors = _tensors(state, path)
    if OUTPUT in tensors and TABLE in tensors:
        if torch.equal(tensors[OUTPUT], tensors[TABLE]):
            del tensors[OUTPUT]  # one table under two names
        else:
            model = model.replace(head={"kind": "lm", "tied": False})
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return ModelBundle(
        model=model,
        weights=to_ours(conversions(RULES, model), found, lambda name: tensors[name].clone(), str(path)),
        tokenizer=None if tokenizer is None else _tokenizer(tokenizer, model.vocab_size),
        origin=f"{path.name} (nanoGPT)",
    )


def _is_named(name: Any, tensor: Any) -> bool:
    return isinstance(name, str) and name.isprintable() and isinstance(tensor, Tensor | torch_file.Other)


def _tensors(state: Mapping[str, Tensor | torch_file.Other], path: Path) -> dict[str, Tensor]:
    """The weights by their plain names: dense tensors whose numbers are all in the file."""
    found: dict[str, tuple[str, Tensor]] = {}
    for name, tensor in state.items():
        if name.endswith((".attn.bias", ".attn.masked_bias")):  # the causal mask of older versions
            continue
        plain = name.removeprefix(COMPILED)
        if plain in found:
            raise InteropError(f"{path}: '{found[plain][0]}' and '{name}' are names of the same tensor")
        if not isinstance(tensor, Tensor) or tensor.dtype not in FLOATS:
            holds = tensor.name if isinstance(tensor, torch_file.Other) else str(tensor.dtype)
            reason = f"is a tensor of {holds.replace(' ', '.').removeprefix('torch.')}"
            raise InteropError(f"{path}: '{name}' {reason}; weights are dense tensors of F16, BF16, F32 or F64")
        found[plain] = name, tensor
    table, output = (found[name][1] if name in found else None for name in (TABLE, OUTPUT))
    shared = table is not None and output is not None and output.dtype == table.dtype and output.is_set_to(table)
    # the one table that may go by two names
    torch_file.check_claims(path, {name: each for key, (name, each) in found.items() if key != OUTPUT or not shared})
    return {plain: tensor for plain, (_, tensor) in found.items()}


def _open(path: Path) -> Mapping[str, Any]:
    """The checkpoint's table."""
    if not path.is_file():
        raise InteropError(f"{path}: no such file")
    stored = torch_file.read(path)
    if not isinstance(stored, Mapping) or "model" not in stored:
        raise InteropError(f"{path}: not a nanoGPT checkpoint: it has no 'model'")
    return stored


def _settings(given: Any, path: Path) -> Decoder:
    if not isinstance(given, Mapping):
        raise InteropError(f"{path}: not a nanoGPT checkpoint: it has no 'model_args'")
    plain = {key: value if isinstance(value, PLAIN) else type(value).__name__ for key, value in given.items()}
    settings = Settings({f"model_args.{key}": value for key, value in plain.items()}, str(path), "model_args.")
    return validate(Decoder, nested(SETTINGS.read(settings, {})), str(path))


def _tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer.load(path)
    padded = vocab_size == GPT2_SIZES[1] and tokenizer.vocab_size == GPT2_SIZES[0]
    if tokenizer.vocab_size != vocab_size and not padded:
        raise InteropError(f"{path}: {tokenizer.vocab_size} tokens, but the model's vocab_size is {vocab_size}")
    return tokenizer
