"""Compare weft's counts with two tables of the lectures, and the planner's predictions with measured steps.

published.md lists the sources of published.csv, and which rows constants were fitted to.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import resources
from math import isnan
from statistics import median
from types import SimpleNamespace

from weft.config import validate
from weft.costs.count import count
from weft.costs.devices import DEVICES, interconnect_named
from weft.costs.layout_search import LayoutPrediction, Predictor
from weft.costs.layouts import LayoutChoice, TrainingJob, refusal
from weft.costs.plan import PETAFLOP_DAY, TEXTS
from weft.costs.roofline import Software
from weft.costs.units import plain, short
from weft.figures.tables import Table
from weft.layout import AXES, Layout
from weft.models.config import TransformerConfig
from weft.models.head_config import MaskedLMHead
from weft.models.presets import PRESETS, bert, gpt, llama, preset, vaswani


def csv_rows(name: str) -> list[dict[str, str]]:
    """Return the rows of a table of this room."""
    text = (resources.files("weft.costs") / name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))


def _records(name: str) -> list[SimpleNamespace]:
    """Return the rows of a table that has numbers after its first column."""
    records = []
    for row in csv_rows(name):
        (key, title), *cells = row.items()
        numbers = {column: int(cell) if cell.isdecimal() else float(cell) for column, cell in cells}
        records.append(SimpleNamespace(**{key: title}, **numbers))
    return records


# Brown et al. 2020, table 2.1, as on the slide, with batches in millions of tokens. GPT-3 Large has 16 heads of 96; two
# rows are inconsistent, and the presets' descriptions say what is built instead.
GPT3 = _records("gpt3.csv")


def gpt3_tables() -> list[Table]:
    """Compare the slide's sizes with those of the presets; then batch, learning rate and compute."""
    rows, training = [], []
    for row in GPT3:
        model = preset(row.preset)
        cost = count(model)
        difference = f"{cost.parameters / row.parameters - 1:+.1%}"
        sizes = (str(size) for size in (model.layers, model.d_model, model.attention.heads, model.d_head))
        compute = plain(cost.training() * 300e9 / PETAFLOP_DAY)
        batch, rate = f"{row.batch:g}M", f"{row.rate * 1e4:.1f}e-4"
        rows.append((row.preset, short(row.parameters), short(cost.parameters), difference, *sizes))
        training.append((row.preset, batch, rate, compute))
    inconsistent = [row.preset for row in GPT3 if row.heads * row.d_head != row.d_model]
    remarks = [f"{name}: {PRESETS[name][1]}." for name in inconsistent]
    header = ("preset", "slide", "weft", "differs", "layers", "d_model", "heads", "d_head")
    notes = ["Batch sizes are in tokens. Petaflop/s-days are those of training on 300 billion tokens."]
    sizes_table = Table(header, rows, "GPT-3's sizes (Brown et al. 2020, table 2.1)", remarks)
    columns = ("preset", "batch", "rate", "PF/s-days")
    return [sizes_table, Table(columns, training, "Their training", [*notes, TEXTS["compute-claims"]])]


# Zhang et al. 2022, table 1, and the slide: FLOPs of an update (NaN where the slide cannot be read) and their shares in
# percent; batches are OPT's, in units of 2²⁰ tokens. The slide's smallest row is GPT-3 Large.
OPT = _records("opt.csv")
OPT_VOCABULARY, OPT_CONTEXT = 50272, 2048
OPT_PARTS = ("MHA projections", "FFN", "attention", "logits")


def opt_flops(row: SimpleNamespace) -> dict[str, float]:
    """Return weft's count of the FLOPs of an update, with the layers recomputed once, by component."""
    cost = count(gpt(row.layers, row.d_model, row.heads, context=OPT_CONTEXT, vocab_size=OPT_VOCABULARY))
    update = row.batch * 2**20 * cost.training(recompute=True)
    return {part.name: update * cost.share(part, recompute=True) for part in cost.components if part.flops}


def opt_slide_flops(row: SimpleNamespace) -> dict[str, float]:
    """Return the FLOPs of an update by the count that reproduces the slide; the terms of the projections are fitted."""
    d, T, layers = row.d_model, OPT_CONTEXT, row.layers
    parts = (2 * d * d + 8 * T * d, 16 * d * d, 4 * T * d, 0.75 * 2 * d * OPT_VOCABULARY / layers)
    return {name: row.batch * 2**20 * 4 * layers * flops for name, flops in zip(OPT_PARTS, parts, strict=True)}


def _update_and_shares(flops: Mapping[str, float]) -> tuple[float, list[float]]:
    """Return the sum over the components, and the share of each in percent."""
    update = sum(flops.values())
    return update, [100 * flops[part] / update for part in OPT_PARTS]


def opt_table() -> tuple[Table, Table]:
    """Compare the slide's columns with the count that reproduces them, and show weft's count of the same sizes."""
    slide, ours = [], []
    for row in OPT:
        matched, shares = _update_and_shares(opt_slide_flops(row))
        counted, our_shares = _update_and_shares(opt_flops(row))
        printed = (f"{row.projections:.0f}", f"{row.feedforward:.0f}", f"{row.attention:.1f}", f"{row.logits:.1f}")
        cells = (f"{slide_share} | {share:4.1f}" for slide_share, share in zip(printed, shares, strict=True))
        slide.append((row.name, f"{'?' if isnan(row.update) else f'{row.update:.1e}'} | {matched:.2e}", *cells))
        ours.append((row.name, f"{counted:.2e}", *(f"{share:.1f}" for share in our_shares)))
    sizes, header = {"context": OPT_CONTEXT, "vocabulary": OPT_VOCABULARY}, ("size", "FLOPs/update", *OPT_PARTS)
    title = "FLOPs of an update for OPT's sizes, and their shares in percent"
    reproduced = Table(header, slide, f"{title}: slide | reproduced", [TEXTS["slide-count"].format(**sizes)])
    return reproduced, Table(header, ours, f"{title}: weft", [TEXTS["weft-count"].format(**sizes)])


