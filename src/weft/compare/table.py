"""The table of a comparison, for a page and for a terminal of 80 columns."""

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from weft.compare.charts import effect_name
from weft.compare.effects import Effect
from weft.compare.standings import NOTHING, Standing, flops_text, rate_text
from weft.costs.units import plain, short
from weft.figures.page import template
from weft.figures.tables import WIDTH, Table, text_table

HEADER = ("contender", "parameters", "FLOPs", "bits per byte", "rate", "multiplier")


def text_standings(found: Sequence[Standing]) -> str:
    """Best first, in 80 columns. Where a name needs more than is left beside the numbers, it has a line of its own."""
    rows = [_line(standing) for standing in found]
    columns = list(zip(HEADER[1:], *(row[1:] for row in rows), strict=True))
    widths = [max(map(len, column)) for column in columns]
    left = WIDTH - sum(widths) - 2 * len(widths)
    longest = max(map(len, (HEADER[0], *(row[0] for row in rows))))
    lines = []
    for name, *cells in (HEADER, *rows):
        numbers = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        if longest <= left:
            lines.append(f"{name:<{longest}}{numbers}")
        elif name == HEADER[0]:
            lines.append(f"{name:<{left}}{numbers}")
        else:
            lines += [*(name[at : at + WIDTH] for at in range(0, len(name), WIDTH)), " " * left + numbers]
    return "\n".join(line.rstrip() for line in lines)


def _line(standing: Standing) -> tuple[str, ...]:
    if not standing.finished:
        return standing.name, *[NOTHING] * (len(HEADER) - 2), "failed"
    return (
        standing.name,
        short(standing.mean("parameters")),
        flops_text(standing.mean("flops")),
        f"{standing.bits:.3f} ±{standing.half_width:.3f}",
        rate_text(standing.contender.rate),
        # the words for it don't fit
        standing.multiplier_text().replace("interval beyond the measured range", "0–∞"),
    )


def html_standings(found: Sequence[Standing]) -> Markup:
    """Best first; on a narrow page every contender is a card. Below, a sample of what each one writes."""
    header = ("parameters", "tokens", "FLOPs", "seconds", "bits per byte", "95 % interval", "rate",
              "multiplier")  # fmt: skip
    rows = [(standing, list(zip(header, _cells(standing), strict=True))) for standing in found]
    return Markup(template("compare.html").module.standings(header, rows))  # type: ignore[attr-defined]


def _cells(standing: Standing) -> list[str]:
    if not standing.finished:
        return [*[NOTHING] * 7, "failed"]
    low, high = standing.bounds
    return [
        short(standing.mean("parameters")),
        short(standing.mean("tokens")),
        flops_text(standing.mean("flops")),
        plain(standing.mean("seconds")),
        f"{standing.bits:.3f}",
        f"{low:.3f}–{high:.3f}",
        rate_text(standing.contender.rate),
        standing.multiplier_text(),
    ]


def effects_table(effects: Sequence[Effect]) -> Table:
    """Main effects in numbers."""
    rows = [
        (effect_name(each), f"{each.difference:+.4f}", f"{each.low:+.4f} to {each.high:+.4f}", _pairs(each))
        for each in effects
    ]
    remark = "A negative change is better: fewer bits per byte with the value on the right of the arrow."
    return Table(("setting", "bits per byte", "95 % interval", "pairs"), rows, "Main effects", [remark])


def _pairs(effect: Effect) -> str:
    """How many differences the mean is taken over, and how many were planned where some failed."""
    return str(effect.pairs) if effect.pairs == effect.planned else f"{effect.pairs} of {effect.planned}"


def text_effects(effects: Sequence[Effect]) -> str:
    """The same for a terminal."""
    return text_table(effects_table(effects))


def grid_table(found: Sequence[Standing], varied: Mapping[str, tuple[str, ...]]) -> Table:
    """Every combination that was trained, best first."""
    rows = []
    for standing in found:
        if standing.contender.levels is None:
            continue
        levels = [standing.contender.levels.get(setting, NOTHING) for setting in varied]
        cost = f"{standing.bits:.3f} ±{standing.half_width:.3f}" if standing.finished else "failed"
        rows.append((*levels, cost, standing.multiplier_text()))
    header = (*varied, "bits per byte", "multiplier")
    return Table(header, rows, "The grid, best first", text=range(len(varied)))
