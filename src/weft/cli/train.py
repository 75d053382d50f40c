"""`weft train`: train a model on text, or resume a run."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from weft.cli.console import options
from weft.cli.console.distributed import start_processes
from weft.cli.console.help import recipe_key
from weft.cli.console.options import command_line, flag, option, recipe_argument, run_option
from weft.cli.console.terminal import echo, loading, print_json, print_tables
from weft.errors import ConfigError, quoted
from weft.figures.tables import Table

if TYPE_CHECKING:
    from weft.api.run import Run


def train(
    context: typer.Context,
    recipe: str | None = recipe_argument(
        "PRESET|RECIPE|RUN", "A preset or a recipe (see weft presets), a .toml file, or a run to fine-tune.", None
    ),
    words: options.Changes = None,
    data: list[str] | None = option(
        None, "Files, folders or builtin:python to train on.", "--data", "-d", value="SOURCE..."
    ),
    targets: options.Targets = None,
    on_error: str | None = option(None, "At a row that cannot be read (default: stop).", value="stop|skip"),
    run: Path | None = option(None, "The run's folder (default: a free one in runs/).", show_default=False),
    resume: Path | None = run_option("Resume an interrupted run; with steps=3000, train it for longer."),
    processes: int | None = option(None, "Number of processes, each with a GPU (default: 1).", min=1),
    as_json: bool = flag("--json", "Print the final results as JSON."),
) -> None:
    """Train a model on text. Settings that the recipe leaves open are chosen for the text and the machine, and printed.

    Ctrl-C saves the run before it stops; --resume resumes it. A run instead of a recipe, with other text as --data, is
    fine-tuned in a new run. For several machines, see `weft config slurm`.

    $ weft train gpt-tiny --data book.txt steps=500
    """
    keep_freed_memory()
    with loading():
        from weft.api import train as api
    from weft.parallel.ranks import join

    # the shell expands `--data *.txt` to --data a.txt b.txt …: words without = are more sources
    if recipe is not None and (resume is not None or ("=" in recipe and not Path(recipe).exists())):
        words, recipe = [recipe, *(words or [])], None
    changes = [word for word in words or [] if "=" in word]
    sources = [*(data or []), *(word for word in words or [] if "=" not in word)]
    for word in words or []:
        if "=" not in word and not Path(word).exists() and (key := recipe_key(word)):
            raise ConfigError(f"'{word}': settings are written key=value, without spaces: {key}=VALUE")
    if targets:
        changes.append(f"data.targets={json.dumps(targets)}")
    if on_error is not None:
        changes.append(f"data.on_error={on_error}")
    if resume is not None:
        if sources or targets or on_error or run is not None:
            raise ConfigError(
                f"--resume {resume}: the run keeps its recipe and text; give nothing else, or steps=3000 to extend it; "
                f"to fine-tune it on other text: weft train {quoted(resume)} --data FILE"
            )
    elif recipe is None:
        raise ConfigError("no recipe: give a preset or a recipe, for instance: weft train gpt-tiny --data book.txt")
    elif sources and not data:
        if Path(recipe).is_file() and not Path(sources[0]).exists():  # the other way round
            raise ConfigError(f"write the recipe first: weft train {quoted(sources[0])} --data {quoted(recipe)}")
        raise ConfigError(f"'{sources[0]}': settings are written key=value, and text is given with --data")
    start_processes(processes, context.obj)
    if resume is not None:
        done = api.resume(resume, changes=changes)
    else:
        assert recipe is not None
        done = api.train(recipe, data=sources, run=run, changes=changes, command=command_line(context))
    if join().leads and as_json:
        print_json({"run": str(done.path), **done.results()})
    elif join().leads:
        summarise(done)


def keep_freed_memory() -> None:
    """Let mimalloc, torch's allocator on ARM, keep freed memory for the next step; set before torch is loaded.

    Returning memory and getting it back zeroed takes 5 % of a step on a CPU.
    """
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")


def summarise(run: "Run") -> None:
    """Print the metrics of a finished run, and the commands that use it."""
    from weft.recipe.metrics import METRICS, against_baseline, metric
    from weft.runs.folder import RunFolder
    from weft.runs.report import read_record

    results = run.results()
    order = [*METRICS, *(key for key in results if key not in METRICS)]
    shown = [
        (metric(key).title, metric(key).text(results[key]))
        for key in order
        if isinstance(results.get(key), float) and (key != "unknown_share" or results[key])
    ]
    if shown:
        remark = against_baseline(results)
        print_tables(Table(("on held-out data", ""), shown, "", [remark] if remark else []))
    record = read_record(RunFolder(run.path))
    if record.sources.rows:
        echo("")
        print_tables(record.sources)
    if record.rate_cut:
        echo(f"\n{record.rate_cut}")
    echo(f"\nreport    {run.path / 'report.html'}")
    echo(f"use       {run.objective.usage.format(run=quoted(run.path))}")
    if run.config.model.kind in ("word2vec", "glove"):
        echo(f"evaluate  weft neighbours {quoted(run.path)} --pairs FILE, or --questions FILE")
    else:
        echo(f"evaluate  weft evaluate {quoted(run.path)}")
