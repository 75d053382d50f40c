"""`weft import`: turn another program's model into a run."""

from pathlib import Path

from weft.cli.console import options
from weft.cli.console.options import argument, option, run_option
from weft.cli.console.terminal import echo, loading, print_json
from weft.errors import quoted


def import_(
    source: str = argument(
        "SOURCE",
        "A Hugging Face folder or hub name, a .gguf file, a CTranslate2 folder, an .argosmodel, "
        "llama2.c's .bin, nanoGPT's .pt, a PEFT folder with a LoRA adapter, or a file of word vectors.",
    ),
    run: Path = argument("RUN", "The new run's folder."),
    tokenizer: Path | None = option(None, "The tokenizer's file, for a source without one.", value="FILE"),
    base: Path | None = run_option("For an adapter: the run of the model it was trained on."),
    as_json: options.AsJson = False,
) -> None:
    """Turn a model trained elsewhere into a run. Nothing in its files is executed.

    $ weft import path/to/SmolLM2 runs/smol
    """
    with loading():
        from weft.api.import_model import import_model
    from weft.costs.count import count
    from weft.recipe.objective import OBJECTIVES

    folder, bundle = import_model(source, run, tokenizer=tokenizer, base=base)
    assert bundle.tokenizer is not None
    parameters = count(bundle.model).parameters
    if as_json:
        facts = {"run": folder.path, "origin": bundle.origin, "kind": bundle.model.kind, "parameters": parameters}
        print_json({**facts, "vocab_size": bundle.tokenizer.vocab_size})
        return
    echo(f"{folder.path}: from {bundle.origin}")
    echo(f"{parameters:,} parameters, {bundle.tokenizer.vocab_size:,} tokens, {bundle.model.kind}")
    head, shown = getattr(bundle.model, "head", None), quoted(folder.path)
    if head is not None and not any(head.kind in objective.heads for objective in OBJECTIVES.values()):
        echo(f"no command uses its head of kind '{head.kind}'; it is kept, and exported")
        echo(f"use       weft embed {shown}, or weft train … init={shown} to train another head")
    if bundle.model.kind == "decoder" and bundle.tokenizer.chat_template is not None:
        echo(f"use       weft chat {shown}")
