"""Figures of the lectures from published numbers: the compute of well-known models, and OPT's logbook."""

import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np

from weft.costs.plan import PETAFLOP_DAY, TEXTS
from weft.costs.published import csv_rows
from weft.costs.units import plain, short
from weft.figures.charts import Charts
from weft.figures.plot import LOOKS, Axis, Look, Plot, Series
from weft.figures.tables import Table

CAUSES = {"numerics": Look("c1", "^", width=0), "hardware": Look("c0", "s", width=0)}
CAUSES |= {"milestone": Look("c2", "D", width=0)}


@dataclass(frozen=True)
class TrainingCompute(Charts):
    """Total compute of training by model, after Brown et al. 2020, figure 2.2 and table D.1."""

    rows: tuple[dict[str, str], ...]

    title = "Total compute of training"
    about = TEXTS["compute"]
    columns = 1

    def charts(self) -> list[Plot]:
        families = dict.fromkeys(row["family"] for row in self.rows)
        series = []
        for family, look in zip(families, LOOKS, strict=False):
            points = [(float(r["parameters"]), _days(r)) for r in self.rows if r["family"] == family]
            series.append(Series(family, points, look))
        reference = Series("50 petaflop/s-days", look=Look("soft", dash="2 3", width=1.2), level=50.0)
        x = Axis("parameters", log=True, ticks={1e8: "100M", 1e9: "1B", 1e10: "10B", 1e11: "100B"})
        return [Plot(self.title, [*series, reference], x, Axis("petaflop/s-days", log=True), size=(640, 400))]

    def tables(self) -> list[Table]:
        rows = []
        for r in self.rows:
            sizes = (short(float(r["parameters"])), short(float(r["tokens"])))
            rows.append((r["model"], *sizes, r["flops"], plain(_days(r)), f"{float(r['published']):,g}"))
        header = ("model", "parameters", "tokens", "FLOPs per parameter and token", "PF/s-days", "published")
        title = "Total compute of training (Brown et al. 2020, figure 2.2 and table D.1)"
        return [Table(header, rows, title, [TEXTS["compute-claims"]])]


def _days(row: dict[str, str]) -> float:
    """Petaflop/s-days of a row: FLOPs per parameter and token × parameters × tokens."""
    return float(row["flops"]) * float(row["parameters"]) * float(row["tokens"]) / PETAFLOP_DAY


def training_compute() -> TrainingCompute:
    return TrainingCompute(tuple(csv_rows("compute.csv")))


@dataclass(frozen=True)
class Logbook(Charts):
    """Events of a long training run: each has a day, a cause and a text, some a progress and a learning rate."""

    title: str
    events: tuple[dict[str, Any], ...]

    about = TEXTS["logbook"]
    columns = 1

    def charts(self) -> list[Plot]:
        done = [(event["day"], event["done"]) for event in self.events if "done" in event]
        restart = max(day for day, share in done if not share)
        progress = Series("progress", [point for point in done if point[0] >= restart], Look("ink", width=1.4))
        (known, shares), series = zip(*progress.points, strict=True), [progress]
        for cause, look in CAUSES.items():
            days = [event["day"] for event in self.events if event["cause"] == cause]
            at = np.interp(days, known, shares, right=0.0).tolist()
            series.append(Series(cause, list(zip(days, at, strict=True)), look))
        y = Axis("percent of 300 billion tokens", includes=(0.0, 100.0))
        rates = [(event["day"], event["rate"]) for event in self.events if "rate" in event]
        labels = [f"{0.6 * rate:.1f}e-4" for _, rate in rates]
        stated = Series("OPT-175B, where stated", rates, Look("c1", "o", width=0), labels=labels)
        gpt3 = Series("GPT-3 175B, 0.6e-4", look=Look("soft", dash="6 4", width=1.2), level=1.0)
        restarts = [(event["day"], event["restarts"]) for event in self.events if "restarts" in event]
        numbers = Series(points=restarts, look=Look("c0", "o"), labels=[f"{n:g}" for _, n in restarts])
        title = "Restarts of lineage 12: at least 40 by day 28, about 90 in all"
        day_axis = Axis("day", includes=(0.0, float(self.events[-1]["day"])))
        rate_axis = Axis(log=True, includes=(0.4,), pad=0.15)
        return [
            Plot(self.title, series, day_axis, y, size=(640, 340)),
            Plot(title, [numbers], day_axis, Axis(pad=0.15), size=(640, 220)),
            Plot("Learning rate ÷ GPT-3's", [stated, gpt3], day_axis, rate_axis, size=(640, 240)),
        ]

    def tables(self) -> list[Table]:
        rows = []
        for event in self.events:
            day = f"≈ {event['day']}" if event.get("approximate") else str(event["day"])
            rows.append((day, f"{event['done']:g}%" if "done" in event else "", event["cause"], event["text"]))
        header = ("day", "done", "cause", "what happened")
        return [Table(header, rows, self.title, [TEXTS["logbook-source"]], text=(2, 3))]


def opt_logbook() -> Logbook:
    text = (resources.files("weft.costs") / "opt_logbook.toml").read_text(encoding="utf-8")
    return Logbook("OPT-175B, day by day", tuple(tomllib.loads(text)["events"]))
