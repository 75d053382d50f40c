"""`weft explain`: see inside a model."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from weft.cli.console import options
from weft.cli.console.options import flag, option, recipe_argument
from weft.cli.console.terminal import echo, loading, print_json
from weft.errors import ConfigError
from weft.explain.views import OF_A_TEXT, VIEWS
from weft.figures.tables import wrapped

if TYPE_CHECKING:
    from weft.api.explain import Explain
    from weft.figures.picture import Picture

What = StrEnum("What", list(VIEWS))  # type: ignore[misc]
ALL = (".html", ".svg", ".png", ".pdf", ".dot")
# the views that an option is for
OF_VIEWS = {
    "layer": ("attention", "step"),
    "head": ("attention",),
    "word": ("attention",),
    "place": ("saliency", "step"),
    "shapes": ("graph",),
    "backward": ("graph",),
    "open": ("graph",),
}


def explain(
    context: typer.Context,
    source: str = recipe_argument(
        "RUN|PRESET",
        "A run's folder; a preset or recipe, which has no weights yet; mlp, the lectures' small network; or "
        "parallel, a layer split over processes in every way (d_model=, d_ff=, heads=, tokens=).",
    ),
    changes: options.Changes = None,
    text: str | None = option(None, "The text to look at.", value="TEXT", show_default="one that the run held out"),
    target: str | None = option(None, "For a translator, the text it writes.", value="TEXT", show_default="its own"),
    only: What | None = option(None, "One view: " + ", ".join(VIEWS) + ".", value="WHAT", show_default="all"),
    layer: int | None = option(None, "Attention, step: one layer, counted from 0."),
    head: int | None = option(None, "Attention: one head of it."),
    word: str | None = option(None, "Attention: what this word attends to.", value="WORD"),
    place: int | None = option(None, "Saliency, step: the token whose prediction is explained, counted from 0."),
    shapes: bool = flag("--shapes", "Graph: the shape of each tensor."),
    backward: bool = flag("--backward", "Graph: the backward pass, with its formulas."),
    open: str | None = option(None, "Graph: show what is inside of it, such as decoder.0.", value="MODULE"),
    ranks: int | None = option(None, "Parallel: how many processes the layer is split over.", show_default="2"),
    out: Path | None = option(
        None,
        "A page, .html; of one view also .svg, .png or .pdf, of a graph .dot.",
        value="FILE",
        show_default="explain.html in the run's folder, or here; one view is printed",
    ),
    as_json: bool = flag("--json", "Print the numbers of what would be drawn as JSON."),
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
    if ranks is not None:
        raise ConfigError(f"--ranks {ranks}: it belongs to weft explain parallel")
    lecture = source == "mlp" and not is_run
    asked = {name: context.params[name] for name in OF_VIEWS}
    chosen = {name: value for name, value in asked.items() if value is not None and value is not False}
    for name, value in chosen.items():
        if only not in OF_VIEWS[name] and not (lecture and name in ("shapes", "backward")):
            flag = f"--{name}" if value is True else f"--{name} {value}"
            raise ConfigError(f"{flag}: it belongs to --only {' or '.join(OF_VIEWS[name])}")
    if only is not None and only not in OF_A_TEXT and (text or target):
        raise ConfigError(f"--{'text' if text else 'target'}: --only {only} shows no text; leave it out")
    if is_run and only == "search":
        chosen["settings"] = validate(Branching, assignments(changes or []))
    elif is_run and changes:
        what = "changes are for presets, recipes and searches" if "=" in changes[0] else "a text is given with --text"
        raise ConfigError(f"'{changes[0]}': a run is shown as it is; {what}")
    with loading():
        from torch import float32

        from weft.api.explain import architecture
        from weft.api.load import load
        from weft.explain.graph.picture import lecture_mlp
        from weft.figures.picture import check_picture

    if out is not None:
        check_picture(out, ALL if only is not None or lecture else (".html",))
    if lecture:
        if only not in (None, "graph"):
            raise ConfigError(f"--only {only}: mlp is the lectures' small network, of which there is a graph alone")
        picture: Picture = lecture_mlp(shapes=shapes, backward=backward)
    else:
        explained = load(source, dtype=float32).explain if is_run else architecture(source, changes or [])
        given = {"text": text, "target": target} if only is None or only in OF_A_TEXT else {}
        picture = _picture(explained, only, given, chosen)
    told = picture.text() if only is not None or lecture else None
    if out is None and told is None and not as_json:
        out = (RunFolder(source).path if is_run else Path()) / "explain.html"
    _show(picture, told or "", out, as_json)


def _show(picture: "Picture", told: str, out: Path | None, as_json: bool) -> None:
    """Save a picture, or print what it tells or its numbers."""
    if out is not None:
        echo(f"{picture.title}: {picture.save(out)}", err=as_json)
    if as_json:
        print_json({"title": picture.title, "note": picture.note, **picture.data()})
    elif out is None:
        echo("\n\n".join(filter(None, (told, "\n".join(wrapped(picture.note))))))


def _parallel(given: dict[str, Any]) -> None:
    from weft.config import assignments, validate

    for name in ("text", "target", "only", *OF_VIEWS):
        if given[name] is not None and given[name] is not False:
            raise ConfigError(f"--{name}: weft explain parallel has no such option; it takes --ranks and --out")
    tree = assignments(given["changes"] or [])
    with loading():
        from weft.explain.parallel.parallel import BlockSizes
        from weft.explain.parallel.picture import parallel_splits
        from weft.figures.picture import check_picture

    out, ranks = given["out"], given["ranks"]
    if out is not None:
        check_picture(out)
    picture = parallel_splits(validate(BlockSizes, tree), 2 if ranks is None else ranks)
    _show(picture, picture.text(), out, given["as_json"])


def _picture(explained: "Explain", only: str | None, given: dict[str, Any], chosen: dict[str, Any]) -> "Picture":
    if only == "search":
        return explained.search(given["text"], **chosen)
    if only != "attention" or not chosen:
        return getattr(explained, only or "all")(**given, **chosen)
    from weft.figures.picture import noted

    maps = explained.attention(**given)
    if "word" in chosen:
        return noted(maps.follow(chosen["word"], chosen.get("layer", 0), chosen.get("head")), maps.note)
    if len(chosen) < 2:
        one, other = ("layer", "head") if "layer" in chosen else ("head", "layer")
        raise ConfigError(f"--{one} {chosen[one]}: give --{other} as well, or --word to follow through all heads")
    return noted(maps.head(chosen["layer"], chosen["head"]), maps.note)
