"""Which matrices are split over the processes of the tensor axis, and how: module name pattern → placement.

A block needs one sum over the processes in each pass (Shoeybi et al. 2019, §3): queries, keys, values and the way up
are split by columns, so that heads and nonlinearities stay local; the projections back by rows, whose products are
summed. The tables of words are split by words. What recurs (Elman, LSTM, GRU, Bahdanau) would have to be summed at
every token, so its cells are whole everywhere, and the tables of words, most of such a model, are split alone.
"""

from fnmatch import fnmatchcase
from typing import Literal

from weft.config import Config
from weft.errors import ConfigError
from weft.layout import Layout
from weft.models.config import Bahdanau, Recurrent, TransformerConfig

Placement = Literal["column", "row", "word"]

BLOCKS: dict[str, Placement] = {
    "*.attention.qkv": "column",
    "*.attention.out": "row",
    "*.cross.q": "column",
    "*.cross.kv": "column",
    "*.cross.out": "row",
    "*.feedforward.up": "column",
    "*.feedforward.gate_up": "column",
    "*.feedforward.down": "row",
}
TABLES: dict[str, Placement] = {"embedding": "word", "source_embedding": "word"}
# whole everywhere, but a process sees only its own heads of what they act on: their gradients are sums
OF_HEADS = ("*.q_norm.*", "*.k_norm.*", "*.relative_keys", "*.relative_values", "*.position.weight")
# the same where a process has only its own tokens between the split matrices
OF_TOKENS = ("*_skip.norm.*", "*_skip.norm_out.*", "encoder.norm.*", "decoder.norm.*")


def plan(model: Config) -> dict[str, Placement]:
    """The placement of each module of a model, by the patterns of their names."""
    match model:
        case TransformerConfig():
            return {**TABLES, **BLOCKS}
        case Recurrent() | Bahdanau():
            return TABLES
        case _:
            raise ConfigError("parallel: an n-gram model is counted, by one process; start one")


def placement(name: str, patterns: dict[str, Placement]) -> Placement | None:
    """The placement of the module with this name, if it is split."""
    return next((placed for pattern, placed in patterns.items() if fnmatchcase(name, pattern)), None)


def is_sum(name: str, layout: Layout, biases: bool) -> bool:
    """Whether the gradient of a parameter that is whole everywhere is a sum over the processes of the tensor axis.

    `biases`: the model's positions add to the scores of each head (their table is then read by heads).
    """
    names = OF_HEADS if biases else OF_HEADS[:-1]
    return any(fnmatchcase(name, pattern) for pattern in (*names, *(OF_TOKENS if layout.sequence else ())))
