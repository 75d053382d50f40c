"""`weft quickstart`: train a small model from start to end, on text that needs no download."""

from pathlib import Path

import typer

from weft.cli.console import options
from weft.cli.console.options import command_line, option
from weft.cli.console.terminal import escaped, loading, print_json
from weft.cli.train import keep_freed_memory, summarise
from weft.decode.config import Sampling
from weft.errors import quoted

RUN = Path("runs/quickstart")
PROMPTS = ("Once upon a time", "Mira the potter", "There was once a lonely fisher")  # as tales begin


def quickstart(
    context: typer.Context,
    changes: options.Changes = None,
    run: Path | None = option(
        None, f"The run's folder (default: {RUN}, or the next free {RUN}-2 …).", show_default=False
    ),
    as_json: options.AsJson = False,
) -> None:
    """Train a small model on tales, evaluate it and let it write some: about two minutes on two cores.

    $ weft quickstart steps=200
    """
    from rich.console import Console
    from rich.text import Text

    keep_freed_memory()
    with loading():
        from weft.api import train as api

    folder = run or api.free_folder(RUN)
    done = api.train("quickstart", run=folder, changes=changes or [], command=command_line(context))
    if as_json:
        print_json({"run": done.path, **done.results()})
        return
    console = Console(highlight=False)
    samples = done.results()["samples"]
    if done.config.data.sources == ("builtin:tales",):
        texts = done.complete(PROMPTS, Sampling(max_tokens=240, temperature=0.7, top_p=0.9))
        samples = [prompt + text.text for prompt, text in zip(PROMPTS, texts, strict=True)]
    console.print("\n[bold]three generated texts[/bold]")
    for number, sample in enumerate(samples, 1):
        lines = [line for line in sample.strip().splitlines() if line.strip()]
        console.print(Text(escaped(f"{number}  " + "\n   ".join(lines))))
    console.print()
    summarise(done)
    explored = "" if folder.parent == Path("runs") else f" {quoted(folder.parent)}"
    console.print(f"\nlook inside:    weft explore{explored}")
    console.print("your own text:  weft train gpt-tiny --data book.txt")
