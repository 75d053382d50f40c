"""`weft export`: a run as another program's model."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="The new folder, or file for gguf.")],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="hf, gguf, onnx or weft.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE", help="What the numbers become: fp32, fp16 or bf16 for hf, f32, f16, bf16 or q8_0 for gguf."
        ),
    ] = None,
) -> None:
    """Write a run's best weights for transformers (hf), llama.cpp (gguf) or onnxruntime (onnx), or as a run (weft).

    The last makes one run of an adapter and what it was learned beside.
    """
    from weft.api import exchange

    typer.echo(exchange.export_model(run, to, dest, dtype=dtype))
