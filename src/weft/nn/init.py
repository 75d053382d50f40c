"""Initial weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, assert_never

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.nn.config import FanInInit, Init, OrthogonalInit, RecurrentInit, UniformInit, XavierInit


@dataclass(frozen=True)
class Initialiser:
    """Draws a Transformer's weights; `layers` counts the blocks that write into one residual stream (GPT-2)."""

    settings: Init
    d_model: int
    layers: int

    @torch.no_grad()
    def matrix(self, weight: Tensor, into_residual: bool = False) -> None:
        """Fill a matrix (out, in); `into_residual` if its output is added to the residual stream."""
        if isinstance(self.settings, XavierInit):
            nn.init.xavier_uniform_(weight)
        else:
            factor = (2 * self.layers) ** -0.5 if self.settings.depth_scaled and into_residual else 1.0
            weight.normal_(std=self.settings.std * factor)

    @torch.no_grad()
    def table(self, weight: Tensor) -> None:
        """Fill a table of embeddings (rows, width)."""
        weight.normal_(std=self.d_model**-0.5 if isinstance(self.settings, XavierInit) else self.settings.std)


def reset(model: nn.Module, init: Initialiser, first: tuple[type[nn.Module], ...] = ()) -> None:
    """Call `reset_parameters(init)` of every module that holds weights, in the order of `model.modules()`. Modules of a
    type in `first` come before all others."""
    parts = [part for part in model.modules() if next(part.parameters(recurse=False), None) is not None]
    for part in sorted(parts, key=lambda part: not isinstance(part, first)):
        part.reset_parameters(init)  # type: ignore[operator]


@torch.no_grad()
def reset_recurrent(model: nn.Module, settings: RecurrentInit) -> None:
    """Draw every weight of a model made of embeddings, PyTorch's recurrent modules and linear layers."""
    for part in model.modules():
        for name, weight in part.named_parameters(recurse=False):
            bias = weight.dim() == 1
            match settings:
                case UniformInit(width=width):
                    weight.uniform_(-width, width)
                case OrthogonalInit() if name.startswith("weight_hh"):
                    for gate in weight.split(weight.shape[1]):
                        nn.init.orthogonal_(gate)
                case OrthogonalInit(std=std):
                    weight.zero_() if bias else weight.normal_(std=std)
                case FanInInit(embedding_std=std) if isinstance(part, nn.Embedding):
                    weight.normal_(std=std or weight.shape[1] ** -0.5)
                case FanInInit() if isinstance(part, nn.RNNBase | nn.Linear) or not bias:
                    inputs = part.hidden_size if isinstance(part, nn.RNNBase) else weight.shape[-1]
                    if name.endswith(f"_l{getattr(part, 'num_layers', 0) - 1}"):
                        inputs = getattr(part, "d_last", inputs)  # of a `TaperedLSTM`
                    inputs = part.in_features if isinstance(part, nn.Linear) else inputs
                    weight.uniform_(-(inputs**-0.5), inputs**-0.5)
                case FanInInit():  # bias of the logits: the first distribution is nearly uniform
                    weight.zero_()
                case _:
                    assert_never(settings)


@contextmanager
def empty_weights() -> Iterator[None]:
    """Build modules with empty weights (torch's meta device), to be filled by a file or `reset_parameters`."""
    with torch.device("meta"), _NoDraws():
        yield


class _NoDraws(TorchFunctionMode):
    """Skip random draws: on the meta device torch would import its compiler for them, which takes seconds."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, *call: Any) -> Any:
        args, kwargs = (*call, None)[:2]
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "xavier_uniform_", "kaiming_uniform_"):
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
