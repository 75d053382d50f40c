"""`weft export`: write a run as another program's model."""

from pathlib import Path

from weft.cli.console import options
from weft.cli.console.options import argument, option
from weft.cli.console.terminal import echo, loading, print_json


def export(
    run: options.Run,
    dest: Path = argument("DEST", "The new folder; for gguf and word vectors, the new file."),
    to: str = option(
        ..., "hf, peft, gguf, onnx, weft; for word vectors word2vec, word2vec-binary or glove.", "--to", value="FORMAT"
    ),
    dtype: str | None = option(None, "hf: fp32, fp16, bf16; gguf: f32, f16, bf16, q8_0, q4_k, q4_0.", value="TYPE"),
    as_json: options.AsJson = False,
) -> None:
    """Write a run's best weights for transformers (hf), llama.cpp (gguf) or onnxruntime (onnx), or as a run (weft).

    An adapter is merged into the model it was trained on; peft writes only the adapter.

    $ weft export runs/gpt-tiny book.gguf --to gguf
    """
    with loading():
        from weft.api.export_model import export_model

    summary = export_model(run, to, dest, dtype=dtype)
    if as_json:
        print_json({"path": dest, "format": to, "written": summary.removeprefix(f"{dest}: ")})
    else:
        echo(summary)