A100, H100 = DEVICES["a100"], DEVICES["h100"]
USED_DEVICES = DEVICES | {
    "a100-40gb": replace(A100, memory=40 * 10**9),
    "h100-500w": replace(H100, title="H100, 500 W", memory=96 * 10**9, bandwidth=2.4e12, share=0.5, watts=500),
}
SOFTWARE = {"compiled": Software(), "eager": Software(compiled=False)}
SOFTWARE |= {"plain attention": Software(fused_attention=False), "async tensor": Software(hidden_tensor=True)}


@dataclass(frozen=True)
class MeasuredStep:
    """Measured step: `value` in `unit`, and how it was run. `used` is "fitted", "seen", or "" for a held-out row."""

    source: str
    name: str
    job: TrainingJob
    choices: tuple[LayoutChoice, ...]
    value: float
    unit: str
    used: str = ""

    def predicted(self) -> tuple[LayoutPrediction, float]:
        """Return the fastest of the choices that fits, and its predicted value in the row's unit."""
        predict = Predictor(self.job)
        layouts = [predict(choice) for choice in self.choices if refusal(self.job, choice) is None]
        best = min(layouts, key=lambda layout: (not layout.fits, layout.time.total))
        match self.unit:
            case "ms":
                value = 1e3 * best.time.total
            case "TFLOP/s":
                # FLOPs of a step by Narayanan et al. 2021, eq. 3
                layers, h, s, V = self.job.model.layers, self.job.model.d_model, self.job.length, self.job.vocab_size
                flops = 96 * self.job.rows * s * layers * h * h * (1 + s / (6 * h) + V / (16 * layers * h))
                value = flops / best.time.total / self.job.gpus / 1e12
            case _:
                value = best.speed / self.job.gpus
        return best, value


def rows() -> list[MeasuredStep]:
    return [_row(cells) for cells in csv_rows("published.csv")]


def _row(cells: Mapping[str, str]) -> MeasuredStep:
    model, device, gpus = _model(cells), USED_DEVICES[cells["device"]], int(cells["gpus"])
    net, software = interconnect_named(cells["network"], device, gpus), SOFTWARE[cells["software"]]
    job = TrainingJob(model, int(cells["rows"]), model.context, device=device, net=net, gpus=gpus, software=software)
    job = replace(job, precision=cells["precision"], predicted=0.15 if cells["family"] == "BERT" else 1.0)
    layout = validate(Layout, {axis: cells[axis] for axis in (*AXES, "sequence") if axis in cells}).over(gpus)
    share, chunks = float(cells["recompute"]), int(cells["chunks"])
    choices = tuple(LayoutChoice(layout, int(micro), share, chunks=chunks) for micro in cells["micro"].split())
    texts = {name: cells[name] for name in ("source", "name", "unit", "used")}
    return MeasuredStep(**texts, job=job, choices=choices, value=float(cells["value"]))


def _model(cells: Mapping[str, str]) -> TransformerConfig:
    names = ("layers", "d_model", "heads", "d_ff", "kv_heads", "vocab_size", "length")
    layers, d_model, heads, d_ff, kv_heads, vocab_size, length = (int(cells[name]) for name in names)
    match cells["family"]:
        case "GPT":
            return gpt(layers, d_model, heads, context=length, vocab_size=vocab_size)
        case "LLaMA":
            return llama(layers, d_model, heads, d_ff=d_ff, context=length, vocab_size=vocab_size, kv_heads=kv_heads)
        case "BERT":
            return bert(layers, d_model, heads, vocab_size=vocab_size, context=length).replace(head=MaskedLMHead())
        case _:
            return vaswani(layers, d_model, heads, d_ff=d_ff, dropout=0.1, context=length, vocab_size=vocab_size)


def published_table() -> Table:
    """Compare each measured step with its prediction."""
    shown, errors, held_out = [], [], []
    for row in rows():
        best, value = row.predicted()
        error = value / row.value - 1
        errors.append(abs(error))
        held_out += [] if row.used else [abs(error)]
        layout = f"{row.job.gpus:,}: {best.choice.layout.in_words}" if row.job.gpus > 1 else "1"
        values = (f"{row.value:,g}", f"{value:,.{1 if row.unit == 'ms' else 0}f}", row.unit)
        shown.append((row.source, row.name, layout, *values, f"{error:+.1%}", row.used))
    near = sum(error <= 0.25 for error in errors)
    medians = {"median": median(errors), "held_out": len(held_out), "held_out_median": median(held_out)}
    remarks = [TEXTS["errors"].format(rows=len(errors), near=near, **medians), TEXTS["far-off"], TEXTS["sources"]]
    header = ("source", "model", "GPUs and layout", "measured", "predicted", "unit", "error", "")
    return Table(header, shown, "Predicted and measured steps", remarks, text=(0, 1, 2, 5, 7))
