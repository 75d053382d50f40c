"""`weft export`: a run as another program's model."""

from pathlib import Path

from weft.cli.console import options
from weft.cli.console.options import argument, option
from weft.cli.console.terminal import echo, loading, print_json


def export(
    run: options.Run,
    dest: Path = argument("DEST", "The new folder, or for gguf the new file."),
    to: str = option(..., "The format: hf, peft, gguf, onnx or weft.", "--to", value="FORMAT"),
    dtype: str | None = option(
        None,
        "Convert the weights to fp32, fp16 or bf16 (hf); to f32, f16, bf16, q8_0, q4_k or q4_0 (gguf).",
        value="TYPE",
    ),
    as_json: options.AsJson = False,
) -> None:
    """Write a run's best weights for transformers (hf), llama.cpp (gguf) or onnxruntime (onnx), or as a run (weft).

    An adapter is merged into the model it was trained on; peft writes the adapter alone.

    $ weft export runs/gpt-tiny book.gguf --to gguf
    """
    with loading():
        from weft.api.export_model import export_model

    written = export_model(run, to, dest, dtype=dtype)
    if as_json:
        print_json({"path": dest, "format": to, "written": written.removeprefix(f"{dest}: ")})
    else:
        echo(written)
