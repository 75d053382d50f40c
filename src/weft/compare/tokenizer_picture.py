"""Tokenizers side by side: tables, bytes per token against the size of the vocabulary, and a sentence cut by each."""

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from markupsafe import Markup

from weft.costs.units import byte_size
from weft.figures.charts import Chart, Charts, grid
from weft.figures.picture import COLOURS
from weft.figures.tables import WIDTH, Table

LABEL = 16  # characters of a tokenizer's name in a table
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")  # points differ in these as well as in colour
SPACE = "␣"


@dataclass(frozen=True)
class TokenizerMeasure:
    """A tokenizer on the held-out text of `bytes` and `words`, which are what stands between white space.

    `used` is the share of the vocabulary, special tokens apart, that occurs there; `rare` the share that occurs fewer
    than ten times in the training text. `exact`: decoding gives the held-out text back. Speeds are in megabytes of text
    a second. `pieces` are the sentence's tokens, and whether each is known.
    """

    name: str
    kind: str
    entries: int
    bytes: int
    words: int
    tokens: int
    unknown_tokens: int
    unknown_words: int
    used: float
    rare: float
    exact: bool
    training_seconds: float | None
    encode_speed: float
    encode_all_cores_speed: float
    decode_speed: float
    pieces: tuple[tuple[str, bool], ...]

    @property
    def bytes_per_token(self) -> float:
        """How much text a token stands for."""
        return self.bytes / max(1, self.tokens)

    @property
    def tokens_per_byte(self) -> float:
        """The inverse: what bits per token are multiplied by for bits per byte."""
        return self.tokens / max(1, self.bytes)

    @property
    def tokens_per_word(self) -> float:
        """Tokens for what stands between white space (fertility; Rust et al. 2021)."""
        return self.tokens / max(1, self.words)

    @property
    def unknown_word_share(self) -> float:
        """The share of the words that are unknown in whole or in part."""
        return self.unknown_words / max(1, self.words)

    @property
    def unknown_token_share(self) -> float:
        """The share of the tokens that stand for something unknown."""
        return self.unknown_tokens / max(1, self.tokens)

    @property
    def label(self) -> str:
        """The name, cut where a long path is too wide for a table."""
        return self.name if len(self.name) <= LABEL else f"…{self.name[1 - LABEL :]}"


@dataclass(frozen=True)
class TokenizerComparison(Charts):
    """Tokenizers, each trained on `training` bytes of a text (`source`) and measured on the rest of it."""

    measures: tuple[TokenizerMeasure, ...]
    sentence: str
    source: str
    training: int
    title = "Tokenizers compared"

    @property
    def about(self) -> str:  # type: ignore[override]
        """What was read."""
        return (
            f"Trained on {byte_size(self.training)} of {self.source}, measured on the "
            f"{byte_size(self.measures[0].bytes)} held out. More bytes per token make shorter texts; a larger "
            "vocabulary makes larger embeddings, and entries that are rare are hardly learned."
        )

    def charts(self) -> Sequence[Chart]:
        """How long texts get with vocabularies of different size."""
        return [Chart("Bytes per token by vocabulary size", self._draw)]

    def _draw(self, axes: Any) -> None:
        for number, each in enumerate(self.measures):
            style = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
            axes.plot([each.entries], [each.bytes_per_token], linestyle="none", markersize=7, label=each.label, **style)
        axes.set_xscale("log")
        axes.margins(x=0.12, y=0.12)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("vocabulary size", fontsize=8.5)
        axes.set_ylabel("bytes per token, held-out text", fontsize=8.5)
        grid(axes)
        columns = 1 if len(self.measures) <= 8 else 2
        legend = axes.legend(frameon=False, fontsize=8.5, ncols=columns, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        for entry in legend.get_texts():
            entry.set_parse_math(False)

    def tables(self) -> Sequence[Table]:
        """The numbers."""
        return [self._text_table(), self._speed_table()]

    def _text_table(self) -> Table:
        first = self.measures[0]
        rows = [
            (
                each.label,
                f"{each.entries:,}",
                f"{each.bytes_per_token:.3f}",
                f"{each.tokens_per_byte:.4f}",
                f"{each.tokens_per_word:.3f}",
                f"{each.unknown_word_share:.2%}",
                "yes" if each.exact else "no",
            )
            for each in self.measures
        ]
        remarks = [
            "unknown: the share of the words, between white space, that are unknown in whole or in part; their bytes "
            "count, though no token spells them. exact: decoding gives the text back."
        ]
        title = f"Held-out text: {first.bytes:,} bytes, {first.words:,} words"
        header = ("tokenizer", "entries", "bytes/token", "tokens/byte", "tokens/word", "unknown", "exact")
        return Table(header, rows, title, remarks)

    def _speed_table(self) -> Table:
        rows = [
            (
                each.label,
                f"{each.used:.1%}",
                f"{each.rare:.1%}",
                f"{each.unknown_token_share:.2%}",
                "" if each.training_seconds is None else f"{each.training_seconds:.2f} s",
                f"{each.encode_speed:.2f}",
                f"{each.encode_all_cores_speed:.2f}",
                f"{each.decode_speed:.2f}",
            )
            for each in self.measures
        ]
        remarks = [
            "used: the share of the vocabulary, without special tokens, that occurs in the held-out text; rare: fewer "
            "than ten times in the training text. <unk>: the share of tokens. Encoding and decoding in MB of text a "
            "second: one text after another, and many at once, on all cores."
        ]
        header = ("tokenizer", "used", "rare", "<unk>", "training", "encode", "at once", "decode")
        return Table(header, rows, "Vocabulary and speed", remarks)

    def text(self) -> str:
        """The tables, and the sentence under each tokenizer."""
        lines = [f"“{self.sentence}”"]
        for each in self.measures:
            begin = f"{each.label} ({len(each.pieces)})"
            cut = " ".join(shown(piece) for piece, _ in each.pieces)
            lines += textwrap.wrap(f"{begin}: {cut}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        return "\n\n".join(filter(None, [super().text(), "\n".join(lines)]))

    def record(self) -> dict[str, Any]:
        """The same as values: a record for each tokenizer."""
        return {"tokenizers": [asdict(each) for each in self.measures]}

    def html(self) -> str:
        """The chart, the tables, and the sentence as boxes."""
        rows = Markup("").join(map(_row, self.measures))
        sentence = Markup('<h3 class="tok-title">“{}”</h3>').format(self.sentence)
        return Markup(super().html()) + sentence + rows


def shown(piece: str) -> str:
    """A token with its spaces visible."""
    return "".join(SPACE if sign == " " else sign if sign.isprintable() else repr(sign)[1:-1] for sign in piece)


def _row(measure: TokenizerMeasure) -> Markup:
    boxes = Markup("").join(_box(number, *piece) for number, piece in enumerate(measure.pieces))
    return Markup(
        '<div class="tok-row"><b>{}</b> <span class="soft">{} tokens</span><p class="tok-pieces">{}</p></div>'
    ).format(measure.name, len(measure.pieces), boxes)


def _box(number: int, piece: str, known: bool) -> Markup:
    kind = f"tok-{number % len(COLOURS)}" if known else "tok-unknown"
    return Markup('<span class="tok-piece {}">{}</span>').format(kind, shown(piece))
