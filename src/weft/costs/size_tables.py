"""Two tables of the lectures, computed again: GPT-3's sizes, and where OPT's operations go."""

from typing import NamedTuple

from weft.costs.count import count
from weft.costs.plan import PETAFLOP_DAY
from weft.costs.units import plain, short
from weft.figures.tables import Table
from weft.models.presets import PRESETS, gpt, preset


class GPT3Row(NamedTuple):
    """A row of Brown et al. 2020, table 2.1, as the slide prints it."""

    preset: str
    parameters: float
    layers: int
    d_model: int
    heads: int
    d_head: int

    @property
    def multiplies_out(self) -> bool:
        """heads × d_head is d_model."""
        return self.heads * self.d_head == self.d_model


# GPT-3 Large's row is 16 heads of 96; two rows do not multiply out, and the presets say what is built instead.
GPT3 = (
    GPT3Row("gpt3-small", 125e6, 12, 768, 12, 64),
    GPT3Row("gpt3-medium", 350e6, 24, 1024, 16, 64),
    GPT3Row("gpt3-large", 760e6, 24, 1536, 16, 96),
    GPT3Row("gpt3-xl", 1.3e9, 24, 2048, 24, 128),
    GPT3Row("gpt3-2.7b", 2.7e9, 32, 2560, 32, 80),
    GPT3Row("gpt3-6.7b", 6.7e9, 32, 4096, 32, 128),
    GPT3Row("gpt3-13b", 13.0e9, 40, 5140, 40, 128),
    GPT3Row("gpt3-175b", 175.0e9, 96, 12288, 96, 128),
)


def gpt3_table() -> Table:
    """The slide's sizes beside those of the presets."""
    rows = []
    for row in GPT3:
        model = preset(row.preset)
        cost = count(model)
        difference = f"{cost.parameters / row.parameters - 1:+.1%}"
        sizes = (str(size) for size in (model.layers, model.d_model, model.attention.heads, model.d_head))
        compute = plain(cost.training() * 300e9 / PETAFLOP_DAY)
        rows.append((row.preset, short(row.parameters), short(cost.parameters), difference, *sizes, compute))
    remarks = ["Petaflop/s-days are those of training on 300 billion tokens."]
    remarks += [f"{row.preset}: {PRESETS[row.preset][1]}." for row in GPT3 if not row.multiplies_out]
    header = ("preset", "slide", "weft", "differs", "layers", "d_model", "heads", "d_head", "PF/s-days")
    return Table(header, rows, "GPT-3's sizes (Brown et al. 2020, table 2.1)", remarks)


class OPTRow(NamedTuple):
    """A row of the slide: shares of the operations of an update, in percent."""

    name: str
    layers: int
    d_model: int
    heads: int
    projections: float
    feedforward: float
    attention: float
    logits: float


# Zhang et al. 2022, table 1; the slide's smallest row has the sizes of GPT-3 Large.
OPT = (
    OPTRow("760M", 24, 1536, 16, 35, 44, 14.8, 5.8),
    OPTRow("1.3B", 24, 2048, 32, 32, 51, 12.7, 5.0),
    OPTRow("2.7B", 32, 2560, 32, 29, 56, 11.2, 3.3),
    OPTRow("6.7B", 32, 4096, 32, 24, 65, 8.1, 2.4),
    OPTRow("13B", 40, 5120, 40, 22, 69, 6.9, 1.6),
    OPTRow("30B", 48, 7168, 56, 20, 74, 5.3, 1.0),
    OPTRow("66B", 64, 9216, 72, 18, 77, 4.3, 0.6),
    OPTRow("175B", 96, 12288, 96, 17, 80, 3.3, 0.3),
)
OPT_VOCABULARY, OPT_CONTEXT = 50272, 2048


def opt_shares(row: OPTRow) -> dict[str, float]:
    """Percent of the operations of an update, the layers recomputed once, by component: weft's own count."""
    cost = count(gpt(row.layers, row.d_model, row.heads, OPT_CONTEXT, OPT_VOCABULARY))
    return {part.name: 100 * cost.share(part, recompute=True) for part in cost.components if part.flops}


def opt_table() -> Table:
    """weft's shares beside the slide's."""
    parts = ("MHA projections", "FFN", "attention", "logits")
    rows = []
    for row in OPT:
        slide = zip(parts, (row.projections, row.feedforward, row.attention, row.logits), strict=True)
        rows.append((row.name, *(f"{opt_shares(row)[part]:.1f} | {there:4.1f}" for part, there in slide)))
    remark = (
        f"weft counts 8d²L, 16d²L, 4TdL and 2dV a token (T = {OPT_CONTEXT}, V = {OPT_VOCABULARY}); an update runs the"
        " layers 4 times, because they are recomputed once, and the logits 3 times. The slide's FFN, attention and"
        " logits stand in the same ratios to each other. Its MHA column follows from no standard count, and shifts the"
        " other three. Both show that the FFN's share rises with size and those of attention and logits fall."
    )
    return Table(("size", *parts), rows, "Percent of an update's FLOPs for OPT's sizes: weft | slide", [remark])
