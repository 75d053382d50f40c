"""`weft gradients`: why deep stacks need skip connections."""

from typing import Annotated

import typer

from weft.cli import columns
from weft.cli.loading import loading


def gradients(
    layers: Annotated[int, typer.Option(min=1, help="How deep the stack is.")] = 24,
    d_model: Annotated[int, typer.Option(min=4, help="How wide it is; a multiple of 4.")] = 64,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="The same seed draws the same weights.")] = 0,
) -> None:
    """Show what becomes of the gradient in a deep, untrained stack: pre-norm, post-norm, no norm; skips or not."""
    with loading():
        from weft.explain.gradients import gradient_pictures

    for table in gradient_pictures(layers, d_model, seed).tables():
        columns.show(*table)
