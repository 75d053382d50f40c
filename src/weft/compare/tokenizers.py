"""Tokenizers on one text: how long a text gets, what of the vocabulary is used, what is unknown, and how fast they are.

Each is trained on the training side alone and measured on what is held out. Nothing of a model is in these numbers:
which tokenizer a model predicts text best with is a matter of bits per byte, at equal compute.
"""

import textwrap
import time
import timeit
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from weft.compare.config import ALLOWED, choose
from weft.costs.units import byte_size
from weft.data.config import TextSource
from weft.data.split import split_sections, train_texts
from weft.errors import ConfigError, DataError, TokenizerError
from weft.figures.charts import Charts
from weft.figures.page import part
from weft.figures.plot import Axis, Look, Plot, Series
from weft.figures.prose import prose
from weft.figures.tables import WIDTH, Table
from weft.progress import Log, bar, log_to_stderr
from weft.storage.files import utf8_size
from weft.text.config import Byte, TrainedConfig
from weft.text.tokenizer import Tokenizer, build_tokenizer

TEXTS = prose(__file__)
LECTURE = "Henry is givin' a lectrue on transformers"  # the sentence under each tokenizer of lecture 3
RARE = 10  # an entry that training has seen less often has hardly been learned
SECTIONS_AT_ONCE = 256  # that are encoded
TIMED_BYTES = 1 << 20  # of text that speed is measured on
REPEATS = 3  # the best of them counts
MAX_LABEL = 16  # characters of a tokenizer's name in a table
MARKERS = "os^Dv*><"  # points differ in these as well as in colour
SPACE = "␣"

