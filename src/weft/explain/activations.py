"""The activation functions and their derivatives, as the models compute them."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from weft.explain.texts import TEXTS
from weft.figures.charts import Charts
from weft.figures.plot import Axis, Plot, lines
from weft.figures.tables import Table
from weft.nn.activations import activations as functions

TABLED = (-2.0, -1.0, 0.0, 1.0, 2.0)  # places


@dataclass(frozen=True)
class Activations(Charts):
    """f(x) and f′(x) of every function at `x`, all of one length."""

    x: NDArray[np.float64]
    values: dict[str, NDArray[np.float64]]
    slopes: dict[str, NDArray[np.float64]]

    title = "Activation functions"
    about = TEXTS["activations"]
    columns = 3

    def charts(self) -> list[Plot]:
        y = Axis(holds=(-1.0, 4.0))  # the same for all, so that they can be compared
        pairs = {name: {"f(x)": self.values[name], "f′(x)": self.slopes[name]} for name in self.values}
        return [lines(name, pair, self.x, Axis("x", holds=(self.x[0], self.x[-1])), y) for name, pair in pairs.items()]

    def tables(self) -> list[Table]:
        places = [int(np.abs(self.x - at).argmin()) for at in TABLED]
        rows = []
        for name, values in self.values.items():
            slopes = self.slopes[name]
            rows.append((name, *(f"{values[place]:.4f}" for place in places), ""))
            rows.append((f"  {name}′", *(f"{slopes[place]:.4f}" for place in places), f"{slopes.max():.3f}"))
        header = ("function", *(f"x = {at:g}" for at in TABLED), "steepest")
        return [Table(header, rows, "Activation functions and their derivatives")]


def activations(bound: float = 4.0) -> Activations:
    """Every activation function that settings can name on −bound … bound, with its derivative by autograd."""
    x = bound * torch.arange(-400, 401, dtype=torch.float64) / 400
    values, slopes = {}, {}
    for name, function in functions.items():
        at = x.clone().requires_grad_()
        with torch.enable_grad():
            y = function(at)
            (slope,) = torch.autograd.grad(y.sum(), at)
        values[str(name)], slopes[str(name)] = y.detach().numpy() + 0.0, slope.numpy() + 0.0  # no −0
    return Activations(x.numpy(), values, slopes)
