"""`weft explain`: look inside a model."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weft.cli.console import options
from weft.cli.console.options import flag, option, recipe_argument
from weft.cli.console.terminal import echo, loading, print_json
from weft.errors import ConfigError
from weft.explain.views import OF_A_TEXT, VIEWS
from weft.figures.tables import wrap

if TYPE_CHECKING:
    from weft.api.explain import Explain
    from weft.figures.picture import Picture

View = StrEnum("View", list(VIEWS))  # type: ignore[misc]
Text = str | None
SUFFIXES = (".html", ".svg", ".png", ".pdf", ".dot")
# the views that each option applies to
VIEWS_OF = {"layer": ("attention", "step"), "head": ("attention",), "word": ("attention",)}
VIEWS_OF |= {"other": ("patch",), "answer": ("patch",), "pairs": ("patch",), "labels": ("probe",)}
VIEWS_OF |= {"checkpoints": ("patch", "probe")}
VIEWS_OF |= {"place": ("saliency", "step"), "shapes": ("graph",), "backward": ("graph",), "open": ("graph",)}


def explain(
    context: typer.Context,
    source: str = recipe_argument(
        "RUN|PRESET",
        "A run's folder; a preset or recipe, which has no weights yet; mlp, the lectures' small network; tree, a small "
        "search tree (or a .toml or .json file with one, and --only search; beams=, samples=, seed=); "
        "or parallel, a layer with every kind of parallelism (d_model=, d_ff=, heads=, tokens=, block=).",
    ),
    changes: options.Changes = None,
    text: Text = option(None, "The text to look at.", value="TEXT", show_default="one of the held-out data"),
    target: Text = option(None, "The translation, for a translation model.", value="TEXT", show_default="its own"),
    only: View | None = option(None, "One view: " + ", ".join(VIEWS) + ".", value="VIEW", show_default="all"),
    layer: int | None = option(None, "Attention, step: the layer, counted from 0."),
    head: int | None = option(None, "Attention: the head, counted from 0."),
    word: str | None = option(None, "Attention: what this word attends to.", value="WORD"),
    place: int | None = option(None, "Saliency, step: the position of the token, counted from 0."),
    shapes: bool = flag("--shapes", "Graph: the shape of each tensor."),
    backward: bool = flag("--backward", "Graph: the backward pass, with its formulas."),
    open: str | None = option(None, "Graph: unfold this module, such as decoder.0.", value="MODULE"),
    other: Text = option(None, "Patch: the text whose activations are replaced.", value="TEXT"),
    answer: tuple[str, str] | None = option(None, "Patch: the tokens that follow the two texts.", value="A B"),
    pairs: str | None = option(None, "Patch: a table with clean, corrupt, answer and wrong.", value="FILE"),
    labels: str | None = option(None, "Probe: a table of labels, or builtin:…", value="FILE"),
    checkpoints: str | None = option(None, "Patch, probe: all checkpoints of the run.", value="all"),
    ranks: int | None = option(None, "Parallel: the number of processes.", show_default="2"),
    out: Path | None = option(
        None,
        "The file to write: .html; for one view also .svg, .png or .pdf, for a graph .dot.",
        value="FILE",
        show_default="explain.html in the run's folder, or here; a single view is printed",
    ),
    as_json: bool = flag("--json", "Print the values of what would be drawn, as JSON."),
) -> None:
    """Look inside a model: attention, surprise, gradients, costs, the computation graph …

    $ weft explain runs/gpt-tiny --only attention --out attention.html
    """
    from weft.config import assignments, validate
    from weft.decode.config import Branching
    from weft.runs.folder import RunFolder

    is_run = RunFolder(source).config.is_file()
    if source == "parallel" and not is_run:
        _parallel(context.params)
        return
    if not is_run and (source == "tree" or (only == "search" and source.endswith((".toml", ".json")))):
        _tree(context.params)
        return
    if ranks is not None:
        raise ConfigError(f"--ranks {ranks}: only for weft explain parallel")
    lecture = source == "mlp" and not is_run
    values = {name: context.params[name] for name in VIEWS_OF}
    chosen = {name: value for name, value in values.items() if value is not None and value is not False}
    for name, value in chosen.items():
        if only not in VIEWS_OF[name] and not (lecture and not only and name in ("shapes", "backward")):
            shown = f"--{name}" if value is True or isinstance(value, tuple) else f"--{name} {value}"
            raise ConfigError(f"{shown}: needs --only {' or '.join(VIEWS_OF[name])}")
    if checkpoints is not None:
        if checkpoints != "all":
            raise ConfigError(f"--checkpoints {checkpoints}: expected all")
        chosen["checkpoints"] = True
    if only is not None and only not in OF_A_TEXT and (text or target):
        raise ConfigError(f"--{'text' if text else 'target'}: the view '{only}' shows no text; leave it out")
    if is_run and only == "search":
        chosen["settings"] = validate(Branching, assignments(changes or []))
    elif is_run and changes:
        hint = "changes are for presets, recipes and searches" if "=" in changes[0] else "give a text with --text"
        raise ConfigError(f"'{changes[0]}': a run is shown as it is; {hint}")
    with loading():
        from torch import float32

        from weft.api.explain import architecture
        from weft.api.load import load
        from weft.explain.graph.picture import lecture_mlp
        from weft.explain.neurons import lecture_neurons
        from weft.figures.picture import check_picture

    if out is not None:
        check_picture(out, SUFFIXES if only is not None or lecture else (".html",))
    if lecture:
        if only not in (None, "graph", "neurons"):
            raise ConfigError(f"--only {only}: mlp, the lectures' small network, has only a graph and neurons")
        drawn = lecture_mlp(shapes=shapes, backward=backward)
        picture: Picture = lecture_neurons() if only == "neurons" else drawn
    else:
        explained = load(source, dtype=float32).explain if is_run else architecture(source, changes or [])
        inputs = {"text": text, "target": target} if only is None or only in OF_A_TEXT else {}
        picture = _picture(explained, only, inputs=inputs, options=chosen)
    summary = picture.text() if only is not None or lecture else None
    if out is None and summary is None and not as_json:
        out = (RunFolder(source).path if is_run else Path()) / "explain.html"
    _show(picture, summary or "", out, as_json=as_json)


def _show(picture: "Picture", summary: str, out: Path | None, *, as_json: bool) -> None:
    """Save a picture, or print its summary or its values."""
    if out is not None:
        echo(f"{picture.title}: {picture.save(out)}", err=as_json)
    if as_json:
        print_json({"title": picture.title, "note": picture.note, **picture.data()})
    elif out is None:
        echo("\n\n".join(filter(None, (summary, "\n".join(wrap(picture.note))))))


def _parallel(arguments: dict[str, Any]) -> None:
    """Show a layer sharded over processes; `arguments` are those of `weft explain`."""
    from weft.config import assignments, validate

    for name in ("text", "target", "only", *VIEWS_OF):
        if arguments[name] is not None and arguments[name] is not False:
            raise ConfigError(f"--{name}: not an option of weft explain parallel, which takes --ranks and --out")
    tree = assignments(arguments["changes"] or [])
    with loading():
        from weft.explain.parallel.parallel import BlockSizes
        from weft.explain.parallel.picture import parallel_splits
        from weft.figures.picture import check_picture

    out, ranks = arguments["out"], arguments["ranks"]
    if out is not None:
        check_picture(out)
    picture = parallel_splits(validate(BlockSizes, tree), 2 if ranks is None else ranks)
    _show(picture, picture.text(), out, as_json=arguments["as_json"])


def _tree(arguments: dict[str, Any]) -> None:
    """Show the searches of a hand-written tree; `arguments` are those of `weft explain`."""
    from weft.config import assignments, validate
    from weft.decode.config import TreeSearch

    for name in ("text", "target", "ranks", *VIEWS_OF):
        if arguments[name] is not None and arguments[name] is not False:
            raise ConfigError(f"--{name}: not an option for a tree, which takes beams=, samples=, seed= and --out")
    if arguments["only"] not in (None, "search"):
        raise ConfigError(f"--only {arguments['only']}: a tree has only searches")
    settings = validate(TreeSearch, assignments(arguments["changes"] or []))
    with loading():
        from weft.decode.handmade import EXAMPLE
        from weft.explain.search import handmade
        from weft.figures.picture import check_picture

    if arguments["out"] is not None:
        check_picture(arguments["out"])
    picture = handmade(EXAMPLE if arguments["source"] == "tree" else Path(arguments["source"]), settings)
    _show(picture, picture.text(), arguments["out"], as_json=arguments["as_json"])


def _picture(explained: "Explain", only: str | None, *, inputs: dict[str, Any], options: dict[str, Any]) -> "Picture":
    """Draw one view of the `inputs`, or all of them."""
    if only == "search":
        return explained.search(inputs["text"], **options)
    if only != "attention" or not options:
        return getattr(explained, only or "all")(**inputs, **options)
    from weft.figures.picture import with_note

    maps = explained.attention(**inputs)
    if "word" in options:
        return with_note(maps.follow(options["word"], options.get("layer"), options.get("head")), maps.note)
    if len(options) < 2:
        present, missing = ("layer", "head") if "layer" in options else ("head", "layer")
        raise ConfigError(f"--{present} {options[present]}: give --{missing} as well, or --word to see all heads")
    return with_note(maps.head(options["layer"], options["head"]), maps.note)
