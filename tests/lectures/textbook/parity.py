"""Comparison of a model in lectures/ with weft's: loss and gradients, under mapped names."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from tests.lectures.textbook.lecture import TOLERANCE, assert_gradients, gradients
from torch import Tensor, nn

from weft.data.batch import Batch
from weft.models.base import LanguageModel
from weft.models.build import build

Tensors = Mapping[str, Tensor]
Rename = Callable[[Tensors], dict[str, Tensor]]  # weft's tensors under the names of the file


def random_weights(settings: Any) -> Any:
    """weft's model with random weights, including norms and biases."""
    torch.manual_seed(0)
    model = build(settings).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(mean=1.0 if weight.dim() == 1 else 0.0, std=0.2)
    return model


def assert_same(
    ours: LanguageModel,
    theirs: nn.Module,
    rename: Rename,
    batch: Batch,
    losses: tuple[Callable[[Tensor], Any], Callable[[], Tensor]],
) -> None:
    """Compare loss and gradients in float64; `losses` are weft's, from features, and the file's."""
    ours.double(), theirs.double().load_state_dict(rename(ours.state_dict()))
    total, count, *_ = losses[0](ours.read(batch))
    (total / count).backward()
    loss = losses[1]()
    loss.backward()
    torch.testing.assert_close(loss, (total / count).to(loss), rtol=TOLERANCE, atol=0.0)
    expected, found = rename(gradients(ours)), gradients(theirs)
    assert found.keys() == {name for name, _ in theirs.named_parameters()} <= expected.keys()
    assert len({sum(weight.numel() for weight in model.parameters()) for model in (ours, theirs)}) == 1
    assert_gradients(found, {name: expected[name] for name in found})


def linear(weights: Tensors, theirs: str, ours: str, names: tuple[str, str] = ("weight", "bias")) -> dict[str, Tensor]:
    """Weight and, if there is one, bias of a linear layer, an embedding or a norm; `names` are the file's."""
    pairs = zip(names, ("weight", "bias"), strict=True)
    return {f"{theirs}.{name}": weights[f"{ours}.{part}"] for name, part in pairs if f"{ours}.{part}" in weights}


norm = partial(linear, names=("g", "b"))


def split(weights: Tensors, theirs: str, names: tuple[str, ...], ours: str, heights: list[int]) -> dict[str, Tensor]:
    """Matrices that weft stacks in one."""
    found: dict[str, Tensor] = {}
    for part in ("weight", "bias"):
        if f"{ours}.{part}" in weights:
            pieces = weights[f"{ours}.{part}"].split(heights)
            found |= {f"{theirs}.{name}.{part}": piece for name, piece in zip(names, pieces, strict=True)}
    return found