Ints = npt.NDArray[np.int64]


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
        return self.name if len(self.name) <= MAX_LABEL else f"…{self.name[1 - MAX_LABEL :]}"


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
        trained, held_out = byte_size(self.training), byte_size(self.measures[0].bytes)
        return TEXTS["tokenizers"].format(trained=trained, source=self.source, held_out=held_out)

    def charts(self) -> Sequence[Plot]:
        looks = [Look(f"c{n % 4}", MARKERS[n % len(MARKERS)], width=0) for n in range(len(self.measures))]
        series = [
            Series(each.label, [(each.entries, each.bytes_per_token)], look)
            for each, look in zip(self.measures, looks, strict=True)
        ]
        x = Axis("vocabulary size", log=True, named=lambda tick: f"{tick:,.0f}", pad=0.12)
        y = Axis("bytes per token, held-out text", holds=(0.0,), pad=0.12)
        return [Plot("Bytes per token by vocabulary size", series, x, y, size=(480, 330))]

    def tables(self) -> Sequence[Table]:
        first, lengths, speeds = self.measures[0], [], []
        for each in self.measures:
            sizes = (f"{each.bytes_per_token:.3f}", f"{each.tokens_per_byte:.4f}", f"{each.tokens_per_word:.3f}")
            exact = "yes" if each.exact else "no"
            lengths.append((each.label, f"{each.entries:,}", *sizes, f"{each.unknown_word_share:.2%}", exact))
            shares = (f"{each.used:.1%}", f"{each.rare:.1%}", f"{each.unknown_token_share:.2%}")
            training = "" if each.training_seconds is None else f"{each.training_seconds:.2f} s"
            rates = (each.encode_speed, each.encode_all_cores_speed, each.decode_speed)
            speeds.append((each.label, *shares, training, *(f"{rate:.2f}" for rate in rates)))
        columns = ("tokenizer", "entries", "bytes/token", "tokens/byte", "tokens/word", "unknown", "exact")
        more = ("tokenizer", "used", "rare", "<unk>", "training", "encode", "at once", "decode")
        return [
            Table(columns, lengths, f"Held-out text: {first.bytes:,} bytes, {first.words:,} words", [TEXTS["unknown"]]),
            Table(more, speeds, "Vocabulary and speed", [TEXTS["used"]]),
        ]

    def text(self) -> str:
        lines = [f"“{self.sentence}”"]
        for each in self.measures:
            cut = " ".join(shown(piece) for piece, _ in each.pieces)
            begin = f"{each.label} ({len(each.pieces)}): {cut}"
            lines += textwrap.wrap(begin, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        return "\n\n".join(filter(None, [super().text(), "\n".join(lines)]))

    def record(self) -> dict[str, Any]:
        """The same as values: a record for each tokenizer."""
        return {"tokenizers": [asdict(each) for each in self.measures]}

    def html(self) -> str:
        title = Markup('<h3 class="tok-title">“{}”</h3>').format(self.sentence)
        rows = [(each.name, [(shown(piece), known) for piece, known in each.pieces]) for each in self.measures]
        return Markup("").join([Markup(super().html()), title, *(part("pieces", *row) for row in rows)])


def shown(piece: str) -> str:
    """A token with its spaces visible."""
    return "".join(SPACE if sign == " " else sign if sign.isprintable() else repr(sign)[1:-1] for sign in piece)


def compare_tokenizers(
    specs: Sequence[str], data: TextSource | Sequence[str] | str, *, sentence: str = LECTURE, log: Log = log_to_stderr
) -> TokenizerComparison:
    """What each tokenizer makes of the held-out side of a text, and of a `sentence`.

    A spec is a kind to train, with a vocabulary size if wanted (word, char, byte, bpe:8000, unigram:8000,
    wordpiece:8000, word:10000), or a run, a folder or a file with a finished tokenizer.
    """
    chosen = [(spec, choose(spec)) for spec in specs]
    if not chosen:
        raise ConfigError(f"--tokenizers: name at least one: {ALLOWED}")
    if again := next((spec for spec, count in Counter(specs).items() if count > 1), None):
        raise ConfigError(f"--tokenizers {again}: it is named twice")
    text = data if isinstance(data, TextSource) else TextSource([data] if isinstance(data, str) else list(data))
    if "-" in text.sources:
        raise DataError("-: standard input can be read once, and every tokenizer reads the text; name a file")
    held_out, training = _sides(text, log)
    measures = [_measure(spec, each, text, held_out, sentence) for spec, each in chosen]
    return TokenizerComparison(tuple(measures), sentence, ", ".join(text.sources), training)


def _sides(text: TextSource, log: Log) -> tuple[list[str], int]:
    held_out, training = list[str](), 0
    for section in split_sections(text, log=log):
        if section.side == "validation":
            held_out.append(section.text)
        else:
            training += section.size
    empty = "training" if not training else "held out" if not "".join(held_out).strip() else None
    if empty is not None:
        raise DataError(f"{', '.join(text.sources)}: no text is {empty}, so tokenizers can't be compared; add text")
    return held_out, training


def _measure(
    spec: str, chosen: TrainedConfig | Tokenizer, text: TextSource, held_out: Sequence[str], sentence: str
) -> TokenizerMeasure:
    try:
        seconds, start = None, time.perf_counter()
        if isinstance(chosen, Tokenizer):
            tokenizer = chosen
        else:  # the text is read while it is trained
            tokenizer = build_tokenizer(chosen, () if isinstance(chosen, Byte) else train_texts(text))
            seconds = time.perf_counter() - start
        with bar(f"{spec}: the training text", None):
            trained = np.zeros(tokenizer.vocab_size, dtype=np.int64)
            for some in _groups(train_texts(text)):
                trained += _counts(tokenizer.encode_batch(some), tokenizer.vocab_size)
        encoded = [ids for some in _groups(held_out) for ids in tokenizer.encode_batch(some)]
        pieces = tuple(_pieces(tokenizer, sentence))
    except TokenizerError as error:
        raise TokenizerError(f"{spec}: {error}") from None
    counts = _counts(encoded, tokenizer.vocab_size)
    ordinary = np.ones(tokenizer.vocab_size, dtype=bool)
    ordinary[list(tokenizer.special_tokens.values())] = False
    words = Counter(word for each in held_out for word in each.split())
    single, together, decoding = _speeds(tokenizer, held_out)
    return TokenizerMeasure(
        name=spec,
        kind=tokenizer.kind,
        entries=tokenizer.vocab_size,
        bytes=sum(map(utf8_size, held_out)),
        words=words.total(),
        tokens=int(counts.sum()),
        unknown_tokens=0 if tokenizer.unk_id is None else int(counts[tokenizer.unk_id]),
        unknown_words=_unknown_words(tokenizer, words),
        used=float((counts[ordinary] > 0).mean()),
        rare=float((trained[ordinary] < RARE).mean()),
        exact=all(tokenizer.decode(ids) == each for ids, each in zip(encoded, held_out, strict=True)),
        training_seconds=seconds,
        encode_speed=single,
        encode_all_cores_speed=together,
        decode_speed=decoding,
        pieces=pieces,
    )


def _counts(encoded: Iterable[Sequence[int]], entries: int) -> Ints:
    """How often each of the vocabulary's entries (entries,) occurs in some texts."""
    return np.bincount(np.fromiter(chain.from_iterable(encoded), dtype=np.int64), minlength=entries)


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(texts)
    while some := list(islice(rest, SECTIONS_AT_ONCE)):
        yield some


def _unknown_words(tokenizer: Tokenizer, words: Counter[str]) -> int:
    """Words, between white space, of which a part at least is unknown; each stands in a text, after a space."""
    if tokenizer.unk_id is None:
        return 0
    distinct = list(words)
    found = tokenizer.encode_batch([f" {word}" for word in distinct])
    return sum(words[word] for word, ids in zip(distinct, found, strict=True) if tokenizer.unk_id in ids)


def _speeds(tokenizer: Tokenizer, held_out: Sequence[str]) -> tuple[float, float, float]:
    """Megabytes of text a second: encoded one after another, encoded all at once, on all cores, and decoded."""
    before = accumulate(map(utf8_size, held_out), initial=0)  # the bytes before each section
    some = [each for each, size in zip(held_out, before, strict=False) if size < TIMED_BYTES]
    size, encoded = sum(map(utf8_size, some)), tokenizer.encode_batch(some)
    single = _best(lambda: [tokenizer.encode(each) for each in some])
    together = _best(lambda: tokenizer.encode_batch(some))
    decoding = _best(lambda: [tokenizer.decode(ids) for ids in encoded])
    return size / single / 1e6, size / together / 1e6, size / decoding / 1e6


def _best(work: Callable[[], object]) -> float:
    """The seconds of the fastest of a few times: others are slower for reasons that have nothing to do with it."""
    return max(min(timeit.repeat(work, number=1, repeat=REPEATS)), 1e-9)


def _pieces(tokenizer: Tokenizer, sentence: str) -> Iterator[tuple[str, bool]]:
    """The tokens of a sentence as a reader would write them, and whether each is known. Whole words and BERT's pieces
    are shown as the vocabulary has them, all others as the text they add."""
    for id in tokenizer.encode(sentence):
        if id == tokenizer.unk_id or tokenizer.kind in ("word", "wordpiece"):
            yield tokenizer.token(id), id != tokenizer.unk_id
            continue
        spelled = tokenizer.token_bytes(id)
        try:
            yield spelled.decode(), True
        except UnicodeDecodeError:  # a part of a character
            yield "".join(f"<0x{byte:02X}>" for byte in spelled), True
