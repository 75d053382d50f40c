"""Activation functions and their derivatives, as the models compute them."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from weft.explain.texts import TEXTS
from weft.figures.charts import Charts
from weft.figures.plot import Axis, Plot, lines
from weft.figures.tables import Table
from weft.nn.activations import activations as functions

SWISH_BETAS = (0.0, 0.5, 1.0, 1.702, 5.0)  # from x / 2 over SiLU and the sigmoid form of GELU to almost ReLU
TABLE_X = (-2.0, -1.0, 0.0, 1.0, 2.0)  # arguments listed in the table


@dataclass(frozen=True)
class Activations(Charts):
    """f(x) and f′(x) of every function at the points `x`."""

    x: NDArray[np.float64]
    values: dict[str, NDArray[np.float64]]
    slopes: dict[str, NDArray[np.float64]]
    swish: dict[float, NDArray[np.float64]]  # x · σ(βx), by β

    title = "Activation functions"
    about = TEXTS["activations"]
    columns = 2

    def charts(self) -> list[Plot]:
        x, y = Axis("x", includes=(self.x[0], self.x[-1])), Axis(includes=(-1.0, 4.0))  # one scale for all functions
        pairs = {name: {"f(x)": values, "f′(x)": self.slopes[name]} for name, values in self.values.items()}
        swish = {f"β = {beta:g}": values for beta, values in self.swish.items()}
        functions = [lines(name, pair, self.x, x=x, y=y) for name, pair in pairs.items()]
        return [*functions, lines("Swish, x · σ(βx)", swish, self.x, x=x, y=y)]

    def tables(self) -> list[Table]:
        indices = [int(np.abs(self.x - x).argmin()) for x in TABLE_X]
        rows = []
        for name, values in self.values.items():
            slopes = self.slopes[name]
            rows.append((name, *(f"{values[i]:.4f}" for i in indices), ""))
            rows.append((f"  {name}′", *(f"{slopes[i]:.4f}" for i in indices), f"{slopes.max():.3f}"))
        header = ("function", *(f"x = {x:g}" for x in TABLE_X), "steepest")
        swish = [(f"Swish, β = {b:g}", *(f"{values[i]:.4f}" for i in indices), "") for b, values in self.swish.items()]
        return [Table(header, [*rows, *swish], "Activation functions and their derivatives", [TEXTS["swish"]])]


def activations(bound: float = 4.0) -> Activations:
    """Return every activation function of the settings on [−bound, bound], with its derivative by autograd."""
    x = bound * torch.arange(-400, 401, dtype=torch.float64) / 400
    values, slopes = {}, {}
    for name, function in functions.items():
        argument = x.clone().requires_grad_()
        with torch.enable_grad():
            y = function(argument)
            (slope,) = torch.autograd.grad(y.sum(), argument)
        values[str(name)], slopes[str(name)] = y.detach().numpy() + 0.0, slope.numpy() + 0.0  # −0 becomes 0
    swish = {beta: (x * torch.sigmoid(beta * x)).numpy() for beta in SWISH_BETAS}
    return Activations(x.numpy(), values, slopes, swish=swish)
