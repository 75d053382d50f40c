"""Checkpoints of nanoGPT: a .pt file with the weights and the arguments of the model.

Such a file is a pickle, which may run code when it is read; `torch_file.py` makes tensors and plain values of it and
nothing else. The vocabulary is not in it: for a model of characters it is in a meta.pkl, an unrestricted pickle, which
is not read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from weft.config import validate
from weft.errors import InteropError
from weft.interop import torch_file
from weft.interop.bundle import ModelBundle, named_tokenizer
from weft.interop.families.gpt2 import names
from weft.interop.hf.weights import check_floats
from weft.interop.settings import Settings, nested
from weft.interop.table import Special, Table, all_biases, follows, four_times, keys
from weft.interop.weight_map import SAME, conversions, module, to_ours
from weft.models.config import Decoder
from weft.tensors import Stored

COMPILED = "_orig_mod."
TABLE, OUTPUT = "transformer.wte.weight", "lm_head.weight"
GPT2_SIZES = (50257, 50304)  # of a vocabulary; the second is the first, padded to a multiple of 64
PLAIN = (int, float, str, type(None))  # what a setting may be; of other things the type is shown
FIXED = {"feedforward.kind": "plain", "norm.kind": "layer"}
SETTINGS = Table(
    rows=(
        *keys(vocab_size="vocab_size", context="block_size", layers="n_layer", d_model="n_embd", heads="n_head"),
        *keys(dropout=("dropout", 0.0)),
        follows("attention.dropout", "dropout"),
        all_biases("bias", True, "norm.bias"),
        Special(lambda settings, model: {"feedforward.d_ff": four_times(model)}),
    ),
    fixed={**FIXED, "feedforward.activation": "gelu", "position.kind": "learned"},
)
RULES = (*names(SAME), *module("output", "lm_head"))  # GPT-2's names, with plain linear layers


def recognises(path: Path) -> bool:
    """Whether a path looks like a nanoGPT checkpoint."""
    return path.suffix == ".pt"


def read(path: Path, tokenizer: Path | None = None) -> ModelBundle:
    """The model in a nanoGPT checkpoint, with the tokenizer at a path if one is given: the checkpoint holds none."""
    stored = _open(path)
    model = _settings(stored.get("model_args"), path)
    state = stored.get("model")
    if not isinstance(state, dict) or not all(_is_named(*each) for each in state.items()):
        raise InteropError(f"{path}: not a nanoGPT checkpoint: 'model' is not a table of tensors")
    if model.layers > len(state):  # before that many layers are built
        raise InteropError(f"{path}: model_args.n_layer = {model.layers}: the file holds {len(state)} tensors in all")
    tensors = _tensors(state, path)
    if OUTPUT in tensors and TABLE in tensors:
        if tensors[OUTPUT].equals(tensors[TABLE]):
            del tensors[OUTPUT]
        else:
            model = model.replace(head={"kind": "lm", "tied": False})
    sizes = GPT2_SIZES if model.vocab_size == GPT2_SIZES[1] else (model.vocab_size,)
    found = {name: stored.shape for name, stored in tensors.items()}
    return ModelBundle(
        model=model,
        weights=to_ours(conversions(RULES, model), found, lambda name: tensors[name].read(), str(path)),
        tokenizer=None if tokenizer is None else named_tokenizer(tokenizer, model.vocab_size, sizes),
        origin=f"{path.name} (nanoGPT)",
    )


def _is_named(name: Any, tensor: Any) -> bool:
    return isinstance(name, str) and name.isprintable() and isinstance(tensor, Tensor | torch_file.Other)


def _tensors(state: Mapping[str, Any], path: Path) -> dict[str, Stored]:
    """The weights by their plain names: dense tensors whose numbers are all in the file."""
    masks = (".attn.bias", ".attn.masked_bias")  # the causal mask of older versions
    kept: dict[str, Any] = {name: tensor for name, tensor in state.items() if not name.endswith(masks)}
    plain: dict[str, str] = {}
    for name in kept:
        if (first := plain.setdefault(name.removeprefix(COMPILED), name)) != name:
            raise InteropError(f"{path}: '{first}' and '{name}' are names of the same tensor")
    table: Any = kept.get(plain.get(TABLE, TABLE))
    output: Any = kept.get(plain.get(OUTPUT, OUTPUT))
    dense = isinstance(table, Tensor) and isinstance(output, Tensor)
    if dense and output.dtype == table.dtype and output.is_set_to(table):
        del kept[plain.pop(OUTPUT)]  # the one table that may go by two names
    stored = torch_file.listing(path, kept, names=1)
    return {known: check_floats(stored[name]) for known, name in plain.items()}


def _open(path: Path) -> Mapping[str, Any]:
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
    return validate(Decoder, nested(SETTINGS.settings(settings, {})), str(path))
