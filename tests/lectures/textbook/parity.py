"""When the model of a file of lectures/ is weft's: the same loss and the same gradients, by names that are mapped."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tests.lectures.textbook.lecture import TOLERANCE, assert_gradients
from torch import Tensor, nn

from weft.data.batch import Batch
from weft.models.base import LanguageModel
from weft.models.build import build

Tensors = Mapping[str, Tensor]
Rename = Callable[[Tensors], dict[str, Tensor]]  # weft's tensors by their names there → by their names in the file


def random_weights(settings: Any) -> LanguageModel:
    """weft's model, every weight of which does something: norms and biases are not 1 and 0 either."""
    torch.manual_seed(0)
    model: LanguageModel = build(settings).eval()
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
    """The loss, and every parameter's gradient, in float64; `losses` gives weft's, of features, and the file's."""
    ours.double(), theirs.double().load_state_dict(rename(ours.state_dict()))
    total, count, *_ = losses[0](ours.read(batch))
    (total / count).backward()
    loss = losses[1]()
    loss.backward()
    torch.testing.assert_close(loss, (total / count).to(loss), rtol=TOLERANCE, atol=0.0)
    expected = rename({name: weight.grad for name, weight in ours.named_parameters() if weight.grad is not None})
    found = {name: weight.grad for name, weight in theirs.named_parameters()}
    assert found.keys() <= expected.keys() and sum(weight.numel() for weight in ours.parameters()) == sum(
        weight.numel() for weight in theirs.parameters()
    )
    assert_gradients(found, {name: expected[name] for name in found})


def linear(weights: Tensors, theirs: str, ours: str) -> dict[str, Tensor]:
    """A linear layer, or an embedding, with its bias if it has one."""
    parts = {f"{theirs}.{part}": weights.get(f"{ours}.{part}") for part in ("weight", "bias")}
    return {name: weight for name, weight in parts.items() if weight is not None}


def norm(weights: Tensors, theirs: str, ours: str) -> dict[str, Tensor]:
    """A norm's gain g and, if it has one, bias b."""
    parts = {f"{theirs}.g": weights.get(f"{ours}.weight"), f"{theirs}.b": weights.get(f"{ours}.bias")}
    return {name: weight for name, weight in parts.items() if weight is not None}


def split(weights: Tensors, theirs: str, names: tuple[str, ...], ours: str, heights: list[int]) -> dict[str, Tensor]:
    """Matrices that lie one above the other in weft."""
    found = {}
    for part in ("weight", "bias"):
        if f"{ours}.{part}" in weights:
            pieces = weights[f"{ours}.{part}"].split(heights)
            found |= {f"{theirs}.{name}.{part}": piece for name, piece in zip(names, pieces, strict=True)}
    return found


def numbers(pattern: str, text: str) -> list[float]:
    """The numbers that a pattern finds, whatever white space stands between its words."""
    found = re.search(pattern.replace(" ", r"\s+"), text)
    assert found is not None, f"{pattern!r} is not in {text!r}"
    return [float(number.rstrip(".")) for number in found.groups()]
