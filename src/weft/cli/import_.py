"""`weft import`: another program's model as a run."""

from pathlib import Path

from weft.cli.console import options
from weft.cli.console.options import argument, option
from weft.cli.console.terminal import echo, loading, print_json


def import_(
    source: str = argument(
        "SOURCE",
        "A Hugging Face folder or hub name, a .gguf file, a CTranslate2 folder, an .argosmodel, "
        "llama2.c's .bin, nanoGPT's .pt, or a PEFT folder with a LoRA adapter.",
    ),
    run: Path = argument("RUN", "The new run's folder."),
    tokenizer: Path | None = option(None, "The tokenizer's file, for a source that comes without one.", value="FILE"),
    base: Path | None = option(
        None,
        "For an adapter: the run of the model it was trained on.",
        value="RUN",
        autocompletion=options.complete_runs,
    ),
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
    head = getattr(bundle.model, "head", None)
    if head is not None and not any(head.kind in each.heads for each in OBJECTIVES.values()):
        echo(f"its head of kind '{head.kind}' has no command here: it computes what it did, and exports keep it")
        echo(f"use       weft embed {folder.path}, or weft train … init={folder.path} for another head")
    if bundle.model.kind == "decoder" and bundle.tokenizer.chat_template is not None:
        echo(f"use       weft chat {folder.path}")
