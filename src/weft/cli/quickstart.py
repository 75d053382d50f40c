"""`weft quickstart`: the whole way once, on text that needs no download."""

from pathlib import Path

from weft.cli.console import options
from weft.cli.console.options import option
from weft.cli.console.terminal import loading, print_json, shown
from weft.cli.train import keep_freed_memory, summarise

RUN = Path("runs/quickstart")


def quickstart(
    changes: options.Changes = None,
    run: Path | None = option(
        None, f"The run's folder (default: {RUN}, or the next free {RUN}-2 …).", show_default=False
    ),
    as_json: options.AsJson = False,
) -> None:
    """Train a small model on Python's own documentation, measure it and let it write: a few minutes on two cores.

    $ weft quickstart steps=200
    """
    from rich.console import Console
    from rich.text import Text

    keep_freed_memory()
    with loading():
        from weft.api import train as api

    folder = run or api.free_folder(RUN)
    done = api.train("quickstart", run=folder, changes=changes or [])
    if as_json:
        print_json({"run": done.path, **done.results()})
        return
    console = Console(highlight=False)
    console.print("\n[bold]three texts it made up[/bold]")
    for number, sample in enumerate(done.results()["samples"], 1):
        console.print(Text(shown(f"{number}  " + "\n   ".join(sample.strip().splitlines()))))
    console.print()
    summarise(done)
    looked = "" if folder.parent == Path("runs") else f" {folder.parent}"
    console.print(f"\nlook inside:    weft explore{looked}")
    console.print("your own text:  weft train gpt-tiny --data book.txt")
