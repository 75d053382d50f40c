"""Reorder the coordinates of a model with interleaved sinusoids, so that a Hugging Face family can hold it.

The layout of the 2017 paper alternates sines and cosines; Marian's has all sines first. Everything between embeddings
and logits acts on coordinates independently of their order, except the matrices, whose rows or columns move with them.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from weft.interop.bundle import ModelBundle
from weft.interop.settings import Transformer
from weft.nn.position_config import Sinusoidal
from weft.storage.tensors import LazyWeights

# names of weights with an axis of d_model coordinates → that axis
AXES = {
    r"(embedding|source_embedding|segments|output|output\.\w+)\.weight": -1,
    r".*\.(qkv|q|kv|up|gate_up)\.weight": -1,
    r".*\.(attention|cross|feedforward)\.(out|down)\.(weight|bias)": 0,
    r".*\.(norm|norm_out|embedding_norm)\.(weight|bias)": 0,
}


def sines_first(bundle: ModelBundle) -> ModelBundle:
    """Return an equivalent model whose sinusoids have the layout `halves`; other models are returned unchanged."""
    model = bundle.model
    if not isinstance(model, Transformer) or not isinstance(model.position, Sinusoidal) or model.head.kind != "lm":
        return bundle
    if model.position.layout != "interleaved" or model.width != model.d_model:
        return bundle
    order = torch.arange(model.d_model).view(-1, 2).T.flatten()
    weights: LazyWeights = {
        name: partial(_reordered, read, _axis(name), order) for name, read in bundle.weights.items()
    }
    position = model.position.model_copy(update={"layout": "halves"}).model_dump()
    return replace(bundle, model=model.replace(position=position), weights=weights)


def _axis(name: str) -> int | None:
    return next((axis for pattern, axis in AXES.items() if re.fullmatch(pattern, name)), None)


def _reordered(read: Callable[[], Tensor], axis: int | None, order: Tensor) -> Tensor:
    tensor: Tensor = read()
    return tensor if axis is None else tensor.index_select(axis, order).contiguous()
