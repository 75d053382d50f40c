"""Compare tokenizers on one text: sequence length, use of the vocabulary, unknown words, and speed.

Each is trained on the training text only and measured on the held-out text. No model is involved: which tokenizer a
model predicts text best with is a question of bits per byte at equal compute.
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

from weft.compare.config import TOKENIZER_SPECS, parse_tokenizer
from weft.costs.units import byte_size
from weft.data.config import TextSource
from weft.data.split import split_sections, train_texts
from weft.errors import ConfigError, DataError, TokenizerError
from weft.figures.charts import Charts
from weft.figures.page import part
from weft.figures.plot import Axis, Look, Plot, Series
from weft.figures.prose import prose
from weft.figures.tables import WIDTH, Table
from weft.progress import Log, log_to_stderr
from weft.storage.files import utf8_size
from weft.text.config import Byte, TrainedConfig
from weft.text.tokenizer import Tokenizer, build_tokenizer

TEXTS = prose(__file__)
LECTURE = "Henry is givin' a lectrue on transformers"  # the example sentence of lecture 3
RARE = 10  # entries that occur less often in the training text count as rare
ENCODED_SECTIONS = 256  # sections of text encoded in one call
TIMED_BYTES = 1 << 20  # amount of text that speed is measured on
REPEATS = 3  # repetitions of a timing, of which the fastest counts
MAX_LABEL = 16  # characters of a tokenizer's name in a table
MARKERS = "os^Dv*><"  # markers that distinguish points besides their colour
SPACE = "␣"

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenizerMeasure:
    """Measurements of a tokenizer on held-out text."""

    name: str
    kind: str
    entries: int
    bytes: int
    words: int  # separated by white space
    tokens: int
    unknown_tokens: int
    unknown_words: int
    used: float  # share of the vocabulary, without special tokens, that occurs there
    rare: float  # share that occurs fewer than ten times in the training text
    exact: bool  # decoding restores the held-out text
    training_seconds: float | None
    encode_speed: float  # in megabytes of text per second
    encode_all_cores_speed: float
    decode_speed: float
    pieces: tuple[tuple[str, bool], ...]  # the example sentence's tokens, and whether each is known

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / max(1, self.tokens)

    @property
    def label(self) -> str:
        """The name, truncated if it is too long for a table."""
        return self.name if len(self.name) <= MAX_LABEL else f"…{self.name[1 - MAX_LABEL :]}"


@dataclass(frozen=True)
class TokenizerComparison(Charts):
    """Tokenizers, trained on `training` bytes of the text `source` and measured on its held-out part."""

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
        pairs = zip(self.measures, looks, strict=True)
        series = [Series(each.label, [(each.entries, each.bytes_per_token)], look) for each, look in pairs]
        x = Axis("vocabulary size", log=True, format="count", pad=0.12)
        y = Axis("bytes per token, held-out text", includes=(0.0,), pad=0.12)
        return [Plot("Bytes per token by vocabulary size", series, x, y, size=(480, 330))]

    def tables(self) -> Sequence[Table]:
        first, lengths, speeds = self.measures[0], [], []
        for m in self.measures:
            per_word = max(1, m.words)  # tokens per word: fertility (Rust et al. 2021)
            sizes = (f"{m.bytes_per_token:.3f}", f"{m.tokens / max(1, m.bytes):.4f}", f"{m.tokens / per_word:.3f}")
            unknown, exact = f"{m.unknown_words / per_word:.2%}", "yes" if m.exact else "no"
            lengths.append((m.label, f"{m.entries:,}", *sizes, unknown, exact))
            shares = (f"{m.used:.1%}", f"{m.rare:.1%}", f"{m.unknown_tokens / max(1, m.tokens):.2%}")
            training = "" if m.training_seconds is None else f"{m.training_seconds:.2f} s"
            rates = (m.encode_speed, m.encode_all_cores_speed, m.decode_speed)
            speeds.append((m.label, *shares, training, *(f"{rate:.2f}" for rate in rates)))
        columns = ("tokenizer", "entries", "bytes/token", "tokens/byte", "tokens/word", "unknown", "exact")
        more = ("tokenizer", "used", "rare", "<unk>", "training", "encode", "batched", "decode")
        title = f"Held-out text: {first.bytes:,} bytes, {first.words:,} words"
        held_out = Table(columns, lengths, title, [TEXTS["unknown"]])
        return [held_out, Table(more, speeds, "Vocabulary and speed", [TEXTS["used"]])]

    def text(self) -> str:
        lines = [f"“{self.sentence}”"]
        for measure in self.measures:
            line = f"{measure.label} ({len(measure.pieces)}): {' '.join(visible(piece) for piece, _ in measure.pieces)}"
            lines += textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        return "\n\n".join(filter(None, [super().text(), "\n".join(lines)]))

    def record(self) -> dict[str, Any]:
        """Return a record for each tokenizer."""
        return {"tokenizers": [asdict(measure) for measure in self.measures]}

    def html(self) -> str:
        title = Markup('<h3 class="tok-title">“{}”</h3>').format(self.sentence)
        rows = [(m.name, [(visible(piece), known) for piece, known in m.pieces]) for m in self.measures]
        return Markup("").join([Markup(super().html()), title, *(part("pieces", *row) for row in rows)])


def visible(piece: str) -> str:
    """Make the spaces and control characters of a token visible."""
    return "".join(SPACE if char == " " else char if char.isprintable() else repr(char)[1:-1] for char in piece)


def compare_tokenizers(
    specs: Sequence[str], data: TextSource | Sequence[str] | str, *, sentence: str = LECTURE, log: Log = log_to_stderr
) -> TokenizerComparison:
    """Measure tokenizers on the held-out part of a text, and show their tokens of a `sentence`.

    A spec is a kind to train, optionally with a vocabulary size (word, char, byte, bpe:8000, unigram:8000,
    wordpiece:8000, word:10000), or a run, a folder or a file with a trained tokenizer.
    """
    parsed = [(spec, parse_tokenizer(spec)) for spec in specs]
    if not parsed:
        raise ConfigError(f"--tokenizers: name at least one: {TOKENIZER_SPECS}")
    if repeated := next((spec for spec, count in Counter(specs).items() if count > 1), None):
        raise ConfigError(f"--tokenizers {repeated}: named twice")
    text = data if isinstance(data, TextSource) else TextSource([data] if isinstance(data, str) else list(data))
    if "-" in text.sources:
        raise DataError("-: every tokenizer reads the text, but standard input can be read only once; name a file")
    held_out, training = _split(text, log)
    measures = [_measure(spec, tokenizer, text, held_out=held_out, sentence=sentence) for spec, tokenizer in parsed]
    return TokenizerComparison(tuple(measures), sentence, ", ".join(text.sources), training=training)


def _split(text: TextSource, log: Log) -> tuple[list[str], int]:
    """Return the held-out sections, and the size of the training text in bytes."""
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
    spec: str, parsed: TrainedConfig | Tokenizer, text: TextSource, *, held_out: Sequence[str], sentence: str
) -> TokenizerMeasure:
    try:
        seconds, start = None, time.perf_counter()
        if isinstance(parsed, Tokenizer):
            tokenizer = parsed
        else:
            tokenizer = build_tokenizer(parsed, () if isinstance(parsed, Byte) else train_texts(text))
            seconds = time.perf_counter() - start  # including the time to read the text
        trained = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        for batch in _batches(train_texts(text)):
            trained += _counts(tokenizer.encode_batch(batch), tokenizer.vocab_size)
        encoded = [ids for batch in _batches(held_out) for ids in tokenizer.encode_batch(batch)]
        pieces = tuple(_pieces(tokenizer, sentence))
    except TokenizerError as error:
        raise TokenizerError(f"{spec}: {error}") from None
    counts = _counts(encoded, tokenizer.vocab_size)
    ordinary = np.ones(tokenizer.vocab_size, dtype=bool)
    ordinary[list(tokenizer.special_tokens.values())] = False
    words = Counter(word for section in held_out for word in section.split())
    sizes = {"bytes": sum(map(utf8_size, held_out)), "words": words.total(), "tokens": int(counts.sum())}
    return TokenizerMeasure(
        name=spec,
        kind=tokenizer.kind,
        entries=tokenizer.vocab_size,
        **sizes,
        unknown_tokens=0 if tokenizer.unk_id is None else int(counts[tokenizer.unk_id]),
        unknown_words=_unknown_words(tokenizer, words),
        used=float((counts[ordinary] > 0).mean()),
        rare=float((trained[ordinary] < RARE).mean()),
        exact=all(tokenizer.decode(ids) == section for ids, section in zip(encoded, held_out, strict=True)),
        training_seconds=seconds,
        pieces=pieces,
        **_speeds(tokenizer, held_out),
    )


def _counts(encoded: Iterable[Sequence[int]], entries: int) -> Ints:
    """Count the occurrences of each entry of the vocabulary, (entries,)."""
    return np.bincount(np.fromiter(chain.from_iterable(encoded), dtype=np.int64), minlength=entries)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(texts)
    while batch := list(islice(remaining, ENCODED_SECTIONS)):
        yield batch


def _unknown_words(tokenizer: Tokenizer, words: Counter[str]) -> int:
    """Count the words that are unknown in whole or in part; each is encoded after a space, as inside a text."""
    if tokenizer.unk_id is None:
        return 0
    distinct = list(words)
    encoded = tokenizer.encode_batch([f" {word}" for word in distinct])
    return sum(words[word] for word, ids in zip(distinct, encoded, strict=True) if tokenizer.unk_id in ids)


def _speeds(tokenizer: Tokenizer, held_out: Sequence[str]) -> dict[str, Any]:
    """Return MB/s of encoding one text at a time, of encoding in a batch on all cores, and of decoding."""
    before = accumulate(map(utf8_size, held_out), initial=0)  # bytes before each section
    texts = [section for section, size in zip(held_out, before, strict=False) if size < TIMED_BYTES]
    size, encoded = sum(map(utf8_size, texts)), tokenizer.encode_batch(texts)
    timed: dict[str, Callable[[], object]] = {
        "encode_speed": lambda: [tokenizer.encode(text) for text in texts],
        "encode_all_cores_speed": lambda: tokenizer.encode_batch(texts),
        "decode_speed": lambda: [tokenizer.decode(ids) for ids in encoded],
    }
    # the fastest of several calls counts: slower ones were disturbed by other work
    fastest = {key: min(timeit.repeat(call, number=1, repeat=REPEATS)) for key, call in timed.items()}
    return {key: size / max(seconds, 1e-9) / 1e6 for key, seconds in fastest.items()}


def _pieces(tokenizer: Tokenizer, sentence: str) -> Iterator[tuple[str, bool]]:
    """Yield the tokens of a sentence as readable text, and whether each is known. Words and WordPieces are shown as in
    the vocabulary, all others as the text they add."""
    for id in tokenizer.encode(sentence):
        if id == tokenizer.unk_id or tokenizer.kind in ("word", "wordpiece"):
            yield tokenizer.token(id), id != tokenizer.unk_id
            continue
        spelling = tokenizer.token_bytes(id)
        try:
            yield spelling.decode(), True
        except UnicodeDecodeError:  # part of a character
            yield "".join(f"<0x{byte:02X}>" for byte in spelling), True
