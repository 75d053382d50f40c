"""Two tables of the lectures, computed again: GPT-3's sizes, and where OPT's operations go."""

from dataclasses import dataclass

from weft.explain.count import Count, count
from weft.models.config import Decoder
from weft.models.presets import gpt, preset


@dataclass(frozen=True)
class GPT3Row:
    """A row of Brown et al. 2020, table 2.1, as the slide prints it."""

    preset: str
    name: str
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
    GPT3Row("gpt3-small", "GPT-3 Small", 125e6, 12, 768, 12, 64),
    GPT3Row("gpt3-medium", "GPT-3 Medium", 350e6, 24, 1024, 16, 64),
    GPT3Row("gpt3-large", "GPT-3 Large", 760e6, 24, 1536, 16, 96),
    GPT3Row("gpt3-xl", "GPT-3 XL", 1.3e9, 24, 2048, 24, 128),
    GPT3Row("gpt3-2.7b", "GPT-3 2.7B", 2.7e9, 32, 2560, 32, 80),
    GPT3Row("gpt3-6.7b", "GPT-3 6.7B", 6.7e9, 32, 4096, 32, 128),
    GPT3Row("gpt3-13b", "GPT-3 13B", 13.0e9, 40, 5140, 40, 128),
    GPT3Row("gpt3-175b", "GPT-3 175B", 175.0e9, 96, 12288, 96, 128),
)


def gpt3_built(row: GPT3Row) -> tuple[Decoder, Count]:
    """The preset of a row and its cost."""
    model: Decoder = preset(row.preset)
    return model, count(model)


@dataclass(frozen=True)
class OPTRow:
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
