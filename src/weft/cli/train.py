"""`weft train`: from a text to a trained model."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.console import options
from weft.cli.console.distributed import start_processes
from weft.cli.console.help import recipe_key
from weft.cli.console.options import flag, option, recipe_argument
from weft.cli.console.terminal import echo, loading, print_json, print_tables
from weft.errors import ConfigError
from weft.figures.tables import Table

if TYPE_CHECKING:
    from weft.api.run import Run


def train(
    recipe: str | None = recipe_argument(
        "PRESET|RECIPE|RUN",
        "A preset or a recipe (weft presets lists both), a .toml file, or a run to train further.",
        None,
    ),
    words: options.Changes = None,
    data: list[str] | None = option(
        None, "Text to learn from: files, folders, builtin:python.", "--data", "-d", value="SOURCE..."
    ),
    targets: options.Targets = None,
    on_error: str | None = option(None, "What to do with a row that can't be read (default: stop).", value="stop|skip"),
    run: Path | None = option(None, "The run's folder (default: a free one in runs/).", show_default=False),
    resume: Path | None = option(
        None,
        "Continue an interrupted run; with steps=3000, train it for longer.",
        value="RUN",
        autocompletion=options.complete_runs,
    ),
    processes: int | None = option(
        None, "Train in so many processes at once, each with a GPU of its own (default: 1).", min=1
    ),
    as_json: bool = flag("--json", "Print the final results as JSON."),
) -> None:
    """Train a model on text. Whatever the recipe leaves open is chosen to suit the text and the machine, and printed.

    Ctrl-C saves the run before it stops; --resume continues it. With a run in place of a recipe, and other text as
    --data, the run's weights are fine-tuned in a new run. `weft config slurm` is for several machines.

    $ weft train gpt-tiny --data book.txt steps=500
    """
    keep_freed_memory()
    with loading():
        from weft.api import train as api
    from weft.parallel.ranks import join

    # `--data *.txt` arrives as --data a.txt b.txt …: words that assign nothing are further sources
    if recipe is not None and (resume is not None or ("=" in recipe and not Path(recipe).exists())):
        words, recipe = [recipe, *(words or [])], None
    changes = [word for word in words or [] if "=" in word]
    sources = [*(data or []), *(word for word in words or [] if "=" not in word)]
    for word in words or []:
        if "=" not in word and not Path(word).exists() and (key := recipe_key(word)):
            raise ConfigError(f"'{word}': a setting is written key=value, without spaces: {key}=VALUE")
    if targets:
        changes.append(f"data.targets={json.dumps(targets)}")
    if on_error is not None:
        changes.append(f"data.on_error={on_error}")
    if resume is not None:
        if sources or targets or on_error or run is not None:
            raise ConfigError(
                f"--resume {resume} continues with that run's own recipe and text; give nothing else, or steps=3000 to "
                f"train it for longer; on other text: weft train {resume} --data FILE"
            )
    elif recipe is None:
        raise ConfigError("train what? give a preset or a recipe, for instance: weft train gpt-tiny --data book.txt")
    elif sources and not data:
        raise ConfigError(f"'{sources[0]}': an override is written key=value; text is given with --data")
    start_processes(processes)
    if resume is not None:
        done = api.resume(resume, changes=changes)
    else:
        assert recipe is not None
        done = api.train(recipe, data=sources, run=run, changes=changes)
    if join().leads and as_json:
        print_json({"run": str(done.path), **done.results()})
    elif join().leads:
        summarise(done)


def keep_freed_memory() -> None:
    """Have mimalloc, torch's allocator on ARM, keep what a step frees for the next one: to give memory back and to get
    it again, cleared, takes a twentieth of a step on a processor. It is told before torch is loaded."""
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")


def summarise(run: "Run") -> None:
    """What came out, and what can be done with it."""
    from weft.recipe.metrics import METRICS, against_baseline, metric

    results = run.results()
    order = [*METRICS, *(key for key in results if key not in METRICS)]
    shown = [
        (metric(key).title, format(results[key], metric(key).format))
        for key in order
        if isinstance(results.get(key), float) and (key != "unknown_share" or results[key])
    ]
    if shown:
        remark = against_baseline(results)
        print_tables(Table(("on data it never saw", ""), shown, "", [remark] if remark else []))
    echo(f"\nreport    {run.path / 'report.html'}")
    echo(f"use       {run.objective.usage.format(run=run.path)}")
    echo(f"evaluate  weft evaluate {run.path}")
