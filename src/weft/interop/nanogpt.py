"""Read checkpoints of nanoGPT: a .pt file with the weights and the arguments of the model.

Such a file is a pickle, which may run code when it is unpickled; `torch_file.py` reads only tensors and plain values
from it. It contains no vocabulary: that of a character model is in meta.pkl, an unrestricted pickle, which is not read.
"""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from weft.config import validate
from weft.errors import InteropError
from weft.interop import torch_file
from weft.interop.bundle import ModelBundle, load_tokenizer
from weft.interop.families.base import Family
from weft.interop.families.gpt2 import MASKS, names
from weft.interop.hf import weights
from weft.interop.settings import Settings, nested
from weft.interop.table import Special, all_biases, follows, four_times, keys
from weft.interop.weight_map import SAME, module
from weft.models.config import Decoder

COMPILED = "_orig_mod."
TABLE, OUTPUT = "transformer.wte.weight", "lm_head.weight"
GPT2_SIZES = (50257, 50304)  # vocabulary sizes: GPT-2's, and padded to a multiple of 64
PLAIN = (int, float, str, type(None))  # types of a setting; of other values, the type's name is shown
GELU = {"feedforward.kind": "plain", "feedforward.activation": "gelu"}
NANOGPT = Family(
    names=("nanogpt", "nanoGPT", "GPT"),
    rows=(
        *keys(vocab_size="vocab_size", context="block_size", layers="n_layer", d_model="n_embd", heads="n_head"),
        *keys(dropout=("dropout", 0.0)),
        follows("attention.dropout", "dropout"),
        all_biases("bias", True, "norm.bias"),
        Special(lambda settings, model: {"feedforward.d_ff": four_times(model)}),
    ),
    fixed={**GELU, "norm.kind": "layer", "position.kind": "learned"},
    body=names(SAME),  # GPT-2's names, with matrices of nn.Linear
    heads={"lm": module("output", "lm_head")},
    prefix="",
    unused=MASKS,
    renames={COMPILED: ""},
)


def read(path: Path, tokenizer: Path | None = None, *, gpt2_sizes: tuple[int, int] = GPT2_SIZES) -> ModelBundle:
    """Read the model of a nanoGPT checkpoint, and the tokenizer if its path is given: the checkpoint has none."""
    if not path.is_file():
        raise InteropError(f"{path}: no such file")
    stored = torch_file.read(path)
    for key in ("model", "model_args"):
        if not isinstance(stored, Mapping) or key not in stored:
            raise InteropError(f"{path}: not a nanoGPT checkpoint: it has no '{key}'")
    arguments, state = stored["model_args"], stored["model"]
    if not isinstance(arguments, Mapping):
        raise InteropError(f"{path}: not a nanoGPT checkpoint: 'model_args' is not a dictionary of settings")
    plain = {key: value if isinstance(value, PLAIN) else type(value).__name__ for key, value in arguments.items()}
    settings = Settings({f"model_args.{key}": value for key, value in plain.items()}, str(path), "model_args.")
    model = validate(Decoder, nested(NANOGPT.settings(settings, {})), str(path))
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and name.isprintable() and isinstance(value, Tensor | torch_file.OpaqueValue)
        for name, value in state.items()
    ):
        raise InteropError(f"{path}: not a nanoGPT checkpoint: 'model' is not a dictionary of tensors")
    if model.layers > len(state):  # checked before the layers are built
        raise InteropError(f"{path}: model_args.n_layer = {model.layers}: the file has only {len(state)} tensors")
    stored_names = {name.removeprefix(COMPILED): name for name in state}
    tied = [value for name in (TABLE, OUTPUT) if isinstance(value := state.get(stored_names.get(name)), Tensor)]
    if len(tied) == 2 and tied[0].dtype == tied[1].dtype and tied[1].is_set_to(tied[0]):  # one tensor, two names
        state = {name: value for name, value in state.items() if name != stored_names[OUTPUT]}
    tensors = torch_file.list_tensors(path, state, max_names=1)
    untied, lazy, _, _ = weights.read(NANOGPT, model, tensors, location=str(path))
    sizes = gpt2_sizes if model.vocab_size == gpt2_sizes[1] else (model.vocab_size,)
    return ModelBundle(
        model=untied,
        weights=lazy,
        tokenizer=None if tokenizer is None else load_tokenizer(tokenizer, model.vocab_size, sizes),
        origin=f"{path.name} (nanoGPT)",
    )
