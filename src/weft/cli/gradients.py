"""`weft gradients`: why deep stacks need skip connections."""

from typing import Annotated

import typer

from weft.cli import columns


def gradients(
    layers: Annotated[int, typer.Option(min=1, help="How deep the stack is.")] = 24,
    d_model: Annotated[int, typer.Option(min=4, help="How wide it is; a multiple of 4.")] = 64,
    seed: Annotated[int, typer.Option(min=0, max=2**62, help="The same seed draws the same weights.")] = 0,
) -> None:
    """Show the gradient at layer 0 against the top of an untrained stack: norms before, after, none; skips or not."""
    from weft.errors import ConfigError

    if d_model % 4:
        raise ConfigError(f"--d-model {d_model}: expected a multiple of 4, because the stack has 4 heads")

    from weft.explain.gradients import PLACEMENTS, gradient_flow

    depths = sorted({0, layers // 4, layers // 2, 3 * layers // 4, layers})
    rows = [
        (
            {"pre": "before", "post": "after", "none": "nowhere"}[found.placement],
            "yes" if found.residual else "no",
            f"{found.whole[0]:.1e}",
            *(f"{found.apart[depth]:.1e}" for depth in depths),
        )
        for residual in (True, False)
        for found in (gradient_flow(placement, residual, layers, d_model, seed) for placement in PLACEMENTS)
    ]
    remark = (
        "'whole' is a random direction at the top; 'apart' is the part of it that distinguishes one token from another,"
        " at the input of some layers and at the output of the last. Without skips the tokens become alike, and 'apart'"
        " vanishes; without norms as well, everything does."
    )
    columns.show(
        ("norm", "skips", "whole, layer 0", *(f"apart, {depth}" for depth in depths)),
        rows,
        f"Gradient against the top's, {layers} layers of {d_model} at initialisation",
        [remark],
        text=(0, 1),
    )
