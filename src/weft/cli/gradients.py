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
    from weft.errors import ConfigError, counted

    if d_model % 4:
        raise ConfigError(f"--d-model {d_model}: expected a multiple of 4, because the stack has 4 heads")

    with loading():
        from weft.explain.gradients import PLACEMENTS, gradient_flow

    depths = sorted({0, layers // 4, layers // 2, 3 * layers // 4, layers})
    rows = [
        (
            {"pre": "pre-norm", "post": "post-norm", "none": "no norm"}[found.placement],
            "yes" if found.residual else "no",
            f"{found.full[0]:.1e}",
            *(f"{found.token_specific[depth]:.1e}" for depth in depths),
        )
        for residual in (True, False)
        for found in (gradient_flow(placement, residual, layers, d_model, seed) for placement in PLACEMENTS)
    ]
    remark = (
        "'full' is the norm of the full gradient at layer 0; the columns after it are its token-specific part, which "
        "distinguishes one token from another, at the input of some layers and at the output of the last. Each is "
        "divided by its norm at the top. Without skips the tokens become alike, and the token-specific part vanishes; "
        "without norms as well, everything does."
    )
    columns.show(
        ("norm", "skips", "full", *(f"layer {depth}" if depth < layers else "top" for depth in depths)),
        rows,
        f"Gradient relative to the top's, {counted(layers, 'layer')} of width {d_model} at initialisation",
        [remark],
        text=(0, 1),
    )
