"""Checkpoints of nanoGPT: a .pt file with the weights and the arguments of the model.

Such a file is a pickle, which may run code when it is read. It is opened here with torch's restricted reader, which
makes tensors and plain values and refuses anything else. The vocabulary is not in it: for a model of characters it
lies in a meta.pkl, a pickle of the other kind, which is left alone.
"""

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.config import validate
from weft.errors import InteropError
from weft.interop.loaded import Loaded
from weft.interop.mapping import both, conversions, rule, to_ours
from weft.models.config import Decoder
from weft.text.tokenizer import Tokenizer

COMPILED = "_orig_mod."
GPT2_SIZES = (50257, 50304)  # the second is the first, filled up to a multiple of 64
SIZES = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
LARGEST = 2**20
BLOCK, H = "decoder.blocks.{layer}", "transformer.h.{layer}"

RULES = (
    rule("embedding.weight", "transformer.wte.weight"),
    rule("output.weight", "lm_head.weight"),
    rule("decoder.position.weight", "transformer.wpe.weight"),
    *both("decoder.norm", "transformer.ln_f"),
    *both(f"{BLOCK}.attention_skip.norm", f"{H}.ln_1"),
    *both(f"{BLOCK}.attention.qkv", f"{H}.attn.c_attn"),
    *both(f"{BLOCK}.attention.out", f"{H}.attn.c_proj"),
    *both(f"{BLOCK}.feedforward_skip.norm", f"{H}.ln_2"),
    *both(f"{BLOCK}.feedforward.up", f"{H}.mlp.c_fc"),
    *both(f"{BLOCK}.feedforward.down", f"{H}.mlp.c_proj"),
)


def read(path: Path | str, tokenizer_path: Path | str | None = None) -> Loaded:
    """The model in a nanoGPT checkpoint, and the tokenizer of the file or folder that is named.

    Without one the notes say what is missing: GPT-2's tokenizer, by the model's size, or one of its own.
    """
    path = Path(path)
    stored = _open(path)
    model = _settings(stored.get("model_args"), path)
    state = stored.get("model")
    if not isinstance(state, Mapping) or not all(_is_named(*each) for each in state.items()):
        raise InteropError(f"{path}: not a nanoGPT checkpoint: 'model' is not a table of tensors")
    if model.layers > len(state):  # a model of so many layers is not even begun
        raise InteropError(f"{path}: model_args.n_layer = {model.layers}, but there are {len(state)} tensors")
    tensors = {
        name.removeprefix(COMPILED): tensor
        for name, tensor in state.items()
        if not name.endswith((".attn.bias", ".attn.masked_bias"))  # the causal mask of older versions
    }
    if "lm_head.weight" in tensors and "transformer.wte.weight" in tensors:
        if torch.equal(tensors["lm_head.weight"], tensors["transformer.wte.weight"]):
            del tensors["lm_head.weight"]  # one table under two names
        else:
            model = model.replace(head={"kind": "lm", "tied": False})
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    tokenizer, notes = _tokenizer(tokenizer_path, model.vocab_size)
    return Loaded(
        model=model,
        weights=to_ours(conversions(RULES, model), found, lambda name: tensors[name].detach(), str(path)),
        tokenizer=tokenizer,
        origin=f"{path.name} (nanoGPT)",
        notes=notes,
    )


def _is_named(name: Any, tensor: Any) -> bool:
    return isinstance(name, str) and name.isprintable() and isinstance(tensor, Tensor)


def _open(path: Path) -> Mapping[str, Any]:
    """The checkpoint's table. torch.load here makes no object that is not a tensor or a plain value."""
    if not path.is_file():
        raise InteropError(f"{path}: no such file")
    try:
        with warnings.catch_warnings(action="ignore"):
            stored = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        if "Unsupported" in str(error) or "not an allowed" in str(error) or "GLOBAL" in str(error):
            raise InteropError(f"{path}: refused: it holds more than tensors and plain values") from None
        raise InteropError(f"{path}: not a nanoGPT checkpoint, or cut short") from None
    except (RuntimeError, OSError, ValueError, EOFError, KeyError, AttributeError, TypeError, IndexError):
        raise InteropError(f"{path}: not a nanoGPT checkpoint, or cut short") from None
    if not isinstance(stored, Mapping) or "model" not in stored:
        raise InteropError(f"{path}: not a nanoGPT checkpoint: it has no 'model'")
    return stored


def _settings(given: Any, path: Path) -> Decoder:
    if not isinstance(given, Mapping):
        raise InteropError(f"{path}: not a nanoGPT checkpoint: it has no 'model_args'")
    sizes = {}
    for name in SIZES:
        value = given.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= LARGEST:
            raise InteropError(f"{path}: model_args.{name} = {value!r}: expected a whole number from 1 to {LARGEST:,}")
        sizes[name] = value
    bias, dropout = bool(given.get("bias", True)), given.get("dropout", 0.0)
    tree = {
        "kind": "decoder",
        "vocab_size": sizes["vocab_size"],
        "context": sizes["block_size"],
        "layers": sizes["n_layer"],
        "d_model": sizes["n_embd"],
        "attention": {"heads": sizes["n_head"], "bias": "all" if bias else "none", "dropout": dropout},
        "feedforward": {"kind": "plain", "d_ff": 4 * sizes["n_embd"], "activation": "gelu", "bias": bias},
        "norm": {"kind": "layer", "eps": 1e-5, "bias": bias},
        "position": {"kind": "learned"},
        "dropout": dropout,
    }
    return validate(Decoder, tree, str(path))


def _tokenizer(path: Path | str | None, vocab_size: int) -> tuple[Tokenizer | None, dict[str, Any]]:
    if path is None:
        whose = "GPT-2's" if vocab_size in GPT2_SIZES else "its own, whose characters only a pickle (meta.pkl) knows,"
        return None, {"missing": f"the tokenizer: {whose} of {vocab_size} tokens; name a tokenizer.json of it"}
    tokenizer = Tokenizer.load(path)
    filled = vocab_size == GPT2_SIZES[1] and tokenizer.vocab_size == GPT2_SIZES[0]
    if tokenizer.vocab_size != vocab_size and not filled:
        raise InteropError(f"{path}: {tokenizer.vocab_size} tokens, but the model's vocabulary is {vocab_size}")
    return tokenizer, {}
